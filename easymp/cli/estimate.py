"""Say how much memory a training needs a rank, by strategy, precision and number of processes, and what fits this machine.

MODEL is a number of parameters; safetensors weights (a file, an index or a folder), of which only headers are read; or module:callable,
which is called without arguments to build the model. Nothing is allocated for it where that can be.

examples:
  easymp estimate 7B                                        a transformer of 7 billion parameters
  easymp estimate 350M --processes 1,8 --memory 80GB        on eight devices of 80 GB elsewhere
  easymp estimate model.safetensors --optimizer sgd         weights, trained by SGD
  easymp estimate train:make_model --input 32x3x224x224     with the activations of a batch
  easymp estimate 7B --strategy fsdp --options '{"cpu_offload": true}'

Not counted: the workspace of kernels, fragmentation, and without --input activations; a fifth of the memory is left to them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import hardware
from ..base.relaxed_json import loads
from ..base.units import read_bytes, size, unit
from ..errors import SettingError, nearest
from ..registry import ALIASES, PRECISIONS, STRATEGIES
from . import estimating
from .estimating import DEFAULT_STRATEGIES
from .terminal import GREEN, RED, paint, table, wrap

if TYPE_CHECKING:
    from ..training.memory import Memory
    from .estimating import Estimates, Row, Sized


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="1.5B, model.safetensors, or module:callable")
    parser.add_argument("--processes", default="1,2,4,8", metavar="N,...", help="how many ranks (1,2,4,8)")
    parser.add_argument(
        "--strategy", default="", metavar="NAME,...", help=f"which ({','.join(DEFAULT_STRATEGIES)})"
    )
    parser.add_argument(
        "--precision", default="", metavar="NAME,...", help="which (fp32, and what auto would take, or bf16)"
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="adamw, sgd, momentum, ... or how many tensors it keeps (adamw)",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="of a rank on another machine, such as 80GB; else this machine's"
    )
    parser.add_argument(
        "--per-node", type=int, metavar="N", help="ranks of a node, for hsdp (this machine's devices, or all)"
    )
    parser.add_argument("--cpu", action="store_true", help="on the CPU, although there is an accelerator")
    parser.add_argument(
        "--dtype", metavar="NAME", help="of parameters: fp32, bf16, fp16 or own (fp32; of a callable: own)"
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE",
        help="an argument of forward, such as 8x3x224x224 or 8x1024:int64; repeatable",
    )
    parser.add_argument(
        "--activation-checkpointing", action="store_true", help="repeated blocks keep their inputs only"
    )
    parser.add_argument("--options", metavar="JSON", help="of the one strategy that is named")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    processes = [_whole(word, "--processes") for word in _words(args.processes)]
    strategies = _names(args.strategy, STRATEGIES, "strategy")
    precisions = _names(args.precision, [*PRECISIONS, *ALIASES], "precision")
    memory = read_bytes(args.memory, "--memory ") if args.memory else None
    options = loads(args.options, "--options") if args.options else None
    sized = estimating.read_model(args.model, args.dtype)
    found = estimating.estimates(
        sized,
        hardware.detect(),
        processes,
        strategies,
        precisions,
        _optimizer(args.optimizer),
        memory,
        args.per_node,
        args.cpu,
        estimating.read_sample(args.input) or None,
        options,
        args.activation_checkpointing,
    )
    if args.json:
        print(json.dumps(_record(sized, found), indent=2))
        return 0
    print(f"{sized.name}: {sized.parameters:,} parameters, {args.optimizer}\n")
    print(_table(found))
    for line in (*found.refused, *found.notes):
        print(wrap(f"- {line}", "  "))
    print()
    print(paint(wrap(found.suggestion), GREEN if found.smallest else RED))
    return 0


def _table(found: Estimates) -> str:
    most = max(max(row.need.total, row.available) for row in found.rows)
    name, scale = unit(most)
    batch = any(row.need.activations for row in found.rows)
    header = [
        "on",
        "strategy",
        "precision",
        "weights",
        "gradients",
        "states",
        "copies",
        *(["activations"] if batch else []),
        "total",
        "spare",
    ]
    rows = [header]
    for row in found.rows:
        sizes = [
            *_columns(row.need).values(),
            *([row.need.activations or 0] if batch else []),
            row.need.total,
        ]
        numbers = [f"{number / scale:,.2f}" if number else "-" for number in sizes]
        rows.append(
            [
                str(row.need.world),
                row.need.strategy,
                row.need.precision,
                *numbers,
                f"{row.spare / scale:+,.2f}",
            ]
        )
    rooms = {row.available for row in found.rows}
    have = f"{size(max(rooms))}" if len(rooms) == 1 else f"{size(max(rooms))}, shared by the processes,"
    legend = (
        f"{name} a rank. weights: with buffers; states: with fp32 masters; copies: low-precision weights, and weights and gradients on "
        f"their way between ranks; spare: of {have} less {estimating.SPARE:.0%} for activations and workspace."
    )
    return f"{table(rows, right={0, *range(3, len(header))})}\n\n{wrap(legend)}"


def _columns(need: Memory) -> dict[str, int]:
    return {
        "weights": need.weights + need.buffers,
        "gradients": need.gradients,
        "states": need.states + need.masters,
        "copies": need.copies + need.gathered + need.reducing,
    }


def _record(sized: Sized, found: Estimates) -> dict[str, Any]:
    def named(row: Row | None) -> dict[str, Any] | None:
        return (
            None
            if row is None
            else {"strategy": row.need.strategy, "processes": row.need.world, "precision": row.need.precision}
        )

    rows = [
        {
            **dataclasses.asdict(r.need),
            "total": r.need.total,
            "available": r.available,
            "fits": r.fits,
            "spare": r.spare,
        }
        for r in found.rows
    ]
    return {
        "model": sized.name,
        "parameters": sized.parameters,
        "rows": rows,
        "refused": found.refused,
        "notes": found.notes,
        "suggested": named(found.suggested),
        "smallest": named(found.smallest),
        "suggestion": found.suggestion,
    }


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _names(text: str, known: Iterable[str], what: str) -> list[str]:
    for name in _words(text):
        if name not in known:
            raise SettingError(f"{what} {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    return _words(text)


def _whole(word: str, what: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise SettingError(f"{what} {word!r} is not a whole number of at least 1")
    return int(word)


def _optimizer(word: str) -> str | int:
    if word.isdecimal():
        return int(word)
    return next(
        (name for name in estimating.STATES if name.endswith(f" {word.lower()}")), word
    )  # "momentum" is SGD's
