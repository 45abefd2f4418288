"""Sources of a prepared loader: the interface, random state per batch, reading on rank 0 for all ranks, and the way to the device.

On CUDA a side stream copies batches k+1 and k+2 while the step computes on batch k. CPU memory is pinned first: by the thread of a
DataLoader with workers, else here. The compute stream waits for the copy of its batch only. Sparse tensors, tensor subclasses and packed
sequences move by their own `to` when their batch is due. Other devices move whole batches then, and the CPU moves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..base import pytree
from ..base.rng import isolated, seed_host
from ..distributed.process_group import World
from ..errors import BatchError
from .order import Cut

AHEAD = 2  # batches on their way to the device


class Note(NamedTuple):
    """Facts that travel with a batch."""

    rank: int
    end: int  # samples of the epoch over all ranks, the round of this batch included
    surplus: int  # repeated samples at the end of the round; -1 if unknown
    size: int | None  # this rank's samples
    last: bool  # whether this rank's pass ends here
    mark: Any = None  # position of a stream after this batch


Feed = Iterator[tuple[Any, Note]]


class Source(Protocol):
    """Reads this rank's batches.

    `batches` of a data rank and `samples` of all ranks in an epoch are None if unknown. `read` begins at global sample `start` and leaves
    `skip` batches out; `passed` gets the mark of each batch in use. `state` is for a resume inside a pass, beside epoch, position and
    seed, and `drawing` the states of the sampler's own generators, if they decide the next order; `load` continues at a state.
    """

    loader: DataLoader[Any]
    seed: int
    cut: Cut  # may be replaced between two passes

    def batches(self, rank: int) -> int | None: ...
    def samples(self) -> int | None: ...
    def read(self, epoch: int, start: int, skip: int) -> Feed: ...
    def passed(self, mark: Any) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def drawing(self) -> list[Tensor] | None: ...
    def load(self, state: dict[str, Any]) -> None: ...


def rebuild(given: DataLoader[Any], dataset: Any, pin_memory: bool, **how: Any) -> DataLoader[Any]:
    """A DataLoader with the settings of `given`, other sampling and its own generator, so that the global one stays untouched."""
    names = ["collate_fn", "num_workers", "timeout", "worker_init_fn"]
    if given.num_workers > 0:
        names += ["multiprocessing_context", "prefetch_factor", "persistent_workers"]
    settings = {name: getattr(given, name) for name in names}
    settings["in_order"] = getattr(given, "in_order", True)  # older subclasses (torchdata) do not have it
    return DataLoader(
        dataset, **{**settings, "pin_memory": pin_memory, "generator": torch.Generator(), **how}
    )


# -- random numbers of data sets and collate functions: f(seed, epoch, batch)


class Seeded:
    """Indices of one batch that are sent to a worker. Unpickling them seeds the worker's random streams for that batch."""

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
    weigh: Callable[[Any], int | None],
) -> Iterator[Any]:
    """Yield `items`, the first at place `at`, and seed the random streams with `seed(place)` at each multiple of `count`.

    `weigh` gives an item's places, 1 if unknown.
    """
    seed_host(seed(at))
    for item in items:
        at += weigh(item) or 1
        yield item
        if at % count == 0:
            seed_host(seed(at))


def aside(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`, and restore the training's random streams after each read. The producer seeds its own streams."""
    reader = iter(items)
    while True:
        with isolated():
            try:
                item = next(reader)
            except StopIteration:
                return
        yield item


# -- one rank reads for all

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

    def read(self, epoch: int, start: int, skip: int) -> Feed:
        main = self._world.rank == 0
        sent = self._send(_rounds(self._inner.read(epoch, start, skip))) if main else self._receive()
        for shares, following in sent:
            if self._rank < len(shares):
                batch, note = shares[self._rank]
                yield batch, note._replace(last=self._rank >= following)

    def _send(self, reader: Iterator[tuple[Shares, int]]) -> Iterator[tuple[Shares, int]]:
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


def _rounds(feed: Feed) -> Iterator[tuple[Shares, int]]:
    """Each round with the number of ranks that have a batch in the next one."""
    whole: Shares = []
    shares: Shares = []
    for batch, note in feed:
        if note.rank == 0:
            if whole:
                yield whole, len(shares)
            whole, shares = shares, []
        shares.append((batch, note))
    if whole:
        yield whole, len(shares)
    if shares:
        yield shares, 0


# -- the way to the device


def reads_ahead(device: torch.device, non_blocking: bool) -> bool:
    """Whether `moved` reads batches ahead."""
    return device.type == "cuda" and non_blocking


def moved(feed: Feed, device: torch.device, non_blocking: bool) -> Feed:
    """`feed` with its batches on `device`; `feed` itself on the CPU."""
    if device.type == "cpu":
        return feed
    if reads_ahead(device, non_blocking):
        return _ahead(feed, device)
    return ((pytree.send_to_device(batch, device, non_blocking), note) for batch, note in feed)


def _ahead(feed: Feed, device: torch.device) -> Feed:
    side = torch.cuda.Stream(device)

    def start(leaf: Any) -> Any:
        return _pin(leaf).to(device, non_blocking=True) if _plain(leaf) else leaf

    held: deque[tuple[Any, torch.cuda.Event, Note]] = deque()
    for batch, note in feed:
        # CUDA tensors that the data set made itself are on the compute stream: nothing to wait for here.
        with torch.cuda.stream(side):
            held.append((pytree.map_leaves(start, batch), side.record_event(), note))
        if len(held) > AHEAD:
            yield _due(*held.popleft(), device)
    while held:
        yield _due(*held.popleft(), device)


def _plain(leaf: Any) -> bool:
    """Whether `leaf` has one memory block that can be pinned and recorded on a stream."""
    return type(leaf) is Tensor and leaf.layout is torch.strided


def _pin(leaf: Tensor) -> Tensor:
    return leaf.pin_memory() if leaf.device.type == "cpu" and not leaf.is_pinned() else leaf


def _due(batch: Any, copied: torch.cuda.Event, note: Note, device: torch.device) -> tuple[Any, Note]:
    """Make the compute stream wait for the copy of `batch`, and move leaves that are not plain tensors."""
    compute = torch.cuda.current_stream(device)
    compute.wait_event(copied)
    others = False
    for leaf in pytree.leaves(batch):
        if not _plain(leaf):
            others |= hasattr(leaf, "to")
        elif leaf.is_cuda:
            # The side stream allocated this memory: keep it until the compute stream is done with it.
            leaf.record_stream(compute)
    return pytree.send_to_device(batch, device, non_blocking=True) if others else batch, note
