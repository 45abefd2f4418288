"""Small things to keep in checkpoints, so that tests of saving need no training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from easymp import CheckpointError
from easymp.checkpoint.folders import NONE, Extra, newest, open_manifest
from easymp.checkpoint.hooks import HookFolder, folder_to_read
from easymp.checkpoint.load import Reading
from easymp.checkpoint.load import load_checkpoint as load
from easymp.checkpoint.manifest import Box
from easymp.checkpoint.save import Saves, Target
from easymp.checkpoint.snapshot import Brought, Snapshot
from easymp.checkpoint.storage_local import LocalStorage
from easymp.distributed import Ranks, World, read_ranks


def world(timeout: float = 60.0) -> World:
    return World(read_ranks(), torch.device("cpu"), timeout)


def alone() -> World:
    """A world of one, in any environment."""
    return World(Ranks(), torch.device("cpu"))


class Rows:
    """A tensor with some rows on each rank, beside one that all ranks have, and a word."""

    def __init__(self, rank: int, size: int, seed: int = 0, rows: int = 6, columns: int = 8) -> None:
        self.rank, self.seed = rank, seed
        generator = torch.Generator().manual_seed(seed)
        self.shape = (rows * size, columns)
        whole = torch.randn(self.shape, generator=generator)
        self.mine = whole[rank * rows : (rank + 1) * rows].clone()
        self.box = Box((rank * rows, 0), (rows, columns))
        self.all = torch.randint(0, 100, (5,), generator=generator, dtype=torch.uint8)

    def collect(self, into: Snapshot) -> None:
        into.parts["model/rows", self.box] = self.mine
        into.brought.append(Brought("model/rows", self.mine.dtype, self.shape, self.box))
        into.states["model"] = {"rows": {"$": "tensor", "name": "model/rows"}}
        into.add("state/all", {"all": self.all, "seed": self.seed})
        into.add("state/own", self.seed + self.rank, own=True)

    def restore(self, source: Reading) -> Callable[[], None]:
        mine, rest = torch.empty_like(self.mine), source.state("state/all")
        source.fill([("model/rows", self.box, mine)])
        own = source.state("state/own", own=True)
        assert "model" in source

        def put() -> None:
            self.mine.copy_(mine)
            self.all.copy_(rest["all"])
            self.seed = rest["seed"]
            assert own == self.seed + self.rank

        return put

    def values(self) -> list[Any]:
        return [self.mine.tolist(), self.all.tolist(), self.seed]


class Fails:
    """Says no state on one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def collect(self, into: Snapshot) -> None:
        if into.rank == self._rank:
            raise ValueError("the state is lost")

    def restore(self, source: Reading) -> Callable[[], None]:
        return lambda: None


def target(root: str | Path, step: int, name: str | None = None) -> Target:
    return Target(LocalStorage(root), name or f"step-{step:08d}", step, {})


def save(root, seed, step=None, hooked=False, anew=False, **more):
    """A checkpoint of a world of one, with the values of `seed`, continued from the last one there unless it begins `anew`; with two
    files of a hook, if `hooked`."""
    saves, where = Saves(alone()), target(root, seed if step is None else step)
    folder, _, _ = newest(where.storage)
    if folder is not None and not anew:
        saves.line.loaded(where.storage, folder, open_manifest(where.storage, folder))
    extra = of_a_hook(where, seed) if hooked else NONE
    try:
        saves.save(where, [Rows(0, 1, seed)], extra=extra, **more)
    finally:
        extra.close()
    saves.close()


def of_a_hook(where: Target, seed: int) -> Extra:
    folder = HookFolder(alone(), where.storage, where.name)
    try:
        there = LocalStorage(folder.path)
        there.make("a/b")
        for name in HOOKED:
            there.put(name, [bytes([seed]) * 5000], 5000)
        return folder.collect()
    except BaseException as error:
        folder.close()
        if isinstance(error, OSError):  # the hook's own
            raise CheckpointError(str(error)) from error
        raise


HOOKED = ("a/b/one.bin", "a/.two")


def loaded(root: str | Path, name: str, ranks: World | None = None) -> list[Any]:
    """What is in a checkpoint, verified."""
    ranks = ranks or alone()
    rows = Rows(ranks.rank, ranks.size, seed=-1)
    storage = LocalStorage(root)
    manifest = load(ranks, storage, name, [rows]).manifest
    if manifest.extra:
        with folder_to_read(ranks, storage, name) as folder:
            assert sorted(manifest.extra) == sorted(HOOKED)
            assert all(Path(folder, hooked).read_bytes() == bytes([rows.seed]) * 5000 for hooked in HOOKED)
    return rows.values()


def values(seed: int, rank: int = 0, size: int = 1) -> list[Any]:
    return Rows(rank, size, seed).values()
