"""Moves batches to the device, on CUDA one batch ahead.

On CUDA a side stream copies batch k+1 while the step computes on batch k. CPU memory is pinned first: by the thread of a DataLoader
with workers, else here. The compute stream waits for the copy of its own batch only. Sparse tensors, tensor subclasses and packed
sequences move by their own `to` when their batch is due. Other devices move whole batches then, and the CPU moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..base import pytree
from .source import Note, reads_ahead

Feed = Iterator[tuple[Any, Note]]


def moved(feed: Feed, device: torch.device, non_blocking: bool) -> Feed:
    """`feed` with its batches on `device`; `feed` itself on the CPU."""
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
        # CUDA tensors that the data set made itself are on the compute stream: nothing to wait for here.
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
    """Whether `leaf` has one memory block that can be pinned and recorded on a stream."""
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
            # The side stream allocated this memory: keep it until the compute stream is done with it.
            leaf.record_stream(compute)
    return pytree.send_to_device(batch, device, non_blocking=True) if others else batch
