"""A model of what a power failure leaves on a disk.

Operations are recorded on their way through `storage_local.do`. A write, or a change of names in a folder, is on the disk for certain
once that file, or that folder, was fsynced afterwards; until then it may be there or not, each by itself and in any order. So after each
operation there are many disks that a machine may find when it starts again. Changes of names are atomic (a swap happened or did not), which
every file system with a journal keeps. What was written of a file that was not fsynced may be there in part: what is missing is zeros,
or the end of the file.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

CHANGES = frozenset(
    ("mkdir", "create", "allocate", "write", "fsync", "fsync directory")
    + ("rename", "exchange", "replace", "copy", "unlink", "rmdir")
)
"""Operations of `storage_local.do` that change a disk; the others are open, close, read, list and stat."""
MANY = 5  # unsynced changes up to which every subset is tried
SAMPLES = 24  # subsets that are tried of more


class Step(NamedTuple):
    """An operation that succeeded."""

    operation: str
    path: str
    arguments: tuple[Any, ...]


class Recorder:
    """In the place of `storage_local.do`: keeps what changes anything, with its data."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def do(self, operation: str, path: str, call: Callable[..., Any], *arguments: Any) -> Any:
        data = b"".join(arguments[1]) if operation == "write" else b""
        value = None if operation.startswith("fsync") else call(*arguments)
        if operation == "write":
            self.steps.append(Step(operation, path, (data[:value], arguments[2])))
        elif operation == "exchange" and not value:
            pass
        elif operation in CHANGES and not path.endswith(".lock"):
            self.steps.append(Step(operation, path, arguments))
        return value


@dataclass(eq=False)
class Inode:
    """A file or a folder: `sure` is on the disk, `loose` may be."""

    sure: list[Any] = field(default_factory=list)
    loose: list[Any] = field(default_factory=list)
    folder: bool = False

    def sync(self) -> None:
        self.sure += self.loose
        self.loose = []


class Names(NamedTuple):
    """A change of a folder's names, at once: what each leads to from now on."""

    now: dict[str, Inode | None]


class Bytes(NamedTuple):
    at: int
    data: bytes


class Size(NamedTuple):
    least: int


class Disk:
    """What is in the folder `root`, in memory and on the disk."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._top = self._read(root)

    def _read(self, path: Path) -> Inode:
        """All that is there now is on the disk."""
        if path.is_dir():
            return Inode([Names({p.name: self._read(p)}) for p in sorted(path.iterdir())], folder=True)
        return Inode([Bytes(0, path.read_bytes())])

    def _at(self, path: str) -> Inode:
        inode = self._top
        for word in Path(path).relative_to(self._root).parts:
            found = entries(inode, inode.loose)[word]
            assert found is not None
            inode = found
        return inode

    def _names(self, path: str) -> tuple[Inode, str]:
        folder, name = os.path.split(path)
        return self._at(folder), name

    def apply(self, step: Step) -> None:
        operation, path, arguments = step
        if operation in ("mkdir", "create"):
            folder, name = self._names(path)
            folder.loose.append(Names({name: Inode(folder=operation == "mkdir")}))
        elif operation in ("unlink", "rmdir"):
            folder, name = self._names(path)
            folder.loose.append(Names({name: None}))
        elif operation in ("rename", "replace", "exchange"):
            (folder, old), (other, new) = (self._names(p) for p in arguments[:2])
            assert folder is other
            moved, there = self._at(arguments[0]), self._at(arguments[1]) if operation == "exchange" else None
            folder.loose.append(Names({old: there, new: moved}))
        elif operation == "write":
            self._at(path).loose.append(Bytes(arguments[1], arguments[0]))
        elif operation == "allocate":
            self._at(path).loose.append(Size(arguments[1]))
        else:
            assert operation in ("fsync", "fsync directory")
            self._at(path).sync()

    def _loose(self) -> list[tuple[Inode, int]]:
        """Changes that may be lost, of all that may be reached."""
        found, seen, waiting = [], set(), [self._top]
        while waiting:
            inode = waiting.pop()
            if id(inode) in seen:
                continue
            seen.add(id(inode))
            found += [(inode, i) for i in range(len(inode.loose))]
            for change in [*inode.sure, *inode.loose]:
                if isinstance(change, Names):
                    waiting += [to for to in change.now.values() if to is not None]
        return found

    def crashes(self, chance: random.Random) -> Iterator[dict[str, Any]]:
        """Trees that may be found after a power failure at this moment: name → bytes, or a tree."""
        loose = self._loose()
        for kept in subsets(len(loose), chance):
            there: dict[int, list[Any]] = {}
            for number in kept:
                inode, i = loose[number]
                there.setdefault(id(inode), []).append(inode.loose[i])
            yield tree(self._top, there)


def subsets(count: int, chance: random.Random) -> Iterator[Sequence[int]]:
    every = range(count)
    if count <= MANY:
        for size in range(count + 1):
            yield from itertools.combinations(every, size)
        return
    yield from ((), every)
    for one in every:
        yield (one,)
        yield [n for n in every if n != one]
        yield range(one)  # what came before it, and nothing since
    for _ in range(SAMPLES):
        yield [n for n in every if chance.random() < 0.5]


def entries(folder: Inode, more: Sequence[Names]) -> dict[str, Inode | None]:
    found: dict[str, Inode | None] = {}
    for change in [*folder.sure, *more]:
        found.update(change.now)
    return found


def tree(inode: Inode, there: dict[int, list[Any]]) -> Any:
    more = there.get(id(inode), [])
    if inode.folder:
        return {name: tree(to, there) for name, to in sorted(entries(inode, more).items()) if to is not None}
    content = bytearray()
    for change in [*inode.sure, *more]:
        least = change.least if isinstance(change, Size) else change.at + len(change.data)
        content.extend(bytes(max(0, least - len(content))))
        if isinstance(change, Bytes):
            content[change.at : change.at + len(change.data)] = change.data
    return bytes(content)


def put(found: dict[str, Any], root: Path) -> None:
    """Write a tree to the folder `root`."""
    root.mkdir()
    for name, there in found.items():
        if isinstance(there, dict):
            put(there, root / name)
        else:
            (root / name).write_bytes(there)
