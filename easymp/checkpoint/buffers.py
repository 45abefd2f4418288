"""Memory of tensors as bytes."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch

from ..errors import CheckpointError


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its values row-major, so that it can be written as it is."""
    strided = tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous()
    return strided and not tensor.is_conj() and not tensor.is_neg()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's memory, without a copy. The view keeps the memory alive."""
    if not is_plain(tensor):
        raise CheckpointError(
            f"a tensor {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device} has no plain bytes on the CPU: "
            "pass tensor.resolve_conj().resolve_neg().cpu().contiguous()"
        )
    size = tensor.numel() * tensor.itemsize
    if not size:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    vars(memory)["tensor"] = tensor.detach()  # the view holds `memory`, which holds the tensor's storage
    return memoryview(memory).cast("B")


def on_host(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A whole tensor on the CPU, contiguous; the tensor itself if it is that already."""
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device: prepare the model, or load_weights into it")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


class Pages(mmap.mmap):
    """Zeroed memory in huge pages, unregistered from CUDA when its last view is gone."""

    registered = 0  # its address, where CUDA knows it

    def __new__(cls, size: int) -> Pages:
        pages = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def __del__(self) -> None:
        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self.registered)  # before mmap's own end, which unmaps


def aligned(size: int) -> torch.Tensor:
    """Page-aligned zero bytes as uint8, pinned if this process uses CUDA. Slow to make: reuse it."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages = Pages(size)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        runtime = torch.cuda.cudart()
        if runtime.cudaHostRegister(memory.data_ptr(), size, 0) == runtime.cudaError.success:
            pages.registered = memory.data_ptr()
    return memory


def address(view: memoryview) -> int:
    """The address of a buffer; 1, which is never aligned, for a read-only view, whose address ctypes does not tell."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes. Large copies release the GIL, which a slice assignment does not."""
    if source.readonly or len(source) < 2**16:
        target[:] = source
    else:
        ctypes.memmove(address(target), address(source), len(source))
