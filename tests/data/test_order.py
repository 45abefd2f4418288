"""Orders: f(seed, epoch), the same everywhere, with nobody's random state touched."""

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

from easymp.data.order import Permutation, Randomness, draw, length, mix, own_seed


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
        RandomSampler(range(9), num_samples=4),
        RandomSampler(range(9), num_samples=25),
        RandomSampler(range(9), replacement=True, num_samples=30),
        DistributedSampler(range(9), num_replicas=4, rank=2, seed=3),
        DistributedSampler(range(9), num_replicas=4, rank=2, shuffle=False),
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


def test_random_samplers_counts() -> None:
    whole = list(draw(RandomSampler(range(9), num_samples=25), 5, 8))
    assert sorted(whole[:9]) == sorted(whole[9:18]) == list(range(9)) and len(set(whole[18:])) == 7
    assert sorted(draw(DistributedSampler(range(9), num_replicas=4, rank=2), 0, 8)) == list(range(9))
    own = [list(draw(DistributedSampler(range(99), 4, 2, seed=s), 0, 8)) for s in (0, 1)]
    assert own[0] != own[1]


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


def test_randomness_is_put_back_after_an_error() -> None:
    before = states()
    with pytest.raises(ZeroDivisionError), Randomness(1):
        _ = torch.rand(3), random.random(), np.random.rand(), 1 / 0
    assert before == states()


def test_permutations_slice_to_lists() -> None:
    order = Permutation(torch.tensor([3, 1, 2]))
    assert (order[1:], order[0], len(order), list(order)) == ([1, 2], 3, 3, [3, 1, 2])


def test_a_samplers_own_seed_is_drawn_as_a_plain_loader_does() -> None:
    torch.manual_seed(11)
    plain = [int(i) for batch in torch.utils.data.DataLoader(range(20), 4, shuffle=True) for i in batch]
    torch.manual_seed(11)
    assert list(draw(RandomSampler(range(20)), own_seed(RandomSampler(range(20))), 1)) == plain
