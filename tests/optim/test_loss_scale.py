"""The loss scale under an Accelerator where kernels step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from easymp import Accelerator, Settings

from ..cuda.compiled import CompiledLauncher
from ..strategies.models import make
from ..words import make_accelerator
from .test_engines import SCALE, stepping


@pytest.fixture
def kernels() -> Iterator[CompiledLauncher]:
    with stepping("kernels") as launcher:
        yield launcher


def fp16(**options: Any) -> Accelerator:
    return make_accelerator(mixed_precision="fp16", cpu=True, settings=Settings(scaler_options=SCALE), **options)


def test_four_launches_a_step(kernels):
    with fp16() as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        scales = []
        for overflow in (False, False, True, False, False, False):
            kernels.launches.clear()
            acc.backward(model(torch.ones(2, 12) * (1e30 if overflow else 1)).square().mean())
            acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scales.append(acc.scaler.get_scale())
            assert optimizer.step_was_skipped is overflow
            assert kernels.launches == ["squares_f32", "total", "prepare_adam", "adam_f32_f32_f32_f32"]
    assert scales == [1024, 1024, 512, 512, 512, 1024]


@pytest.mark.usefixtures("kernels")
def test_a_save_after_a_step_has_the_scale_of_the_next(tmp_path):
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


def test_reading_the_scaler_between_two_steps_moves_nothing() -> None:
    results = []
    for reads in (False, True):
        with fp16() as acc:
            body, head = make("mlp"), make("mlp")
            optimizers = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (body, head))
            body, head, body_optimizer, head_optimizer = acc.prepare(body, head, *optimizers)
            for step, scale in enumerate((1024, 1024, 512, 512, 512)):
                x = torch.ones(2, 12) * (1e30 if step == 2 else 1)
                acc.backward((body(x) * head(torch.ones(2, 12))).sum())
                body_optimizer.step()
                if reads:
                    acc.scaler.state_dict()
                    assert acc.scaler.get_scale() == scale
                head_optimizer.step()
                body_optimizer.zero_grad()
                head_optimizer.zero_grad()
            weights = [p.detach() for p in [*body.parameters(), *head.parameters()]]
            results.append((acc.scaler.state_dict(), weights))
    torch.testing.assert_close(*results, rtol=0, atol=0)
