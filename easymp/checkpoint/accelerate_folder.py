"""Read-only: what Hugging Face Accelerate's `save_state` wrote (version 1.15's file names and contents).

Weights are safetensors; all else is files of torch.save, which are pickles: reading one can run whatever code its writer chose. So
nothing but safetensors is read until the caller says that the folder comes from someone he trusts. Even then torch's reader for plain
data goes first, and the one that runs code only takes what that one refuses. This is the only file of easymp that reads pickles.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..logging import get_logger
from .manifest import MANIFEST
from .single import load

logger = get_logger(__name__)

# Word of the record → the file of the first one; further ones have _1, _2 … before the ending.
SERIES = {
    "models": "pytorch_model.bin",
    "optimizers": "optimizer.bin",
    "schedulers": "scheduler.bin",
    "samplers": "sampler.bin",
    "loaders": "dl_state_dict.bin",
}
WEIGHTS = re.compile(r"model(?:_(\d+))?\.safetensors")
CUSTOM = re.compile(r"custom_checkpoint_(\d+)\.pkl")
RNG = re.compile(r"random_states_(\d+)\.pkl")
SCALER = "scaler.pt"
STATE_KEYS = ("state_dict", "model_state_dict", "model", "module")  # under which trainers keep the model's
# What other layouts of Accelerate's leave in the folder, and whose tool makes whole weights of it.
SPREAD = re.compile(r"pytorch_model(_fsdp)?(_\d+)?|pytorch_model_fsdp.*\.bin|optimizer_\d+|zero_pp_rank.*")


@dataclass(frozen=True)
class AccelerateStates:
    """What a folder held, in the order in which the objects were prepared; tensors on the CPU.

    Attributes:
        models: state_dicts. Of tied weights one name is there.
        optimizers, schedulers: state_dicts; an optimizer's refers to parameters by number, in the order of its param groups.
        samplers: of loaders whose sampler was kept, by the loader's number, as objects of Accelerate's classes.
        loaders: state_dicts of loaders that keep one (torchdata's), by the loader's number.
        scaler: the loss scale's state_dict.
        rng: by rank: "random_state" (Python), "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed" …
        step: Accelerate's count of micro-steps.
        custom: state_dicts of the objects of register_for_checkpointing.
    """

    models: tuple[dict[str, Tensor], ...] = ()
    optimizers: tuple[dict[str, Any], ...] = ()
    schedulers: tuple[dict[str, Any], ...] = ()
    samplers: Mapping[int, Any] = field(default_factory=dict)
    loaders: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    rng: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    step: int | None = None
    custom: tuple[dict[str, Any], ...] = ()


def is_accelerate_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` looks like one of Accelerate's `save_state`; nothing is opened."""
    try:
        names = os.listdir(folder)
        return MANIFEST not in names and any(map(RNG.fullmatch, names))
    except OSError:
        return False


def read_accelerate(folder: str | os.PathLike[str], allow_pickle: bool = False) -> AccelerateStates:
    """What Accelerate's `save_state` wrote to a local folder.

    Args:
        allow_pickle: read its pickles, too. A crafted one runs code of its writer's choice, with your rights, on every rank that reads it:
            only for folders that you or someone you trust wrote, and that nobody else could change since.

    Raises:
        CheckpointError: there are pickles, and they are not allowed (`load_weights` reads the model's weights without them); it is no
            such folder; a file is damaged.
    """
    place = Path(folder)
    try:
        names = sorted(os.listdir(place))
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read ({error})") from error
    numbered: dict[str, dict[int, str]] = {
        word: _series(names, _pattern(first), place) for word, first in SERIES.items()
    }
    weights = _series(names, WEIGHTS, place)
    custom, rng = _series(names, CUSTOM, place), _series(names, RNG, place)
    scaler = [SCALER] if SCALER in names else []
    pickles = [*(name for found in (*numbered.values(), custom, rng) for name in found.values()), *scaler]
    spread = [name for name in names if SPREAD.fullmatch(name) and name not in pickles]
    if spread:
        raise CheckpointError(
            f"{place}: {spread[0]} was written by sharded ranks (FSDP, DeepSpeed) in a layout that is not read here: merge the weights "
            "with `accelerate merge-weights`, and read them with load_weights"
        )
    if not (weights or pickles):
        raise CheckpointError(
            f"{place}: no folder of Accelerate's save_state: no model.safetensors, optimizer.bin, random_states_0.pkl …"
        )
    if pickles and not allow_pickle:
        raise CheckpointError(
            f"{place}: {', '.join(pickles)} are pickles, which can run code when they are read. If you trust whoever wrote this folder, "
            "pass allow_pickle=True; the weights alone are read without them by load_weights"
        )

    def read(name: str) -> Any:
        return _unpickled(place / name)

    both = set(weights) & set(numbered["models"])
    if both:
        raise CheckpointError(
            f"{place}: model {min(both)} is there twice, as safetensors and as a pickle: take one of them out"
        )
    models = {number: load(place / name) for number, name in weights.items()}
    models.update((number, read(name)) for number, name in numbered["models"].items())
    states = {rank: read(name) for rank, name in rng.items()}
    return AccelerateStates(
        models=_in_order(models, "model", place),
        optimizers=_in_order(_each(numbered["optimizers"], read), "optimizer", place),
        schedulers=_in_order(_each(numbered["schedulers"], read), "scheduler", place),
        samplers=_each(numbered["samplers"], read),
        loaders=_each(numbered["loaders"], read),
        scaler=read(SCALER) if scaler else None,
        rng=states,
        step=next((state["step"] for state in states.values() if "step" in state), None),
        custom=_in_order(_each(custom, read), "custom_checkpoint", place),
    )


def _pattern(first: str) -> re.Pattern[str]:
    stem, _, ending = first.partition(".")
    return re.compile(rf"{stem}(?:_(\d+))?\.{ending}")


def _series(names: list[str], pattern: re.Pattern[str], place: Path) -> dict[int, str]:
    """Files by number, the first of which may have none."""
    return dict(
        sorted(
            (int(found[1] or 0), name)
            for name in names
            if (found := pattern.fullmatch(name)) and (place / name).is_file()
        )
    )


def _each(files: Mapping[int, str], read: Callable[[str], Any]) -> dict[int, Any]:
    return {number: read(name) for number, name in files.items()}


def _in_order(found: Mapping[int, Any], word: str, place: Path) -> tuple[Any, ...]:
    for number in range(len(found)):
        if number not in found:
            raise CheckpointError(
                f"{place}: {word} {number} is missing, and {word} {max(found)} is there: copy the folder again"
            )
    return tuple(found[number] for number in range(len(found)))


def _unpickled(path: Path) -> Any:
    try:
        with _numpys_arrays():
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # more than plain data
        logger.warning("%s holds more than plain data: its pickle is run", path)
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointError(
            f"{path}: cannot be read ({type(error).__name__}: {error}): it may need the packages whose objects it holds"
        ) from error


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Tensors by name in a file of torch.save, at its top or under one of its keys; by torch's reader for plain data.

    Raises:
        CheckpointError: it cannot be read, holds more than plain data, or no state dict of a model.
    """
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # of the time before zip files: cannot be mapped
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{os.fspath(path)} holds more than plain data, and running it is not done here: in the program that wrote it, save the "
            "model by safetensors.torch.save_model"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{os.fspath(path)}: cannot be read ({type(error).__name__}: {error})"
        ) from error
    below = (
        [found]
        if not isinstance(found, Mapping)
        else [found, *(found[key] for key in STATE_KEYS if key in found)]
    )
    for candidate in below:
        if (
            isinstance(candidate, Mapping)
            and candidate
            and all(isinstance(value, Tensor) for value in candidate.values())
        ):
            return {str(name): value for name, value in candidate.items()}
    keys = ", ".join(map(str, list(found)[:5])) if isinstance(found, Mapping) else type(found).__name__
    raise CheckpointError(
        f"{os.fspath(path)}: no state dict of a model at its top or under {', '.join(STATE_KEYS)}; it holds {keys}"
    )


def _numpys_arrays() -> AbstractContextManager[Any]:
    """Inside, numpy's arrays of numbers count as plain data: its random state is one."""
    import numpy

    multiarray = (numpy._core if hasattr(numpy, "_core") else numpy.core).multiarray
    allowed = [multiarray._reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32"))]
    # Old protocols spell bytes as encoded text.
    import _codecs

    return torch.serialization.safe_globals([*allowed, _codecs.encode])
