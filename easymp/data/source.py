"""What a prepared loader reads from: one kind of source a kind of loader, all with the same few verbs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..base.rng import apart, seed_host
from ..distributed.process_group import World
from ..errors import BatchError
from .order import Cut

IN_ORDER = "in_order" in inspect.signature(DataLoader.__init__).parameters  # torch 2.6 and newer


class Note(NamedTuple):
    """What travels with a batch."""

    rank: int
    end: int  # global samples of the epoch up to and with this batch's round
    surplus: int  # repeated samples at the end of the round; -1 where their number is not knowable
    size: int | None  # this rank's samples
    last: bool  # whether this rank's pass ends here
    mark: Any = None  # where a stream stands after it


class Source(Protocol):
    """Reads this rank's batches."""

    loader: DataLoader[Any]
    seed: int
    cut: Cut  # may be replaced between two passes

    def batches(self, rank: int) -> int | None:
        """Batches that a data rank gets in a whole epoch; None where that is not knowable."""
        ...

    def samples(self) -> int | None:
        """Samples in an epoch over all ranks; None where that is not known beforehand."""
        ...

    def read(self, epoch: int, start: int, skip: int) -> Iterator[tuple[Any, Note]]:
        """One pass: from global sample `start`, without the first `skip` batches."""
        ...

    def state(self) -> dict[str, Any]:
        """What beside epoch, position and seed a resume in the middle of a pass needs; plain JSON types, but for what a data
        set's own state_dict holds."""
        ...

    def drawing(self) -> list[torch.Tensor] | None:
        """States of the sampler's own generators, where they say what the next pass draws."""
        ...

    def passed(self, mark: Any) -> None:
        """The batch whose note holds `mark` is being worked on."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...


def rebuild(
    given: DataLoader[Any], dataset: Any, pin_memory: bool, in_order: bool | None = None, **how: Any
) -> DataLoader[Any]:
    """A DataLoader with the settings of `given`, other sampling, and a generator of its own: iterating it leaves the global
    one alone."""
    settings: dict[str, Any] = {
        "collate_fn": given.collate_fn,
        "num_workers": given.num_workers,
        "pin_memory": pin_memory,
        "timeout": given.timeout,
        "worker_init_fn": given.worker_init_fn,
        "generator": torch.Generator(),
    }
    if given.num_workers > 0:
        settings["multiprocessing_context"] = given.multiprocessing_context
        settings["prefetch_factor"] = given.prefetch_factor
        settings["persistent_workers"] = given.persistent_workers
    if IN_ORDER:
        settings["in_order"] = given.in_order if in_order is None else in_order
    return DataLoader(dataset, **{**settings, **how})


# -- What a data set or a collate function draws for a batch: f(seed, epoch, batch), wherever it cannot be part of the training's stream.


class Seeded:
    """What a sampler gives for one batch, on its way to a worker, where it arrives as itself with the streams seeded.

    The worker takes it from its queue, which makes it anew, and loads the batch next: in one thread.
    """

    __slots__ = ("_item", "_seed")

    def __init__(self, item: Any, seed: int) -> None:
        self._item, self._seed = item, seed

    def __reduce__(self) -> Any:
        return _arrived, (self._item, self._seed)


def _arrived(item: Any, seed: int) -> Any:
    seed_host(seed)
    return item


def every(
    count: int,
    items: Iterable[Any],
    seed: Callable[[int], int],
    at: int,
    weigh: Callable[[Any], int | None] | None = None,
) -> Iterator[Any]:
    """`items`, with the streams seeded by `seed(place)` before the first is read, and before each whose place is a multiple of `count`.

    Args:
        at: the place of the first item.
        weigh: how many places an item takes; 1 where it does not know.
    """
    seed_host(seed(at))
    for item in items:
        at += 1 if weigh is None else (weigh(item) or 1)
        yield item
        if at % count == 0:
            seed_host(seed(at))


def aside(items: Iterable[Any]) -> Iterator[Any]:
    """`items`, of whose draws the training's streams see nothing. Whoever makes them seeds for each."""
    reader = iter(items)
    while True:
        with apart():
            try:
                item = next(reader)
            except StopIteration:
                return
        yield item


# -- Dispatch: rank 0 reads the whole loader and sends each round to the others, for data that only rank 0 can read, or where


Shares = list[tuple[Any, Note]]  # one round: rank r's batch at place r


class Dispatched:
    """The source `inner`, which reads all ranks' shares, read on rank 0 only."""

    def __init__(self, inner: Source, world: World, rank: int) -> None:
        self._inner, self._world, self._rank = inner, world, rank

    @property
    def loader(self) -> DataLoader[Any]:
        return self._inner.loader

    @property
    def seed(self) -> int:
        return self._inner.seed

    @property
    def cut(self) -> Cut:
        return self._inner.cut

    @cut.setter
    def cut(self, cut: Cut) -> None:
        self._inner.cut = cut

    def batches(self, rank: int) -> int | None:
        return self._inner.batches(rank)

    def samples(self) -> int | None:
        return self._inner.samples()

    def read(self, epoch: int, start: int, skip: int) -> Iterator[tuple[Any, Note]]:
        sent = (
            self._send(_rounds(self._inner.read(epoch, start, skip)))
            if self._world.rank == 0
            else self._receive()
        )
        for shares, following in sent:
            if self._rank < len(shares):
                batch, note = shares[self._rank]
                yield batch, note._replace(last=self._rank >= following)

    def _send(self, read: Iterator[Shares]) -> Iterator[tuple[Shares, int]]:
        reader = _followed(read)
        while True:
            try:
                item = next(reader, None)
            except Exception as error:
                # The others wait for a batch: let them fail now, with the reason, and not by a timeout.
                self._world.broadcast_objects([f"{type(error).__name__}: {error}"])
                raise
            self._world.broadcast_objects([item])
            if item is None:
                return
            yield item

    def _receive(self) -> Iterator[tuple[Shares, int]]:
        while (item := self._world.broadcast_objects([None])[0]) is not None:
            if isinstance(item, str):
                raise BatchError(
                    f"rank 0, which reads for all ranks (dispatch_batches=True), could not read a batch: {item}"
                )
            yield item

    def passed(self, mark: Any) -> None:
        self._inner.passed(mark)

    def drawing(self) -> list[Tensor] | None:
        return self._inner.drawing()

    def state(self) -> dict[str, Any]:
        return self._inner.state()

    def load(self, state: dict[str, Any]) -> None:
        self._inner.load(state)


def _rounds(feed: Iterator[tuple[Any, Note]]) -> Iterator[Shares]:
    shares: Shares = []
    for batch, note in feed:
        if note.rank == 0 and shares:
            yield shares
            shares = []
        shares.append((batch, note))
    if shares:
        yield shares


def _followed(read: Iterator[Shares]) -> Iterator[tuple[Shares, int]]:
    """Each round, and how many ranks have a batch in the one after it."""
    held: Shares = []
    for shares in read:
        if held:
            yield held, len(shares)
        held = shares
    if held:
        yield held, 0
