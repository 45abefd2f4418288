"""The model that a user names, and one estimate a row: numbers of processes by strategies by precisions, with the advice.

For weights and for a number of parameters, modules on the meta device stand in: they have the parameters and the blocks that
strategies look for, and no forward.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...base.units import size
from ...checkpoint.weights import open_source
from ...distributed import Ranks
from ...errors import EasympError, RefusedError, SettingError, nearest
from ...hardware import Hardware
from ...plan import incompatible, make_plan
from ...protocols import Facts
from ...registry import ALIASES, PRECISIONS, STRATEGIES
from ...settings import Settings
from ...strategies.transforms import read_which
from ...training.memory import NO_SAMPLE, SPARE, Memory, Prediction, estimate, fits, predict
from ...training.memory import STATES as STATES

WITH_INPUT = "activations are not counted: pass the shape of a batch (--input)"
WITHOUT = "activations are not counted: they need a forward, so module:callable and a batch's shape (--input)"
SIMPLEST = ("single", "ddp", "zero1", "fsdp")  # the first that fits is suggested


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WORDS = 32_000  # rows of the embedding, as many as Llama 2 has
RATIO = 128  # width over layers, as in GPT-3 and Llama (GPT-3's table 2.1: 12288 / 96)
SMALLEST = 1_000_000  # parameters; below, blocks would be too small to mean anything
EMBEDDINGS = ("emb", "wte", "wpe", "shared")  # in names of modules that hold a table
BUFFERS = ("running_mean", "running_var", "inv_freq", "position_ids", "masked_bias", "num_batches_tracked")


# -- models


class Sized(NamedTuple):
    """A model to estimate."""

    name: str  # as it was given
    # On the meta device if possible; or a number of parameters too small for a stand-in.
    model: nn.Module | int
    parameters: int
    runs: bool  # whether its forward can be followed, for activations
    notes: tuple[str, ...] = ()  # assumptions


def read_model(text: str, kind: int | str, dtype: str | None = None) -> Sized:
    """The model that `text` names."""
    if dtype not in (None, "own", *DTYPES):
        raise SettingError(f"dtype={dtype!r} is not one of own, {', '.join(DTYPES)}")
    if kind == "weights":
        return _from_file(text, dtype or "fp32")
    if isinstance(kind, str):
        return _from_callable(text, DTYPES.get(dtype or "own"))
    if kind < SMALLEST:
        return Sized(text, kind, kind, False)
    model, note = _transformer(kind)
    return Sized(text, model.to(DTYPES.get(dtype or "fp32")), kind, False, (f"{text}: {note}",))


def read_sample(texts: list[str]) -> tuple[Tensor, ...]:
    """Inputs on the meta device, of ``"8x3x224x224"``, or with a dtype ``"8x1024:int64"``."""
    made = []
    for text in texts:
        shape, _, word = text.partition(":")
        dtype = getattr(torch, word or "float32", None)
        if not re.fullmatch(r"[0-9]+(x[0-9]+)*", shape) or not isinstance(dtype, torch.dtype):
            form = "pass its shape, such as 8x3x224x224, and a dtype if it is not float32: 8x1024:int64"
            raise SettingError(f"{text!r} is not an input: {form}")
        made.append(torch.empty([int(n) for n in shape.split("x")], dtype=dtype, device="meta"))
    return tuple(made)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# -- callables


def _from_callable(text: str, dtype: torch.dtype | None) -> Sized:
    home, attribute = text.split(":")
    sys.path.insert(0, here := os.getcwd())  # as for `python -m`
    try:
        found: Any = importlib.import_module(home)
    except Exception as error:
        raise SettingError(f"{home} cannot be imported ({type(error).__name__}: {error})") from error
    finally:
        sys.path.remove(here)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise SettingError(f"{home} has no {attribute!r}{nearest(name, dir(found))}")
        found = getattr(found, name)
    notes: list[str] = []
    model = found if isinstance(found, nn.Module) else _built(text, found, notes)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise SettingError(f"{text} gives a {kind}, not a model: pass a function that returns an nn.Module")
    return Sized(text, model.to(dtype) if dtype else model, _count(model), True, tuple(notes))


def _built(text: str, make: Any, notes: list[str]) -> Any:
    """The result of `make`, on the meta device if possible, and a note otherwise."""
    if not callable(make):
        raise SettingError(f"{text} is a {type(make).__name__}, neither a model nor a callable")
    try:
        with torch.device("meta"):
            return make()
    except Exception as error:  # some look at values while they are built
        why = type(error).__name__
    try:
        made = make()
    except Exception as error:
        cure = "It is called without arguments: write a function that takes none and returns the model"
        raise SettingError(f"{text}() failed with {type(error).__name__}: {error}. {cure}") from error
    notes.append(f"{text} was built in the host's memory: on the meta device it failed ({why})")
    return made


# -- stand-ins


class Part(nn.Module):
    """Parameters or parts, with a forward that is never called."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _block(width: int) -> nn.Module:
    """A transformer block: 12 width² + 4 width parameters."""
    block = Part()
    for name in ("query", "key", "value", "out"):
        block.add_module(name, nn.Linear(width, width, bias=False))
    block.up, block.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
    block.before, block.after = nn.LayerNorm(width), nn.LayerNorm(width)
    return block


def _transformer(parameters: int) -> tuple[nn.Module, str]:
    """A transformer of exactly this many parameters, and a description."""
    width = max(64, round((parameters * RATIO / 12) ** (1 / 3) / 64) * 64)
    while width > 64 and 12 * width**2 + 4 * width > parameters // 3:  # two blocks at least, and a table
        width -= 64
    block = 12 * width**2 + 4 * width
    layers = max(2, round((parameters - min(WORDS * width, parameters // 3)) / block))
    rows, rest = divmod(parameters - min(layers, parameters // block) * block, width)
    model = Part()
    with torch.device("meta"):
        model.blocks = nn.ModuleList(_block(width) for _ in range(min(layers, parameters // block)))
        model.embedding = nn.Embedding(rows, width)
        model.rest = nn.Parameter(torch.empty(rest))
    shape = f"{len(model.blocks)} equal blocks, {width} wide, with a table of {rows:,} rows"
    return model, f"a stand-in: a transformer of {shape}"


def _from_file(place: str, dtype: str) -> Sized:
    if place.endswith((".bin", ".pt", ".pth", ".ckpt")):
        raise SettingError(f"{place} holds Python objects, which can run code: convert it to safetensors")
    stored = {name: (one.dtype, tuple(one.shape)) for name, one in open_source(place).tensors.items()}
    model = _from_tensors(stored, DTYPES.get(dtype))
    held = {str(kind).removeprefix("torch.") for kind, _ in stored.values() if kind.is_floating_point}
    notes = [f"{place}: {len(stored)} tensors by their headers; parts are told by their names"]
    if dtype != "own" and held != {str(DTYPES[dtype]).removeprefix("torch.")}:
        kept = f"counted as trained in {dtype} (--dtype own: as in the file)"
        notes.append(f"the file holds {', '.join(sorted(held))}; {kept}")
    return Sized(place, model, _count(model), False, tuple(notes))


def _from_tensors(tensors: Mapping[str, Any], dtype: torch.dtype | None) -> nn.Module:
    """Modules by the names of `tensors` (dtype and shape by name): parts in parts, numbered ones as blocks of a list."""
    tree: dict[str, Any] = {}
    for name, (stored, shape) in tensors.items():
        *path, leaf = name.split(".")
        inside = tree
        for part in path:
            inside = inside.setdefault(part, {})
        floating = stored.is_floating_point
        meta = torch.empty(shape, dtype=dtype if dtype and floating else stored, device="meta")
        inside[leaf] = nn.Parameter(meta) if floating and leaf not in BUFFERS else meta
    return _module("", tree)


def _module(name: str, tree: Mapping[str, Any]) -> nn.Module:
    """A list, a layer that strategies know, or a part; `tree` has tensors and further trees by name."""
    weight = tree.get("weight")
    made: nn.Module = Part()
    if all(isinstance(inner, dict) and key.isdigit() for key, inner in tree.items()):
        made = nn.ModuleDict()
    elif isinstance(weight, nn.Parameter) and weight.ndim == 2:
        with torch.device("meta"):
            table = any(word in name.lower() for word in EMBEDDINGS)
            made = nn.Embedding(0, 1) if table else nn.Linear(*reversed(weight.shape), bias=False)
    for key, inner in tree.items():  # under any name, even that of a module's attribute
        if isinstance(inner, dict):
            made._modules[key] = _module(key, inner)
        elif isinstance(inner, nn.Parameter):
            made._parameters[key] = inner
        else:
            made._buffers[key] = inner
    return made


# -- rows


class Row(NamedTuple):
    """The need of one rank, and the bytes that are available to it."""

    need: Memory
    available: int
    time: Prediction | None = None  # where it was asked for
    again: str = ""  # what is recomputed in backward
    most: int = 0  # samples of the largest micro-batch that fits, where activations are counted, too
    most_time: Prediction | None = None  # of an update of that

    @property
    def fits(self) -> bool:
        return fits(self.need, self.available)

    @property
    def spare(self) -> int:
        """Bytes left of the part that may be filled; negative where it does not fit."""
        return int(self.available * (1 - SPARE)) - self.need.total

    def __str__(self) -> str:
        words = f"{self.need.strategy} on {self.need.world} with {self.need.precision}"
        return f"{words}, {self.again} recomputed" if self.again else words


class Estimates(NamedTuple):
    """All rows, by number of processes, then strategy, then precision."""

    rows: list[Row]
    refused: list[str]  # impossible requests, a sentence each
    notes: list[str]  # approximations
    preferred: list[str]  # precisions, the one that this machine would take first
    batch: int = 0  # samples or tokens of a rank's update, where its time is predicted
    unit: str = "samples"

    def speed(self, row: Row, most: bool = False) -> float | None:
        """Predicted samples or tokens a second, of all ranks; with `most`, of the largest micro-batch."""
        time, batch = (row.most_time, row.most) if most else (row.time, self.batch)
        return batch * row.need.world / time.seconds if time and time.seconds else None

    @property
    def suggested(self) -> Row | None:
        """On the most processes, the simplest strategy that fits, in the preferred precision."""
        return self._first(max(row.need.world for row in self.rows))

    @property
    def smallest(self) -> Row | None:
        """The fewest processes on which anything fits."""
        worlds = sorted({row.need.world for row in self.rows})
        return next(filter(None, map(self._first, worlds)), None)

    def _first(self, world: int) -> Row | None:
        rows = [row for row in self.rows if row.need.world == world and row.fits]
        return min(rows, key=lambda row: self.preferred.index(row.need.precision), default=None)

    @property
    def suggestion(self) -> str:
        """The last line: the row to take, or the missing bytes."""
        take, least = self.suggested or self.smallest, self.smallest
        if take is None or least is None:
            near = max(self.rows, key=lambda row: row.spare)
            short = f"{near} comes nearest, {size(-near.spare)} too much"
            return f"nothing fits: {short}; take more memory, more devices, or a smaller model"
        words = f"{take} fits with {size(take.spare)} to spare"
        if least.need.world < take.need.world:
            words += (
                f"; the fewest processes are {least.need.world}, by {least} ({size(least.spare)} to spare)"
            )
        most = any(self.speed(row, True) for row in self.rows)
        timed = [row for row in self.rows if (row.most if most else row.fits) and self.speed(row, most)]
        if quick := max(timed, key=lambda row: self.speed(row, most) or 0, default=None):
            batch = f" in micro-batches of {quick.most:,}" if most else ""
            words += (
                f"; the fastest that fits is predicted to be {quick}{batch}: {quick.most_time or quick.time}"
            )
        return words


def estimates(
    sized: Sized,
    hardware: Hardware,
    processes: Sequence[int],
    strategies: Sequence[str],
    precisions: Sequence[str],
    memory: int | None,
    per_node: int | None,
    cpu: bool,
    how: Mapping[str, Any],
    tokens: int | None = None,
) -> Estimates:
    """Estimate every combination; the arguments are the flags of the command, `how` those that `estimate` takes.

    With `tokens`, the time of an update is predicted, of as many tokens a rank where the model has no forward. With a sample, too, each row
    comes a second time with recomputed blocks, where nothing else was asked for, and has the largest micro-batch that fits.
    """
    sample, recomputed = how["sample"], how["activation_checkpointing"] or how["activation_offload"]
    if sample is not None and not sized.runs:
        raise SettingError(f"activations need a forward, and {sized.name} has none: pass module:callable")
    if recomputed and sample is None:
        raise SettingError("recomputing and offload change activations: pass the shape of a batch (--input)")
    if how["options"] and len(strategies) != 1:
        raise SettingError("options are one strategy's: name that strategy alone")
    if memory is not None:
        hardware = dataclasses.replace(hardware, devices=())  # another machine
    devices = 0 if cpu else len(hardware.devices)
    plans = {}
    for world in sorted(set(processes)):
        ranks = Ranks(size=world, local_size=min(world, per_node or devices or world))
        plans[world] = make_plan(Settings(memory=memory, cpu=cpu), hardware, ranks)
    facts = {world: Facts(hardware, p.device.value.split(":")[0], world) for world, p in plans.items()}
    first = min(plans)
    own = [plans[first].precision.value] if memory is None else []
    preferred = [name for name in dict.fromkeys([*own, "bf16", "fp32"]) if name in PRECISIONS]
    usual = list(dict.fromkeys(["fp32", *preferred]))[:2]
    names = dict.fromkeys(ALIASES.get(name, name) for name in precisions or usual)
    refusals = {name: PRECISIONS[name].refuse(facts[first]) if memory is None else None for name in names}
    refused = [f"{name}: {why}" for name, why in refusals.items() if why and precisions]
    kinds = [name for name in names if not refusals[name]]
    known = {}
    which = read_which(how["activation_checkpointing"] or None)
    each = which is not None and which.below is not None  # by size, activations depend on the rest
    agains = [how["activation_checkpointing"]]
    if sample is not None and tokens and not recomputed:
        agains.append("blocks")
    if sample is not None and not each:  # the same for every strategy and world
        for again in tuple(agains):
            alone = {**how, "options": None, "strategy": "single", "activation_checkpointing": again}
            try:
                known |= {(name, again): estimate(sized.model, **alone, precision=name) for name in kinds}
            except EasympError:
                if again == how["activation_checkpointing"]:
                    raise
                agains.remove(again)  # a model without repeated blocks
    batch = len(sample[0]) if sample and sample[0].ndim else 1
    rows: list[Row] = []
    for world, plan in plans.items():
        for strategy in strategies or SIMPLEST:
            if why := STRATEGIES[strategy].refuse(facts[world]):
                refused += [f"{strategy} on {world}: {why}"] if strategies else []
                continue
            for precision, again in product(kinds, agains):
                where = {**how, "world": world, "per_node": plan.ranks.local_size, "activations": None}
                where |= {"activation_checkpointing": again, "strategy": strategy, "precision": precision}
                if alone := known.get((precision, again)):
                    where |= {"activations": alone, "sample": None}
                try:
                    if clash := incompatible(PRECISIONS[precision], STRATEGIES[strategy]):
                        raise RefusedError(str(clash))
                    need = estimate(sized.model, **where)
                except SettingError:
                    raise
                except EasympError as error:  # this model, under this strategy
                    refused.append(f"{strategy} on {world} with {precision}: {error}")
                else:
                    if tokens and not sized.runs:
                        flops = (2 * sized.parameters * tokens, 4 * sized.parameters * tokens)
                        need = dataclasses.replace(need, flops=flops)
                    row = Row(need, plan.memory, again=again if len(agains) > 1 and again else "")
                    if tokens:
                        name = hardware.devices[0].name if facts[world].device != "cpu" else ""
                        about = name, plan.ranks.local_size, how["options"]
                        row = row._replace(time=predict(sized.model, need, *about))
                        kept = need.activations or 0
                        most = (row.spare + kept) * batch // kept if kept and need.flops else 0
                        if most > 0:
                            flops = tuple(n * most // batch for n in need.flops or ())
                            grown = dataclasses.replace(need, flops=flops)
                            row = row._replace(most=most, most_time=predict(sized.model, grown, *about))
                    rows.append(row)
    if not rows:
        raise SettingError(f"nothing is left to estimate: {'; '.join(refused) or 'no processes'}")
    counted = (batch, "samples") if sized.runs else (tokens or 0, "tokens")
    return Estimates(rows, list(dict.fromkeys(refused)), _notes(sized, rows), [*preferred, *kinds], *counted)


def _notes(sized: Sized, rows: Sequence[Row]) -> list[str]:
    """Each once, with its strategies, unless it is about all."""
    every = {row.need.strategy for row in rows}
    about: dict[str, set[str]] = {}
    for row in rows:
        for note in row.need.notes:
            note = (WITH_INPUT if sized.runs else WITHOUT) if note == NO_SAMPLE else note
            about.setdefault(note, set()).add(row.need.strategy)
        if row.time and row.time.why:
            about.setdefault(f"time: {row.time.why}", set()).add(row.need.strategy)
    said = [note if who == every else f"{', '.join(sorted(who))}: {note}" for note, who in about.items()]
    return [*sized.notes, *said]
