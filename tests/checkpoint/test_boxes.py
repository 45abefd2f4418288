"""Arithmetic of boxes, against torch's own indexing and against counting every element."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easymp.checkpoint import layout
from easymp.checkpoint.layout import SPLIT, Box, fault, overlap, runs, slices, whole

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, s)) for s in shape)
    return Box(offset, tuple(draw(st.integers(0, s - o)) for o, s in zip(offset, shape)))


def elements(shape: tuple[int, ...]) -> torch.Tensor:
    return (
        torch.arange(max(torch.Size(shape).numel(), 1)).reshape(shape)
        if 0 not in shape
        else torch.empty(shape, dtype=torch.long)
    )


def held(tensor: torch.Tensor, box: Box, origin: tuple[int, ...] | None = None) -> torch.Tensor:
    origin = origin or (0,) * len(box.shape)
    return tensor[tuple(slice(o - w, o - w + n) for o, n, w in zip(box.offset, box.shape, origin))]


@settings(deadline=None)
@given(st.data(), shapes)
def test_overlap_is_what_both_have(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    tensor, common = elements(shape), overlap(a, b)
    both = set(held(tensor, a).flatten().tolist()) & set(held(tensor, b).flatten().tolist())
    assert both == (set(held(tensor, common).flatten().tolist()) if common else set())
    assert overlap(b, a) == common


@settings(deadline=None)
@given(st.data(), shapes)
def test_runs_are_what_indexing_reads(data: st.DataObject, shape: tuple[int, ...]) -> None:
    within = data.draw(boxes_of(shape))
    inner = data.draw(boxes_of(within.shape))
    part = Box(tuple(o + w for o, w in zip(inner.offset, within.offset)), inner.shape)
    memory = held(elements(shape), within).contiguous()
    found = list(runs(part, within))
    read = [value for start, count in found for value in memory.flatten()[start : start + count].tolist()]
    assert read == held(memory, part, within.offset).flatten().tolist()
    assert all(count and start + count <= memory.numel() for start, count in found)
    if part == within and part.count:
        assert found == [(0, part.count)]


def counted(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    count = torch.zeros(shape, dtype=torch.long)
    for box in boxes:
        held(count, box).add_(1)
    return bool((count == 1).all())


@settings(deadline=None)
@given(st.data(), shapes)
def test_fault_by_counting(data: st.DataObject, shape: tuple[int, ...]) -> None:
    some = data.draw(st.lists(boxes_of(shape), max_size=6))
    assert (fault(shape, some) is None) == counted(shape, some)


@st.composite
def tilings(draw: st.DrawFn, box: Box, cuts: int = 6) -> list[Box]:
    """Cut in two at a random place of a random dimension, again and again."""
    long = [d for d, n in enumerate(box.shape) if n > 1]
    if not cuts or not long or draw(st.booleans()):
        return [box]
    d = draw(st.sampled_from(long))
    at = draw(st.integers(1, box.shape[d] - 1))
    first = Box(box.offset, (*box.shape[:d], at, *box.shape[d + 1 :]))
    second = Box(
        (*box.offset[:d], box.offset[d] + at, *box.offset[d + 1 :]),
        (*box.shape[:d], box.shape[d] - at, *box.shape[d + 1 :]),
    )
    return [*draw(tilings(first, cuts - 1)), *draw(tilings(second, cuts - 1))]


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 9), max_size=4).map(tuple), st.randoms())
def test_tilings_have_no_fault_and_any_change_is_one(
    data: st.DataObject, shape: tuple[int, ...], rng: random.Random
) -> None:
    tiles = data.draw(tilings(whole(shape)))
    rng.shuffle(tiles)
    assert fault(shape, tiles) is None
    lost, *rest = tiles
    assert "leave holes" in str(fault(shape, rest))
    assert "overlap" in str(fault(shape, [*tiles, lost]))


WORDS = {
    "outside": ((4,), [Box((0,), (5,))], r"\[0:5\] lies outside of \[4\]"),
    "before": ((4,), [Box((-1,), (5,))], r"\[-1:4\] lies outside"),
    "negative": ((4,), [Box((4,), (-4,))], "lies outside"),
    "flat": ((4, 4), [Box((0,), (4,))], "has 1 dimensions, and the tensor 2"),
    "overlap": ((4,), [Box((0,), (3,)), Box((2,), (2,))], r"\[0:3\] and \[2:4\] overlap"),
    "hole": ((4, 4), [Box((0, 0), (4, 3))], r"the element \[0, 3\] is in none"),
    "equal volume": ((4,), [Box((0,), (2,)), Box((1,), (2,))], r"\[0:2\] and \[1:3\] overlap"),
    "scalar twice": ((), [whole(()), whole(())], r"\[\] and \[\] overlap"),
    "scalar never": ((), [], "is in none"),
    "twice": ((2,), [whole((2,))] * 2, "overlap"),
    "cut in all": ((2,) * 6, [Box((0,) * 6, (1,) * 6)], f"cut along 6 dimensions, and at most {SPLIT}"),
}


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str) -> None:
    shape, boxes, words = WORDS[name]
    assert re.search(words, str(fault(shape, boxes)))


def test_more_corners_than_memory_has_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CORNERS", 15)
    quarters = [Box(at, (1, 1)) for at in itertools.product(range(2), repeat=2)]
    assert (
        fault((2, 2), quarters)
        == "the tensor is cut into 4 boxes along 2 dimensions, and at most 3 are understood"
    )
    assert fault((2, 2), [Box((0, 0), (1, 2)), Box((1, 0), (1, 2))]) is None


def test_nothing_is_covered_by_nothing() -> None:
    assert fault((0, 3), []) is None
    assert fault((0, 3), [whole((0, 3))]) is None
    assert fault((3,), [Box((3,), (0,)), whole((3,))]) is None


@pytest.mark.parametrize("dimension", [0, 1], ids=["rows", "columns"])
def test_twenty_thousand_pieces(dimension: int) -> None:
    """Pair by pair, this would take minutes."""
    shape = [7, 7]
    shape[dimension] = 20_000
    boxes = [Box((i, 0), (1, 7)) if dimension == 0 else Box((0, i), (7, 1)) for i in range(20_000)]
    random.Random(0).shuffle(boxes)
    assert fault(tuple(shape), boxes) is None
    assert "overlap" in str(fault(tuple(shape), [*boxes, boxes[7]]))
    assert "is in none" in str(fault(tuple(shape), boxes[1:]))


def test_a_pinwheel_and_a_grid_of_cubes() -> None:
    pinwheel = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    assert fault((3, 3), pinwheel) is None
    assert fault((3, 3), pinwheel[:-1]) is not None
    cubes = [Box((a, b, c), (1, 1, 1)) for a, b, c in itertools.product(range(12), repeat=3)]
    assert fault((12, 12, 12), cubes) is None


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4, 5), (1, 1, 6), (2, 0, 3)])
@pytest.mark.parametrize("most", [1, 3, 5, 1000])
def test_slices_follow_one_another(shape: tuple[int, ...], most: int) -> None:
    box = whole(shape)
    found = list(slices(box, most))
    places = [first + i for part in found for first, count in runs(part, box) for i in range(count)]
    assert places == list(range(box.count))
    assert all(part.count <= most for part in found)
    assert found != [] and all(isinstance(part, Box) for part in found)
