"""The loss scale as the step's third launch moves it: what the scaler's own launch would have made of it, bit for bit."""

import pytest
import torch

from easymp import GradScalerKwargs
from easymp.cuda.step import FusedStep
from easymp.precision import Scaler

from .compiled import CompiledLauncher
from .kernels import RULES

BAD, GOOD = torch.tensor(1.0), torch.tensor(0.0)


def ready(law, launcher=None, device="cpu"):
    """A step of one parameter, and a scaler that lends to it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3, device=device))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, device=device)
    scaler = Scaler(law)
    scaler.sharers = 1
    scaler.scale(torch.ones((), device=device))
    return optimizer, scaler, FusedStep(optimizer, RULES[torch.optim.SGD], launcher or CompiledLauncher())


@pytest.mark.parametrize(
    ("law", "sharers"),
    [
        (GradScalerKwargs(), 0),
        (GradScalerKwargs(), 2),
        (GradScalerKwargs(dynamic=False), 1),
        (GradScalerKwargs(min_scale=1.0, raise_at_minimum=True), 1),
    ],
)
def test_who_cannot_have_it(law, sharers):
    optimizer, scaler, _ = ready(law)
    scaler.sharers = sharers
    scaler.take([optimizer], GOOD)
    scaler.begin_step(optimizer)
    assert scaler.lend(optimizer) is None


def test_a_loss_that_was_scaled_before_cannot_go_back_after_it():
    """As with torch's own launch: its gradients would be scaled by something else than they are divided by."""
    optimizer, scaler, step = ready(GradScalerKwargs())
    weight = torch.ones((), requires_grad=True)
    loss = scaler.scale(weight * 2)
    step.step(None, scaler.begin_step(optimizer), scale=scaler.lend(optimizer))
    scaler.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
