"""save_state(async_=True) in a training, with every kind of sharding: the state is that of the call, whatever the steps do meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from easymp import Accelerator, CheckpointError
from tests.strategies.models import make, whole
from tests.strategies.ways import WAYS


def _goes_on(label, folder):
    way = WAYS[label]
    acc = Accelerator(strategy=way.strategy, strategy_options=way.options)
    model = make("mlp")
    model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def step(number):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(8, 12, generator=generator), torch.randint(0, 5, (8,), generator=generator)
        acc.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    def values():
        return [whole(p).clone() for p in model.parameters() if not p.is_meta]

    step(0)
    right = values()
    acc.save_state(f"{folder}/step-00000001", async_=True)
    step(1)
    step(2)
    after = values()
    acc.save_state(f"{folder}/step-00000003", async_=True)
    acc.load_state(f"{folder}/step-00000001")
    again = values()
    step(1)
    step(2)
    on = values()
    acc.load_state(f"{folder}/step-00000003")
    last = values()
    with pytest.raises(CheckpointError, match="name for a checkpoint"):
        acc.save_state(f"{folder}/best.save-2")
    acc.end_training()
    same = [all(map(torch.equal, a, b)) for a, b in ((right, again), (after, on), (after, last))]
    return same, any(not torch.equal(a, b) for a, b in zip(right, after))


SLOW = [pytest.param(label, marks=pytest.mark.slow) for label in ("ddp", "tensor_parallel")]


@pytest.mark.parametrize("label", ["zero1", "fsdp", "pipeline", *SLOW])
def test_the_state_is_that_of_the_call(ranks, tmp_path, label):
    for same, moved in ranks(_goes_on, label, str(tmp_path), processes=2):
        assert same == [True, True, True]
        assert moved
