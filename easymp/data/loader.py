"""The prepared loader: what a training loop iterates.

A pass is one ``for`` loop. Each pass that ends, or is left early, makes the next one a new epoch with its own shuffle,
unless `set_epoch` is called. `state_dict` inside a pass records the position, and the next ``for`` after
`load_state_dict` continues there once. `skip_first_batches` counts from the start of the epoch. A state saved between
two passes begins the next epoch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, default_collate

from ..base.accumulation import UpdateWindow
from ..distributed.process_group import World
from ..errors import BatchError, EasympWarning, LengthError
from ..logging import get_logger
from ..options import DataLoaderConfiguration
from .order import Cut, length, size_of
from .packing import TokenBudget, items_of, measure, pack
from .source import Dispatched, MapSource, Source, moved, reads_ahead
from .stream import StreamSource

logger = get_logger(__name__)


class PreparedLoader(DataLoader[Any]):
    """DataLoader that yields the batches of this rank on its device and tracks its position.

    Attributes:
        loader: the rebuilt DataLoader. Unknown attributes are those of the user's: `dataset`, `sampler` …
        batch_size: samples per batch on one rank; None if the data set or a batch sampler decides.
        epoch: the epoch being read; between two passes, the next one.
        position: samples of this epoch that all ranks together have received.
        pass_start: the position at which the pass began.
        last: whether the current batch is the last one of this rank.
        local_size: samples in the current batch on this rank; None if unknown.
        ended: epoch and position at the end of the last pass.
        finished: passes that began and ended since `replay`, outside of other loaders' passes.
        tokens: the largest number of tokens in a batch of one rank, of packed samples; None: batches count samples.
        items: ``num_items`` of the current batch where `tokens` is set.
        reads: batches since the last backward, where `tokens` is set.

    Example:
        >>> data = torch.utils.data.DataLoader(range(8), batch_size=4)
        >>> loader = Accelerator(cpu=True).prepare(data)
        >>> len(loader), loader.total_batch_size, loader.dataset, loader.even_batches, loader.uneven
        (2, 4, range(0, 8), True, False)
        >>> for batch in loader:
        ...     print(batch, loader.position, loader.surplus)
        ...     break
        tensor([0, 1, 2, 3]) 4 0
        >>> loader.load_state_dict({"epoch": 0, "position": 4, "seed": 0})  # from loader.state_dict()
        >>> [batch.tolist() for batch in loader]
        [[4, 5, 6, 7]]
        >>> loader.set_epoch(3)
        >>> loader.batch_line(accumulation=2)
        '4 per device × 1 process × 2 accumulation = 8'
        >>> type(loader.sampler).__name__, loader.batch_sampler.batch_size, list(loader.read(skip=1))
        ('SequentialSampler', 4, [tensor([4, 5, 6, 7])])
        >>> loader.total_dataset_length, loader.end_of_dataloader, loader.remainder
        (8, False, 0)
        >>> loader.indices(0, 2, 5)
        [2, 3, 4]
        >>> loader.replay(finished=1)  # the next pass is empty
        >>> list(loader)
        []
    """

    dataset: Any
    epoch = position = pass_start = finished = 0
    ended: tuple[int, int] | None = None
    last = False
    local_size: int | None = None
    items: Any = None
    reads = 0
    _pass: object | None = None  # the running pass
    _nested = False  # whether the running pass began inside another loader's
    _next_epoch: int | None = None  # set_epoch, while a pass runs
    _resume = False  # the next pass begins at `position`, not at 0 …
    _at_end = False  # … and has nothing left: the state was taken at its last batch
    _surplus = 0  # repeated samples of this round
    _loads = 0  # number of states loaded
    _replays = 0  # calls of `replay` …
    _replays_at_begin = 0  # … when the running pass began
    _empty_passes = 0  # passes to come that have no batches

    def __init__(
        self,
        original: DataLoader[Any],
        source: Source,
        window: UpdateWindow,
        world: World,
        rank: int,
        batch_size: int | None,
        sizes_differ: bool,
        device: torch.device | None,
        non_blocking: bool,
        tokens: int | None = None,
    ) -> None:
        self.tokens = tokens
        self.loader, self.batch_size = source.loader, batch_size
        self.original, self._source, self._window, self._world = original, source, window, world
        self._rank, self._device, self._non_blocking = rank, device, non_blocking
        self._sizes_differ = sizes_differ
        samplers = (original.sampler, original.batch_sampler, getattr(original.batch_sampler, "sampler", None))
        items = {id(item): item for item in (original.dataset, *samplers)}
        # The script's objects that have `set_epoch`, and the epochs that they had when we set them last.
        self._with_set_epoch: list[Any] = [i for i in items.values() if callable(getattr(i, "set_epoch", None))]
        self._epochs_set = self._epochs_of_samplers()

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def even_batches(self) -> bool:
        """Whether an incomplete last round is completed. A new value takes effect in the next pass."""
        return self._source.cut.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._source.cut = self._source.cut._replace(even=even)

    @property
    def uneven(self) -> bool:
        """Whether the ranks' batches may differ in number or size."""
        cut = self._source.cut
        return cut.ranks > 1 and (self._sizes_differ or not (cut.even or cut.drop_last))

    @property
    def total_batch_size(self) -> int | None:
        """Samples per batch over all ranks; None if `batch_size` is None."""
        return None if self.batch_size is None else self.batch_size * self._source.cut.ranks

    @property
    def surplus(self) -> int:
        """Repeated samples at the end of the current global batch in rank order; 0 except in a completed round.

        Raises:
            BatchError: the number is unknown (ready batches without a size).
        """
        if self._surplus < 0:
            raise BatchError(
                "the number of repeated samples is not known, because the data set yields ready batches: pass "
                "even_batches=False, or let the DataLoader make the batches"
            )
        return self._surplus

    @property
    def end_of_dataloader(self) -> bool:
        """`last`, by Accelerate's name."""
        return bool(self.last)

    @property
    def total_dataset_length(self) -> int:
        """Samples of the data set, by Accelerate's name."""
        return len(self.dataset)

    @property
    def remainder(self) -> int:
        """Samples in an incomplete last global batch, without repeated ones; 0 if it is complete, -1 if unknown."""
        samples, global_batch = self._source.samples(), self.total_batch_size
        if samples is not None and global_batch and not self._source.cut.drop_last:
            return samples % global_batch
        return global_batch - self.surplus if global_batch and self.surplus else -1

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch, also if the next pass resumes inside one.

        Raises:
            LengthError: the data set or sampler has no length.
        """
        batches = self._source.batches(self._rank, self.epoch)
        if batches is None:
            candidates = (self.dataset, self.sampler, self.batch_sampler)
            endless = next(item for item in candidates if item is not None and size_of(item) is None)
            raise LengthError(
                f"this loader has no length, because its {type(endless).__name__} has none: count steps instead of "
                "epochs, or give the data set or sampler a __len__"
            )
        return batches

    def lengths(self, epochs: int) -> list[int]:
        """Batches of this rank in each of the first epochs; with `tokens` they differ.

        Args:
            epochs: how many, from epoch 0 on.

        Returns:
            One number an epoch.

        Raises:
            LengthError: the data set or sampler has no length.

        Example:
            >>> Accelerator(cpu=True).prepare(loader).lengths(epochs=2)
            [4, 4]
        """
        if self.tokens is None:
            return [len(self)] * epochs
        return [self._source.batches(self._rank, epoch) or 0 for epoch in range(epochs)]

    def batch_line(self, accumulation: int = 1) -> str:
        """Write out the arithmetic of the global batch.

        Args:
            accumulation: micro-batches in an update.

        Returns:
            ``"4 per device × 2 processes × 3 accumulation = 24"``.
        """
        ranks, size = self._source.cut.ranks, self.batch_size or 0
        unit = ""
        if self.tokens is not None:
            size, unit = self.tokens, " tokens at most"
        line = f"{size:,}{unit} per device × {ranks} process{'es' if ranks > 1 else ''}"
        line += f" × {accumulation} accumulation" if accumulation > 1 else ""
        return f"{line} = {size * ranks * accumulation:,}"

    def __reduce__(self) -> Any:
        """Copies are of the user's DataLoader, to be prepared where they are used."""
        return copy.copy, (self.original,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.original, name)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not (self._resume and self.position):
            return self.read(0)
        batches = self._resumed_pass(self._loads)
        next(batches)  # up to its first yield, so that its `finally` runs if it is dropped unread
        return batches

    def _resumed_pass(self, loads: int) -> Iterator[Any]:
        # If it is dropped unread, as by ``zip`` with an exhausted loader, the pass counts as left early, unless no
        # other loader has continued yet.
        is_read, window = False, self._window
        try:
            yield
            is_read = True
            yield from self.read(0)
        finally:
            dropped = not is_read and self._resume and self._loads == loads
            if dropped and (window.went_on or window.resuming <= {id(self)}):
                self._begin(0)
                self._nested, self._at_end = True, False
                self._end()

    def read(self, skip: int) -> Iterator[Any]:
        """Begin a pass.

        Args:
            skip: batches at its start that are left out.

        Returns:
            An iterator over the other batches.
        """
        if self._empty_passes:
            self._empty_passes -= 1
            return
        window, loads = self._window, self._loads
        enclosing, resumes = window.enclosing, id(self) in window.resuming
        this_pass, skip = self._begin(skip)
        self._nested = enclosing is not None and enclosing is not self
        source, feed = self._source, self._feed(skip)
        # A resumed loader inside another loop runs beside it: an inner loop would begin again from its start.
        window.begin_pass(self, as_iterator=resumes and enclosing is not None)
        parts = window.parts
        try:
            for notify in parts.pass_begins:
                notify(self)
            counts, forwards = self._unequal_counts(skip), self._world.forwards
            for number, (batch, note) in enumerate(feed):
                _, self.position, self._surplus, self.local_size, self.last, mark = note
                if counts and number == min(counts):
                    self._refuse_uneven(counts, forwards)
                if mark is not None:
                    source.advance(mark)
                if self.tokens is not None:
                    self.items, self.reads = items_of(batch, self.tokens), self.reads + 1
                for change in parts.batch_ready:
                    changed = change(self, batch)
                    batch = batch if changed is None else changed
                yield batch
                if self._loads != loads:
                    return  # another state was loaded, so the next pass continues there
                if window.enclosing is not self:
                    window.request_batch(self)
                for notify in parts.batch:
                    notify(self)
            if counts:
                self._refuse_uneven(counts, forwards)
            self._world.settle()
        finally:
            for notify in parts.pass_ends:
                notify(self)
            window.end_pass(self)
            if self._pass is this_pass:
                self._end()

    def _feed(self, skip: int) -> Iterator[Any]:
        """Batches and notes of the pass that begins."""
        at_end, self._at_end = self._at_end, False
        if at_end and self._window.epochs is None and self._window.full_passes:
            self.epoch, self.position = self.epoch + 1, 0
            self._set_epochs()
        elif at_end:
            if self._window.epochs is None:
                logger.warning(
                    "the checkpoint was taken at a loader's last batch, so nothing is left of that pass, and the loop "
                    "over it has no batch: a script that counts epochs by itself, and begins with the next one, says "
                    "so by loader.set_epoch(number)"
                )
            return iter(())
        feed = self._source.read(self.epoch, self.position, skip)
        return feed if self._device is None else moved(feed, self._device, self._non_blocking)

    def _unequal_counts(self, skip: int) -> list[int]:
        """Batches of each rank in a whole pass, if they are known and differ; else empty."""
        if skip or self.position or not self.uneven:
            return []
        counts = [self._source.batches(rank, self.epoch) for rank in range(self._source.cut.ranks)]
        return [count for count in counts if count is not None] if None not in counts and len(set(counts)) > 1 else []

    def _refuse_uneven(self, counts: list[int], forwards: int) -> None:
        """BatchError on all ranks if some are out of batches and the loop has called a sharded model."""
        if self._world.forwards != forwards:
            raise BatchError(
                f"the ranks have {', '.join(map(str, counts))} batches in this pass, and the model's parameters are "
                "sharded, so that each forward needs every rank: keep even_batches=True in DataLoaderConfiguration, "
                f"make the DataLoader with drop_last=True, or leave the loop after {min(counts)} batches"
            )

    def _begin(self, skip: int) -> tuple[object, int]:
        if self._pass is not None:  # a pass left early and not yet collected, or a loop inside a loop
            self._end()
        for item, epoch, epoch_set in zip(self._with_set_epoch, self._epochs_of_samplers(), self._epochs_set):
            if item is not self.dataset and epoch != epoch_set and isinstance(epoch, int):
                self.set_epoch(epoch)  # the script called the sampler's set_epoch, as with DistributedSampler
        if id(self) in self._window.resuming:
            self._window.resuming.remove(id(self))
            self._window.went_on = True
        if not self._resume:
            self.position = 0
        elif skip:  # a script that counts its batches from the start of the epoch
            if self.total_batch_size is None or skip * self.total_batch_size != self.position:
                self.position, self._at_end = 0, False
            else:
                skip = 0
        self._resume = False
        self._set_epochs()
        self._pass, self._replays_at_begin = object(), self._replays
        self.pass_start, self.reads = self.position, 0
        return self._pass, skip

    def _end(self) -> None:
        self._pass, self.ended = None, (self.epoch, self.position)
        self.finished += not self._nested and self._replays_at_begin == self._replays
        self.epoch = self.epoch + 1 if self._next_epoch is None else self._next_epoch
        self._next_epoch = None
        self.position = self._surplus = 0
        self.local_size, self.items, self.last = None, None, False

    # -- epochs and positions -----------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Read another epoch next. A position to resume at stays if it belongs to that epoch and is dropped otherwise.

        Args:
            epoch: its number, from 0.
        """
        if self._pass is not None:
            self._next_epoch = epoch
            return
        if epoch != self.epoch:
            self.epoch, self.position, self._resume, self._at_end = epoch, 0, False, False
            self._window.resuming.discard(id(self))
        self._set_epochs()

    def indices(self, epoch: int, begin: int, end: int) -> list[Any] | None:
        """Indices into the data set of the samples at positions `begin` to `end` of an epoch, over all ranks.

        Args:
            epoch: its number, from 0.
            begin: the first position.
            end: the position after the last one.

        Returns:
            None for streams, samplers of batches or without a length, and ``use_seedable_sampler=False``.
        """
        return self._source.indices(epoch, begin, end)

    def replay(self, finished: int) -> None:
        """Begin an epoch of the run in which some passes have been made: they come again without batches.

        Args:
            finished: number of passes over this loader.
        """
        self.finished = self._empty_passes = finished
        self._replays += 1

    def _epochs_of_samplers(self) -> list[Any]:
        return [getattr(item, "epoch", None) for item in self._with_set_epoch]

    def _set_epochs(self) -> None:
        for item in self._with_set_epoch:
            item.set_epoch(self.epoch)
        self._epochs_set = self._epochs_of_samplers()

    def state_dict(self) -> dict[str, Any]:
        """Save epoch, position, seed and the state of the source.

        Returns:
            Plain JSON types, except for what the `state_dict` of the data set holds and the state of a sampler's own
            generator under ``use_seedable_sampler=False``.
        """
        state: dict[str, Any] = {"epoch": self.epoch, "position": self.position, "seed": self._source.seed}
        if (drawing := self._source.drawing()) is not None:
            state["drawing"] = drawing
        if self.position:
            state.update(self._source.state())
            if self.last or self._at_end:
                state["over"] = True
        if self._is_stateful():
            state["data set"] = self.dataset.state_dict()
        return state

    def _is_stateful(self) -> bool:
        """Whether the data set has a state of its own; a stream's travels with its batches."""
        methods = (getattr(self.dataset, name, None) for name in ("state_dict", "load_state_dict"))
        return not isinstance(self.dataset, IterableDataset) and all(map(callable, methods))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position in the next ``for``, at any number of ranks.

        Args:
            state: from `state_dict`.

        Raises:
            BatchError: it is not the state of a prepared loader, or was saved inside a pass over a data set of another
                length, or in another order.
        """
        if missing := [key for key in ("epoch", "position", "seed") if not isinstance(state.get(key), int)]:
            raise BatchError(f"the state has no {' and no '.join(missing)}: pass a prepared loader's state_dict()")
        if state["position"]:
            self._check_data(state)
        self._source.load(state)
        if "data set" in state and self._is_stateful():
            self.dataset.load_state_dict(state["data set"])
        self._pass, self._next_epoch = None, None
        self._surplus, self.local_size, self.last = 0, None, False
        self.epoch, self.position, self._at_end = state["epoch"], state["position"], bool(state.get("over"))
        self._resume = True
        self._loads += 1
        self._window.went_on = False
        self._window.resuming.discard(id(self))
        if self.position:
            self._window.resuming.add(id(self))
        self._set_epochs()

    def _check_data(self, state: dict[str, Any]) -> None:
        """BatchError where the rest of a pass would be of other data, or in another order, than its beginning."""
        saved, present = state.get("samples"), self._source.samples()
        if None not in (saved, present) and saved != present:
            raise BatchError(
                f"the state was saved in the middle of an epoch of {saved} samples, and this one has {present}: resume "
                "with the same data set, or start a new epoch with set_epoch"
            )
        saved, present = state.get("order"), self._source.state().get("order")
        if None not in (saved, present) and saved != present and not state.get("over"):
            raise BatchError(
                f"the state was saved inside a pass that reads samples {saved}, and this loader reads them {present}: "
                "some would be read twice, and others not at all. Resume with the same sampler, or load at an epoch's "
                "end, or leave the position out with load_state(strict=False)"
            )


# -- how loaders are prepared: by the source that does on many ranks what a DataLoader's settings say ------------------


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
    """Shard `loader` over the `size` ranks that share the data; this process has the share number `rank`.

    The data order is of `seed`, the same on every rank, unless `config` has another. `split_tail`: see `Cut`.
    """
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
            collate = pack if loader.collate_fn is default_collate else loader.collate_fn
            settings |= {"budget": budget, "collate_fn": collate}
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
