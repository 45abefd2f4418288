"""What the log says of a device that runs out of memory; torch's snapshot is a recorded one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator
from easymp.parts import out_of_memory


def test_the_largest_tensors_are_named_with_the_word_that_removes_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    acc = Accelerator(cpu=True, log_with="none")
    model, optimizer = acc.prepare(model := nn.Linear(64, 64), torch.optim.AdamW(model.parameters()))
    acc.backward(model(torch.ones(1, 64)).sum())
    optimizer.step()
    (state,) = [s for p, s in optimizer.state.items() if p.ndim == 2]
    script = {"filename": str(Path(__file__)), "line": 12, "name": "forward"}
    library = {"filename": torch.__file__, "line": 3, "name": "linear"}
    blocks: list[dict[str, Any]] = [
        {"size": 2**20, "address": 1, "state": "active_allocated", "frames": [library, script]},
        {"size": 2**30, "address": 2, "state": "inactive", "frames": []},
        {"size": 2**14, "address": state["exp_avg"].data_ptr(), "state": "active_allocated", "frames": []},
        {"size": 2**13, "address": model.weight.grad.data_ptr(), "state": "active_allocated", "frames": []},
    ]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [{"device": 0, "blocks": blocks}]})
    monkeypatch.setattr(acc._run.world, "device", torch.device("cuda", 0))
    with caplog.at_level(logging.ERROR):
        out_of_memory.observe(0, 1, 2, 3)
    monkeypatch.undo()
    acc.end_training()
    assert "cuda:0 is out of memory" in caplog.text and "GiB" not in caplog.text
    text = " ".join(caplog.text.split())
    assert f"1.0 MiB activations {Path(__file__)}:12 activation_offload=True saves 1.0 MiB" in text
    assert "16.0 KiB states float32[64, 64] exp_avg of weight" in text
    assert "8.0 KiB gradients float32[64, 64] weight optimizer_in_backward=True saves 8.0 KiB" in text
