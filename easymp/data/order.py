"""The order of an epoch: f(seed, epoch), the same on every rank, and without touching anybody's random state.

torch's own samplers become index arithmetic. Any other sampler is drawn with the global generators (torch, numpy, random) and
its own ones seeded for the moment and put back afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

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
