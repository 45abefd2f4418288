"""A tensor's memory as bytes, both ways; memory that begins on a page."""

from __future__ import annotations

import gc

import pytest
import torch

from easymp.checkpoint.blocks import aligned, as_bytes
from easymp.checkpoint.header import NAMES
from easymp.errors import CheckpointError

EVERY = pytest.mark.parametrize("dtype", sorted(NAMES, key=str), ids=str)


@EVERY
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (3, 5)], ids=str)
def test_the_bytes_of_a_tensor_are_its_value(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor, other = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    view = as_bytes(tensor)
    assert (view.nbytes, view.format, view.ndim, view.readonly) == (tensor.nbytes, "B", 1, False)
    view[:] = bytes((i + 1) % 2 for i in range(len(view)))  # legal for a bool, too
    as_bytes(other)[:] = view
    assert bytes(as_bytes(other)) == bytes((i + 1) % 2 for i in range(tensor.nbytes))
    if tensor.nbytes:
        assert tensor.view(-1).view(torch.uint8).any()


def test_a_part_of_a_tensor_has_its_own_bytes() -> None:
    tensor = torch.arange(10, dtype=torch.uint8)
    assert bytes(as_bytes(tensor[3:6])) == b"\3\4\5"


def test_a_parameter_takes_bytes_too() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    as_bytes(weight)[:] = as_bytes(torch.ones(2))
    assert weight.tolist() == [1, 1]


def test_the_view_keeps_the_memory() -> None:
    part = as_bytes(torch.full((1 << 20,), 7, dtype=torch.uint8))[5:1000]
    gc.collect()
    torch.full((1 << 20,), 9, dtype=torch.uint8)
    assert set(part) == {7}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4).T[1:],
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2).to_sparse(),
    ],
    ids=["gaps", "meta", "conjugated", "sparse"],
)
def test_what_has_no_plain_bytes_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match="no plain bytes on the CPU: pass tensor"):
        as_bytes(tensor)


@pytest.mark.parametrize("size", [0, 1, 4096, 5_000_001])
def test_aligned_memory_begins_on_a_page_and_can_be_written(size: int) -> None:
    memory = aligned(size)
    assert (memory.dtype, memory.shape) == (torch.uint8, (size,))
    if size:
        assert memory.data_ptr() % 4096 == 0
    view = as_bytes(memory)
    del memory
    view[-1:] = b"x"[:size]
    assert bytes(view[-1:]) == b"x"[:size]


@pytest.mark.gpu
def test_aligned_memory_is_pinned_where_cuda_is_in_use() -> None:
    torch.cuda.init()
    for _ in range(3):  # what is given back can be mapped and registered again
        memory = aligned(3_000_001)
        assert memory.is_pinned()
        memory.copy_(torch.full((3_000_001,), 7, dtype=torch.uint8, device="cuda"), non_blocking=True)
        torch.cuda.synchronize()
        assert int(memory.min()) == 7
