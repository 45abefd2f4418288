"""Makes prepared loaders: reads the settings of a DataLoader and picks the source that does the same on many ranks."""

from __future__ import annotations

import gc
import secrets
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..base.accumulation import UpdateWindow
from ..distributed.process_group import World
from ..errors import BatchError, EasympWarning
from ..options import DataLoaderConfiguration
from ..protocols import Choice
from ..protocols import Source as Origin
from .loader import PreparedLoader, SkippedLoader
from .order import Cut
from .source import Dispatched, MapSource, Source, reads_ahead
from .stream import StreamSource


def prepare_loader(
    loader: DataLoader[Any],
    window: UpdateWindow,
    world: World,
    rank: int,
    size: int,
    config: DataLoaderConfiguration,
    seed: int,
    place: bool = True,
) -> PreparedLoader:
    """Shard `loader` over the ranks that share the data. A prepared loader is returned unchanged.

    Args:
        rank, size: index of the share of this process, and number of shares.
        seed: of the data order, the same on every rank; `config.data_seed` overrides it.
        place: move batches to the world's device.
    """
    if isinstance(loader, (PreparedLoader, SkippedLoader)):
        return loader
    _check(loader)
    sampler, batch, drop_last, whole = _reading(loader, size)
    per_rank = _per_rank(loader, batch, size, config.split_batches, whole)
    cut = Cut(per_rank or 1, size, config.even_batches, drop_last)
    device = world.device if place else None
    # Workers hand over CPU tensors, which the DataLoader's own thread can pin; without workers `moved` does it.
    pins = loader.pin_memory or (device is not None and device.type == "cuda" and loader.num_workers > 0)
    dispatch = bool(config.dispatch_batches) and world.size > 1
    ranks = range(size) if dispatch else (rank,)
    settings: Any = {"seed": seed if config.data_seed is None else config.data_seed, "pin_memory": pins}
    source: Source
    if isinstance(loader.dataset, IterableDataset):
        source = StreamSource(loader, cut, ranks, **settings)
    else:
        ahead = dispatch or (device is not None and reads_ahead(device, config.non_blocking))
        settings |= {"seeded": config.use_seedable_sampler, "alone": dispatch}
        settings |= {"whole": ("split" if config.split_batches else "deal") if whole else None}
        source = MapSource(
            loader, sampler, cut, ranks, world, ahead=ahead and not loader.num_workers, **settings
        )
    if dispatch:
        source = Dispatched(source, world, rank)
    if cut.drop_last and source.batches(rank) == 0:
        why = f"{source.samples()} samples do not fill one global batch of {cut.whole}"
        right = "Lower the batch size, or leave drop_last out"
        warnings.warn(f"drop_last=True leaves nothing: {why}. {right}", EasympWarning, stacklevel=2)
    differ = (whole and not config.split_batches) or (batch is None and not whole)
    return PreparedLoader(loader, source, window, world, rank, per_rank, differ, device, config.non_blocking)


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        what = f"a {type(loader).__name__} was passed where a DataLoader belongs"
        raise BatchError(f"{what}: wrap the data set, torch.utils.data.DataLoader(dataset, batch_size=…)")
    with suppress(TypeError, NotImplementedError, AttributeError):  # of data sets without a length
        if not len(loader.dataset):
            what = f"the data set ({type(loader.dataset).__name__}) is empty"
            raise BatchError(f"{what}: check the path or filter it was made with")
    if not getattr(loader, "in_order", True):  # older subclasses (torchdata) do not have it
        why = "this DataLoader's batches may overtake each other, so that no position says which samples have been read"
        raise BatchError(f"{why}: leave in_order=False out")
    theirs = type(loader).__iter__ is not DataLoader.__iter__
    if theirs and not type(loader).__module__.startswith("torchdata"):
        warnings.warn(
            f"the __iter__ of {type(loader).__name__} is not used: a prepared loader is a plain DataLoader with the same data set, "
            "collate function and workers. Put what it adds into the data set or the collate function",
            EasympWarning,
            stacklevel=4,
        )


def _reading(loader: DataLoader[Any], data_size: int) -> tuple[Any, int | None, bool, bool]:
    """The sampler, samples per batch (None: the data set decides), drop_last, and whether the sampler yields whole batches."""
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return None, loader.batch_size, loader.drop_last, False
    if batches is None:
        return loader.sampler, None, False, False
    if type(batches) is not BatchSampler:
        return batches, getattr(batches, "batch_size", None), bool(getattr(batches, "drop_last", False)), True
    sampler = batches.sampler
    # DistributedSampler(drop_last=True) repeats no sample.
    drops = data_size > 1 and type(sampler) is DistributedSampler and sampler.drop_last
    return sampler, batches.batch_size, batches.drop_last or drops, False


def _per_rank(
    loader: DataLoader[Any], size: int | None, data_size: int, split: bool, whole: bool
) -> int | None:
    if not split:
        return size
    if size is None and not whole:
        why = "split_batches=True divides batches among the processes, but this loader has batch_size=None"
        raise BatchError(f"{why}: give the DataLoader a batch_size, or leave split_batches out")
    if size is not None and size % data_size:
        near = " or ".join(str(n * data_size) for n in (size // data_size, size // data_size + 1) if n)
        raise BatchError(
            f"split_batches=True divides each batch among {data_size} processes, and batch_size={size} does not divide: use {near}, or "
            "leave split_batches out (batch_size is then per process)"
        )
    return None if size is None else size // data_size


PLAIN = (SequentialSampler, RandomSampler, WeightedRandomSampler)
PATIENCE = 64  # backward passes in which rank 0 looks for the outlines of the other ranks
MOST, DEPTH, FEW = 1000, 12, 16  # limits of an outline: values, nesting, elements per value


class UnpreparedCheck:
    """Finds a DataLoader that was not passed to `prepare` although several ranks read it."""

    def __init__(self, world: World, data_rank: int, data_size: int) -> None:
        self._world, self._rank, self._size = world, data_rank, data_size
        self._own, self._what, self._looks = "", "", 0

    def begin(self) -> Choice[str]:
        """The line of the plan. The other ranks get an outline of the data that this rank reads."""
        read = [it for it in gc.get_objects() if issubclass(type(it), _BaseDataLoaderIter)]
        streams = [type(it._dataset).__name__ for it in read if isinstance(it._dataset, IterableDataset)]
        plain = []
        for it in read:
            batches = it._index_sampler
            sampler = batches.sampler if type(batches) is BatchSampler else batches
            if type(sampler) in PLAIN:
                plain.append((it._dataset, type(sampler).__name__))
        if not read or len(plain) + len(streams) < len(read):
            why = "no prepared DataLoader is read: the program itself splits the data"
            return Choice("as given", why, Origin.DETECTED)
        why = "that was not passed to prepare() is read"
        if streams:
            why = f"a DataLoader {why}: {streams[0]} must split its samples by rank itself"
            return Choice("not prepared", why, Origin.DETECTED)
        self._what = f"a DataLoader ({type(plain[0][0]).__name__}, {plain[0][1]})"
        self._own = repr([(sampler, outline(dataset, iter(range(MOST)))) for dataset, sampler in plain])
        self._store = self._world.store()
        self._store.set(f"unprepared/{self._rank}", self._own)
        return Choice("not prepared", f"{self._what} {why}", Origin.DETECTED)

    def look_again(self) -> bool:
        """Whether to look again. Rank 0 warns as soon as all ranks report the same data."""
        self._looks += 1
        if not self._own or self._world.rank or self._looks > PATIENCE:
            return False
        keys = [f"unprepared/{rank}" for rank in range(1, self._size)]
        if not self._store.check(keys):
            return True
        if all(self._store.get(key).decode() == self._own for key in keys):
            warnings.warn(
                f"{self._size} ranks read the same data by {self._what} that was not passed to prepare(): each trains on all of it. Pass "
                "the DataLoader to prepare() and loop over its result, or give it a DistributedSampler",
                EasympWarning,
                stacklevel=4,
            )
        return False


def outline(value: Any, left: Iterator[int], depth: int = 0) -> Any:
    """Fingerprint of a data set by its attributes: reads few elements, and as many values as `left` yields; calls no method."""
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if depth > DEPTH or next(left, None) is None:
        return None
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested or value.is_meta:
            return secrets.token_hex(8)  # no elements to read: different on each rank
        flat = value.detach().flatten() if value.is_contiguous() else value.new_empty(0)
        return tuple(value.shape), str(value.dtype), flat[:: max(1, len(flat) // FEW)].tolist()
    if hasattr(value, "__array_interface__"):
        return tuple(value.shape), str(value.dtype), value.flat[:: max(1, value.size // FEW)].tolist()
    if isinstance(value, (list, tuple, range)):
        return len(value), [outline(item, left, depth + 1) for item in value[:: max(1, len(value) // FEW)]]
    if isinstance(value, dict):
        few = list(value.items())[:FEW]
        return len(value), [(str(key), outline(item, left, depth + 1)) for key, item in few]
    return type(value).__qualname__, outline(getattr(value, "__dict__", None), left, depth + 1)
