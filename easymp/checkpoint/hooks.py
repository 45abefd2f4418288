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
from .commit import acquire, check_name, remove_leftover
from .folders import ExtraFiles, join
from .manifest import check_extra
from .ranks import NOT_BEGUN, error_text, join_errors, run_on_all, run_on_rank_0
from .storage import LocalStorage, SourceFile, Storage

PREFIX = "easymp-"  # of folders in TMPDIR
Hooks = Mapping[int, Callable[..., object]]


def run_save_hooks(
    world: World, hooks: Hooks, models: Sequence[Any], storage: Storage, name: str
) -> tuple[list[int], ExtraFiles]:
    """Call the save hooks on all ranks; returns the indices of models that they leave, and the hooks' files."""

    def content() -> list[str]:
        return run_on_rank_0(world, lambda: storage.list(name), NOT_BEGUN)

    previous = content()
    folder = HookFolder(world, storage, name)
    try:
        weights = [model.state_dict() for model in models]
        indices = _run(world, hooks, weights, lambda hook, items: hook(list(models), items, folder.path))
        (indices,) = world.broadcast_objects([indices])
        extra = folder.collect()
        if content() != previous:
            raise CheckpointError(
                f"a hook wrote to {join(storage.root, name)}, which the save replaces: let it write to the output_dir "
                "that it is given"
            )
        return indices, extra
    except BaseException:
        folder.close()
        raise


def run_load_hooks(world: World, hooks: Hooks, models: Sequence[Any], folder: str) -> list[int]:
    """Call the load hooks on all ranks; returns the indices of the models that they leave to be loaded."""
    return _run(world, hooks, models, lambda hook, items: hook(items, folder))


def _run(world: World, hooks: Hooks, items: Sequence[Any], call: Callable[[Any, list[Any]], object]) -> list[int]:
    """The indices of `items` that all hooks leave in their list. An error of one rank's hook is raised on all ranks."""
    remaining, own_error = list(items), None
    try:
        for hook in list(hooks.values()):
            call(hook, remaining)
    except Exception as error:
        own_error = error
    errors = join_errors(world.gather_objects("" if own_error is None else error_text(own_error)))
    if own_error is not None:
        raise own_error  # the user's own, as it is
    if errors:
        raise CheckpointError(f"a hook failed: {errors}")
    index = {id(item): i for i, item in enumerate(items)}
    return [index[id(item)] for item in remaining if id(item) in index]


class HookFolder:
    """An empty folder `path` of this rank, beside the checkpoint, or in TMPDIR if that is at a URL."""

    def __init__(self, world: World, storage: Storage, checkpoint: str) -> None:
        check_name(checkpoint)
        self._world, self._cleanup = world, ExitStack()
        is_local = isinstance(storage, LocalStorage)
        self._storage = LocalStorage(storage.root if is_local else tempfile.gettempdir())
        try:
            parent = run_on_rank_0(world, lambda: self._parent(checkpoint), NOT_BEGUN) if is_local else ""
            run_on_all(world, lambda: self._make(parent, checkpoint), NOT_BEGUN)
        except BaseException:
            self.close()
            raise

    def _parent(self, checkpoint: str) -> str:
        """On rank 0, make and lock the parent folder of all ranks' hook folders."""
        storage, owner = self._storage, f"{checkpoint}.hooks"
        self._cleanup.callback(acquire(storage, owner).release)
        for leftover in folders.leftovers_of(storage.list(), owner):
            remove_leftover(storage, leftover)
        name = folders.temporary_name(owner)
        storage.make(name)
        self._cleanup.callback(remove_leftover, storage, name)
        return name

    def _make(self, parent: str, checkpoint: str) -> None:
        rank = f"{self._world.rank:05d}"
        self._rank_folder = f"{parent}/{rank}" if parent else os.path.basename(tempfile.mkdtemp(prefix=PREFIX))
        self._cleanup.callback(remove_leftover, self._storage, self._rank_folder)
        self._folder = f"{self._rank_folder}/{checkpoint}"
        self._storage.make(self._folder)
        self.path = self._storage.local_path(self._folder)

    def collect(self) -> ExtraFiles:
        """Collect the files of all ranks' hooks. A file that several ranks wrote with equal bytes is kept once."""
        world, storage = self._world, self._storage
        by_rank = run_on_all(world, lambda: dict(self._sizes()), NOT_BEGUN)
        holders: dict[str, list[int]] = {}
        for rank, sizes in enumerate(by_rank):
            for name in sizes:
                holders.setdefault(name, []).append(rank)
        check_extra(holders, ())
        files = {n: SourceFile(storage, f"{self._folder}/{n}", size) for n, size in by_rank[world.rank].items()}
        if shared := {name: ranks for name, ranks in holders.items() if len(ranks) > 1}:
            digests = run_on_all(world, lambda: {n: _digest(files[n]) for n in shared if n in files}, NOT_BEGUN)
            for name, ranks in shared.items():
                if differing := [rank for rank in ranks if digests[rank][name] != digests[ranks[0]][name]]:
                    raise CheckpointError(
                        f"the hooks of ranks {ranks[0]} and {differing[0]} wrote {name} with different bytes: write it "
                        "where accelerator.is_main_process, or put accelerator.process_index into its name"
                    )
        own_files = {name: file for name, file in files.items() if holders[name][0] == world.rank}
        return ExtraFiles(own_files, tuple(holders), self.close)

    def _sizes(self) -> Iterator[tuple[str, int]]:
        for name in self._storage.list(self._rank_folder):
            if f"{self._rank_folder}/{name}" != self._folder:
                raise CheckpointError(
                    f"a hook wrote {name} beside the folder that it was given, where it would be lost: let it write to "
                    "output_dir, or to a place that is not derived from it"
                )

        def fail(error: OSError) -> None:
            raise error

        for folder, subfolders, files in os.walk(self.path, onerror=fail):
            for path in (os.path.join(folder, name) for name in (*subfolders, *files)):
                status, name = os.lstat(path), os.path.relpath(path, self.path).replace(os.sep, "/")
                if stat.S_ISREG(status.st_mode):
                    yield name, status.st_size
                elif not stat.S_ISDIR(status.st_mode):
                    raise CheckpointError(f"a hook made {name}, a link or a device: let it write a file")

    def close(self) -> None:
        self._cleanup.close()


@contextmanager
def folder_to_read(world: World, storage: Storage, checkpoint: str) -> Iterator[str]:
    """A local folder with the verified files of a checkpoint's hooks; of a URL, a download in TMPDIR."""
    with ExitStack() as stack:

        def prepare() -> str:
            opened = folders.open_save(storage, checkpoint)
            if isinstance(storage, LocalStorage):
                for file in opened.extra.values():
                    file.verify()
                return storage.local_path(opened.folder)
            temporary = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
            local = LocalStorage(stack.enter_context(temporary))
            local.make(checkpoint)
            folders.copy_files(opened.extra, local, checkpoint)
            return local.local_path(checkpoint)

        path = join(storage.root, checkpoint)
        paths = run_on_all(world, prepare, f"{path} was not loaded, and nothing has changed: ")
        yield paths[world.rank]


def _digest(file: SourceFile) -> str:
    digest = hashlib.sha256()
    for block in folders.blocks_of(file):
        digest.update(block)
    return digest.hexdigest()
