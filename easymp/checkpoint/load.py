"""Load a checkpoint. Everything is checked, read and verified before any live object changes, on all ranks or on none.

Stages: read the manifest, match it with what is live (each `Kept` asks a `Reading` for its state), plan the reads (`plan`), read and
verify; try what runs a user's code and so may fail, and undo it where it does; then fill tensors. After each stage the ranks agree.

Files in a local folder are read twice: once to verify them, and once into the live tensors, from the same open files. The second read
fails if another process writes into the files, or the disk fails. Live tensors are then partly old and partly new, an error says so on
all ranks, and another load restores them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed import World
from ..errors import CheckpointError, EasympError, nearest
from ..logging import get_logger
from .codec import PARTS, Slot, filed, unpack
from .folders import Opened, current, inside, open_manifest, read_header
from .manifest import BLOCK, Box, Manifest, Piece, Shape, Stored, overlap, runs, slices, span, strides, whole
from .snapshot import Kept, key, words_of
from .storage import SourceFile, Storage, Tick, aligned, as_bytes, expect, is_plain, no_tick

logger = get_logger(__name__)

SHOWN = 5  # of a list in a message
STUCK = "could not be put back"
HALF = (
    "was loaded in part, so that the live state is neither what it was nor what was saved: load this or another checkpoint before going "
    "on. The cause"
)


@dataclass(frozen=True)
class Loaded:
    """The result of a load.

    Attributes:
        place: where it lies.
        manifest: of the checkpoint.
        skipped: what did not fit, in words; only ``strict=False`` skips anything.
    """

    place: str
    manifest: Manifest
    skipped: tuple[str, ...] = ()


class Trial(NamedTuple):
    """A change of `what` that runs a user's code and may fail, and a way to undo it."""

    what: str
    change: Callable[[], None]
    undo: Callable[[], None]


class FullName(str):
    """A tensor's full name, which stands for its values."""

    __slots__ = ()


class Reading:
    """A committed checkpoint that one rank reads. Requested tensors are empty until `run` reads and verifies them.

    `run` also verifies the bytes of live tensors. If files may be read `again` (`Storage.held`), the second read goes into the live tensors
    and is verified, too, so the state is in memory once; otherwise `run` keeps a copy. `trials` are made first, and undone on all ranks if
    one fails on any rank. `skipped` is what did not fit, in words, where `strict` is off.
    """

    def __init__(self, opened: Opened, rank: int = 0, strict: bool = True, again: bool = False) -> None:
        self.manifest, self.rank, self.strict = opened.manifest, rank, strict
        self.skipped: list[str] = []
        self.trials: list[Trial] = []
        self._opened, self._again = opened, again
        self._tick: Tick = no_tick
        self._wanted: list[Want] = []
        self._live: list[Want] = []
        self._asked: set[str] = set()
        self._masters: dict[str, str] | None = None

    # -- Python state

    def __contains__(self, name: str) -> bool:
        self._asked.add(name)
        return name in self.manifest.states

    def named(self, name: str, own: bool = False) -> str:
        """The stored name of `name`; with `own`, that of rank r modulo the number of ranks that wrote."""
        return f"ranks/{self.rank % self.manifest.world_size:05d}/{name}" if own else name

    def state(
        self,
        name: str,
        own: bool = False,
        tensor: Callable[[str], Any] | None = None,
        only: Sequence[str] | None = None,
    ) -> Any:
        """The state under `name`, this rank's `own` or a common one; `only` some keys. `tensor` makes each tensor of its full name."""
        name = f"ranks/{self.rank:05d}/{name}" if own else name
        if name not in self:
            raise CheckpointError(f"the checkpoint has no {name}")
        tree = self.manifest.states[name]
        return unpack(tree if only is None else {key: tree[key] for key in only}, tensor or self.whole)

    def left(self) -> list[str]:
        """Names of states that no object requested, except per-rank states."""
        left = []
        for name in self.manifest.states:
            words = name.split("/")
            above = ["/".join(words[:n]) for n in range(1, len(words))]
            known = name in self._asked or any(n in self._asked or n in self.manifest.states for n in above)
            if words[0] != "ranks" and not known:
                left.append(name)
        return sorted(left)

    # -- tensors

    def stored(self, name: str) -> Stored:
        """A tensor, by its full name or an alias."""
        return self.manifest.tensors[self.manifest.aliases.get(name, name)]

    def master(self, name: str) -> str | None:
        """The fp32 master that an optimizer kept of a parameter: both by their full names."""
        if self._masters is None:
            kept = [tree for state, tree in self.manifest.states.items() if state.endswith("/masters")]
            self._masters = {name: of for tree in kept for name, of in unpack(tree, str).items()}
        return self._masters.get(self.manifest.aliases.get(name, name))

    def whole(self, name: str) -> Tensor:
        """A new CPU tensor, filled by `run`."""
        stored = self.stored(name)
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self._wanted.append(Want(stored, whole(stored.shape), tensor))
        return tensor

    def fill(self, parts: Iterable[tuple[str, Box, Tensor]]) -> None:
        """Have `run` fill these tensors, of the shapes of their boxes, which are not live."""
        self._wanted += [Want(self.stored(name), box, tensor) for name, box, tensor in parts]

    def overwriting(self, parts: Iterable[tuple[str, Box, Tensor]]) -> Callable[[], None]:
        """A function that fills these live tensors, of the shapes of their boxes, after `run`. It fails if a file can't be read again."""
        wants = []
        for name, box, live in parts:
            for dim, (length, stride) in enumerate(zip(live.shape, live.stride())):
                if stride == 0 and length > 1:  # `expand` shows one element several times
                    live = live.narrow(dim, 0, 1)
            wants.append(Want(self.stored(name), Box(box.offset, tuple(live.shape)), live))
        if self._again:
            self._live += wants
            return lambda: self._refill(wants)
        copies = [want._replace(into=torch.empty(want.box.shape, dtype=want.stored.dtype)) for want in wants]
        self._wanted += copies

        def put() -> None:
            with torch.no_grad():
                for want, copy in zip(wants, copies):
                    want.into.copy_(copy.into)

        return put

    def complain(self, words: str) -> None:
        """Report state that does not fit: raise, or note it if `strict` is off."""
        if self.strict:
            raise CheckpointError(f"{words}; strict=False loads what fits")
        self.skipped.append(words)

    def run(self, tick: Tick = no_tick) -> None:
        """Read all requested tensors, and verify the bytes of live ones."""
        wanted, live, files = plan(self._wanted), plan(self._live), self._opened.files
        preflight(self._opened, sorted({slab.file for slab in (*wanted, *live)}))
        self._tick = tick
        expect(tick, sum(want.into.nbytes for want in (*self._wanted, *self._live, *self._live)))
        stream(files, wanted, tick)
        known = blocks_of(wanted)
        for name, numbers in blocks_of(live).items():
            if left := sorted(numbers - known.get(name, set())):
                files[name].verify(tick, left)
        self._wanted.clear()
        self._live.clear()

    def _refill(self, wants: Sequence[Want]) -> None:
        try:
            stream(self._opened.files, plan(wants), self._tick)
        finally:
            for want in wants:  # memory was written to past autograd, and fp32 masters look at the version
                torch.autograd.graph.increment_version(want.into)


# -- load -------------------------------------------------------------------------------------------------------------


def load_checkpoint(
    world: World, storage: Storage, name: str, kept: Sequence[Kept], strict: bool = True, tick: Tick = no_tick
) -> Loaded:
    """Load the checkpoint `name` of `storage` into the live objects, on all ranks or none; see the top of this file."""
    with storage.held() as again:

        def open_it() -> Reading:
            folder = current(storage, name)
            opened = Opened(storage, folder, open_manifest(storage, folder))
            return Reading(opened, world.rank, strict, again)

        return put_in_place(world, f"{storage.place}/{name}", open_it, kept, tick)


def put_in_place(
    world: World, place: str, open_it: Callable[[], Reading], kept: Sequence[Kept], tick: Tick = no_tick
) -> Loaded:
    """Load the checkpoint at `place` that `open_it` opens, as `load_checkpoint` does."""
    puts: list[Callable[[], None]] = []
    found: list[Reading] = []

    def prepare() -> None:
        reading = open_it()
        puts.extend([_restored(part, reading) for part in kept])
        if left := reading.left():
            reading.complain(f"nothing here takes {several(left)} of the checkpoint: prepare it first")
        reading.run(tick)
        found.append(reading)

    def put_all() -> None:
        for put in puts:
            put()

    _together(world, place, _error(prepare))
    (reading,) = found
    reading.skipped += _attempt(world, place, reading.trials, reading.strict)
    world.settle()  # values that wait to be averaged are about to be replaced
    _together(world, place, _error(put_all), HALF)
    everyones = world.gather_objects(reading.skipped)
    skipped = tuple(dict.fromkeys(words for skipped in everyones for words in skipped))
    if skipped:
        logger.warning("%s: skipped: %s", place, "; ".join(skipped))
    return Loaded(place, reading.manifest, skipped)


def _restored(part: Kept, reading: Reading) -> Callable[[], None]:
    try:
        return part.restore(reading)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, EasympError):
            raise
        said = f"the manifest does not hold what a {type(part).__name__} writes ({words_of(error)})"
        raise CheckpointError(f"{said}: load another checkpoint") from error


def _attempt(world: World, place: str, trials: Sequence[Trial], strict: bool) -> list[str]:
    """Make all trials or none. With `strict` off, trials that fail on any rank are skipped and returned in words."""
    causes = {trial.what: error for trial in trials if (error := _error(trial.change)) is not None}
    mine = {what: words_of(error) for what, error in causes.items()}
    failed = {what: words for each in reversed(world.gather_objects(mine)) for what, words in each.items()}
    if not failed:
        return []
    stuck = [
        f"{trial.what} {STUCK}: {words_of(error)}"
        for trial in reversed(trials)
        if (strict or trial.what in failed) and (error := _error(trial.undo)) is not None
    ]
    if strict or any(world.gather_objects(stuck)):
        said = "; ".join([f"{what}: {words}" for what, words in mine.items()] + stuck)
        _together(world, place, next(iter(causes.values()), None), said=said)
    return [f"{what}: {words}" for what, words in failed.items()]


def _error(act: Callable[[], object]) -> Exception | None:
    """Run `act` and return its error, which the other ranks must learn."""
    try:
        act()
    except Exception as error:
        return error
    return None


def _together(
    world: World, place: str, error: Exception | None, what: str = "", said: str | None = None
) -> None:
    """Raise the errors of any rank on all. `what` became of the checkpoint; if "", it was not loaded. `said`: the words of the error."""
    if said is None:
        said = "" if error is None else words_of(error)
    by_words: dict[str, list[str]] = {}
    for rank, words in enumerate(world.gather_objects(said)):
        if words:
            by_words.setdefault(words, []).append(str(rank))
    if by_words:
        told = "; ".join(
            (f"rank {', '.join(ranks)}: " if len(ranks) < world.size else "") + words
            for words, ranks in by_words.items()
        )
        what = what or ("was not loaded" if STUCK in told else "was not loaded, and nothing has changed")
        raise CheckpointError(f"{place} {what}: {told}") from error


# -- what fits --------------------------------------------------------------------------------------------------------


def several(words: Sequence[str]) -> str:
    """The first few names, and the number of the others."""
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return "; ".join(words[:SHOWN]) + more


def names_apart(live: Collection[str], saved: Collection[str], what: str = "") -> str:
    """Names on one side only, each with the nearest name on the other side; "" if there are none."""
    lacks = [name for name in live if name not in saved]
    left = [name for name in saved if name not in live]
    near = [repr(name) + nearest(name, left) for name in lacks[:SHOWN]] + lacks[SHOWN:]
    sides = (("not in", near), ("only in", [repr(name) for name in left]))
    return "; ".join(f"{what}{side} the checkpoint: {several(names)}" for side, names in sides if names)


def is_known(thing: Any) -> bool:
    """Whether the state of `thing` always has the same form: True for classes of torch and easymp."""
    return type(thing).__module__.partition(".")[0] in ("torch", "easymp")


def kind_of(value: Any) -> str:
    """The kind of a stored value, in words. Numbers of any type and one-element tensors are one kind, as are lists and tuples."""
    if isinstance(value, bool):
        return "True or False"
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.ndim):
        return "a number"
    if isinstance(value, (list, tuple)):
        return "a list"
    return "a dict" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def check_like(what: str, saved: Any, live: Any) -> None:
    """Compare a state with the live one, key by key where both have it, before anything live takes a wrong kind. None matches all."""
    if isinstance(saved, int) and not -(2**63) <= saved < 2**63:
        raise CheckpointError(f"{what} is {saved!r:.80} in the checkpoint, more than 64 bits: load another")
    if saved is None or live is None:
        return
    if kind_of(saved) != kind_of(live) or (isinstance(live, tuple) and len(saved) != len(live)):
        raise CheckpointError(
            f"{what} is {saved!r:.80} in the checkpoint, and {live!r:.80} here: load another"
        )
    if isinstance(live, Mapping):
        for key in saved.keys() & live.keys():
            check_like(f"{what}[{key!r:.80}]", saved[key], live[key])
    elif isinstance(live, (list, tuple)) and live:
        for i, item in enumerate(saved):
            check_like(f"{what}[{i}]", item, live[min(i, len(live) - 1)])


# -- the plan of reads --------------------------------------------------------------------------------------------------
#
# Bytes are read straight into a target whose memory is plain and of the file's type. For other targets (another type, another device, rows
# with gaps) they pass through a staging buffer, some rows at a time. Columns are thousands of short runs in a file: one call reads them
# together with the bytes between them, which verification needs anyway.


STAGE = 2**25  # bytes that are read before they are converted
SHORT = 2**16  # bytes of a run that is not read by itself
NEAR = 2**20  # bytes from such a run to the next one, at most
ALIGNMENT = 64  # bytes; every dtype's size divides it
AT_ONCE = 2**30  # bytes of tensors that `one_by_one` reads at once, however many files there are


class Want(NamedTuple):
    """A request: read the elements of `box` of a stored tensor into `into`, a view of that shape."""

    stored: Stored
    box: Box
    into: Tensor


class Slab(NamedTuple):
    """A part of one piece that one call reads: bytes `begin` to `end` of a file, of these `runs` (first byte, count) into `into`.

    `memory` is the shape of the row-major memory that the runs fill: a staging buffer, or if None that of `into` itself.
    """

    file: str
    begin: int
    end: int
    runs: Sequence[tuple[int, int]]
    into: Tensor
    dtype: torch.dtype
    memory: Shape | None


def plan(wants: Sequence[Want]) -> list[Slab]:
    """Divide `wants` into slabs."""
    slabs: list[Slab] = []
    for (stored, box, into), plain in zip(wants, [is_plain(want.into) for want in wants]):
        direct = plain and into.dtype == stored.dtype
        for piece in stored.pieces:
            if direct and piece.box == box and into.numel():
                end = piece.begin + into.nbytes
                runs_ = ((piece.begin, into.nbytes),)
                slabs.append(Slab(piece.file, piece.begin, end, runs_, into, stored.dtype, None))
            elif common := overlap(piece.box, box):
                slabs += _parts(stored.dtype, piece, common, _within(into, box, common))
    return slabs


def _parts(dtype: torch.dtype, piece: Piece, common: Box, into: Tensor) -> Iterator[Slab]:
    """Divide the elements `common` of `piece` into slabs, in the order of the file."""
    size = dtype.itemsize
    (first, run), (second, _) = [*islice(runs(common, piece.box), 2), (0, 0)][:2]
    closed = second > first and run * size < SHORT and (second - first) * size <= NEAR
    direct = not closed and into.dtype == dtype and is_plain(into)
    most = STAGE // size * common.count // (span(common, piece.box) if closed else common.count)
    for box in [common] if direct else slices(common, max(most, 1)):
        begin = piece.begin + next(runs(box, piece.box))[0] * size
        end = begin + span(box, piece.box) * size
        read, memory = [(begin, end - begin)], piece.box.shape
        if not closed:
            read = [(piece.begin + at * size, count * size) for at, count in runs(box, piece.box)]
            memory = box.shape
        into_ = _within(into, common, box)
        yield Slab(piece.file, begin, end, read, into_, dtype, None if direct else memory)


def _within(memory: Tensor, box: Box, part: Box) -> Tensor:
    """A view of the elements of `part` in `memory`, which holds the elements of `box`."""
    for d, (base, first, count) in enumerate(zip(box.offset, part.offset, part.shape)):
        memory = memory.narrow(d, first - base, count)
    return memory


def stream(files: Mapping[str, SourceFile], slabs: Iterable[Slab], tick: Tick = no_tick) -> None:
    """Read all `slabs`, file by file, in the order of their bytes."""
    by_file: dict[str, list[tuple[Slab, int, int]]] = {}  # with its bytes, and those in the staging buffer
    total = most = 0
    for slab in slabs:
        count = sum(n for _, n in slab.runs)
        staged = 0 if slab.memory is None else -(-count // ALIGNMENT) * ALIGNMENT
        total, most = total + staged, max(most, staged)
        by_file.setdefault(slab.file, []).append((slab, count, staged))
    stage = aligned(max(min(total, STAGE), most))
    with torch.no_grad():
        for name, found in by_file.items():
            found.sort(key=lambda item: item[0].begin)
            for batch in _batches(found, stage.numel()):
                _read(files[name], batch, stage, tick)


def blocks_of(slabs: Iterable[Slab]) -> dict[str, set[int]]:
    """The numbers of the blocks that `stream` would read, by file."""
    found: dict[str, set[int]] = {}
    for slab in slabs:
        numbers = found.setdefault(slab.file, set())
        for begin, count in slab.runs:
            numbers.update(range(begin // BLOCK, -(-(begin + count) // BLOCK)))
    return found


def _batches(slabs: list[tuple[Slab, int, int]], room: int) -> Iterator[list[tuple[Slab, int, int]]]:
    """Group slabs in order: without overlaps, each group within the size of the staging buffer. Overlapping slabs come last."""
    while slabs:
        batch, later = [], []
        held = end = 0
        for item in slabs:
            if item[0].begin < end:
                later.append(item)
                continue
            if held + item[2] > room:
                yield batch
                batch, held = [], 0
            batch.append(item)
            held += item[2]
            end = item[0].end
        yield batch
        slabs = later


def _read(file: SourceFile, batch: Sequence[tuple[Slab, int, int]], stage: Tensor, tick: Tick) -> None:
    buffers: list[Tensor] = []
    used = 0
    for slab, count, staged in batch:
        buffers.append(slab.into if slab.memory is None else stage[used : used + count].view(slab.dtype))
        used += staged
    wanted: list[tuple[int, memoryview]] = []
    for (slab, _, _), memory in zip(batch, [as_bytes(buffer) for buffer in buffers]):
        at = 0
        for begin, count in slab.runs:
            wanted.append((begin, memory[at : at + count]))
            at += count
    wanted.sort(key=lambda item: item[0])
    file.fetch(wanted, tick)
    for (slab, _, _), buffer in zip(batch, buffers):
        if slab.memory is not None:
            slab.into.copy_(buffer.as_strided(slab.into.shape, strides(slab.memory)))


# -- new tensors, one after the other ---------------------------------------------------------------------------------


def room(files: int) -> int:
    """Bytes to read at once from a checkpoint with tensors in that many files: one block of each, and at least a few."""
    return min(max(files, 4) * BLOCK, AT_ONCE)


def one_by_one(
    files: Mapping[str, SourceFile], wanted: Iterable[tuple[Stored, Box]], together: int, tick: Tick = no_tick
) -> Iterator[Tensor]:
    """Yield a new tensor for each box, in order. One call reads up to `together` bytes, as files are verified in blocks."""
    batch: list[Want] = []
    held = 0
    for stored, box in wanted:
        size = box.count * stored.dtype.itemsize
        if batch and held + size > together:
            yield from _batch(files, batch, tick)
            batch, held = [], 0
        batch.append(Want(stored, box, torch.empty(box.shape, dtype=stored.dtype)))
        held += size
    yield from _batch(files, batch, tick)


def _batch(files: Mapping[str, SourceFile], batch: list[Want], tick: Tick) -> Iterator[Tensor]:
    stream(files, plan(batch))
    # Not the bytes read for it: blocks at the edges are read twice.
    tick(sum(want.into.nbytes for want in batch))
    while batch:
        yield batch.pop(0).into  # the caller may free it before the next


# -- headers against the manifest -------------------------------------------------------------------------------------


def preflight(opened: Opened, files: Collection[str]) -> None:
    """Check size and header of each of `files` against the manifest. Only headers are read."""
    held, there = expected(opened.manifest, files), opened.files
    for name in files:
        for why, _ in faults(there[name], held[name]):
            raise CheckpointError(f"{inside(opened.place, name)}: {why}: load another checkpoint")


def expected(manifest: Manifest, files: Collection[str]) -> dict[str, dict[str, tuple[str, Slot]]]:
    """The header of each of `files` as the manifest describes it: name in the file → full name and slot."""
    held: dict[str, dict[str, tuple[str, Slot]]] = {name: {} for name in files}
    for name, stored in manifest.tensors.items():
        for box, file, begin in stored.pieces:
            if file in held:
                end = begin + prod(box.shape) * stored.dtype.itemsize
                dtype, shape = stored.dtype, box.shape
                kind = filed(dtype, shape) if dtype in PARTS else (dtype, shape)
                held[file][key(name, box, stored.shape)] = (name, Slot(*kind, begin, end))
    return held


def faults(file: SourceFile, held: Mapping[str, tuple[str, Slot]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Differences between a file's header and `held`, in words, each with the tensors that it concerns."""
    concerned = tuple(tensor for tensor, _ in held.values())
    found = file.storage.size(file.name)
    if found is None:
        yield "is missing, or not a regular file", concerned
    elif found != file.size:
        yield f"has {found} bytes, and {file.size} were written", concerned
    elif held or file.name.endswith(".safetensors"):
        try:
            slots, _ = read_header(file)
        except CheckpointError as error:
            yield str(error).removeprefix(f"{file}: "), concerned
            return
        for word in sorted(slots.keys() | held.keys()):
            tensor, slot = held.get(word, ("", None))
            if slots.get(word) != slot:
                there, here = _said(slots.get(word)), _said(slot)
                words = f"its header says other than the manifest of {word!r:.300}: {there}, not {here}"
                yield words, (tensor,) if tensor else ()


def _said(slot: Slot | None) -> str:
    if slot is None:
        return "nothing"
    return f"{slot.dtype} {list(slot.shape)} in bytes {slot.begin} to {slot.end}"
