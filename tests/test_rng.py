"""Random streams: the same from the same seed, alike on all ranks until they diverge."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from easymp import set_seed
from easymp.base import env, rng
from easymp.base.rng import diverge, mix

from .conftest import Ranks


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state(), torch.random.get_rng_state(), rng._shared
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    torch.random.set_rng_state(before[2])
    rng._shared = before[3]


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


def test_one_seed_one_stream() -> None:
    set_seed(5)
    first = draw()
    set_seed(5)
    assert draw() == first
    set_seed(6)
    assert all(a != b for a, b in zip(draw(), first))


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=2, max_size=2, unique=True))
def test_neighbours_share_nothing(pairs: list[tuple[int, int]]) -> None:
    (a, b), (c, d) = pairs
    assert mix(a, b) != mix(c, d)
    assert mix(a, "rank", b) != mix(a, "order", b)
    assert 0 <= mix(a, b) < 2**63
    assert mix(a, b) == mix(a, b)


def test_rank_0_keeps_the_shared_stream_and_the_others_leave_it() -> None:
    streams = []
    for rank in range(4):
        set_seed(5)
        diverge(rank)
        streams.append(draw())
    set_seed(5)
    assert streams[0] == draw()
    for column in zip(*streams):
        assert len(set(column)) == 4


def test_device_specific_at_once() -> None:
    draws = []
    for rank in ("0", "1"):
        with env.override(RANK=rank):
            set_seed(5, device_specific=True)
        draws.append(draw())
    assert all(a != b for a, b in zip(*draws))


def dropout_and_weights() -> tuple[list[float], list[float], list[float]]:
    """Initial weights, dropout masks and the data order of a rank."""
    from torch import nn

    from easymp import Accelerator, set_seed

    with Accelerator(cpu=True, mixed_precision="fp32") as accelerator:
        set_seed(11)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        weights = model[0].weight.flatten().tolist()
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=1, shuffle=True)
        model, loader = accelerator.prepare(model, loader)
        mask = (model[1](torch.ones(64)) > 0).float().tolist()
        order = accelerator.gather(torch.cat(list(loader))).tolist()
    assert "RANK" in os.environ
    return weights, mask, order


def test_ranks_start_alike_then_differ(ranks: Ranks) -> None:
    (weights, mask, order), (others_weights, others_mask, others_order) = ranks(dropout_and_weights)
    assert weights == others_weights
    assert mask != others_mask
    assert order == others_order
    assert sorted(order) == list(range(8))
