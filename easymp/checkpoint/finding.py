"""Which checkpoint is meant: by a path, or as the newest one below a root."""

from __future__ import annotations

import os
from collections.abc import Collection

from ..errors import CheckpointError
from .committed import inside, open_manifest
from .folders import current, save_of, step_of
from .manifest import COMMIT, MANIFEST
from .storage import Storage


def below(root: str | os.PathLike[str], name: str) -> str:
    """`name` in `root`, a path or a URL."""
    text = os.fspath(root)
    return f"{text.rstrip('/')}/{name}" if "://" in text else os.path.join(text, name)


def is_checkpoint(storage: Storage, name: str) -> bool:
    """Whether `name` is the folder of a checkpoint, whole or not, rather than a root of some."""
    folder = current(storage, name)
    return any(storage.size(inside(folder, file)) is not None for file in (COMMIT, MANIFEST))


def newest(storage: Storage, passed: Collection[str] = ()) -> tuple[str | None, list[str], bool]:
    """The folder of the newest committed checkpoint that is named by its step; why newer ones do not count; and whether one of those
    was committed once, and is damaged.

    Args:
        passed: folders that are left out without a word.

    Raises:
        OSError: `storage` cannot be read.
    """
    folders = sorted(
        ((step, save_of(name), name) for name in storage.list() if (step := step_of(name)) is not None), reverse=True
    )
    said, damaged = [], False
    for _, _, folder in folders:
        if folder in passed:
            continue
        try:
            open_manifest(storage, folder)
        except CheckpointError as error:
            said.append(str(error))
            damaged |= storage.size(inside(folder, COMMIT)) is not None
            continue
        return folder, said, damaged
    return None, said, damaged


def damage(storage: Storage, folder: str) -> str:
    """What is wrong with the files of a committed checkpoint, in words; "" where all of them are what was written. Reads all of it."""
    try:
        for name, record in open_manifest(storage, folder).all_files.items():
            storage.verify(inside(folder, name), record.size, record.checksums)
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""
