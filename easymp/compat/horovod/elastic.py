"""Elastic training: committed states, samplers that know the processed samples, and a function that is run again after a failure.

When an operation fails on all processes, they restore the last commit. A process that died is restarted by its launcher, ``easymp launch
--max-restarts N``, as are hosts that join; its commit is read from the folder that ``project_dir`` names (an argument here, or
EASYMP_PROJECT_DIR), as safetensors.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

from ...checkpoint.huggingface import load, save_tree
from ...errors import SettingError
from ...settings import resolve
from .basics import HorovodInternalError, init, is_initialized, rank, shutdown, size
from .optimizer import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters

FILE = "elastic-state.safetensors"
RESETS = 100


class HostsUpdatedInterrupt(RuntimeError):
    """For scripts that raise or catch it; it is not raised here, as hosts change between restarts only."""

    def __init__(self, skip_sync: bool) -> None:
        self.skip_sync = skip_sync


class ElasticSampler(Sampler[int]):
    """Divides the samples of an epoch that no rank has processed among the ranks, shuffled by `seed` and epoch.

    `processed_num` counts samples from the start of the epoch's order, and `processed_indices` are those that `record_indices` named;
    `remaining_indices` is the order without both.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without processed samples; call it at the end of the one before."""
        self.load_state_dict({"epoch": epoch})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed one more batch of `batch_size` samples."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that this rank has processed these samples, in any order; a TorchState's `sync` collects those of all ranks."""
        self.processed_indices.update(map(int, indices))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Samples of a batch of this rank, once it iterates."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        indices = {"processed_indices": sorted(self.processed_indices)} if self.processed_indices else {}
        return {"epoch": self.epoch, "processed_num": self.processed_num, **indices}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch: int = state_dict["epoch"]
        self.processed_num: int = state_dict.get("processed_num", 0)
        self.processed_indices: set[int] = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks equally; the first ones are repeated to fill up."""
        self.rank, self.num_replicas = (rank(), size()) if is_initialized() else (0, 1)
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = [i for i in order[self.processed_num :] if i not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        self.indices = [left[i % len(left)] for i in range(self.rank, self.total_size, self.num_replicas)]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


class TorchState:
    """Models, optimizers, samplers, schedules and values, with commits; all are attributes.

    What has `state_dict` and `load_state_dict` is kept by them. Commits are written to `project_dir`, or where EASYMP_PROJECT_DIR or
    easymp.toml says, else nowhere.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, *, project_dir: str | None = None, **kwargs: Any
    ) -> None:
        folder = project_dir or resolve().project_dir
        items = {"model": model, "optimizer": optimizer, **kwargs}
        self.__dict__.update(items, _names=list(items), _resets=[], _file=folder and Path(folder, FILE))
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._kept and hasattr(value, "state_dict"):
            self._kept[name] = copy.deepcopy(value.state_dict())

    def _stateful(self) -> dict[str, Any]:
        items = {name: getattr(self, name) for name in self._names}
        return {name: item for name, item in items.items() if hasattr(item, "load_state_dict")}

    def _plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names if name not in self._stateful()}

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions to call after a reset, for example to change a learning rate for another number of ranks."""
        self._resets.extend(callbacks)

    def on_reset(self) -> None:
        for item in self._stateful().values():
            if isinstance(item, ElasticSampler):
                item.reset()
        for callback in self._resets:
            callback()

    def save(self) -> None:
        """Keep the current values in memory."""
        kept = {name: copy.deepcopy(item.state_dict()) for name, item in self._stateful().items()}
        self.__dict__.update(_kept=kept, _values=copy.deepcopy(self._plain()))

    def restore(self) -> None:
        """Go back to the last `save`."""
        for name, item in self._stateful().items():
            item.load_state_dict(copy.deepcopy(self._kept[name]))
        self.__dict__.update(copy.deepcopy(self._values))

    def commit(self) -> None:
        """`save`; with a project folder also to disk."""
        self.save()
        self.check_host_updates()
        if self._file and rank() == 0:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            save_tree({"kept": self._kept, "values": self._values}, self._file)

    def check_host_updates(self) -> None:
        """Do nothing: hosts change between restarts only."""

    def recall(self) -> None:
        """Load the commit of an earlier run, if there is one."""
        if not self._file or not self._file.exists():
            return
        found = load(self._file)
        if (found["kept"].keys(), found["values"].keys()) != (self._kept.keys(), self._values.keys()):
            theirs, ours = sorted({*found["kept"], *found["values"]}), sorted(self._names)
            raise SettingError(f"{self._file} holds {theirs}, and this state {ours}: move it away")
        self.__dict__.update(_kept=found["kept"], _values=found["values"])
        self.restore()

    def sync(self) -> None:
        """Rank 0's state on every rank."""
        for item in self._stateful().values():
            if isinstance(item, torch.nn.Module):
                broadcast_parameters(item.state_dict(), 0)
            elif isinstance(item, torch.optim.Optimizer):
                broadcast_optimizer_state(item, 0)
            elif isinstance(item, ElasticSampler):
                states = allgather_object(item.state_dict())
                done = sorted(set().union(*(state.get("processed_indices", ()) for state in states)))
                item.load_state_dict({**states[0], "processed_indices": done})
            else:
                item.load_state_dict(broadcast_object(item.state_dict(), 0))
        self.__dict__.update(broadcast_object(self._plain(), 0))
        self.save()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a state that is called again, from the last commit, when an operation failed on all ranks, up to a hundred times."""

    @functools.wraps(func)
    def wrapped(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        state.recall()
        skip_sync = False
        for _ in range(RESETS):
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except (HorovodInternalError, HostsUpdatedInterrupt) as error:
                failed, skip_sync = error, getattr(error, "skip_sync", False)
            if isinstance(failed, HorovodInternalError):
                state.restore()
            shutdown()
            init()
            state.on_reset()
        raise failed

    return wrapped
