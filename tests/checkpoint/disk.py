"""A model of what a power failure leaves on a disk.

Operations are recorded on their way through `storage.do`. A write, or a change of names in a folder, is on the
disk for certain once that file, or that folder, was fsynced afterwards; until then it may be there or not, each by
itself and in any order. So after each operation there are many disks that a machine may find when it starts again.
Changes of names are atomic, which every file system with a journal keeps. What was written
of a file that was not fsynced may be there in part: what is missing is zeros, or the end of the file.
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
    + ("rename", "replace", "copy", "unlink", "rmdir")
)
"""Operations of `storage.do` that change a disk; the others are open, close, read, list and stat."""
MANY = 5  # unsynced changes up to which every subset is tried
SAMPLES = 24  # subsets that are tried of more


class Step(NamedTuple):
    """An operation that succeeded."""

    operation: str
    path: str
    arguments: tuple[Any, ...]


class Recorder:
    """In the place of `storage.do`: keeps what changes anything, with its data."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def do(self, operation: str, path: str, call: Callable[..., Any], *arguments: Any) -> Any:
        data = b"".join(arguments[1]) if operation == "write" else b""
        value = None if operation.startswith("fsync") else call(*arguments)
        if operation == "write":
            self.steps.append(Step(operation, path, (data[:value], arguments[2])))
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

    entries: dict[str, Inode | None]


class Bytes(NamedTuple):
    at: int
    data: bytes


class Size(NamedTuple):
    minimum: int


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
        for name in Path(path).relative_to(self._root).parts:
            child = entries(inode, inode.loose)[name]
            assert child is not None
            inode = child
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
        elif operation in ("rename", "replace"):
            (folder, old), (target_folder, new) = (self._names(p) for p in arguments[:2])
            assert folder is target_folder
            folder.loose.append(Names({old: None, new: self._at(arguments[0])}))
        elif operation == "write":
            self._at(path).loose.append(Bytes(arguments[1], arguments[0]))
        elif operation == "allocate":
            self._at(path).loose.append(Size(arguments[1]))
        else:
            assert operation in ("fsync", "fsync directory")
            self._at(path).sync()

    def _loose(self) -> list[tuple[Inode, int]]:
        """Changes that may be lost, of all that may be reached."""
        loose, visited, waiting = [], set(), [self._top]
        while waiting:
            inode = waiting.pop()
            if id(inode) in visited:
                continue
            visited.add(id(inode))
            loose += [(inode, i) for i in range(len(inode.loose))]
            for change in [*inode.sure, *inode.loose]:
                if isinstance(change, Names):
                    waiting += [to for to in change.entries.values() if to is not None]
        return loose

    def crashes(self, chance: random.Random) -> Iterator[dict[str, Any]]:
        """Trees that may be found after a power failure at this moment: name → bytes, or a tree."""
        loose = self._loose()
        for indices in subsets(len(loose), chance):
            changes_by_inode: dict[int, list[Any]] = {}
            for number in indices:
                inode, i = loose[number]
                changes_by_inode.setdefault(id(inode), []).append(inode.loose[i])
            yield tree(self._top, changes_by_inode)


def subsets(count: int, chance: random.Random) -> Iterator[Sequence[int]]:
    indices = range(count)
    if count <= MANY:
        for size in range(count + 1):
            yield from itertools.combinations(indices, size)
        return
    yield from ((), indices)
    for one in indices:
        yield (one,)
        yield [n for n in indices if n != one]
        yield range(one)  # what came before it, and nothing since
    for _ in range(SAMPLES):
        yield [n for n in indices if chance.random() < 0.5]


def entries(folder: Inode, changes: Sequence[Names]) -> dict[str, Inode | None]:
    by_name: dict[str, Inode | None] = {}
    for change in [*folder.sure, *changes]:
        by_name.update(change.entries)
    return by_name


def tree(inode: Inode, changes_by_inode: dict[int, list[Any]]) -> Any:
    changes = changes_by_inode.get(id(inode), [])
    if inode.folder:
        return {
            name: tree(to, changes_by_inode) for name, to in sorted(entries(inode, changes).items()) if to is not None
        }
    content = bytearray()
    for change in [*inode.sure, *changes]:
        size = change.minimum if isinstance(change, Size) else change.at + len(change.data)
        content.extend(bytes(max(0, size - len(content))))
        if isinstance(change, Bytes):
            content[change.at : change.at + len(change.data)] = change.data
    return bytes(content)


def put(content: dict[str, Any], root: Path) -> None:
    """Write a tree to the folder `root`."""
    root.mkdir()
    for name, entry in content.items():
        if isinstance(entry, dict):
            put(entry, root / name)
        else:
            (root / name).write_bytes(entry)
