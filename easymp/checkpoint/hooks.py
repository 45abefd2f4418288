"""Hooks of the user around saves and loads: the local folders that they get, and their files in a checkpoint."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ..distributed import World
from ..errors import CheckpointError, RefusedError
from . import folders
from .folders import check_name, join, remove_leftover
from .locks import acquire
from .manifest import check_extra
from .ranks import NOT_BEGUN, attempt, error_text, join_errors, run_on_all, run_on_rank_0
from .save import ExtraFiles, blocks_of
from .storage import LocalStorage, SourceFile, Storage

Hooks = Mapping[int, Callable[..., object]]


def run_save_hooks(
    world: World, hooks: Hooks, models: Sequence[Any], storage: Storage, name: str
) -> tuple[list[int], ExtraFiles]:
    """Call the save hooks on all ranks; returns the indices of models that they leave, and the hooks' files."""
    local = local_folder(storage)

    def content() -> list[str]:
        return run_on_rank_0(world, lambda: local.list(name), NOT_BEGUN)

    previous = content()
    with ExitStack() as cleanup:
        folder = make_folder(world, local, name, cleanup)
        path, weights = local.local_path(folder), [model.state_dict() for model in models]
        indices = run_hooks(world, hooks, weights, lambda hook, items: hook(list(models), items, path))
        (indices,) = world.broadcast_objects([indices])
        if content() != previous:
            raise CheckpointError(
                f"a hook wrote to {join(storage.root, name)}, which the save replaces: let it write to the output_dir "
                "that it is given"
            )
        return indices, collect_files(world, local, folder, cleanup)


def run_hooks(world: World, hooks: Hooks, items: Sequence[Any], call: Callable[[Any, list[Any]], object]) -> list[int]:
    """The indices of `items` that all hooks leave in their list. An error of one rank's hook is raised on all ranks."""
    remaining = list(items)

    def call_all() -> None:
        for hook in list(hooks.values()):
            call(hook, remaining)

    own_error, _ = attempt(call_all)
    errors = join_errors(world.gather_objects(error_text(own_error)))
    if own_error is not None:
        raise own_error  # the user's own, as it is
    if errors:
        raise CheckpointError(f"a hook failed: {errors}")
    index = {id(item): i for i, item in enumerate(items)}
    return [index[id(item)] for item in remaining if id(item) in index]


def make_folder(world: World, storage: LocalStorage, checkpoint: str, cleanup: ExitStack) -> str:
    """Make an empty folder of this rank, beside the checkpoint. `cleanup` removes it."""
    check_name(checkpoint)
    owner = f"{checkpoint}.hooks"

    def make_parent() -> str:
        cleanup.callback(acquire(storage, owner).release)
        for leftover in folders.leftovers_of(storage.list(), owner):
            remove_leftover(storage, leftover)
        name = folders.temporary_name(owner)
        storage.make(name)
        cleanup.callback(remove_leftover, storage, name)
        return name

    rank_folder = f"{run_on_rank_0(world, make_parent, NOT_BEGUN)}/{world.rank:05d}"
    cleanup.callback(remove_leftover, storage, rank_folder)
    run_on_all(world, lambda: storage.make(f"{rank_folder}/{checkpoint}"), NOT_BEGUN)
    return f"{rank_folder}/{checkpoint}"


def collect_files(world: World, storage: LocalStorage, folder: str, cleanup: ExitStack) -> ExtraFiles:
    """Collect the files in all ranks' folders. A file that several ranks wrote with equal bytes is kept once."""
    by_rank = run_on_all(world, lambda: dict(_sizes(storage, folder)), NOT_BEGUN)
    holders: dict[str, list[int]] = {}
    for rank, sizes in enumerate(by_rank):
        for name in sizes:
            holders.setdefault(name, []).append(rank)
    check_extra(holders, ())
    files = {n: SourceFile(storage, f"{folder}/{n}", size) for n, size in by_rank[world.rank].items()}
    if shared := {name: ranks for name, ranks in holders.items() if len(ranks) > 1}:
        digests = run_on_all(world, lambda: {n: _digest(files[n]) for n in shared if n in files}, NOT_BEGUN)
        for name, ranks in shared.items():
            if differing := [rank for rank in ranks if digests[rank][name] != digests[ranks[0]][name]]:
                raise CheckpointError(
                    f"the hooks of ranks {ranks[0]} and {differing[0]} wrote {name} with different bytes: write it "
                    "where accelerator.is_main_process, or put accelerator.process_index into its name"
                )
    own_files = {name: file for name, file in files.items() if holders[name][0] == world.rank}
    return ExtraFiles(own_files, tuple(holders), cleanup.pop_all().close)


def _sizes(storage: LocalStorage, folder: str) -> Iterator[tuple[str, int]]:
    """The files below a hook's folder, and their bytes."""
    rank_folder, _, checkpoint = folder.rpartition("/")
    for name in storage.list(rank_folder):
        if name != checkpoint:
            raise CheckpointError(
                f"a hook wrote {name} beside the folder that it was given, where it would be lost: let it write to "
                "output_dir, or to a place that is not derived from it"
            )

    def fail(error: OSError) -> None:
        raise error

    root = storage.local_path(folder)
    for parent, subfolders, files in os.walk(root, onerror=fail):
        for path in (os.path.join(parent, name) for name in (*subfolders, *files)):
            status, name = os.lstat(path), os.path.relpath(path, root).replace(os.sep, "/")
            if stat.S_ISREG(status.st_mode):
                yield name, status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                raise CheckpointError(f"a hook made {name}, a link or a device: let it write a file")


def verified_folder(world: World, storage: Storage, checkpoint: str) -> str:
    """The local folder of a checkpoint, after its hooks' files are verified."""
    local = local_folder(storage)

    def verify() -> str:
        opened = folders.open_save(local, checkpoint)
        files = opened.files
        for name in opened.manifest.extra:
            files[name].verify()
        return local.local_path(opened.folder)

    path = join(storage.root, checkpoint)
    return run_on_all(world, verify, f"{path} was not loaded, and nothing has changed: ")[world.rank]


def local_folder(storage: Storage) -> LocalStorage:
    """The storage itself. Raises RefusedError for one at a URL."""
    if not isinstance(storage, LocalStorage):
        raise RefusedError(
            f"hooks read and write local files, and the checkpoint is at {storage.root}: use a local folder, or keep "
            "the state by register_for_checkpointing()"
        )
    return storage


def _digest(file: SourceFile) -> str:
    digest = hashlib.sha256()
    for block in blocks_of(file):
        digest.update(block)
    return digest.hexdigest()
