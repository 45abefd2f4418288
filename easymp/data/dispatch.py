"""Dispatch: rank 0 reads the whole loader and sends each round to the others, for data that only rank 0 can read, or where
reading is dear and sending is cheap.

Rank 0 makes each rank's batch by itself (with the same cut as if every rank read its own), so nothing that was collated has to
be taken apart, and what the ranks get is the same with and without dispatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ..distributed.process_group import World
from ..errors import BatchError
from .shard import Cut
from .source import Note, Source

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
