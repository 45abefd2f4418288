"""The file on the disk: looked at before anybody is asked anything, replaced at once, with the one before kept."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ..errors import SettingError


@dataclass(frozen=True)
class Target:
    """Where the file goes, and what is there.

    Attributes:
        path: as it was named.
        before: its bytes; None where there is none.
    """

    path: Path
    before: bytes | None

    @property
    def real(self) -> Path:
        """The file itself, where `path` is a link to it."""
        return self.path.resolve()


def target(path: Path, writable: bool = True) -> Target:
    """Look at `path`.

    Args:
        writable: make sure that it can be written, by a file that is removed at once.

    Raises:
        SettingError: it cannot be read or written, with the reason.
    """
    try:
        folder = path.resolve().parent
        if not folder.is_dir():
            raise SettingError(f"there is no folder {folder} for {path}: make it first, or name another file by --file")
        if path.is_dir():
            raise SettingError(f"{path} is a folder: name a file by --file, such as {path / 'easymp.toml'}")
        before = path.read_bytes() if path.exists() else None
        if writable:
            with tempfile.TemporaryFile(dir=folder, prefix=".easymp-"):
                pass
    except OSError as error:
        raise SettingError(_trouble(path, error)) from error
    return Target(path, before)


def write(there: Target, text: str) -> Path | None:
    """Put `text` there, and return the name under which the file before it is kept.

    The text is on the disk before it has the name, so that whoever reads finds the old file or the new one, whole.

    Raises:
        SettingError: the file was changed since it was looked at, or cannot be written; it is as it was.
    """
    place = there.real
    try:
        if (place.read_bytes() if place.exists() else None) != there.before:
            raise SettingError(f"{there.path} was changed meanwhile and is left as it is: run the command again")
        kept = None if there.before is None else _keep(place, there.before)
        mode = None if there.before is None else place.stat().st_mode & 0o7777
        temporary = place.with_name(f".{place.name}-{os.getpid()}")
        try:
            _put(temporary, text.encode(), mode)
            os.replace(temporary, place)
        except BaseException:  # KeyboardInterrupt, too
            temporary.unlink(missing_ok=True)
            if kept is not None:
                kept.unlink()
            raise
        _sync_folder(place.parent)
    except OSError as error:
        raise SettingError(_trouble(there.path, error)) from error
    return kept


def _keep(place: Path, content: bytes) -> Path:
    """A copy beside it, under the first name that is free."""
    for number in count():
        name = place.with_name(f"{place.name}.bak{f'.{number}' if number else ''}")
        try:
            _put(name, content, place.stat().st_mode & 0o7777)
        except FileExistsError:
            continue
        return name
    raise AssertionError("numbers do not end")


def _put(path: Path, content: bytes, mode: int | None) -> None:
    """A new file with this content, on the disk; or none."""
    with open(path, "xb") as file:
        try:
            if mode is not None:
                os.chmod(path, mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _trouble(path: Path, error: OSError) -> str:
    return f"{path} cannot be written: {error.strerror or error} ({error.filename or path}); name another file by --file"
