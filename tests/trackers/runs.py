"""A small training that logs, may be killed, and goes on; and a row, images and a table."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from easymp import Accelerator, Settings

UPDATES, SAVED, KILLED = 10, 6, 8


def train(folder: str, log_with: Any, kill: bool = False, options: Any = None) -> int:
    """Ten updates, a row each, with a checkpoint after the sixth; dies after the eighth. Returns the first update."""
    acc = Accelerator(cpu=True, project_dir=folder, log_with=log_with, settings=Settings(timeout=30))
    acc.init_trackers("run", {"lr": 0.1, "model": {"depth": 1}}, init_kwargs=options)
    model = torch.nn.Linear(2, 1)
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    acc.resume()
    begin = optimizer.updates
    for update in range(begin + 1, UPDATES + 1):
        loss = model(torch.ones(1, 2)).sum()
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        acc.log({"loss": loss.detach() * 0 + update, "half": {"of it": update / 2}, "phase": "train"})
        if update == SAVED:
            acc.save_state()
        if kill and update == KILLED:
            acc._logbook.settle_rows()  # as after a second
            acc.wait_for_everyone()
            os.kill(os.getpid(), signal.SIGKILL)
    acc.end_training()
    return begin


def log_all(folder: str, log_with: Any = "jsonl") -> None:
    """A row, images and a table, of one step."""
    with Accelerator(cpu=True, project_dir=folder, log_with=log_with, settings=Settings(timeout=30)) as acc:
        acc.log({"loss": 0.5}, step=3)
        acc.log_images("val/digits", torch.eye(4).repeat(2, 3, 1, 1), step=3)
        acc.log_table("found", ["digit", "as"], [[torch.tensor(1), "one"], [2, None]], step=3)


def rows(folder: Path | str, run: str = "log") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / f"{run}.jsonl").read_text().splitlines()]
