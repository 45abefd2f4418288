"""Streaming: every element arrives, for any boxes in files and memory, and nothing else is written."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easymp.checkpoint import load
from easymp.checkpoint.load import Want, plan, stream
from easymp.checkpoint.manifest import Box, Piece, Stored, whole
from easymp.checkpoint.storage import SourceFile
from easymp.checkpoint.storage_local import LocalStorage

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.bool, torch.complex64]


@st.composite
def cases(draw: Any) -> Any:
    """A tensor's shape and dtype, cuts of each dimension for the files and for the wants, how many files, the stage."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))

    def cuts() -> list[list[int]]:
        return [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]

    converted = draw(st.booleans())
    sizes = draw(st.integers(1, 3)), draw(st.sampled_from([8, 64, 2**20]))
    return shape, dtype, cuts(), cuts(), *sizes, converted, draw(st.booleans())


def boxes(cuts: list[list[int]]) -> list[Box]:
    runs = [[(a, b - a) for a, b in pairwise(at)] or [(0, 0)] for at in cuts]
    return [Box(tuple(o for o, _ in choice), tuple(n for _, n in choice)) for choice in product(*runs)]


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(*box))]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_element_arrives(tmp_path: Path, case: Any) -> None:
    shape, dtype, stored_cuts, wanted_cuts, count, room, converted, known = case
    whole_tensor = (torch.arange(prod(shape)) % 100).view(shape).to(dtype)
    contents: list[list[bytes]] = [[b"x" * 5] for _ in range(count)]
    pieces = []
    for i, box in enumerate(boxes(stored_cuts)):
        values = part(whole_tensor, box).contiguous()
        begin = sum(map(len, contents[i % count]))
        contents[i % count].append(
            bytes(values.reshape(-1).view(torch.uint8).tolist()) if values.numel() else b""
        )
        pieces.append(Piece(box, str(i % count), begin))
    storage = LocalStorage(tmp_path)
    files = {}
    for i, content in enumerate(contents):
        data = b"".join(content)
        (tmp_path / str(i)).write_bytes(data)
        files[str(i)] = SourceFile(storage, str(i), len(data), (crc32(data),) if known else None)
    into = torch.float64 if converted and dtype.is_floating_point else dtype
    live = (
        torch.zeros(tuple(n + 1 for n in shape)[::-1], dtype=into).permute(tuple(reversed(range(len(shape)))))
        if converted
        else None
    )
    target = (
        torch.zeros(shape, dtype=into) if live is None else part(live, whole(shape))
    )  # rows with gaps, in another order
    stored = Stored(dtype, shape, tuple(pieces))
    wants = [Want(stored, box, part(target, box)) for box in boxes(wanted_cuts)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "STAGE", room)
        stream(files, plan(wants))
    assert torch.equal(target, whole_tensor.to(into))
    if live is not None and shape:
        live[tuple(slice(0, n) for n in shape)] = 0
        assert not live.any()
