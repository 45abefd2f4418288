"""Loaders with Accelerate's random draws, its reading one batch ahead, and its last batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ... import options
from ...data import PreparedLoader, SkippedLoader, prepare_loader
from ...data.order import flagged
from ...distributed import World


@dataclass(slots=True)
class DataLoaderConfiguration(options.DataLoaderConfiguration):
    """`easymp.DataLoaderConfiguration` with Accelerate's defaults for the order of data and for dispatching.

    Attributes:
        dispatch_batches: rank 0 reads and sends; None does so for iterable data sets.
        even_batches: for map-style data sets that all ranks read.
        use_seedable_sampler: shuffle by ``seed + epoch``. False draws as a plain DataLoader.
    """

    use_seedable_sampler: bool = False


class SeedableRandomSampler(RandomSampler):
    """RandomSampler whose order is that of the seed ``initial_seed + epoch``."""

    epoch = 0

    def __init__(self, sampler: RandomSampler, initial_seed: int) -> None:
        generator = sampler.generator or torch.Generator()
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples, generator)
        self.initial_seed = initial_seed

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.initial_seed + self.epoch)
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class AcceleratedLoader(PreparedLoader):
    """Prepared loader that reads one batch ahead, as Accelerate does."""

    def _feed(self, skip: int) -> Iterator[Any]:
        return (batch for batch, _ in flagged(super()._feed(skip)))


def make_loader(
    loader: DataLoader[Any], window: Any, world: World, rank: int, size: int,
    config: options.DataLoaderConfiguration, seed: int, place: bool = True,
) -> PreparedLoader:  # fmt: skip
    """As `easymp.data.prepare_loader`, with Accelerate's numbers."""
    if isinstance(loader, (PreparedLoader, SkippedLoader)):
        return loader
    streams = isinstance(getattr(loader, "dataset", None), IterableDataset)
    dispatch = (streams and place) if config.dispatch_batches is None else config.dispatch_batches
    if isinstance(loader, DataLoader) and not streams:
        _replace_sampler(loader, world, config, own_generator=size > 1 and not dispatch)
    config = dataclasses.replace(
        config,
        use_seedable_sampler=False,  # the sampler itself is seeded
        dispatch_batches=dispatch,
        even_batches=config.even_batches or streams or dispatch,
    )
    return prepare_loader(
        loader, window, world, rank, size, config, seed, place, kind=AcceleratedLoader, split_tail=dispatch
    )


def _replace_sampler(
    loader: DataLoader[Any], world: World, config: options.DataLoaderConfiguration, own_generator: bool
) -> None:
    """Make the random sampler of `loader` a seedable one, or give it a generator, in place as Accelerate does."""
    batches: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler) and config.use_seedable_sampler:
        initial_seed = torch.initial_seed() if config.data_seed is None else config.data_seed
        batches.sampler = SeedableRandomSampler(sampler, world.broadcast_objects([initial_seed])[0])
    elif own_generator and getattr(sampler, "generator", own_generator) is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        vars(sampler)["generator"] = torch.Generator().manual_seed(seed)
