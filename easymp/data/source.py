"""Sources of a prepared loader: the interface, map-style data sets, reading on rank 0 for all, the way to the device.

On CUDA a side stream copies batches k+1 and k+2 while the step computes on batch k. CPU memory is pinned first: by the
thread of a DataLoader with workers, else here. The compute stream waits for the copy of its batch only. Sparse tensors,
tensor subclasses and packed sequences move by their own `to` when their batch is due. Other devices move whole batches
then, and the CPU moves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from ..base import pytree
from ..base.rng import isolated, mix, seed_host
from ..distributed.process_group import World
from ..errors import BatchError
from . import order
from .order import Cut, Share, length, size_of
from .packing import TokenBudget

COPIES_AHEAD = 2  # batches on their way to the device
INDICES_AHEAD = 32  # batches of indices computed at once if the order is known beforehand


class Note(NamedTuple):
    """Facts that travel with a batch."""

    rank: int
    end: int  # samples of the epoch over all ranks, the round of this batch included
    surplus: int  # repeated samples at the end of the round; -1 if unknown
    size: int | None  # this rank's samples
    last: bool  # whether this rank's pass ends here
    mark: Any = None  # position of a stream after this batch


Feed = Iterator[tuple[Any, Note]]


class Source(Protocol):
    """Reads this rank's batches. None stands for an unknown number."""

    loader: DataLoader[Any]
    seed: int
    cut: Cut  # may be replaced between two passes

    def batches(self, rank: int, epoch: int) -> int | None: ...  # of a data rank
    def samples(self) -> int | None: ...  # of all ranks in an epoch
    def indices(self, epoch: int, begin: int, end: int) -> list[Any] | None: ...  # at these places of the order
    def read(self, epoch: int, start: int, skip: int) -> Feed: ...  # from a global sample on, without `skip` batches
    def advance(self, mark: Any) -> None: ...  # called with the mark of each batch in use
    def state(self) -> dict[str, Any]: ...  # for a resume inside a pass, beside epoch, position and seed
    def drawing(self) -> list[Tensor] | None: ...  # states of the sampler's generators, if they decide the next order
    def load(self, state: dict[str, Any]) -> None: ...


def generator_of(*parts: int | str) -> torch.Generator:
    """A generator that `mix` of `parts` seeds."""
    return torch.Generator().manual_seed(mix(*parts))


def rebuild(loader: DataLoader[Any], dataset: Any, pin_memory: bool, **sampling: Any) -> DataLoader[Any]:
    """A DataLoader with the settings of `loader` and other sampling. `read` sets its generator at each pass."""
    names = ["collate_fn", "num_workers", "timeout", "worker_init_fn"]
    if loader.num_workers > 0:
        names += ["multiprocessing_context", "prefetch_factor", "persistent_workers"]
    settings = {name: getattr(loader, name) for name in names}
    settings["in_order"] = getattr(loader, "in_order", True)  # older subclasses (torchdata) do not have it
    return DataLoader(dataset, pin_memory=pin_memory, **(settings | sampling))


# -- random numbers of data sets and collate functions: f(seed, epoch, batch)


class Seeded(NamedTuple):
    """Indices of one batch for a worker. Unpickling them seeds the worker's random streams."""

    indices: Any
    seed: int

    def __reduce__(self) -> Any:
        return _seed_and_return, (self.indices, self.seed)


def _seed_and_return(indices: Any, seed: int) -> Any:
    seed_host(seed)
    return indices


def without_draws(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`, and restore the training's random streams after each read. The producer seeds its own streams."""
    reader = iter(items)
    while True:
        with isolated():
            try:
                item = next(reader)
            except StopIteration:
                return
        yield item


# -- one rank reads for all

RankBatches = list[tuple[Any, Note]]  # one round: the batch of rank r at index r


class Dispatched:
    """Source that reads `source` on rank 0 only and sends each round to the other ranks (``dispatch_batches=True``)."""

    def __init__(self, source: Source, world: World, rank: int, seeded: bool) -> None:
        self._source, self._world, self._rank, self._seeded = source, world, rank, seeded

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    @property
    def cut(self) -> Cut:
        return self._source.cut

    @cut.setter
    def cut(self, cut: Cut) -> None:
        self._source.cut = cut

    def read(self, epoch: int, start: int, skip: int) -> Feed:
        main = self._world.rank == 0
        if not (main or start or self._seeded):
            torch.empty((), dtype=torch.int64).random_()  # the seed that rank 0's DataLoader draws for its workers
        rounds = self._send(_by_round(self._source.read(epoch, start, skip))) if main else self._receive()
        for batches, next_count in rounds:
            if self._rank < len(batches):
                batch, note = batches[self._rank]
                yield batch, note._replace(last=self._rank >= next_count)

    def _send(self, reader: Iterator[tuple[RankBatches, int]]) -> Iterator[tuple[RankBatches, int]]:
        while True:
            try:
                item = next(reader, None)
            except Exception as error:
                # The other ranks wait for a batch: send the reason, so that they do not wait for the timeout.
                self._world.broadcast_objects([f"{type(error).__name__}: {error}"])
                raise
            self._world.broadcast_objects([item])
            if item is None:
                return
            yield item

    def _receive(self) -> Iterator[tuple[RankBatches, int]]:
        while (item := self._world.broadcast_objects([None])[0]) is not None:
            if isinstance(item, str):
                raise BatchError(f"rank 0, which reads for all (dispatch_batches=True), could not read a batch: {item}")
            yield item


def _by_round(feed: Feed) -> Iterator[tuple[RankBatches, int]]:
    """Each round with the number of ranks that have a batch in the next one."""
    complete: RankBatches = []
    current: RankBatches = []
    for batch, note in feed:
        if note.rank == 0:
            if complete:
                yield complete, len(current)
            complete, current = current, []
        current.append((batch, note))
    if complete:
        yield complete, len(current)
    if current:
        yield current, 0


# -- the way to the device


def reads_ahead(device: torch.device, non_blocking: bool) -> bool:
    """Whether `moved` reads batches ahead."""
    return device.type == "cuda" and non_blocking


def moved(feed: Feed, device: torch.device, non_blocking: bool) -> Feed:
    """`feed` with its batches on `device`; `feed` itself on the CPU."""
    if device.type == "cpu":
        return feed
    if reads_ahead(device, non_blocking):
        return _copied_ahead(feed, device)
    return ((pytree.send_to_device(batch, device, non_blocking), note) for batch, note in feed)


def _copied_ahead(feed: Feed, device: torch.device) -> Feed:
    copy_stream = torch.cuda.Stream(device)

    def start_copy(leaf: Any) -> Any:
        return _pin(leaf).to(device, non_blocking=True) if _is_plain(leaf) else leaf

    copies: deque[tuple[Any, torch.cuda.Event, Note]] = deque()
    for batch, note in feed:
        # CUDA tensors that the data set made itself are on the compute stream: nothing to wait for here.
        with torch.cuda.stream(copy_stream):
            copies.append((pytree.map_leaves(start_copy, batch), copy_stream.record_event(), note))
        if len(copies) > COPIES_AHEAD:
            yield _finish_copy(*copies.popleft(), device)
    while copies:
        yield _finish_copy(*copies.popleft(), device)


def _is_plain(leaf: Any) -> bool:
    """Whether `leaf` has one memory block that can be pinned and recorded on a stream."""
    return type(leaf) is Tensor and leaf.layout is torch.strided


def _pin(leaf: Tensor) -> Tensor:
    return leaf.pin_memory() if leaf.device.type == "cpu" and not leaf.is_pinned() else leaf


def _finish_copy(batch: Any, copied: torch.cuda.Event, note: Note, device: torch.device) -> tuple[Any, Note]:
    """Make the compute stream wait for the copy of `batch`, and move leaves that are not plain tensors."""
    compute = torch.cuda.current_stream(device)
    compute.wait_event(copied)
    has_other_leaves = False
    for leaf in pytree.leaves(batch):
        if not _is_plain(leaf):
            has_other_leaves |= hasattr(leaf, "to")
        elif leaf.is_cuda:
            # The side stream allocated this memory: keep it until the compute stream is done with it.
            leaf.record_stream(compute)
    return pytree.send_to_device(batch, device, non_blocking=True) if has_other_leaves else batch, note


# -- map-style data sets: the order is known beforehand, so each rank loads its own samples only


class IndexBatches:
    """Batch sampler of the rebuilt DataLoader: one object for all epochs, so that workers can persist."""

    upcoming: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.upcoming


class MapSource:
    """Reads a map-style data set by batches of indices, each with a note that waits until its batch is there."""

    _packed: tuple[int, int, Any] | None = None  # epoch, seed and order, where tokens are counted
    _counts: tuple[Any, list[int]] | None = None  # epoch, seed and cut, and the micro-batches of each rank by tokens
    _checked = False
    _drawn: list[Any] | None = None  # random states before the current order was drawn, if it is not f(seed, epoch)
    _digest: str | None = None  # of the order of the pass that runs, or was loaded …
    _loaded_digest: str | None = None  # … which the next pass must have if it begins inside the epoch

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: Any,
        cut: Cut,
        ranks: Sequence[int],  # data ranks that this process reads for: its own, or all of them
        world: World,
        *,
        seed: int,
        batch_mode: str | None,  # None, or for samplers of batches: "deal" whole ones to the ranks, "split" each one
        seeded: bool,  # draw by f(seed, epoch); else as a plain DataLoader, whose order rank 0 draws for all
        pin_memory: bool,
        for_all: bool,  # this process draws and reads for all ranks
        loads_ahead: bool,  # this process loads a batch before the step of the one before it
        budget: TokenBudget | None = None,  # cuts the order by tokens; None: by `cut`'s number of samples
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        self.seed, self.cut, self._budget = seed, cut, budget
        self._sampler, self._ranks, self._batch_mode = sampler, ranks, batch_mode
        self._world, self._seeded, self._for_all, self._loads_ahead = world, seeded, for_all, loads_ahead
        self._items_are_batches = loader.batch_sampler is None
        self._redraw: dict[int, list[Any]] = {}  # random states by epoch, to draw an order again after a resume
        self._generator = None if for_all else loader.generator
        self._index_batches = IndexBatches()
        sampling: Any = {"batch_sampler": self._index_batches}
        if collate_fn is not None:
            sampling["collate_fn"] = collate_fn
        if self._items_are_batches:
            sampling = {"sampler": self._index_batches, "batch_size": None}
        self.loader = rebuild(loader, loader.dataset, pin_memory, **sampling)

    def batches(self, rank: int, epoch: int) -> int | None:
        total = length(self._sampler)
        if self._budget is not None and total is not None:
            key = epoch, self.seed, self.cut
            if self._counts is None or self._counts[0] != key:
                self._counts = key, self._budget.batches(self._packed_order(epoch), self.cut)
            return self._counts[1][rank]
        if total is None or self._batch_mode == "split":
            return total
        return (self.cut._replace(batch=1) if self._batch_mode else self.cut).batches(total, rank)

    def _packed_order(self, epoch: int) -> Any:
        """The order of an epoch, drawn once: it is counted before it is read, and a sampler may have a state."""
        if self._packed is None or self._packed[:2] != (epoch, self.seed):
            sampler, present = self._sampler, getattr(self._sampler, "epoch", None)
            follows_epochs = callable(getattr(sampler, "set_epoch", None)) and present is not None
            if follows_epochs:
                sampler.set_epoch(epoch)
            self._packed = epoch, self.seed, order.draw(sampler, mix(self.seed, "order", epoch))
            if follows_epochs:
                sampler.set_epoch(present)
        return self._packed[2]

    def samples(self) -> int | None:
        return None if self._batch_mode else length(self._sampler)

    def indices(self, epoch: int, begin: int, end: int) -> list[Any] | None:
        if self._batch_mode or not self._seeded or size_of(self._sampler) is None:
            return None
        epoch_order: Any = order.draw(self._sampler, mix(self.seed, "order", epoch))
        return list(epoch_order[begin:end])

    def read(self, epoch: int, start: int, skip: int) -> Feed:
        notes: deque[Note] = deque()
        upcoming = islice(self._shares(epoch, start), skip * len(self._ranks), None)
        indices = self._indices(upcoming, notes)
        if self._seeded and (self._loads_ahead or self.loader.num_workers > 0):
            indices = self._with_seeds(indices, notes, epoch)
        self._index_batches.upcoming = indices
        self.loader.generator = self._generator
        if self._seeded or start:
            self.loader.generator = generator_of(self.seed, "workers", epoch, start, self._ranks[0])
        next_note = notes.popleft
        for batch in without_draws(self.loader) if self._loads_ahead and self._seeded else self.loader:
            yield batch, next_note()

    def _with_seeds(self, indices: Iterator[Any], notes: deque[Note], epoch: int) -> Iterator[Any]:
        """Yield `indices` and seed the random streams for each batch where it is loaded."""
        for items in indices:
            note = notes[-1]
            seed = mix(self.seed, "batch", epoch, note.rank, note.end)
            if self._loads_ahead:
                seed_host(seed)
            yield items if self._loads_ahead else Seeded(items, seed)

    def _indices(self, upcoming: Iterator[Share], notes: deque[Note]) -> Iterator[Any]:
        reader = order.flagged(upcoming)
        # Many batches of indices in one loop take a quarter of the time of computing them one by one between steps.
        chunk_size = INDICES_AHEAD if self.samples() is not None else 1
        while chunk := list(islice(reader, chunk_size)):
            for (rank, items, end, surplus), last in chunk:
                if self._items_are_batches:
                    notes.append(Note(rank, end, -1 if surplus else 0, None, last))
                    yield items[0]
                else:
                    notes.append(Note(rank, end, surplus, len(items), last))
                    yield items

    def _shares(self, epoch: int, start: int) -> Iterator[Share]:
        cut, ranks, epoch_order = self.cut, self._ranks, self._order(epoch)
        self._check_digest(epoch_order, resumes=start > 0)
        if self._budget is not None:
            yield from self._budget.shares(epoch_order, cut, ranks, start)
        elif isinstance(epoch_order, Sequence) and not self._batch_mode:
            readers = [order.shares(epoch_order, cut, rank, start) for rank in ranks]
            while round_shares := [share for reader in readers for share in islice(reader, 1)]:
                yield from round_shares
        elif self._batch_mode == "split":
            for round_ in order.split_batches(epoch_order, cut.ranks, even=cut.even, start=start):
                yield from order.parts(round_, -(-len(round_.items) // cut.ranks), ranks)
        else:
            for round_ in order.rounds(epoch_order, cut, size_of if self._batch_mode else None, start):
                yield from order.parts(round_, None if self._batch_mode else cut.part(len(round_.items)), ranks)

    def _order(self, epoch: int) -> Any:
        if not self._seeded and length(self._sampler) is not None:
            return self._plain_order(epoch)
        chunk = self.cut.ranks if self._batch_mode else self.cut.global_batch
        if self._budget is not None:
            epoch_order = self._packed_order(epoch)
        else:
            epoch_order = order.draw(self._sampler, mix(self.seed, "order", epoch), chunk)
        if isinstance(epoch_order, list) and not self._for_all and not self._checked:
            order.check_same_order(epoch_order, self._world)
            self._checked = True
        return epoch_order

    def _check_digest(self, epoch_order: Any, resumes: bool) -> None:
        """BatchError where a resumed pass would go on with other samples than it began with."""
        saved, self._loaded_digest = self._loaded_digest, None
        self._digest = order.digest(epoch_order, self.loader.dataset)
        if resumes and None not in (saved, self._digest) and saved != self._digest:
            description = order.description(self._sampler)
            raise BatchError(
                f"the state was saved inside a pass that reads samples {description} (indices of checksum {saved}), "
                f"and this loader reads them {description} (indices of checksum {self._digest}): some would be read "
                "twice, and others not at all. Resume with the same sampler (its indices, weights, seed) and the same "
                "indices of a Subset, or begin the epoch again, after the load, with "
                "loader.load_state_dict(loader.state_dict() | {'position': 0})"
            )

    def _plain_order(self, epoch: int) -> Any:
        """The order that rank 0's sampler draws; a resume draws it again from the same random states."""
        sampler, shared = self._sampler, self._world.size > 1 and not self._for_all
        generators = order.generators(sampler)
        if shared and generators:
            states = self._world.broadcast_objects([g.get_state() for g in generators])
            for generator, state in zip(generators, states):
                generator.set_state(state)
        present_states = order.random_states(sampler)
        self._drawn = self._redraw.pop(epoch, present_states)
        if self._drawn is not present_states:
            order.set_random_states(sampler, self._drawn)
        epoch_order = order.draw(sampler, None)
        if self._drawn is not present_states:
            order.set_random_states(sampler, present_states)
        if not shared or isinstance(epoch_order, range) or (generators and isinstance(sampler, RandomSampler)):
            return epoch_order
        return self._world.broadcast_objects([epoch_order])[0]

    def drawing(self) -> list[Tensor] | None:
        generators = [] if self._seeded else order.generators(self._sampler)
        return [generator.get_state() for generator in generators] or None

    def state(self) -> dict[str, Any]:
        description = order.description(self._sampler)
        if self._batch_mode:
            description += f", in batches of {getattr(self._sampler, 'batch_size', 'its own size')}"
        if not self._seeded:
            description += ", drawn from the sampler's own random state"
        state = {"samples": self.samples(), "drawn": self._drawn, "order": description, "digest": self._digest}
        return {name: value for name, value in state.items() if value is not None}

    def advance(self, mark: Any) -> None:
        pass  # the position is enough

    def load(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self._drawn = state.get("drawn") if state["position"] else None
        self._digest = self._loaded_digest = state.get("digest") if state["position"] else None
        # A finished pass draws no order, and the next pass draws its own.
        self._redraw = {} if self._drawn is None or state.get("over") else {state["epoch"]: self._drawn}
        if not self._seeded:
            for generator, drawing in zip(order.generators(self._sampler), state.get("drawing", ())):
                generator.set_state(drawing)
