"""A folder behind a URL, by fsspec: object stores, and other machines' file systems.

There are no renames and no order between files, so only COMMIT says what exists. A file appears complete or not at all: one larger than a
block is streamed in parts and committed at its end. fsspec and its packages know credentials and addresses. No listing is cached.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC
from functools import cache, partial
from io import BytesIO
from itertools import islice
from typing import Any, TypeVar

from ..base.rng import isolated
from ..errors import CheckpointError
from . import storage, storage_local
from .manifest import BLOCK, COMMIT
from .storage import Part, Runs, SourceFile, Storage, Tick

T = TypeVar("T")
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "cos", "memory"}
"""Protocols where a folder is only a prefix of names, and one call stores a small file atomically."""
MOST_PARTS = 9_000  # of one upload; S3 takes 10,000
AT_ONCE = 3  # blocks that are asked for together, and lie in memory until they are checked
GAP = 2**16  # bytes that are read along, rather than ask twice
CODES = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    NotADirectoryError: errno.ENOTDIR,
    IsADirectoryError: errno.EISDIR,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
}
"""Clients raise these without a number; with it they keep their type and can carry the URL."""


class RemoteStorage(Storage):
    """See `Storage`. An error of a store's client that is not an OSError becomes one (EIO), with its words."""

    renames = False

    def __init__(self, place: str) -> None:
        import fsspec  # slow to import, and only URLs need it

        self.place = storage.shown(place)
        try:
            for kind in place.partition("://")[0].split("::"):
                _import_client(kind)
            self._fs, self._root = fsspec.url_to_fs(place)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{self.place}: {error}. Install the package that fsspec needs for it (pip install 'easymp[s3]' for s3://)"
            ) from None
        kinds = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._folders = not kinds & OBJECT_STORES

    # -- contents

    def put(
        self, name: str, parts: Iterable[Part], size: int, tick: Tick = storage.no_tick
    ) -> tuple[int, ...]:
        path = self._path(name)
        if self._info(path) is not None:
            raise FileExistsError(errno.EEXIST, "the file exists, and is not written over", self._url(path))
        checksums = self._write(path, parts, size, tick)
        if self.size(name) != size:
            raise OSError(errno.EIO, f"{self.size(name)} bytes arrived of {size}", self._url(path))
        return checksums

    def replace(self, name: str, content: bytes) -> None:
        self._write(self._path(name), [content], len(content))

    def _write(
        self, path: str, parts: Iterable[Part], size: int, tick: Tick = storage.no_tick
    ) -> tuple[int, ...]:
        checksums, total = [0] * storage.block_count(size), 0
        whole = size <= BLOCK and not self._folders
        part = max(BLOCK, -(-size // MOST_PARTS))
        create = partial(self._fs.open, path, "wb", block_size=part, autocommit=False)
        file: Any = BytesIO() if whole else self._do("create", path, create)
        try:
            for group in storage.exactly(storage.cut(parts, storage.PIECE), size, self._url(path)):
                for view in group:
                    checksums[total // BLOCK] = storage.crc32()(view, checksums[total // BLOCK])
                self._do("write", path, file.write, b"".join(group) if len(group) > 1 else group[0])
                count = sum(map(len, group))
                total += count
                tick(count)
            if whole:
                self._do("replace", path, self._fs.pipe_file, path, file.getvalue())
            else:
                self._do("close", path, file.close)
                self._do("replace", path, file.commit)
        except BaseException:
            if not whole:
                self._abort(path, file)
            raise
        return tuple(checksums)

    def _abort(self, path: str, file: Any) -> None:
        """Abort an upload and remove its parts."""
        # fsspec would complete its own buffered files at their end.
        done = partial(setattr, file, "closed", True)
        for step in (file.discard, done, file.close, partial(self._fs.rm_file, path)):
            with suppress(Exception):
                step()

    def head(self, name: str, count: int) -> bytes:
        path, found = self._path(name), self.size(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", self._url(path))
        if not min(count, found):
            return b""  # some stores refuse an empty range
        return self._do("read", path, partial(self._fs.cat_file, path, start=0, end=min(count, found)))

    def size(self, name: str) -> int | None:
        info = self._info(self._path(name))
        return None if info is None or info["type"] != "file" or info.get("islink") else info["size"]

    def held(self) -> AbstractContextManager[bool]:
        return nullcontext(False)  # each reading comes over the network

    def read(self, file: SourceFile, tasks: Iterable[tuple[int, Runs]], tick: Tick) -> None:
        path, checked = self._path(file.name), file.checksums is not None
        file.check_size(self.size(file.name))
        tasks = iter(tasks)
        while some := list(islice(tasks, AT_ONCE)):
            spans: list[tuple[int, int, int, Runs]] = []  # block, first byte, the byte after the last, runs
            for number, runs in some:
                if checked:
                    spans.append((number, number * BLOCK, min((number + 1) * BLOCK, file.size), runs))
                else:
                    spans.extend((number, *span) for span in _joined(runs))
            _, starts, ends, _ = zip(*spans)
            ask = partial(self._fs.cat_ranges, [path] * len(spans), [*starts], [*ends], on_error="raise")
            for (number, begin, end, runs), content in zip(spans, self._do("read", path, ask)):
                if len(content) != end - begin:
                    raise CheckpointError(f"{file}: {len(content)} bytes came of {end - begin}: try again")
                if checked:
                    file.check(number, storage.crc32()(content, 0))
                for at, view in runs:
                    view[:] = memoryview(content)[at - begin : at - begin + len(view)]
                tick(end - begin if checked else sum(len(view) for _, view in runs))

    # -- names

    def path(self, name: str) -> None:
        self._path(name)

    def list(self, folder: str = "") -> list[str]:
        path = self._path(folder)
        self._fs.invalidate_cache()
        try:
            found = self._do("list", path, partial(self._fs.ls, path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {str(name).rstrip("/") for name in found} - {path.rstrip("/")}  # some list a file itself
        return sorted(name.rpartition("/")[2] for name in names)

    def modified(self, name: str) -> float:
        path = self._path(name)
        info = self._info(path)
        files = [path] if info is not None else []
        if info is not None and info["type"] != "file" and not self._folders:
            files = self._do("list", path, self._fs.find, path)
        if not files:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", self._url(path))
        times = [self._do("stat", file, self._fs.modified, file) for file in files]
        return max((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() for time in times)

    def make(self, folder: str) -> None:
        path = self._path(folder)
        if self._folders:
            self._do("mkdir", path, partial(self._fs.makedirs, path, exist_ok=False))
        elif self.list(folder) or self._info(path) is not None:
            raise FileExistsError(errno.EEXIST, "the folder exists", self._url(path))

    def sync(self, folder: str = "") -> None:
        self._path(folder)  # names are durable at once

    def move(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        if self._folders:
            self._do("rename", source, partial(self._fs.mv, source, target, recursive=True))
            return
        commit = f"{source}/{COMMIT}"
        for file in sorted(self._do("list", source, self._fs.find, source), key=commit.__eq__):
            self._do("copy", file, self._fs.cp_file, file, target + file.removeprefix(source))
        self.remove(old)

    def remove(self, folder: str) -> None:
        path = self._path(folder)
        if not folder:
            raise CheckpointError(f"{self._url(path)}: the folder of all checkpoints is not removed")
        info = self._info(path)
        if info is None:
            return
        with suppress(FileNotFoundError):  # another rank may be quicker
            if info["type"] == "file":
                self._do("unlink", path, self._fs.rm_file, path)
                return
            commit = f"{path}/{COMMIT}"
            if self._info(commit) is not None:
                self._do("unlink", commit, self._fs.rm_file, commit)
            self._fs.invalidate_cache()
            self._do("rmdir", path, partial(self._fs.rm, path, recursive=True))

    # -- the client

    def _path(self, name: str) -> str:
        if not storage.PATH.fullmatch(name):
            raise self.refusal(name)
        return "/".join([self._root.rstrip("/"), *([name] if name else [])])

    def _url(self, path: str) -> str:
        return self._fs.unstrip_protocol(path)  # without a password

    def _info(self, path: str) -> dict[str, Any] | None:
        self._fs.invalidate_cache()
        try:
            return self._do("stat", path, self._fs.info, path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _do(self, operation: str, path: str, call: Callable[..., T], *arguments: Any) -> T:
        try:
            return storage_local.do(operation, self._url(path), call, *arguments)
        except CheckpointError:
            raise
        except OSError as error:
            if error.errno is not None:
                raise
            code = next((code for kind, code in CODES.items() if isinstance(error, kind)), errno.EIO)
            raise OSError(code, str(error) or os.strerror(code), self._url(path)) from error
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self._url(path)) from error


@cache
def _import_client(kind: str) -> None:
    """Import the client of URLs of this `kind`, with Python's random stream put back afterwards."""
    import fsspec

    with isolated():
        fsspec.get_filesystem_class(kind)


def _joined(runs: Runs) -> Iterator[tuple[int, int, Runs]]:
    """Join runs that are close together: yields the first byte, the byte after the last, and the runs."""
    near: Runs = []
    for at, view in [*runs, (sys.maxsize, memoryview(b""))]:
        if near and at - near[-1][0] - len(near[-1][1]) > GAP:
            yield near[0][0], near[-1][0] + len(near[-1][1]), near
            near = []
        near.append((at, view))
