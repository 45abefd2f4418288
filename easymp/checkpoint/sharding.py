"""Which tensors go into which file, where a model is written in several: as huggingface_hub divides them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .boxes import Shape
from .header import nbytes


class Item(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def bytes(self) -> int:
        return nbytes(self.dtype, self.shape) or 0


def cut(items: Sequence[Item], most: int) -> list[list[Item]]:
    """`items` in shards of at most `most` bytes, in their order; one that is larger gets a shard of its own.

    Its `split_torch_state_dict_into_shards` gives the same shards.
    """
    shards: list[list[Item]] = []
    current: list[Item] = []
    held = 0
    for item in items:
        if item.bytes > most:
            shards.append([item])
            continue
        if held + item.bytes > most:
            shards.append(current)
            current, held = [], 0
        current.append(item)
        held += item.bytes
    if current or not shards:
        shards.append(current)
    # Larger elements first, so that each tensor begins at a multiple of its element.
    return [sorted(shard, key=lambda item: -item.dtype.itemsize) for shard in shards]


def order(shards: Sequence[Sequence[Item]]) -> list[str]:
    """Names in the order in which `write_model` asks for them."""
    return [item.name for shard in shards for item in shard]
