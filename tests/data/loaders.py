"""Data sets, and loaders prepared for ranks that do not exist: a share needs a rank and a size, no process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from easymp import DataLoaderConfiguration, PreparedLoader
from easymp.base.accumulation import UpdateWindow
from easymp.base.ranks import Ranks
from easymp.data import SkippedLoader, prepare_loader
from easymp.distributed.process_group import World

CPU = torch.device("cpu")


class Numbers(Dataset[int]):
    """0 … n - 1; remembers what was loaded."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        self.loaded.append(i)
        return i


class Stream(IterableDataset[int]):
    """0 … n - 1 in order, worker w of W every W-th of them; without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(self.n) if info is None else range(info.id, self.n, info.num_workers)


class Placed(Stream):
    """One that says where it is, goes on where its state says, and begins anew at its end."""

    at = 0

    def item(self, i: int) -> Any:
        return i

    def __iter__(self) -> Iterator[Any]:
        items = list(super().__iter__())
        while self.at < len(items):
            self.at += 1
            yield self.item(items[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def prepared(loader, rank=0, size=1, *, seed=7, **config):
    if isinstance(loader, SkippedLoader):  # as Accelerator.prepare does
        return loader
    window = config.pop("window", None) or UpdateWindow()
    world = config.pop("world", None) or World(Ranks(), config.pop("device", CPU))
    return prepare_loader(loader, window, world, rank, size, DataLoaderConfiguration(**config), seed)


def numbers(batch: Any) -> list[int]:
    return [int(i) for i in batch]


def gathered(loaders: list[PreparedLoader]) -> list[int]:
    """One pass over all ranks, the repeats dropped from the end of each round, as gather_for_metrics does."""
    samples: list[int] = []
    for round_ in zip_longest(*loaders):
        flat = [i for batch in round_ if batch is not None for i in numbers(batch)]
        samples += flat[: len(flat) - loaders[0].surplus]
    return samples


def passes(loader: PreparedLoader, times: int = 1) -> list[list[list[int]]]:
    return [[numbers(batch) for batch in loader] for _ in range(times)]
