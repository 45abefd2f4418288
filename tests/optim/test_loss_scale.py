"""The loss scale under an Accelerator where kernels step: no launch of its own, and a scale that is the same as with one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import easymp.optim
from easymp import Accelerator

from ..cuda.compiled import CompiledLauncher
from ..strategies.models import make
from .test_engines import SCALE, stepping


@pytest.fixture
def own_launches(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Flags with which the scale was moved in a launch of its own."""
    seen: list[float] = []
    update = torch._amp_update_scale_

    def counted(scale: torch.Tensor, good: torch.Tensor, found: torch.Tensor, *numbers: Any) -> None:
        seen.append(found.item())
        update(scale, good, found, *numbers)

    monkeypatch.setattr(torch, "_amp_update_scale_", counted)
    return seen


@pytest.fixture
def kernels() -> Iterator[CompiledLauncher]:
    with stepping("kernels") as launcher:
        yield launcher


def fp16(**options: Any) -> Accelerator:
    return Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[SCALE], **options)


@pytest.mark.parametrize("ours", [False, True])
def test_four_launches_and_none_for_the_scale(ours, kernels, own_launches):
    make_one = easymp.optim.AdamW if ours else torch.optim.AdamW
    measured = [] if ours else ["squares_f32", "total"]  # under an Accelerator torch measures for ours
    with fp16() as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, make_one(model.parameters(), lr=0.01))
        scales = []
        for bad in (False, False, True, False, False, False):
            kernels.launches.clear()
            acc.backward(model(torch.ones(2, 12) * (1e30 if bad else 1)).square().mean())
            acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scales.append(acc.scaler.get_scale())
            assert optimizer.step_was_skipped is bad
            assert kernels.launches == [*measured, "prepare_adam", "adam_f32_f32_f32_f32"]
    assert scales == [1024, 1024, 512, 512, 512, 1024]
    assert own_launches == []


def test_a_save_after_a_step_has_the_scale_of_the_next(kernels, own_launches, tmp_path):
    ends = []
    for first in (0, 2):
        with fp16() as acc:
            model = make("mlp")
            model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            if first:
                acc.load_state(tmp_path / "a")
            for step in range(first, 4):
                x = torch.full((2, 12), 1e30 if step == 1 else float(step))
                acc.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    acc.save_state(tmp_path / "a")
            ends.append((acc.scaler.state_dict(), [p.detach().clone() for p in model.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert (ends[0][0]["scale"], ends[0][0]["_growth_tracker"]) == (512, 2)
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=0, atol=0)
    assert own_launches == []


def test_reading_the_scaler_between_two_steps_moves_nothing() -> None:
    found = []
    for reads in (False, True):
        with fp16() as acc:
            body, head = make("mlp"), make("mlp")
            optimizers = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (body, head))
            body, head, one, two = acc.prepare(body, head, *optimizers)
            for step, scale in enumerate((1024, 1024, 512, 512, 512)):
                x = torch.ones(2, 12) * (1e30 if step == 2 else 1)
                acc.backward((body(x) * head(torch.ones(2, 12))).sum())
                one.step()
                if reads:
                    acc.scaler.state_dict()
                    assert acc.scaler.get_scale() == scale
                two.step()
                one.zero_grad()
                two.zero_grad()
            weights = [p.detach() for p in [*body.parameters(), *head.parameters()]]
            found.append((acc.scaler.state_dict(), weights))
    torch.testing.assert_close(*found, rtol=0, atol=0)
