"""The model that a user names, and one estimate a row: numbers of processes by strategies by precisions, and advice.

For weights and for a number of parameters a transformer of that size on the meta device stands in: it has the blocks
that strategies look for, and no forward.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import conflicts
from ...base.units import size
from ...checkpoint.weights import open_source
from ...distributed import Ranks
from ...errors import EasympError, SettingError, nearest
from ...hardware import Hardware
from ...plan import make_plan
from ...protocols import Facts
from ...registry import ALIASES, PRECISIONS, STRATEGIES
from ...settings import Settings
from ...strategies.transforms import read_which
from ...training.memory import NO_SAMPLE, SPARE, Memory, estimate, fits
from ..terminal import missing_packages

NO_INPUT = "activations are not counted: pass the shape of a batch (--input)"
NO_FORWARD = "activations are not counted: they need a forward, so module:callable and a batch's shape (--input)"
SIMPLEST: tuple[Any, ...] = ("single", "ddp", "zero1", "fsdp")  # the first that fits is suggested
WORDS = 32_000  # rows of the embedding, as many as Llama 2 has
RATIO = 128  # width over layers, as in GPT-3 and Llama (GPT-3's table 2.1: 12288 / 96)
SMALLEST = 1_000_000  # parameters; below, blocks would be too small to mean anything


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
        tensors = [entry for entry in open_source(text).tensors.values() if entry.dtype.is_floating_point]
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
    sys.path.insert(0, directory := os.getcwd())  # as for `python -m`
    try:
        value: Any = pkgutil.resolve_name(text)
    except Exception as error:
        hint = nearest(str(error.name), dir(error.obj)) if isinstance(error, AttributeError) else ""
        raise SettingError(f"{text} cannot be imported ({type(error).__name__}: {error}){hint}") from error
    finally:
        sys.path.remove(directory)
    if isinstance(value, nn.Module):
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
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise SettingError(f"{text} gives a {kind}, not a model: pass a function that returns an nn.Module")
    return model, notes


class StandIn(nn.Module):
    """Parameters or modules, with a forward that is never called."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _block(width: int) -> nn.Module:
    """A transformer block: 12 width² + 4 width parameters."""
    block = StandIn()
    for name in ("query", "key", "value", "out"):
        block.add_module(name, nn.Linear(width, width, bias=False))
    block.up, block.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
    block.norm1, block.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
    return block


def _transformer(parameters: int) -> tuple[nn.Module, str]:
    """A transformer of exactly this many parameters, and its shape."""
    width = max(64, round((parameters * RATIO / 12) ** (1 / 3) / 64) * 64)
    while width > 64 and 12 * width**2 + 4 * width > parameters // 3:  # two blocks at least, and a table
        width -= 64
    block = 12 * width**2 + 4 * width
    layers = min(max(2, round((parameters - min(WORDS * width, parameters // 3)) / block)), parameters // block)
    rows, remainder = divmod(parameters - layers * block, width)
    model = StandIn()
    with torch.device("meta"):
        model.blocks = nn.ModuleList(_block(width) for _ in range(layers))
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
        return fits(self.need, self.available)

    @property
    def spare(self) -> int:
        """Bytes that stay free below the usable share of memory; negative where the model does not fit."""
        return int(self.available * (1 - SPARE)) - self.need.total

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


def estimates(
    model: Model,
    hardware: Hardware,
    worlds: Sequence[int],
    strategies: Sequence[Any],
    requested_precisions: Sequence[str],
    training: dict[str, Any],
    memory: int | None,
) -> Estimates:
    """Estimate every combination.

    `training` has arguments that `memory.estimate` takes; `memory` is that of a rank on another machine.
    """
    sample, checkpointing = training["sample"], training["activation_checkpointing"]
    if sample is not None and not model.runs:
        raise SettingError(f"activations need a forward, and {model.name} has none: pass module:callable")
    if (checkpointing or training["activation_offload"]) and sample is None:
        raise SettingError("recomputing and offload change activations: pass the shape of a batch (--input)")
    if training["options"] and len(strategies) != 1:
        raise SettingError("options are one strategy's: name that strategy alone")
    if memory is not None:
        hardware = dataclasses.replace(hardware, devices=())
    plans, facts = {}, {}
    for world in sorted(set(worlds)):
        ranks = Ranks(size=world, local_size=min(world, len(hardware.devices) or world))
        plans[world] = make_plan(Settings(memory=memory), hardware, ranks)
        facts[world] = Facts(hardware, plans[world].device.value.split(":")[0], world)
    first = min(plans)
    detected = [plans[first].precision.value] if memory is None else []
    preferred = [name for name in dict.fromkeys([*detected, "bf16", "fp32"]) if name in PRECISIONS]
    requested = list(dict.fromkeys(ALIASES.get(name, name) for name in requested_precisions))
    refusals = {
        name: PRECISIONS[name].refuse(facts[first]) if memory is None else None
        for name in requested or list(dict.fromkeys(["fp32", *preferred]))[:2]
    }
    refused = [f"{name}: {refusal}" for name, refusal in refusals.items() if refusal and requested]
    precisions: list[Any] = [name for name, refusal in refusals.items() if not refusal]
    recomputed = read_which(checkpointing or None)
    by_size = recomputed is not None and recomputed.below is not None  # activations depend on all else
    activations: dict[str, Memory] = {}  # by precision: the same for every strategy and world
    if sample is not None and not by_size:
        single = {**training, "options": None, "strategy": "single"}
        activations = {name: estimate(model.module, **single, precision=name) for name in precisions}
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
                need = estimate(model.module, **options, strategy=strategy, precision=precision)
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
            note = (NO_INPUT if model.runs else NO_FORWARD) if note == NO_SAMPLE else note
            strategies.setdefault(note, {})[row.need.strategy] = None
    count = len({row.need.strategy for row in rows})
    notes = [note if len(names) == count else f"{', '.join(names)}: {note}" for note, names in strategies.items()]
    return [*model.notes, *notes]
