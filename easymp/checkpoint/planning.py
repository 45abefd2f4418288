"""Who writes what: every rank's boxes, each written once, in files whose every byte is known before the first is written.

All ranks make the same plan from the same list, so nothing but checksums has to be told afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from .boxes import Box, Shape, fault, whole
from .header import encode
from .manifest import Piece, Stored


class Brought(NamedTuple):
    """A box of a tensor that a rank has.

    `differs`: other ranks' values of it may be others, and the first rank's count: buffers, such as the statistics of a BatchNorm.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    box: Box
    differs: bool = False

    @property
    def bytes(self) -> int:
        return self.box.count * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """A file that one rank writes: `header`, then the bytes of `contents` in their order."""

    name: str
    rank: int
    header: bytes
    contents: tuple[tuple[str, Box], ...]
    size: int


@dataclass(frozen=True)
class Division:
    """All files, and where each tensor lies in them."""

    files: tuple[FilePlan, ...]
    tensors: dict[str, Stored]


def group(name: str) -> str:
    """Which file a tensor goes to: the first word of its full name."""
    return name.partition("/")[0]


def key(name: str, box: Box, shape: Shape) -> str:
    """A tensor's name inside of its file: pieces carry their box."""
    inside = name.partition("/")[2]
    return inside if box == whole(shape) else f"{inside}{box}"


def divide(brought: Sequence[Sequence[Brought]]) -> Division:
    """The plan for what each rank brought.

    What several ranks have is written by the one with the least to write, largest first; or by the first of them, where they may differ.

    Raises:
        CheckpointError: ranks that disagree on a tensor, or have only parts of it.
    """
    kinds: dict[str, tuple[torch.dtype, Shape]] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    led: set[str] = set()
    for rank, items in enumerate(brought):
        for name, dtype, shape, box, differs in items:
            if differs:
                led.add(name)
            known = kinds.setdefault(name, (dtype, shape))
            if known != (dtype, shape):
                raise CheckpointError(
                    f"{name}: {known[0]} of shape {known[1]} on one rank, {dtype} of shape {shape} on rank {rank}: all ranks must save the "
                    "same run"
                )
            holders.setdefault((name, box), []).append(rank)
    boxes: dict[str, list[Box]] = {}
    for name, box in holders:
        boxes.setdefault(name, []).append(box)
    for name, (_, shape) in kinds.items():
        if wrong := fault(shape, boxes[name]):
            raise CheckpointError(f"{name}: what the ranks have of it is not the whole: {wrong}")
    load = [0] * len(brought)
    writer: dict[tuple[str, Box], int] = {}
    order = sorted(holders, key=lambda at: -at[1].count * kinds[at[0]][0].itemsize)
    for at in order:
        rank = holders[at][0] if at[0] in led else min(holders[at], key=lambda r: load[r])
        writer[at] = rank
        load[rank] += at[1].count * kinds[at[0]][0].itemsize
    contents: dict[tuple[str, int], list[tuple[str, Box]]] = {}
    for at in holders:
        if (
            prod(kinds[at[0]][1]) == 0 or at[1].count
        ):  # an empty box of a tensor that is not empty needs no place
            contents.setdefault((group(at[0]), writer[at]), []).append(at)
    files: list[FilePlan] = []
    pieces: dict[str, list[Piece]] = {name: [] for name in kinds}
    for word in dict.fromkeys(g for g, _ in contents):
        ranks = sorted(rank for g, rank in contents if g == word)
        for number, rank in enumerate(ranks, 1):
            # Wide types first: each tensor then begins where its type may, and can be copied there as what it is.
            inside = tuple(sorted(contents[word, rank], key=lambda at: -kinds[at[0]][0].itemsize))
            name = f"{word}-{number:05d}-of-{len(ranks):05d}.safetensors"
            header, slots = encode(
                [(key(n, box, kinds[n][1]), kinds[n][0], box.shape) for n, box in inside], {"format": "pt"}
            )
            for (n, box), slot in zip(inside, slots):
                pieces[n].append(Piece(box, name, slot.begin))
            files.append(FilePlan(name, rank, header, inside, slots[-1].end))
    tensors = {name: Stored(dtype, shape, tuple(pieces[name])) for name, (dtype, shape) in kinds.items()}
    return Division(tuple(files), tensors)
