"""Blocks of work on a few threads: results, errors, and nothing left running."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from easymp.checkpoint import blocks as module
from easymp.checkpoint.blocks import WORKERS, spread


@pytest.mark.parametrize("count", [0, 1, WORKERS, 50])
def test_each_item_has_its_result(count: int) -> None:
    assert sorted(spread(lambda x: x * x, range(count), "test")) == [x * x for x in range(count)]


def test_items_are_taken_on_this_thread_and_a_few_ahead() -> None:
    taken = []

    def items() -> Iterator[int]:
        for i in range(100):
            taken.append(threading.current_thread())
            yield i

    results = spread(lambda x: x, items(), "test")
    next(results)
    assert len(taken) == WORKERS + 1
    results.close()
    assert set(taken) == {threading.current_thread()}


def test_the_first_error_is_raised_and_nothing_runs_on() -> None:
    def fail(x: int) -> int:
        if x == 5:
            raise KeyboardInterrupt("five")
        return x

    with pytest.raises(KeyboardInterrupt, match="five"):
        list(spread(fail, range(50), "test"))
    assert not [t for t in threading.enumerate() if t.name == "easymp-test"]


def test_an_error_of_the_items_is_raised() -> None:
    def items() -> Iterator[int]:
        yield from range(10)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(spread(lambda x: x, items(), "test"))


@pytest.mark.parametrize("start", [0, 1])
def test_without_more_threads_the_work_is_done_by_those_there_are(
    monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    started = []

    class Few(threading.Thread):
        def start(self) -> None:
            if len(started) == start:
                raise RuntimeError("can't start new thread")
            started.append(self)
            super().start()

    monkeypatch.setattr(module, "Thread", Few)
    assert sorted(spread(lambda x: x + 1, range(10), "test")) == list(range(1, 11))
