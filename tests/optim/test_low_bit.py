"""torchao's optimizers with states of 8 and 4 bits: prepared as they are, saved, and resumed to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator

pytestmark = pytest.mark.slow


def trained(kind: Any, first: int, last: int, folder: str) -> list[Tensor]:
    with Accelerator(cpu=True, mixed_precision="no") as acc:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        model, optimizer = acc.prepare(model, kind(model.parameters(), lr=1e-2))
        if first:
            acc.load_state(folder)
        for turn in range(first, last):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(turn))
            acc.backward((model(x) - x).square().mean())
            acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if not first:
            acc.save_state(folder)
        state_types = {type(value).__name__ for value in optimizer.state[next(iter(model.parameters()))].values()}
        assert any(name.startswith("OptimState") for name in state_types), state_types
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_they_are_resumed_bit_for_bit(name: str, tmp_path: Any) -> None:
    kind = getattr(pytest.importorskip("torchao.optim"), name)
    with torch.compiler.set_stance("force_eager"):
        straight = trained(kind, 0, 6, str(tmp_path / "straight"))
        trained(kind, 0, 3, str(tmp_path / "cut"))
        resumed = trained(kind, 3, 6, str(tmp_path / "cut"))
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed))
