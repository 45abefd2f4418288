"""Hooks of the user around saves and loads: the local folders that they get, and their files in a checkpoint."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..distributed import World
from ..errors import CheckpointError
from . import folders
from .commit import check_name, claim, lock_of, take_away
from .folders import Extra
from .manifest import check_extra
from .snapshot import first, on_all, on_rank_0, trouble
from .storage import SourceFile, Storage
from .storage_local import LocalStorage

PREFIX = "easymp-"  # of folders in TMPDIR
NOT_BEGUN = "the checkpoint was not begun: "
Hooks = Mapping[int, Callable[..., None]]


# -- calling hooks -----------------------------------------------------------------------------------------------------


def before_save(
    world: World, hooks: Hooks, models: Sequence[Any], storage: Storage, name: str
) -> tuple[list[int], Extra]:
    """Call the save hooks on all ranks. Returns the indices of the models that they leave to be saved, and the hooks' files."""

    def listed() -> list[str]:
        return on_rank_0(world, lambda: storage.list(name), NOT_BEGUN)

    before = listed()
    folder = HookFolder(world, storage, name)
    try:
        weights = [model.state_dict() for model in models]
        left = _called(world, hooks, weights, lambda hook, of: hook(list(models), of, folder.path))
        (left,) = world.broadcast_objects([left])
        extra = folder.collect()
        if listed() != before:
            raise CheckpointError(
                f"a hook wrote to {folders.inside(storage.place, name)}, which the save replaces: let it write to the output_dir "
                "that it is given"
            )
        return left, extra
    except BaseException:
        folder.close()
        raise


@contextmanager
def before_load(
    world: World, hooks: Hooks, models: Sequence[Any], storage: Storage, name: str
) -> Iterator[list[int]]:
    """Call the load hooks on all ranks. Returns the indices of the models that they leave to be loaded."""
    with folder_to_read(world, storage, name) as folder:
        yield call_load_hooks(world, hooks, models, folder)


def call_load_hooks(world: World, hooks: Hooks, models: Sequence[Any], folder: str) -> list[int]:
    return _called(world, hooks, models, lambda hook, of: hook(of, folder))


def _called(
    world: World, hooks: Hooks, items: Sequence[Any], call: Callable[[Any, list[Any]], None]
) -> list[int]:
    """The indices of `items` that all hooks leave in their list. An error of one rank's hook is raised on all ranks."""
    left = list(items)
    error: list[Exception] = []

    def act() -> None:
        try:
            for hook in list(hooks.values()):
                call(hook, left)
        except Exception as raised:
            error.append(raised)
            raise

    said = first(world.gather_objects(trouble(act)))
    if error:
        raise error[0]  # the user's own, as it is
    if said:
        raise CheckpointError(f"a hook failed: {said}")
    index = {id(item): i for i, item in enumerate(items)}
    return [index[id(item)] for item in left if id(item) in index]


# -- their folders -----------------------------------------------------------------------------------------------------


class HookFolder:
    """An empty folder `path` of this rank, with the checkpoint's name: beside it under a temporary name, or in TMPDIR if it is at a URL."""

    def __init__(self, world: World, storage: Storage, checkpoint: str) -> None:
        check_name(checkpoint)
        self._world, self._open = world, ExitStack()
        root = storage.path("")
        self._there = LocalStorage(tempfile.gettempdir() if root is None else root)
        try:
            above = ""
            if root is not None:
                above = on_rank_0(world, lambda: self._above_all_ranks(f"{checkpoint}.hooks"), NOT_BEGUN)
            on_all(world, lambda: self._make(above, checkpoint), NOT_BEGUN)
        except BaseException:
            self.close()
            raise

    def _above_all_ranks(self, owner: str) -> str:
        """On rank 0, make and lock the parent folder of all ranks' hook folders."""
        there = self._there
        self._open.callback(claim(there, owner).release)
        for name in there.list():
            if folders.writing(name) == owner and name != lock_of(owner):
                take_away(there, name)
        name = folders.temporary(owner)
        there.make(name)
        self._open.callback(take_away, there, name)
        return name

    def _make(self, above: str, checkpoint: str) -> None:
        rank = f"{self._world.rank:05d}"
        self._mine = f"{above}/{rank}" if above else os.path.basename(tempfile.mkdtemp(prefix=PREFIX))
        self._open.callback(take_away, self._there, self._mine)
        self._folder = f"{self._mine}/{checkpoint}"
        self._there.make(self._folder)
        self.path = self._there.path(self._folder)

    def collect(self) -> Extra:
        """Collect the files of all ranks' hooks. A file that several ranks wrote with equal bytes is kept once."""
        world, there = self._world, self._there
        found = on_all(world, lambda: dict(self._found()), NOT_BEGUN)
        holders = {
            name: [rank for rank, sizes in enumerate(found) if name in sizes]
            for sizes in found
            for name in sizes
        }
        check_extra(holders, ())
        mine = found[world.rank]
        files = {name: SourceFile(there, f"{self._folder}/{name}", size) for name, size in mine.items()}
        if shared := {name: ranks for name, ranks in holders.items() if len(ranks) > 1}:
            digests = on_all(world, lambda: {n: _digest(files[n]) for n in shared if n in files}, NOT_BEGUN)
            for name, ranks in shared.items():
                if other := [rank for rank in ranks if digests[rank][name] != digests[ranks[0]][name]]:
                    raise CheckpointError(
                        f"the hooks of ranks {ranks[0]} and {other[0]} wrote {name} with different bytes: write it where "
                        "accelerator.is_main_process, or put accelerator.process_index into its name"
                    )
        own = {name: file for name, file in files.items() if holders[name][0] == world.rank}
        return Extra(own, tuple(holders), self.close)

    def _found(self) -> Iterator[tuple[str, int]]:
        """Paths and sizes of the files in the folder."""
        for name in self._there.list(self._mine):
            if f"{self._mine}/{name}" != self._folder:
                raise CheckpointError(
                    f"a hook wrote {name} beside the folder that it was given, where it would be lost: let it write to output_dir, or to "
                    "a place that is not derived from it"
                )

        def fail(error: OSError) -> None:
            raise error

        for above, below, files in os.walk(self.path, onerror=fail):
            for path in (os.path.join(above, name) for name in (*below, *files)):
                found, name = os.lstat(path), os.path.relpath(path, self.path).replace(os.sep, "/")
                if stat.S_ISREG(found.st_mode):
                    yield name, found.st_size
                elif not stat.S_ISDIR(found.st_mode):
                    raise CheckpointError(f"a hook made {name}, a link or a device: let it write a file")

    def close(self) -> None:
        """Remove the folder."""
        self._open.close()


@contextmanager
def folder_to_read(world: World, storage: Storage, checkpoint: str) -> Iterator[str]:
    """A local folder with the verified files of a checkpoint's hooks: its own, or a download in TMPDIR if it is at a URL."""
    with ExitStack() as held:

        def find() -> str:
            folder = folders.current(storage, checkpoint)
            opened = folders.Opened(storage, folder, folders.open_manifest(storage, folder))
            path = storage.path(folder)
            if path is not None:
                for file in opened.extra.values():
                    file.verify()
                return path
            above = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
            there = LocalStorage(held.enter_context(above))
            there.make(checkpoint)
            folders.copied(opened.extra, there, checkpoint)
            return there.path(checkpoint)

        place = folders.inside(storage.place, checkpoint)
        paths = on_all(world, find, f"{place} was not loaded, and nothing has changed: ")
        yield paths[world.rank]


def _digest(file: SourceFile) -> str:
    digest = hashlib.sha256()
    for part in folders.blocks_in(file):
        digest.update(part)
    return digest.hexdigest()
