"""Show, check and convert checkpoints. PATH is a folder or a URL: of a checkpoint, or of a run, which means its newest.

examples:
  easymp checkpoint list runs/digits                   which there are, below checkpoints/ too, and which is the newest
  easymp checkpoint inspect runs/digits                the contents of the newest
  easymp checkpoint verify runs/digits/step-00000100   every byte of one against its checksum
  easymp checkpoint convert runs/digits weights        one model.safetensors, or shards with an index
  easymp checkpoint convert --dtype bf16 weights half  safetensors in another precision, from any weights
  easymp checkpoint prune --keep 3 runs/digits         the last three stay

`easymp checkpoint ACTION --help` tells more about one. Exit codes: 0 good; 1 damaged, or another error; 2
wrong usage, such as a path that does not exist or holds no checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..base.units import size
from ..errors import CheckpointError, SettingError, join_some, redact
from .terminal import plain, print_json, table

Answer = tuple[Any, Sequence[str], int]  # for programs, lines for people, and the exit code


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, run: Callable[[argparse.Namespace], Answer], summary: str, *paths: str) -> Any:
        description = f"{summary[0].upper()}{summary[1:]}."
        former_names = ["merge"] if name == "convert" else []
        subparser = actions.add_parser(
            name, help=summary, description=description, allow_abbrev=False, aliases=former_names
        )
        subparser.set_defaults(run=run)
        for path in paths:
            subparser.add_argument(path, metavar=path.upper())
        subparser.add_argument("--json", action="store_true", help="for programs")
        return subparser.add_argument

    action("list", run_list, "list the checkpoints in a folder, and why others do not count", "path")
    add = action("inspect", run_inspect, "show what a checkpoint holds: the plan, tensors by groups, states", "path")
    add("--tensors", action="store_true", help="each tensor, too")
    action("verify", run_verify, "check every byte of a checkpoint against its checksum", "path")
    convert_help = "write weights as Hugging Face reads them, whole, and in another precision if asked"
    add = action("convert", run_convert, convert_help, "path", "out")
    add("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), help="of floating-point tensors (as they are)")
    add("--trust", action="store_true", help="also files of torch.save (.bin, .pt); no code in them is run")
    add("--model", default="model", metavar="NAME", help="which weights of a checkpoint (model)")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (5GB)")
    add("--force", action="store_true", help="replace what is at OUT without asking")
    add = action("prune", run_prune, "remove older checkpoints, and leftovers of writers that died", "path")
    add("--keep", type=int, required=True, metavar="N", help="the last N of the current line stay")
    add("--abandoned", action="store_true", help="remove the last one of each other line, too")
    add("--dry-run", action="store_true", help="list them, and remove nothing")


def reworded(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Refuse a former action."""
    if arguments[:1] == ["diff"]:
        parser.error("diff is no longer an action: `easymp prove --against` compares two runs")
    return arguments


def run(args: argparse.Namespace) -> int:
    if "://" not in args.path and not os.path.exists(args.path):
        raise SettingError(f"{args.path}: there is no such file or folder")
    try:
        answer: Answer = args.run(args)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CheckpointError(str(error)) from error
    record, lines, code = answer
    if args.json:
        print_json(record)
    elif lines:
        print(redact("\n".join(lines)))
    return code


def root_of(path: str) -> str:
    """The folder that holds checkpoints: `path`, or ``checkpoints`` in it."""
    inner = f"{path.rstrip('/')}/checkpoints"
    return path if checkpoint.list_checkpoints(path) or not checkpoint.list_checkpoints(inner) else inner


def checkpoint_at(path: str) -> str:
    """`path`, or the newest checkpoint of the run's folder `path`."""
    if "://" not in path and not os.path.isdir(path):
        return path
    try:
        root = root_of(path)
    except CheckpointError:  # it is a checkpoint itself
        return path
    newest = next((entry.name for entry in checkpoint.list_checkpoints(root) if entry.newest), None)
    return path if newest is None else f"{root.rstrip('/')}/{newest}"


def run_list(args: argparse.Namespace) -> Answer:
    entries = checkpoint.list_checkpoints(root_of(args.path))
    record = [dataclasses.asdict(entry) for entry in entries]
    rows: list[list[Any]] = [["name", "step", "written", "size", "ranks", "line", "continues", ""]]
    for e in entries:
        state = e.why or ("newest" if e.newest else "not on the current line" if e.abandoned else "")
        date = f"{e.written[:19]}+00:00" if e.written else ""
        rows.append([e.name, e.step, date, size(e.size), e.world_size, e.line, e.parent, state])
    return record, [table(rows, right={1, 3, 4}) if entries else f"no checkpoint in {args.path}"], 0


def run_inspect(args: argparse.Namespace) -> Answer:
    path = checkpoint_at(args.path)
    contents = checkpoint.inspect(path)
    parent = f"continues {contents.parent}" if contents.parent else "from its beginning"
    facts = {
        "checkpoint": path,
        "step": contents.step,
        "written": contents.written,
        "by": f"{contents.made_by}, {contents.world_size} rank(s)",
        "line": f"{contents.line}, {parent}",
        "size": size(contents.size),
    }
    lines = [table(list(facts.items())), ""]
    plan = {name: c for name, c in contents.plan.items() if isinstance(c, dict) and "value" in c}
    if plan:
        lines += ["plan", table([[name, c["value"], c.get("reason")] for name, c in plan.items()]), ""]
    rows: list[list[Any]] = [["group", "tensors", "elements", "size", "dtypes"]]
    for group in dict.fromkeys(t.name.partition("/")[0] for t in contents.tensors):
        tensors = [t for t in contents.tensors if t.name.startswith(f"{group}/")]
        elements, total = sum(prod(t.shape) for t in tensors), sum(t.size for t in tensors)
        dtypes = ", ".join(sorted({t.dtype for t in tensors}))
        rows.append([group, len(tensors), f"{elements:,}", size(total), dtypes])
    lines += [table(rows, right={1, 2, 3}), ""]
    if args.tensors:
        rows = [["tensor", "dtype", "shape", "size", "pieces"]]
        rows += [[t.name, t.dtype, list(t.shape), size(t.size), t.pieces] for t in contents.tensors]
        rows += [[name, "", f"= {target}", "", ""] for name, target in contents.aliases.items()]
        lines += [table(rows, right={3, 4}), ""]
    lines += [f"states: {', '.join(map(plain, contents.states)) or 'none'}"]
    lines += [f"files of hooks: {name_list(contents.extra)}"] if contents.extra else []
    if contents.aliases and not args.tensors:
        lines += [f"tied: {name_list([f'{name} = {target}' for name, target in contents.aliases.items()])}"]
    return dataclasses.asdict(contents), lines, 0


def run_verify(args: argparse.Namespace) -> Answer:
    path = checkpoint_at(args.path)
    with checkpoint.Progress(f"verifying {path}", "read") as tick:
        damages = checkpoint.verify(path, tick)
    lines = []
    for d in damages:
        position = d.file if d.block is None else f"{d.file}, block {d.block},"
        lines += [f"{position} {d.why}: {f'it holds {name_list(d.tensors)}' if d.tensors else 'no tensor lies there'}"]
    verdict = f"{len(damages)} fault(s); load another checkpoint" if damages else "good, every byte"
    record = [dataclasses.asdict(damage) for damage in damages]
    return record, [*lines, f"{path}: {verdict}"], int(bool(damages))


def run_convert(args: argparse.Namespace) -> Answer:
    path = checkpoint_at(args.path)
    confirm(args)
    with checkpoint.Progress(f"converting {path}", "read") as tick:
        checkpoint.convert(path, args.out, args.dtype, args.max_shard_size, args.model, args.trust, tick)
    files = sorted(file for file in Path(args.out).iterdir() if file.is_file()) if os.path.isdir(args.out) else []
    sizes = name_list([f"{file.name} ({size(file.stat().st_size)})" for file in files])
    return {"out": args.out}, [f"wrote {args.out}{': ' if files else ''}{sizes}"], 0


def confirm(args: argparse.Namespace) -> None:
    """Ask before something at OUT is replaced; without a terminal it takes --force."""
    if args.force or not os.path.exists(args.out) or (os.path.isdir(args.out) and not os.listdir(args.out)):
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise SettingError(f"{args.out} is there already: pass another folder, or --force to replace it")
    if input(f"{args.out} is there already. Replace it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise KeyboardInterrupt


def run_prune(args: argparse.Namespace) -> Answer:
    pruned = checkpoint.prune(root_of(args.path), args.keep, args.dry_run, args.abandoned)
    verb = "would be removed" if args.dry_run else "removed"
    groups = {
        verb: pruned.removed,
        f"{verb}, left over": pruned.left_over,
        "untouched, being written": pruned.busy,
        "kept": pruned.kept,
    }
    rows = [[name, state] for state, names in groups.items() for name in names]
    lines = [table(rows)] if rows else []
    return dataclasses.asdict(pruned), [*lines, f"{size(pruned.size)} {verb}"], 0


def name_list(names: Sequence[str]) -> str:
    return join_some([plain(name) for name in names], ", ", limit=3)
