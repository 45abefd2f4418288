"""O0 to O3: what each does to a model, and that each trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator, AutocastKwargs

from ..strategies.models import Of

FP16, FP32 = torch.float16, torch.float32


def net() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
    return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


# level: parameters, batch-norm, scaled, masters
TABLE = {
    "O0": (FP32, FP32, False, False),
    "O1": (FP32, FP32, True, False),
    "O2": (FP16, FP32, True, True),
    "O3": (FP16, FP16, False, False),
}


@pytest.mark.parametrize("level", TABLE)
def test_the_table_of_levels(level: str) -> None:
    param, norm, scaled, masters = TABLE[level]
    with Accelerator(mixed_precision=level, cpu=True) as acc:
        assert (acc.mixed_precision, acc.plan.precision.value) == (level, level)
        assert acc.scaler.enabled == scaled
        assert acc.scaler.get_scale() == (65536.0 if scaled else 1.0)
        model = net()
        given = list(model.parameters())
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(a is b for a, b in zip(given, model.parameters()))
        assert {p.dtype for m in (model[1], model[5]) for p in m.parameters()} == {param}
        kept = (*model[2].parameters(), *model[2].buffers())
        assert {t.dtype for t in kept if t.is_floating_point()} == {norm}
        assert model[2].num_batches_tracked.dtype == torch.int64
        held = {p.dtype for group in optimizer.param_groups for p in group["params"]}
        assert held == ({FP32} if masters else {param, norm})
        seen: list[Any] = []
        model[5].register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
        assert model(torch.randn(8, 12)).dtype == FP32
        assert seen[0][1] == (FP32 if level == "O0" else FP16)


def test_buffers_and_tied_parameters_are_cast_once() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("table", torch.ones(3))
    model.register_buffer("index", torch.arange(3))
    model.frozen = nn.Linear(2, 2).requires_grad_(False)
    model.plain = nn.BatchNorm1d(4, affine=False)
    with Accelerator(mixed_precision="O2", cpu=True) as acc:
        acc.prepare(model)
    assert model.head.weight is model.embed.weight
    whole = ("index", "plain.num_batches_tracked")
    assert all(t.dtype == (torch.int64 if n in whole else FP16) for n, t in model.state_dict().items())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_nested_inputs_are_cast_in(level: str) -> None:
    reads = Of(lambda m, batch, scale: (batch["x"].dtype, batch["n"].dtype, scale.dtype))
    batch = {"x": torch.ones(2), "n": torch.arange(2)}
    with Accelerator(mixed_precision=level, cpu=True) as acc:
        seen = acc.prepare(reads)(batch, scale=torch.ones((), dtype=torch.float64))
    assert seen == (FP16, torch.int64, FP16)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_outputs_have_the_dtype_that_was_asked_for(level: str) -> None:
    for asked, wanted in ((None, FP16), (torch.bfloat16, torch.bfloat16)):
        options = [AutocastKwargs(output_dtype=asked)]
        with Accelerator(mixed_precision=level, cpu=True, kwargs_handlers=options) as acc:
            assert acc.prepare(nn.Linear(4, 4))(torch.ones(2, 4)).dtype == wanted


@pytest.mark.parametrize(("level", "product"), [("O0", FP32), ("O1", FP16), ("O2", FP32), ("O3", FP32)])
def test_autocast_outside_of_the_model(level: str, product: torch.dtype) -> None:
    with Accelerator(mixed_precision=level, cpu=True) as acc:
        with acc.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == product
        with acc.autocast(AutocastKwargs(enabled=False)):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FP32
