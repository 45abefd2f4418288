"""Chunks of tensors: arithmetic, and streams from files to memory for any boxes in both."""

from __future__ import annotations

import random
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easymp import Accelerator, CheckpointError
from easymp.checkpoint import load
from easymp.checkpoint.load import ReadRequest, plan_reads, read_all
from easymp.checkpoint.manifest import Box, Chunk, StoredTensor, coverage_fault, local_chunks
from easymp.checkpoint.storage import LocalStorage, SourceFile

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, s)) for s in shape)
    return Box(offset, tuple(draw(st.integers(0, s - o)) for o, s in zip(offset, shape)))


@settings(deadline=None)
@given(st.data(), shapes)
def test_fault_by_counting(data, shape):
    drawn = data.draw(st.lists(boxes_of(shape), max_size=6))
    count = torch.zeros(shape, dtype=torch.long)
    for box in drawn:
        count[tuple(slice(o, o + n) for o, n in zip(*box))] += 1
    assert (coverage_fault(shape, drawn) is None) == bool((count == 1).all())


def test_twenty_thousand_pieces():
    """Pair by pair, this would take minutes."""
    rows = [Box((i, 0), (1, 7)) for i in range(20_000)]
    columns = [Box((0, i), (7, 1)) for i in range(20_000)]
    for shape, boxes in (((20_000, 7), rows), ((7, 20_000), columns)):
        random.Random(0).shuffle(boxes)
        assert coverage_fault(shape, boxes) is None
        assert "overlap" in str(coverage_fault(shape, [*boxes, boxes[7]]))
        assert "is in none" in str(coverage_fault(shape, boxes[1:]))


def in_several_places() -> tuple[Any, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor.placement_types import _StridedShard

    with Accelerator(mixed_precision="no", strategy="ddp"):
        mesh = init_device_mesh("cpu", (2,))
        truth = torch.arange(24.0).view(3, 8)
        local_part = truth[:, [[0, 1, 4, 5], [2, 3, 6, 7]][mesh.get_rank()]]
        placed = [_StridedShard(1, split_factor=2)]
        (chunks,) = local_chunks([DTensor.from_local(local_part, mesh, placed, shape=(3, 8), stride=(8, 1))])
        with pytest.raises(CheckpointError, match=r"Partial.*use Shard"):
            local_chunks([DTensor.from_local(torch.ones(2), mesh, [Partial()])])
        return [(box, view.clone()) for box, view in chunks], truth


def test_elements_that_are_no_neighbours_in_the_whole(ranks):
    for parts, truth in ranks(in_several_places):
        assert len(parts) == 2
        for box, view in parts:
            assert torch.equal(view, truth[tuple(slice(o, o + n) for o, n in zip(*box))])


def test_sparse_tensors_are_refused():
    with pytest.raises(CheckpointError, match="to_dense"):
        local_chunks([torch.eye(2).to_sparse()])


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.bool, torch.complex64]


@st.composite
def boxes(draw: Any, shape: tuple[int, ...]) -> list[Box]:
    """All parts of a tensor that is cut at random places of each dimension."""
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    runs = [[(a, b - a) for a, b in pairwise(at)] or [(0, 0)] for at in cuts]
    return [Box(tuple(o for o, _ in choice), tuple(n for _, n in choice)) for choice in product(*runs)]


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(*box))]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_element_arrives(tmp_path: Path, data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    dtype, room = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([8, 64, 2**20]))
    converted, has_checksums = data.draw(st.booleans()), data.draw(st.booleans())
    truth = (torch.arange(prod(shape)) % 100).view(shape).to(dtype)
    contents = [b"x" * 5 for _ in range(data.draw(st.integers(1, 3)))]
    chunks = []
    for i, box in enumerate(data.draw(boxes(shape))):
        values, number = part(truth, box).contiguous(), i % len(contents)
        chunks.append(Chunk(box, str(number), len(contents[number])))
        if values.numel():
            contents[number] += bytes(values.reshape(-1).view(torch.uint8).tolist())
    files = {}
    for i, content in enumerate(contents):
        (tmp_path / str(i)).write_bytes(content)
        checksums = (crc32(content),) if has_checksums else None
        files[str(i)] = SourceFile(LocalStorage(tmp_path), str(i), len(content), checksums)
    into = torch.float64 if converted and dtype.is_floating_point else dtype
    # With gaps between the rows, in another order.
    live = torch.zeros(tuple(n + 1 for n in reversed(shape)), dtype=into)
    live = live.permute(tuple(reversed(range(len(shape)))))
    inner = tuple(slice(0, n) for n in shape)
    target = live[inner] if converted else torch.zeros(shape, dtype=into)
    stored = StoredTensor(dtype, shape, tuple(chunks))
    wants = [ReadRequest(stored, box, part(target, box)) for box in data.draw(boxes(shape))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "STAGE", room)
        read_all(files, plan_reads(wants))
    assert torch.equal(target, truth.to(into))
    if shape:
        live[inner] = 0
        assert not live.any()
