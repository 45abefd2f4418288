"""Makes prepared loaders: reads the settings of a DataLoader and picks the source that does the same on many ranks."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from ..base.accumulation import UpdateWindow
from ..distributed.process_group import World
from ..errors import BatchError, EasympWarning
from ..options import DataLoaderConfiguration
from .loader import PreparedLoader, SkippedLoader
from .order import Cut, length, size_of
from .packing import TokenBudget, collate_of, measure
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
    device_placement: bool = True,
    *,
    kind: type[PreparedLoader] = PreparedLoader,
    split_tail: bool = False,
) -> PreparedLoader:
    """Shard `loader` over the ranks that share the data. A prepared loader is returned unchanged.

    Args:
        rank, size: index of the share of this process, and number of shares.
        seed: of the data order, the same on every rank; `config.data_seed` overrides it.
        device_placement: move batches to the world's device.
        kind: class of the result.
        split_tail: see `Cut`.
    """
    if isinstance(loader, (PreparedLoader, SkippedLoader)):
        return loader
    if not isinstance(loader, DataLoader):
        raise BatchError(
            f"a {type(loader).__name__} was passed where a DataLoader belongs: wrap the data set, "
            "torch.utils.data.DataLoader(dataset, batch_size=…)"
        )
    if size_of(loader.dataset) == 0:
        raise BatchError(f"the data set ({type(loader.dataset).__name__}) is empty: check its path or filter")
    if not getattr(loader, "in_order", True):  # older subclasses (torchdata) do not have it
        raise BatchError(
            "this DataLoader's batches may overtake each other, so that no position says which samples have been "
            "read: leave in_order=False out"
        )
    if type(loader).__iter__ is not DataLoader.__iter__ and not type(loader).__module__.startswith("torchdata"):
        warnings.warn(
            f"the __iter__ of {type(loader).__name__} is not used: a prepared loader is a plain DataLoader with the "
            "same data set, collate function and workers. Put what it adds into the data set or the collate function",
            EasympWarning,
            stacklevel=3,
        )
    sampler, batch_size, drop_last, samples_batches = _sampling(loader, size)
    local_batch = batch_size
    if config.split_batches and batch_size is None and not samples_batches:
        raise BatchError(
            "split_batches=True divides batches among the processes, but this loader has batch_size=None: give the "
            "DataLoader a batch_size, or leave split_batches out"
        )
    if config.split_batches and batch_size is not None:
        local_batch = batch_size // size
        if batch_size % size:
            multiples = " or ".join(str(number * size) for number in (local_batch, local_batch + 1) if number)
            raise BatchError(
                f"split_batches=True divides each batch among {size} processes, and batch_size={batch_size} does not "
                f"divide: use {multiples}, or leave split_batches out (batch_size is then per process)"
            )
    if config.length is not None and config.tokens is None:
        raise BatchError("length= is for tokens=, which is not set: set it, or leave length out")
    if config.tokens is not None:
        _check_packable(loader, sampler, samples_batches, config)
        batch_size = local_batch = None
    cut = Cut(local_batch or 1, size, config.even_batches, drop_last, split_tail)
    device = world.device if device_placement else None
    dispatch = bool(config.dispatch_batches) and world.size > 1
    ranks = range(size) if dispatch else (rank,)
    settings: Any = {
        "seed": seed if config.data_seed is None else config.data_seed,
        "seeded": config.use_seedable_sampler,
        # Workers hand over CPU tensors, which the DataLoader's own thread can pin; without workers `moved` does it.
        "pin_memory": loader.pin_memory or (device is not None and device.type == "cuda" and loader.num_workers > 0),
    }
    source: Source
    if isinstance(loader.dataset, IterableDataset):
        source = StreamSource(loader, cut, ranks, **settings)
    else:
        loads_ahead = dispatch or (device is not None and reads_ahead(device, config.non_blocking))
        settings["batch_mode"] = ("split" if config.split_batches else "deal") if samples_batches else None
        settings |= {"for_all": dispatch, "loads_ahead": loads_ahead and not loader.num_workers}
        if config.tokens is not None:
            budget = TokenBudget(config.tokens, measure(loader.dataset, config.length, world))
            budget.check()
            settings |= {"budget": budget, "collate_fn": collate_of(loader.collate_fn)}
        source = MapSource(loader, sampler, cut, ranks, world, **settings)
    if dispatch:
        source = Dispatched(source, world, rank, config.use_seedable_sampler)
    if cut.drop_last and source.batches(rank, 0) == 0:
        warnings.warn(
            f"drop_last=True leaves nothing: {source.samples()} samples do not fill one global batch of "
            f"{cut.global_batch}. Lower the batch size, or leave drop_last out",
            EasympWarning,
            stacklevel=2,
        )
    sizes_differ = not config.split_batches if samples_batches else batch_size is None
    return kind(
        loader, source, window, world, rank, local_batch, sizes_differ, device, config.non_blocking, config.tokens
    )


def _check_packable(
    loader: DataLoader[Any], sampler: Any, samples_batches: bool, config: DataLoaderConfiguration
) -> None:
    """Raise BatchError for a loader whose samples cannot be packed by tokens."""
    reason = ""
    if isinstance(loader.dataset, IterableDataset) or length(sampler) is None:
        reason = "needs a data set and a sampler with a length: pass a map-style data set"
    elif samples_batches or loader.batch_size != 1 or config.split_batches:
        reason = (
            "decides which samples go together: leave batch_size and batch_sampler out of the DataLoader, and "
            "split_batches out of the configuration"
        )
    elif not config.use_seedable_sampler:
        reason = "draws the order of each epoch by its seed: leave use_seedable_sampler=False out"
    if reason:
        raise BatchError(f"tokens={config.tokens} {reason}")


def _sampling(loader: DataLoader[Any], size: int) -> tuple[Any, int | None, bool, bool]:
    """Sampler, samples per batch (None: the data set decides), drop_last, and whether the sampler yields batches."""
    batches: Any = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return None, loader.batch_size, loader.drop_last, False
    if batches is None:
        return loader.sampler, None, False, False
    if type(batches) is not BatchSampler:
        return batches, getattr(batches, "batch_size", None), bool(getattr(batches, "drop_last", False)), True
    sampler: Any = batches.sampler
    # DistributedSampler(drop_last=True) repeats no sample.
    drops = size > 1 and type(sampler) is DistributedSampler and sampler.drop_last
    return sampler, batches.batch_size, batches.drop_last or drops, False
