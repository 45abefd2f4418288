"""The model that a user names: a function or class in Python, a file of weights, or a number of parameters.

Where only names and shapes are known, or only a count, modules on the meta device stand in: they have the parameters and the
blocks that strategies look for, and no forward.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...checkpoint.source import open_source
from ...errors import SettingError, nearest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WORDS = 32_000  # rows of the embedding, where there are parameters for them; as many as Llama 2 has
RATIO = 128  # width over layers, as in GPT-3 and Llama (GPT-3's table 2.1: 12288 / 96)
SMALLEST = 1_000_000  # parameters; below, blocks would be too small to mean anything
EMBEDDINGS = ("emb", "wte", "wpe", "shared")  # in names of modules whose weight is a table
BUFFERS = ("running_mean", "running_var", "inv_freq", "position_ids", "masked_bias", "num_batches_tracked")


class Sized(NamedTuple):
    """A model to estimate."""

    name: str  # as it was given
    model: (
        nn.Module | int
    )  # on the meta device if possible; or a number of parameters too small for a stand-in
    parameters: int
    runs: bool  # whether its forward can be followed, for activations
    notes: tuple[str, ...] = ()  # what is assumed


def read_model(text: str, kind: int | str, dtype: str | None = None) -> Sized:
    """The model that `text` names.

    Args:
        kind: a number of parameters, "weights" (a place of safetensors), or "callable".
        dtype: a key of `DTYPES`, or "own": as in the file, or as the callable makes them. None: "own" for a callable, else
            fp32, which mixed precision trains.

    Raises:
        SettingError, CheckpointError: there is no such callable, it gives no model, or a file cannot be read.
    """
    if dtype not in (None, "own", *DTYPES):
        raise SettingError(f"dtype={dtype!r} is none of own, {', '.join(DTYPES)}")
    if kind == "weights":
        return _from_file(text, dtype or "fp32")
    if isinstance(kind, str):
        return _from_callable(text, DTYPES.get(dtype or "own"))
    if kind < SMALLEST:
        return Sized(text, kind, kind, False)
    model, words = _from_count(kind)
    model = model.to(DTYPES.get(dtype or "fp32", torch.float32))
    return Sized(text, model, kind, False, (f"{text}: {words}",))


def read_sample(texts: list[str]) -> tuple[Tensor, ...]:
    """Inputs on the meta device, of ``"8x3x224x224"``, or with a dtype ``"8x1024:int64"``."""
    made = []
    for text in texts:
        shape, _, word = text.partition(":")
        dtype = getattr(torch, word or "float32", None)
        if not re.fullmatch(r"[0-9]+(x[0-9]+)*", shape) or not isinstance(dtype, torch.dtype):
            raise SettingError(
                f"{text!r} is no input: pass its shape, such as 8x3x224x224, and a dtype if it is not float32: "
                "8x1024:int64"
            )
        made.append(torch.empty([int(n) for n in shape.split("x")], dtype=dtype, device="meta"))
    return tuple(made)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# -- a callable


def _from_callable(text: str, dtype: torch.dtype | None) -> Sized:
    home, _, attribute = text.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)  # as `python -m` does
    try:
        found: Any = importlib.import_module(home)
    except ModuleNotFoundError as error:
        raise SettingError(f"{text}: {error}; the working directory is searched first") from error
    finally:
        sys.path.remove(here)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise SettingError(f"{home} has no {attribute!r}{nearest(name, dir(found))}")
        found = getattr(found, name)
    model, note = (found, "") if isinstance(found, nn.Module) else _built(text, found)
    if not isinstance(model, nn.Module):
        raise SettingError(
            f"{text} gives a {type(model).__name__}, not a model: write a function that returns the torch.nn.Module"
        )
    model = model if dtype is None else model.to(dtype)
    return Sized(text, model, _count(model), True, (note,) if note else ())


def _built(text: str, make: Any) -> tuple[Any, str]:
    """What `make` returns, on the meta device if possible, and a note otherwise."""
    if not callable(make):
        raise SettingError(f"{text} is a {type(make).__name__}, neither a model nor something to call")
    try:
        with torch.device("meta"):
            return make(), ""
    except Exception as first:
        try:
            made = make()  # some look at values while they are built
        except Exception as error:
            raise SettingError(
                f"{text}() failed with {type(error).__name__}: {error}. It is called without arguments: write a "
                "function that takes none and returns the model"
            ) from error
        return (
            made,
            f"{text} was built in the host's memory: on the meta device it failed ({type(first).__name__})",
        )


# -- stand-ins


class Part(nn.Module):
    """Parameters or parts, with a forward that is never called."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(Part):
    """A transformer block: 12 width² + 4 width parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)


def _from_count(parameters: int) -> tuple[nn.Module, str]:
    """A transformer of exactly this many parameters, and what it is in words."""

    def of_block(width: int) -> int:
        return 12 * width**2 + 4 * width

    width = max(64, round((parameters * RATIO / 12) ** (1 / 3) / 64) * 64)
    while width > 64 and 2 * of_block(width) > 2 * parameters // 3:  # two blocks at least, and a table
        width -= 64
    block = of_block(width)
    table = min(WORDS * width, parameters // 3)
    layers = min(max(2, round((parameters - table) / block)), parameters // block)
    model = Part()
    with torch.device("meta"):
        model.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        rows, rest = divmod(parameters - layers * block, width)
        model.embedding = nn.Embedding(rows, width)
        model.rest = nn.Parameter(torch.empty(rest))
    shape = f"{layers} equal blocks, {width} wide, with a table of {rows:,} rows"
    return model, f"a stand-in: a transformer of {shape}"


def _from_file(place: str, dtype: str) -> Sized:
    if place.endswith((".bin", ".pt", ".pth", ".ckpt")):
        raise SettingError(
            f"{place} holds Python objects, which can run code when they are read: convert it to safetensors"
        )
    stored = {name: (one.dtype, tuple(one.shape)) for name, one in open_source(place).tensors.items()}
    model = _from_tensors(stored, DTYPES.get(dtype))
    held = {str(kind).removeprefix("torch.") for kind, _ in stored.values() if kind.is_floating_point}
    notes = [f"{place}: {len(stored)} tensors by their headers; parts are told by their names"]
    if dtype != "own" and held != {str(DTYPES[dtype]).removeprefix("torch.")}:
        kept = f"counted as trained in {dtype} (--dtype own: as in the file)"
        notes.append(f"the file holds {', '.join(sorted(held))}; {kept}")
    return Sized(place, model, _count(model), False, tuple(notes))


def _from_tensors(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], dtype: torch.dtype | None
) -> nn.Module:
    """Modules by the names of `tensors` (dtype and shape by name): parts in parts, numbered ones as blocks of a list."""
    children: dict[tuple[str, ...], set[str]] = {}
    own: dict[tuple[str, ...], dict[str, nn.Parameter | Tensor]] = {}
    for name, (stored, shape) in tensors.items():
        *path, leaf = name.split(".")
        for depth in range(len(path)):
            children.setdefault(tuple(path[:depth]), set()).add(path[depth])
        kept = dtype if dtype is not None and stored.is_floating_point else stored
        meta = torch.empty(shape, dtype=kept, device="meta")
        parameter = stored.is_floating_point and leaf not in BUFFERS
        own.setdefault(tuple(path), {})[leaf] = nn.Parameter(meta) if parameter else meta
    homes: dict[tuple[str, ...], nn.Module] = {(): Part()}
    for path in sorted({*own, *children} - {()}, key=len):
        homes[path] = made = _module(path, own.get(path, {}), children.get(path, set()))
        homes[path[:-1]]._modules[path[-1]] = made  # under any name, even that of a module's attribute
    for path, found in own.items():
        for leaf, tensor in found.items():
            into = homes[path]._parameters if isinstance(tensor, nn.Parameter) else homes[path]._buffers
            into[leaf] = tensor  # type: ignore[index]
    return homes[()]


def _module(path: tuple[str, ...], own: Mapping[str, Tensor], children: set[str]) -> nn.Module:
    """A list, a layer that strategies know, or a part."""
    if not own and children and all(name.isdigit() for name in children):
        return nn.ModuleDict()
    weight = own.get("weight")
    if children or weight is None or weight.ndim != 2 or not isinstance(weight, nn.Parameter):
        return Part()
    with torch.device("meta"):  # its parameters are replaced by those of the file
        if any(word in path[-1].lower() for word in EMBEDDINGS):
            return nn.Embedding(*weight.shape)
        return nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in own)
