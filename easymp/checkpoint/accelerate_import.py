"""Read-only: what Hugging Face Accelerate's `save_state` wrote (version 1.15's file names and contents).

Weights are safetensors; all else is files of torch.save, which are pickles: reading one can run whatever code its writer chose. So
nothing but safetensors is read until the caller says that the folder comes from someone he trusts. Even then torch's reader for plain
data goes first, and the one that runs code only takes what that one refuses. This is the only file of easymp that reads pickles.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..logging import get_logger
from .blocks import Tick, no_tick
from .codec import pack
from .huggingface import load
from .layout import whole
from .load import Reading
from .manifest import MANIFEST, Manifest, Piece, Stored
from .model_state import OptimizerState
from .read_plan import Want
from .run_state import numbered
from .source import canonical, without_wrappers
from .storage_local import LocalStorage

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


# -- A folder of Accelerate's `save_state`, told in the words of our own checkpoints, so that it goes the same way into what is live.


LOADERS = "where loaders stood (Accelerate's folders do not say it; go on with skip_first_batches)"


class Translated(Reading):
    """Such a folder, all of it in memory.

    Args:
        models: those that take the weights, in the order in which they were prepared.
        optimizers: likewise.
        seed: of the run that loads.
        options: of `read_accelerate`, which says what they risk.

    Raises:
        CheckpointError: as `read_accelerate`; or an optimizer that had other param groups.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        models: Sequence[nn.Module],
        optimizers: Sequence[OptimizerState],
        seed: int,
        rank: int = 0,
        strict: bool = True,
        **options: Any,
    ) -> None:
        found = read_accelerate(folder, **options)
        self._tensors: dict[str, Tensor] = {}
        states, aliases = self._states(found, models, optimizers, seed)
        tensors = {
            name: Stored(t.dtype, tuple(t.shape), (Piece(whole(tuple(t.shape)), name, 0),))
            for name, t in self._tensors.items()
        }
        step = max((states[o.name]["updates"] for o in optimizers if o.name in states), default=0)
        manifest = Manifest(step, max(len(found.rng), 1), "", "Accelerate", {}, tensors, {}, states, aliases)
        super().__init__(LocalStorage(folder), "", manifest, rank, strict, again=True)

    def run(self, tick: Tick = no_tick) -> None:
        self._refill(self._wanted)
        self._wanted.clear()

    def _refill(self, wants: Sequence[Want]) -> None:
        with torch.no_grad():
            for want in wants:
                want.into.copy_(self._within(want))

    def _within(self, want: Want) -> Tensor:
        values = self._tensors[want.stored.pieces[0].file]
        for dim, (offset, count) in enumerate(zip(want.box.offset, want.box.shape)):
            values = values.narrow(dim, offset, count)
        return values

    def _pack(self, name: str, value: Any) -> Any:
        return pack(value, name, self._tensors)

    def _states(
        self,
        found: AccelerateStates,
        models: Sequence[nn.Module],
        optimizers: Sequence[OptimizerState],
        seed: int,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        trees: dict[str, Any] = {}
        aliases: dict[str, str] = {}
        for i, weights in enumerate(found.models):
            name = numbered("model", i)
            live = models[i].state_dict(keep_vars=True) if i < len(models) else {}
            trees[name] = named_as({canonical(n) for n in live}, weights)
            aliases |= {f"{name}/{n}": f"{name}/{of}" for n, of in tied(live, trees[name])}
        for i, state in enumerate(found.optimizers):
            name = numbered("optimizer", i)
            if i < len(optimizers):
                trees[name], trees[f"{name}/state"] = by_name(state, optimizers[i])
                trees[f"{name}/masters"] = {}
            else:
                trees[name] = {}  # nobody takes it, which is said
        trees |= {f"state/scheduler_{i}": state for i, state in enumerate(found.schedulers)}
        trees |= {f"state/object_{i}": state for i, state in enumerate(found.custom)}
        if found.scaler:
            trees["state/scaler"] = found.scaler
        for rank, streams in found.rng.items():
            slices = {"data_rank": rank, "data_size": len(found.rng), "seed": seed}
            trees[f"ranks/{rank:05d}/state/random"] = {**slices, "streams": streams_of(streams)}
        return {name: self._pack(name, tree) for name, tree in trees.items()}, aliases


# -- What Accelerate's folders say by order, or by names of wrappers, in the names that things have here.


def named_as(live: Collection[str], weights: Mapping[str, Any]) -> dict[str, Any]:
    """`weights` by the names of the live model: without those of wrappers, where it has none."""
    return {name if name in live else without_wrappers(name): value for name, value in weights.items()}


def tied(live: Mapping[str, Any], there: Collection[str]) -> list[tuple[str, str]]:
    """Names of the live model that are not there, each with the one that is, of the same tensor: of tied weights, one is written."""
    first = {id(value): canonical(name) for name, value in live.items() if canonical(name) in there}
    missing = [(canonical(name), id(value)) for name, value in live.items() if canonical(name) not in there]
    return [(name, first[value]) for name, value in missing if value in first]


def by_name(state: Mapping[str, Any], optimizer: OptimizerState) -> tuple[dict[str, Any], dict[str, Any]]:
    """What torch's `state_dict` of an optimizer says by numbers of parameters, by the names that they have here."""
    kind, groups = optimizer.layout()
    saved = state["param_groups"]
    if [len(group["params"]) for group in saved] != [len(names) for names in groups]:
        raise CheckpointError(
            f"{optimizer.name} had param groups of {[len(group['params']) for group in saved]} parameters, and has "
            f"{[len(names) for names in groups]} here: Accelerate's folders say by order which parameter is which"
        )
    names = {
        number: name for group, names in zip(saved, groups) for number, name in zip(group["params"], names)
    }
    told = [{**group, "params": names} for group, names in zip(saved, groups)]
    remembered = {names[number]: entry for number, entry in state["state"].items() if number in names}
    updates = max((int(entry["step"]) for entry in remembered.values() if "step" in entry), default=0)
    shared = {key: entry for key, entry in state["state"].items() if key not in names}
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {"kind": kind, "groups": told, "updates": updates, "shared": shared, "rest": rest}, remembered


def streams_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Random streams as `streams.states` has them; accelerators' begin anew."""
    version, words, gauss = found["random_state"]
    streams: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": found["torch_manual_seed"],
        "devices": {},
    }
    if "numpy_random_seed" in found:
        kind, key, place, has_gauss, cached = found["numpy_random_seed"]
        streams["numpy"] = {
            "kind": str(kind),
            "words": torch.tensor(key.tolist()),
            "rest": [int(place), int(has_gauss), float(cached)],
        }
    return streams
