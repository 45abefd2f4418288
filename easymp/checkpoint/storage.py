"""A folder that holds checkpoints, on this machine or behind a URL: the operations that all else is built on."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..errors import CheckpointError
from .blocks import Part, Runs, Tick, block_count, by_block, no_tick

PATH = re.compile(r"(?:(?!\.{1,2}(?:/|\Z))[^/\0]+(?:/(?=[^/])|\Z))*", re.DOTALL)
"""Names below a folder. They may come from a manifest, so none leads out of it."""


class Claim(Protocol):
    """This process alone writes a checkpoint, until `release`.

    Attributes:
        left: what the owner before said of itself, if it died without a release.
    """

    left: Mapping[str, Any]

    def release(self) -> None: ...


class Storage(ABC):
    """A folder. Names of files and folders are relative to it, with ``/`` between words.

    Errors of the operating system (OSError) pass through.

    Attributes:
        place: the folder, as a user would type it.
        renames: whether a folder can be renamed atomically. Elsewhere only COMMIT says whether a checkpoint exists.
    """

    place: str
    renames: bool

    # -- contents

    @abstractmethod
    def put(self, name: str, parts: Iterable[Part], size: int, tick: Tick = no_tick) -> tuple[int, ...]:
        """Write a new file of `size` bytes, durably; returns the CRC-32 of each BLOCK. An existing file is an error.

        `tick` is told how many more bytes are written, now and then.
        """

    @abstractmethod
    def head(self, name: str, count: int) -> bytes:
        """The first `count` bytes of a file, or all where it has fewer."""

    def get(self, name: str, limit: int) -> bytes:
        """A whole small file; one of more than `limit` bytes is a CheckpointError."""
        content = self.head(name, limit + 1)
        if len(content) > limit:
            raise CheckpointError(
                f"{self.place}/{name}: more than {limit} bytes, and such a file has fewer: easymp did not write it"
            )
        return content

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a regular file; None where there is none."""

    def fetch(
        self,
        name: str,
        size: int,
        checksums: Sequence[int] | None,
        wanted: Sequence[tuple[int, memoryview]],
        tick: Tick = no_tick,
    ) -> None:
        """Fill each buffer of `wanted` (place in the file, target) and verify every BLOCK that is touched.

        `wanted` is sorted and does not overlap; an empty one reads nothing. `checksums` are None for a file of another program: its size
        is checked, and only what is wanted is read.

        Raises:
            CheckpointError: a file that is missing, of another size, or not what was written; which block.
        """
        self._read(name, size, checksums, by_block(wanted, size, f"{self.place}/{name}"), tick)

    def verify(
        self,
        name: str,
        size: int,
        checksums: Sequence[int],
        tick: Tick = no_tick,
        numbers: Iterable[int] | None = None,
    ) -> None:
        """Read and check these blocks of the file, or all; raises as `fetch`."""
        chosen = range(block_count(size)) if numbers is None else numbers
        self._read(name, size, checksums, ((number, []) for number in chosen), tick)

    @abstractmethod
    def _read(
        self,
        name: str,
        size: int,
        checksums: Sequence[int] | None,
        tasks: Iterable[tuple[int, Runs]],
        tick: Tick,
    ) -> None: ...

    @abstractmethod
    def held(self) -> AbstractContextManager[bool]:
        """Whether reading a file twice costs little more than once. Within the block the second time reads the same file."""

    # -- names

    @abstractmethod
    def path(self, name: str) -> str | None:
        """Where a file or folder is for programs of this machine; None behind a URL."""

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Sorted names of files and folders right in `folder`; none where there is no such folder."""

    @abstractmethod
    def modified(self, name: str) -> float:
        """When a file or folder was last written to, in seconds since the epoch."""

    @abstractmethod
    def make(self, folder: str) -> None:
        """A new folder, and those above it; an existing one is a FileExistsError."""

    @abstractmethod
    def sync(self, folder: str = "") -> None:
        """Make changes of the names in `folder` durable."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a folder atomically; `new` does not exist. Only where `renames`."""

    @abstractmethod
    def move(self, old: str, new: str) -> None:
        """Rename a checkpoint's folder, by copies where need be; a kill leaves at least one with COMMIT."""

    @abstractmethod
    def supplant(self, old: str, new: str) -> None:
        """Rename a file atomically, in the place of one that has the name. Only where `renames`."""

    @abstractmethod
    def exchange(self, one: str, other: str) -> bool:
        """Swap the names of two folders atomically; False where the file system cannot."""

    @abstractmethod
    def replace(self, name: str, content: bytes) -> None:
        """Give a small file this content, atomically and durably."""

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Remove a folder with its content, COMMIT first, or a file. One that does not exist is no error."""

    @abstractmethod
    def claim(self, checkpoint: str, folder: str = "") -> Claim:
        """Let only this process write `checkpoint` from now on; `folder` is told to others with who it is.

        Raises:
            CheckpointError: another one writes it; which.
        """
