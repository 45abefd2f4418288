"""Files of hooks, of which nothing is known but their bytes: from where they lie into a checkpoint, or out of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from .committed import inside
from .manifest import BLOCK, FileRecord
from .storage import Part, Storage, Tick, nothing
from .tensor_files import SourceFile


@dataclass(frozen=True)
class Extra:
    """
    Attributes:
        files: those that this rank puts into the checkpoint, by their paths below it.
        names: those of all ranks.
        close: to be called when they are there, or never will be; more than once is no harm.
    """

    files: Mapping[str, SourceFile] = field(default_factory=dict)
    names: Collection[str] = ()
    close: Callable[[], None] = lambda: None


NONE = Extra()


def content(file: SourceFile) -> Iterator[Part]:
    """The bytes of a file, a block at a time, each verified where its checksum is known."""
    for begin in range(0, file.size, BLOCK):
        block = memoryview(bytearray(min(BLOCK, file.size - begin)))
        file.storage.fetch(file.name, file.size, file.checksums, [(begin, block)])
        yield block


def copied(
    files: Mapping[str, SourceFile], storage: Storage, folder: str, tick: Tick = nothing
) -> dict[str, FileRecord]:
    """Write `files` below `folder` of `storage`, by their paths there. All is on disk then but the first names in `folder`, which
    `sync` of it brings there.

    Raises:
        CheckpointError: one is not what was written, or has changed its size.
        OSError: one cannot be read or written.
    """
    folders = folders_of(files)
    for name in folders:
        with suppress(FileExistsError):  # another rank was quicker
            storage.make(inside(folder, name))
    written = {
        name: FileRecord(file.size, storage.put(inside(folder, name), content(file), file.size, tick))
        for name, file in files.items()
    }
    for name in folders:
        storage.sync(inside(folder, name))
    return written


def folders_of(names: Iterable[str]) -> list[str]:
    """All folders that these paths lead through; each comes after the one that it is in."""
    paths = [name.split("/") for name in names]
    return list(dict.fromkeys("/".join(words[:count]) for words in paths for count in range(1, len(words))))
