"""A folder on this machine, or on a file system that its ranks share."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import CheckpointError
from .manifest import BLOCK, COMMIT
from .storage import Part, Tick


def nothing(count: int) -> None:
    pass


class LocalStorage:
    """As `Storage` says."""

    renames = True

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.place = os.fspath(place)
        self._root = Path(self.place)

    def put(self, name: str, parts: Iterable[Part], size: int, tick: Tick = nothing) -> tuple[int, ...]:
        checksums, crc, left = [], 0, BLOCK
        descriptor = os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:
                    count = os.write(descriptor, view[:left])
                    crc = zlib.crc32(view[:count], crc)
                    left -= count
                    view = view[count:]
                    tick(count)
                    if not left:
                        checksums.append(crc)
                        crc, left = 0, BLOCK
            if left < BLOCK:
                checksums.append(crc)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return tuple(checksums)

    def get(self, name: str, limit: int) -> bytes:
        content = self.head(name, limit + 1)
        if len(content) > limit:
            raise CheckpointError(f"{self._root / name}: more than {limit} bytes")
        return content

    def head(self, name: str, count: int) -> bytes:
        with open(self._root / name, "rb") as file:
            return file.read(count)

    def size(self, name: str) -> int | None:
        try:
            found = os.lstat(self._root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def fetch(
        self,
        name: str,
        size: int,
        checksums: Sequence[int] | None,
        wanted: Sequence[tuple[int, memoryview]],
        tick: Tick = nothing,
    ) -> None:
        if self.size(name) != size:
            raise CheckpointError(f"{self._root / name}: {self.size(name)} bytes, and {size} were written")
        if checksums is None:
            self._read(name, wanted, tick)
            return
        with open(self._root / name, "rb") as file:
            number = -1
            block = b""
            for begin, view in wanted:
                at, end = begin, begin + len(view)
                while at < end:
                    if at // BLOCK != number:
                        number = at // BLOCK
                        file.seek(number * BLOCK)
                        block = file.read(min(BLOCK, size - number * BLOCK))
                        if zlib.crc32(block) != checksums[number]:
                            raise CheckpointError(f"{self._root / name}: block {number} is not what was written")
                        tick(len(block))
                    part = block[at % BLOCK : at % BLOCK + end - at]
                    view[at - begin : at - begin + len(part)] = part
                    at += len(part)

    def _read(self, name: str, wanted: Sequence[tuple[int, memoryview]], tick: Tick) -> None:
        with open(self._root / name, "rb", buffering=0) as file:
            for begin, view in wanted:
                file.seek(begin)
                at = 0
                while at < len(view):
                    count = file.readinto(view[at : at + BLOCK])
                    if not count:
                        raise CheckpointError(f"{self._root / name}: ends at byte {begin + at}, while it is being read")
                    at += count
                    tick(count)

    def verify(self, name: str, size: int, checksums: Sequence[int], tick: Tick = nothing) -> None:
        if self.size(name) != size:
            raise CheckpointError(f"{self._root / name}: {self.size(name)} bytes, and {size} were written")
        with open(self._root / name, "rb") as file:
            for number, crc in enumerate(checksums):
                if zlib.crc32(file.read(BLOCK)) != crc:
                    raise CheckpointError(f"{self._root / name}: block {number} is not what was written")

    def list(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make(self, folder: str) -> None:
        (self._root / folder).parent.mkdir(parents=True, exist_ok=True)
        (self._root / folder).mkdir()

    def sync(self, folder: str = "") -> None:
        descriptor = os.open(self._root / folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        os.rename(self._root / old, self._root / new)

    def exchange(self, one: str, other: str) -> bool:
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        names = [os.fsencode(self._root / n) for n in (one, other)]
        return call is not None and call(-100, names[0], -100, names[1], 2) == 0  # AT_FDCWD, RENAME_EXCHANGE

    def replace(self, name: str, content: bytes) -> None:
        fresh = f"{name}.{os.getpid()}.new"
        self.put(fresh, [content], len(content))
        os.replace(self._root / fresh, self._root / name)
        self.sync(os.path.dirname(name))

    def remove(self, folder: str) -> None:
        path = self._root / folder
        try:
            (path / COMMIT).unlink(missing_ok=True)
            shutil.rmtree(path)
        except NotADirectoryError:
            path.unlink()
        except FileNotFoundError:
            pass

    def modified(self, name: str) -> float:
        return os.stat(self._root / name).st_mtime
