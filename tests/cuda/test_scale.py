"""The loss scale as the step's third launch moves it: what the scaler's own launch would have made of it, bit for bit."""

import pytest
import torch

from easymp.cuda.rules import RULES
from easymp.cuda.step import FusedStep
from easymp.errors import StepError
from easymp.precision import LossScale, Scaler

from .compiled import CompiledLauncher

BAD, GOOD = torch.tensor(1.0), torch.tensor(0.0)
ODD = {
    "initial": 1000.0,
    "growth_factor": 1.3,
    "backoff_factor": 0.7,
    "growth_interval": 2,
}  # products that have to be rounded
LAWS = {
    "torch": LossScale(initial=256.0, growth_interval=3),
    "torch, rounded": LossScale(**ODD),
    "DeepSpeed": LossScale(initial=256.0, growth_interval=3, growth_delay=1, hysteresis=2),
    "DeepSpeed, refilled": LossScale(
        initial=256.0, growth_interval=3, growth_delay=1, hysteresis=2, refill_each_step=True
    ),
    "bounds, rounded": LossScale(**ODD, minimum=500.0, maximum=1500.0, hysteresis=2),
    "near infinity": LossScale(initial=2.0**126, growth_interval=1),
    "near infinity, by another path": LossScale(initial=2.0**126, growth_interval=1, hysteresis=2),
}


def ready(law, launcher=None, device="cpu"):
    """A step of one parameter, and a scaler that lends to it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3, device=device))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, device=device)
    scaler = Scaler(law)
    scaler.sharers = 1
    scaler.scale(torch.ones((), device=device))
    return optimizer, scaler, FusedStep(optimizer, RULES[torch.optim.SGD], launcher or CompiledLauncher())


def moves_as_by_torch(law, launcher, device):
    """Eighty steps, some of which overflow; the scaler's own launch is on a CPU."""
    optimizer, scaler, step = ready(LAWS[law], launcher, device)
    other = Scaler(LAWS[law])
    flips = torch.rand(80, generator=torch.Generator().manual_seed(3)) < 0.3
    by_torch = [(other.advance(BAD if bad else GOOD), other.state_dict())[1] for bad in flips]
    scaler.advance = lambda found: pytest.fail("a launch of its own")
    for bad, expected in zip(flips, by_torch, strict=True):
        scaler.take([optimizer], (BAD if bad else GOOD).to(device))
        found = scaler.begin_step(optimizer)
        step.step(None, found, scale=scaler.lend(optimizer))
        assert scaler.state_dict() == expected
        scaler.update()
        assert scaler.state_dict() == expected
    assert len({state["scale"] for state in by_torch}) > 2


@pytest.mark.parametrize("law", LAWS)
def test_it_is_the_scalers_own(law):
    moves_as_by_torch(law, CompiledLauncher(), "cpu")


@pytest.mark.parametrize(
    ("law", "sharers"),
    [
        (LossScale(), 0),
        (LossScale(), 2),
        (LossScale(dynamic=False), 1),
        (LossScale(minimum=1.0, raise_at_minimum=True), 1),
    ],
)
def test_who_cannot_have_it(law, sharers):
    optimizer, scaler, _ = ready(law)
    scaler.sharers = sharers
    scaler.take([optimizer], GOOD)
    scaler.begin_step(optimizer)
    assert scaler.lend(optimizer) is None


def test_another_that_comes_too_late_or_was_there_before():
    optimizer, scaler, step = ready(LossScale())
    late, _, _ = ready(LossScale())
    scaler.unscale_(late)
    found = scaler.begin_step(optimizer)
    assert scaler.lend(optimizer) is None
    scaler.update()
    found = scaler.begin_step(optimizer)
    step.step(None, found, scale=scaler.lend(optimizer))
    for call in (scaler.begin_step, scaler.unscale_, lambda one: scaler.scale_of([one], True)):
        with pytest.raises(StepError, match=r"prepare\(\) all optimizers before the first step"):
            call(late)
    scaler.update()
    scaler.unscale_(late)


def test_a_loss_that_was_scaled_before_cannot_go_back_after_it():
    """As with torch's own launch: its gradients would be scaled by something else than they are divided by."""
    optimizer, scaler, step = ready(LossScale())
    weight = torch.ones((), requires_grad=True)
    loss = scaler.scale(weight * 2)
    step.step(None, scaler.begin_step(optimizer), scale=scaler.lend(optimizer))
    scaler.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
