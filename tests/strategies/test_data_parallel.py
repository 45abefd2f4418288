"""data_parallel: the plain model on one device, copies on several."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from easymp import Accelerator
from easymp.strategies.single import visible_devices

from .models import make


def test_one_device_is_the_plain_model() -> None:
    with Accelerator(mixed_precision="no", strategy="data_parallel", cpu=True) as acc:
        model = make("conv")
        assert acc.prepare(model) is model and acc.unwrap_model(model) is model


@pytest.mark.parametrize(("device", "expected"), [("cpu", []), ("cuda:0", [0, 1, 2]), ("cuda:1", [1, 0, 2])])
def test_which_devices(monkeypatch: pytest.MonkeyPatch, device: str, expected: list[int]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_devices(torch.device(device)) == expected


@pytest.mark.gpu
def test_on_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two NVIDIA GPUs; here is {torch.cuda.device_count()}")
    with Accelerator(mixed_precision="bf16", strategy="data_parallel") as acc:
        model = acc.prepare(make("tied"))
        assert isinstance(acc._prepared.models[0].module, nn.DataParallel)
        acc.backward(model(torch.randn(8, 12, device=acc.device)).square().mean())
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
