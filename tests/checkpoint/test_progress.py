"""Long saves and loads say how far they are, short ones nothing; by a clock that the tests turn."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

from easymp import Accelerator
from easymp.checkpoint import storage
from easymp.checkpoint.storage import Progress, expect

MIB = 2**20


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(seconds: float, step: float, terminal: bool, **options: bool) -> str:
    """64 MiB in even steps over so many seconds; what was written."""
    clock, stream = Clock(), Stream(terminal)
    with Progress("saving x", "saved x", stream=stream, clock=clock, **options) as tick:
        steps = round(seconds / step)
        expect(tick, 64 * MIB // steps * steps)
        for _ in range(steps):
            clock.now += step
            tick(64 * MIB // steps)
    return stream.getvalue()


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    text = run(4, 0.125, terminal=True)
    assert text.count("\n") == 1 and text.endswith("\r" + "saved x: 64.0 MiB in 4.0 s, 16.0 MiB/s\n")
    states = [state for state in text.split("\r")[1:-1] if state.strip()]
    assert states[0].rstrip() == "saving x: 32.0 MiB of 64.0 MiB (50%), 16.0 MiB/s"
    assert 5 < len(states) < 12
    before_the_end = text.split("\r")[-2]
    assert before_the_end.isspace() and len(before_the_end) == len(states[-1].rstrip())  # nothing of it stays


def test_a_file_has_a_line_every_ten_seconds() -> None:
    lines = run(32, 0.5, terminal=False).splitlines()
    assert lines == [
        "saving x: 20.0 MiB of 64.0 MiB (31%), 2.0 MiB/s",
        "saving x: 40.0 MiB of 64.0 MiB (62%), 2.0 MiB/s",
        "saving x: 60.0 MiB of 64.0 MiB (94%), 2.0 MiB/s",
        "saved x: 64.0 MiB in 32.0 s, 2.0 MiB/s",
    ]
    assert run(4, 0.5, terminal=False).splitlines() == ["saved x: 64.0 MiB in 4.0 s, 16.0 MiB/s"]


def told(folder: str, asynchronous: bool) -> list[str]:
    """What a rank says of a save and a load when both are long."""
    storage.SILENT = 0.0
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            acc = Accelerator(strategy="fsdp")
            model = acc.prepare(torch.nn.Linear(100, 100))
            acc.save_state(folder, async_=asynchronous)
            acc._settle_saves()
            acc.load_state(folder)
            acc.close()
        del model
    finally:
        storage.SILENT = 2.0
    return [line for line in said.getvalue().splitlines() if line.startswith(("sav", "load"))]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_accelerator_speaks_on_its_main_process(tmp_path: Path, ranks: Any, asynchronous: bool) -> None:
    first, second = ranks(told, str(tmp_path / "x"), asynchronous)
    place = re.escape(str(tmp_path / "x"))
    expected = [rf"{done} {place} \(rank 0 of 2\): [\d.]+ KiB in" for done in ("saved", "loaded")]
    for line, pattern in zip(first, expected[asynchronous:], strict=True):
        assert re.match(pattern, line)
    assert second == []
