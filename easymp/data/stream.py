"""Source for iterable data sets: every rank reads the stream and keeps its slice of each global batch.

The data set is wrapped inside the worker, so that a stream is cut before it is collated. Each worker cuts its own stream, in the same
way on every rank. The position of the stream, the repeated rows and the state of the data set travel with each batch.
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
from .order import Cut, flagged, one, rounds, size_of
from .source import Feed, Note, aside, rebuild


class Mark(NamedTuple):
    """Position of the stream of one worker."""

    worker: int  # -1: no round, only the turn of another worker
    end: int = 0  # samples of this worker's stream, over all ranks
    state: Any = None  # of the data set, if it has state_dict
    ended: bool = False  # the stream was read to its end, so that `state` begins a new pass


class Piece(NamedTuple):
    """A round on its way from a worker, with one batch for each rank read here. DataLoader pins memory inside named tuples."""

    batches: list[Any]
    sizes: list[int | None]
    surplus: int
    mark: Mark


class Cutter(IterableDataset[Any]):
    """The data set inside the rebuilt DataLoader: yields this rank's uncollated batches. Attributes are those of the wrapped data set."""

    def __init__(
        self, dataset: Any, cut: Cut, ranks: Sequence[int], ready: bool, epoch: torch.Tensor | None
    ) -> None:
        self.__dict__.update(dataset=dataset, _cut=cut, _ranks=ranks, _ready=ready, _epoch=epoch)
        self.__dict__.update(_marks={}, _lead=0, _seeds=(0, 0))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.dataset, name, value)

    def begin(self, cut: Cut, marks: dict[int, Mark], lead: int, seed: int, epoch: int) -> None:
        """Settings of the next pass: how to cut, the mark of each worker, and the worker that comes first."""
        self.__dict__.update(_cut=cut, _marks=marks, _lead=lead, _seeds=(seed, epoch))

    def __iter__(self) -> Iterator[Piece]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        seed, epoch = self._seeds
        if self._epoch is not None:
            epoch = int(self._epoch)  # persistent workers hold copies: only shared memory reaches them
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
        if worker < self._lead:
            yield Piece([], [], 0, Mark(-1))  # workers take turns, and another one is next
        cut, mark = self._cut, self._marks.get(worker, Mark(worker))
        if mark.ended:
            return
        stateful = callable(getattr(self.dataset, "state_dict", None))
        at = 0
        if mark.state is not None:
            self.dataset.load_state_dict(mark.state)
            at = mark.end
        weigh, length = (rows, cut.ranks) if self._ready else (one, cut.whole)

        def items(place: int) -> Iterator[Any]:
            """Those from `place` on, each under random streams that are the same on all ranks, so that shuffles are cut alike."""
            each = 1 if self._ready else length
            seed_host(mix(seed, "stream", epoch, worker, place))
            for item in self.dataset:
                place += weigh(item) or 1
                yield item
                if place % each == 0:
                    seed_host(mix(seed, "stream", epoch, worker, place))

        how: Any = {"complete": cut.completes, "drop_last": cut.drop_last, "start": mark.end, "at": at}
        for round_ in rounds(items(at), length, **how, weigh=weigh):
            state = deepcopy(self.dataset.state_dict()) if stateful else None
            batches, sizes = self._share(round_.items)
            if batches:
                ended = len(round_.items) < length or round_.surplus != 0
                yield Piece(batches, sizes, round_.surplus, Mark(worker, round_.end, state, ended))

    def _share(self, items: list[Any]) -> tuple[list[Any], list[int | None]]:
        """The batches of the ranks that are read here, and their sizes."""
        if self._ready:
            batches = [items[rank] for rank in self._ranks if rank < len(items)]
            return batches, [rows(batch) for batch in batches]
        size = self._cut.batch
        batches = [batch for rank in self._ranks if (batch := items[rank * size : (rank + 1) * size])]
        return batches, [len(batch) for batch in batches]


def collated(collate: Callable[[Any], Any], piece: Piece) -> Piece:
    """`piece` with batches that the user's function has collated."""
    return piece._replace(batches=[collate(batch) for batch in piece.batches])


def rows(batch: Any) -> int | None:
    """Samples in a ready batch: size of dimension 0 of its first array."""
    for leaf in pytree.leaves(batch):
        if shape := getattr(leaf, "shape", None):
            return int(shape[0])
    return None


class StreamSource:
    """Reads an iterable data set. Arguments as for MapSource."""

    def __init__(
        self, given: DataLoader[Any], cut: Cut, ranks: Sequence[int], *, seed: int, pin_memory: bool
    ) -> None:
        self.seed = seed
        self.cut, self._ranks, self._ready = cut, ranks, given.batch_size is None
        persistent = given.persistent_workers
        # Shared memory tells persistent workers that another epoch begins.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_() if persistent else None
        self._dataset = Cutter(given.dataset, cut, ranks, self._ready, self._epoch)
        collate = partial(collated, given.collate_fn)
        self.loader = rebuild(given, self._dataset, pin_memory, batch_size=None, collate_fn=collate)
        self._streams = max(1, given.num_workers)
        self._marks: dict[int, Mark] = {}  # by worker, after the current batch
        self._turn = 0  # worker of the next batch
        # What persistent workers hold: how to cut, the seed, and whether they began at marks.
        self._told = (cut, seed, False)

    def batches(self, rank: int) -> int | None:
        total = self.samples()
        if total is None:
            return None
        return (self.cut._replace(batch=1) if self._ready else self.cut).batches(total, rank)

    def samples(self) -> int | None:
        return size_of(self._dataset.dataset)

    def indices(self, epoch: int, begin: int, end: int) -> None:
        return None

    def read(self, epoch: int, start: int, skip: int) -> Feed:
        if not start:
            self._marks, self._turn = {}, 0
        elif not self._marks:
            self._marks = {0: Mark(0, start)}
        self._dataset.begin(self.cut, dict(self._marks), self._turn, self.seed, epoch)
        if self._epoch is not None:
            self._epoch.fill_(epoch)
            if self._marks or self._told != (self.cut, self.seed, False):
                # Persistent workers cannot learn how to cut and where to begin: start new ones.
                self.loader._iterator = None
            self._told = (self.cut, self.seed, bool(self._marks))
        self.loader.generator.manual_seed(mix(self.seed, "workers", epoch, start, self._ranks[0]))  # type: ignore[union-attr]
        ends = {worker: mark.end for worker, mark in self._marks.items()}
        # Without workers the data set would draw from the random streams of the training.
        reader = self.loader if self.loader.num_workers else aside(self.loader)
        pieces = (piece for piece in reader if piece.mark.worker >= 0)
        for number, (piece, last) in enumerate(flagged(pieces)):
            mark = piece.mark
            ends[mark.worker] = mark.end
            if number < skip:
                self.passed(mark)
                continue
            total = sum(ends.values())
            for rank, batch, size in zip(self._ranks, piece.batches, piece.sizes):
                yield batch, Note(rank, total, piece.surplus, size, last, mark)

    def passed(self, mark: Mark) -> None:
        self._marks[mark.worker] = mark
        self._turn = (mark.worker + 1) % self._streams

    def drawing(self) -> None:
        return None

    def state(self) -> dict[str, Any]:
        marks = [self._marks.get(worker, Mark(worker)) for worker in range(self._streams)]
        state: dict[str, Any] = {"streams": [mark.end for mark in marks], "turn": self._turn}
        if (n := self.samples()) is not None:
            state["samples"] = n
        if any(mark.state is not None for mark in marks):
            state["data sets"] = [mark.state for mark in marks]
        if any(mark.ended for mark in marks):
            state["ended"] = [mark.ended for mark in marks]
        return state

    def load(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        ends = state.get("streams", [state["position"]])
        if state["position"] and len(ends) != self._streams:
            why = f"the state was saved with {len(ends)} streams of data (one a worker), and this loader has {self._streams}"
            raise BatchError(
                f"{why}: make the DataLoader of an iterable data set with num_workers={len(ends)}, as before"
            )
        states = state.get("data sets", [None] * len(ends))
        ended = state.get("ended", [False] * len(ends))
        marks = [Mark(w, *mark) for w, mark in enumerate(zip(ends, states, ended))]
        self._marks = {mark.worker: mark for mark in marks if mark.end or mark.state is not None}
        self._turn = state.get("turn", 0)
