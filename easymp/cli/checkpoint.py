"""Look at checkpoints, check them, and put them in another form. PLACE is a folder or a URL.

examples:
  easymp checkpoint list runs/digits                   which there are, and which is the newest
  easymp checkpoint inspect runs/digits/step-00000100  what is in one
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
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from .. import checkpoint
from ..base.units import size
from ..errors import CheckpointError
from .terminal import plain, table

FEW = 3  # names in a sentence before the rest is counted


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, words: str, *places: str) -> argparse.ArgumentParser:
        made = actions.add_parser(
            name, help=words, description=f"{words[0].upper()}{words[1:]}.", allow_abbrev=False
        )
        for place in places:
            made.add_argument(place, metavar=place.upper())
        made.add_argument("--json", action="store_true", help="for programs")
        return made

    action("list", "which checkpoints lie in a folder, and why others do not count", "place")
    made = action("inspect", "what a checkpoint holds: the plan, tensors by groups, states", "place")
    made.add_argument("--tensors", action="store_true", help="each tensor, too")
    action(
        "verify",
        "check every byte of a checkpoint against its checksum, and headers against the manifest",
        "place",
    )
    action("diff", "which tensors, values and states of two checkpoints differ", "one", "other")
    made = action(
        "merge",
        "whole tensors from a sharded checkpoint, as Hugging Face's tools read weights",
        "place",
        "out",
    )
    made.add_argument(
        "--all",
        action="store_true",
        help="all of the checkpoint, for load_state, in place of the weights alone",
    )
    made.add_argument(
        "--model", default="model", metavar="NAME", help="whose weights, where there are several (model)"
    )
    made.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (5GB)")
    made = action(
        "convert",
        "weights of any kind that is read here, as safetensors, in another precision if asked",
        "place",
        "out",
    )
    made.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16", "fp64"), help="of floating-point tensors (as they are)"
    )
    made.add_argument(
        "--model", default="model", metavar="NAME", help="whose weights, of a checkpoint of ours (model)"
    )
    made.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (5GB)")
    made.add_argument(
        "--trust",
        action="store_true",
        help="read files of torch.save (.bin, .pt), too; nothing in them is run",
    )
    made = action("prune", "remove older checkpoints, and what dead writers left", "place")
    made.add_argument(
        "--keep", type=int, required=True, metavar="N", help="the last N of the current line stay"
    )
    made.add_argument("--abandoned", action="store_true", help="remove the last one of each other line, too")
    made.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")


def run(args: argparse.Namespace) -> int:
    try:
        return ACTIONS[args.action](args)
    except BrokenPipeError:  # an OSError, and no error of a checkpoint's
        raise
    except OSError as error:
        raise CheckpointError(str(error)) from error


def run_list(args: argparse.Namespace) -> int:
    found = checkpoint.list_checkpoints(args.place)
    if not found and "://" not in args.place and not os.path.isdir(args.place):
        raise CheckpointError(
            f"{args.place}: there is no such folder: pass the folder that holds checkpoints"
        )
    if args.json:
        return tell([dataclasses.asdict(entry) for entry in found])
    if not found:
        print(f"no checkpoint in {args.place}")
        return 0
    rows = [["name", "step", "written", "size", "ranks", "line", "continues", ""]]
    for e in found:
        state = e.why or ("newest" if e.newest else "not on the current line" if e.abandoned else "")
        when = f"{e.written[:19]}+00:00" if e.written else ""
        rows.append(
            [
                e.name,
                known(e.step),
                when,
                size(e.size),
                known(e.world_size),
                known(e.line),
                plain(e.parent),
                state,
            ]
        )
    print(table(rows, right={1, 3, 4}))
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    it = checkpoint.inspect(args.place)
    if args.json:
        return tell(dataclasses.asdict(it))
    facts = [
        ("step", it.step),
        ("written", it.written),
        ("by", f"{it.made_by}, {it.world_size} rank(s)"),
        ("line", f"{it.line}, {f'continues {plain(it.parent)}' if it.parent else 'from its beginning'}"),
        ("size", size(it.size)),
    ]
    print(table([[name, str(value)] for name, value in facts]))
    choices = [
        [n, str(c["value"]), str(c.get("reason", ""))]
        for n, c in it.plan.items()
        if isinstance(c, dict) and "value" in c
    ]
    if choices:
        print(f"\nplan\n{table(choices)}")
    rows = [["group", "tensors", "elements", "size", "dtypes", "files"]]
    for g in it.groups:
        dtypes = ", ".join(f"{name} {size(count)}" for name, count in g.dtypes.items())
        rows.append([g.name, str(g.tensors), f"{g.elements:,}", size(g.size), dtypes, few(g.files)])
    print(f"\n{table(rows, right={1, 2, 3})}")
    if args.tensors:
        rows = [["tensor", "dtype", "shape", "size", "pieces"]]
        rows += [[t.name, t.dtype, str(list(t.shape)), size(t.size), str(t.pieces)] for t in it.tensors]
        rows += [[name, "", f"= {of}", "", ""] for name, of in it.aliases.items()]
        print(f"\n{table(rows, right={3, 4})}")
    print(f"\nstates: {', '.join(map(plain, it.states)) or 'none'}")
    if it.extra:
        print(f"files of hooks: {few([plain(name) for name in it.extra])}")
    if it.aliases and not args.tensors:
        print(f"tied: {few([f'{name} = {of}' for name, of in it.aliases.items()])}")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    with checkpoint.Progress(f"verifying {args.place}", "read") as tick:
        damages = checkpoint.verify(args.place, tick)
    if args.json:
        tell([dataclasses.asdict(damage) for damage in damages])
        return int(bool(damages))
    for d in damages:
        where = d.file if d.block is None else f"{d.file}, block {d.block},"
        print(f"{where} {d.why}: {f'it holds {few(d.tensors)}' if d.tensors else 'no tensor lies there'}")
    print(
        f"{args.place}: {f'{len(damages)} fault(s); load another checkpoint' if damages else 'good, every byte'}"
    )
    return int(bool(damages))


def run_diff(args: argparse.Namespace) -> int:
    with checkpoint.Progress("comparing", "read") as tick:
        found = checkpoint.diff(args.one, args.other, tick)
    if args.json:
        tell({**dataclasses.asdict(found), "same": found.same})
        return int(not found.same)
    for name in found.missing:
        print(f"- {plain(name)}")
    for name in found.added:
        print(f"+ {plain(name)}")
    rows = [[u.path, u.one, u.other] for u in (*found.kinds, *found.states)]
    rows += [
        [v.name, f"{v.count:,} of {v.of:,} elements", f"by {known(v.largest) or 'infinity, or NaN'}"]
        for v in found.values
    ]
    if rows:
        print(table(rows))
    print(
        f"{found.equal} tensor(s) equal, bit for bit; {len(found.values) + len(found.kinds)} not{', nothing differs' * found.same}"
    )
    return int(not found.same)


def run_merge(args: argparse.Namespace) -> int:
    with checkpoint.Progress(f"merging {args.place}", "read") as tick:
        checkpoint.merge(args.place, args.out, args.max_shard_size, args.all, args.model, tick)
    return told(args)


def run_convert(args: argparse.Namespace) -> int:
    with checkpoint.Progress(f"converting {args.place}", "read") as tick:
        checkpoint.convert(
            args.place, args.out, args.dtype, args.max_shard_size, args.model, args.trust, tick
        )
    return told(args)


def run_prune(args: argparse.Namespace) -> int:
    found = checkpoint.prune(args.place, args.keep, args.dry_run, args.abandoned)
    if args.json:
        return tell(dataclasses.asdict(found))
    would = "would be removed" if args.dry_run else "removed"
    rows = [[name, would] for name in found.removed] + [
        [name, f"{would}, left over"] for name in found.left_over
    ]
    rows += [[name, "untouched, being written"] for name in found.busy] + [
        [name, "kept"] for name in found.kept
    ]
    if rows:
        print(table(rows))
    print(f"{size(found.size)} {would}")
    return 0


ACTIONS = {
    "list": run_list,
    "inspect": run_inspect,
    "verify": run_verify,
    "diff": run_diff,
    "merge": run_merge,
    "convert": run_convert,
    "prune": run_prune,
}


def told(args: argparse.Namespace) -> int:
    """Say where the result lies."""
    if args.json:
        return tell({"out": args.out})
    print(f"wrote {args.out}")
    return 0


def tell(value: Any) -> int:
    json.dump(value, sys.stdout, indent=2)
    print()
    return 0


def known(value: object) -> str:
    return "" if value is None else str(value)


def few(names: Sequence[str]) -> str:
    more = len(names) - FEW
    return ", ".join(map(plain, names[:FEW])) + (f" and {more} more" if more > 0 else "")
