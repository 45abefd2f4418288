"""Folders of Hugging Face Accelerate's `save_state` (file names and contents of version 1.15).

Accelerate writes weights as safetensors and the rest with torch.save, as pickles, which can run code. Those are read
only for a caller who trusts the folder: by torch's reader for plain data if it takes them, else by the one that runs
code. No other file of easymp runs pickles; `torch_files` reads plain data alone.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..logging import get_logger
from .codec import pack
from .huggingface import load
from .load import CheckpointReader
from .manifest import Manifest, canonical
from .model_state import OptimizerState
from .run_state import numbered
from .save import Saveable, per_rank
from .storage import MemoryFile
from .torch_files import unreadable, write
from .weights import stored_in_memory, without_wrappers

logger = get_logger(__name__)

# Field of `AccelerateStates` → names of its files; the number is missing from the first one.
SERIES = {
    "models": re.compile(r"pytorch_model(?:_(\d+))?\.bin"),
    "optimizers": re.compile(r"optimizer(?:_(\d+))?\.bin"),
    "schedulers": re.compile(r"scheduler(?:_(\d+))?\.bin"),
    "samplers": re.compile(r"sampler(?:_(\d+))?\.bin"),
    "loaders": re.compile(r"dl_state_dict(?:_(\d+))?\.bin"),
    "custom": re.compile(r"custom_checkpoint_(\d+)\.pkl"),
    "rng": re.compile(r"random_states_(\d+)\.pkl"),
}
ORDERED = {name: name.removesuffix("s") for name in ("models", "optimizers", "schedulers")}
ORDERED["custom"] = "custom_checkpoint"
WEIGHTS = re.compile(r"model(?:_(\d+))?\.safetensors")
SCALER = "scaler.pt"
SHARDED = re.compile(r"pytorch_model(_fsdp)?(_\d+)?|pytorch_model_fsdp.*\.bin|optimizer_\d+|zero_pp_rank.*")
LOADERS = "where loaders stood (Accelerate's folders do not say it; go on with skip_first_batches)"


@dataclass(frozen=True)
class AccelerateStates:
    """The contents of a folder, in the order in which the objects were prepared; tensors on the CPU.

    Attributes:
        models: state dicts, with one name of tied weights.
        optimizers: state dicts, which refer to parameters by number, in the order of the param groups.
        schedulers: state dicts.
        samplers: kept samplers by the loader's number, as objects of Accelerate's classes.
        loaders: state dicts of loaders that keep one (torchdata's), by the loader's number.
        scaler: the loss scale's state dict.
        rng: by rank: "random_state" (Python), "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed" …
        step: Accelerate's count of micro-steps.
        custom: state dicts of the objects of register_for_checkpointing.
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


def read_accelerate(folder: str | os.PathLike[str], allow_pickle: bool = False) -> AccelerateStates:
    """Read a local folder of Accelerate's `save_state`.

    Args:
        allow_pickle: read its pickles, too. A crafted one runs code of its writer's choice, with your rights, on every
            rank that reads it. Use it only for folders that you or someone you trust wrote, and that no one else could
            change since.

    Raises:
        CheckpointError: there are pickles, and they are not allowed (`load_weights` reads the model's weights without
            them); or it is not such a folder; or a file is damaged.
    """
    path = Path(folder)
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    series = {key: _series(names, pattern, path) for key, pattern in SERIES.items()}
    weights = _series(names, WEIGHTS, path)
    pickles = [name for files in series.values() for name in files.values()]
    pickles += [SCALER] if SCALER in names else []
    if sharded := [name for name in names if SHARDED.fullmatch(name) and name not in pickles]:
        raise CheckpointError(
            f"{path}: {sharded[0]} was written by sharded ranks (FSDP, DeepSpeed) in a layout that is not read here: "
            "merge the weights with `accelerate merge-weights`, and read them with load_weights"
        )
    if not (weights or pickles):
        raise CheckpointError(f"{path}: not a folder of Accelerate's save_state (no weights, no pickles)")
    if pickles and not allow_pickle:
        raise CheckpointError(
            f"{path}: {', '.join(pickles)} are pickles, which can run code when they are read. If you trust the writer "
            "of this folder, pass allow_pickle=True; the weights alone are read without them by load_weights"
        )
    if duplicates := set(weights) & set(series["models"]):
        raise CheckpointError(f"{path}: model {min(duplicates)} is there twice, safely and pickled: take one out")
    states: dict[str, Any] = {
        key: {i: _unpickle(path / name) for i, name in files.items()} for key, files in series.items()
    }
    states["models"] |= {number: load(path / name) for number, name in weights.items()}
    for key, item in ORDERED.items():
        states[key] = _in_order(states[key], item, path)
    scaler = _unpickle(path / SCALER) if SCALER in names else None
    step = next((state["step"] for state in states["rng"].values() if "step" in state), None)
    return AccelerateStates(**states, scaler=scaler, step=step)


def _series(names: list[str], pattern: re.Pattern[str], path: Path) -> dict[int, str]:
    matches = [(match, name) for name in names if (match := pattern.fullmatch(name))]
    return dict(sorted((int(match[1] or 0), name) for match, name in matches if (path / name).is_file()))


def _in_order(states: Mapping[int, Any], item: str, path: Path) -> tuple[Any, ...]:
    for number in range(len(states)):
        if number not in states:
            raise CheckpointError(f"{path}: {item} {number} is missing, {max(states)} is there: copy it again")
    return tuple(states[number] for number in range(len(states)))


def _unpickle(path: Path) -> Any:
    try:
        with _numpy_arrays_allowed():
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # more than plain data
        logger.warning("%s holds more than plain data: its pickle is run", path)
    except Exception as error:
        raise unreadable(path, error) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise unreadable(path, error, ": packages that define its objects may be missing") from error


def _numpy_arrays_allowed() -> AbstractContextManager[Any]:
    """Let torch's safe reader load NumPy arrays of numbers, which NumPy's random state needs."""
    import _codecs  # old protocols spell bytes as encoded text

    import numpy

    multiarray = (numpy._core if hasattr(numpy, "_core") else numpy.core).multiarray
    allowed = [multiarray._reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32"))]
    return torch.serialization.safe_globals([*allowed, _codecs.encode])


class AccelerateReader(CheckpointReader):
    """A folder of Accelerate's `save_state` in the form of our checkpoints; objects are matched by order."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        models: Sequence[nn.Module],
        items: Sequence[Saveable],
        seed: int,
        rank: int,
        strict: bool,
        allow_pickle: bool,
    ) -> None:
        states = read_accelerate(folder, allow_pickle)
        optimizers = [item for item in items if isinstance(item, OptimizerState)]
        trees, aliases = _translate(states, models, optimizers, seed)
        tensors: dict[str, Tensor] = {}
        packed = {name: pack(tree, name, tensors) for name, tree in trees.items()}
        manifest = Manifest(
            step=max((trees[o.name]["updates"] for o in optimizers if o.name in trees), default=0),
            world_size=max(len(states.rng), 1),
            written="",
            made_by="Accelerate",
            plan={},
            tensors={name: stored_in_memory(name, tensor) for name, tensor in tensors.items()},
            files={},
            states=packed,
            aliases=aliases,
        )
        files = {name: MemoryFile(tensor, name) for name, tensor in tensors.items()}
        super().__init__(manifest, files, rank, strict, reread=True)


def _translate(
    states: AccelerateStates, models: Sequence[nn.Module], optimizers: Sequence[OptimizerState], seed: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the states under the names that our checkpoints use, and the aliases of tied weights."""
    trees: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for i, weights in enumerate(states.models):
        name = numbered("model", i)
        live = models[i].state_dict(keep_vars=True) if i < len(models) else {}
        plain = {canonical(n) for n in live}
        trees[name] = {n if n in plain else without_wrappers(n): value for n, value in weights.items()}
        aliases |= {f"{name}/{n}": f"{name}/{target}" for n, target in _tied(live, trees[name]).items()}
    for i, state in enumerate(states.optimizers):
        name = numbered("optimizer", i)
        trees[name] = {}  # without a live one nothing takes it, and an error says so
        if i < len(optimizers):
            trees[name], trees[f"{name}/state"] = _by_name(state, optimizers[i])
            trees[f"{name}/masters"] = {}
    trees |= {f"state/scheduler_{i}": state for i, state in enumerate(states.schedulers)}
    trees |= {f"state/object_{i}": state for i, state in enumerate(states.custom)}
    if states.scaler:
        trees["state/scaler"] = states.scaler
    for rank, state in states.rng.items():
        slices = {"data_rank": rank, "data_size": len(states.rng), "seed": seed}
        trees[per_rank(rank, "state/random")] = {**slices, "streams": _streams(state)}
    return trees, aliases


def _tied(live: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Map each missing name of a tied weight to the name under which Accelerate wrote it."""
    ids = {canonical(name): id(value) for name, value in live.items()}
    written_names = {tensor: name for name, tensor in ids.items() if name in names}
    return {
        name: written_names[tensor] for name, tensor in ids.items() if name not in names and tensor in written_names
    }


def _by_name(state: Mapping[str, Any], optimizer: OptimizerState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Key an optimizer's `state_dict` by parameter names instead of numbers."""
    groups, saved = [group["params"] for group in optimizer.groups()], state["param_groups"]
    saved_counts, counts = [len(group["params"]) for group in saved], list(map(len, groups))
    if saved_counts != counts:
        raise CheckpointError(
            f"{optimizer.name} had param groups of {saved_counts} parameters, and has {counts} here: Accelerate's "
            "folders say by order which parameter is which"
        )
    names = {n: name for group, params in zip(saved, groups) for n, name in zip(group["params"], params)}
    by_name = {names[number]: entry for number, entry in state["state"].items() if number in names}
    tree = {
        "kind": optimizer.kind,
        "groups": [{**group, "params": params} for group, params in zip(saved, groups)],
        "updates": max((int(entry["step"]) for entry in by_name.values() if "step" in entry), default=0),
        "shared": {key: entry for key, entry in state["state"].items() if key not in names},
        "rest": {key: value for key, value in state.items() if key not in ("state", "param_groups")},
    }
    return tree, by_name


def _streams(state: Mapping[str, Any]) -> dict[str, Any]:
    """Random states in the form of `run_state`. Accelerators' streams start from the seed."""
    version, words_tensor, gauss = state["random_state"]
    streams: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words_tensor), "gauss": gauss},
        "torch": state["torch_manual_seed"],
        "devices": {},
    }
    if "numpy_random_seed" in state:
        name, key, position, has_gauss, cached = state["numpy_random_seed"]
        position_and_gauss = [int(position), int(has_gauss), float(cached)]
        streams["numpy"] = {"kind": str(name), "words": torch.tensor(key.tolist()), "rest": position_and_gauss}
    return streams


FILES = {
    "MODEL_NAME": "pytorch_model",
    "SAFE_MODEL_NAME": "model",
    "SAFE_WEIGHTS_INDEX_NAME": "model.safetensors.index.json",
    "SAFE_WEIGHTS_NAME": "model.safetensors",
    "SAFE_WEIGHTS_PATTERN_NAME": "model{suffix}.safetensors",
    "WEIGHTS_INDEX_NAME": "pytorch_model.bin.index.json",
    "WEIGHTS_NAME": "pytorch_model.bin",
    "WEIGHTS_PATTERN_NAME": "pytorch_model{suffix}.bin",
}


def beside(models: list[Any], weights: list[dict[str, Any]], folder: str, main: bool) -> None:
    """Save hook that writes the weights once more, under Accelerate's names. All ranks call it."""
    for number, state in enumerate(weights):
        tensors = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
        if main:
            write(
                {name: t.detach() if isinstance(t, Tensor) else t for name, t in tensors.items()},
                Path(folder, f"pytorch_model{f'_{number}' if number else ''}.bin"),
            )
