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
from .pool import Failure, Outcome, RanksFailed, explain, in_order_of_blame


def summed(start: int) -> tuple[int, float]:
    dist.init_process_group("gloo")
    value = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(value)
    dist.destroy_process_group()
    return int(os.environ["RANK"]), value.item()


def whoami() -> tuple[int, dict[str, str | None], int]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "EXTRA")
    return os.getpid(), {name: os.environ.get(name) for name in names}, torch.get_num_threads()


def draw() -> list[float]:
    import random

    import numpy

    return [torch.rand(1).item(), random.random(), float(numpy.random.rand())]


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


def change_everything() -> None:
    os.environ["STRAY"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)


def what_changed() -> tuple[str | None, str, torch.dtype, int]:
    return os.environ.get("STRAY"), os.getcwd(), torch.get_default_dtype(), torch.get_num_threads()


def unpicklable() -> object:
    return lambda: None


def test_values_come_back_in_rank_order(ranks):
    assert ranks(summed, 10) == [(0, 21.0), (1, 21.0)]
    assert ranks(summed, 10, processes=3) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_workers_live_on_and_know_who_they_are(ranks):
    first, second = ranks(whoami, env={"EXTRA": "x"}), ranks(whoami)
    assert [pid for pid, _, _ in first] == [pid for pid, _, _ in second]
    assert [env["RANK"] for _, env, _ in first] == ["0", "1"]
    assert all(env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2" for _, env, _ in first)
    assert all(env["MASTER_ADDR"] == "127.0.0.1" and env["EXTRA"] == "x" for _, env, _ in first)
    assert all(env["EXTRA"] is None and threads == 1 for _, env, threads in second)


def test_variables_can_be_taken_away(ranks):
    assert ranks(whoami, env={"LOCAL_RANK": None})[1][1]["LOCAL_RANK"] is None


def test_each_call_starts_from_the_same_random_state(ranks):
    assert ranks(draw) == ranks(draw)


def test_what_a_call_changed_is_put_back(ranks):
    ranks(change_everything)
    for stray, directory, dtype, threads in ranks(what_changed):
        assert (stray, directory, dtype, threads) == (None, os.getcwd(), torch.float32, 1)


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


def test_expected_failures_come_back_a_rank(ranks, tmp_path):
    assert ranks.fails(fail_on_one, tmp_path / "begun") == [
        ("ValueError", "a consequence\nof two lines"),
        ("ZeroDivisionError", "only rank 1"),
    ]
    with pytest.raises(RanksFailed, match="no rank failed"):
        ranks.fails(whoami)


def test_a_rank_that_hangs_is_named_with_its_place(ranks):
    with pytest.raises(RanksFailed) as caught:
        ranks(stuck_on_zero, timeout=1)
    assert "rank 0 of 2 failed first: Timeout" in str(caught.value)
    assert "in stuck_on_zero" in str(caught.value)
    assert ranks.fails(stuck_on_zero, timeout=1.5) == [("Timeout", "still running, 1.5 s allowed"), "fine"]


def test_a_dead_rank_is_reported_as_such(ranks):
    assert ranks.fails(die_on_one, "signal") == ["fine", ("SIGKILL", "killed by signal 9")]
    assert ranks.fails(die_on_one, "exit") == ["fine", ("exit", "exit code 7")]


def test_the_others_stay_the_ranks_that_they_were_when_one_is_gone(ranks):
    before = [pid for pid, *_ in ranks(whoami, processes=3)]
    ranks.fails(die_on_one, "exit", processes=3)
    after = [pid for pid, *_ in ranks(whoami, processes=3)]
    assert [one == other for one, other in zip(before, after)] == [True, False, True]


def test_leaks_in_a_worker_fail_the_call(ranks):
    with pytest.raises(RanksFailed, match="left a process group running"):
        ranks(leave_group)
    with pytest.raises(RanksFailed, match="left threads running: easymp-stray"):
        ranks(leave_thread, processes=1)


def test_a_result_that_cannot_travel_says_so(ranks):
    with pytest.raises(RanksFailed, match="cannot be pickled"):
        ranks(unpicklable, processes=1)


def test_a_local_function_is_refused(ranks):
    with pytest.raises(TypeError, match="top level"):
        ranks(lambda: None)


def test_blame_goes_to_the_killed_one_then_by_time():
    late = Outcome(0, failure=Failure("RuntimeError", "Connection closed by peer"), time=1.0)
    killed = Outcome(1, failure=Failure("SIGKILL", "killed by signal 9"), time=2.0)
    hung = Outcome(2, failure=Failure("Timeout", "still running"), time=0.0)
    assert [o.rank for o in in_order_of_blame([late, killed, hung, Outcome(3)])] == [1, 0, 2]
    assert explain([late, killed]).startswith("rank 1 of 2 failed first: SIGKILL")
