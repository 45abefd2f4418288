"""Data order and sharding. The order of an epoch is f(seed, epoch), the same on every rank; each rank reads its slices.

torch's own samplers become index arithmetic. Other samplers run while the global generators (torch, numpy, random) and
their own ones are seeded, and the generators are restored afterwards.
"""

from __future__ import annotations

import ctypes
import json
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch.utils.data import ConcatDataset, DistributedSampler, RandomSampler, SequentialSampler, Subset

from ..base.rng import host_states, mix, seed_host, set_host_states
from ..errors import BatchError


def size_of(container: Any) -> int | None:
    """``len(container)``, or None if it has no length."""
    try:
        return len(container)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def length(sampler: Any) -> int | None:
    """Indices (or batches) in an epoch over all ranks; None for samplers without a length."""
    return size_of(sampler.dataset if type(sampler) is DistributedSampler else sampler)


def description(sampler: Any) -> str:
    """What decides the order of an epoch beside the seed, in words."""
    kind, name = type(sampler), type(sampler).__name__
    if kind is RandomSampler:
        return f"shuffled{' with replacement' if sampler.replacement else ''}"
    if kind is DistributedSampler and sampler.shuffle:
        return f"shuffled by {name} of seed {sampler.seed}"
    return "in the data set's order" if kind in (SequentialSampler, DistributedSampler) else f"by {name}"


def draw(sampler: Any, seed: int | None, chunk: int = 1) -> Sequence[Any] | Iterator[Any]:
    """The order of one epoch; without a `seed` as a plain DataLoader draws it, from the random streams.

    Of a sampler without a length it is an iterator, which draws `chunk` items at a time.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        return range(len(sampler.data_source))
    if kind is DistributedSampler:  # iterating it would shard a second time
        n = len(sampler.dataset)
        order_seed = sampler.seed + sampler.epoch if seed is None else mix(seed, sampler.seed)
        return _random(n, n, False, order_seed) if sampler.shuffle else range(n)
    if seed is None:
        return array("q", sampler) if isinstance(sampler, RandomSampler) else list(sampler)
    if kind is RandomSampler:
        return _random(len(sampler.data_source), sampler.num_samples, sampler.replacement, seed)
    if size_of(sampler) is None:
        return _streamed(sampler, seed, chunk)
    with Randomness(seed, sampler):
        return list(sampler)


def _random(n: int, samples: int, replacement: bool, seed: int) -> Sequence[int]:
    """Draw as torch's RandomSampler does: with replacement, or whole permutations in a row, the last one cut."""
    if n == 0:
        return ()
    generator = torch.Generator().manual_seed(seed)
    if replacement:
        indices = torch.randint(n, (samples,), generator=generator)
    else:
        permutations = [torch.randperm(n, generator=generator) for _ in range(-(-samples // n))]
        indices = permutations[0] if samples == n else torch.cat(permutations)[:samples]
    return _packed(indices)


def _packed(indices: torch.Tensor) -> array[int]:
    """8 bytes an index; a list in between would take five times the memory."""
    packed = array("q")
    if len(indices):
        packed.frombytes((ctypes.c_char * (8 * len(indices))).from_address(indices.data_ptr()))
    return packed


def digest(epoch_order: Any, dataset: Any) -> str | None:
    """Checksum of the samples that an epoch reads: its order, and the indices of Subsets. None if it is unknown."""
    if not isinstance(epoch_order, Sequence):
        return None
    checksum = 0
    try:
        for indices in (epoch_order, *_subset_indices(dataset)):
            checksum = crc32(_index_bytes(indices), checksum)
    except (TypeError, ValueError):  # a sampler may yield any objects
        return None
    return f"{checksum:08x}"


def _subset_indices(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, Subset):
        yield dataset.indices
        yield from _subset_indices(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _subset_indices(part)


def _index_bytes(indices: Any) -> array[int] | bytes:
    """Equal bytes for equal indices, whether a list, a range, a tensor or an array holds them."""
    if isinstance(indices, range):
        return _packed(torch.arange(indices.start, indices.stop, indices.step))
    if hasattr(indices, "dtype"):
        return _packed(torch.as_tensor(indices).to("cpu", torch.int64).flatten().contiguous())
    try:
        return indices if isinstance(indices, array) else array("q", indices)
    except TypeError:
        return json.dumps(indices, default=operator.index).encode()


def _streamed(sampler: Any, seed: int, chunk: int) -> Iterator[Any]:
    randomness = Randomness(seed, sampler)
    with randomness:
        reader = iter(sampler)
    while True:
        with randomness:
            items = list(islice(reader, chunk))
        yield from items
        if len(items) < chunk:
            return


class Randomness:
    """Random state inside ``with``, seeded once and continued at each entry. The outer state returns at exit."""

    def __init__(self, seed: int, sampler: Any) -> None:
        self._generators = generators(sampler)
        self._saved = self._states()
        seed_host(seed)
        for generator in self._generators:
            generator.manual_seed(seed)
        self._swap()

    def _states(self) -> list[Any]:
        return [host_states(), *(g.get_state() for g in self._generators)]

    def _swap(self, *error: object) -> None:
        states, (host, *generator_states) = self._states(), self._saved
        set_host_states(host)
        for generator, state in zip(self._generators, generator_states):
            generator.set_state(state)
        self._saved = states

    __enter__ = __exit__ = _swap


def generators(sampler: Any) -> list[torch.Generator]:
    """The torch generators of a sampler and of samplers that it wraps."""
    values = list(getattr(sampler, "__dict__", {}).values())
    for value in list(values):
        if hasattr(value, "__iter__") and hasattr(value, "__dict__") and not hasattr(value, "__getitem__"):
            values += vars(value).values()
    by_id = {id(g): g for g in values if isinstance(g, torch.Generator) and g is not torch.default_generator}
    return list(by_id.values())


def random_states(sampler: Any) -> list[Any]:
    """States of Python's, NumPy's and torch's streams and of the sampler's own generators, in JSON's types."""
    python, numpy, cpu = host_states()
    if numpy is not None:
        numpy = [numpy[0], numpy[1].tolist(), *numpy[2:]]
    return [python, numpy, *(state.tolist() for state in (cpu, *(g.get_state() for g in generators(sampler))))]


def set_random_states(sampler: Any, states: list[Any]) -> None:
    """Restore the states that `random_states` returned."""
    (version, internal_state, gauss_next), numpy, cpu, *generator_states = states
    set_host_states([(version, tuple(internal_state), gauss_next), numpy, torch.tensor(cpu, dtype=torch.uint8)])
    for generator, state in zip(generators(sampler), generator_states):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))


def check_same_order(order: Sequence[Any], world: Any) -> None:
    """Raise BatchError if the ranks drew different orders, from a generator that cannot be seeded."""
    signatures = world.gather_objects((len(order), list(order[:64]), list(order[-64:])))
    if any(signature != signatures[0] for signature in signatures):
        raise BatchError(
            "the ranks' samplers drew different orders, from a random source of their own: let rank 0 draw for all "
            "with DataLoaderConfiguration(use_seedable_sampler=False), or give the sampler a torch.Generator as its "
            "`generator`"
        )


# -- sharding: pure index arithmetic


class Cut(NamedTuple):
    """How the order of an epoch is cut into batches. The last batch of a single rank stays short."""

    batch: int  # samples per batch on one rank
    ranks: int  # ranks that share the data
    even: bool = True  # complete the last round, so that all ranks have batches of the same number and size
    drop_last: bool = False  # drop the incomplete last round
    split_tail: bool = False  # share the samples of an incomplete last round equally, and repeat fewer than `ranks`

    @property
    def global_batch(self) -> int:
        """Samples in a full round."""
        return self.batch * self.ranks

    @property
    def completes(self) -> bool:
        """Whether the last round is filled up with samples again, so that every rank gets a batch."""
        return self.even and self.ranks > 1 and not self.drop_last

    def batches(self, samples: int, rank: int) -> int:
        """Batches of `rank` from `samples` samples."""
        full, remainder = divmod(max(0, samples), self.global_batch)
        if remainder == 0 or self.drop_last:
            return full
        return full + (self.even or remainder > rank * self.batch)

    def surplus(self, samples: int) -> int:
        """Repeated samples in the last round of `samples` samples."""
        multiple = self.ranks if self.split_tail else self.global_batch
        return -max(0, samples) % multiple if self.completes else 0

    def part(self, samples: int) -> int:
        """Samples of one rank in a round of `samples` samples."""
        return -(-samples // self.ranks) if self.split_tail else self.batch


class Share(NamedTuple):
    """One rank's part of a round."""

    rank: int
    items: Any  # samples, indices, or one ready batch
    end: int  # samples of the epoch over all ranks, this round included
    surplus: int  # repeated samples at the end of the round in rank order; -1 if unknown


def shares(order: Sequence[Any], cut: Cut, rank: int, start: int = 0) -> Iterator[Share]:
    """Batches of `rank` from a known order, from global sample `start` on. Only the slices of this rank are read."""
    n, batch, global_batch = len(order), cut.batch, cut.global_batch
    start = min(start, n)
    full, remainder = divmod(n - start, global_batch)
    tail = start + full * global_batch
    for begin in range(start, tail, global_batch):
        first = begin + rank * batch
        yield Share(rank, list(order[first : first + batch]), begin + global_batch, 0)
    if cut.batches(n - start, rank) > full:
        part = cut.part(remainder)
        first = tail + rank * part
        items = list(order[first : first + part])
        surplus = cut.surplus(n - start)
        if surplus:
            # Repeats are samples of the epoch's beginning; earlier ranks may have some of them.
            repeat = rank * part + len(items) - remainder
            items += [order[i % n] for i in range(repeat, repeat + part - len(items))]
        yield Share(rank, items, n, surplus)


class Round(NamedTuple):
    """One global batch."""

    items: list[Any]
    end: int
    surplus: int


def rounds(
    items: Iterable[Any], cut: Cut, weigh: Callable[[Any], int | None] | None = None, start: int = 0, position: int = 0
) -> Iterator[Round]:
    """Global batches from a stream of unknown length. The first items of the stream complete its last round.

    The first of `items` is at `position`, and the first round at `start`, in samples. With `weigh`, items are ready
    batches of so many samples each (None: unknown, counts as one).
    """
    length = cut.global_batch if weigh is None else cut.ranks
    reader = iter(items)
    head: list[Any] = []  # first items of the stream
    missing_head = length if cut.completes else 0

    def weight(items: Iterable[Any]) -> int:
        return sum(1 if weigh is None else weigh(item) or 1 for item in items)

    end = position
    while end < start and (skipped := list(islice(reader, 1))):
        head += skipped[: missing_head - len(head)]
        end += weight(skipped)
    while chunk := list(islice(reader, length)):
        head += chunk[: missing_head - len(head)]
        end += weight(chunk)
        if len(chunk) == length:
            yield Round(chunk, end, 0)
        elif not cut.drop_last:
            missing = -len(chunk) % (cut.ranks if cut.split_tail else length) if cut.completes else 0
            repeats = [head[i % len(head)] for i in range(missing)]
            unknown = weigh is not None and None in map(weigh, repeats)
            yield Round(chunk + repeats, end, -1 if unknown else weight(repeats))


def split_batches(batches: Iterable[Sequence[Any]], ranks: int, *, even: bool, start: int = 0) -> Iterator[Round]:
    """Each batch as a round. With `even`, samples of the first batches make its length a multiple of `ranks`."""
    head: list[Any] = []
    end = 0
    for batch in batches:
        if len(head) < ranks:  # a round misses fewer than `ranks` samples
            head += batch[: ranks - len(head)]
        end += len(batch)
        if end > start and batch:
            missing = -len(batch) % ranks if even else 0
            yield Round(list(batch) + [head[i % len(head)] for i in range(missing)], end, missing)


def parts(round_: Round, size: int | None, ranks: Iterable[int]) -> Iterator[Share]:
    """The shares of `ranks` in a round: `size` items each, or with None one ready batch. Empty shares are omitted."""
    for rank in ranks:
        items = round_.items[rank : rank + 1] if size is None else round_.items[rank * size : (rank + 1) * size]
        if items:
            yield Share(rank, items[0] if size is None else items, round_.end, round_.surplus)


def flagged(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item with a flag for the last one. Reads one item ahead."""
    reader = iter(items)
    for item in reader:
        for following in reader:
            yield item, False
            item = following
        yield item, True
