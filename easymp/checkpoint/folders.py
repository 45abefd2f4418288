"""How the folders of checkpoints are called below a root, and which of them count: one place for all who write, load, list and prune.

| name | what it is |
|---|---|
| ``step-00000100`` | the checkpoint of step 100; users choose other names as they like |
| ``step-00000100.save-2`` | the same, saved again where two folders cannot swap names (object stores, some network file systems): of those with a COMMIT, the one with the highest number counts, and the others are on their way out |
| ``step-00000100.line-1c9e02d7`` | the same, of another line of saves: it was there when the line that goes on came to that step, and was set aside |
| ``.tmp-step-00000100-5f0c3a9e`` | being written, or replaced, or on its way out; never a checkpoint |
| ``.tmp-step-00000100.lock`` | who is writing that checkpoint |
| ``latest`` | a file with the name of the checkpoint that was saved last: a hint for readers, the truth is COMMIT and the manifest |
"""  # noqa: E501

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from .committed import is_committed
from .storage import Storage

TEMPORARY = ".tmp-"
LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,})(\.line-[0-9a-f]+(-\d+)?)?")
_AGAIN = re.compile(r"(.+)\.save-(\d+)")
_TEMPORARY = re.compile(r"\.tmp-(.+)-[0-9a-f]{8}")
_LOCK = re.compile(r"\.tmp-(.+)\.lock")


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step that a folder, saved again or not, is named by; None for other names."""
    found = _STEP.fullmatch(checkpoint_of(folder))
    return int(found[1]) if found else None


def checkpoint_of(folder: str) -> str:
    """The checkpoint that a folder is one save of."""
    found = _AGAIN.fullmatch(folder)
    return found[1] if found else folder


def save_of(folder: str) -> int:
    """Which save of its checkpoint a folder is: 1, 2 …"""
    found = _AGAIN.fullmatch(folder)
    return int(found[2]) if found else 1


def saves_of(names: Iterable[str], checkpoint: str) -> list[str]:
    """Those of the folders `names` that are saves of one checkpoint, the newest first; committed or not."""
    return sorted((n for n in names if checkpoint_of(n) == checkpoint), key=save_of, reverse=True)


def next_save(names: Iterable[str], checkpoint: str) -> str:
    """A name for one more save of a checkpoint, beside the folders `names`."""
    taken = saves_of(names, checkpoint)
    return f"{checkpoint}.save-{save_of(taken[0]) + 1}" if taken else checkpoint


def aside(names: Iterable[str], checkpoint: str, line: str) -> str:
    """A name for a checkpoint of another line that gives up its own; beside the folders `names`."""
    name = plain = f"{checkpoint}.line-{line}"
    taken, number = {checkpoint_of(n) for n in names}, 1
    while name in taken:
        number += 1
        name = f"{plain}-{number}"
    return name


def temporary(checkpoint: str) -> str:
    """A new name for what is no checkpoint yet, or no longer."""
    return f"{TEMPORARY}{checkpoint}-{secrets.token_hex(4)}"


def lock_of(checkpoint: str) -> str:
    return f"{TEMPORARY}{checkpoint}.lock"


def writing(name: str) -> str | None:
    """The checkpoint that the temporary folder or lock `name` belongs to; None for other names."""
    found = _TEMPORARY.fullmatch(name) or _LOCK.fullmatch(name)
    return found[1] if found else None


def current(storage: Storage, checkpoint: str) -> str:
    """The folder that holds `checkpoint`: that of its newest committed save; the plain name where none is committed.

    Raises:
        OSError: `storage` cannot be read.
    """
    found = saves_of(storage.list(), checkpoint)
    if found in ([], [checkpoint]):
        return checkpoint
    return next((folder for folder in found if is_committed(storage, folder)), checkpoint)
