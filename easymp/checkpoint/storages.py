"""A storage by what a user types: a path, or a URL."""

from __future__ import annotations

import os

from ..errors import CheckpointError
from .local import LocalStorage
from .remote import RemoteStorage
from .storage import Storage


def open_storage(place: str | os.PathLike[str]) -> Storage:
    """The folder `place`: a path or ``file://`` URL on this machine, any other URL by fsspec. Nothing is read or made.

    Raises:
        CheckpointError: a URL of a kind that nobody here knows, or a ``file://`` URL of another machine.
    """
    path = os.fspath(place)
    kind, mark, rest = path.partition("://")
    if not mark or "/" in kind:
        return LocalStorage(path)
    if kind not in ("file", "local"):
        return RemoteStorage(path)
    rest = rest.removeprefix("localhost")
    if not rest.startswith("/"):
        raise CheckpointError(
            f"{path} names a machine, not a folder: write {kind}:///{rest}, or the path alone"
        )
    return LocalStorage(rest)


def parted(place: str | os.PathLike[str]) -> tuple[str, str]:
    """The folder above a file or folder, and its name there; where a link leads, if it leads to a folder."""
    said = os.fspath(place)
    kind, mark, rest = said.partition("://")
    if not mark:
        path = os.path.abspath(said)
        return os.path.split(os.path.realpath(path) if os.path.isdir(path) else path)
    folder, _, name = rest.rstrip("/").rpartition("/")
    return f"{kind}://{folder}", name
