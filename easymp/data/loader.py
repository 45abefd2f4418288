"""The prepared loader: what a training loop iterates.

A pass is one ``for`` loop. Each pass that ends, or is left early, makes the next one a new epoch with its own shuffle,
unless `set_epoch` is called. `state_dict` inside a pass records the position, and the next ``for`` after
`load_state_dict` continues there once. `skip_first_batches` counts from the start of the epoch. A state saved between
two passes begins the next epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..base.accumulation import UpdateWindow
from ..distributed.process_group import World
from ..errors import BatchError, LengthError, check_whole
from ..logging import get_logger
from .order import size_of
from .packing import items_of
from .source import Source, moved, rebuild

logger = get_logger(__name__)
Loader = TypeVar("Loader", bound=Iterable[Any])


class PreparedLoader(DataLoader[Any]):
    """DataLoader that yields the batches of this rank on its device and tracks its position.

    Attributes:
        loader: the rebuilt DataLoader; unknown attributes are its own.
        batch_size: samples per batch on one rank; None if the data set or a batch sampler decides.
        epoch: the epoch being read; between two passes, the next one.
        position: samples of this epoch that all ranks together have received.
        pass_start: the position at which the pass began.
        last: whether the current batch is the last one of this rank.
        local_size: samples in the current batch on this rank; None if unknown.
        ended: epoch and position at the end of the last pass.
        finished: passes that began and ended since `replay`, outside of other loaders' passes.
        tokens: at most so many in a batch of one rank, of samples one behind the other; None: by numbers of samples.
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
        self._original, self._source, self._window, self._world = original, source, window, world
        self._rank, self._device, self._non_blocking = rank, device, non_blocking
        self._sizes_differ = sizes_differ
        samplers = (original.sampler, original.batch_sampler, getattr(original.batch_sampler, "sampler", None))
        items = {id(item): item for item in (original.dataset, *samplers)}
        # The script's objects that have `set_epoch`, and the epochs that they had when we set them last.
        self._with_set_epoch: list[Any] = [i for i in items.values() if callable(getattr(i, "set_epoch", None))]
        self._epochs_set = self._epochs_of_samplers()

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        """The user's data set."""
        return self._original.dataset

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The user's sampler. easymp computes the order of torch's samplers and does not iterate them."""
        return self._original.sampler

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        """The user's sampler of batches, which is iterated only if it is of another class; None if there is none."""
        return self._original.batch_sampler

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
        return copy.copy, (self._original,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        try:
            return getattr(self.loader, name)
        except AttributeError:
            return getattr(self._original, name)  # attributes that the user set

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


def skip_first_batches(loader: Loader, num_batches: int = 0) -> Loader:
    """Leave the first batches of a loader out of its next pass.

    Skipped samples of a map-style data set are not loaded. On a prepared loader the batches of this rank count.

    Args:
        loader: a DataLoader, or a prepared one.
        num_batches: 0 or more.

    Returns:
        A view of the loader.

    Raises:
        BatchError: `loader` is not a DataLoader, or `num_batches` is not a count.

    Example:
        >>> loader = torch.utils.data.DataLoader(range(6), batch_size=2)
        >>> list(skip_first_batches(loader, 2))
        [tensor([4, 5])]
    """
    check_whole(f"num_batches={num_batches!r}", num_batches, 0, BatchError)
    view: Any
    if isinstance(loader, SkippedLoader):
        view = SkippedLoader(loader.loader, loader.skip + num_batches)
    elif not isinstance(loader, DataLoader):
        raise BatchError(
            f"skip_first_batches takes a DataLoader, got a {type(loader).__name__}: use itertools.islice for other "
            "iterables"
        )
    elif isinstance(loader, PreparedLoader) or isinstance(loader.dataset, IterableDataset):
        view = SkippedLoader(loader, num_batches)
    else:
        sampling: Any = {"batch_sampler": SkippedLoader(loader.batch_sampler, num_batches)}
        if loader.batch_sampler is None:
            sampling = {"batch_size": None, "sampler": SkippedLoader(loader.sampler, num_batches)}
        view = rebuild(loader, loader.dataset, loader.pin_memory, generator=loader.generator, **sampling)
    return view  # type: ignore[no-any-return]


class SkippedLoader:
    """View of `loader`, a loader or a sampler; its next pass begins `skip` batches later."""

    def __init__(self, loader: Any, skip: int) -> None:
        self.loader, self.skip = loader, skip

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        if isinstance(self.loader, PreparedLoader):
            return self.loader.read(skip)
        return islice(self.loader, skip, None)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.skip)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)


# -- the samples of an update ------------------------------------------------------------------------------------------


class Samples(NamedTuple):
    """The samples of an update: places `begin` to `end` in the order of an epoch, over all ranks."""

    loader: Callable[[], PreparedLoader | None]
    epoch: int
    begin: int
    end: int


class SampleTracker:
    """Follows the places of the updates of one run."""

    def __init__(self, window: UpdateWindow) -> None:
        self._window = window
        self._last = Samples(lambda: None, 0, 0, 0)  # of the last update

    def samples(self) -> Samples | None:
        """The samples of this update; None if they do not come from a prepared loader. Call it at each update."""
        window, last = self._window, self._last
        loader = window.reading
        if not isinstance(loader, PreparedLoader):
            return None
        begin, continues = last.end, last.loader() is loader and last.epoch == loader.epoch
        if continues and begin == loader.position:  # another optimizer's part of the same update
            return last
        if not continues or begin > loader.position:
            micro_steps = window.micro if window.accumulation != 1 else 1
            size = loader.total_batch_size
            begin = loader.pass_start if size is None else max(0, loader.position - micro_steps * size)
        self._last = Samples(ref(loader), loader.epoch, begin, loader.position)
        return self._last
