"""From what a user says, a folder or a URL, to the checkpoint that is there."""

from __future__ import annotations

import os
from typing import NamedTuple

from ..errors import CheckpointError
from .committed import inside, open_manifest
from .folders import current
from .manifest import FileRecord, Manifest
from .storage import Storage
from .storages import open_storage, parted
from .tensor_files import SourceFile


class Opened(NamedTuple):
    """A committed checkpoint: `folder` of `storage`, and what its manifest says."""

    storage: Storage
    folder: str
    manifest: Manifest

    @property
    def place(self) -> str:
        return inside(self.storage.place, self.folder)

    @property
    def files(self) -> dict[str, SourceFile]:
        """For `streaming.stream`."""
        return self._at(self.manifest.files)

    @property
    def extra(self) -> dict[str, SourceFile]:
        """Those that hooks wrote."""
        return self._at(self.manifest.extra)

    def _at(self, files: dict[str, FileRecord]) -> dict[str, SourceFile]:
        return {
            name: SourceFile(self.storage, inside(self.folder, name), file.size, file.checksums)
            for name, file in files.items()
        }


def open_checkpoint(place: str | os.PathLike[str]) -> Opened:
    """The committed checkpoint at `place`: of several saves of one name, the one that counts.

    Raises:
        CheckpointError: there is none.
    """
    root, name = parted(place)
    try:
        storage = open_storage(root)
        folder = current(storage, name)
        return Opened(storage, folder, open_manifest(storage, folder))
    except OSError as error:
        raise CheckpointError(f"{os.fspath(place)}: cannot be read ({error})") from error
