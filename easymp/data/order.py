"""Data order and sharding: the order of an epoch is f(seed, epoch), the same on every rank, and each rank reads its slices of it.

torch's own samplers become index arithmetic. Other samplers run while the global generators (torch, numpy, random) and their own
ones are seeded, and the generators are restored afterwards.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from ..base.rng import host_states, mix, seed_host, set_host_states
from ..errors import BatchError


def size_of(thing: Any) -> int | None:
    """``len(thing)``, or None if it has no length."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def length(sampler: Any) -> int | None:
    """Indices (or batches) in an epoch over all ranks; None for samplers without a length."""
    return size_of(sampler.dataset if type(sampler) is DistributedSampler else sampler)


def draw(sampler: Any, seed: int, chunk: int) -> Sequence[Any] | Iterator[Any]:
    """Order of one epoch: a sequence, or an iterator that draws `chunk` items at a time if the sampler has no length."""
    kind = type(sampler)
    if kind is SequentialSampler:
        return range(len(sampler.data_source))
    if kind is RandomSampler:
        return _random(len(sampler.data_source), sampler.num_samples, sampler.replacement, seed)
    if kind is DistributedSampler:  # iterating it would shard a second time
        n = len(sampler.dataset)
        return _random(n, n, False, mix(seed, sampler.seed)) if sampler.shuffle else range(n)
    if size_of(sampler) is None:
        return _streamed(sampler, seed, chunk)
    with Randomness(seed, sampler):
        return list(sampler)


def _random(n: int, samples: int, replacement: bool, seed: int) -> Sequence[int]:
    """Draw as torch's RandomSampler does: with replacement, or whole permutations in a row, the last one cut. 8 bytes an index."""
    if n == 0:
        return ()
    generator = torch.Generator().manual_seed(seed)
    if replacement:
        indices = torch.randint(n, (samples,), generator=generator)
    else:
        whole = [torch.randperm(n, generator=generator) for _ in range(-(-samples // n))]
        indices = whole[0] if samples == n else torch.cat(whole)[:samples]
    packed = array("q")  # a list in between would take five times the memory
    packed.frombytes((ctypes.c_char * (8 * len(indices))).from_address(indices.data_ptr()))
    return packed


def _streamed(sampler: Any, seed: int, chunk: int) -> Iterator[Any]:
    own = Randomness(seed, sampler)
    with own:
        reader = iter(sampler)
    while True:
        with own:
            items = list(islice(reader, chunk))
        yield from items
        if len(items) < chunk:
            return


class Randomness:
    """Random state inside ``with``, seeded once and continued at each entry. The outer state returns at exit."""

    def __init__(self, seed: int, sampler: Any) -> None:
        self._generators = generators(sampler)
        self._other = self._states()
        seed_host(seed)
        for generator in self._generators:
            generator.manual_seed(seed)
        self._swap()

    def _states(self) -> list[Any]:
        return [host_states(), *(g.get_state() for g in self._generators)]

    def _swap(self, *error: object) -> None:
        now, (host, *others) = self._states(), self._other
        set_host_states(host)
        for generator, state in zip(self._generators, others):
            generator.set_state(state)
        self._other = now

    __enter__ = __exit__ = _swap


def generators(sampler: Any) -> list[torch.Generator]:
    """The torch generators of a sampler and of samplers that it wraps."""
    held = list(getattr(sampler, "__dict__", {}).values())
    for value in list(held):
        if hasattr(value, "__iter__") and hasattr(value, "__dict__") and not hasattr(value, "__getitem__"):
            held += vars(value).values()
    found = {id(g): g for g in held if isinstance(g, torch.Generator) and g is not torch.default_generator}
    return list(found.values())


def own_seed(sampler: Any) -> int:
    """Draw a seed from the sampler's or the global generator, as a plain DataLoader does: first for workers, then for the order."""
    generator = next(iter(generators(sampler)), torch.default_generator)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def agree(order: Sequence[Any], world: Any) -> None:
    """Raise BatchError if the ranks drew different orders, from a generator that cannot be seeded."""
    signature = (len(order), list(order[:64]), list(order[-64:]))
    seen = world.gather_objects(signature)
    if any(s != seen[0] for s in seen):
        raise BatchError(
            "the ranks' samplers drew different orders, from a random source of their own: let rank 0 draw for all with "
            "DataLoaderConfiguration(use_seedable_sampler=False), or give the sampler a torch.Generator as its `generator`"
        )


# -- sharding: pure index arithmetic


class Cut(NamedTuple):
    """How the order of an epoch is cut into batches. The last batch of a single rank stays short, as in a plain DataLoader."""

    batch: int  # samples per batch on one rank
    ranks: int  # ranks that share the data
    even: bool = True  # complete the last round, so that all ranks have batches of the same number and size
    drop_last: bool = False  # drop the incomplete last round

    @property
    def whole(self) -> int:
        """Samples in a full round: the global batch."""
        return self.batch * self.ranks

    @property
    def completes(self) -> bool:
        """Whether an incomplete last round is completed."""
        return self.even and self.ranks > 1

    def batches(self, samples: int, rank: int) -> int:
        """Batches of `rank` from `samples` samples."""
        full, rest = divmod(max(0, samples), self.whole)
        if rest == 0 or self.drop_last:
            return full
        return full + (self.even or rest > rank * self.batch)

    def surplus(self, samples: int) -> int:
        """Repeated samples in the last round of `samples` samples."""
        return -max(0, samples) % self.whole if self.completes and not self.drop_last else 0


class Share(NamedTuple):
    """One rank's part of a round."""

    rank: int
    items: Any  # samples, indices, or one ready batch
    end: int  # samples of the epoch over all ranks, this round included
    surplus: int  # repeated samples at the end of the round in rank order; -1 if unknown


def shares(order: Sequence[Any], cut: Cut, rank: int, start: int = 0) -> Iterator[Share]:
    """Batches of `rank` from a known order, from global sample `start` on. Only the slices of this rank are read."""
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
    """One global batch."""

    items: list[Any]
    end: int
    surplus: int


def one(item: Any) -> int:
    """The weight of a single sample."""
    return 1


def rounds(
    items: Iterable[Any],
    length: int,
    *,
    complete: bool,
    drop_last: bool = False,
    start: int = 0,
    at: int = 0,
    weigh: Callable[[Any], int | None] = one,
) -> Iterator[Round]:
    """Global batches of `length` items from a stream of unknown length, from position `start` (in samples) on.

    Args:
        items: samples, indices, or ready batches of `weigh` samples each (None: unknown, counts as one), the first at position `at`.
        complete: complete the last round with the first items of the stream.
    """
    reader = iter(items)
    head: list[Any] = []  # first items of the stream, which complete its last round
    end = at
    if end < start:
        for item in reader:
            end += weigh(item) or 1
            if complete and len(head) < length:
                head.append(item)
            if end >= start:
                break
    while chunk := list(islice(reader, length)):
        if complete and len(head) < length:
            head += chunk[: length - len(head)]
        end += sum(weigh(item) or 1 for item in chunk)
        missing = length - len(chunk)
        if missing == 0:
            yield Round(chunk, end, 0)
            continue
        if not drop_last:
            repeats = [head[i % len(head)] for i in range(missing)] if complete else []
            sizes = [weigh(item) for item in repeats]
            yield Round(chunk + repeats, end, -1 if None in sizes else sum(size or 0 for size in sizes))
        return


def halves(
    batches: Iterable[Sequence[Any]], ranks: int, *, even: bool, start: int = 0
) -> Iterator[tuple[Round, int]]:
    """Yield each batch in `ranks` parts, with the items per part. With `even`, samples of the first batches fill up short parts."""
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
    """The shares of `ranks` in a round: `size` items each, or one ready batch each if `size` is None. Empty shares are omitted."""
    for rank in ranks:
        if size is None:
            if rank < len(round_.items):
                yield Share(rank, round_.items[rank], round_.end, round_.surplus)
        elif items := round_.items[rank * size : (rank + 1) * size]:
            yield Share(rank, items, round_.end, round_.surplus)


def flagged(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item with a flag for the last one. Reads one item ahead."""
    reader = iter(items)
    for held in reader:
        for item in reader:
            yield held, False
            held = item
        yield held, True
