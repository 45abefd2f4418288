"""Source for iterable data sets: every rank reads the stream and keeps its slice of each global batch.

The data set is wrapped inside the worker, so that a stream is cut before it is collated. Each worker cuts its own
stream, in the same way on every rank. The position of the stream, the repeated rows and the state of the data set
travel with each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..base import pytree
from ..base.rng import mix, seed_host
from ..errors import BatchError
from .order import Cut, flagged, parts, rounds, size_of
from .source import Feed, Note, generator_of, rebuild, without_draws


class Mark(NamedTuple):
    """Position of the stream of one worker."""

    worker: int  # -1: no round, only the turn of another worker
    end: int = 0  # samples of this worker's stream, over all ranks
    state: Any = None  # of the data set, if it has state_dict
    exhausted: bool = False  # the stream was read to its end, so that `state` begins a new pass


class WorkerRound(NamedTuple):
    """A round from a worker, a batch for each rank that reads here. DataLoader pins memory inside named tuples."""

    batches: list[Any]
    sizes: list[int | None]
    surplus: int
    mark: Mark


class Cutter(IterableDataset[Any]):
    """The data set inside the rebuilt DataLoader: yields rounds of uncollated batches; other attributes are its own."""

    def __init__(
        self, dataset: Any, cut: Cut, ranks: Sequence[int], ready_batches: bool, epoch: torch.Tensor | None
    ) -> None:
        self.__dict__.update(dataset=dataset, _cut=cut, _ranks=ranks, _ready_batches=ready_batches, _epoch=epoch)
        self.__dict__.update(_marks={}, _first_worker=0, _seed_and_epoch=(0, 0))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.dataset, name, value)

    def begin(self, cut: Cut, marks: dict[int, Mark], first_worker: int, seed: int, epoch: int) -> None:
        """Settings of the next pass."""
        self.__dict__.update(_cut=cut, _marks=marks, _first_worker=first_worker, _seed_and_epoch=(seed, epoch))

    def __iter__(self) -> Iterator[WorkerRound]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        seed, epoch = self._seed_and_epoch
        if self._epoch is not None:
            epoch = int(self._epoch)  # persistent workers hold copies: only shared memory reaches them
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
        if worker < self._first_worker:
            yield WorkerRound([], [], 0, Mark(-1))  # workers take turns, and another one is next
        cut, mark = self._cut, self._marks.get(worker, Mark(worker))
        if mark.exhausted:
            return
        stateful = callable(getattr(self.dataset, "state_dict", None))
        position = 0
        if mark.state is not None:
            self.dataset.load_state_dict(mark.state)
            position = mark.end
        length = cut.ranks if self._ready_batches else cut.global_batch
        items = self._seeded_items(position, 1 if self._ready_batches else length, (seed, "stream", epoch, worker))
        for round_ in rounds(items, cut, rows if self._ready_batches else None, mark.end, position):
            state = deepcopy(self.dataset.state_dict()) if stateful else None
            size = None if self._ready_batches else cut.part(len(round_.items))
            batches = [share.items for share in parts(round_, size, self._ranks)]
            if batches:
                exhausted = len(round_.items) < length or round_.surplus != 0
                sizes = [rows(batch) if self._ready_batches else len(batch) for batch in batches]
                yield WorkerRound(batches, sizes, round_.surplus, Mark(worker, round_.end, state, exhausted))

    def _seeded_items(self, position: int, interval: int, seed: tuple[int | str, ...]) -> Iterator[Any]:
        """Items from `position` on, with random streams equal on all ranks and seeded each `interval` items."""
        seed_host(mix(*seed, position))
        for item in self.dataset:
            position += (rows(item) if self._ready_batches else 1) or 1
            yield item
            if position % interval == 0:
                seed_host(mix(*seed, position))


def collated(collate: Callable[[Any], Any], worker_round: WorkerRound) -> WorkerRound:
    """A copy of `worker_round` with its batches collated by `collate`."""
    return worker_round._replace(batches=[collate(batch) for batch in worker_round.batches])


def rows(batch: Any) -> int | None:
    """Samples in a ready batch: size of dimension 0 of its first array."""
    for leaf in pytree.leaves(batch):
        if shape := getattr(leaf, "shape", None):
            return int(shape[0])
    return None


class StreamSource:
    """Reads an iterable data set. Arguments as for MapSource."""

    def __init__(
        self, loader: DataLoader[Any], cut: Cut, ranks: Sequence[int], *, seed: int, seeded: bool, pin_memory: bool
    ) -> None:
        self.seed, self._seeded = seed, seeded
        self._generator = loader.generator if len(ranks) == 1 else None
        self.cut, self._ranks, self._ready_batches = cut, ranks, loader.batch_size is None
        # Shared memory tells persistent workers that another epoch begins.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_() if loader.persistent_workers else None
        self._dataset = Cutter(loader.dataset, cut, ranks, self._ready_batches, self._epoch)
        collate = partial(collated, loader.collate_fn)
        self.loader = rebuild(loader, self._dataset, pin_memory, batch_size=None, collate_fn=collate)
        self._streams = max(1, loader.num_workers)
        self._marks: dict[int, Mark] = {}  # by worker, after the current batch
        self._next_worker = 0
        self._worker_settings = (cut, seed, False)  # of persistent workers: cut, seed, whether they began at marks

    def batches(self, rank: int, epoch: int) -> int | None:
        total = self.samples()
        if total is None:
            return None
        return (self.cut._replace(batch=1) if self._ready_batches else self.cut).batches(total, rank)

    def samples(self) -> int | None:
        return size_of(self._dataset.dataset)

    def indices(self, epoch: int, begin: int, end: int) -> None:
        return None

    def read(self, epoch: int, start: int, skip: int) -> Feed:
        if not start:
            self._marks, self._next_worker = {}, 0
        elif not self._marks:
            self._marks = {0: Mark(0, start)}
        self._dataset.begin(self.cut, dict(self._marks), self._next_worker, self.seed, epoch)
        if self._epoch is not None:
            self._epoch.fill_(epoch)
            if self._marks or self._worker_settings != (self.cut, self.seed, False):
                # Persistent workers cannot learn how to cut and where to begin: start new ones.
                self.loader._iterator = None
            self._worker_settings = (self.cut, self.seed, bool(self._marks))
        self.loader.generator = self._generator
        if self._seeded or start:
            self.loader.generator = generator_of(self.seed, "workers", epoch, start, self._ranks[0])
        ends = {worker: mark.end for worker, mark in self._marks.items()}
        # Without workers the data set would draw from the random streams of the training.
        reader = self.loader if self.loader.num_workers else without_draws(self.loader)
        worker_rounds = (worker_round for worker_round in reader if worker_round.mark.worker >= 0)
        for number, ((batches, sizes, surplus, mark), last) in enumerate(flagged(worker_rounds)):
            ends[mark.worker] = mark.end
            if number < skip:
                self.advance(mark)
                continue
            total = sum(ends.values())
            for rank, batch, size in zip(self._ranks, batches, sizes):
                yield batch, Note(rank, total, surplus, size, last, mark)

    def advance(self, mark: Mark) -> None:
        self._marks[mark.worker] = mark
        self._next_worker = (mark.worker + 1) % self._streams

    def drawing(self) -> None:
        return None

    def state(self) -> dict[str, Any]:
        marks = [self._marks.get(worker, Mark(worker)) for worker in range(self._streams)]
        state: dict[str, Any] = {"streams": [mark.end for mark in marks], "turn": self._next_worker}
        if (samples := self.samples()) is not None:
            state["samples"] = samples
        if any(mark.state is not None for mark in marks):
            state["data sets"] = [mark.state for mark in marks]
        if any(mark.exhausted for mark in marks):
            state["ended"] = [mark.exhausted for mark in marks]
        return state

    def load(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        ends = state.get("streams", [state["position"]])
        if state["position"] and len(ends) != self._streams:
            raise BatchError(
                f"the state was saved with {len(ends)} streams of data (one a worker), and this loader has "
                f"{self._streams}: make the DataLoader of an iterable data set with num_workers={len(ends)}, as before"
            )
        states = state.get("data sets", [None] * len(ends))
        ended = state.get("ended", [False] * len(ends))
        marks = [Mark(worker, *mark) for worker, mark in enumerate(zip(ends, states, ended))]
        self._marks = {mark.worker: mark for mark in marks if mark.end or mark.state is not None}
        self._next_worker = state.get("turn", 0)
