"""Elastic training: committed states, samplers that know the processed samples, and a function that is run again after a failure.

When an operation fails on all processes, they restore the last commit. A process that died is restarted by its launcher, ``easymp launch
--max-restarts N``; its commit is read from the folder that ``project_dir`` names (an argument here, or EASYMP_PROJECT_DIR), as
safetensors. Hosts that join during a run are also the launcher's task.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

from ...checkpoint.huggingface import load, save_tree
from ...errors import SettingError
from ...settings import resolve
from . import engine
from .engine import HorovodInternalError
from .operations import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters

FILE = "elastic-state.safetensors"
RESETS = 100


class HostsUpdatedInterrupt(Exception):
    """For scripts that catch it. It is never raised here: hosts change between restarts only."""


class ObjectState:
    """Values with commits, as attributes: ``state.epoch``, ``state.batch``."""

    def __init__(self, **values: Any) -> None:
        self._values = dict(values)
        self._resets: list[Callable[[], None]] = []
        self.__dict__.update(values)
        self.save()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions to call after a reset, for example to change a learning rate for another number of ranks."""
        self._resets += callbacks

    def on_reset(self) -> None:
        for callback in self._resets:
            callback()

    def save(self) -> None:
        """Keep the current values in memory."""
        for name in self._values:
            self._values[name] = copy.deepcopy(getattr(self, name))

    def restore(self) -> None:
        """Go back to the last `save`."""
        self.__dict__.update(copy.deepcopy(self._values))

    def commit(self) -> None:
        """`save`; of a TorchState with a project folder also to disk."""
        self.save()

    def check_host_updates(self) -> None:
        """Do nothing: hosts change between restarts only."""

    def sync(self) -> None:
        """Rank 0's values on every rank."""
        self.__dict__.update(broadcast_object({name: getattr(self, name) for name in self._values}, 0))
        self.save()


class TorchState(ObjectState):
    """A model, an optimizer, samplers, and values.

    Args:
        model, optimizer: further ones may have names of their own.
        project_dir: where commits are written; None: as EASYMP_PROJECT_DIR or easymp.toml says, else nowhere.
        values: numbers, words, samplers; attributes of the state.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, project_dir: str | None = None, **values: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **values}
        self._kept: dict[str, Any] = {n: v for n, v in given.items() if hasattr(v, "load_state_dict")}
        self.__dict__.update(self._kept)
        folder = project_dir or resolve().project_dir
        self._file = Path(folder, FILE) if folder else None
        self._saved: dict[str, Any] = {}
        super().__init__(**{n: v for n, v in given.items() if n not in self._kept and v is not None})

    def on_reset(self) -> None:
        for item in self._kept.values():
            if isinstance(item, ElasticSampler):
                item.reset()
        super().on_reset()

    def save(self) -> None:
        self._saved = {name: copy.deepcopy(item.state_dict()) for name, item in self._kept.items()}
        super().save()

    def restore(self) -> None:
        for name, item in self._kept.items():
            item.load_state_dict(copy.deepcopy(self._saved[name]))
        super().restore()

    def commit(self) -> None:
        super().commit()
        if self._file is not None and engine.rank() == 0:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            save_tree({"kept": self._saved, "values": self._values}, self._file)

    def recall(self) -> None:
        """Load the commit of an earlier run, if there is one."""
        if self._file is None or not self._file.exists():
            return
        found = load(self._file)
        if (found["kept"].keys(), found["values"].keys()) != (self._saved.keys(), self._values.keys()):
            theirs, ours = sorted({*found["kept"], *found["values"]}), sorted({*self._saved, *self._values})
            raise SettingError(f"{self._file} holds {theirs}, and this state {ours}: move it away")
        self._saved, self._values = found["kept"], found["values"]
        self.restore()

    def sync(self) -> None:
        for item in self._kept.values():
            if isinstance(item, torch.nn.Module):
                broadcast_parameters(item.state_dict(), 0)
            elif isinstance(item, torch.optim.Optimizer):
                broadcast_optimizer_state(item, 0)
            elif isinstance(item, ElasticSampler):
                states = allgather_object(item.state_dict())
                done = sorted(set().union(*(state["processed_indices"] for state in states)))
                item.load_state_dict({"epoch": states[0]["epoch"], "processed_indices": done})
            else:
                item.load_state_dict(broadcast_object(item.state_dict(), 0))
        super().sync()


class ElasticSampler(Sampler[int]):
    """Shares out the samples that no rank has processed in this epoch.

    Args:
        dataset: anything with a length.
        shuffle: in an order of `seed` and epoch, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without processed samples; call it at the end of the one before."""
        self.load_state_dict({"epoch": epoch, "processed_indices": ()})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that this batch, of `batch_size` samples a rank, is processed."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Any) -> None:
        """Note that these samples are processed."""
        self.processed_indices.update(map(int, indices))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Samples of a batch of this rank."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch: int = state_dict["epoch"]
        self.processed_indices: set[int] = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks equally; the first ones are repeated to fill up."""
        rank, size = (engine.rank(), engine.size()) if engine.is_initialized() else (0, 1)
        left = [i for i in range(len(self.dataset)) if i not in self.processed_indices]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(left)
        self.num_samples = math.ceil(len(left) / size)
        self.total_size = self.num_samples * size
        self.indices = [left[i % len(left)] for i in range(rank, self.total_size, size)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a state that is called again, from the last commit, when an operation failed on all ranks.

    Raises:
        HorovodInternalError: the ranks do not find together again, or it failed a hundred times.
    """

    @functools.wraps(function)
    def wrapped(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state, TorchState):
            state.recall()
        for _ in range(RESETS):
            state.sync()
            try:
                return function(state, *args, **kwargs)
            except HorovodInternalError as error:
                failed = error
                state.restore()
                engine.shutdown()
                engine.init()
                state.on_reset()
        raise failed

    return wrapped
