"""How a folder becomes a checkpoint, and the one that it replaces goes: at no instant is there neither.

Where folders can be renamed (`renaming`), it is written under a temporary name, and the last step gives it its own. Where they cannot
(`staying`: object stores), files go to their place at once, and COMMIT, which is written last, decides.
"""

from __future__ import annotations

from typing import Protocol

from ..errors import CheckpointError
from .folders import TEMPORARY, checkpoint_of
from .lineage import Saved
from .renaming import Renaming
from .staying import Staying
from .storage import Storage


class Commit(Protocol):
    """One save's folder, on the rank that claimed the checkpoint.

    Attributes:
        folder: where its files go.
    """

    folder: str

    def finish(self) -> None:
        """All files are there and COMMIT is: from now on it counts.

        Raises:
            OSError: it may not; what counted before still does.
        """
        ...

    def close(self) -> None:
        """Take away what was not finished, and let other writers have the checkpoint."""
        ...


def begin(storage: Storage, checkpoint: str, by: Saved | None = None) -> Commit:
    """Claim `checkpoint` of `storage`, clean up after writers that died, and make room for the new one.

    Args:
        by: the new one's place among others. One that has its name and is not on its line gets another name; without `by`, it is replaced.

    Raises:
        CheckpointError: another process writes it, or something else has its name.
        OSError: the folder cannot be written to.
    """
    return (Renaming if storage.renames else Staying)(storage, checkpoint, by)


def check_name(checkpoint: str) -> None:
    """Raises CheckpointError for a name that no checkpoint can have."""
    if (
        "/" in checkpoint
        or not checkpoint
        or checkpoint.startswith(TEMPORARY)
        or checkpoint_of(checkpoint) != checkpoint
    ):
        raise CheckpointError(
            f"{checkpoint!r} is no name for a checkpoint: {TEMPORARY}… and ….save-2 are those of saves under way; pass another one"
        )
