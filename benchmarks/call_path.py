"""How much of a wrapper's own code a `prepare(model, optimizer, loader)`, a `backward(loss)` and a micro-step run.

    python benchmarks/call_path.py           # one table; --keep writes it to benchmarks/results

On one process, counted by the interpreter's own tracing: files, functions, distinct lines, and the deepest pile of the
wrapper's own frames (torch's between them do not count). Each wrapper prepares and trains before it is counted, so that
imports at first use are not. A micro-step is one round of ``for x, y in loader:`` with forward, backward, step and
zero_grad, of those in the middle of a pass: functions and lines that run in any of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import report
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Footprint:
    """Inside ``with``: every line of the files under `package` that runs."""

    def __init__(self, package: str) -> None:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        self._home = str(Path(spec.origin).parent)
        self.functions: set[tuple[str, str, int]] = set()
        self.lines: set[tuple[str, int]] = set()
        self.depth = 0

    def __enter__(self) -> Footprint:
        self._before = sys.gettrace()
        threading.settrace(None)  # type: ignore[arg-type]
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _own(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._home) and frame.f_code.co_name != "<module>"

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._own(frame):
            return None
        code = frame.f_code
        self.functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))
        depth, at = 0, frame
        while at is not None:
            depth += self._own(at)
            at = at.f_back  # type: ignore[assignment]
        self.depth = max(self.depth, depth)
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def counts(self) -> list[int]:
        return [
            len({name for name, _, _ in self.functions}),
            len(self.functions),
            len(self.lines),
            self.depth,
        ]


def objects() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(256, 4), torch.randn(256, 2))
    return model, torch.optim.AdamW(model.parameters()), DataLoader(data, 4, shuffle=True)


Prepare = Callable[[nn.Module, torch.optim.Optimizer, DataLoader[Any]], tuple[Any, ...]]


def easymp() -> tuple[Prepare, Callable[[Tensor], None]]:
    from easymp import Accelerator

    accelerator = Accelerator(mixed_precision="no", cpu=True)
    return accelerator.prepare, accelerator.backward


def accelerate() -> tuple[Prepare, Callable[[Tensor], None]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return accelerator.prepare, accelerator.backward


def fabric() -> tuple[Prepare, Callable[[Tensor], None]]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> tuple[Any, ...]:
        return *fabric.setup(model, optimizer), fabric.setup_dataloaders(loader)

    return prepare, fabric.backward


WRAPPERS = {
    "easymp": ("easymp", easymp),
    "Fabric": ("lightning_fabric", fabric),
    "Accelerate": ("accelerate", accelerate),
}


def count(package: str, wrapper: Callable[[], tuple[Prepare, Callable[[Tensor], None]]]) -> list[list[int]]:
    """[files, functions, lines, depth] of prepare, of backward, of both, and of micro-steps."""
    prepare, backward = wrapper()
    model, optimizer, loader = prepare(*objects())

    def step(x: Tensor, y: Tensor) -> None:
        backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    for x, y in loader:
        step(x, y)
    batches, middle = iter(loader), len(loader) - 2
    step(*next(batches))  # a pass begins, which is no part of a micro-step
    with Footprint(package) as third:
        for _ in range(middle):
            step(*next(batches))
    parts = objects()
    with Footprint(package) as first:
        model, *_ = prepare(*parts)
    loss = model(torch.randn(4, 4)).sum()
    with Footprint(package) as second:
        backward(loss)
    both = Footprint(package)
    both.functions, both.lines = first.functions | second.functions, first.lines | second.lines
    both.depth = max(first.depth, second.depth)
    return [first.counts(), second.counts(), both.counts(), third.counts()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    report.options(parser, "call-path")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    rows = []
    for name, (package, wrapper) in WRAPPERS.items():
        for what, counts in zip(("prepare", "backward", "both", "micro-step"), count(package, wrapper)):
            rows.append([f"{name}, {what}", *map(str, counts)])
    text = "\n".join(
        [
            "# The path of one prepare, one backward and one micro-step",
            "",
            "The wrapper's own code, one process, fp32, CPU; counted by the interpreter's tracing, imports left out.",
            "",
            report.table(["", "files", "functions", "lines", "deep"], rows),
            "",
            report.here("accelerate", "lightning-fabric"),
        ]
    )
    report.hand_in(text, asked.out)


if __name__ == "__main__":
    main()
