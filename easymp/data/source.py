"""Sources of a prepared loader: the interface, map-style data sets, reading on rank 0 for all, the way to the device, images there.

On CUDA a side stream copies batches k+1 and k+2 while the step computes on batch k. CPU memory is pinned first: by the thread of a
DataLoader with workers, else here. The compute stream waits for the copy of its batch only. Sparse tensors, tensor subclasses and packed
sequences move by their own `to` when their batch is due. Other devices move whole batches then, and the CPU moves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..base import pytree
from ..base.rng import isolated, mix, seed_host
from ..distributed.process_group import World
from ..errors import BatchError, SettingError
from .order import (
    Cut,
    Share,
    agree,
    draw,
    flagged,
    generators,
    halves,
    length,
    one,
    own_seed,
    parts,
    rounds,
    shares,
    size_of,
)

AHEAD = 2  # batches on their way to the device
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
    """Reads this rank's batches.

    `batches` of a data rank, `samples` of all ranks in an epoch, and `indices` at places of its order are None if unknown. `read` begins at
    global sample `start` and leaves `skip` batches out; `passed` gets the mark of each batch in use. `state` is for a resume inside a pass,
    beside epoch, position and seed, and `drawing` the states of the sampler's own generators, if they decide the next order; `load`
    continues at a state.
    """

    loader: DataLoader[Any]
    seed: int
    cut: Cut  # may be replaced between two passes

    def batches(self, rank: int) -> int | None: ...
    def samples(self) -> int | None: ...
    def indices(self, epoch: int, begin: int, end: int) -> list[Any] | None: ...
    def read(self, epoch: int, start: int, skip: int) -> Feed: ...
    def passed(self, mark: Any) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def drawing(self) -> list[Tensor] | None: ...
    def load(self, state: dict[str, Any]) -> None: ...


def rebuild(given: DataLoader[Any], dataset: Any, pin_memory: bool, **how: Any) -> DataLoader[Any]:
    """A DataLoader with the settings of `given`, other sampling and its own generator, so that the global one stays untouched."""
    names = ["collate_fn", "num_workers", "timeout", "worker_init_fn"]
    if given.num_workers > 0:
        names += ["multiprocessing_context", "prefetch_factor", "persistent_workers"]
    settings = {name: getattr(given, name) for name in names}
    settings["in_order"] = getattr(given, "in_order", True)  # older subclasses (torchdata) do not have it
    settings |= {"pin_memory": pin_memory, "generator": torch.Generator(), **how}
    return DataLoader(dataset, **settings)


# -- random numbers of data sets and collate functions: f(seed, epoch, batch)


class Seeded:
    """Indices of one batch that are sent to a worker. Unpickling them seeds the worker's random streams for that batch."""

    __slots__ = ("_item", "_seed")

    def __init__(self, item: Any, seed: int) -> None:
        self._item, self._seed = item, seed

    def __reduce__(self) -> Any:
        return _arrived, (self._item, self._seed)


def _arrived(item: Any, seed: int) -> Any:
    seed_host(seed)
    return item


def aside(items: Iterable[Any]) -> Iterator[Any]:
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

Parts = list[tuple[Any, Note]]  # one round: the batch of rank r at index r


class Dispatched:
    """Source that reads `inner` on rank 0 only and sends each round to the other ranks (``dispatch_batches=True``)."""

    def __init__(self, inner: Source, world: World, rank: int) -> None:
        self._inner, self._world, self._rank = inner, world, rank

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def cut(self) -> Cut:
        return self._inner.cut

    @cut.setter
    def cut(self, cut: Cut) -> None:
        self._inner.cut = cut

    def read(self, epoch: int, start: int, skip: int) -> Feed:
        main = self._world.rank == 0
        sent = self._send(_rounds(self._inner.read(epoch, start, skip))) if main else self._receive()
        for found, following in sent:
            if self._rank < len(found):
                batch, note = found[self._rank]
                yield batch, note._replace(last=self._rank >= following)

    def _send(self, reader: Iterator[tuple[Parts, int]]) -> Iterator[tuple[Parts, int]]:
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

    def _receive(self) -> Iterator[tuple[Parts, int]]:
        while (item := self._world.broadcast_objects([None])[0]) is not None:
            if isinstance(item, str):
                who = "rank 0, which reads for all ranks (dispatch_batches=True)"
                raise BatchError(f"{who}, could not read a batch: {item}")
            yield item


def _rounds(feed: Feed) -> Iterator[tuple[Parts, int]]:
    """Each round with the number of ranks that have a batch in the next one."""
    whole: Parts = []
    begun: Parts = []
    for batch, note in feed:
        if note.rank == 0:
            if whole:
                yield whole, len(begun)
            whole, begun = begun, []
        begun.append((batch, note))
    if whole:
        yield whole, len(begun)
    if begun:
        yield begun, 0


# -- the way to the device


def reads_ahead(device: torch.device, non_blocking: bool) -> bool:
    """Whether `moved` reads batches ahead."""
    return device.type == "cuda" and non_blocking


def moved(feed: Feed, device: torch.device, non_blocking: bool) -> Feed:
    """`feed` with its batches on `device`; `feed` itself on the CPU."""
    if device.type == "cpu":
        return feed
    if reads_ahead(device, non_blocking):
        return _ahead(feed, device)
    return ((pytree.send_to_device(batch, device, non_blocking), note) for batch, note in feed)


def _ahead(feed: Feed, device: torch.device) -> Feed:
    side = torch.cuda.Stream(device)

    def start(leaf: Any) -> Any:
        return _pin(leaf).to(device, non_blocking=True) if _plain(leaf) else leaf

    held: deque[tuple[Any, torch.cuda.Event, Note]] = deque()
    for batch, note in feed:
        # CUDA tensors that the data set made itself are on the compute stream: nothing to wait for here.
        with torch.cuda.stream(side):
            held.append((pytree.map_leaves(start, batch), side.record_event(), note))
        if len(held) > AHEAD:
            yield _due(*held.popleft(), device)
    while held:
        yield _due(*held.popleft(), device)


def _plain(leaf: Any) -> bool:
    """Whether `leaf` has one memory block that can be pinned and recorded on a stream."""
    return type(leaf) is Tensor and leaf.layout is torch.strided


def _pin(leaf: Tensor) -> Tensor:
    return leaf.pin_memory() if leaf.device.type == "cpu" and not leaf.is_pinned() else leaf


def _due(batch: Any, copied: torch.cuda.Event, note: Note, device: torch.device) -> tuple[Any, Note]:
    """Make the compute stream wait for the copy of `batch`, and move leaves that are not plain tensors."""
    compute = torch.cuda.current_stream(device)
    compute.wait_event(copied)
    others = False
    for leaf in pytree.leaves(batch):
        if not _plain(leaf):
            others |= hasattr(leaf, "to")
        elif leaf.is_cuda:
            # The side stream allocated this memory: keep it until the compute stream is done with it.
            leaf.record_stream(compute)
    return pytree.send_to_device(batch, device, non_blocking=True) if others else batch, note


# -- map-style data sets: the order is known beforehand, so each rank loads its own samples only


class Rounds:
    """Batch sampler of the rebuilt DataLoader: one object for all epochs, so that workers can persist."""

    upcoming: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.upcoming


class MapSource:
    """Reads a map-style data set by batches of indices.

    A note is queued for each list of indices that goes to the DataLoader and taken off with its batch, in the same order.

    Args:
        ranks: the data ranks that this process reads for: its own, or all of them.
        whole: None, or for samplers of batches: "deal" whole batches to the ranks, "split" each batch.
        seeded: draw by f(seed, epoch); otherwise rank 0 draws from its own random state for all.
        alone: this process draws and reads for all ranks.
        ahead: this process loads a batch before the step of the one before it.
    """

    _checked = False
    _drawn: int | None = None  # seed of the current order, if it is not f(seed, epoch)

    def __init__(
        self,
        given: DataLoader[Any],
        sampler: Any,
        cut: Cut,
        ranks: Sequence[int],
        world: World,
        *,
        seed: int,
        whole: str | None,
        seeded: bool,
        pin_memory: bool,
        alone: bool,
        ahead: bool,
    ) -> None:
        self.seed, self.cut = seed, cut
        self._sampler, self._ranks, self._whole = sampler, ranks, whole
        self._world, self._seeded, self._alone, self._ahead = world, seeded, alone, ahead
        self._ready = given.batch_sampler is None  # the data set's items are batches already
        self._redraw: dict[int, int] = {}  # seeds by epoch, to draw an order again after a resume
        self._upcoming = Rounds()
        sampled = "sampler" if self._ready else "batch_sampler"
        how = {sampled: self._upcoming} | ({"batch_size": None} if self._ready else {})
        self.loader = rebuild(given, given.dataset, pin_memory, **how)

    def batches(self, rank: int) -> int | None:
        total = length(self._sampler)
        if total is None or self._whole == "split":
            return total
        return (self.cut._replace(batch=1) if self._whole else self.cut).batches(total, rank)

    def samples(self) -> int | None:
        """Samples in an epoch, if known without drawing it."""
        return None if self._whole else length(self._sampler)

    def indices(self, epoch: int, begin: int, end: int) -> list[Any] | None:
        if self._whole or not self._seeded or size_of(self._sampler) is None:
            return None
        order: Any = draw(self._sampler, mix(self.seed, "order", epoch), self.cut.whole)
        return list(order[begin:end])

    def read(self, epoch: int, start: int, skip: int) -> Feed:
        notes: deque[Note] = deque()
        upcoming = islice(self._shares(self._order(epoch), start), skip * len(self._ranks), None)
        indices = self._indices(upcoming, notes)
        elsewhere = self._ahead or self.loader.num_workers > 0
        self._upcoming.upcoming = self._seeds(indices, notes, epoch) if elsewhere else indices
        self.loader.generator.manual_seed(mix(self.seed, "workers", epoch, start, self._ranks[0]))  # type: ignore[union-attr]
        take = notes.popleft
        for batch in aside(self.loader) if self._ahead else self.loader:
            yield batch, take()

    def _seeds(self, indices: Iterator[Any], notes: deque[Note], epoch: int) -> Iterator[Any]:
        """Yield `indices` and seed the random streams for each batch where it is loaded."""
        for items in indices:
            note = notes[-1]
            seed = mix(self.seed, "batch", epoch, note.rank, note.end)
            if self._ahead:
                seed_host(seed)
            yield items if self._ahead else Seeded(items, seed)

    def _indices(self, upcoming: Iterator[Share], notes: deque[Note]) -> Iterator[Any]:
        reader = flagged(upcoming)
        # Computing many batches of indices in one loop takes a quarter of the time of computing them one by one between steps.
        ahead = INDICES_AHEAD if self.samples() is not None else 1
        while chunk := list(islice(reader, ahead)):
            for (rank, items, end, surplus), last in chunk:
                if self._ready:
                    notes.append(Note(rank, end, -1 if surplus else 0, None, last))
                    yield items[0]
                else:
                    notes.append(Note(rank, end, surplus, len(items), last))
                    yield items

    def _shares(self, order: Any, start: int) -> Iterator[Share]:
        cut, ranks = self.cut, self._ranks
        if isinstance(order, Sequence) and not self._whole:
            readers = [shares(order, cut, rank, start) for rank in ranks]
            while round_shares := [share for reader in readers for share in islice(reader, 1)]:
                yield from round_shares
            return
        if self._whole == "split":
            found = halves(order, cut.ranks, even=cut.even, start=start)
        else:
            count, size, weigh = (cut.ranks, None, size_of) if self._whole else (cut.whole, cut.batch, one)
            how: Any = {"complete": cut.completes, "drop_last": cut.drop_last, "start": start, "weigh": weigh}
            found = ((round_, size) for round_ in rounds(order, count, **how))
        for round_, size in found:
            yield from parts(round_, size, ranks)

    def _order(self, epoch: int) -> Any:
        seed = mix(self.seed, "order", epoch) if self._seeded else self._own_seed(epoch)
        order = draw(self._sampler, seed, self.cut.ranks if self._whole else self.cut.whole)
        if self._alone or not isinstance(order, list):
            return order
        if not self._seeded:
            return self._world.broadcast_objects([order])[0]
        if not self._checked:
            agree(order, self._world)
            self._checked = True
        return order

    def _own_seed(self, epoch: int) -> int:
        """The seed that rank 0 draws from its own random state; a resume draws the same order again by it."""
        seed = self._redraw.pop(epoch, None)
        if seed is None:
            seed = own_seed(self._sampler) if self._world.rank == 0 else 0
            if not self._alone:
                seed = int(self._world.broadcast_objects([seed])[0])
        self._drawn = seed
        return seed

    def drawing(self) -> list[Tensor] | None:
        own = [] if self._seeded else generators(self._sampler)
        return [generator.get_state() for generator in own] or None

    def state(self) -> dict[str, Any]:
        known = {"samples": self.samples(), "drawn": self._drawn}
        return {name: value for name, value in known.items() if value is not None}

    def passed(self, mark: Any) -> None:
        pass  # the position is enough

    def load(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]
        self._drawn = state.get("drawn") if state["position"] else None
        # A finished pass draws no order, and the next pass draws its own.
        self._redraw = {} if self._drawn is None or state.get("over") else {state["epoch"]: self._drawn}
        if not self._seeded:
            for generator, drawing in zip(generators(self._sampler), state.get("drawing", ())):
                generator.set_state(drawing)


# -- images on the device: a uint8 batch takes a quarter of an fp32 one's memory, in workers, pinned, and on its way --------


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("NCHW", "NHWC")


class NormalizeImages:
    """``normalize(images)`` computes (x / 255 - mean) / std for a batch of uint8 images on its device.

    Args:
        mean: one number per channel for values from 0 to 1, as in torchvision.
        std: likewise.
        dtype: of the result: fp32, bf16 or fp16.
        layout: of the batches: "NCHW", as torchvision decodes images, or "NHWC", as most files store them.

    Raises:
        SettingError: `mean` and `std` do not match, or another dtype or layout.

    Example:
        >>> normalize = NormalizeImages(mean=[0.5], std=[0.5])
        >>> normalize(torch.full((1, 1, 1, 2), 255, dtype=torch.uint8))
        tensor([[[[1., 1.]]]])
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        layout: str = "NCHW",
    ) -> None:
        if not mean or len(mean) != len(std) or not all(s > 0 for s in std):
            right = "must have one number per channel, and those of std must be above 0"
            raise SettingError(f"mean={mean!r} and std={std!r} {right}")
        if dtype not in DTYPES or layout not in LAYOUTS:
            right = "pass torch.float32, torch.bfloat16 or torch.float16, and 'NCHW' or 'NHWC'"
            raise SettingError(f"dtype={dtype!r} and layout={layout!r}: {right}")
        self.mean, self.std, self.dtype, self.layout = tuple(mean), tuple(std), dtype, layout
        wide = torch.tensor([self.mean, self.std], dtype=torch.float64)
        self._numbers = torch.stack([255 * wide[0], 1 / (255 * wide[1])]).float()
        self._there: dict[torch.device, Tensor] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise `images`, uint8 of shape (N, C, H, W) or (N, H, W, C) by `layout`, to (N, C, H, W) in channels-last memory.

        Raises:
            BatchError: `images` is not uint8 with four dimensions, or has another number of channels.
        """
        if images.dtype != torch.uint8 or images.ndim != 4:
            got = f"uint8 images of four dimensions ({self.layout}), not {images.dtype} of shape {tuple(images.shape)}"
            raise BatchError(
                f"NormalizeImages takes {got}: leave ToTensor and Normalize out, and stack images to batches"
            )
        if self.layout == "NHWC":
            images = images.permute(0, 3, 1, 2)
        if images.shape[1] != len(self.mean):
            what = f"{images.shape[1]} channels as {self.layout}, and mean has {len(self.mean)} numbers"
            raise BatchError(f"the images have {what}: is the layout right?")
        numbers = self._there.get(images.device)
        if numbers is None:
            numbers = self._there[images.device] = self._numbers.to(images.device)
        shift, times = numbers.view(2, 1, -1, 1, 1)
        wide = images.to(torch.float32, memory_format=torch.channels_last)
        return wide.sub_(shift).mul_(times).to(self.dtype)

    def __repr__(self) -> str:
        how = f"mean={self.mean}, std={self.std}, dtype={self.dtype}, layout={self.layout!r}"
        return f"NormalizeImages({how})"
