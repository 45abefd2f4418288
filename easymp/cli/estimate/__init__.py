"""Estimate the memory that a training needs on each rank, by strategy, precision and number of processes.

MODEL is a number of parameters, for which a transformer stands in; safetensors weights (a file, an index or a folder),
whose parameters are counted by the headers; the config.json of a Hugging Face model, which transformers builds; or
module:callable, which is called without arguments to build the model. Nothing is allocated where that is possible.

examples:
  easymp estimate 7B                                        a transformer of 7 billion parameters
  easymp estimate 350M --processes 1,8 --memory 80GB        on eight devices of 80 GB elsewhere
  easymp estimate 70B --for 8x8xH100                        on eight nodes of eight H100
  easymp estimate model.safetensors --optimizer sgd         weights, trained by SGD
  easymp estimate llama/config.json --input 8x1024:int64    a model of transformers, with the activations of a batch
  easymp estimate train:make_model --input 32x3x224x224     one of your own
  easymp estimate 7B --strategy fsdp --options '{"cpu_offload": true}'

Not counted: the workspace of kernels, fragmentation, and without --input activations; a fifth of the memory is left to
them.
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
from ...base.units import read_bytes, size, unit
from ...errors import SettingError, check_whole, nearest
from ...registry import ALIASES, PRECISIONS, STRATEGIES
from ..config.documents import read_json
from ..terminal import GREEN, MACHINE_HELP, RED, paint, print_json, table, wrap

if TYPE_CHECKING:
    from ...training import peak
    from . import rows as estimate_rows
else:  # they import torch
    modules_at_first_use(globals(), estimate_rows="rows", peak="..training.peak")

COUNT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE)
SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MAX_PARAMETERS = 10**13
FORMS = (
    "a number of parameters (1.5B, 350M), weights (model.safetensors, its index.json), a config.json of Hugging Face, "
    "or module:callable"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="1.5B, model.safetensors, config.json, or module:callable")
    add("--processes", default="", metavar="N,...", help="how many ranks (1,2,4,8; of --for: all)")
    add("--strategy", default="", metavar="NAME,...", help="which (single,ddp,zero1,fsdp)")
    add("--precision", default="", metavar="NAME,...", help="which (fp32, and that of auto, or bf16)")
    optimizer = "adamw, sgd, momentum, ... or how many tensors it keeps (adamw)"
    add("--optimizer", default="adamw", metavar="NAME", help=optimizer)
    add("--memory", metavar="SIZE", help="of a rank on another machine, such as 80GB; else this machine's")
    add("--for", dest="machine", metavar="MACHINE", help=f"{MACHINE_HELP}-64GB")
    shape = "an argument of forward, such as 8x3x224x224 or 8x1024:int64; repeatable"
    add("--input", action="append", default=[], metavar="SHAPE", help=shape)
    recomputed = "what is recomputed: blocks (this flag's default), attention, a size such as 16GiB, or patterns"
    add("--activation-checkpointing", nargs="?", const="blocks", metavar="WHAT", help=recomputed)
    add("--activation-offload", action="store_true", help="kept activations are in the host's memory")
    add("--optimizer-in-backward", action="store_true", help="gradients are freed as they come")
    add("--options", metavar="JSON", help="of the one strategy that is named")
    add("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    machine = None
    if args.machine:
        machine = hardware.describe(args.machine)
        if args.memory:
            raise SettingError(f"--for {args.machine} says it, and so does --memory {args.memory}: leave one out")
        if not machine.hardware.devices and not machine.hardware.cpu.memory:
            raise SettingError(f"--for {args.machine} names no memory: write it, as in {args.machine}-64GB")
    processes = args.processes or (str(machine.nodes * machine.processes) if machine else "1,2,4,8")
    worlds = [
        check_whole(f"--processes {text!r}", int(text) if text.isdecimal() else text) for text in _split(processes)
    ]
    strategies = _names(args.strategy, STRATEGIES, "strategy")
    precisions = _names(args.precision, [*PRECISIONS, *ALIASES], "precision")
    memory = read_bytes(args.memory, "--memory ") if args.memory else None
    options = read_json(args.options, "--options") if args.options else None
    kind = kind_of(args.model)  # a wrong argument is refused before torch is imported
    model = estimate_rows.read_model(args.model, kind)
    optimizer = "sgd momentum" if args.optimizer.lower() == "momentum" else args.optimizer
    training = {
        "optimizer": int(optimizer) if optimizer.isdecimal() else optimizer,
        "sample": estimate_rows.read_sample(args.input) or None,
        "options": options,
        "activation_checkpointing": args.activation_checkpointing or False,
        "activation_offload": args.activation_offload,
        "optimizer_in_backward": args.optimizer_in_backward,
    }
    estimates = estimate_rows.estimates(
        model, machine.hardware if machine else hardware.detect(), worlds, strategies, precisions, training, memory
    )
    if args.json:
        return print_json(_record(model, estimates))
    print(f"{model.name}: {model.parameters:,} parameters, {args.optimizer}\n")
    print(_table(estimates))
    need = estimates.rows[0].need
    if need.largest:
        cells = peak.cells(need.largest, size)
        print(f"\nThe largest activations at the peak in {need.precision}:\n{table(cells, right={0}, fold=True)}")
    for line in (*estimates.refused, *estimates.notes):
        print(wrap(f"- {line}", "  "))
    print()
    print(paint(wrap(estimates.suggestion), GREEN if estimates.smallest else RED))
    return 0


def kind_of(text: str) -> int | str:
    """The kind of MODEL: a number of parameters, "weights", "config" or "callable". Raises SettingError for others."""
    if match := COUNT.fullmatch(text.strip()):
        number = float(re.sub("[_,]", "", match[1])) * SCALE[match[2].lower()]
        if not 1 <= number <= MAX_PARAMETERS:
            raise SettingError(f"{text!r} is not a number of parameters from 1 to {MAX_PARAMETERS:.0e}")
        return round(number)
    name, exists = os.path.basename(text), os.path.exists(text)
    if text.endswith(".py"):
        example = f"{name[:-3]}:make_model"
        raise SettingError(f"{text} is a script: name the function in it that returns the model, as in {example}")
    if exists or "://" in text:
        return "config" if name == "config.json" else "weights"
    if re.fullmatch(r"[\w.]+:[\w.]+", text):
        return "callable"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and "." not in name[-12:-1]:
        raise SettingError(
            f"{text!r} is no file here. Of a model on the Hugging Face hub, fetch the description: "
            f"hf download {text} config.json --local-dir {name}; then pass {name}/config.json"
        )
    raise SettingError(f"{text!r} is not a model: pass {FORMS}")


def _table(estimates: estimate_rows.Estimates) -> str:
    name, scale = unit(max(max(row.need.total, row.available) for row in estimates.rows))
    columns = {
        "weights": ("weights", "buffers"),
        "gradients": ("gradients",),
        "states": ("states", "masters"),
        "copies": ("copies", "gathered", "reducing"),
        "activations": ("activations",),
        "total": ("total",),
    }
    if not any(row.need.activations for row in estimates.rows):
        del columns["activations"]
    rows: list[list[Any]] = [["on", "strategy", "precision", *columns, "spare"]]
    for row in estimates.rows:
        sizes = [sum(getattr(row.need, field) or 0 for field in fields) for fields in columns.values()]
        cells = [f"{bytes_ / scale:,.2f}" if bytes_ else "-" for bytes_ in sizes]
        rows.append([row.need.world, row.need.strategy, row.need.precision, *cells, f"{row.spare / scale:+,.2f}"])
    available = {row.available for row in estimates.rows}
    shared = ", shared by the processes," if len(available) > 1 else ""
    legend = (
        f"{name} a rank. weights: with buffers; states: with fp32 masters; copies: low-precision weights, and "
        f"weights and gradients on their way between ranks; spare: of {size(max(available))}{shared} less a fifth for "
        "activations and workspace."
    )
    return f"{table(rows, right={0, *range(3, len(rows[0]))})}\n\n{wrap(legend)}"


def _record(model: estimate_rows.Model, estimates: estimate_rows.Estimates) -> dict[str, Any]:
    rows = []
    for row in estimates.rows:
        facts = {"total": row.need.total, "available": row.available, "fits": row.fits}
        rows.append({**dataclasses.asdict(row.need), **facts, "spare": row.spare})
    choices = {
        name: row and {"strategy": row.need.strategy, "processes": row.need.world, "precision": row.need.precision}
        for name, row in {"suggested": estimates.suggested, "smallest": estimates.smallest}.items()
    }
    return {
        "model": model.name,
        "parameters": model.parameters,
        "rows": rows,
        "refused": estimates.refused,
        "notes": estimates.notes,
        **choices,
        "suggestion": estimates.suggestion,
    }


def _split(text: str) -> list[str]:
    return [value.strip() for value in text.split(",") if value.strip()]


def _names(text: str, choices: Iterable[str], kind: str) -> list[str]:
    for name in _split(text):
        if name not in choices:
            raise SettingError(f"{kind} {name!r} is not one of {', '.join(choices)}{nearest(name, choices)}")
    return _split(text)
