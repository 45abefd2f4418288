"""Folders of Hugging Face Accelerate's `save_state` (file names and contents of version 1.15).

Accelerate writes weights as safetensors and the rest with torch.save, as pickles, which can run code. Those are read
only for a caller who trusts the folder: by torch's reader for plain data if it takes them, else by the one that runs
code. No other file of easymp runs pickles; `torch_files` reads plain data alone.
"""

from __future__ import annotations

import os
import pickle  # noqa: TID251
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..logging import get_logger
from .codec import TensorName, pack, unpack
from .export import load
from .load import CheckpointReader
from .manifest import Manifest, canonical, per_rank
from .model_state import OptimizerState
from .run_state import numbered
from .save import Saveable
from .storage import MemoryFile
from .torch_files import unreadable
from .weights import stored_in_memory, without_wrappers

logger = get_logger(__name__)

# Names of the files; the number is missing from the first one. Files of samplers and loaders are not read.
SERIES = {
    "model": re.compile(r"pytorch_model(?:_(\d+))?\.bin"),
    "optimizer": re.compile(r"optimizer(?:_(\d+))?\.bin"),
    "scheduler": re.compile(r"scheduler(?:_(\d+))?\.bin"),
    "custom_checkpoint": re.compile(r"custom_checkpoint_(\d+)\.pkl"),
    "random_states": re.compile(r"random_states_(\d+)\.pkl"),
}
WEIGHTS = re.compile(r"model(?:_(\d+))?\.safetensors")
SCALER = "scaler.pt"
SHARDED = re.compile(r"pytorch_model(_fsdp)?(_\d+)?|pytorch_model_fsdp.*\.bin|optimizer_\d+|zero_pp_rank.*")
LOADERS = "where loaders stood (Accelerate's folders do not say it; go on with skip_first_batches)"


def read_folder(folder: str | os.PathLike[str], allow_pickle: bool = False) -> dict[str, dict[int, Any]]:
    """The state dicts in a local folder: kind (a key of SERIES, or "scaler") → number → state dict, on the CPU."""
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
    if duplicates := set(weights) & set(series["model"]):
        raise CheckpointError(f"{path}: model {min(duplicates)} is there twice, safely and pickled: take one out")
    states: dict[str, dict[int, Any]] = {
        kind: {i: _unpickle(path / name) for i, name in files.items()} for kind, files in series.items()
    }
    states["model"] |= {number: load(path / name) for number, name in weights.items()}
    states["scaler"] = {0: _unpickle(path / SCALER)} if SCALER in names else {}
    for kind, by_number in states.items():
        missing = [number for number in range(len(by_number)) if number not in by_number]
        if missing and kind != "random_states":  # a folder may be one node's
            raise CheckpointError(f"{path}: {kind} {missing[0]} is missing, {max(by_number)} is there: copy it again")
    return states


def _series(names: list[str], pattern: re.Pattern[str], path: Path) -> dict[int, str]:
    matches = [(match, name) for name in names if (match := pattern.fullmatch(name))]
    return dict(sorted((int(match[1] or 0), name) for match, name in matches if (path / name).is_file()))


def _unpickle(path: Path) -> Any:
    import _codecs  # old protocols spell bytes as encoded text

    import numpy

    # NumPy's random state is an array of numbers, which torch's reader for plain data refuses otherwise.
    multiarray = (numpy._core if hasattr(numpy, "_core") else numpy.core).multiarray
    allowed = [multiarray._reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32")), _codecs.encode]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except pickle.UnpicklingError:  # more than plain data
        logger.warning("%s holds more than plain data: its pickle is run", path)
    except Exception as error:
        raise unreadable(path, error) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=False)  # noqa: TID251
    except Exception as error:
        raise unreadable(path, error, ": packages that define its objects may be missing") from error


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
        states = read_folder(folder, allow_pickle)
        optimizers = [item for item in items if isinstance(item, OptimizerState)]
        trees, aliases = _translate(states, models, optimizers, seed)
        tensors: dict[str, Tensor] = {}
        packed = {name: pack(tree, name, tensors) for name, tree in trees.items()}
        manifest = Manifest(
            step=max((trees[o.name]["updates"] for o in optimizers if o.name in trees), default=0),
            world_size=max(len(states["random_states"]), 1),
            made_by="Accelerate",
            tensors={name: stored_in_memory(name, tensor) for name, tensor in tensors.items()},
            states=packed,
            aliases=aliases,
            trees={name: unpack(tree, TensorName) for name, tree in packed.items()},
        )
        files = {name: MemoryFile(tensor, name) for name, tensor in tensors.items()}
        super().__init__(manifest, files, rank, strict, reread=True)


def _translate(
    states: Mapping[str, Mapping[int, Any]],
    models: Sequence[nn.Module],
    optimizers: Sequence[OptimizerState],
    seed: int,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the states under the names that our checkpoints use, and the aliases of tied weights."""
    trees: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for i, weights in states["model"].items():
        name = numbered("model", i)
        live = models[i].state_dict(keep_vars=True) if i < len(models) else {}
        ids = {canonical(n): id(value) for n, value in live.items()}
        trees[name] = tree = {n if n in ids else without_wrappers(n): value for n, value in weights.items()}
        stored_names = {ids[n]: n for n in ids if n in tree}  # of tied weights one was written
        tied = {n: stored_names[i] for n, i in ids.items() if n not in tree and i in stored_names}
        aliases |= {f"{name}/{n}": f"{name}/{target}" for n, target in tied.items()}
    for i, state in states["optimizer"].items():
        name = numbered("optimizer", i)
        trees[name] = {}  # without a live one nothing takes it, and an error says so
        if i < len(optimizers):
            trees[name], trees[f"{name}/state"] = _by_name(state, optimizers[i])
            trees[f"{name}/masters"] = {}
    trees |= {f"state/scheduler_{i}": state for i, state in states["scheduler"].items()}
    trees |= {f"state/object_{i}": state for i, state in states["custom_checkpoint"].items()}
    if states["scaler"].get(0):
        trees["state/scaler"] = states["scaler"][0]
    for rank, state in states["random_states"].items():
        slices = {"data_rank": rank, "data_size": len(states["random_states"]), "seed": seed}
        trees[per_rank(rank, "state/random")] = {**slices, "streams": _streams(state)}
    return trees, aliases


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
