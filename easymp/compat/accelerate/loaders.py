"""Loaders with Accelerate's random draws, its reading one batch ahead, and its last batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ... import options
from ...data import PreparedLoader, SkippedLoader
from ...data.order import flagged
from ...data.prepare import prepare_loader
from ...distributed import World
from ...errors import RefusedError, SettingError
from ...training.collectives import broadcast_object_list
from ...training.state import current_world
from .processes import GradientState, PartialState


@dataclass(slots=True)
class DataLoaderConfiguration(options.DataLoaderConfiguration):
    """`easymp.DataLoaderConfiguration` with Accelerate's defaults for the order of data and for dispatching.

    Attributes:
        dispatch_batches: rank 0 reads and sends; None does so for iterable data sets.
        even_batches: for map-style data sets that all ranks read.
        use_seedable_sampler: shuffle by ``seed + epoch``. False draws as a plain DataLoader.
    """

    use_seedable_sampler: bool = False


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Give all ranks rank 0's random state: of "torch", of the device ("cuda" …), or of a `generator`."""
    for rng_type in map(str, rng_types):
        if rng_type == "generator":
            if generator is None:
                raise SettingError("synchronize_rng_states(['generator']): pass the generator")
            read, write = generator.get_state, generator.set_state
        else:
            streams: Any = torch if rng_type == "torch" else torch.get_device_module(PartialState().device)
            read, write = streams.get_rng_state, streams.set_rng_state
        states = [read()]
        broadcast_object_list(states)
        write(states[0])


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """`synchronize_rng_states` of one."""
    synchronize_rng_states([rng_type], generator)


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
    """Prepared loader that synchronises random streams first and reads one batch ahead, as Accelerate does."""

    rng_types: Sequence[Any] = ()

    def _feed(self, skip: int) -> Iterator[Any]:
        synchronize_rng_states(rng_type for rng_type in self.rng_types if str(rng_type) != "generator")
        return (batch for batch, _ in flagged(super()._feed(skip)))


def make_loader(
    loader: DataLoader[Any], window: Any, world: World, rank: int, size: int,
    config: options.DataLoaderConfiguration, seed: int, place: bool = True, *, rng_types: Sequence[Any] | None = None,
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
    prepared = prepare_loader(
        loader, window, world, rank, size, config, seed, place, kind=AcceleratedLoader, split_tail=dispatch
    )
    vars(prepared)["rng_types"] = rng_types or ()
    return prepared


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


def prepare_data_loader(
    dataloader: DataLoader[Any], device: Any = None, num_processes: int | None = None, process_index: int | None = None,
    split_batches: bool = False, put_on_device: bool = False, rng_types: Any = None,
    dispatch_batches: bool | None = None, even_batches: bool = True, slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False, data_seed: int | None = None, non_blocking: bool = False,
    use_stateful_dataloader: bool = False, torch_device_mesh: Any = None,
) -> PreparedLoader:  # fmt: skip
    """As `Accelerator.prepare_data_loader`, for any share: `num_processes`, of which this one is `process_index`."""
    if slice_fn_for_dispatch is not None or torch_device_mesh is not None:
        raise RefusedError("slice_fn_for_dispatch and torch_device_mesh are not honoured: leave them out")
    world = current_world()
    return make_loader(
        dataloader,
        GradientState()._window,
        world,
        rank=world.rank if process_index is None else process_index,
        size=num_processes or world.size,
        config=DataLoaderConfiguration(
            split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed, non_blocking
        ),
        seed=torch.initial_seed(),
        place=put_on_device,
        rng_types=rng_types,
    )
