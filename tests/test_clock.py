"""The step clock: windows, early ends, nested loaders."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from easymp.base.accumulation import StepClock


@dataclass
class Loader:
    last: bool = False


def ends(clock: StepClock, n: int) -> list[bool]:
    return [clock.tick() for _ in range(n)]


def test_every_nth_micro_step_ends_a_window() -> None:
    assert ends(StepClock(3), 7) == [False, False, True, False, False, True, False]
    assert ends(StepClock(1), 3) == [True] * 3


def test_a_tick_begins_with_no_backward() -> None:
    clock = StepClock(2)
    clock.tick()
    clock.backwards = 3
    clock.tick()
    assert clock.backwards == 0


@given(accumulation=st.integers(1, 5), lengths=st.lists(st.integers(1, 8), max_size=4), early=st.booleans())
def test_the_last_batch_ends_the_window_and_restarts_the_count(
    accumulation: int, lengths: list[int], early: bool
) -> None:
    clock, seen, expected = StepClock(accumulation, end_with_loader=early), [], []
    open_ = 0
    for n in lengths:
        loader = Loader()
        clock.enter(loader)
        for i in range(n):
            loader.last = i == n - 1
            seen.append(clock.tick())
            assert clock.sync == seen[-1]
            open_ += 1
            assert clock.micro == open_
            expected.append(open_ == accumulation or (early and loader.last))
            if expected[-1]:
                open_ = 0
        clock.leave(loader)
    assert seen == expected


def test_the_innermost_loop_counts() -> None:
    clock, train, evaluation = StepClock(4), Loader(last=True), Loader()
    clock.enter(train)
    clock.enter(evaluation)
    assert clock.reading is evaluation
    assert clock.tick() is False
    clock.leave(evaluation)
    assert clock.reading is train
    assert clock.tick() is True


def test_loops_may_end_in_any_order() -> None:
    """A generator that is left early is closed when it is collected."""
    clock, a, b, twin = StepClock(), Loader(), Loader(), Loader()
    for loader in (a, b, a):
        clock.enter(loader)
    clock.leave(a)
    assert clock.reading is b
    clock.leave(twin)  # equal to the others, but never entered
    assert clock.reading is b
    clock.leave(b)
    assert clock.reading is a
    clock.leave(a)
    clock.leave(a)
    assert clock.reading is None
