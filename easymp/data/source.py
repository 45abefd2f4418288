"""Sources of a prepared loader: the interface, random state per batch, and reading on rank 0 for all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from ..base.rng import isolated, seed_host
from ..distributed.process_group import World
from ..errors import BatchError
from .order import Cut

IN_ORDER = "in_order" in inspect.signature(DataLoader.__init__).parameters  # torch 2.6 and newer


class Note(NamedTuple):
    """Facts that travel with a batch."""

    rank: int
    end: int  # samples of the epoch over all ranks, the round of this batch included
    surplus: int  # repeated samples at the end of the round; -1 if unknown
    size: int | None  # this rank's samples
    last: bool  # whether this rank's pass ends here
    mark: Any = None  # position of a stream after this batch


class Source(Protocol):
    """Reads this rank's batches."""

    loader: DataLoader[Any]
    seed: int
    cut: Cut  # may be replaced between two passes

    def batches(self, rank: int) -> int | None:
        """Batches of a data rank in a whole epoch; None if unknown."""
        ...

    def samples(self) -> int | None:
        """Samples in an epoch over all ranks; None if unknown beforehand."""
        ...

    def read(self, epoch: int, start: int, skip: int) -> Iterator[tuple[Any, Note]]:
        """One pass: from global sample `start`, without the first `skip` batches."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resume inside a pass needs beside epoch, position and seed."""
        ...

    def drawing(self) -> list[torch.Tensor] | None:
        """States of the sampler's own generators, if they decide the next order."""
        ...

    def passed(self, mark: Any) -> None:
        """Record that the batch with this mark is in use."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Continue at `state` in the next pass."""
        ...


def reads_ahead(device: torch.device, non_blocking: bool) -> bool:
    """Whether `prefetch.moved` reads one batch ahead."""
    return device.type == "cuda" and non_blocking


def rebuild(
    given: DataLoader[Any], dataset: Any, pin_memory: bool, in_order: bool | None = None, **how: Any
) -> DataLoader[Any]:
    """A DataLoader with the settings of `given`, other sampling and its own generator, so that the global one stays untouched."""
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


# -- random numbers of data sets and collate functions: f(seed, epoch, batch)


class Seeded:
    """Indices of one batch on the way to a worker. Unpickling them there seeds the worker's random streams for that batch."""

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
    """Yield `items` and seed the random streams with `seed(place)` at the start and at each place that is a multiple of `count`.

    Args:
        at: place of the first item.
        weigh: places per item; None or an unknown weight counts as 1.
    """
    seed_host(seed(at))
    for item in items:
        at += 1 if weigh is None else (weigh(item) or 1)
        yield item
        if at % count == 0:
            seed_host(seed(at))


def aside(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`, read apart from the random streams of the training. The producer seeds its own."""
    reader = iter(items)
    while True:
        with isolated():
            try:
                item = next(reader)
            except StopIteration:
                return
        yield item


Shares = list[tuple[Any, Note]]  # one round: the batch of rank r at index r


class Dispatched:
    """Source that reads `inner` on rank 0 only and sends each round to the other ranks (``dispatch_batches=True``)."""

    def __init__(self, inner: Source, world: World, rank: int) -> None:
        self._inner, self._world, self._rank = inner, world, rank

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def cut(self) -> Cut:
        return self._inner.cut

    @cut.setter
    def cut(self, cut: Cut) -> None:
        self._inner.cut = cut

    def read(self, epoch: int, start: int, skip: int) -> Iterator[tuple[Any, Note]]:
        sends = self._world.rank == 0
        sent = self._send(_rounds(self._inner.read(epoch, start, skip))) if sends else self._receive()
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
                # The other ranks wait for a batch: send the reason, so that they do not wait for the timeout.
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
    """Each round with the number of ranks that have a batch in the next one."""
    held: Shares = []
    for shares in read:
        if held:
            yield held, len(shares)
        held = shares
    if held:
        yield held, 0
