"""What a checkpoint says of itself: its manifest, summed up by groups of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .catalog import bytes_of
from .manifest import Manifest
from .opening import open_checkpoint
from .planning import group


@dataclass(frozen=True)
class TensorFacts:
    """A tensor in a checkpoint; `pieces` are the boxes that it lies in, 1 where it is whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    pieces: int


@dataclass(frozen=True)
class GroupFacts:
    """The tensors of one group ("model", "optimizer" …): how many, their elements and bytes, bytes of each dtype, the files."""

    name: str
    tensors: int
    elements: int
    size: int
    dtypes: Mapping[str, int]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Contents:
    """What is in a checkpoint. `plan` is that of the run (`Plan.as_dict`), `states` are names of what is no tensor.

    Attributes:
        size: bytes of all files but the manifest.
        files: their bytes by name.
        extra: names of those that hooks wrote.
        line: of saves that it belongs to.
        parent: the checkpoint that its run had loaded or saved before; "" where there was none.
        aliases: names of tensors that are other names of stored ones.
    """

    place: str
    step: int
    world_size: int
    written: str
    made_by: str
    size: int
    plan: Mapping[str, Any]
    groups: tuple[GroupFacts, ...]
    tensors: tuple[TensorFacts, ...]
    aliases: Mapping[str, str]
    states: tuple[str, ...]
    files: Mapping[str, int]
    extra: tuple[str, ...]
    line: str
    parent: str


def inspect(folder: str | os.PathLike[str]) -> Contents:
    """What the committed checkpoint in `folder` (or at that URL) holds; no tensor is read.

    Raises:
        CheckpointError: it is none, or cannot be read.
    """
    opened = open_checkpoint(folder)
    it = opened.manifest
    words = dict.fromkeys(group(name) for name in it.tensors)
    return Contents(
        place=opened.place,
        step=it.step,
        world_size=it.world_size,
        written=it.written,
        made_by=it.made_by,
        size=bytes_of(it),
        plan=it.plan,
        groups=tuple(_group(word, it) for word in words),
        tensors=tuple(
            TensorFacts(n, dtype_name(t.dtype), t.shape, t.bytes, len(t.pieces))
            for n, t in it.tensors.items()
        ),
        aliases=it.aliases,
        states=tuple(it.states),
        files={name: file.size for name, file in it.all_files.items()},
        extra=tuple(it.extra),
        line=it.lineage.line,
        parent=it.lineage.parent,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"``."""
    return str(dtype).removeprefix("torch.")


def _group(word: str, manifest: Manifest) -> GroupFacts:
    tensors = [t for name, t in manifest.tensors.items() if group(name) == word]
    dtypes: dict[str, int] = {}
    for t in tensors:
        name = dtype_name(t.dtype)
        dtypes[name] = dtypes.get(name, 0) + t.bytes
    files = sorted({piece.file for t in tensors for piece in t.pieces})
    elements = sum(prod(t.shape) for t in tensors)
    return GroupFacts(word, len(tensors), elements, sum(dtypes.values()), dtypes, tuple(files))
