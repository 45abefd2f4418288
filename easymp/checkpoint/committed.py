"""Whether a folder is a checkpoint, and what its manifest says: COMMIT, written last, holds the manifest's hash."""

from __future__ import annotations

from ..errors import CheckpointError
from .manifest import COMMIT, MANIFEST, Manifest, decode, seal
from .storage import Storage
from .strict import LONGEST

SEAL = 65  # bytes of COMMIT: a SHA-256 in hexadecimal and the end of its line


def open_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest of the checkpoint in `folder` of `storage` ("" for `storage` itself), once it is known to be the committed one.

    Raises:
        CheckpointError: `folder` is no checkpoint, was not committed, was changed since, or is of a newer format.
        OSError: it cannot be read.
    """
    place, manifest, commit = inside(storage.place, folder), inside(folder, MANIFEST), inside(folder, COMMIT)
    sealed, described = storage.size(commit) is not None, storage.size(manifest) is not None
    if not (sealed or described):
        raise CheckpointError(
            f"{place}: no checkpoint: neither {MANIFEST} nor {COMMIT} is there; pass the folder of one step"
        )
    if not sealed:
        raise CheckpointError(
            f"{place}: not committed: {COMMIT} is missing, so the save did not end; load an earlier checkpoint"
        )
    if not described:
        raise CheckpointError(
            f"{place}: {MANIFEST} is missing though {COMMIT} is there: load another checkpoint"
        )
    text = storage.get(manifest, LONGEST)
    if storage.get(commit, SEAL) != seal(text):
        raise CheckpointError(
            f"{place}: {MANIFEST} is not the one that {COMMIT} seals: one of them was changed; load another checkpoint"
        )
    return decode(text, inside(storage.place, manifest))


def write_manifest(storage: Storage, folder: str, manifest: Manifest) -> None:
    """The last two files of `folder`, whose others are there: with the second one it is a checkpoint.

    Raises:
        CheckpointError: the manifest says what cannot be.
        OSError: it cannot be written.
    """
    text = manifest.encode()
    for name, content in ((MANIFEST, text), (COMMIT, seal(text))):
        storage.put(inside(folder, name), [content], len(content))
        storage.sync(folder)  # before the next


def is_committed(storage: Storage, folder: str) -> bool:
    """Whether `folder` holds a manifest and the COMMIT that seals it; what the manifest says is not looked at.

    Raises:
        OSError: it cannot be read.
    """
    manifest, commit = inside(folder, MANIFEST), inside(folder, COMMIT)
    if storage.size(commit) != SEAL:
        return False
    size = storage.size(manifest)
    if size is None or size > LONGEST:
        return False
    try:
        return storage.get(commit, SEAL) == seal(storage.get(manifest, LONGEST))
    except FileNotFoundError:  # another process removes this checkpoint right now
        return False


def inside(folder: str, name: str) -> str:
    """`name` in `folder`; "" on either side is no folder more."""
    return f"{folder.rstrip('/')}/{name}" if folder and name else folder or name
