"""The pool that every test of several ranks stands on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from . import pool
from .pool import RanksFailed


def summed(start: int) -> tuple[int, float]:
    dist.init_process_group("gloo")
    value = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(value)
    dist.destroy_process_group()
    return int(os.environ["RANK"]), value.item()


def fail_on_one(begun: Path) -> None:
    """On rank 1, and then on rank 0."""
    if os.environ["RANK"] == "1":
        begun.touch()
        raise ZeroDivisionError("only rank 1")
    while not begun.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    raise ValueError("a consequence\nof two lines")


def stuck_on_zero() -> str:
    if os.environ["RANK"] == "0":
        time.sleep(1000)
    print("said before the end")
    return "fine"


def die_on_one(how: str) -> str:
    if os.environ["RANK"] == "1":
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    return "fine"


def leave_group() -> None:
    dist.init_process_group("gloo")


def leave_thread() -> None:
    pool.PATIENCE = 0.2  # this process ends with the test
    threading.Thread(target=time.sleep, args=(100,), name="easymp-stray", daemon=True).start()


def test_values_come_back_in_rank_order(ranks):
    assert ranks(summed, 10) == [(0, 21.0), (1, 21.0)]
    assert ranks(summed, 10, processes=3) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_first_failure_by_time_is_shown_with_its_own_traceback(ranks, tmp_path):
    with pytest.raises(RanksFailed) as caught:
        ranks(fail_on_one, tmp_path / "begun")
    text = str(caught.value)
    assert text.startswith(
        "rank 1 of 2 failed first: ZeroDivisionError: only rank 1\n  rank 0: ValueError: a consequence\n"
    )
    assert "in fail_on_one" in text
    assert "tests/pool.py" not in text
    assert ranks(summed, 0) == [(0, 1.0), (1, 1.0)]  # and the pool goes on


def test_a_rank_that_hangs_is_named_with_its_place(ranks):
    with pytest.raises(RanksFailed) as caught:
        ranks(stuck_on_zero, timeout=1)
    assert "rank 0 of 2 failed first: Timeout" in str(caught.value)
    assert "in stuck_on_zero" in str(caught.value)
    assert ranks.fails(stuck_on_zero, timeout=1.5) == [("Timeout", "still running, 1.5 s allowed"), "fine"]


def test_a_dead_rank_is_reported_as_such(ranks):
    assert ranks.fails(die_on_one, "signal") == ["fine", ("SIGKILL", "killed by signal 9")]
    assert ranks.fails(die_on_one, "exit") == ["fine", ("exit", "exit code 7")]


def test_leaks_in_a_worker_fail_the_call(ranks):
    with pytest.raises(RanksFailed, match="left a process group running"):
        ranks(leave_group)
    with pytest.raises(RanksFailed, match="left threads running: easymp-stray"):
        ranks(leave_thread, processes=1)
