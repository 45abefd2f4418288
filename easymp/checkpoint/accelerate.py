"""Folders of Hugging Face Accelerate's `save_state` (file names and contents of version 1.15), and files of torch.save.

Accelerate writes weights as safetensors and the rest with torch.save, as pickles, which can run code. Those are read only for a caller who
trusts the folder: by torch's reader for plain data if it takes them, else by the one that runs code. No other file of easymp reads pickles.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, RefusedError
from ..logging import get_logger
from ..settings import read_bytes
from .codec import pack
from .folders import Opened
from .huggingface import Item, cut, load
from .load import Reading, Want
from .manifest import Manifest, Piece, Stored, canonical, whole
from .model_state import OptimizerState
from .run_state import numbered
from .snapshot import Kept, encode_index
from .storage import Tick, no_tick
from .storage_local import LocalStorage
from .weights import without_wrappers

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
STATE_KEYS = ("state_dict", "model_state_dict", "model", "module")  # under which trainers keep the model's
SPREAD = re.compile(r"pytorch_model(_fsdp)?(_\d+)?|pytorch_model_fsdp.*\.bin|optimizer_\d+|zero_pp_rank.*")
LOADERS = "where loaders stood (Accelerate's folders do not say it; go on with skip_first_batches)"


@dataclass(frozen=True)
class AccelerateStates:
    """The contents of a folder, in the order in which the objects were prepared; tensors on the CPU.

    Attributes:
        models: state dicts, with one name of tied weights.
        optimizers, schedulers: state dicts; an optimizer's refers to parameters by number, in the order of its param groups.
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
        allow_pickle: read its pickles, too. A crafted one runs code of its writer's choice, with your rights, on every rank that reads it.
            Use it only for folders that you or someone you trust wrote, and that no one else could change since.

    Raises:
        CheckpointError: there are pickles, and they are not allowed (`load_weights` reads the model's weights without them); or it is not
            such a folder; or a file is damaged.
    """
    place = Path(folder)
    try:
        names = sorted(os.listdir(place))
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read ({error})") from error
    series = {word: _series(names, pattern, place) for word, pattern in SERIES.items()}
    weights = _series(names, WEIGHTS, place)
    pickles = [name for found in series.values() for name in found.values()]
    pickles += [SCALER] if SCALER in names else []
    if spread := [name for name in names if SPREAD.fullmatch(name) and name not in pickles]:
        raise CheckpointError(
            f"{place}: {spread[0]} was written by sharded ranks (FSDP, DeepSpeed) in a layout that is not read here: merge the weights "
            "with `accelerate merge-weights`, and read them with load_weights"
        )
    if not (weights or pickles):
        raise CheckpointError(f"{place}: not a folder of Accelerate's save_state (no weights, no pickles)")
    if pickles and not allow_pickle:
        raise CheckpointError(
            f"{place}: {', '.join(pickles)} are pickles, which can run code when they are read. If you trust the writer of this folder, "
            "pass allow_pickle=True; the weights alone are read without them by load_weights"
        )
    if both := set(weights) & set(series["models"]):
        raise CheckpointError(f"{place}: model {min(both)} is there twice, safely and pickled: take one out")
    found: dict[str, Any] = {
        word: {i: _unpickled(place / name) for i, name in files.items()} for word, files in series.items()
    }
    found["models"] |= {number: load(place / name) for number, name in weights.items()}
    for word, one in ORDERED.items():
        found[word] = _in_order(found[word], one, place)
    scaler = _unpickled(place / SCALER) if SCALER in names else None
    step = next((state["step"] for state in found["rng"].values() if "step" in state), None)
    return AccelerateStates(**found, scaler=scaler, step=step)


def _series(names: list[str], pattern: re.Pattern[str], place: Path) -> dict[int, str]:
    """Files by number."""
    found = [(match, name) for name in names if (match := pattern.fullmatch(name))]
    return dict(sorted((int(match[1] or 0), name) for match, name in found if (place / name).is_file()))


def _in_order(found: Mapping[int, Any], word: str, place: Path) -> tuple[Any, ...]:
    for number in range(len(found)):
        if number not in found:
            raise CheckpointError(
                f"{place}: {word} {number} is missing, {max(found)} is there: copy it again"
            )
    return tuple(found[number] for number in range(len(found)))


# -- files of torch.save -----------------------------------------------------------------------------------------------


def _unpickled(path: Path) -> Any:
    try:
        with _numpy_arrays_allowed():
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # more than plain data
        logger.warning("%s holds more than plain data: its pickle is run", path)
    except Exception as error:
        raise _unreadable(path, error) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise _unreadable(path, error, ": packages that define its objects may be missing") from error


def _unreadable(path: Any, error: Exception, more: str = "") -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}){more}")


def _numpy_arrays_allowed() -> AbstractContextManager[Any]:
    """Let torch's safe reader load NumPy arrays of numbers, which NumPy's random state needs."""
    import _codecs  # old protocols spell bytes as encoded text

    import numpy

    multiarray = (numpy._core if hasattr(numpy, "_core") else numpy.core).multiarray
    allowed = [multiarray._reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32"))]
    return torch.serialization.safe_globals([*allowed, _codecs.encode])


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Tensors by name in a file of torch.save, at its top or under one of STATE_KEYS, read by torch's reader for plain data."""
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file without the zip format cannot be mapped
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than plain data, and running it is not done here: in the program that wrote it, save the model by "
            "safetensors.torch.save_model"
        ) from error
    except Exception as error:
        raise _unreadable(path, error) from error
    top = found if isinstance(found, Mapping) else {}
    for candidate in (top, *(top[key] for key in STATE_KEYS if key in top)):
        named = isinstance(candidate, Mapping) and bool(candidate)
        if named and all(isinstance(value, Tensor) for value in candidate.values()):
            return {str(name): value for name, value in candidate.items()}
    keys = ", ".join(map(str, list(top)[:5])) if top else type(found).__name__
    raise CheckpointError(f"{path}: no state dict at its top or under {', '.join(STATE_KEYS)}; it has {keys}")


# -- into a live run ---------------------------------------------------------------------------------------------------


class Translated(Reading):
    """A folder of Accelerate's `save_state` in the form of our checkpoints; objects are matched with the live ones by order."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        models: Sequence[nn.Module],
        parts: Sequence[Kept],
        seed: int,
        rank: int,
        strict: bool,
        allow_pickle: bool,
    ) -> None:
        found = read_accelerate(folder, allow_pickle)
        optimizers = [part for part in parts if isinstance(part, OptimizerState)]
        trees, aliases = _translate(found, models, optimizers, seed)
        self._tensors: dict[str, Tensor] = {}
        states = {name: pack(tree, name, self._tensors) for name, tree in trees.items()}
        tensors = {
            name: Stored(t.dtype, tuple(t.shape), (Piece(whole(tuple(t.shape)), name, 0),))
            for name, t in self._tensors.items()
        }
        step = max((trees[o.name]["updates"] for o in optimizers if o.name in trees), default=0)
        manifest = Manifest(step, max(len(found.rng), 1), "", "Accelerate", {}, tensors, {}, states, aliases)
        super().__init__(Opened(LocalStorage(folder), "", manifest), rank, strict, again=True)

    def run(self, tick: Tick = no_tick) -> None:
        self._refill(self._wanted)
        self._wanted.clear()

    def _refill(self, wants: Sequence[Want]) -> None:
        with torch.no_grad():
            for want in wants:
                values = self._tensors[want.stored.pieces[0].file]
                want.into.copy_(values[tuple(slice(o, o + n) for o, n in zip(*want.box))])


def _translate(
    found: AccelerateStates, models: Sequence[nn.Module], optimizers: Sequence[OptimizerState], seed: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the states under the names that our checkpoints use, and the aliases of tied weights."""
    trees: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for i, weights in enumerate(found.models):
        name = numbered("model", i)
        live = models[i].state_dict(keep_vars=True) if i < len(models) else {}
        plain = {canonical(n) for n in live}
        trees[name] = {n if n in plain else without_wrappers(n): value for n, value in weights.items()}
        aliases |= {f"{name}/{n}": f"{name}/{of}" for n, of in _tied(live, trees[name]).items()}
    for i, state in enumerate(found.optimizers):
        name = numbered("optimizer", i)
        trees[name] = {}  # without a live one nothing takes it, and an error says so
        if i < len(optimizers):
            trees[name], trees[f"{name}/state"] = _by_name(state, optimizers[i])
            trees[f"{name}/masters"] = {}
    trees |= {f"state/scheduler_{i}": state for i, state in enumerate(found.schedulers)}
    trees |= {f"state/object_{i}": state for i, state in enumerate(found.custom)}
    if found.scaler:
        trees["state/scaler"] = found.scaler
    for rank, state in found.rng.items():
        slices = {"data_rank": rank, "data_size": len(found.rng), "seed": seed}
        trees[f"ranks/{rank:05d}/state/random"] = {**slices, "streams": _streams(state)}
    return trees, aliases


def _tied(live: Mapping[str, Any], there: Collection[str]) -> dict[str, str]:
    """Map each missing name of a tied weight to the name under which Accelerate wrote it."""
    names = {canonical(name): id(value) for name, value in live.items()}
    first = {value: name for name, value in names.items() if name in there}
    return {n: first[value] for n, value in names.items() if n not in there and value in first}


def _by_name(state: Mapping[str, Any], optimizer: OptimizerState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Key an optimizer's `state_dict` by parameter names instead of numbers."""
    groups, saved = [group["params"] for group in optimizer.groups()], state["param_groups"]
    had, has = [len(group["params"]) for group in saved], list(map(len, groups))
    if had != has:
        raise CheckpointError(
            f"{optimizer.name} had param groups of {had} parameters, and has {has} here: Accelerate's folders say by order which "
            "parameter is which"
        )
    names = {n: name for group, params in zip(saved, groups) for n, name in zip(group["params"], params)}
    remembered = {names[number]: entry for number, entry in state["state"].items() if number in names}
    tree = {
        "kind": optimizer.kind,
        "groups": [{**group, "params": params} for group, params in zip(saved, groups)],
        "updates": max((int(entry["step"]) for entry in remembered.values() if "step" in entry), default=0),
        "shared": {key: entry for key, entry in state["state"].items() if key not in names},
        "rest": {key: value for key, value in state.items() if key not in ("state", "param_groups")},
    }
    return tree, remembered


def _streams(found: Mapping[str, Any]) -> dict[str, Any]:
    """Random states in the form of `run_state`. Accelerators' streams start from the seed."""
    version, words, gauss = found["random_state"]
    streams: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": found["torch_manual_seed"],
        "devices": {},
    }
    if "numpy_random_seed" in found:
        kind, key, place, has_gauss, cached = found["numpy_random_seed"]
        rest = [int(place), int(has_gauss), float(cached)]
        streams["numpy"] = {"kind": str(kind), "words": torch.tensor(key.tolist()), "rest": rest}
    return streams


# -- files of torch.save, for scripts that ask for ``safe_serialization=False``; all can be read with ``weights_only=True`` -----


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


def write(obj: Any, f: str | os.PathLike[str]) -> None:
    """Write an object by torch.save, in place of an older file; one that ``torch.load(weights_only=True)`` does not read is refused."""
    place, fresh = os.fspath(f), f"{os.fspath(f)}.tmp"
    try:
        torch.save(obj, fresh)
        torch.load(fresh, mmap=True, weights_only=True)
        os.replace(fresh, place)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        said = str(error).splitlines()[0]
        raise RefusedError(
            f"{place}: torch.load(weights_only=True) does not read this {type(obj).__name__} ({said}), and other reading can run code: "
            "save tensors, numbers, strings, lists and dicts of these, such as state_dict() gives"
        ) from error
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{place}: cannot be written ({error})") from error
    finally:
        with suppress(FileNotFoundError):
            os.remove(fresh)


def read(file: str) -> Any:
    """The weights in a file of torch.save, on the CPU."""
    return torch.load(file, map_location="cpu", weights_only=True)


def write_model(state: Mapping[str, Any], folder: str, max_shard_size: int | str) -> None:
    """Write weights as ``pytorch_model.bin``, or as shards and their index; shards of an earlier model are removed."""
    os.makedirs(folder, exist_ok=True)
    first: dict[int, str] = {}
    twins = {name: first.setdefault(id(value), name) for name, value in state.items()}
    items = [Item(name, t.dtype, tuple(t.shape)) for name, t in state.items() if twins[name] == name]
    shards = [{i.name for i in shard} for shard in cut(items, read_bytes(max_shard_size, "max_shard_size="))]
    count = len(shards)
    names = [
        "pytorch_model.bin" if count == 1 else f"pytorch_model-{i:05d}-of-{count:05d}.bin"
        for i in range(1, count + 1)
    ]
    weights = {}
    for file, shard in zip(names, shards):
        mine = {name: value for name, value in state.items() if twins[name] in shard}
        write(mine, Path(folder, file))
        weights.update(dict.fromkeys(mine, file))
    if count > 1:
        Path(folder, FILES["WEIGHTS_INDEX_NAME"]).write_bytes(
            encode_index(weights, sum(i.bytes for i in items))
        )
    for there in os.listdir(folder):
        if re.fullmatch(r"pytorch_model(-\d{5}-of-\d{5})?\.bin", there) and there not in names:
            os.remove(Path(folder, there))


def beside(models: list[Any], weights: list[dict[str, Any]], folder: str, main: bool) -> None:
    """A save hook: the weights once more, by the names that Accelerate gives them in a checkpoint. All ranks call it."""
    for number, state in enumerate(weights):
        whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
        if main:
            write(
                {name: t.detach() if isinstance(t, Tensor) else t for name, t in whole.items()},
                Path(folder, f"pytorch_model{f'_{number}' if number else ''}.bin"),
            )
