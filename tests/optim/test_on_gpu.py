"""On a GPU.

What an Accelerator and our own optimizers step by kernels trains as torch's steps do, and waits for nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator

from . import test_engines, test_own

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("kind", "options"), test_own.KINDS)
def test_own_optimizers_by_kernels_and_by_torch(kind: Any, options: dict[str, Any]) -> None:
    fast, optimizer, by_kernels = test_own.run(kind, options, device="cuda")
    slow, plain, by_torch = test_own.run(kind, {**options, "fused": False}, device="cuda")
    assert (by_kernels.name, by_torch.name) == ("CuPy", "torch"), by_kernels.reason
    for p, q in zip(fast, slow):
        torch.testing.assert_close(p, q, rtol=5e-5, atol=1e-5)
        assert set(optimizer.state[p]) == set(plain.state[q])
        for key, value in plain.state[q].items():
            torch.testing.assert_close(optimizer.state[p][key], value.to(p.device), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(
    ("precision", "rtol", "atol", "bad"),
    [("fp32", 1e-3, 1e-4, None), ("bf16", 2e-2, 2e-3, None), ("fp16", 2e-2, 2e-3, None), ("fp16", 2e-2, 2e-3, (2, 0))],
)
@pytest.mark.parametrize("kind", test_engines.KINDS)
def test_an_accelerators_steps(kind, precision, rtol, atol, bad, clip):
    by_kernels, by_torch = (
        test_engines.updates(fused, kind, precision, clip, overflow=bad, cpu=False) for fused in (True, False)
    )
    assert (by_kernels["engine"], by_torch["engine"]) == ("CuPy", "torch")
    assert (by_kernels["skipped"], by_kernels["scale"]) == (by_torch["skipped"], by_torch["scale"])
    assert by_kernels["norms"] == pytest.approx(by_torch["norms"], rel=rtol, nan_ok=True)
    for name, value in by_kernels["parameters"].items():
        torch.testing.assert_close(value, by_torch["parameters"][name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_clipped_step_of_an_accelerator_waits_for_nothing(precision: str) -> None:
    with Accelerator(mixed_precision=precision, ema_decay=0.99) as acc:
        raw_model = nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 5))
        model, optimizer = acc.prepare(raw_model, torch.optim.AdamW(raw_model.parameters()))
        for turn in range(6):
            loss = model(torch.randn(8, 12, device=acc.device)).square().mean()
            torch.cuda.set_sync_debug_mode(
                "error" if turn > 2 else "default"
            )  # the first ones make states, tables and pinned memory
            try:
                acc.backward(loss)
                norm = acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert optimizer.engine.name == "CuPy" and norm is not None and norm.isfinite()
