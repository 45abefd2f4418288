"""The file on the disk: looked at before anybody is asked anything, replaced at once, with the one before kept."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ...errors import SettingError


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
            raise SettingError(
                f"there is no folder {folder} for {path}: make it first, or name another file by --file"
            )
        if path.is_dir():
            raise SettingError(f"{path} is a folder: name a file by --file, such as {path / 'easymp.toml'}")
        if path.exists() and not path.is_file():
            raise SettingError(
                f"{path} is no ordinary file, and would be replaced by one: name another by --file"
            )
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
            raise SettingError(
                f"{there.path} was changed meanwhile and is left as it is: run the command again"
            )
        like = None if there.before is None else place.stat()
        kept = None if like is None else _keep(place, there.before or b"", like)
        temporary = place.with_name(f".{place.name}-{os.getpid()}")
        try:
            _put(temporary, text.encode(), like)
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


def _keep(place: Path, content: bytes, like: os.stat_result) -> Path:
    """A copy beside it, under the first name that is free."""
    for number in count():
        name = place.with_name(f"{place.name}.bak{f'.{number}' if number else ''}")
        try:
            _put(name, content, like)
        except FileExistsError:
            continue
        return name
    raise AssertionError("numbers do not end")


def _put(path: Path, content: bytes, like: os.stat_result | None) -> None:
    """A new file with this content, on the disk; or none. Others may do with it what they may with the file `like`."""
    with open(path, "xb") as file:
        try:
            if like is not None:
                _give(path, like)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


def _give(path: Path, like: os.stat_result) -> None:
    if os.name == "posix" and os.geteuid() == 0:  # nobody else may give files away
        os.chown(path, like.st_uid, like.st_gid)
    os.chmod(path, like.st_mode & 0o7777)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _trouble(path: Path, error: OSError) -> str:
    return f"{path} cannot be written: {error.strerror or error}; name another file by --file"
