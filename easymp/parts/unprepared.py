"""A check of several ranks' data: a DataLoader that was not passed to `prepare` may give all ranks the same samples."""

from __future__ import annotations

import gc
import secrets
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..base.parts import Part
from ..errors import EasympWarning
from ..protocols import Choice, Source

PLAIN_SAMPLERS = (SequentialSampler, RandomSampler, WeightedRandomSampler)
MAX_LOOKS = 64  # backward passes in which rank 0 looks for the outlines of the other ranks
MAX_VALUES, MAX_DEPTH, MAX_ELEMENTS = 1000, 12, 16  # limits of an outline: values, nesting, elements per value


class UnpreparedData(Part):
    """Finds a DataLoader that was not passed to `prepare` although several ranks read it.

    At the first backward it looks where the data comes from, and says so in the plan. Later backwards on rank 0 look
    for the outlines of what the other ranks read, and warn where all are the same.
    """

    name = "unprepared"

    def __init__(self) -> None:
        self._outline, self._loader_kind, self._looks = "", "", 0

    def begin(self) -> None:
        if self.run.world.size == 1:
            self.run.parts.remove(self)

    def loss(self, loss: torch.Tensor, num_items: Any = None) -> None:
        run = self.run
        strategy = run.prepared.strategy
        if strategy.data_size == 1:
            return
        if run.plan.data is None and run.window.reading is None:
            run.plan = replace(run.plan, data=self._describe_data(strategy.data_rank))
        elif run.plan.data is None or not self._look_again(strategy.data_size):
            run.parts.end(self, "loss")

    def _describe_data(self, data_rank: int) -> Choice[str]:
        """The line of the plan. The other ranks get an outline of the data that this rank reads."""
        iterators = [item for item in gc.get_objects() if issubclass(type(item), _BaseDataLoaderIter)]
        streams = [type(it._dataset).__name__ for it in iterators if isinstance(it._dataset, IterableDataset)]
        sampled = []
        for iterator in iterators:
            batches = iterator._index_sampler
            sampler = batches.sampler if type(batches) is BatchSampler else batches
            if type(sampler) in PLAIN_SAMPLERS:
                sampled.append((iterator._dataset, type(sampler).__name__))
        if not iterators or len(sampled) + len(streams) < len(iterators):
            reason = "no prepared DataLoader is read: the program itself splits the data"
            return Choice("as given", reason, Source.DETECTED)
        fact = "that was not passed to prepare() is read"
        if streams:
            reason = f"a DataLoader {fact}: {streams[0]} must split its samples by rank itself"
            return Choice("not prepared", reason, Source.DETECTED)
        self._loader_kind = f"a DataLoader ({type(sampled[0][0]).__name__}, {sampled[0][1]})"
        self._outline = repr([(sampler, outline(dataset, iter(range(MAX_VALUES)))) for dataset, sampler in sampled])
        self._store = self.run.world.store()
        self._store.set(f"unprepared/{data_rank}", self._outline)
        return Choice("not prepared", f"{self._loader_kind} {fact}", Source.DETECTED)

    def _look_again(self, data_size: int) -> bool:
        """Whether to look again. Rank 0 warns as soon as all ranks report the same data."""
        self._looks += 1
        if not self._outline or self.run.world.rank or self._looks > MAX_LOOKS:
            return False
        keys = [f"unprepared/{rank}" for rank in range(1, data_size)]
        if not self._store.check(keys):
            return True
        if all(self._store.get(key).decode() == self._outline for key in keys):
            warnings.warn(
                f"{data_size} ranks read the same data by {self._loader_kind} that was not passed to prepare(): each "
                "trains on all of it. "
                "Pass the DataLoader to prepare() and loop over its result, or give it a DistributedSampler",
                EasympWarning,
                stacklevel=4,
            )
        return False


def outline(value: Any, budget: Iterator[int], depth: int = 0) -> Any:
    """Fingerprint of a data set by attributes: reads few elements and `budget` values, and calls no method."""
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if depth > MAX_DEPTH or next(budget, None) is None:
        return None
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested or value.is_meta:
            return secrets.token_hex(8)  # no elements to read: different on each rank
        flat = value.detach().flatten() if value.is_contiguous() else value.new_empty(0)
        return tuple(value.shape), str(value.dtype), flat[:: max(1, len(flat) // MAX_ELEMENTS)].tolist()
    if hasattr(value, "__array_interface__"):
        return tuple(value.shape), str(value.dtype), value.flat[:: max(1, value.size // MAX_ELEMENTS)].tolist()
    if isinstance(value, (list, tuple, range)):
        return len(value), [outline(item, budget, depth + 1) for item in value[:: max(1, len(value) // MAX_ELEMENTS)]]
    if isinstance(value, dict):
        items = list(value.items())[:MAX_ELEMENTS]
        return len(value), [(str(key), outline(item, budget, depth + 1)) for key, item in items]
    return type(value).__qualname__, outline(getattr(value, "__dict__", None), budget, depth + 1)
