"""The step window: windows, early ends, nested loaders."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from easymp.base.accumulation import UpdateWindow


@dataclass
class Loader:
    last: bool = False


def ends(window: UpdateWindow, n: int) -> list[bool]:
    return [window.tick() for _ in range(n)]


def test_every_nth_micro_step_ends_a_window() -> None:
    assert ends(UpdateWindow(3), 7) == [False, False, True, False, False, True, False]
    assert ends(UpdateWindow(1), 3) == [True] * 3


def test_a_tick_begins_with_no_backward() -> None:
    window = UpdateWindow(2)
    window.tick()
    window.backwards = 3
    window.tick()
    assert window.backwards == 0


@given(accumulation=st.integers(1, 5), lengths=st.lists(st.integers(1, 8), max_size=4), early=st.booleans())
def test_the_last_batch_ends_the_window_and_restarts_the_count(
    accumulation: int, lengths: list[int], early: bool
) -> None:
    window, seen, expected = UpdateWindow(accumulation, end_with_loader=early), [], []
    open_ = 0
    for n in lengths:
        loader = Loader()
        window.enter(loader)
        for i in range(n):
            loader.last = i == n - 1
            seen.append(window.tick())
            assert window.sync == seen[-1]
            open_ += 1
            assert window.micro == open_
            expected.append(open_ == accumulation or (early and loader.last))
            if expected[-1]:
                open_ = 0
        window.leave(loader)
    assert seen == expected


def test_the_innermost_loop_counts() -> None:
    window, train, evaluation = UpdateWindow(4), Loader(last=True), Loader()
    window.enter(train)
    window.enter(evaluation)
    assert window.reading is evaluation
    assert window.tick() is False
    window.leave(evaluation)
    assert window.reading is train
    assert window.tick() is True


def test_loops_may_end_in_any_order() -> None:
    """A generator that is left early is closed when it is collected."""
    window, a, b, twin = UpdateWindow(), Loader(), Loader(), Loader()
    for loader in (a, b, a):
        window.enter(loader)
    window.leave(a)
    assert window.reading is b
    window.leave(twin)  # equal to the others, but never entered
    assert window.reading is b
    window.leave(b)
    assert window.reading is a
    window.leave(a)
    window.leave(a)
    assert window.reading is None
