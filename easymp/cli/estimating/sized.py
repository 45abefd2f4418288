"""The model that a person names: a function or class in Python, a file of weights, or a number of parameters."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint import open_source
from ...errors import SettingError, nearest
from .stand_in import from_count, from_tensors

COUNT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE)
SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
MOST = 10**13  # parameters
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMS = "a number of parameters (1.5B, 350M), a file or folder of weights (model.safetensors, its index.json), or module:callable"


@dataclass(frozen=True)
class Sized:
    """A model to estimate.

    Attributes:
        name: as it was given.
        model: a module, on the meta device where it could be; or a number of parameters that is too small for a stand-in.
        parameters: how many.
        runs: whether its forward can be followed, for activations.
        notes: what is taken for granted.
    """

    name: str
    model: nn.Module | int
    parameters: int
    runs: bool
    notes: tuple[str, ...] = ()


def read_model(text: str, dtype: str | None = None) -> Sized:
    """What `text` names.

    Args:
        dtype: a key of `DTYPES`, which parameters are held in; or "own": as in the file, or as the callable makes them. None: fp32 for
            files and counts, which is what mixed precision trains, and "own" for a callable.

    Raises:
        SettingError: it names nothing, or nothing that is a model.
        CheckpointError: a file of weights that cannot be read.
    """
    if dtype not in (None, "own", *DTYPES):
        raise SettingError(f"dtype={dtype!r} is none of own, {', '.join(DTYPES)}")
    number = read_count(text)
    if number is not None:
        return _counted(text, number, DTYPES.get(dtype or "fp32", torch.float32))
    if os.path.exists(text) or "://" in text or text.endswith((".safetensors", ".json")):
        return _filed(text, dtype or "fp32")
    if re.fullmatch(r"[\w.]+:[\w.]+", text):
        return _called(text, DTYPES.get(dtype or "own"))
    raise SettingError(f"{text!r} is no model: pass {FORMS}")


def read_count(text: str) -> int | None:
    """``"1.5B"`` → 1,500,000,000; None where `text` is no number."""
    found = COUNT.fullmatch(text.strip())
    if not found:
        return None
    number = float(re.sub("[_,]", "", found[1])) * SCALE[found[2].lower()]
    if not 1 <= number <= MOST:
        raise SettingError(f"{text!r} is no number of parameters from 1 to {MOST:.0e}")
    return round(number)


def read_sample(texts: list[str]) -> tuple[Tensor, ...]:
    """Inputs on the meta device: ``"8x3x224x224"``, or with a dtype ``"8x1024:int64"``.

    Raises:
        SettingError: no shape, or no dtype of torch.
    """
    made = []
    for text in texts:
        shape, _, word = text.partition(":")
        dtype = getattr(torch, word or "float32", None)
        if not re.fullmatch(r"[0-9]+(x[0-9]+)*", shape) or not isinstance(dtype, torch.dtype):
            raise SettingError(
                f"{text!r} is no input: pass its shape, such as 8x3x224x224, and a dtype if it is not float32: 8x1024:int64"
            )
        made.append(torch.empty([int(n) for n in shape.split("x")], dtype=dtype, device="meta"))
    return tuple(made)


def _counted(text: str, number: int, dtype: torch.dtype) -> Sized:
    made = from_count(number)
    if made is None:
        return Sized(text, number, number, False)
    model, words = made
    return Sized(text, model.to(dtype), number, False, (f"{text}: {words}",))


def _filed(place: str, dtype: str) -> Sized:
    if place.endswith((".bin", ".pt", ".pth", ".ckpt")):
        raise SettingError(
            f"{place} holds Python objects, which can run code when they are read: convert it to safetensors, or pass {FORMS}"
        )
    stored = {name: (one.dtype, tuple(one.shape)) for name, one in open_source(place).tensors.items()}
    model = from_tensors(stored, DTYPES.get(dtype))
    held = {str(kind).removeprefix("torch.") for kind, _ in stored.values() if kind.is_floating_point}
    notes = [f"{place}: {len(stored)} tensors by their headers; parts are told by their names"]
    if dtype != "own" and held != {str(DTYPES[dtype]).removeprefix("torch.")}:
        notes.append(
            f"the file holds {', '.join(sorted(held))}; counted as trained in {dtype} (--dtype own: as in the file)"
        )
    return Sized(place, model, _count(model), False, tuple(notes))


def _called(text: str, dtype: torch.dtype | None) -> Sized:
    home, _, attribute = text.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)  # as `python -m` does
    try:
        found: Any = importlib.import_module(home)
    except ModuleNotFoundError as error:
        raise SettingError(f"{text}: {error}; the working directory is looked in first") from error
    finally:
        sys.path.remove(here)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise SettingError(f"{home} has no {attribute!r}{nearest(name, dir(found))}")
        found = getattr(found, name)
    notes: list[str] = []
    model = found if isinstance(found, nn.Module) else _built(text, found, notes)
    if not isinstance(model, nn.Module):
        raise SettingError(
            f"{text} gives a {type(model).__name__}, not a model: write a function that returns the torch.nn.Module alone"
        )
    if dtype is not None:
        model = model.to(dtype)
    return Sized(text, model, _count(model), True, tuple(notes))


def _built(text: str, make: Callable[[], Any], notes: list[str]) -> Any:
    if not callable(make):
        raise SettingError(f"{text} is a {type(make).__name__}, neither a model nor something to call")
    try:
        with torch.device("meta"):
            return make()
    except Exception as first:
        try:
            made = make()  # some look at values while they are built
        except Exception as error:
            raise SettingError(
                f"{text}() failed with {type(error).__name__}: {error}. It is called without arguments: write a function that takes "
                "none and returns the model"
            ) from error
        notes.append(
            f"{text} was built in the host's memory, for on the meta device it failed ({type(first).__name__})"
        )
        return made


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
