"""Stretches of time: the same as with sets of moments."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from easymp.profiling.events import Interval, common, length, union, without

STRETCHES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])), max_size=8
)


def moments(stretches: list[Interval]) -> set[int]:
    return {t for begin, end in stretches for t in range(begin, end)}


@given(STRETCHES, STRETCHES)
def test_as_sets_of_moments(a: list[Interval], b: list[Interval]) -> None:
    one, two = union(a), union(b)
    assert moments(one) == moments(a)
    assert length(one) == len(moments(a))
    assert moments(common(one, two)) == moments(a) & moments(b)
    assert moments(without(one, two)) == moments(a) - moments(b)
    for result in (one, common(one, two), without(one, two)):
        assert all(begin < end for begin, end in result)
        assert all(x[1] <= y[0] for x, y in pairwise(result))


def test_small_gaps_are_closed() -> None:
    assert union([(0, 5), (7, 9), (20, 21)], gap=2) == [(0, 9), (20, 21)]
