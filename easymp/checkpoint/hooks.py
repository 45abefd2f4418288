"""The local folders that hooks write to and read from, wherever the checkpoint itself lies."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ..distributed import World
from ..errors import CheckpointError
from .blocks import Part, Tick, no_tick
from .commit import check_name
from .folders import Opened, SourceFile, current, inside, open_manifest, temporary, writing
from .lineage import take_away
from .lock import lock_of
from .manifest import BLOCK, FileRecord, check_extra
from .snapshot import first, trouble
from .storage import Storage
from .storage_local import LocalStorage

PREFIX = "easymp-"  # of folders among the system's temporary files


class HookFolder:
    """An empty folder of this rank's own, whose last name is the checkpoint's; what hooks write there, `collect` hands to a save.

    It lies beside the checkpoint, under a temporary name that the next save cleans up if this process is killed; if that is behind a URL,
    among the system's temporary files (TMPDIR). All ranks make it together.

    Attributes:
        path: of the folder.

    Raises:
        CheckpointError: on every rank: one could not make it, or another process is about to write the same checkpoint.
    """

    def __init__(self, world: World, storage: Storage, checkpoint: str) -> None:
        check_name(checkpoint)
        self._world, self._open = world, ExitStack()
        root = storage.path("")
        try:
            if root is None:
                self._there, above = LocalStorage(tempfile.gettempdir()), [""]
            else:
                self._there, above = LocalStorage(root), [""]
                said = (
                    trouble(lambda: above.append(self._claimed(f"{checkpoint}.hooks")))
                    if world.rank == 0
                    else ""
                )
                said, above = world.broadcast_objects([said, above])
                _agree([said])
            self._agreed(lambda: self._make(above[-1], checkpoint))
        except BaseException:
            self.close()
            raise

    def _claimed(self, owner: str) -> str:
        """Rank 0: a folder for those of all ranks, which nobody takes for left over while this process lives."""
        there = self._there
        self._open.callback(there.claim(owner).release)
        for name in there.list():
            if writing(name) == owner and name != lock_of(owner):
                take_away(there, name)
        name = temporary(owner)
        there.make(name)
        self._open.callback(take_away, there, name)
        return name

    def _make(self, above: str, checkpoint: str) -> None:
        self._mine = (
            f"{above}/{self._world.rank:05d}" if above else os.path.basename(tempfile.mkdtemp(prefix=PREFIX))
        )
        self._open.callback(take_away, self._there, self._mine)
        self._folder = f"{self._mine}/{checkpoint}"
        self._there.make(self._folder)
        self.path = self._there.path(self._folder)

    def collect(self) -> Extra:
        """What the hooks of all ranks wrote. What several of them wrote alike is one file.

        Raises:
            CheckpointError: on every rank: files of one name that are not the same, links, names that not every file system takes.
        """
        mine: dict[str, int] = {}
        everyones = self._agreed(lambda: mine.update(self._found()), mine)
        holders: dict[str, list[int]] = {}
        for rank, sizes in enumerate(everyones):
            for name in sizes:
                holders.setdefault(name, []).append(rank)
        check_extra(holders, ())
        files = {name: SourceFile(self._there, f"{self._folder}/{name}", size) for name, size in mine.items()}
        if shared := {name for name, ranks in holders.items() if len(ranks) > 1}:
            self._check_same({name: file for name, file in files.items() if name in shared})
        mine_to_write = {name: file for name, file in files.items() if holders[name][0] == self._world.rank}
        return Extra(mine_to_write, tuple(holders), self.close)

    def _found(self) -> Iterator[tuple[str, int]]:
        """Names and sizes of the files in the folder."""
        for name in self._there.list(self._mine):
            if f"{self._mine}/{name}" != self._folder:
                raise CheckpointError(
                    f"a hook wrote {name} beside the folder that it was given, where it would be lost: let it write to output_dir, or to "
                    "a place that is not derived from it"
                )
        for above, folders, files in os.walk(self.path, onerror=_raise):
            for name in (*folders, *files):
                path = os.path.join(above, name)
                found = os.lstat(path)
                below = os.path.relpath(path, self.path).replace(os.sep, "/")
                if stat.S_ISREG(found.st_mode):
                    yield below, found.st_size
                elif not stat.S_ISDIR(found.st_mode):
                    raise CheckpointError(
                        f"a hook made {below}, a link or a device: checkpoints hold files, so let it write one"
                    )

    def _check_same(self, files: Mapping[str, SourceFile]) -> None:
        mine: dict[str, str] = {}
        everyones = self._agreed(
            lambda: mine.update((name, _digest(file)) for name, file in files.items()), mine
        )
        known: dict[str, tuple[int, str]] = {}
        for rank, digests in enumerate(everyones):
            for name, digest in digests.items():
                other, before = known.setdefault(name, (rank, digest))
                if digest != before:
                    raise CheckpointError(
                        f"the hooks of ranks {other} and {rank} wrote {name}, each with other bytes, and one would replace the other: "
                        "write it where accelerator.is_main_process, or put accelerator.process_index into its name"
                    )

    def _agreed(self, act: Callable[[], Any], result: Any = None) -> list[Any]:
        """All ranks' `result` of `act`; raises on all of them what went wrong on any."""
        said = trouble(act)
        everyones = self._world.gather_objects((said, result))
        _agree([said for said, _ in everyones])
        return [result for _, result in everyones]

    def close(self) -> None:
        """Take the folder away."""
        self._open.close()


@contextmanager
def folder_to_read(world: World, storage: Storage, checkpoint: str) -> Iterator[str]:
    """A local folder with the files that hooks wrote into a checkpoint, all of them verified: its own where it lies on this machine, else
    one among the system's temporary files, of this rank, to which they are downloaded.

    Raises:
        CheckpointError: on every rank: there is no such checkpoint, or a file of a hook is not what was written.
    """
    with ExitStack() as held:
        found: list[str] = []

        def find() -> None:
            folder = current(storage, checkpoint)
            opened = Opened(storage, folder, open_manifest(storage, folder))
            path = storage.path(folder)
            if path is not None:
                for file in opened.extra.values():
                    storage.verify(file.name, file.size, file.checksums or ())
            else:
                above = held.enter_context(
                    tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
                )
                there = LocalStorage(above)
                there.make(checkpoint)
                copied(opened.extra, there, checkpoint)
                path = there.path(checkpoint)
            found.append(path)

        place = inside(storage.place, checkpoint)
        _agree(world.gather_objects(trouble(find)), f"{place} was not loaded, and nothing has changed: ")
        yield found[0]


def _agree(said: Sequence[str], begin: str = "the checkpoint was not begun: ") -> None:
    if wrong := first(said):
        raise CheckpointError(f"{begin}{wrong}")


def _digest(file: SourceFile) -> str:
    digest = hashlib.sha256()
    for part in content(file):
        digest.update(part)
    return digest.hexdigest()


def _raise(error: OSError) -> None:
    raise error


# -- Files of hooks, of which nothing is known but their bytes: from where they lie into a checkpoint, or out of one.


@dataclass(frozen=True)
class Extra:
    """
    Attributes:
        files: those that this rank puts into the checkpoint, by their paths below it.
        names: those of all ranks.
        close: to be called when they are there, or never will be; more than once is no harm.
    """

    files: Mapping[str, SourceFile] = field(default_factory=dict)
    names: Collection[str] = ()
    close: Callable[[], None] = lambda: None


NONE = Extra()


def content(file: SourceFile) -> Iterator[Part]:
    """The bytes of a file, a block at a time, each verified where its checksum is known."""
    for begin in range(0, file.size, BLOCK):
        block = memoryview(bytearray(min(BLOCK, file.size - begin)))
        file.storage.fetch(file.name, file.size, file.checksums, [(begin, block)])
        yield block


def copied(
    files: Mapping[str, SourceFile], storage: Storage, folder: str, tick: Tick = no_tick
) -> dict[str, FileRecord]:
    """Write `files` below `folder` of `storage`, by their paths there. All is on disk then but the first names in `folder`, which
    `sync` of it brings there.

    Raises:
        CheckpointError: one is not what was written, or has changed its size.
        OSError: one cannot be read or written.
    """
    folders = folders_of(files)
    for name in folders:
        with suppress(FileExistsError):  # another rank was quicker
            storage.make(inside(folder, name))
    written = {
        name: FileRecord(file.size, storage.put(inside(folder, name), content(file), file.size, tick))
        for name, file in files.items()
    }
    for name in folders:
        storage.sync(inside(folder, name))
    return written


def folders_of(names: Iterable[str]) -> list[str]:
    """All folders that these paths lead through; each comes after the one that it is in."""
    paths = [name.split("/") for name in names]
    return list(dict.fromkeys("/".join(words[:count]) for words in paths for count in range(1, len(words))))
