"""A DataLoader that was left out of `prepare` on several ranks: said in the plan, and warned of where the ranks train on the same data.

Looked at once, in the first backward pass, and only if no prepared loader is being read then. What a program may do itself is left
alone: a sampler of another kind than torch's plain ones (`DistributedSampler` is one) splits the data, and an `IterableDataset` may. For
the others the ranks compare what their data sets hold, without reading a sample: a program that gives each rank files, indices or
tensors of its own is not warned either.
"""

from __future__ import annotations

import gc
import secrets
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..distributed.process_group import World
from ..errors import EasympWarning
from ..protocols import Choice, Source

PLAIN = (SequentialSampler, RandomSampler, WeightedRandomSampler)
PATIENCE = 64  # backward passes in which the other ranks' words are looked for
MOST, DEPTH, FEW = 1000, 12, 16  # values of a data set that are looked at, how deep, and elements of each


class Unprepared:
    """What `Accelerator.backward` asks on several data ranks until there is an answer.

    Args:
        data_rank: which of the `data_size` slices of the data this rank is to see.
    """

    def __init__(self, world: World, data_rank: int, data_size: int) -> None:
        self._world, self._rank, self._size = world, data_rank, data_size
        self._own, self._what, self._looks = "", "", 0

    def first(self) -> Choice[str]:
        """The plan's line, where no prepared loader is being read; the other ranks are told what this one reads."""
        read = [it for it in gc.get_objects() if issubclass(type(it), _BaseDataLoaderIter)]
        streams = [type(it._dataset).__name__ for it in read if isinstance(it._dataset, IterableDataset)]
        plain = []
        for it in read:
            batches = it._index_sampler
            sampler = batches.sampler if type(batches) is BatchSampler else batches
            if type(sampler) in PLAIN:
                plain.append((it._dataset, type(sampler).__name__))
        if not read or len(plain) + len(streams) < len(read):
            return Choice(
                "as given",
                "no prepared DataLoader is read: the program itself splits the data",
                Source.DETECTED,
            )
        if streams:
            why = f"a DataLoader that was not passed to prepare() is read: {streams[0]} must split its samples by rank itself"
            return Choice("not prepared", why, Source.DETECTED)
        self._what = f"a DataLoader ({type(plain[0][0]).__name__}, {plain[0][1]})"
        self._own = repr([(sampler, outline(dataset, iter(range(MOST)))) for dataset, sampler in plain])
        self._store = self._world.store()
        self._store.set(f"unprepared/{self._rank}", self._own)
        return Choice(
            "not prepared", f"{self._what} that was not passed to prepare() is read", Source.DETECTED
        )

    def further(self) -> bool:
        """Whether there is more to look for. Rank 0 warns once all others have told that they read the same."""
        self._looks += 1
        if not self._own or self._world.rank or self._looks > PATIENCE:
            return False
        keys = [f"unprepared/{rank}" for rank in range(1, self._size)]
        if not self._store.check(keys):
            return True
        if all(self._store.get(key).decode() == self._own for key in keys):
            warnings.warn(
                f"{self._size} ranks read the same data by {self._what} that was not passed to prepare(): each trains on all of it. Pass "
                "the DataLoader to prepare() and loop over what that returns, or give it a DistributedSampler",
                EasympWarning,
                stacklevel=4,
            )
        return False


def outline(value: Any, left: Iterator[int], depth: int = 0) -> Any:
    """What tells a data set from another one, by its attributes: nothing of it is called, and few elements are read.

    Args:
        left: yields something for each value that may still be looked at.
    """
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if depth > DEPTH or next(left, None) is None:
        return None
    if isinstance(value, torch.Tensor) and (
        value.layout != torch.strided or value.is_nested or value.is_meta
    ):
        return secrets.token_hex(8)  # has no elements to look at: taken for another one on each rank
    if isinstance(value, torch.Tensor):
        flat = value.detach().flatten() if value.is_contiguous() else value.new_empty(0)
        return tuple(value.shape), str(value.dtype), flat[:: max(1, len(flat) // FEW)].tolist()
    if hasattr(value, "__array_interface__"):
        return tuple(value.shape), str(value.dtype), value.flat[:: max(1, value.size // FEW)].tolist()
    if isinstance(value, (list, tuple, range)):
        return len(value), [outline(item, left, depth + 1) for item in value[:: max(1, len(value) // FEW)]]
    if isinstance(value, dict):
        return len(value), [
            (str(key), outline(item, left, depth + 1)) for key, item in list(value.items())[:FEW]
        ]
    return type(value).__qualname__, outline(getattr(value, "__dict__", None), left, depth + 1)
