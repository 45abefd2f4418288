"""The loss scale: its rules against golden sequences and torch's own scaler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from easymp import GradScalerKwargs, SettingError, StepError
from easymp.base.accumulation import UpdateWindow
from easymp.precision import Scaler

from ..words import make_accelerator

INF = float("inf")


def parameter(size: int = 3) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


def sgd(*parameters: nn.Parameter, **options: object) -> torch.optim.SGD:
    return torch.optim.SGD(parameters or (parameter(),), **{"lr": 0.1, **options})


def values(rule: GradScalerKwargs, steps: str) -> list[float]:
    """The scale after each step."""
    scaler, flags = Scaler(rule), {"o": torch.tensor(1.0), "g": torch.tensor(0.0)}
    return [(scaler.advance(flags[step]), scaler.get_scale())[1] for step in steps]


def model(rule: GradScalerKwargs, steps: str) -> Iterator[float]:
    """DeepSpeed's DynamicGradScalerKwargsr and torch's rule, in plain numbers (growth_delay tells them apart)."""
    scale, patience, good_steps = rule.init_scale, rule.hysteresis, 0
    for step in steps:
        if step == "o":
            good_steps = 0
            if patience > 1:
                patience -= 1
            else:
                scale = max(scale * rule.backoff_factor, rule.min_scale)
        else:
            good_steps += 1
            if rule.refill_each_step:
                patience = rule.hysteresis
            if good_steps == rule.growth_interval + rule.growth_delay:
                good_steps = rule.growth_delay
                scale = min(scale * rule.growth_factor, rule.max_scale)
                patience = rule.hysteresis
        yield scale


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    steps=st.text("og", max_size=60),
    interval=st.integers(1, 5),
    delay=st.integers(0, 1),
    hysteresis=st.integers(1, 3),
    refill=st.booleans(),
    bounds=st.sampled_from([(0.0, INF), (64.0, 1024.0), (1.0, INF), (0.0, 512.0)]),
)
def test_every_rule_is_the_models(steps, interval, delay, hysteresis, refill, bounds):
    options = {"refill_each_step": refill, "min_scale": bounds[0], "max_scale": bounds[1]}
    options |= {"growth_interval": interval, "growth_delay": delay, "hysteresis": hysteresis}
    rule = GradScalerKwargs(256.0, **options)
    assert values(rule, steps) == list(model(rule, steps))


def test_an_overflow_at_the_minimum_can_be_an_error() -> None:
    rule = GradScalerKwargs(256.0, min_scale=64.0, raise_at_minimum=True)
    assert values(rule, "oog") == [128, 64, 64]
    with pytest.raises(StepError, match=r"smallest loss scale, 64: it cannot be decreased anymore"):
        values(rule, "ooo")


def test_the_scale_stays_finite() -> None:
    """An infinite scale would never come down again: half of it is infinite, too."""
    for hysteresis in (1, 2):
        rule = GradScalerKwargs(2.0**120, growth_interval=1, hysteresis=hysteresis)
        assert values(rule, "g" * 20)[7:] == [2.0**127] * 13


def test_impossible_rules_are_refused() -> None:
    for option, value, limit in (
        ("init_scale", math.nan, "a finite number above 0"),
        ("growth_factor", 1.0, "a finite number above 1"),
        ("backoff_factor", 0.0, "a finite number above 0"),
        ("backoff_factor", 1.0, "below 1"),
        ("growth_interval", 0, "a whole number of at least 1"),
        ("hysteresis", 0, "a whole number of at least 1"),
        ("min_scale", -1.0, "between 0 and max_scale"),
    ):
        with pytest.raises(SettingError, match=rf"{option}=.* is not {limit}"):
            GradScalerKwargs(**{option: value})


def pair() -> tuple[Scaler, torch.amp.GradScaler]:
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    return Scaler(GradScalerKwargs(256.0, growth_interval=3)), torch_scaler


def train(scaler, optimizer, events):
    """The scale after each event: good step, overflow, overflow after unscale_, clipped step."""
    (p,) = optimizer.param_groups[0]["params"]
    scales = []
    for event in events:
        optimizer.zero_grad()
        factor = {"overflow": INF, "nan": math.nan}.get(event, 1.0)
        scaler.scale((p * p).sum() * factor).backward()
        if event == "clip":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([p], 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [*scales, p.detach().tolist()]


EVENTS = st.lists(st.sampled_from(["good", "good", "overflow", "nan", "clip"]), max_size=25)


@hypothesis_settings(max_examples=40, deadline=None)
@given(before=EVENTS, after=EVENTS, kind=st.sampled_from(["sgd", "momentum", "fused adam"]))
def test_step_for_step_as_torch(before: list[str], after: list[str], kind: str) -> None:
    def optimizer() -> torch.optim.Optimizer:
        if kind == "fused adam":
            return torch.optim.Adam([parameter()], lr=0.1, fused=True)
        return sgd(momentum=0.9 if kind == "momentum" else 0.0)

    (scaler, torch_scaler), (our_optimizer, torch_optimizer) = pair(), (optimizer(), optimizer())
    assert train(scaler, our_optimizer, before) == train(torch_scaler, torch_optimizer, before)
    assert scaler.state_dict() == {**torch_scaler.state_dict(), "hysteresis": 1}
    # Each goes on from the other's state.
    swapped_ours, swapped_theirs = pair()
    swapped_ours.load_state_dict(torch_scaler.state_dict())
    swapped_theirs.load_state_dict(scaler.state_dict())
    assert train(swapped_ours, our_optimizer, after) == train(swapped_theirs, torch_optimizer, after)


def test_the_state_has_what_is_left_of_hysteresis() -> None:
    rule = GradScalerKwargs(256.0, hysteresis=3)
    scaler, resumed = Scaler(rule), Scaler(rule)
    scaler.advance(torch.tensor(1.0))
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.state_dict() == scaler.state_dict()
    for _ in range(2):
        resumed.advance(torch.tensor(1.0))
    assert resumed.get_scale() == 128


def test_each_wrong_order_says_which_call_came_too_early() -> None:
    scaler, p = Scaler(GradScalerKwargs(2.0)), parameter()
    optimizer = sgd(p)
    with pytest.raises(StepError, match="before any backward"):
        scaler.step(optimizer)
    with pytest.raises(StepError, match=r"update\(\) before any step\(\)"):
        Scaler(GradScalerKwargs(2.0)).update()
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(StepError, match="unscale_ was called twice"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(StepError, match=r"unscale_ was called after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(StepError, match=r"step\(\) was called twice"):
        scaler.step(optimizer)
    fp16_parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler.scale(fp16_parameter.sum()).backward()
    with pytest.raises(StepError, match="a gradient is float16"):
        scaler.unscale_(sgd(fp16_parameter))


def test_momentum_of_a_skipped_first_step_is_not_left_to_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes the buffers of fused SGD without a value; here unwritten memory is NaN."""
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    try:
        optimizer, scaler = sgd(p := parameter(), momentum=0.9, fused=True), Scaler(GradScalerKwargs(4.0))
        for value in (INF, 2.0):
            p.grad = torch.full_like(p, value)
            scaler.step(optimizer)
            scaler.update()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(p.data, torch.full((3,), 0.9))


@pytest.mark.parametrize("has_scaled", [False, True])
def test_an_update_by_hand(has_scaled: bool) -> None:
    scaler = Scaler(GradScalerKwargs(4.0))
    if has_scaled:
        scaler.scale(torch.ones(()))
    for new in (8.0, torch.tensor(16.0)):
        scaler.update(new)
        assert scaler.get_scale() == float(new)


def test_off_is_the_identity() -> None:
    window, p = UpdateWindow(), parameter()
    scaler = Scaler(enabled=False, window=window)
    optimizer, loss = sgd(p), (p * 2).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    for _ in range(2):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(p.data, torch.full((3,), 0.6))
    assert (scaler.get_scale(), scaler.state_dict(), window.turn(optimizer).skipped) == (1.0, {}, None)


@pytest.mark.parametrize("words", [{"mixed_precision": "fp16"}, {"mixed_precision": "no", "nonfinite": "skip"}])
def test_complex_gradients_are_unscaled_and_checked(words: dict[str, Any]) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).abs().sum()

    with make_accelerator(scaler_options=GradScalerKwargs(init_scale=4.0), **words) as acc:
        model, optimizer = acc.prepare(model := Waves(), torch.optim.SGD(model.parameters(), lr=0.5))
        for factor in (1.0, float("inf")):
            acc.backward(model(torch.tensor([factor, 1.0])))
            optimizer.step()
            optimizer.zero_grad()
        assert acc.optimizer_step_was_skipped
        assert model.weight.tolist() == [0.5, 0.5]
