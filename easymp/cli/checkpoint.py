"""Show, check and convert checkpoints. PLACE is a folder or a URL.

examples:
  easymp checkpoint list runs/digits                   which there are, and which is the newest
  easymp checkpoint inspect runs/digits/step-00000100  the contents of one
  easymp checkpoint verify runs/digits/step-00000100   every byte against its checksum
  easymp checkpoint diff before after                  tensors and states that differ
  easymp checkpoint merge sharded weights              one model.safetensors, or shards with an index
  easymp checkpoint merge --all sharded whole          a checkpoint again, with whole tensors
  easymp checkpoint convert --dtype bf16 weights half  safetensors in another precision, from any weights
  easymp checkpoint prune --keep 3 runs/digits         the last three stay

`easymp checkpoint ACTION --help` says more about one. Exit codes: 0 good; 1 damaged, different, or an error; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from .. import checkpoint
from ..base.units import size
from ..errors import CheckpointError
from .terminal import plain, print_json, table

FEW = 3  # names in a sentence before the rest is counted


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, words: str, *places: str) -> Any:
        text = f"{words[0].upper()}{words[1:]}."
        made = actions.add_parser(name, help=words, description=text, allow_abbrev=False)
        for place in places:
            made.add_argument(place, metavar=place.upper())
        made.add_argument("--json", action="store_true", help="for programs")
        return made.add_argument

    action("list", "list the checkpoints in a folder, and why others do not count", "place")
    add = action("inspect", "show what a checkpoint holds: the plan, tensors by groups, states", "place")
    add("--tensors", action="store_true", help="each tensor, too")
    action("verify", "check every byte of a checkpoint against its checksum", "place")
    action("diff", "show the tensors, values and states that differ in two checkpoints", "one", "other")
    add = action(
        "merge", "write whole tensors from a sharded checkpoint, as Hugging Face reads them", "place", "out"
    )
    add("--all", action="store_true", help="the whole checkpoint, for load_state, and not the weights alone")
    add("--model", default="model", metavar="NAME", help="which weights, where there are several (model)")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (5GB)")
    add = action("convert", "write weights as safetensors, in another precision if asked", "place", "out")
    add("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), help="of floating-point tensors (as they are)")
    add("--model", default="model", metavar="NAME", help="which weights of a checkpoint (model)")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (5GB)")
    add("--trust", action="store_true", help="also files of torch.save (.bin, .pt); no code in them is run")
    add = action("prune", "remove older checkpoints, and leftovers of writers that died", "place")
    add("--keep", type=int, required=True, metavar="N", help="the last N of the current line stay")
    add("--abandoned", action="store_true", help="remove the last one of each other line, too")
    add("--dry-run", action="store_true", help="list them, and remove nothing")


Answer = tuple[Any, Sequence[str], int]  # for programs, lines for people, and the exit code


def run(args: argparse.Namespace) -> int:
    try:
        record, lines, code = ACTIONS[args.action](args)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CheckpointError(str(error)) from error
    if args.json:
        print_json(record)
    elif lines:
        print("\n".join(lines))
    return code


def run_list(args: argparse.Namespace) -> Answer:
    found = checkpoint.list_checkpoints(args.place)
    if not found and "://" not in args.place and not os.path.isdir(args.place):
        said = "there is no such folder: pass the folder that holds checkpoints"
        raise CheckpointError(f"{args.place}: {said}")
    record = [dataclasses.asdict(entry) for entry in found]
    rows = [["name", "step", "written", "size", "ranks", "line", "continues", ""]]
    for e in found:
        state = e.why or ("newest" if e.newest else "not on the current line" if e.abandoned else "")
        when = f"{e.written[:19]}+00:00" if e.written else ""
        rows.append([e.name, e.step, when, size(e.size), e.world_size, e.line, e.parent, state])
    return record, [table(rows, right={1, 3, 4}) if found else f"no checkpoint in {args.place}"], 0


def run_inspect(args: argparse.Namespace) -> Answer:
    it = checkpoint.inspect(args.place)
    line = f"{it.line}, {f'continues {it.parent}' if it.parent else 'from its beginning'}"
    facts = {"step": it.step, "written": it.written, "by": f"{it.made_by}, {it.world_size} rank(s)"}
    said = [table(list({**facts, "line": line, "size": size(it.size)}.items())), ""]
    plan = {name: c for name, c in it.plan.items() if isinstance(c, dict) and "value" in c}
    if plan:
        said += ["plan", table([[name, c["value"], c.get("reason")] for name, c in plan.items()]), ""]
    rows = [["group", "tensors", "elements", "size", "dtypes", "files"]]
    for g in it.groups:
        dtypes = ", ".join(f"{name} {size(count)}" for name, count in g.dtypes.items())
        rows.append([g.name, g.tensors, f"{g.elements:,}", size(g.size), dtypes, few(g.files)])
    said += [table(rows, right={1, 2, 3}), ""]
    if args.tensors:
        rows = [["tensor", "dtype", "shape", "size", "pieces"]]
        rows += [[t.name, t.dtype, list(t.shape), size(t.size), t.pieces] for t in it.tensors]
        rows += [[name, "", f"= {of}", "", ""] for name, of in it.aliases.items()]
        said += [table(rows, right={3, 4}), ""]
    said += [f"states: {', '.join(map(plain, it.states)) or 'none'}"]
    said += [f"files of hooks: {few(it.extra)}"] * bool(it.extra)
    if it.aliases and not args.tensors:
        said += [f"tied: {few([f'{name} = {of}' for name, of in it.aliases.items()])}"]
    return dataclasses.asdict(it), said, 0


def run_verify(args: argparse.Namespace) -> Answer:
    with checkpoint.Progress(f"verifying {args.place}", "read") as tick:
        damages = checkpoint.verify(args.place, tick)
    said = []
    for d in damages:
        where = d.file if d.block is None else f"{d.file}, block {d.block},"
        said += [f"{where} {d.why}: {f'it holds {few(d.tensors)}' if d.tensors else 'no tensor lies there'}"]
    verdict = f"{len(damages)} fault(s); load another checkpoint" if damages else "good, every byte"
    record = [dataclasses.asdict(damage) for damage in damages]
    return record, [*said, f"{args.place}: {verdict}"], int(bool(damages))


def run_diff(args: argparse.Namespace) -> Answer:
    with checkpoint.Progress("comparing", "read") as tick:
        found = checkpoint.diff(args.one, args.other, tick)
    said = [f"- {plain(name)}" for name in found.missing] + [f"+ {plain(name)}" for name in found.added]
    rows: list[Sequence[Any]] = [[u.path, u.one, u.other] for u in (*found.kinds, *found.states)]
    for v in found.values:
        by = "infinity, or NaN" if v.largest is None else v.largest
        rows.append([v.name, f"{v.count:,} of {v.of:,} elements", f"by {by}"])
    different = len(found.values) + len(found.kinds)
    nothing = ", nothing differs" if found.same else ""
    verdict = f"{found.equal} tensor(s) equal, bit for bit; {different} not{nothing}"
    record = {**dataclasses.asdict(found), "same": found.same}
    return record, [*said, *[table(rows)] * bool(rows), verdict], int(not found.same)


def run_merge(args: argparse.Namespace) -> Answer:
    with checkpoint.Progress(f"merging {args.place}", "read") as tick:
        checkpoint.merge(args.place, args.out, args.max_shard_size, args.all, args.model, tick)
    return {"out": args.out}, [f"wrote {args.out}"], 0


def run_convert(args: argparse.Namespace) -> Answer:
    limits = args.dtype, args.max_shard_size, args.model, args.trust
    with checkpoint.Progress(f"converting {args.place}", "read") as tick:
        checkpoint.convert(args.place, args.out, *limits, tick)
    return {"out": args.out}, [f"wrote {args.out}"], 0


def run_prune(args: argparse.Namespace) -> Answer:
    found = checkpoint.prune(args.place, args.keep, args.dry_run, args.abandoned)
    would = "would be removed" if args.dry_run else "removed"
    groups = {
        would: found.removed,
        f"{would}, left over": found.left_over,
        "untouched, being written": found.busy,
        "kept": found.kept,
    }
    rows = [[name, state] for state, names in groups.items() for name in names]
    return dataclasses.asdict(found), [*[table(rows)] * bool(rows), f"{size(found.size)} {would}"], 0


def few(names: Sequence[str]) -> str:
    more = len(names) - FEW
    return ", ".join(map(plain, names[:FEW])) + (f" and {more} more" if more > 0 else "")


_runs = (run_list, run_inspect, run_verify, run_diff, run_merge, run_convert, run_prune)
ACTIONS = {run.__name__.removeprefix("run_"): run for run in _runs}
