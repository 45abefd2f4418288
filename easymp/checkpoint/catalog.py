"""Which checkpoints lie in a folder, and what became of the others that were begun there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ..errors import CheckpointError
from .committed import inside, is_committed, open_manifest
from .finding import newest, survey
from .folders import checkpoint_of, current, lock_of, step_of, writing
from .manifest import COMMIT, MANIFEST, Manifest
from .storage import Storage
from .storages import open_storage


@dataclass(frozen=True)
class Entry:
    """A folder that is a checkpoint, or was to become one.

    Attributes:
        name: of the folder.
        size: bytes in its files.
        written: when, in ISO 8601, UTC; None where nobody knows.
        step: optimizer updates until then; None where no manifest says so.
        world_size: ranks that wrote it; likewise.
        committed: whether it counts.
        why: what is wrong with it, in a sentence; "" where nothing is.
        newest: whether `resume` takes it: of those that are named by steps, the committed one that was saved last.
        line: identifier of the line of saves that it belongs to; None where no manifest says so.
        parent: name of the checkpoint that its run had loaded or saved before; "" where there was none.
        abandoned: whether `resume` leaves it out, as a run went on from an earlier one, or began without any.
    """

    name: str
    size: int
    written: str | None
    step: int | None = None
    world_size: int | None = None
    committed: bool = False
    why: str = ""
    newest: bool = False
    line: str | None = None
    parent: str = ""
    abandoned: bool = False


def list_checkpoints(root: str | os.PathLike[str]) -> list[Entry]:
    """What is in the folder or URL `root`: in the order in which it was saved, first what has no manifest. Tensors
    are not read.

    Raises:
        CheckpointError: `root` is itself a checkpoint.
        OSError: it cannot be read.
    """
    storage = open_storage(root)
    names = storage.list()
    if MANIFEST in names:
        raise CheckpointError(
            f"{storage.place} is itself a checkpoint: pass the folder above it, or inspect this one"
        )
    found = sorted((_entry(storage, name, names) for name in names if _is_one(storage, name)), key=_order)
    last, _, _ = newest(storage)
    saved, _ = survey(storage)
    left = {it.folder for it in saved if not it.leads_to(saved[-1])}
    return [
        replace(entry, newest=entry.name == last, abandoned=entry.committed and entry.name in left)
        for entry in found
    ]


def _order(entry: Entry) -> tuple[bool, str, int, str]:
    return entry.step is not None, entry.written or "", entry.step or 0, entry.name


def _is_one(storage: Storage, name: str) -> bool:
    owner = writing(name)
    if step_of(name) is not None or (owner is not None and name != lock_of(owner)):
        return True
    return any(storage.size(inside(name, file)) is not None for file in (MANIFEST, COMMIT))


def _entry(storage: Storage, name: str, names: Sequence[str]) -> Entry:
    place, owner = inside(storage.place, name), writing(name)
    left_over = (
        "being written, or left over" if lock_of(owner or checkpoint_of(name)) in names else "left over"
    )
    try:
        manifest = open_manifest(storage, name)
    except (CheckpointError, OSError) as error:
        committed = _sealed(storage, name)
        why = str(error).removeprefix(f"{place}: ")
        if owner is not None or (left_over.startswith("being") and not committed):
            why = f"{left_over} from a save that did not end ({why})"
        return Entry(name, bytes_in(storage, name), _modified(storage, name), committed=committed, why=why)
    why = ""
    if owner is not None:
        why = f"{left_over}: it was replaced, or its save ended before its renaming"
    elif (counts := current(storage, checkpoint_of(name))) != name:
        why = f"replaced by {counts}"
    return Entry(
        *(name, bytes_of(manifest), manifest.written, manifest.step, manifest.world_size, not why, why),
        line=manifest.lineage.line,
        parent=manifest.lineage.parent,
    )


def bytes_of(manifest: Manifest) -> int:
    """Bytes of its files, beside the manifest."""
    return sum(file.size for file in manifest.all_files.values())


def bytes_in(storage: Storage, folder: str) -> int:
    """Bytes of the files in a folder, and in those below it."""
    below = [inside(folder, name) for name in storage.list(folder)]
    return sum(bytes_in(storage, path) if (size := storage.size(path)) is None else size for path in below)


def _modified(storage: Storage, name: str) -> str | None:
    try:
        return datetime.fromtimestamp(storage.modified(name), UTC).isoformat(timespec="seconds")
    except OSError:  # object stores have no folders
        return None


def _sealed(storage: Storage, name: str) -> bool:
    try:
        return is_committed(storage, name)
    except OSError:
        return False
