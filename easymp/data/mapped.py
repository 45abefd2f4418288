"""Source for map-style data sets: the order is known beforehand, so each rank loads its own samples only.

A note is queued for each list of indices that goes to the DataLoader and taken off with its batch, in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ..base.rng import mix, seed_host
from ..distributed.process_group import World
from .order import (
    Cut,
    Share,
    agree,
    draw,
    flagged,
    generators,
    halves,
    length,
    one,
    own_seed,
    parts,
    rounds,
    shares,
    size_of,
)
from .source import Feed, Note, Seeded, aside, rebuild

AHEAD = 32  # batches of indices computed at once if the order is known beforehand


class Rounds:
    """Batch sampler of the rebuilt DataLoader: one object for all epochs, so that workers can persist."""

    def __init__(self) -> None:
        self.upcoming: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.upcoming


class MapSource:
    """Reads a map-style data set by batches of indices.

    Args:
        ranks: the data ranks that this process reads for: its own, or all of them.
        whole: None, or for samplers of batches: "deal" whole batches to the ranks, "split" each batch.
        seeded: draw by f(seed, epoch); otherwise rank 0 draws from its own random state for all.
        alone: this process draws and reads for all ranks.
        ahead: this process loads a batch before the step of the one before it.
    """

    _checked = False
    _drawn: int | None = None  # seed of the current order, if it is not f(seed, epoch)

    def __init__(
        self,
        given: DataLoader[Any],
        sampler: Any,
        cut: Cut,
        ranks: Sequence[int],
        world: World,
        *,
        seed: int,
        whole: str | None,
        seeded: bool,
        pin_memory: bool,
        alone: bool,
        ahead: bool,
    ) -> None:
        self.seed = seed
        self.cut = cut
        self._sampler, self._ranks, self._whole = sampler, ranks, whole
        self._world, self._seeded, self._alone, self._ahead = world, seeded, alone, ahead
        self._ready = given.batch_sampler is None  # the data set's items are batches already
        self._redraw: dict[int, int] = {}  # seeds by epoch, to draw an order again after a resume
        self._upcoming = Rounds()
        batches = {"batch_sampler": self._upcoming}
        how = {"batch_size": None, "sampler": self._upcoming} if self._ready else batches
        self.loader = rebuild(given, given.dataset, pin_memory, **how)

    def batches(self, rank: int) -> int | None:
        total = length(self._sampler)
        if total is None or self._whole == "split":
            return total
        return (self.cut._replace(batch=1) if self._whole else self.cut).batches(total, rank)

    def samples(self) -> int | None:
        """Samples in an epoch, if known without drawing it."""
        return None if self._whole else length(self._sampler)

    def read(self, epoch: int, start: int, skip: int) -> Feed:
        notes: deque[Note] = deque()
        upcoming = islice(self._shares(self._order(epoch), start), skip * len(self._ranks), None)
        indices = self._indices(upcoming, notes)
        elsewhere = self._ahead or self.loader.num_workers > 0
        self._upcoming.upcoming = self._seeds(indices, notes, epoch) if elsewhere else indices
        self.loader.generator.manual_seed(mix(self.seed, "workers", epoch, start, self._ranks[0]))  # type: ignore[union-attr]
        take = notes.popleft
        for batch in aside(self.loader) if self._ahead else self.loader:
            yield batch, take()

    def _seeds(self, indices: Iterator[Any], notes: deque[Note], epoch: int) -> Iterator[Any]:
        """Yield `indices` and seed the random streams for each batch where it is loaded."""
        for items in indices:
            note = notes[-1]
            seed = mix(self.seed, "batch", epoch, note.rank, note.end)
            if self._ahead:
                seed_host(seed)
            yield items if self._ahead else Seeded(items, seed)

    def _indices(self, upcoming: Iterator[Share], notes: deque[Note]) -> Iterator[Any]:
        reader = flagged(upcoming)
        # Computing many batches of indices in one loop takes a quarter of the time of computing them one by one between steps.
        ahead = AHEAD if self.samples() is not None else 1
        while chunk := list(islice(reader, ahead)):
            for (rank, items, end, surplus), last in chunk:
                if self._ready:
                    notes.append(Note(rank, end, -1 if surplus else 0, None, last))
                    yield items[0]
                else:
                    notes.append(Note(rank, end, surplus, len(items), last))
                    yield items

    def _shares(self, order: Any, start: int) -> Iterator[Share]:
        cut, ranks = self.cut, self._ranks
        if isinstance(order, Sequence) and not self._whole:
            readers = [shares(order, cut, rank, start) for rank in ranks]
            while round_shares := [share for reader in readers for share in islice(reader, 1)]:
                yield from round_shares
            return
        if self._whole == "split":
            found = halves(order, cut.ranks, even=cut.even, start=start)
        else:
            count, size, weigh = (cut.ranks, None, size_of) if self._whole else (cut.whole, cut.batch, one)
            cutting = rounds(
                order, count, complete=cut.completes, drop_last=cut.drop_last, start=start, weigh=weigh
            )
            found = ((round_, size) for round_ in cutting)
        for round_, size in found:
            yield from parts(round_, size, ranks)

    def _order(self, epoch: int) -> Any:
        seed = mix(self.seed, "order", epoch) if self._seeded else self._own_seed(epoch)
        order = draw(self._sampler, seed, self.cut.ranks if self._whole else self.cut.whole)
        if self._alone or not isinstance(order, list):
            return order
        if not self._seeded:
            return self._world.broadcast_objects([order])[0]
        if not self._checked:
            agree(order, self._world)
            self._checked = True
        return order

    def _own_seed(self, epoch: int) -> int:
        """The seed that rank 0 draws from its own random state; a resume draws the same order again by it."""
        seed = self._redraw.pop(epoch, None)
        if seed is None:
            seed = own_seed(self._sampler) if self._world.rank == 0 else 0
            if not self._alone:
                seed = int(self._world.broadcast_objects([seed])[0])
        self._drawn = seed
        return seed

    def drawing(self) -> list[Tensor] | None:
        own = [] if self._seeded else generators(self._sampler)
        return [generator.get_state() for generator in own] or None

    def state(self) -> dict[str, Any]:
        known = {"samples": self.samples(), "drawn": self._drawn}
        return {name: value for name, value in known.items() if value is not None}

    def passed(self, mark: Any) -> None:
        pass  # the position is enough

    def load(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self._drawn = state.get("drawn") if state["position"] else None
        # A finished pass draws no order, and the next pass draws its own.
        self._redraw = {} if self._drawn is None or state.get("over") else {state["epoch"]: self._drawn}
        if not self._seeded:
            for generator, drawing in zip(generators(self._sampler), state.get("drawing", ())):
                generator.set_state(drawing)
