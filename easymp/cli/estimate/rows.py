"""The model that a user names, and one estimate a row: numbers of processes by strategies by precisions, and advice.

For weights and for a number of parameters, modules on the meta device stand in: they have the parameters and the blocks
that strategies look for, and no forward.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
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
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WORDS = 32_000  # rows of the embedding, as many as Llama 2 has
RATIO = 128  # width over layers, as in GPT-3 and Llama (GPT-3's table 2.1: 12288 / 96)
SMALLEST = 1_000_000  # parameters; below, blocks would be too small to mean anything
EMBEDDINGS = ("emb", "wte", "wpe", "shared")  # in names of modules that hold a table
BUFFERS = ("running_mean", "running_var", "inv_freq", "position_ids", "masked_bias", "num_batches_tracked")


# -- models


class Model(NamedTuple):
    """A model to estimate."""

    name: str  # as it was given
    module: nn.Module | int  # on the meta device if possible; or a number of parameters too small for a stand-in
    parameters: int
    runs: bool  # whether its forward can be followed, for activations
    notes: tuple[str, ...] = ()  # assumptions


def read_model(text: str, kind: int | str, dtype: str | None = None) -> Model:
    """The model that `text` names; `kind` is a number of parameters, "weights", "config" or "callable"."""
    if dtype not in (None, "own", *DTYPES):
        raise SettingError(f"dtype={dtype!r} is not one of own, {', '.join(DTYPES)}")
    if kind == "weights":
        return _from_weights(text, dtype or "fp32")
    if isinstance(kind, int):
        if kind < SMALLEST:
            return Model(text, kind, kind, False)
        module, shape = _transformer(kind)
        note = f"{text}: a stand-in: a transformer of {shape}"
        return Model(text, module.to(DTYPES.get(dtype or "fp32")), kind, False, (note,))
    module, notes = _from_config(text) if kind == "config" else _from_callable(text)
    return Model(text, module.to(DTYPES.get(dtype or "own")), _count(module), True, notes)


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


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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
        raise SettingError(
            f"transformers cannot build the model of {path} ({type(error).__name__}: {error})"
        ) from error


def _from_callable(text: str) -> tuple[nn.Module, tuple[str, ...]]:
    """The model of ``module:callable``, on the meta device if possible, and a note otherwise."""
    module_name, attribute = text.split(":")
    sys.path.insert(0, directory := os.getcwd())  # as for `python -m`
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:
        raise SettingError(f"{module_name} cannot be imported ({type(error).__name__}: {error})") from error
    finally:
        sys.path.remove(directory)
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise SettingError(f"{module_name} has no {attribute!r}{nearest(name, dir(value))}")
        value = getattr(value, name)
    notes: tuple[str, ...] = ()
    if not isinstance(value, nn.Module):
        if not callable(value):
            raise SettingError(f"{text} is a {type(value).__name__}, neither a model nor a callable")
        build = value
        try:
            with torch.device("meta"):
                value = build()
        except Exception as meta_error:  # some read values while they are built
            notes = (f"{text} was built in the host's memory: {type(meta_error).__name__} on the meta device",)
            value = _call(text, build)
    if not isinstance(value, nn.Module):
        kind = type(value).__name__
        raise SettingError(f"{text} gives a {kind}, not a model: pass a function that returns an nn.Module")
    return value, notes


def _call(text: str, build: Any) -> Any:
    try:
        return build()
    except Exception as error:
        remedy = "It is called without arguments: write a function that takes none and returns the model"
        raise SettingError(f"{text}() failed with {type(error).__name__}: {error}. {remedy}") from error


# -- stand-ins


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


def _from_weights(path: str, dtype: str) -> Model:
    if path.endswith((".bin", ".pt", ".pth", ".ckpt")):
        raise SettingError(f"{path} holds Python objects, which can run code: convert it to safetensors")
    tensors = {name: (entry.dtype, tuple(entry.shape)) for name, entry in open_source(path).tensors.items()}
    module = _from_tensors(tensors, DTYPES.get(dtype))
    stored = {str(kind).removeprefix("torch.") for kind, _ in tensors.values() if kind.is_floating_point}
    notes = [f"{path}: {len(tensors)} tensors by their headers; modules are told by their names"]
    if dtype != "own" and stored != {str(DTYPES[dtype]).removeprefix("torch.")}:
        counted = f"counted as trained in {dtype} (--dtype own: as in the file)"
        notes.append(f"the file holds {', '.join(sorted(stored))}; {counted}")
    return Model(path, module, _count(module), False, tuple(notes))


def _from_tensors(tensors: Mapping[str, Any], dtype: torch.dtype | None) -> nn.Module:
    """Nested modules by the names of `tensors` (dtype and shape by name); numbered ones are blocks of a list."""
    tree: dict[str, Any] = {}
    for name, (stored, shape) in tensors.items():
        *path, leaf = name.split(".")
        branch = tree
        for key in path:
            branch = branch.setdefault(key, {})
        floating = stored.is_floating_point
        meta = torch.empty(shape, dtype=dtype if dtype and floating else stored, device="meta")
        branch[leaf] = nn.Parameter(meta) if floating and leaf not in BUFFERS else meta
    return _module("", tree)


def _module(name: str, tree: Mapping[str, Any]) -> nn.Module:
    """A list, a layer that strategies know, or a stand-in; `tree` has tensors and further trees by name."""
    weight = tree.get("weight")
    module: nn.Module = StandIn()
    if all(isinstance(branch, dict) and key.isdigit() for key, branch in tree.items()):
        module = nn.ModuleDict()
    elif isinstance(weight, nn.Parameter) and weight.ndim == 2:
        with torch.device("meta"):
            is_embedding = any(part in name.lower() for part in EMBEDDINGS)
            module = nn.Embedding(0, 1) if is_embedding else nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    for key, branch in tree.items():  # under any name, even that of a module's attribute
        if isinstance(branch, dict):
            module._modules[key] = _module(key, branch)
        elif isinstance(branch, nn.Parameter):
            module._parameters[key] = branch
        else:
            module._buffers[key] = branch
    return module


# -- rows


class Row(NamedTuple):
    """The need of one rank, and the bytes that are available to it."""

    need: Memory
    available: int
    largest: int = 0  # samples of the largest micro-batch that fits, where activations are counted, too

    @property
    def fits(self) -> bool:
        return fits(self.need, self.available)

    @property
    def spare(self) -> int:
        """Bytes left of the share that may be filled; negative where it does not fit."""
        return int(self.available * (1 - SPARE)) - self.need.total

    def __str__(self) -> str:
        return f"{self.need.strategy} on {self.need.world} with {self.need.precision}"


class Estimates(NamedTuple):
    """All rows, by number of processes, then strategy, then precision."""

    rows: list[Row]
    refused: list[str]  # impossible requests, a sentence each
    notes: list[str]  # approximations
    preferred: list[str]  # precisions, the one that this machine would take first

    @property
    def smallest(self) -> Row | None:
        worlds = sorted({row.need.world for row in self.rows})
        return next(filter(None, map(self._simplest, worlds)), None)

    @property
    def suggested(self) -> Row | None:
        """On the most processes, the simplest strategy that fits, in the preferred precision."""
        return self._simplest(max(row.need.world for row in self.rows))

    def _simplest(self, world: int) -> Row | None:
        rows = [row for row in self.rows if row.need.world == world and row.fits]
        return min(rows, key=lambda row: self.preferred.index(row.need.precision), default=None)

    @property
    def suggestion(self) -> str:
        """The last line: the row to take, or the missing bytes."""
        smallest = self.smallest
        if smallest is None:
            closest = max(self.rows, key=lambda row: row.spare)
            excess = f"{closest} comes nearest, {size(-closest.spare)} too much"
            return f"nothing fits: {excess}; take more memory, more devices, or a smaller model"
        row = self.suggested or smallest
        sentence = f"{row} fits with {size(row.spare)} to spare"
        if smallest.need.world < row.need.world:
            sentence += f"; the fewest processes are {smallest.need.world}, by {smallest}"
        return sentence


class Request(NamedTuple):
    """The rows that are asked for: the options of the command."""

    processes: Sequence[int]
    strategies: Sequence[Any]
    precisions: Sequence[str]
    memory: int | None  # of a rank on another machine
    per_node: int | None
    cpu: bool
    training: dict[str, Any]  # the arguments that `estimate` takes


def estimates(model: Model, hardware: Hardware, request: Request) -> Estimates:
    """Estimate every combination. With a sample, each row has the largest micro-batch that fits."""
    training, strategies = request.training, request.strategies
    sample, checkpointing = training["sample"], training["activation_checkpointing"]
    if sample is not None and not model.runs:
        raise SettingError(f"activations need a forward, and {model.name} has none: pass module:callable")
    if (checkpointing or training["activation_offload"]) and sample is None:
        raise SettingError("recomputing and offload change activations: pass the shape of a batch (--input)")
    if training["options"] and len(strategies) != 1:
        raise SettingError("options are one strategy's: name that strategy alone")
    if request.memory is not None:
        hardware = dataclasses.replace(hardware, devices=())  # another machine
    devices, settings = 0 if request.cpu else len(hardware.devices), Settings(memory=request.memory, cpu=request.cpu)
    plans, facts = {}, {}
    for world in sorted(set(request.processes)):
        ranks = Ranks(size=world, local_size=min(world, request.per_node or devices or world))
        plans[world] = make_plan(settings, hardware, ranks)
        facts[world] = Facts(hardware, plans[world].device.value.split(":")[0], world)
    first = min(plans)
    detected = [plans[first].precision.value] if request.memory is None else []
    preferred = [name for name in dict.fromkeys([*detected, "bf16", "fp32"]) if name in PRECISIONS]
    requested = list(dict.fromkeys(ALIASES.get(name, name) for name in request.precisions))
    refusals = {
        name: PRECISIONS[name].refuse(facts[first]) if request.memory is None else None
        for name in requested or list(dict.fromkeys(["fp32", *preferred]))[:2]
    }
    refused = [f"{name}: {refusal}" for name, refusal in refusals.items() if refusal and requested]
    possible: list[Any] = [name for name, refusal in refusals.items() if not refusal]
    recomputed = read_which(checkpointing or None)
    by_size = recomputed is not None and recomputed.below is not None  # activations depend on all else
    activations: dict[str, Memory] = {}  # by precision: the same for every strategy and world
    if sample is not None and not by_size:
        single = {**training, "options": None, "strategy": "single"}
        activations = {name: estimate(model.module, **single, precision=name) for name in possible}
    batch = len(sample[0]) if sample and sample[0].ndim else 1
    rows: list[Row] = []
    for world, plan in plans.items():
        for strategy in strategies or SIMPLEST:
            if refusal := STRATEGIES[strategy].refuse(facts[world]):
                refused += [f"{strategy} on {world}: {refusal}"] if strategies else []
                continue
            for precision in possible:
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
                row = Row(need, plan.memory)
                if need.activations and not by_size:
                    row = row._replace(largest=max(0, (row.spare + need.activations) * batch // need.activations))
                rows.append(row)
    if not rows:
        raise SettingError(f"nothing is left to estimate: {'; '.join(refused) or 'no processes'}")
    return Estimates(rows, list(dict.fromkeys(refused)), _notes(model, rows), [*preferred, *possible])


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
