"""The order of an epoch: f(seed, epoch), the same on every rank, and without touching anybody's random state.

torch's own samplers become index arithmetic. Any other sampler is drawn with the global generators (torch, numpy, random) and
its own ones seeded for the moment and put back afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from ..base.rng import host_states, mix, put_host_states, seed_host
from ..errors import BatchError


def size_of(thing: Any) -> int | None:
    """``len(thing)``, or None where it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def length(sampler: Any) -> int | None:
    """Indices (or batches) in an epoch over all ranks; None for samplers that do not say."""
    return size_of(sampler.dataset if type(sampler) is DistributedSampler else sampler)


def draw(sampler: Any, seed: int, chunk: int) -> Sequence[Any] | Iterator[Any]:
    """One epoch's order: a sequence, or, where the sampler has no length, an iterator that is read `chunk` items at a time."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler.data_source))
    if type(sampler) is RandomSampler:
        return _random(len(sampler.data_source), sampler.num_samples, sampler.replacement, seed)
    if (
        type(sampler) is DistributedSampler
    ):  # its job is ours here, and it would deal its shares a second time
        n = len(sampler.dataset)
        return _random(n, n, False, mix(seed, sampler.seed)) if sampler.shuffle else range(n)
    if size_of(sampler) is None:
        return _streamed(sampler, seed, chunk)
    with Randomness(seed, sampler):
        return list(sampler)


class Permutation(Sequence[int]):
    """Indices in one tensor's memory (8 bytes each, a list takes 40), sliced to lists by ctypes."""

    __slots__ = ("_indices", "_memory")

    def __init__(self, indices: Tensor) -> None:
        self._memory = indices.to(torch.int64).contiguous()  # kept alive: the view below does not own it
        self._indices = (
            (ctypes.c_int64 * len(indices)).from_address(self._memory.data_ptr()) if len(indices) else []
        )

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, at: Any) -> Any:
        return self._indices[at]

    def __reduce__(self) -> Any:
        return Permutation, (self._memory,)


def _random(n: int, samples: int, replacement: bool, seed: int) -> Permutation:
    """As torch's RandomSampler: with replacement, or whole permutations one after the other and a part of the last."""
    if n == 0:
        return Permutation(torch.empty(0, dtype=torch.int64))
    generator = torch.Generator().manual_seed(seed)
    if replacement:
        return Permutation(torch.randint(n, (samples,), generator=generator))
    whole = [torch.randperm(n, generator=generator) for _ in range(-(-samples // n))]
    return Permutation(whole[0] if samples == n else torch.cat(whole)[:samples])


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
    """A random state of its own for the time inside ``with``: seeded once, continued at each entry, the outside put back."""

    def __init__(self, seed: int, *samplers: Any) -> None:
        self._seed = seed
        self._generators = [g for sampler in samplers for g in generators(sampler)]
        self._inside: list[Any] | None = None
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        self._outside = self._states()
        if self._inside is not None:
            self._put(self._inside)
            return
        seed_host(self._seed)
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        self._inside = self._states()
        self._put(self._outside)

    def _states(self) -> list[Any]:
        return [host_states(), *(g.get_state() for g in self._generators)]

    def _put(self, states: list[Any]) -> None:
        put_host_states(states[0])
        for generator, state in zip(self._generators, states[1:]):
            generator.set_state(state)


def generators(sampler: Any) -> list[torch.Generator]:
    """The torch generators that a sampler, or one it wraps, holds."""
    found = []
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.Generator) and value is not torch.default_generator:
            found.append(value)
        elif hasattr(value, "__iter__") and hasattr(value, "__dict__") and not hasattr(value, "__getitem__"):
            found += [
                v
                for v in vars(value).values()
                if isinstance(v, torch.Generator) and v is not torch.default_generator
            ]
    return list({id(g): g for g in found}.values())


def own_seed(sampler: Any) -> int:
    """A seed drawn from the sampler's own generator or the global one, as a plain DataLoader with this sampler would.

    The plain loader draws twice when an epoch starts: for its workers, then for the order.
    """
    generator = next(iter(generators(sampler)), torch.default_generator)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def agree(order: Sequence[Any], world: Any) -> None:
    """Raises BatchError where the ranks' samplers drew different orders (a generator that nobody could seed)."""
    signature = (len(order), list(order[:64]), list(order[-64:]))
    seen = world.gather_objects(signature)
    if any(s != seen[0] for s in seen):
        raise BatchError(
            "the ranks' samplers drew different orders, so samples would be read twice or not at all: the sampler draws from a "
            "random source of its own. Let rank 0 draw for all with DataLoaderConfiguration(use_seedable_sampler=False), or "
            "give the sampler a torch.Generator as its `generator`"
        )


# -- Who reads which sample: index arithmetic, nothing else. No torch, no data set, no ranks that talk.


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
