"""Estimate the memory that a training needs on each rank, by strategy, precision and number of processes.

MODEL is a number of parameters; safetensors weights (a file, an index or a folder; only headers are read); or module:callable,
which is called without arguments to build the model. Nothing is allocated for it where that is possible.

examples:
  easymp estimate 7B                                        a transformer of 7 billion parameters
  easymp estimate 350M --processes 1,8 --memory 80GB        on eight devices of 80 GB elsewhere
  easymp estimate 70B --for 8x8xH100                        on eight nodes of eight H100
  easymp estimate 7B --for 8xH100 --time 8192               seconds of an update of 8192 tokens a rank
  easymp estimate model.safetensors --optimizer sgd         weights, trained by SGD
  easymp estimate train:make_model --input 32x3x224x224     with the activations of a batch
  easymp estimate 7B --strategy fsdp --options '{"cpu_offload": true}'

Not counted: the workspace of kernels, fragmentation, and without --input activations; a fifth of the memory is left to them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ... import hardware
from ...base.lazy import modules_at_first_use
from ...base.units import rate, read_bytes, size, unit
from ...errors import SettingError, nearest
from ...registry import ALIASES, PRECISIONS, STRATEGIES
from ..config.rules import read_json
from ..terminal import GREEN, RED, paint, print_json, table, wrap

if TYPE_CHECKING:
    from ...hardware import gpus
    from . import rows as estimate_rows
else:  # they import torch
    modules_at_first_use(globals(), estimate_rows="rows", gpus="..hardware.gpus")

COUNT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE)
SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MOST = 10**13  # parameters
FORMS = "a number of parameters (1.5B, 350M), weights (model.safetensors, its index.json), or module:callable"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="1.5B, model.safetensors, or module:callable")
    add("--processes", default="", metavar="N,...", help="how many ranks (1,2,4,8; of --for: all)")
    add("--strategy", default="", metavar="NAME,...", help="which (single,ddp,zero1,fsdp)")
    add("--precision", default="", metavar="NAME,...", help="which (fp32, and that of auto, or bf16)")
    optimizer = "adamw, sgd, momentum, ... or how many tensors it keeps (adamw)"
    add("--optimizer", default="adamw", metavar="NAME", help=optimizer)
    add("--memory", metavar="SIZE", help="of a rank on another machine, such as 80GB; else this machine's")
    machine = "another machine: 8xH100, 2x8xA100-80GB (two nodes), 64x80GB, 4xcpu-64GB"
    add("--for", dest="machine", metavar="MACHINE", help=machine)
    per_node = "ranks of a node, for hsdp (this machine's devices, or all)"
    add("--per-node", type=int, metavar="N", help=per_node)
    add("--cpu", action="store_true", help="on the CPU, although there is an accelerator")
    dtype = "of parameters: fp32, bf16, fp16 or own (fp32; of a callable: own)"
    add("--dtype", metavar="NAME", help=dtype)
    shape = "an argument of forward, such as 8x3x224x224 or 8x1024:int64; repeatable"
    add("--input", action="append", default=[], metavar="SHAPE", help=shape)
    again = "what is recomputed: blocks (this flag's default), attention, a size such as 16GiB, or patterns"
    add("--activation-checkpointing", nargs="?", const="blocks", metavar="WHAT", help=again)
    add("--activation-offload", action="store_true", help="kept activations are in the host's memory")
    add("--optimizer-in-backward", action="store_true", help="gradients are freed as they come")
    time = "predict an update of TOKENS a rank (4096), or of the batch of --input; needs a GPU that is known"
    add("--time", nargs="?", const="4096", metavar="TOKENS", help=time)
    add("--options", metavar="JSON", help="of the one strategy that is named")
    add("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    there = _described(args)
    every = str(there.nodes * there.processes) if there else "1,2,4,8"
    processes = [_count(word, "--processes") for word in _words(args.processes or every)]
    strategies = _names(args.strategy, STRATEGIES, "strategy")
    precisions = _names(args.precision, [*PRECISIONS, *ALIASES], "precision")
    memory = read_bytes(args.memory, "--memory ") if args.memory else None
    options = read_json(args.options, "--options") if args.options else None
    tokens = _count(args.time, "--time") if args.time else None
    kind = kind_of(args.model)  # a wrong word is refused before torch is imported
    sized = estimate_rows.read_model(args.model, kind, args.dtype)
    how = {
        "optimizer": _optimizer(args.optimizer),
        "sample": estimate_rows.read_sample(args.input) or None,
        "options": options,
        "activation_checkpointing": args.activation_checkpointing or False,
        "activation_offload": args.activation_offload,
        "optimizer_in_backward": args.optimizer_in_backward,
    }
    per_node = there.processes if there else args.per_node
    asked = processes, strategies, precisions, memory, per_node, args.cpu
    found = estimate_rows.estimates(
        sized, there.hardware if there else hardware.detect(), *asked, how, tokens
    )
    if args.json:
        return print_json(_record(sized, found))
    print(f"{sized.name}: {sized.parameters:,} parameters, {args.optimizer}\n")
    print(_table(found))
    for line in (*found.refused, *found.notes):
        print(wrap(f"- {line}", "  "))
    print()
    print(paint(wrap(found.suggestion), GREEN if found.smallest else RED))
    return 0


def _described(args: argparse.Namespace) -> gpus.Described | None:
    if not args.machine:
        return None
    there, given = gpus.describe(args.machine), {"--memory": args.memory, "--per-node": args.per_node}
    for flag, value in given.items():
        if value is not None:
            raise SettingError(f"--for {args.machine} says it, and so does {flag} {value}: leave one out")
    if not there.hardware.devices and not there.hardware.cpu.memory:
        raise SettingError(f"--for {args.machine} names no memory: write it, as in {args.machine}-64GB")
    return there


def kind_of(text: str) -> int | str:
    """The kind of MODEL: a number of parameters, "weights" or "callable". Raises SettingError for anything else."""
    found = COUNT.fullmatch(text.strip())
    if found:
        number = float(re.sub("[_,]", "", found[1])) * SCALE[found[2].lower()]
        if not 1 <= number <= MOST:
            raise SettingError(f"{text!r} is not a number of parameters from 1 to {MOST:.0e}")
        return round(number)
    if text.endswith(".py"):
        what = f"{os.path.basename(text)[:-3]}:make_model"
        raise SettingError(
            f"{text} is a script: name the function in it that returns the model, as in {what}"
        )
    if os.path.exists(text) or "://" in text or text.endswith((".safetensors", ".json")):
        return "weights"
    if re.fullmatch(r"[\w.]+:[\w.]+", text):
        return "callable"
    raise SettingError(f"{text!r} is not a model: pass {FORMS}")


def _table(found: estimate_rows.Estimates) -> str:
    name, scale = unit(max(max(row.need.total, row.available) for row in found.rows))
    columns = {
        "weights": ("weights", "buffers"),
        "gradients": ("gradients",),
        "states": ("states", "masters"),
        "copies": ("copies", "gathered", "reducing"),
        "activations": ("activations",),
        "total": ("total",),
    }
    if not any(row.need.activations for row in found.rows):
        del columns["activations"]
    timed = any(row.time and row.time.seconds for row in found.rows)
    most = any(row.most_time for row in found.rows) and timed
    again = any(row.again for row in found.rows)
    head = ["on", "strategy", "precision", *["recomputed"] * again]
    rows: list[list[Any]] = [[*head, *columns, "spare"]]
    rows[0] += ["seconds", f"{found.unit}/s"] * timed + ["most", f"{found.unit}/s"] * most
    for row in found.rows:
        sizes = [sum(getattr(row.need, part) or 0 for part in parts) for parts in columns.values()]
        numbers = [f"{bytes_ / scale:,.2f}" if bytes_ else "-" for bytes_ in sizes]
        need = row.need
        what = [need.world, need.strategy, need.precision, *[row.again or "-"] * again]
        rows.append([*what, *numbers, f"{row.spare / scale:+,.2f}"])
        if timed:
            speed = found.speed(row)
            rows[-1] += [f"{row.need.world * found.batch / speed:.3g}", rate(speed)] if speed else ["-", "-"]
        if most:
            rows[-1] += [f"{row.most:,}" if row.most else "-", rate(found.speed(row, True) or 0)]
    available = {row.available for row in found.rows}
    shared = ", shared by the processes," if len(available) > 1 else ""
    legend = (
        f"{name} a rank. weights: with buffers; states: with fp32 masters; copies: low-precision weights, and "
        f"weights and gradients on their way between ranks; spare: of {size(max(available))}{shared} less "
        f"{estimate_rows.SPARE:.0%} for activations and workspace."
    )
    legend += f" seconds: of an update of {found.batch:,} {found.unit} a rank, predicted." * timed
    legend += " most: the largest micro-batch that fits." * most
    return f"{table(rows, right={0, *range(len(head), len(rows[0]))})}\n\n{wrap(legend)}"


def _record(sized: estimate_rows.Sized, found: estimate_rows.Estimates) -> dict[str, Any]:
    def named(row: estimate_rows.Row | None) -> dict[str, Any] | None:
        keys = {"strategy": "strategy", "processes": "world", "precision": "precision"}
        return row and {key: getattr(row.need, name) for key, name in keys.items()}

    def record(row: estimate_rows.Row) -> dict[str, Any]:
        facts: dict[str, Any] = {"available": row.available, "fits": row.fits, "spare": row.spare}
        if row.time:
            facts |= {"time": row.time._asdict(), f"{found.unit}_per_second": found.speed(row)}
            facts |= {
                "recomputed": row.again,
                "largest": row.most,
                "largest_per_second": found.speed(row, True),
            }
        return {**dataclasses.asdict(row.need), "total": row.need.total, **facts}

    return {
        "model": sized.name,
        "parameters": sized.parameters,
        "rows": [record(row) for row in found.rows],
        "refused": found.refused,
        "notes": found.notes,
        "suggested": named(found.suggested),
        "smallest": named(found.smallest),
        "suggestion": found.suggestion,
    }


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _names(text: str, known: Iterable[str], kind: str) -> list[str]:
    for name in _words(text):
        if name not in known:
            raise SettingError(f"{kind} {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    return _words(text)


def _count(word: str, flag: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise SettingError(f"{flag} {word!r} is not a whole number of at least 1")
    return int(word)


def _optimizer(word: str) -> str | int:
    if word.isdecimal():
        return int(word)
    of_sgd = (name for name in estimate_rows.STATES if name.endswith(f" {word.lower()}"))  # "momentum"
    return next(of_sgd, word)
