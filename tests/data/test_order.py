"""Orders: f(seed, epoch), the same everywhere, with no random state touched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from easymp.data.order import draw, length, mix


class Everything(Sampler[float]):
    """Draws from every global source of randomness."""

    def __iter__(self) -> Iterator[Any]:
        yield from (random.random(), float(np.random.rand()), float(torch.rand(1)))

    def __len__(self) -> int:
        return 3


class Endless(Sampler[int]):
    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(1000, (1,), generator=self.generator))


def states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_seeds_do_not_collide_as_sums_do() -> None:
    assert len({mix(seed, "order", epoch) for seed in range(60) for epoch in range(60)}) == 3600
    assert 0 <= mix(0) < 2**63


def test_the_order_is_a_function_of_the_seed_for_all_time() -> None:
    assert mix(0, "order", 0) == 3471081512423777433
    assert (
        list(draw(RandomSampler(range(8)), 1, 1))
        == torch.randperm(8, generator=torch.Generator().manual_seed(1)).tolist()
    )


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(range(9)),
        RandomSampler(range(9)),
        RandomSampler(range(9), num_samples=25),
        RandomSampler(range(9), replacement=True, num_samples=30),
        DistributedSampler(range(9), num_replicas=4, rank=2, seed=3),
        SubsetRandomSampler([3, 1, 2], generator=torch.Generator()),
        WeightedRandomSampler([0.1, 0.9], 12),
        Everything(),
    ],
    ids=lambda s: type(s).__name__,
)
def test_one_seed_one_order_and_no_generator_touched(sampler: Any) -> None:
    own = getattr(sampler, "generator", None)
    before = states(), own and own.get_state().tolist()
    first, again, other = (list(draw(sampler, seed, 8)) for seed in (1, 1, 2))
    assert first == again
    assert len(first) == length(sampler)
    if len(first) > 4 and "Sequential" not in type(sampler).__name__ and getattr(sampler, "shuffle", True):
        assert first != other
    assert before == (states(), own and own.get_state().tolist())


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_endless_samplers_are_read_in_chunks_under_a_state_of_their_own(generator: Any) -> None:
    before = states()
    reader = draw(Endless(generator), 3, 4)
    first = list(islice(reader, 6))
    torch.rand(5)
    torch.set_rng_state(torch.tensor(before[2], dtype=torch.uint8))
    first += islice(reader, 5)
    assert first == list(islice(draw(Endless(generator), 3, 11), 11))
    assert before == states()
