"""Who reads which sample: index arithmetic, nothing else. No torch, no data set, no ranks that talk.

An epoch has an order of n samples, the same on every rank. It is read in rounds: round k is the global batch
``order[start + k*G : start + (k+1)*G]`` with ``G = batch * ranks``, and rank r takes its r-th slice of `batch` samples. The order
never depends on the number of ranks, so a position in it (global samples read so far) is all that a resume needs, whatever
the world's size before and after.

The last round may be incomplete. Three ways to end: dropped; completed with samples from the start of the order, so that every
rank has as many batches of one size (the repeated samples stand at the end of a rank-major gather, so that dropping `surplus`
rows from its end leaves each sample once); or dealt as it is, so that some ranks get a short batch or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple


class Cut(NamedTuple):
    """How an epoch's order is cut.

    Attributes:
        batch: samples a batch on one rank.
        ranks: how many ranks share the data.
        even: complete the last round, so that all ranks' batches agree in number and size. One rank alone has nothing to agree
            with: its last batch stays short, as a plain DataLoader's.
        drop_last: drop the incomplete last round.
    """

    batch: int
    ranks: int
    even: bool = True
    drop_last: bool = False

    @property
    def whole(self) -> int:
        """Samples in a full round: the global batch."""
        return self.batch * self.ranks

    @property
    def completes(self) -> bool:
        """Whether an incomplete last round is filled up."""
        return self.even and self.ranks > 1

    def batches(self, samples: int, rank: int) -> int:
        """Batches that `rank` gets of `samples` samples."""
        full, rest = divmod(max(0, samples), self.whole)
        if rest == 0 or self.drop_last:
            return full
        return full + (self.even or rest > rank * self.batch)

    def surplus(self, samples: int) -> int:
        """Repeated samples in the last round of `samples` samples."""
        if self.drop_last or not self.completes:
            return 0
        return -max(0, samples) % self.whole


class Share(NamedTuple):
    """One rank's part of one round."""

    rank: int
    items: Any  # samples, indices, or one ready batch
    end: int  # global samples of the epoch up to and with this round
    surplus: int  # repeated samples in the round, at the end of its rank-major order; -1 where their number is not knowable


def shares(order: Sequence[Any], cut: Cut, rank: int, start: int = 0) -> Iterator[Share]:
    """`rank`'s batches of a known order, from global sample `start` on. Slicing `order` must be cheap; no round is read whole."""
    n, batch, whole = len(order), cut.batch, cut.whole
    start = min(start, n)
    full, rest = divmod(n - start, whole)
    mine = start + rank * batch
    end = start
    for at in range(mine, mine + full * whole, whole):
        end += whole
        yield Share(rank, list(order[at : at + batch]), end, 0)
    if cut.batches(n - start, rank) > full:
        at = mine + full * whole
        items = list(order[at : at + batch])
        surplus = cut.surplus(n - start)
        if surplus:
            first = rank * batch + len(items) - rest  # where this rank's repeats stand among the round's
            items += [order[i % n] for i in range(first, first + batch - len(items))]
        yield Share(rank, items, n, surplus)


class Round(NamedTuple):
    """One global batch, read whole."""

    items: list[Any]
    end: int
    surplus: int


def rounds(
    items: Iterable[Any],
    length: int,
    *,
    complete: bool,
    drop_last: bool = False,
    start: int = 0,
    at: int = 0,
    weigh: Callable[[Any], int | None] | None = None,
) -> Iterator[Round]:
    """Global batches of a stream of unknown length: `length` items each.

    Args:
        items: samples, indices, or ready batches, each of them `weigh` samples (None: unknown, counts as one).
        length: items in a round.
        complete: fill the last round with the stream's first items.
        drop_last: drop the incomplete last round.
        start: position to begin at, in samples; what lies before is read and dropped.
        at: position of the first item of `items`, in samples.
    """
    reader = iter(items)
    head: list[Any] = []  # the stream's first items, which complete its last round
    end = at
    if end < start:
        for item in reader:
            end += 1 if weigh is None else (weigh(item) or 1)
            if complete and len(head) < length:
                head.append(item)
            if end >= start:
                break
    while chunk := list(islice(reader, length)):
        if complete and len(head) < length:
            head += chunk[: length - len(head)]
        end += len(chunk) if weigh is None else sum(weigh(item) or 1 for item in chunk)
        missing = length - len(chunk)
        if missing == 0:
            yield Round(chunk, end, 0)
            continue
        if not drop_last:
            repeats = [head[i % len(head)] for i in range(missing)] if complete else []
            yield Round(chunk + repeats, end, _weight(repeats, weigh))
        return


def _weight(items: list[Any], weigh: Callable[[Any], int | None] | None) -> int:
    if weigh is None:
        return len(items)
    sizes = [weigh(item) for item in items]
    return -1 if None in sizes else sum(s for s in sizes if s is not None)


def halves(
    batches: Iterable[Sequence[Any]], ranks: int, *, even: bool, start: int = 0
) -> Iterator[tuple[Round, int]]:
    """Each batch is a round of its own, cut in `ranks` parts: the round, and how many items a part has.

    Even: a batch that does not divide is completed with the first batches' samples.
    """
    head: list[Any] = []
    end = 0
    for batch in batches:
        if len(head) < ranks:  # a part misses fewer than `ranks` samples in all
            head += batch[: ranks - len(head)]
        end += len(batch)
        if end <= start or not batch:
            continue
        part = -(-len(batch) // ranks)
        missing = part * ranks - len(batch) if even else 0
        yield Round(list(batch) + [head[i % len(head)] for i in range(missing)], end, missing), part


def parts(round_: Round, size: int | None, ranks: Iterable[int]) -> Iterator[Share]:
    """The given ranks' shares of a round: `size` items each, or, with None, one ready batch each. Empty shares are left out."""
    for rank in ranks:
        if size is None:
            if rank < len(round_.items):
                yield Share(rank, round_.items[rank], round_.end, round_.surplus)
        elif items := round_.items[rank * size : (rank + 1) * size]:
            yield Share(rank, items, round_.end, round_.surplus)


def flagged(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last: by reading one ahead."""
    reader = iter(items)
    for held in reader:
        for item in reader:
            yield held, False
            held = item
        yield held, True
