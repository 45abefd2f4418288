"""Where checkpoints lie: a folder on this machine or behind a URL. Nothing else of this room touches files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..errors import CheckpointError

Part = bytes | memoryview
Tick = Callable[[int], None]


def nothing(count: int) -> None:
    """A tick that nobody hears."""


class Claim(Protocol):
    """A checkpoint is this process's to write, until `release`.

    Attributes:
        left: what the owner before said, if it died and its words are still there.
    """

    left: Mapping[str, Any]

    def release(self) -> None: ...


def components(name: str, place: str) -> list[str]:
    """The folders and the last word of a name; none of "". Names come from manifests, too: none leads out of `place`.

    Raises:
        CheckpointError: a name that might.
    """
    words = name.split("/") if name else []
    if "\0" in name or any(word in ("", ".", "..") for word in words):
        raise CheckpointError(f"{name!r} is no name of a file below {place}: use words with / between them")
    return words


class Storage(Protocol):
    """A folder, and what is done to the files below it. Names are relative to it, with ``/`` between folders.

    Errors of the operating system (OSError) pass through; who called knows what they mean.

    Attributes:
        place: the folder, as a user would type it.
        renames: whether a folder can be renamed, at once and whole. Elsewhere only COMMIT says whether a checkpoint exists.
    """

    place: str
    renames: bool

    def path(self, name: str) -> str | None:
        """Where a file or folder is for programs of this machine; None behind a URL."""
        ...

    def put(self, name: str, parts: Iterable[Part], size: int, tick: Tick = nothing) -> tuple[int, ...]:
        """Write a new file of `size` bytes, `parts` one after the other; it is on disk when this returns.

        Returns the CRC-32 of each BLOCK. `tick` is told how many more bytes are written, now and then. A file that was there is
        an error.
        """
        ...

    def get(self, name: str, limit: int) -> bytes:
        """A small file, whole; one of more than `limit` bytes is an error (CheckpointError)."""
        ...

    def head(self, name: str, count: int) -> bytes:
        """The first `count` bytes of a file, or all where it has fewer."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes in a file; None where there is none (folders, links and devices are none)."""
        ...

    def fetch(
        self,
        name: str,
        size: int,
        checksums: Sequence[int] | None,
        wanted: Sequence[tuple[int, memoryview]],
        tick: Tick = nothing,
    ) -> None:
        """Fill each buffer of `wanted` with the bytes of the file from its first place on. Every BLOCK that is touched is verified.

        `wanted` is sorted and does not overlap. An empty `wanted` reads nothing. `checksums` are None for a file that somebody else
        wrote, of which none are known: its size is checked, and only what is wanted is read.

        Raises:
            CheckpointError: a file that is missing, of another size, or not what was written; which block.
        """
        ...

    def verify(
        self,
        name: str,
        size: int,
        checksums: Sequence[int],
        tick: Tick = nothing,
        numbers: Iterable[int] | None = None,
    ) -> None:
        """Read and check these blocks of the file, or all; raises as `fetch`."""
        ...

    def held(self) -> AbstractContextManager[bool]:
        """Whether reading a file twice costs little more than once; within the block, the second time finds the same file.

        Also one that got another name meanwhile, or none.
        """
        ...

    def list(self, folder: str = "") -> list[str]:
        """Names of files and folders right in `folder`, sorted; none where there is no such folder."""
        ...

    def make(self, folder: str) -> None:
        """A new folder, and what is missing above it; one that is there is an error (FileExistsError)."""
        ...

    def sync(self, folder: str = "") -> None:
        """What happened to the names in `folder` is on disk when this returns."""
        ...

    def rename(self, old: str, new: str) -> None:
        """`new` is not there. Only where `renames`."""
        ...

    def move(self, old: str, new: str) -> None:
        """A checkpoint's folder gets the name `new`, which is not there. If the process is killed, there is at least one with COMMIT."""
        ...

    def supplant(self, old: str, new: str) -> None:
        """The file `old` gets the name `new`, at once, in the place of a file that has it. Only where `renames`."""
        ...

    def exchange(self, one: str, other: str) -> bool:
        """Two folders swap names, at once; False, and nothing done, where the file system cannot."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """A small file has this content, at once, and on disk when this returns."""
        ...

    def remove(self, folder: str) -> None:
        """A folder and what is in it, or a file; COMMIT goes first, so that half of one is none. One that is not there is no error."""
        ...

    def claim(self, checkpoint: str, said: bytes) -> Claim:
        """Only this process writes `checkpoint` from now on; `said` tells the others who it is (`claims.words`).

        Raises:
            CheckpointError: another one does, and who that is.
        """
        ...

    def modified(self, name: str) -> float:
        """When a file or folder was last written to, in seconds since the epoch."""
        ...
