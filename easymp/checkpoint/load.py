"""Load a checkpoint: all is checked, read and verified before any live object changes, on all ranks or on none.

Each `Saveable` asks a `CheckpointReader` for its state; reads are planned, made and verified; user code that may fail
is tried, and undone if it fails; then tensors are filled. Ranks agree after each stage. Local files are read twice, the
second time into live tensors; should that fail (a file changed, a disk failed), an error says that the state was loaded
in part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed import World
from ..errors import CheckpointError, EasympError, join_some, nearest
from ..logging import get_logger
from .buffers import aligned, as_bytes, is_plain
from .codec import ArrayName, TensorName
from .folders import join, open_save
from .manifest import (
    BLOCK,
    Box,
    Chunk,
    Manifest,
    Shape,
    StoredTensor,
    contiguous_runs,
    overlap,
    span,
    split_box,
    strides,
    view_of,
)
from .progress import Tick, expect, ignore
from .ranks import attempt, error_text, join_errors, run_on_all
from .save import Saveable
from .storage import Files, MemoryFile, SourceFile, Storage

logger = get_logger(__name__)

ABSENT: Any = object()  # in the place of a state that the checkpoint does not have
STUCK = "could not be put back"
UNCHANGED = "was not loaded, and nothing has changed"
PARTLY = (
    "was loaded in part, so that the live state is neither what it was nor what was saved: load this or another "
    "checkpoint before going on. The cause"
)


@dataclass(frozen=True)
class Loaded:
    """The result of a load.

    Attributes:
        place: path or URL of the checkpoint.
        manifest: the checkpoint's manifest.
        skipped: a sentence for each state that did not fit; empty unless ``strict=False``.
    """

    place: str
    manifest: Manifest
    skipped: tuple[str, ...] = ()


class Trial(NamedTuple):
    """Loads the state `name` by the user's code, which may fail, and can undo that."""

    name: str
    change: Callable[[], object]
    undo: Callable[[], object]


@dataclass(eq=False)
class CheckpointReader:
    """A committed checkpoint that one rank reads. Requested tensors are empty until `run` reads and verifies them."""

    manifest: Manifest
    files: Files
    rank: int = 0
    strict: bool = True
    reread: bool = False  # whether live tensors are filled by a second read, else from copies
    skipped: list[str] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    _tick: Tick = ignore
    _requests: list[ReadRequest] = field(default_factory=list)
    _live_reads: list[FileRead] = field(default_factory=list)
    _requested: set[str] = field(default_factory=set)  # names of states

    def tree(self, name: str, required: bool = True) -> Any:
        """The state under `name`, with a `TensorName` for each tensor; ABSENT if there is none and that is allowed."""
        self._requested.add(name)
        if required and name not in self.manifest.trees:
            self.complain(f"the checkpoint has no {name}")
        return self.manifest.trees.get(name, ABSENT)

    def state(self, name: str, required: bool = True) -> Any:
        """As `tree`, with new tensors, which `run` fills."""
        return with_tensors(self.tree(name, required), self.read_tensor)

    def unrequested(self) -> list[str]:
        """Names of states that no object requested, except per-rank states."""
        names = []
        for name in self.manifest.trees.keys() - self._requested:
            parts = name.split("/")
            parents = {"/".join(parts[:n]) for n in range(1, len(parts))}
            if parts[0] != "ranks" and not parents & {*self._requested, *self.manifest.trees}:
                names.append(name)
        return sorted(names)

    def complain(self, mismatch: str) -> None:
        """Refuse what does not fit, or skip it with ``strict=False``."""
        if self.strict:
            raise CheckpointError(f"{mismatch}; strict=False loads what fits")
        self.skipped.append(mismatch)

    def stored(self, name: str) -> StoredTensor:
        return self.manifest.tensors[self.manifest.aliases.get(name, name)]

    @cached_property
    def _masters(self) -> dict[str, str]:
        trees = [tree for state, tree in self.manifest.trees.items() if state.endswith("/masters")]
        return {name: master for tree in trees for name, master in tree.items()}

    def stepped(self, name: str) -> tuple[str, StoredTensor | None]:
        """Full name and tensor of the fp32 master of parameter `name`; without a master, those of the parameter."""
        aliases = self.manifest.aliases
        path = self._masters.get(aliases.get(name, name)) or name
        return path, self.manifest.tensors.get(aliases.get(path, path))

    def read_tensor(self, name: str) -> Tensor:
        """A new tensor, which `run` fills."""
        stored = self.stored(name)
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self._requests.append(ReadRequest(stored, Box((0,) * tensor.ndim, stored.shape), tensor))
        return tensor

    def fill(self, parts: Iterable[tuple[str, Box, Tensor]]) -> None:
        """Have `run` fill these tensors, which are not live and have the shapes of their boxes."""
        self._requests += [ReadRequest(self.stored(name), box, tensor) for name, box, tensor in parts]

    def fill_live(self, parts: Iterable[tuple[str, Box, Tensor]]) -> Callable[[], None]:
        """A function that fills these live tensors after `run`; it fails if a file can't be read again."""
        requests = []
        for name, box, live in parts:
            for dim, (length, stride) in enumerate(zip(live.shape, live.stride())):
                if stride == 0 and length > 1:  # `expand` shows one element several times
                    live = live.narrow(dim, 0, 1)
            requests.append(ReadRequest(self.stored(name), Box(box.offset, tuple(live.shape)), live))
        if self.reread:
            reads = plan_reads(requests)
            self._live_reads += reads
            return lambda: self._fill_again(reads)
        copies = [r._replace(target=torch.empty(r.box.shape, dtype=r.stored.dtype)) for r in requests]
        self._requests += copies

        def copy_all() -> None:
            with torch.no_grad():
                for request, copy in zip(requests, copies):
                    request.target.copy_(copy.target)

        return copy_all

    def run(self, tick: Tick = ignore) -> None:
        """Read and verify what was requested."""
        reads, live_reads = plan_reads(self._requests), self._live_reads
        self._tick = tick
        live_bytes = sum(read.target.nbytes for read in live_reads)
        expect(tick, sum(read.target.nbytes for read in reads) + 2 * live_bytes)  # these are verified, then read
        read_all(self.files, reads, tick)
        verified = block_numbers(reads)
        for name, blocks in block_numbers(live_reads).items():  # verified here, then read again into live tensors
            if unverified := sorted(blocks - verified.get(name, set())):
                self.files[name].verify(tick, unverified)
        self._requests.clear()

    def _fill_again(self, reads: Sequence[FileRead]) -> None:
        try:
            read_all(self.files, reads, self._tick)
        finally:
            for read in reads:  # autograd did not see the writes, and fp32 masters compare versions
                torch.autograd.graph.increment_version(read.target)


def load_checkpoint(
    world: World, storage: Storage, name: str, items: Sequence[Saveable], strict: bool = True, tick: Tick = ignore
) -> Loaded:
    """Load the checkpoint `name` of `storage` into the live objects, on all ranks or none; see the top of this file."""
    with storage.files_kept_open() as reread:

        def open_reader() -> CheckpointReader:
            opened = open_save(storage, name)
            return CheckpointReader(opened.manifest, opened.files, world.rank, strict, reread)

        return load_items(world, join(storage.root, name), open_reader, items, tick)


def load_items(
    world: World, path: str, open_reader: Callable[[], CheckpointReader], items: Sequence[Saveable], tick: Tick = ignore
) -> Loaded:
    """Load the checkpoint at `path` that `open_reader` opens, as `load_checkpoint` does."""
    reader: CheckpointReader
    loads: list[Callable[[], None]] = []

    def read() -> None:
        nonlocal reader
        reader = open_reader()
        for item in items:
            try:
                load = item.restore(reader)
            except EasympError:
                raise
            except (LookupError, TypeError, ValueError, AttributeError) as fault:
                raise CheckpointError(
                    f"the manifest does not hold what a {type(item).__name__} writes ({error_text(fault)}): load "
                    "another checkpoint"
                ) from fault
            if load is not None:
                loads.append(load)
        if unrequested := reader.unrequested():
            reader.complain(f"nothing here takes {join_some(unrequested)} of the checkpoint: prepare it first")
        reader.run(tick)

    def fill() -> list[str]:
        for load in loads:
            load()
        return reader.skipped + failed_trials

    run_on_all(world, read, f"{path} {UNCHANGED}: ")
    failed_trials = _run_trials(world, path, reader.trials, reader.strict)
    world.settle()  # values that wait to be averaged are about to be replaced
    skipped = list(dict.fromkeys(chain.from_iterable(run_on_all(world, fill, f"{path} {PARTLY}: "))))
    if skipped:
        logger.warning("%s: skipped: %s", path, "; ".join(skipped))
    return Loaded(path, reader.manifest, tuple(skipped))


def _run_trials(world: World, path: str, trials: Sequence[Trial], strict: bool) -> list[str]:
    """Run all trials, or undo them all. Without `strict`, only failed ones (on any rank) are undone and returned."""
    errors: dict[str, Exception] = {}
    for trial in trials:
        error, _ = attempt(trial.change)
        if error is not None:
            errors[trial.name] = error
    own_texts = {name: error_text(error) for name, error in errors.items()}
    failed: dict[str, str] = {}
    for texts in reversed(world.gather_objects(own_texts)):  # the lowest rank's text stays
        failed |= texts
    if not failed:
        return []
    undo_errors: list[str] = []
    for trial in reversed(trials):
        error, _ = attempt(trial.undo) if strict or trial.name in failed else (None, None)
        if error is not None:
            undo_errors.append(f"{trial.name} {STUCK}: {error_text(error)}")
    if strict or any(world.gather_objects(undo_errors)):
        text = "; ".join([f"{name}: {text}" for name, text in own_texts.items()] + undo_errors)
        texts = join_errors(world.gather_objects(text))
        outcome = "was not loaded" if STUCK in texts else UNCHANGED
        raise CheckpointError(f"{path} {outcome}: {texts}") from next(iter(errors.values()), None)
    return [f"{name}: {text}" for name, text in failed.items()]


def with_tensors(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """A tree of `unpack` with what `tensor` returns in place of each `TensorName`."""
    if isinstance(tree, TensorName):
        value = tensor(tree)
        return value.numpy() if isinstance(tree, ArrayName) and isinstance(value, Tensor) else value
    if isinstance(tree, dict):
        return type(tree)({key: with_tensors(value, tensor) for key, value in tree.items()})
    return type(tree)(with_tensors(value, tensor) for value in tree) if type(tree) in (list, tuple) else tree


def tensor_names(tree: Any) -> list[str]:
    names: list[str] = []
    with_tensors(tree, names.append)
    return names


def name_differences(live: Collection[str], saved: Collection[str]) -> str:
    """Names on one side only, each with the nearest name on the other side; "" if there are none."""
    missing = [name for name in live if name not in saved]
    surplus = [name for name in saved if name not in live]
    missing_texts = [repr(name) + nearest(name, surplus) for name in missing[:5]] + missing[5:]  # five are shown
    groups = (("not in", missing_texts), ("only in", [repr(name) for name in surplus]))
    return "; ".join(f"{label} the checkpoint: {join_some(names)}" for label, names in groups if names)


def is_known(item: Any) -> bool:
    """Whether the state of `item` always has the same form: True for classes of torch and easymp."""
    return type(item).__module__.partition(".")[0] in ("torch", "easymp")


def kind_of(value: Any) -> str:
    """The kind of a stored value; numbers and one-element tensors are one kind, as are lists and tuples."""
    if isinstance(value, bool):
        return "True or False"
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.ndim):
        return "a number"
    if isinstance(value, (list, tuple)):
        return "a list"
    return "a dict" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def check_like(name: str, saved: Any, live: Any) -> None:
    """Check that a saved state has the kinds of the live one, before any of it is loaded. None matches any kind."""
    if isinstance(saved, int) and not -(2**63) <= saved < 2**63:
        raise CheckpointError(f"{name} is {saved!r:.80} in the checkpoint, more than 64 bits: load another")
    if saved is None or live is None:
        return
    if kind_of(saved) != kind_of(live) or (isinstance(live, tuple) and len(saved) != len(live)):
        raise CheckpointError(f"{name} is {saved!r:.80} in the checkpoint, and {live!r:.80} here: load another")
    if isinstance(live, Mapping):
        for key in saved.keys() & live.keys():
            check_like(f"{name}[{key!r:.80}]", saved[key], live[key])
    elif isinstance(live, (list, tuple)) and live:
        for i, item in enumerate(saved):
            check_like(f"{name}[{i}]", item, live[min(i, len(live) - 1)])


# Bytes are read straight into a target whose memory is plain and of the file's type. For other targets (another type,
# another device, rows with gaps) they pass through a staging buffer, some rows at a time. Columns are thousands of
# short runs in a file: one call reads them together with the bytes between them, which verification needs anyway.


STAGE = 2**25  # bytes that are read before they are converted
SHORT = 2**16  # bytes of a run that is not read by itself
NEAR = 2**20  # bytes from such a run to the next one, at most
ALIGNMENT = 64  # bytes; every dtype's size divides it


class ReadRequest(NamedTuple):
    """Read the elements of `box` of a stored tensor into `target`, a view of that shape."""

    stored: StoredTensor
    box: Box
    target: Tensor


class FileRead(NamedTuple):
    """Bytes of a file that one call reads into `target`, or, if `staged_shape` is given, through a staging buffer."""

    file: str
    begin: int
    end: int
    runs: Sequence[tuple[int, int]]
    target: Tensor
    dtype: torch.dtype
    staged_shape: Shape | None

    @property
    def size(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def staged_size(self) -> int:
        return -(-self.size // ALIGNMENT) * ALIGNMENT


def plan_reads(requests: Sequence[ReadRequest]) -> list[FileRead]:
    """Plan the reads that fill all `requests`."""
    reads: list[FileRead] = []
    for stored, box, target in requests:
        is_direct = is_plain(target) and target.dtype == stored.dtype
        for chunk in stored.chunks:
            if is_direct and chunk.box == box and target.numel():
                end = chunk.begin + target.nbytes
                runs = ((chunk.begin, target.nbytes),)
                reads.append(FileRead(chunk.file, chunk.begin, end, runs, target, stored.dtype, None))
            elif common := overlap(chunk.box, box):
                reads += _reads_of(stored.dtype, chunk, common, view_of(target, box, common))
    return reads


def _reads_of(dtype: torch.dtype, chunk: Chunk, common: Box, target: Tensor) -> Iterator[FileRead]:
    """Divide the elements `common` of a chunk into reads, in the order of the file."""
    size = dtype.itemsize
    (first, length), *later_runs = islice(contiguous_runs(common, chunk.box), 2)  # all have one length
    to_next = later_runs[0][0] - first if later_runs else 0  # elements from one run to the next
    with_gaps = to_next > 0 and length * size < SHORT and to_next * size <= NEAR
    is_direct = not with_gaps and target.dtype == dtype and is_plain(target)
    file_elements = span(common, chunk.box) if with_gaps else common.numel  # gaps are read, too
    max_elements = STAGE // size * common.numel // file_elements
    for box in [common] if is_direct else split_box(common, max(max_elements, 1)):
        begin = chunk.begin + next(contiguous_runs(box, chunk.box))[0] * size
        end = begin + span(box, chunk.box) * size
        runs, staged_shape = [(begin, end - begin)], chunk.box.shape
        if not with_gaps:
            runs = [(chunk.begin + i * size, count * size) for i, count in contiguous_runs(box, chunk.box)]
            staged_shape = box.shape
        view = view_of(target, common, box)
        yield FileRead(chunk.file, begin, end, runs, view, dtype, None if is_direct else staged_shape)


def read_all(files: Files, reads: Iterable[FileRead], tick: Tick = ignore) -> None:
    """Make all `reads`, file by file, in the order of their bytes."""
    by_file: dict[str, list[FileRead]] = {}
    for read in reads:
        by_file.setdefault(read.file, []).append(read)
    sizes = [read.staged_size for in_file in by_file.values() for read in in_file if read.staged_shape is not None]
    # All at once up to STAGE bytes, and at least the largest read.
    stage = aligned(max(min(sum(sizes), STAGE), *sizes)) if sizes else torch.empty(0, dtype=torch.uint8)
    with torch.no_grad():
        for name, in_file in by_file.items():
            in_file.sort(key=attrgetter("begin"))
            for batch in _batches(in_file, stage.numel()):
                _read_batch(files[name], batch, stage, tick)


def _read_batch(file: SourceFile | MemoryFile, batch: Sequence[FileRead], stage: Tensor, tick: Tick) -> None:
    buffers: list[Tensor] = []
    staged_bytes = 0
    for read in batch:
        if read.staged_shape is None:
            buffers.append(read.target)
        else:
            buffers.append(stage[staged_bytes : staged_bytes + read.size].view(read.dtype))
            staged_bytes += read.staged_size
    targets: list[tuple[int, memoryview]] = []
    for read, memory in zip(batch, [as_bytes(buffer) for buffer in buffers]):
        position = 0
        for begin, count in read.runs:
            targets.append((begin, memory[position : position + count]))
            position += count
    targets.sort(key=itemgetter(0))
    file.fetch(targets, tick)
    for read, buffer in zip(batch, buffers):
        if read.staged_shape is not None:
            read.target.copy_(buffer.as_strided(read.target.shape, strides(read.staged_shape)))


def block_numbers(reads: Iterable[FileRead]) -> dict[str, set[int]]:
    """The numbers of the blocks that `read_all` would read, by file."""
    by_file: dict[str, set[int]] = {}
    for read in reads:
        blocks = by_file.setdefault(read.file, set())
        for begin, count in read.runs:
            blocks.update(range(begin // BLOCK, -(-(begin + count) // BLOCK)))
    return by_file


def _batches(reads: list[FileRead], stage_size: int) -> Iterator[list[FileRead]]:
    """Group reads in file order: no overlaps inside a group, and its staged bytes are at most `stage_size`."""
    while reads:
        batch, overlapping = list[FileRead](), list[FileRead]()
        staged = end = 0
        for read in reads:
            if read.begin < end:
                overlapping.append(read)
                continue
            size = 0 if read.staged_shape is None else read.staged_size
            if staged + size > stage_size:
                yield batch
                batch, staged = [], 0
            batch.append(read)
            staged += size
            end = read.end
        yield batch
        reads = overlapping
