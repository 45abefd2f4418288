"""Where checkpoints may go: whether a folder can be made, or what speaks a URL is installed, before a training finds out."""

from __future__ import annotations

import os
from pathlib import Path


def unusable(place: str) -> str:
    """Why nothing can be written to `place`, a folder or a URL of fsspec, or ``""``. Nothing is created, and no server asked."""
    if not place.isprintable():
        return f"{place!r} holds characters that no terminal shows: use a plain name"
    if "://" in place:
        return _protocol(place)
    there = Path(place)
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"{str(there)!r} is a file, so there can be no folder {place}: choose another name"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there.absolute()} cannot be written to by this user: choose another folder"
    return ""


def _protocol(url: str) -> str:
    import fsspec  # late: only URLs need it

    name = url.split("://")[0]
    try:
        fsspec.get_filesystem_class(name)
    except ValueError:
        return f"fsspec knows no protocol {name!r}: write a folder, or a URL such as s3://bucket/runs"
    except ImportError as error:
        return f"{name}:// needs a package that is not installed: {error}"
    return ""
