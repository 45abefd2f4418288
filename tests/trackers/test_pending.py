"""Rows on their way from a device: nothing waits, order stays, and later changes do not reach them.

Where there is no GPU, a device that answers late is played by the CPU.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from easymp import Accelerator
from easymp.trackers import rows as pending
from easymp.trackers.rows import Pending, Row


class Stream:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Late:
    """A device whose transfers arrive when `done` says so."""

    def __init__(self) -> None:
        self.done, self.waits, self.transfers, self.stream = False, 0, 0, Stream()

    def event(self) -> Any:
        def wait() -> None:
            self.waits += 1

        self.transfers += 1
        return SimpleNamespace(record=lambda stream: None, query=lambda: self.done, synchronize=wait)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    device = Late()
    module = SimpleNamespace(
        current_stream=lambda d: device.stream, device=lambda d: contextlib.nullcontext(), Event=device.event
    )
    empty = torch.empty
    monkeypatch.setattr(pending, "HOST", "elsewhere")
    monkeypatch.setattr(pending, "EVENTS", ("cpu",))
    monkeypatch.setattr(pending.torch, "get_device_module", lambda d: module)
    monkeypatch.setattr(
        pending.torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options)
    )
    return device


def row(step: int, **values: Any) -> Row:
    return Row(step, 0.0, values)


def test_rows_arrive_in_order_when_their_numbers_do(late: Late) -> None:
    rows, loss = Pending(), torch.tensor(1.0)
    rows.add(row(1, loss=loss, count=torch.tensor(2**60), flag=torch.tensor(True), word="x"))
    loss.add_(1)
    rows.add(row(2, loss=loss, half=torch.tensor(0.5, dtype=torch.bfloat16)))
    rows.add(row(3, plain=3))
    rows.send()
    rows.add(row(4, loss=loss))
    assert rows.arrived() == [] and rows and len(rows) == 1
    late.done = True
    found = rows.arrived()
    assert [r.values for r in found] == [
        {"loss": 1.0, "count": 2**60, "flag": True, "word": "x"},
        {"loss": 2.0, "half": 0.5},
        {"plain": 3},
    ]
    assert late.transfers == 4 and late.waits == 0  # one a dtype, whatever the number of rows
    rows.send()
    late.done = False
    assert [r.step for r in rows.arrived(wait=True)] == [4] and late.waits == 1
    assert not rows


def test_what_was_logged_on_another_stream_is_waited_for_on_the_device(late: Late) -> None:
    rows, other, late.done = Pending(), late.stream, True
    rows.add(row(1, loss=torch.tensor(1.0)))
    late.stream = Stream()
    rows.add(row(2, loss=torch.tensor(2.0)))
    rows.send()
    assert late.stream.waited_for == [other] and [r.values["loss"] for r in rows.arrived()] == [1.0, 2.0]


@pytest.mark.gpu
def test_log_does_not_wait_for_the_device(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    class Keeping:
        name = "keeping"
        start = finish = staticmethod(lambda *_: None)
        log = staticmethod(lambda values, step: kept.append((step, values["x"], values["y"])))

    monkeypatch.setattr("easymp.trackers.logbook.EVERY", 0.0)
    with Accelerator(log_with=Keeping(), project_dir=tmp_path) as acc:
        x, y = torch.zeros((), device=acc.device), torch.zeros((), device=acc.device, dtype=torch.bfloat16)
        acc.log({"x": x, "y": y}, step=0)
        acc._logbook.settle()  # the first pinned memory of a process is the driver's to give, which may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(1, 200):
                x += 1
                y += 1
                acc.log({"x": x, "y": y}, step=step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert kept == [(step, step, step) for step in range(200)]
