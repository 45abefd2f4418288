"""The harness in the script's own process: it runs the script, with a part that watches it for a command."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ...base.parts import RUNNER_PARTS, Part
from ...base.pytree import leaves
from ...launcher.worker import run_module, run_script
from . import REFUSED, TASK


class Stop(SystemExit):
    """Ends the script in front of or after the last update that a command looks at."""


def read_task(folder: Path) -> dict[str, Any]:
    task: dict[str, Any] = json.loads((folder / TASK).read_text(encoding="utf-8"))
    return task


class Runner(Part):
    """Runs the script of a task, and is a part of the Accelerator that the script makes."""

    name = "runner"

    def __init__(self, folder: Path, task: dict[str, Any]) -> None:
        self.folder, self.task = folder, task

    def join_run(self) -> Part:
        """Return the part that joins a new Accelerator of the script; called once for each Accelerator."""
        return self

    def play(self) -> None:
        run = run_module if self.task["module"] else run_script
        RUNNER_PARTS.append(self.join_run)
        try:
            run(self.task["script"], list(self.task["arguments"]))
        finally:
            RUNNER_PARTS.remove(self.join_run)


class SingleRunner(Runner):
    """Runs a script that makes one Accelerator. The task's ``dropout`` False sets the rates of dropout layers to 0."""

    acc: Any = None

    def refuse(self, reason: str) -> NoReturn:
        (self.folder / REFUSED).write_text(reason, encoding="utf-8")
        raise Stop

    def join_run(self) -> Part:
        if self.acc is not None:
            self.refuse("the script makes several Accelerators")
        return self

    def begin(self) -> None:
        self.acc = self.accelerator

    def preparing(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for module in (module for model in models for module in model.modules() if not self.task["dropout"]):
            rates = [name for name, value in vars(module).items() if "drop" in name and type(value) is float]
            if isinstance(module, _DropoutNd):
                rates.append("p")
            for name in rates:
                setattr(module, name, 0.0)


def row_checksums(batch: Any) -> Iterator[int]:
    """CRC-32 of each row of each tensor in a batch: they identify its samples."""
    for i, leaf in enumerate(leaves(batch)):
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.numel():
            rows = leaf.detach().cpu().reshape(len(leaf), -1).contiguous().view(torch.uint8)
            yield from (zlib.crc32(row, i) for row in rows.numpy())
