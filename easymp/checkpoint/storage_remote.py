"""A folder behind a URL, by fsspec: object stores, and other machines' file systems.

There are no renames and no order between files, so only COMMIT says what exists. A file appears complete or not at all:
one larger than a block is streamed in parts and committed at its end. fsspec and its packages know credentials and
addresses. No listing is cached.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from io import BytesIO
from itertools import islice
from typing import Any, TypeVar

from ..base.rng import isolated
from ..errors import CheckpointError, redact
from . import storage
from .manifest import BLOCK, COMMIT
from .progress import Tick, ignore
from .storage import Bytes, SourceFile, Targets, block_count, check_name, crc32, regroup_exactly

T = TypeVar("T")
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "cos", "memory"}
"""Protocols where a folder is only a prefix of names, and one call stores a small file atomically."""
CREDENTIALS = re.compile(r"(?:s3a?|gcs|gs)://(?!arn:)[^/]*[:@]")
"""A name of a bucket that is none; clients would repeat it, and the secret in it, in their own words."""
MOST_PARTS = 9_000  # of one upload; S3 takes 10,000
BLOCKS_AT_ONCE = 3  # that are asked for together, and lie in memory until they are checked
CODES = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    NotADirectoryError: errno.ENOTDIR,
    IsADirectoryError: errno.EISDIR,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
}
"""Clients raise these without a number; with it they keep their type and can carry the URL."""


class RemoteStorage:
    """The folder at the URL `root`, with the methods of `LocalStorage`.

    An error of a store's client that is not an OSError becomes one (EIO), with its words.
    """

    renames = False

    def __init__(self, root: str) -> None:
        import fsspec  # slow to import, and only URLs need it

        self.root = redact(root)
        if CREDENTIALS.search(root):
            raise CheckpointError(
                f"{self.root} has credentials in front of its bucket, and object stores take none in a URL: put them "
                "where the store's client looks for them: its environment variables or its file of credentials"
            )
        try:
            for protocol in root.partition("://")[0].split("::"):
                with isolated():  # packages draw random numbers at import
                    fsspec.get_filesystem_class(protocol)
            self._fs, self._prefix = fsspec.url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{self.root}: {error}. Install the package that fsspec needs for it (pip install 'easymp[s3]' for "
                "s3://)"
            ) from None
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._has_folders = not protocols & OBJECT_STORES

    def put(self, name: str, parts: Iterable[Bytes], size: int, tick: Tick = ignore) -> tuple[int, ...]:
        path = self._path(name)
        if self._info(path) is not None:
            raise FileExistsError(errno.EEXIST, "the file exists, and is not written over", self._url(path))
        checksums = self._write(path, parts, size, tick)
        if (arrived := self.size(name)) != size:
            raise OSError(errno.EIO, f"{arrived} bytes arrived of {size}", self._url(path))
        return checksums

    def replace(self, name: str, parts: Iterable[Bytes], size: int, tick: Tick = ignore) -> None:
        self._write(self._path(name), parts, size, tick)

    def _write(self, path: str, parts: Iterable[Bytes], size: int, tick: Tick) -> tuple[int, ...]:
        checksums, total = [0] * block_count(size), 0
        in_one_call = size <= BLOCK and not self._has_folders
        part_size = max(BLOCK, -(-size // MOST_PARTS))
        create = partial(self._fs.open, path, "wb", block_size=part_size, autocommit=False)
        file: Any = BytesIO() if in_one_call else self._do("create", path, create)
        try:
            for group in regroup_exactly(parts, storage.PIECE, size, self._url(path)):
                for view in group:
                    checksums[total // BLOCK] = crc32()(view, checksums[total // BLOCK])
                self._do("write", path, file.write, b"".join(group) if len(group) > 1 else group[0])
                count = sum(map(len, group))
                total += count
                tick(count)
            if in_one_call:
                self._do("replace", path, self._fs.pipe_file, path, file.getvalue())
            else:
                self._do("close", path, file.close)
                self._do("replace", path, file.commit)
        except BaseException:
            if not in_one_call:
                # fsspec would complete its own buffered files at their end.
                mark_closed = partial(setattr, file, "closed", True)
                for step in (file.discard, mark_closed, file.close, partial(self._fs.rm_file, path)):
                    with suppress(Exception):
                        step()
            raise
        return tuple(checksums)

    def head(self, name: str, count: int) -> bytes:
        path, size = self._path(name), self.size(name)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", self._url(path))
        if not min(count, size):
            return b""  # some stores refuse an empty range
        content: bytes = self._do("read", path, partial(self._fs.cat_file, path, start=0, end=min(count, size)))
        return content

    def size(self, name: str) -> int | None:
        info = self._info(self._path(name))
        return None if info is None or info["type"] != "file" or info.get("islink") else info["size"]

    def files_kept_open(self) -> AbstractContextManager[bool]:
        return nullcontext(False)  # each reading comes over the network

    def read(self, file: SourceFile, blocks: Iterable[tuple[int, Targets]], tick: Tick) -> None:
        path, is_checked = self._path(file.name), file.checksums is not None
        file.check_size(self.size(file.name))
        blocks = iter(blocks)
        while batch := list(islice(blocks, BLOCKS_AT_ONCE)):
            if is_checked:
                ranges = [(block * BLOCK, min((block + 1) * BLOCK, file.size)) for block, _ in batch]
            else:
                ranges = [(targets[0][0], targets[-1][0] + len(targets[-1][1])) for _, targets in batch]
            starts, ends = zip(*ranges)
            fetch = partial(self._fs.cat_ranges, [path] * len(ranges), [*starts], [*ends], on_error="raise")
            for (block, targets), (begin, end), content in zip(batch, ranges, self._do("read", path, fetch)):
                if len(content) != end - begin:
                    raise CheckpointError(f"{file}: {len(content)} bytes came of {end - begin}: try again")
                if is_checked:
                    file.check_block(block, crc32()(content, 0))
                for offset, view in targets:
                    view[:] = memoryview(content)[offset - begin : offset - begin + len(view)]
                tick(end - begin if is_checked else sum(len(view) for _, view in targets))

    def list(self, folder: str = "") -> list[str]:
        path = self._path(folder)
        self._fs.invalidate_cache()
        try:
            paths = self._do("list", path, partial(self._fs.ls, path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {str(name).rstrip("/") for name in paths} - {path.rstrip("/")}  # some list a file itself
        return sorted(name.rpartition("/")[2] for name in names)

    def make(self, folder: str) -> None:
        path = self._path(folder)
        if self._has_folders:
            self._do("mkdir", path, partial(self._fs.makedirs, path, exist_ok=False))
        elif self.list(folder) or self._info(path) is not None:
            raise FileExistsError(errno.EEXIST, "the folder exists", self._url(path))

    def sync(self, folder: str = "") -> None:
        self._path(folder)  # names are durable at once

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError

    def move(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        if self._has_folders:
            self._do("rename", source, partial(self._fs.mv, source, target, recursive=True))
            return
        commit = f"{source}/{COMMIT}"
        for file in sorted(self._do("list", source, self._fs.find, source), key=commit.__eq__):
            self._do("copy", file, self._fs.cp_file, file, target + file.removeprefix(source))
        self.remove(old)

    def remove(self, name: str) -> None:
        path = self._path(name)
        if not name:
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

    def _path(self, name: str) -> str:
        check_name(self.root, name)
        prefix = self._prefix.rstrip("/")
        return f"{prefix}/{name}" if name else prefix

    def _url(self, path: str) -> str:
        return redact(self._fs.unstrip_protocol(path))

    def _info(self, path: str) -> dict[str, Any] | None:
        self._fs.invalidate_cache()
        try:
            info: dict[str, Any] = self._do("stat", path, self._fs.info, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return info

    def _do(self, operation: str, path: str, call: Callable[..., T], *arguments: Any) -> T:
        try:
            return storage.do(operation, self._url(path), call, *arguments)
        except CheckpointError:
            raise
        except OSError as error:
            if error.errno is not None:
                raise
            code = next((code for kind, code in CODES.items() if isinstance(error, kind)), errno.EIO)
            raise OSError(code, redact(str(error)) or os.strerror(code), self._url(path)) from error
        except Exception as error:
            raise OSError(errno.EIO, redact(f"{type(error).__name__}: {error}"), self._url(path)) from error
