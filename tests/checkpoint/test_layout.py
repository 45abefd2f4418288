"""Chunks of tensors as arithmetic, and where the elements of a rank lie in the whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from easymp import Accelerator, CheckpointError
from easymp.checkpoint.manifest import Box, fault, places_of, runs_held, whole


def place_of(tensor: Any) -> Any:
    return places_of([tensor])[0]


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, s)) for s in shape)
    return Box(offset, tuple(draw(st.integers(0, s - o)) for o, s in zip(offset, shape)))


def counted(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    count = torch.zeros(shape, dtype=torch.long)
    for box in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(*box))] += 1
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
def test_tilings_have_no_fault_and_any_change_is_one(data, shape, rng):
    tiles = data.draw(tilings(whole(shape)))
    rng.shuffle(tiles)
    assert fault(shape, tiles) is None
    lost, *rest = tiles
    assert "leave holes" in str(fault(shape, rest))
    assert "overlap" in str(fault(shape, [*tiles, lost]))


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


def test_fsdp_over_tensor_parallel_cuts_the_parts_of_tensor_parallel() -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    for rows in (1, 5, 9, 33):
        for data, tensor in ((2, 2), (4, 2), (2, 4), (3, 3)):
            for d in range(data):
                for t in range(tensor):
                    parts = [*torch.arange(rows).chunk(tensor), *[torch.arange(0)] * tensor][t]
                    piece = [*parts.chunk(data), *[torch.arange(0)] * data][d].tolist()
                    (runs,) = runs_held(
                        (rows,), (data, tensor), (d, t), [_StridedShard(0, split_factor=tensor), Shard(0)]
                    )
                    assert [i for first, n in runs for i in range(first, first + n)] == piece


def in_several_places() -> tuple[Any, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor.placement_types import _StridedShard

    with Accelerator(mixed_precision="no", strategy="ddp"):
        mesh = init_device_mesh("cpu", (2,))
        truth = torch.arange(24.0).view(3, 8)
        mine = [[0, 1, 4, 5], [2, 3, 6, 7]][mesh.get_rank()]
        spread: Any = DTensor.from_local(
            truth[:, mine], mesh, [_StridedShard(1, split_factor=2)], shape=(3, 8), stride=(8, 1)
        )
        place = place_of(spread)
        assert place is not None
        with pytest.raises(CheckpointError, match=r"Partial.*use Shard"):
            place_of(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
        return [(box, view.clone()) for box, view in place.parts], truth


def test_elements_that_are_no_neighbours_in_the_whole(ranks) -> None:
    found = ranks(in_several_places)
    assert [len(parts) for parts, _ in found] == [2, 2]
    for parts, truth in found:
        for box, view in parts:
            assert torch.equal(view, truth[tuple(slice(o, o + n) for o, n in zip(*box))])


def test_plain_tensors() -> None:
    weight = nn.Linear(3, 2).weight
    place = place_of(weight)
    assert place is not None
    ((box, view),) = place.parts
    assert (place.shape, box) == ((2, 3), whole((2, 3)))
    assert view.data_ptr() == weight.data_ptr() and not view.requires_grad
    scalar = place_of(torch.tensor(3.0))
    assert scalar is not None and [box for box, _ in scalar.parts] == [Box((), ())]
    empty = place_of(torch.empty(0, 4))
    assert empty is not None and [box for box, _ in empty.parts] == [Box((0, 0), (0, 4))]
    assert place_of(torch.empty(2, device="meta")) is None
    with pytest.raises(CheckpointError, match="to_dense"):
        place_of(torch.eye(2).to_sparse())
