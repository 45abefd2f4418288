"""Every byte of a checkpoint against its checksum, every header against the manifest; and what is lost where one is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import CheckpointError
from .catalog import bytes_of
from .committed import inside
from .manifest import BLOCK, FileRecord, Manifest
from .opening import Opened, open_checkpoint
from .preflight import expected, faults
from .progress import expect
from .storage import Storage, Tick, nothing


@dataclass(frozen=True)
class Damage:
    """Something that is not what was written.

    Attributes:
        file: its name in the checkpoint.
        why: in words.
        block: which `BLOCK` (16 MiB) of the file, from 0; None where it is the whole file, or its header.
        tensors: full names of what lies there, whole or in part.
    """

    file: str
    why: str
    block: int | None = None
    tensors: tuple[str, ...] = ()


def verify(folder: str | os.PathLike[str], tick: Tick = nothing) -> list[Damage]:
    """All that is wrong with the committed checkpoint in `folder` (or at that URL); empty where it is as it was written.

    Args:
        tick: told how many more bytes were read, now and then.

    Raises:
        CheckpointError: no manifest that COMMIT seals, so nothing is known of the rest.
    """
    opened = open_checkpoint(folder)
    found: list[Damage] = []
    expect(tick, bytes_of(opened.manifest))
    held = expected(opened.manifest, opened.manifest.files)
    for name, record in opened.manifest.all_files.items():
        wrong = list(_bytes_of(opened, name, record, tick))
        if not wrong and name in held:
            said = faults(opened.storage, opened.folder, name, record.size, held[name])
            wrong = [Damage(name, why, None, tensors) for why, tensors in said]
        found += wrong
    return found


def _bytes_of(opened: Opened, name: str, record: FileRecord, tick: Tick) -> Iterator[Damage]:
    storage, manifest, path = opened.storage, opened.manifest, inside(opened.folder, name)
    size = storage.size(path)
    if size is None:
        yield Damage(name, "is missing", None, _in_bytes(manifest, name, 0, record.size))
        return
    if size != record.size:
        yield Damage(
            name,
            f"has {size} bytes, and {record.size} were written",
            None,
            _in_bytes(manifest, name, 0, record.size),
        )
        return
    try:
        storage.verify(path, record.size, record.checksums, tick)
    except (CheckpointError, OSError) as error:
        # The first fault ended it. Which blocks are wrong is found by touching each one.
        blocks = [b for b in range(len(record.checksums)) if not _intact(storage, path, record, b)]
        if not blocks:
            yield Damage(name, str(error).removeprefix(f"{inside(storage.place, path)}: "))
        for block in blocks:
            yield Damage(
                name,
                "is not what was written",
                block,
                _in_bytes(manifest, name, block * BLOCK, (block + 1) * BLOCK),
            )


def _intact(storage: Storage, path: str, record: FileRecord, block: int) -> bool:
    if block * BLOCK >= record.size:
        return True
    try:
        storage.verify(path, record.size, record.checksums, numbers=[block])
    except (CheckpointError, OSError):
        return False
    return True


def _in_bytes(manifest: Manifest, file: str, begin: int, end: int) -> tuple[str, ...]:
    """The tensors that have a byte in ``[begin, end)`` of a file."""
    return tuple(
        name
        for name, stored in manifest.tensors.items()
        if any(
            p.file == file and p.begin < end and begin < p.begin + p.box.count * stored.dtype.itemsize
            for p in stored.pieces
        )
    )
