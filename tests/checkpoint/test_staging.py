"""A copy of the state, and what is written of tensors that have no plain bytes: the same files, whatever their memory is like."""

from __future__ import annotations

import pytest
import torch

from easymp.checkpoint import save
from easymp.checkpoint import snapshot as of_contents
from easymp.checkpoint.layout import whole
from easymp.checkpoint.save import PAGE, Image
from easymp.checkpoint.snapshot import Brought, contents, divide

TENSORS = {
    "bools": torch.tensor([True, False, True]),
    "odd": torch.arange(7, dtype=torch.uint8),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "bf16": torch.randn(5, 3).bfloat16(),
    "transposed": torch.randn(40, 30).t(),
    "every other": torch.randn(64, 6)[:, ::2],
    "conjugated": torch.randn(4, 4, dtype=torch.complex64).conj(),
    "fp8": torch.randn(9).to(torch.float8_e4m3fn),
    "long": torch.arange(1000),
    "large": torch.randn(300, 300),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(of_contents, "CHUNK", 64)
    monkeypatch.setattr(save, "SMALL", 1000)
    monkeypatch.setattr(save, "CHUNK", 50_000)


def planned(device="cpu"):
    tensors = {f"model/{name}": tensor.to(device) for name, tensor in TENSORS.items()}
    brought = [Brought(name, t.dtype, tuple(t.shape), whole(tuple(t.shape))) for name, t in tensors.items()]
    (plan,) = divide([brought]).files
    return plan, {(name, whole(tuple(t.shape))): t for name, t in tensors.items()}


def expected(plan, parts):
    rows = [
        parts[at].cpu().resolve_conj().contiguous().view(-1).view(torch.uint8)
        for at in plan.contents
        if parts[at].numel()
    ]
    return plan.header + torch.cat(rows).numpy().tobytes()


def test_files_are_what_is_said_of_them():
    plan, parts = planned()
    content = b"".join(contents(plan, parts))
    assert content == expected(plan, parts)
    assert len(content) == plan.size


def test_each_tensor_begins_where_its_type_may():
    plan, _ = planned()
    sizes = [TENSORS[name.partition("/")[2]].itemsize for name, _ in plan.contents]
    assert sizes == sorted(sizes, reverse=True)
    assert len(plan.header) % PAGE == 0


def test_a_copy_is_the_file_and_uses_its_memory_again():
    plan, parts = planned()
    image = Image()
    for _ in range(2):
        content = image.take([plan], parts)[plan.name]
        image.wait()
        assert bytes(content) == expected(plan, parts)
        address = image._memory.data_ptr()
        assert address % PAGE == 0
        parts = {at: tensor.clone() for at, tensor in parts.items()}
    del content
    image.take([plan], parts)
    assert image._memory.data_ptr() == address


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_of_the_moment_of_the_call():
    plan, parts = planned("cuda")
    right, image = expected(plan, parts), Image()
    for _ in range(3):
        content = image.take([plan], parts)[plan.name]
        kept = {at: tensor.clone() for at, tensor in parts.items()}
        for tensor in parts.values():
            tensor.zero_()  # enqueued behind the copy
        image.wait()
        assert image._memory.is_pinned()
        assert bytes(content) == right
        parts = kept
    assert b"".join(contents(plan, parts)) == right


def test_nothing_but_cuda_is_copied_behind_the_callers_back(monkeypatch):
    """There is no event to wait for elsewhere (Apple's, Intel's)."""
    waits, copy = [], torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor,
        "copy_",
        lambda into, source, non_blocking: (waits.append(non_blocking), copy(into, source))[1],
    )
    plan, parts = planned()
    Image().take([plan], parts)
    assert waits and not any(waits)
