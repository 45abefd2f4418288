"""Batches to the device, one ahead.

On CUDA the next batch is copied on a side stream while the step computes: CPU memory is pinned first (by the DataLoader's own
thread where it has workers, else here), the copy of batch k+1 is queued before batch k is handed out, and the compute stream
waits for batch k's own copy only. So plain tensors travel; what else there is in a batch (sparse tensors, tensors of a class of
their own, packed sequences) moves when its turn comes, for only its own `to` knows what it holds. Elsewhere that is how all of a
batch is moved, and on the CPU nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..base import pytree
from .source import Note

Feed = Iterator[tuple[Any, Note]]


def reads_ahead(device: torch.device, non_blocking: bool) -> bool:
    """Whether `moved` has read the next batch when it hands one out."""
    return device.type == "cuda" and non_blocking


def moved(feed: Feed, device: torch.device, non_blocking: bool) -> Feed:
    """`feed` with its batches on `device`; the very same iterator where there is nothing to do."""
    if device.type == "cpu":
        return feed
    if reads_ahead(device, non_blocking):
        return _ahead(feed, device)
    return _in_turn(feed, device, non_blocking)


def _in_turn(feed: Feed, device: torch.device, non_blocking: bool) -> Feed:
    for batch, note in feed:
        yield pytree.send_to_device(batch, device, non_blocking), note


def _ahead(feed: Feed, device: torch.device) -> Feed:
    side = torch.cuda.Stream(device)

    def copy(batch: Any) -> tuple[Any, torch.cuda.Event]:
        # A data set may have made CUDA tensors itself, on the compute stream: nothing to wait for on the side one.
        with torch.cuda.stream(side):
            there = pytree.map_leaves(
                lambda leaf: _pin(leaf).to(device, non_blocking=True) if _plain(leaf) else leaf, batch
            )
            return there, side.record_event()

    held: tuple[Any, torch.cuda.Event, Note] | None = None
    for batch, note in feed:
        upcoming = (*copy(batch), note)
        if held is not None:
            yield _arrived(held[0], held[1], device), held[2]
        held = upcoming
    if held is not None:
        yield _arrived(held[0], held[1], device), held[2]


def _plain(leaf: Any) -> bool:
    """Whether all its memory is one that can be pinned, and told who uses it."""
    return type(leaf) is Tensor and leaf.layout is torch.strided


def _pin(leaf: Tensor) -> Tensor:
    return leaf.pin_memory() if leaf.device.type == "cpu" and not leaf.is_pinned() else leaf


def _arrived(batch: Any, copied: torch.cuda.Event, device: torch.device) -> Any:
    compute = torch.cuda.current_stream(device)
    compute.wait_event(copied)
    others = False
    for leaf in pytree.leaves(batch):
        if not _plain(leaf):
            others |= hasattr(leaf, "to")
        elif leaf.is_cuda:
            # The memory was allocated for the side stream: it may not be reused before the compute stream is done with it.
            leaf.record_stream(compute)
    return pytree.send_to_device(batch, device, non_blocking=True) if others else batch
