"""The way to the device. Without a GPU: the order of events, on streams that only write down what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from easymp.data import source
from easymp.data.source import Note

from .loaders import prepared

CUDA = torch.device("cuda", 0)


def feed(n: int, log: list[str]) -> Iterator[tuple[Any, Note]]:
    for k in range(n):
        log.append(f"load {k}")
        yield {"x": torch.full((2,), k)}, Note(0, k, 0, 2, k == n - 1)


class Side:
    def __init__(self, log: list[str]) -> None:
        self.log, self.copies = log, -1

    def record_event(self) -> int:
        self.copies += 1
        self.log.append(f"copy {self.copies}")
        return self.copies


class Compute:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wait_event(self, event: int) -> None:
        self.log.append(f"wait {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams are asked for, of a device that is the CPU."""
    calls: list[str] = []

    @contextmanager
    def on(stream: Side) -> Iterator[None]:
        assert isinstance(stream, Side)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Side(calls))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Compute(calls))
    monkeypatch.setattr(source, "_pin", lambda leaf: leaf)
    return calls


def test_the_next_two_copies_are_queued_before_a_batch_is_handed_out(log: list[str]) -> None:
    assert list(source._copied_ahead(feed(0, log), torch.device("cpu"))) == log == []
    for batch, note in source._copied_ahead(feed(3, log), torch.device("cpu")):
        assert batch["x"][0] == note.end
        log.append(f"step {note.end}{' last' if note.last else ''}")
    loads = "load 0, copy 0, load 1, copy 1, load 2, copy 2"
    assert ", ".join(log) == f"{loads}, wait 0, step 0, wait 1, step 1, wait 2, step 2 last"


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_whole_on_the_gpu(workers: int) -> None:
    data = TensorDataset(torch.arange(4000.0).reshape(40, 100))
    loader = prepared(DataLoader(data, 4, num_workers=workers), device=CUDA)
    total = torch.zeros((), device=CUDA)
    for (x,) in loader:
        assert x.is_cuda and loader.local_size == 4
        torch.cuda._sleep(100_000)  # the compute stream lags behind: memory reused too early would show
        total += x.sum()
    assert total.item() == sum(range(4000))
