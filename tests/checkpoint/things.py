"""Small things to keep in checkpoints, so that tests of saving need no training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from easymp import CheckpointError
from easymp.checkpoint.folders import find_newest, open_folder
from easymp.checkpoint.hooks import collect_files, make_folder, verified_folder
from easymp.checkpoint.load import CheckpointReader
from easymp.checkpoint.load import load_checkpoint as load
from easymp.checkpoint.manifest import Box, per_rank
from easymp.checkpoint.save import NO_FILES, ExtraFiles, LocalChunk, Saves, Snapshot, Target
from easymp.checkpoint.storage import LocalStorage
from easymp.distributed import Ranks, World, read_ranks


def world(timeout: float = 60.0) -> World:
    return World(read_ranks(), torch.device("cpu"), timeout)


def single_world() -> World:
    """A world of one, in any environment."""
    return World(Ranks(), torch.device("cpu"))


class Rows:
    """A tensor with some rows on each rank, beside one that all ranks have, and a word."""

    def __init__(self, rank: int, size: int, seed: int = 0, rows: int = 6, columns: int = 8) -> None:
        self.rank, self.seed = rank, seed
        generator = torch.Generator().manual_seed(seed)
        self.shape = (rows * size, columns)
        all_rows = torch.randn(self.shape, generator=generator)
        self.own_rows = all_rows[rank * rows : (rank + 1) * rows].clone()
        self.box = Box((rank * rows, 0), (rows, columns))
        self.all = torch.randint(0, 100, (5,), generator=generator, dtype=torch.uint8)

    def collect(self, into: Snapshot) -> None:
        into.tensors["model/rows", self.box] = self.own_rows
        into.chunks.append(LocalChunk("model/rows", self.own_rows.dtype, self.shape, self.box))
        into.states["model"] = {"rows": {"$": "tensor", "name": "model/rows"}}
        into.add("state/all", {"all": self.all, "seed": self.seed})
        into.add("state/own", self.seed + self.rank, own=True)

    def restore(self, source: CheckpointReader) -> Callable[[], None]:
        own_rows, shared = torch.empty_like(self.own_rows), source.state("state/all")
        source.fill([("model/rows", self.box, own_rows)])
        rank_value = source.state(per_rank(source.rank, "state/own"))
        source.tree("model")

        def put() -> None:
            self.own_rows.copy_(own_rows)
            self.all.copy_(shared["all"])
            self.seed = shared["seed"]
            assert rank_value == self.seed + self.rank

        return put

    def values(self) -> list[Any]:
        return [self.own_rows.tolist(), self.all.tolist(), self.seed]


class Fails:
    """Says no state on one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def collect(self, into: Snapshot) -> None:
        if into.rank == self._rank:
            raise ValueError("the state is lost")

    def restore(self, source: CheckpointReader) -> Callable[[], None]:
        return lambda: None


def target(root: str | Path, step: int, name: str | None = None) -> Target:
    return Target(LocalStorage(root), name or f"step-{step:08d}", step, {})


def save(root, seed, step=None, hooked=False, anew=False, **options):
    """Save the values of `seed` in a world of one, with two files of a hook if `hooked`.

    The save continues the last checkpoint there, unless it begins `anew`.
    """
    saves, save_target = Saves(single_world()), target(root, seed if step is None else step)
    folder, _, _ = find_newest(save_target.storage)
    if folder is not None and not anew:
        saves.line.loaded(save_target.storage, folder, open_folder(save_target.storage, folder).manifest)
    extra = of_a_hook(save_target, seed) if hooked else NO_FILES
    try:
        saves.save(save_target, [Rows(0, 1, seed)], extra=extra, **options)
    finally:
        extra.close()
    saves.close()


def of_a_hook(save_target: Target, seed: int) -> ExtraFiles:
    storage, ranks = save_target.storage, single_world()
    with ExitStack() as cleanup:
        folder = make_folder(ranks, storage, save_target.name, cleanup)
        try:
            storage.make(f"{folder}/a/b")
            for name in HOOKED:
                storage.put(f"{folder}/{name}", [bytes([seed]) * 5000], 5000)
            return collect_files(ranks, storage, folder, cleanup)
        except OSError as error:  # the hook's own
            raise CheckpointError(str(error)) from error


HOOKED = ("a/b/one.bin", "a/.two")


def loaded(root: str | Path, name: str, ranks: World | None = None) -> list[Any]:
    """What is in a checkpoint, verified."""
    ranks = ranks or single_world()
    rows = Rows(ranks.rank, ranks.size, seed=-1)
    storage = LocalStorage(root)
    manifest = load(ranks, storage, name, [rows]).manifest
    if manifest.extra:
        folder = verified_folder(ranks, storage, name)
        assert sorted(manifest.extra) == sorted(HOOKED)
        assert all(Path(folder, hooked).read_bytes() == bytes([rows.seed]) * 5000 for hooked in HOOKED)
    return rows.values()


def values(seed: int, rank: int = 0, size: int = 1) -> list[Any]:
    return Rows(rank, size, seed).values()
