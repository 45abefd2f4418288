"""Random streams: the same from the same seed, alike on all ranks until models are prepared."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn

from easymp import Accelerator, set_seed


@pytest.fixture(autouse=True)
def _streams():
    before = random.getstate(), numpy.random.get_state(), torch.random.get_rng_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    torch.random.set_rng_state(before[2])


def drawn(seed: int, **options: bool) -> tuple[float, float, float]:
    set_seed(seed, **options)
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


def test_one_seed_one_stream(monkeypatch):
    first = drawn(5)
    assert drawn(5) == first
    streams = [first, drawn(6)]
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        streams.append(drawn(5, device_specific=True))
    assert all(len(set(column)) == 4 for column in zip(*streams))


def dropout_and_weights() -> tuple[list[float], list[float], list[float]]:
    """Initial weights, dropout masks and the data order of a rank."""
    with Accelerator(cpu=True, mixed_precision="fp32") as accelerator:
        set_seed(11)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        weights = model[0].weight.flatten().tolist()
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=1, shuffle=True)
        model, loader = accelerator.prepare(model, loader)
        mask = (model[1](torch.ones(64)) > 0).float().tolist()
        order = accelerator.gather(torch.cat(list(loader))).tolist()
    return weights, mask, order


def test_ranks_start_alike_then_differ(ranks):
    (weights, mask, order), (others_weights, others_mask, others_order) = ranks(dropout_and_weights)
    assert weights == others_weights and mask != others_mask
    assert order == others_order and sorted(order) == list(range(8))
