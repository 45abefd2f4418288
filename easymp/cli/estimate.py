"""Estimate the memory that a training needs on each rank, by strategy, precision and number of processes.

MODEL is one of: a number of parameters, treated as a transformer of that size; safetensors weights (a file, an index or
a folder), whose headers give the number of parameters; the config.json of a Hugging Face model, which transformers
builds; or module:callable, which is called without arguments and returns the model. If possible, nothing is allocated.

examples:
  easymp estimate 7B                                        a transformer of 7 billion parameters
  easymp estimate 350M --processes 1,8 --memory 80GB        on eight devices of 80 GB of another machine
  easymp estimate 70B --for 8x8xH100                        on eight nodes of eight H100
  easymp estimate model.safetensors --optimizer sgd         weights, trained by SGD
  easymp estimate llama/config.json --input 8x1024:int64    a model of transformers, with the activations of a batch
  easymp estimate train:make_model --input 32x3x224x224     a model of your own
  easymp estimate 7B --strategy fsdp --options '{"cpu_offload": true}'

The workspace of kernels, fragmentation and, without --input, activations are not counted. A fifth of the memory is left
for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import conflicts, hardware
from ..base.lazy import modules_at_first_use
from ..base.units import read_bytes, size, unit
from ..distributed import Ranks
from ..errors import EasympError, SettingError, check_whole, nearest
from ..protocols import Facts
from ..registry import ALIASES, PRECISIONS, STRATEGIES
from ..settings import Settings
from .config.foreign import read_json
from .terminal import GREEN, MACHINE_HELP, RED, missing_packages, paint, print_json, table, wrap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .. import plan as planning
    from ..checkpoint import weights
    from ..hardware import Hardware
    from ..strategies import transforms
    from ..training import memory, peak
    from ..training.memory import Memory
else:  # they import torch
    modules_at_first_use(
        globals(),
        memory=".training.memory",
        peak=".training.peak",
        planning=".plan",
        transforms=".strategies.transforms",
        weights=".checkpoint.weights",
    )

COUNT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE)
SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MAX_PARAMETERS = 10**13
NO_INPUT = "activations are not counted: pass the shape of a batch (--input)"
NO_FORWARD = "activations are not counted: they need a forward, so module:callable and a batch's shape (--input)"
SIMPLEST: tuple[Any, ...] = ("single", "ddp", "zero1", "fsdp")  # the first that fits is suggested
WORDS = 32_000  # rows of the embedding, as many as Llama 2 has
RATIO = 128  # width over layers, as in GPT-3 and Llama (GPT-3's table 2.1: 12288 / 96)
SMALLEST = 1_000_000  # parameters; below, blocks would be too small to mean anything
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
    memory_size = read_bytes(args.memory, "--memory ") if args.memory else None
    options = read_json(args.options, "--options") if args.options else None
    kind = kind_of(args.model)  # a wrong argument is refused before torch is imported
    model = read_model(args.model, kind)
    optimizer = "sgd momentum" if args.optimizer.lower() == "momentum" else args.optimizer
    training = {
        "optimizer": int(optimizer) if optimizer.isdecimal() else optimizer,
        "sample": read_sample(args.input) or None,
        "options": options,
        "activation_checkpointing": args.activation_checkpointing or False,
        "activation_offload": args.activation_offload,
        "optimizer_in_backward": args.optimizer_in_backward,
    }
    estimates = estimate_all(
        model, machine.hardware if machine else hardware.detect(), worlds, strategies, precisions, training, memory_size
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


def _table(estimates: Estimates) -> str:
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


def _record(model: Model, estimates: Estimates) -> dict[str, Any]:
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


# -- models


class Model(NamedTuple):
    """A model to estimate."""

    name: str  # as it was given
    module: nn.Module | int  # on the meta device if possible; or a number of parameters too small for a stand-in
    parameters: int
    runs: bool  # whether its forward can be followed, for activations
    notes: tuple[str, ...] = ()  # assumptions


def read_model(text: str, kind: int | str) -> Model:
    """The model that `text` names; `kind` is a number of parameters, "weights", "config" or "callable"."""
    notes: tuple[str, ...] = ()
    if kind == "weights":
        if text.endswith((".bin", ".pt", ".pth", ".ckpt")):
            raise SettingError(f"{text} holds Python objects, which can run code: convert it to safetensors")
        tensors = [entry for entry in weights.open_source(text).tensors.values() if entry.dtype.is_floating_point]
        dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in tensors})
        notes = (f"{text}: {len(tensors)} tensors of {', '.join(dtypes)}, counted as trained from fp32",)
        kind = sum(math.prod(entry.shape) for entry in tensors)
    if isinstance(kind, int):
        if kind < SMALLEST:
            return Model(text, kind, kind, False, notes)
        module, shape = _transformer(kind)
        note = f"{text}: a stand-in: a transformer of {shape}"
        return Model(text, module, kind, False, (*notes, note))
    module, notes = _from_config(text) if kind == "config" else _from_callable(text)
    return Model(text, module, sum(parameter.numel() for parameter in module.parameters()), True, notes)


def read_sample(texts: list[str]) -> tuple[Tensor, ...]:
    """Inputs on the meta device, of ``"8x3x224x224"``, or with a dtype ``"8x1024:int64"``."""
    import torch

    sample = []
    for text in texts:
        shape, _, name = text.partition(":")
        dtype = getattr(torch, name or "float32", None)
        if not re.fullmatch(r"[0-9]+(x[0-9]+)*", shape) or not isinstance(dtype, torch.dtype):
            form = "pass its shape, such as 8x3x224x224, and a dtype if it is not float32: 8x1024:int64"
            raise SettingError(f"{text!r} is not an input: {form}")
        sample.append(torch.empty([int(n) for n in shape.split("x")], dtype=dtype, device="meta"))
    return tuple(sample)


def _from_config(path: str) -> tuple[nn.Module, tuple[str, ...]]:
    import torch

    if sentence := missing_packages("", "transformers"):
        raise SettingError(f"{path} describes a model of transformers, and {sentence}")
    transformers = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(str(Path(path).parent), local_files_only=True)
        name = (config.architectures or [""])[0]
        build = getattr(transformers, name, transformers.AutoModel.from_config)
        with torch.device("meta"):
            return build(config), (f"{path}: {name or 'its base model'} of transformers, without weights",)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise SettingError(f"transformers cannot build the model of {path} ({cause})") from error


def _from_callable(text: str) -> tuple[nn.Module, tuple[str, ...]]:
    """The model of ``module:callable``, on the meta device if possible, and a note otherwise."""
    import torch

    sys.path.insert(0, directory := os.getcwd())  # as for `python -m`
    try:
        value: Any = pkgutil.resolve_name(text)
    except Exception as error:
        hint = nearest(str(error.name), dir(error.obj)) if isinstance(error, AttributeError) else ""
        raise SettingError(f"{text} cannot be imported ({type(error).__name__}: {error}){hint}") from error
    finally:
        sys.path.remove(directory)
    if isinstance(value, torch.nn.Module):
        return value, ()
    if not callable(value):
        raise SettingError(f"{text} is a {type(value).__name__}, neither a model nor a callable")
    notes: tuple[str, ...] = ()
    try:
        with torch.device("meta"):
            model = value()
    except Exception as meta_error:  # some read values while they are built
        notes = (f"{text} was built in the host's memory: {type(meta_error).__name__} on the meta device",)
        try:
            model = value()
        except Exception as error:
            remedy = "It is called without arguments: write a function that takes none and returns the model"
            raise SettingError(f"{text}() failed with {type(error).__name__}: {error}. {remedy}") from error
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise SettingError(f"{text} gives a {kind}, not a model: pass a function that returns an nn.Module")
    return model, notes


def _transformer(parameters: int) -> tuple[nn.Module, str]:
    """A transformer of exactly this many parameters, and its shape. Its forward is never called."""
    import torch
    from torch import nn

    width = max(64, round((parameters * RATIO / 12) ** (1 / 3) / 64) * 64)
    while width > 64 and 12 * width**2 + 4 * width > parameters // 3:  # two blocks at least, and a table
        width -= 64
    block_size = 12 * width**2 + 4 * width
    table_size = min(WORDS * width, parameters // 3)
    layers = min(max(2, round((parameters - table_size) / block_size)), parameters // block_size)
    rows, remainder = divmod(parameters - layers * block_size, width)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

        def forward(self, x: Tensor) -> Tensor:  # what is called in parts has one
            return x

    model = nn.Module()
    with torch.device("meta"):
        model.blocks = nn.ModuleList(Block() for _ in range(layers))
        model.embedding = nn.Embedding(rows, width)
        model.remainder = nn.Parameter(torch.empty(remainder))
    return model, f"{layers} equal blocks, {width} wide, with a table of {rows:,} rows"


# -- rows


class Row(NamedTuple):
    """The need of one rank, and the bytes that are available to it."""

    need: Memory
    available: int

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    @property
    def spare(self) -> int:
        """Bytes that stay free below the usable share of memory; negative where the model does not fit."""
        return int(self.available * (1 - memory.SPARE)) - self.need.total

    def __str__(self) -> str:
        return f"{self.need.strategy} on {self.need.world} with {self.need.precision}"


class Estimates(NamedTuple):
    """All rows, by number of processes, then strategy, then precision."""

    rows: list[Row]
    refused: list[str]  # impossible requests, a sentence each
    notes: list[str]  # approximations
    suggested: Row | None  # on the most processes, the simplest strategy that fits, in the precision of this machine
    smallest: Row | None  # that fits, on the fewest processes

    @property
    def suggestion(self) -> str:
        """The last line: the row to take, or the missing bytes."""
        if self.smallest is None:
            closest = max(self.rows, key=lambda row: row.spare)
            excess = f"{closest} comes nearest, {size(-closest.spare)} too much"
            return f"nothing fits: {excess}; take more memory, more devices, or a smaller model"
        row = self.suggested or self.smallest
        sentence = f"{row} fits with {size(row.spare)} to spare"
        if self.smallest.need.world < row.need.world:
            sentence += f"; the fewest processes are {self.smallest.need.world}, by {self.smallest}"
        return sentence


def estimate_all(
    model: Model,
    hardware: Hardware,
    worlds: Sequence[int],
    strategies: Sequence[Any],
    requested_precisions: Sequence[str],
    training: dict[str, Any],
    memory_size: int | None,
) -> Estimates:
    """Estimate every combination.

    `training` has arguments that `memory.estimate` takes; `memory_size` is that of a rank on another machine.
    """
    sample, checkpointing = training["sample"], training["activation_checkpointing"]
    if sample is not None and not model.runs:
        raise SettingError(f"activations need a forward, and {model.name} has none: pass module:callable")
    if (checkpointing or training["activation_offload"]) and sample is None:
        raise SettingError("recomputing and offload change activations: pass the shape of a batch (--input)")
    if training["options"] and len(strategies) != 1:
        raise SettingError("options are one strategy's: name that strategy alone")
    if memory_size is not None:
        hardware = dataclasses.replace(hardware, devices=())
    plans, facts = {}, {}
    for world in sorted(set(worlds)):
        ranks = Ranks(size=world, local_size=min(world, len(hardware.devices) or world))
        plans[world] = planning.make_plan(Settings(memory=memory_size), hardware, ranks)
        facts[world] = Facts(hardware, plans[world].device.value.split(":")[0], world)
    first = min(plans)
    detected = [plans[first].precision.value] if memory_size is None else []
    preferred = list(dict.fromkeys([*detected, "bf16", "fp32"]))
    requested = list(dict.fromkeys(ALIASES.get(name, name) for name in requested_precisions))
    refusals = {
        name: PRECISIONS[name].refuse(facts[first]) if memory_size is None else None
        for name in requested or list(dict.fromkeys(["fp32", *preferred]))[:2]
    }
    refused = [f"{name}: {refusal}" for name, refusal in refusals.items() if refusal and requested]
    precisions: list[Any] = [name for name, refusal in refusals.items() if not refusal]
    recomputed = transforms.read_which(checkpointing or None)
    by_size = recomputed is not None and recomputed.below is not None  # activations depend on all else
    activations: dict[str, Memory] = {}  # by precision: the same for every strategy and world
    if sample is not None and not by_size:
        single = {**training, "options": None, "strategy": "single"}
        activations = {name: memory.estimate(model.module, **single, precision=name) for name in precisions}
    rows: list[Row] = []
    for (world, plan), strategy in product(plans.items(), strategies or SIMPLEST):
        if refusal := STRATEGIES[strategy].refuse(facts[world]):
            refused += [f"{strategy} on {world}: {refusal}"] if strategies else []
            continue
        for precision in precisions:
            options = {**training, "world": world, "per_node": plan.ranks.local_size, "activations": None}
            if precision in activations:
                options |= {"activations": activations[precision], "sample": None}
            try:
                records = STRATEGIES[strategy], PRECISIONS[precision]
                conflicts.check({strategy, precision}, conflicts.rows_of(*records, Settings()))
                need = memory.estimate(model.module, **options, strategy=strategy, precision=precision)
            except SettingError:
                raise
            except EasympError as error:  # this model, under this strategy
                refused.append(f"{strategy} on {world} with {precision}: {error}")
                continue
            rows.append(Row(need, plan.memory))
    if not rows:
        raise SettingError(f"nothing is left to estimate: {'; '.join(refused) or 'no processes'}")
    # Of each world the first row that fits, in the preferred precision.
    order = [*preferred, *precisions]
    simplest: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: order.index(row.need.precision)):
        if row.fits:
            simplest.setdefault(row.need.world, row)
    smallest = simplest[min(simplest)] if simplest else None
    suggested = simplest.get(max(row.need.world for row in rows))
    return Estimates(rows, list(dict.fromkeys(refused)), _notes(model, rows), suggested, smallest)


def _notes(model: Model, rows: Sequence[Row]) -> list[str]:
    """Each note once, with its strategies, unless it is about all."""
    strategies: dict[str, dict[str, None]] = {}
    for row in rows:
        for note in row.need.notes:
            note = (NO_INPUT if model.runs else NO_FORWARD) if note == memory.NO_SAMPLE else note
            strategies.setdefault(note, {})[row.need.strategy] = None
    count = len({row.need.strategy for row in rows})
    notes = [note if len(names) == count else f"{', '.join(names)}: {note}" for note, names in strategies.items()]
    return [*model.notes, *notes]
