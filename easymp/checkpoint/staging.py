"""A copy of a rank's files in memory, from which a thread writes while the run goes on."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..logging import get_logger
from .boxes import Box
from .buffers import aligned, as_bytes
from .contents import is_plain
from .cutting import address
from .planning import FilePlan
from .spread import spread

PAGE = 4096
SMALL = 2**18  # bytes of a tensor that is not worth handing to another thread
CHUNK = 2**25  # bytes of a large one that one thread copies at a time
logger = get_logger(__name__)


class Image:
    """Memory for the files of one save, which each save uses again; it grows when they do."""

    def __init__(self) -> None:
        self._memory = aligned(0)
        self._pending: list[tuple[torch.cuda.Event, Sequence[Tensor]]] = []

    def take(
        self, plans: Sequence[FilePlan], parts: Mapping[tuple[str, Box], Tensor]
    ) -> dict[str, memoryview]:
        """Copy the files of `plans`; the bytes of each, to be read after `wait`.

        Large tensors on the CPU by a few plain threads: torch's own meet once a tensor, which waits for whoever has the cores.

        Copies from a GPU run in the order of its current stream: what is enqueued there later may change the tensors, and this
        process does not wait.
        """
        self._reserve(sum(_padded(plan.size) for plan in plans))
        files, at = {}, 0
        large: list[tuple[memoryview, memoryview]] = []
        for plan in plans:
            image = self._memory[at : at + plan.size]
            files[plan.name] = as_bytes(image)
            files[plan.name][: len(plan.header)] = plan.header
            begin = len(plan.header)
            for name in plan.contents:
                tensor = parts[name].detach()
                end = begin + tensor.numel() * tensor.itemsize
                if end - begin > SMALL and is_plain(tensor):
                    source = as_bytes(tensor)
                    large += [
                        (files[plan.name][begin + i : end][:CHUNK], source[i : i + CHUNK])
                        for i in range(0, len(source), CHUNK)
                    ]
                else:
                    _copy(image[begin:end], tensor)
                begin = end
            at += _padded(plan.size)
        for _ in spread(_move, large, "copy"):
            pass
        there = [parts[name] for plan in plans for name in plan.contents if parts[name].is_cuda]
        for device in {tensor.device for tensor in there}:
            # Held until they are copied: some were made for this save only.
            self._pending.append((torch.cuda.current_stream(device).record_event(), there))
        return files

    def wait(self) -> None:
        """Until the copy is whole."""
        for event, _ in self._pending:
            event.synchronize()
        self._pending.clear()

    def _reserve(self, size: int) -> None:
        pinned = torch.cuda.is_available() and torch.cuda.is_initialized()
        if len(self._memory) < size or (size and pinned and not self._memory.is_pinned()):
            self._memory = aligned(0)  # the old one goes first
            logger.info(
                "asynchronous checkpoints: %.2f GB of memory on this rank for a copy of what is written",
                size / 1e9,
            )
            self._memory = aligned(size)


def _move(task: tuple[memoryview, memoryview]) -> None:
    into, source = task
    ctypes.memmove(address(into), address(source), len(source))  # lets other threads run; a slice does not


def _copy(into: Tensor, tensor: Tensor) -> None:
    """The bytes of `tensor`, row-major, in the row of bytes `into`; of CUDA's, once its stream has come so far."""
    if not tensor.numel():
        return
    later = tensor.is_cuda  # of no other device is there an event to wait for
    if into.storage_offset() % tensor.itemsize == 0:
        into.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=later)
    else:
        into.copy_(
            tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8), non_blocking=later
        )


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE
