"""A rank's files of a checkpoint, from its part of the snapshot to the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from .boxes import Box
from .buffers import as_bytes
from .manifest import FileRecord
from .planning import FilePlan
from .storage import Part, Storage, Tick


def write(storage: Storage, folder: str, plan: FilePlan, parts: Mapping[tuple[str, Box], Tensor], tick: Tick) -> FileRecord:
    """Write one file durably."""
    checksums = storage.put(f"{folder}/{plan.name}", contents(plan, parts), plan.size, tick)
    return FileRecord(plan.size, checksums)


def contents(plan: FilePlan, parts: Mapping[tuple[str, Box], Tensor]) -> Iterator[Part]:
    """The bytes of a file, tensor by tensor; one on another device is copied when its turn comes."""
    yield plan.header
    for at in plan.contents:
        tensor = parts[at]
        if tensor.numel():
            yield as_bytes(tensor.detach().cpu().contiguous())
