"""The memory of tensors as plain bytes, and memory that disks and GPUs take as it is."""

from __future__ import annotations

import ctypes
import mmap

import torch

from ..errors import CheckpointError


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as one writable row of bytes, of any dtype; no copy.

    The view keeps that memory alive, and what is written to it is the tensor's value at once (autograd is not told).

    Raises:
        CheckpointError: a tensor whose memory is not its value: elsewhere, with gaps, or conjugated or negated by a flag.
    """
    if (
        tensor.layout is not torch.strided
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        raise CheckpointError(
            f"a tensor {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device} has no plain bytes on the CPU: "
            "pass tensor.resolve_conj().resolve_neg().cpu().contiguous()"
        )
    size = tensor.numel() * tensor.itemsize
    if not size:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.tensor = tensor.detach()  # the view holds `memory`, which holds the tensor's storage
    return memoryview(memory).cast("B")


class Pages(mmap.mmap):
    """Private memory of the kernel, zero; given back, and taken back from CUDA, when nothing reads it any more.

    The kernel clears each page at its first touch, which is dear, so huge ones are asked for.
    """

    registered = 0  # its address, where CUDA knows it

    def __new__(cls, size: int) -> Pages:
        pages = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without them
        return pages

    def __del__(self) -> None:
        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self.registered)  # before mmap's own end, which unmaps


def aligned(size: int) -> torch.Tensor:
    """`size` bytes that begin on a page, as uint8, zero; pinned where this process uses CUDA (`is_pinned` says). To be kept and used again.

    It is registered with CUDA rather than taken from torch's pinned pool, which rounds up to a power of two: up to twice the
    memory for a staging image.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages = Pages(size)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        runtime = torch.cuda.cudart()
        if runtime.cudaHostRegister(memory.data_ptr(), size, 0) == runtime.cudaError.success:
            pages.registered = memory.data_ptr()
    return memory
