"""Runs of `easymp compare` as they could have been, and a script to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from easymp.cli.compare.runs import Record, Run, conclude
from easymp.cli.harness import FAILURE, FINISHED, End, Script
from easymp.cli.plot import Point

MACHINE: dict[str, Any] = {
    "processor": "Some Xeon",
    "cores": 32,
    "threads": 64,
    "memory": 256 << 30,
    "devices": [{"name": "H100", "memory": 80 << 30, "architecture": "sm_90"}] * 2,
    "system": "Linux",
    "python": "3.11",
    "torch": "2.13.0",
    "easymp": "0.1.0",
}

TINY = """
import sys, time
import torch
from easymp import Accelerator

acc = Accelerator(mixed_precision="fp32", seed=0, log_with="none")
print("arguments", sys.argv[1:], flush=True)
data = torch.utils.data.TensorDataset(torch.randn(int(sys.argv[1]) if sys.argv[1:] else 64, 8))
model, loader = torch.nn.Linear(8, 1), torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = acc.prepare(model, torch.optim.AdamW(model.parameters()), loader)
if acc.mixed_precision == "O3":
    time.sleep(600)
for epoch in range(2):
    for (x,) in loader:
        loss = model(x).square().mean()
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        acc.log({"loss": loss})
    acc.log({"accuracy": 0.5 + 0.1 * epoch})
acc.save_state()
acc.end_training()
"""


def run(variant, seconds, number=1, *, values=None, samples=1000, peak=1 << 30, why=""):
    """A run that took `seconds` from the first of 100 updates to the last; a failed one for None."""
    if seconds is None:
        return Run(variant, number, None, End(FAILURE, why, 1e9, 3.0), None)
    curves = {
        name: [Point(i * 100 // len(curve), seconds * i / len(curve), value) for i, value in enumerate(curve, 1)]
        for name, curve in (values or {}).items()
    }
    plan = {"processes": 1, "precision": {"value": variant.name, "reason": "asked for", "source": "x"}}
    memory = [(-0.5, peak // 2), (0.0, peak), (seconds, peak)]
    usage = {"samples": samples, "peak": peak, "device_memory": True, "memory": memory}
    record = Record(1e9 + 2.0, 1.0, seconds, 100, curves, plan, MACHINE, **usage)
    return Run(variant, number, None, End(FINISHED, "", 1e9, seconds + 4.0), record)


def comparison(*runs, folder=Path("nowhere"), metrics=(), script="train.py"):
    return conclude(Script(script, ["--lr", "0.1"]), runs, folder, metrics)
