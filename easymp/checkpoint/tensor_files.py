"""A safetensors file that may be somebody else's: where it is, and what its header says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .header import Slot, decode, length
from .local import LocalStorage
from .storage import Storage
from .storages import open_storage, parted
from .strict import loads


@dataclass(frozen=True)
class SourceFile:
    """A file with tensors; `checksums` of each BLOCK, or None where nobody wrote any down."""

    storage: Storage
    name: str
    size: int
    checksums: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.storage.place.rstrip('/')}/{self.name}"


def found_at(place: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The folder that a file lies in, and its name there."""
    folder, name = parted(place)
    return open_storage(folder), name


def file_in(folder: Storage, name: str) -> SourceFile:
    """A file that somebody else wrote; links are followed, for a cache of downloads is made of them."""
    if isinstance(folder, LocalStorage):
        real = Path(folder.place, name).resolve()
        folder, name = LocalStorage(real.parent), real.name
    size = folder.size(name)
    if size is None:
        raise CheckpointError(f"{folder.place}/{name}: there is no such file")
    return SourceFile(folder, name, size)


def read_header(file: SourceFile) -> tuple[dict[str, Slot], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata.

    Raises:
        CheckpointError: it is none.
    """
    base = length(file.storage.head(file.name, 8), file.size, str(file))
    text = file.storage.head(file.name, base)
    slots = decode(text, file.size, str(file))
    return slots, loads(text[8:base], str(file)).get("__metadata__") or {}
