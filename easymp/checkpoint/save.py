"""Saving: collect the state of all ranks, plan which rank writes which bytes, write, and commit (see `folders`).

All ranks compute the same plan from all ranks' lists of chunks, so they only exchange checksums afterwards. Every rank
writes its files into a temporary folder, which rank 0 commits.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..distributed import World
from ..errors import CheckpointError, WorldError, failing
from ..logging import get_logger
from ..version import __version__
from .buffers import aligned, as_bytes, copy, is_plain
from .codec import PAGE, dumps, encode_header, encode_index, pack
from .folders import Commit, SaveLine, check_name, join, retain
from .manifest import (
    BLOCK,
    COMMIT,
    INDEX,
    MANIFEST,
    Box,
    Chunk,
    FileRecord,
    Manifest,
    Shape,
    StoredTensor,
    check_extra,
    coverage_fault,
    full_box,
    local_chunks,
    per_rank,
    seal,
)
from .progress import Tick, expect, ignore
from .ranks import NOT_BEGUN, STOPPED, Meeting, error_text, run_on_all
from .storage import Bytes, SourceFile, Storage, run_in_threads

logger = get_logger(__name__)
COPIED = 2**22  # bytes copied at a time of a tensor on a device, or with gaps
LARGE = 2**25  # bytes that one thread copies at a time
SMALL = 2**18  # bytes of a tensor that is not worth handing to another thread
NICE = 10  # by how much the priority of the thread that writes is below that of threads that train
SHARE = "all ranks must share the file system: pass a folder of one that they share, or a URL"


class Saveable(Protocol):
    """A live object whose state checkpoints keep."""

    def collect(self, into: Snapshot) -> None:
        """Add its state to a snapshot."""
        ...

    def restore(self, source: Any) -> Callable[[], None] | None:
        """Request the state from a `load.CheckpointReader` and check it; the returned function loads it, if any."""
        ...


class LocalChunk(NamedTuple):
    """A chunk of a tensor that a rank has. `differs`: values may differ between ranks; the first rank's are saved."""

    name: str
    dtype: torch.dtype
    shape: Shape
    box: Box
    differs: bool = False


@dataclass(eq=False)
class Snapshot:
    """This rank's state: live tensors by full name and box, Python state by name, aliases of tensors."""

    rank: int = 0
    tensors: dict[tuple[str, Box], Tensor] = field(default_factory=dict)
    chunks: list[LocalChunk] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    _replicated: dict[str, Collection[int] | None] = field(default_factory=dict)

    def add(self, name: str, value: Any, own: bool = False, replicated: Collection[int] | None = None) -> None:
        """Add nested `value` under `name`. `own`: each rank has a value of its own.

        `replicated`: ids of the tensors that are equal on all ranks; None: all are.
        """
        name = per_rank(self.rank, name) if own else name
        self.states[name], self._replicated[name] = value, replicated

    def pack(self) -> None:
        """Convert the states to JSON, and list the chunks of their tensors."""
        packed: list[tuple[str, Tensor, bool]] = []
        for name, replicated in self._replicated.items():
            tensors: dict[str, Tensor] = {}
            self.states[name] = pack(self.states[name], name, tensors)
            packed += [(path, t, replicated is not None and id(t) not in replicated) for path, t in tensors.items()]
        for (path, tensor, differs), chunks in zip(packed, local_chunks(tensor for _, tensor, _ in packed)):
            shape = tuple(tensor.shape)
            if chunks is not None and not prod(shape):  # an empty tensor is stored as one empty box
                chunks = [(full_box(shape), tensor.new_empty(shape, device="cpu"))]
            for box, view in chunks or ():
                self.tensors[path, box] = view
                self.chunks.append(LocalChunk(path, tensor.dtype, shape, box, differs))


class FilePlan(NamedTuple):
    """A file that one rank writes: `header`, then `contents`."""

    name: str
    rank: int
    header: bytes
    contents: tuple[tuple[str, Box], ...]
    size: int


class SavePlan(NamedTuple):
    """All files, the place of each tensor in them, and further names of tensors."""

    files: tuple[FilePlan, ...] = ()
    tensors: Mapping[str, StoredTensor] = MappingProxyType({})
    aliases: Mapping[str, str] = MappingProxyType({})


def plan_files(chunks_by_rank: Sequence[Sequence[LocalChunk]]) -> SavePlan:
    """Assign each chunk to the rank with the least to write, or to its first holder if values may differ."""
    specs: dict[str, tuple[torch.dtype, Shape]] = {}
    boxes: dict[str, list[Box]] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    differing: set[str] = set()
    for rank, chunks in enumerate(chunks_by_rank):
        for name, dtype, shape, box, differs in chunks:
            if differs:
                differing.add(name)
            spec = specs.setdefault(name, (dtype, shape))
            if spec != (dtype, shape):
                raise CheckpointError(
                    f"{name}: {spec[0]} of shape {spec[1]} on one rank, {dtype} of shape {shape} on rank {rank}: all "
                    "ranks must save the same run"
                )
            if (name, box) not in holders:
                boxes.setdefault(name, []).append(box)
            holders.setdefault((name, box), []).append(rank)
    for name, (_, shape) in specs.items():
        if fault := coverage_fault(shape, boxes[name]):
            raise CheckpointError(f"{name}: the ranks do not have the whole of it: {fault}")
    sizes = {(name, box): prod(box.shape) * specs[name][0].itemsize for name, box in holders}
    rank_bytes = [0] * len(chunks_by_rank)
    writers = dict.fromkeys(holders, 0)
    for name, box in sorted(holders, key=sizes.__getitem__, reverse=True):
        ranks = holders[name, box]
        writer = ranks[0] if name in differing else min(ranks, key=rank_bytes.__getitem__)
        writers[name, box] = writer
        rank_bytes[writer] += sizes[name, box]
    return _lay_out_files(specs, writers)


def _lay_out_files(specs: Mapping[str, tuple[torch.dtype, Shape]], writers: Mapping[tuple[str, Box], int]) -> SavePlan:
    """Place the chunks in files: one file for each rank that writes, and each first part of a tensor's name."""
    by_group: dict[str, dict[int, list[tuple[str, Box]]]] = {}
    for (name, box), rank in writers.items():
        # An empty box of a tensor with elements needs no place.
        if prod(box.shape) or not prod(specs[name][1]):
            by_group.setdefault(name.partition("/")[0], {}).setdefault(rank, []).append((name, box))
    files: list[FilePlan] = []
    stored: dict[str, list[Chunk]] = {name: [] for name in specs}
    for group, chunks_by_rank in by_group.items():
        for number, rank in enumerate(sorted(chunks_by_rank), 1):
            # Wide types first, so that each tensor is aligned for its type.
            ordered = sorted(chunks_by_rank[rank], key=lambda key: -specs[key[0]][0].itemsize)
            file = f"{group}-{number:05d}-of-{len(chunks_by_rank):05d}.safetensors"
            entries = []
            for name, box in ordered:
                dtype, shape = specs[name]
                suffix = "" if box.shape == shape else str(box)  # of a part of a tensor
                entries.append((name.partition("/")[2] + suffix, dtype, box.shape))
            header, slots = encode_header(entries, {"format": "pt"})
            for (name, box), slot in zip(ordered, slots):
                stored[name].append(Chunk(box, file, slot.begin))
            files.append(FilePlan(file, rank, header, tuple(ordered), slots[-1].end))
    tensors = {name: StoredTensor(dtype, shape, tuple(stored[name])) for name, (dtype, shape) in specs.items()}
    return SavePlan(tuple(files), tensors)


def file_content(plan: FilePlan, tensors: Mapping[tuple[str, Box], Tensor]) -> Iterable[Bytes]:
    """Yield the bytes of a file. Plain tensors on the CPU are not copied; others are copied part by part."""
    ordered = [tensors[key].detach() for key in plan.contents]
    if all(map(is_plain, ordered)):
        return [plan.header, *map(as_bytes, ordered)]
    rows = (part for tensor in ordered for part in _row_major_parts(tensor))
    return chain([plan.header], (as_bytes(p.cpu().resolve_conj().resolve_neg().contiguous()) for p in rows))


def _row_major_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of `tensor`, in order: itself if its bytes are plain, else parts of at most COPIED bytes."""
    if not tensor.numel():
        return
    if is_plain(tensor) or tensor.numel() * tensor.itemsize <= COPIED:
        yield tensor
        return
    row = tensor[0].numel() * tensor.itemsize
    if row > COPIED:
        for part in tensor:
            yield from _row_major_parts(part)
    else:
        yield from tensor.split(COPIED // row)


@dataclass(eq=False)
class HostCopy:
    """Memory for a copy of a rank's files, which a thread writes while training continues. Saves reuse it."""

    memory: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.uint8))
    _files: dict[str, memoryview] = field(default_factory=dict)
    _pending: list[tuple[torch.cuda.Event, Sequence[Tensor]]] = field(default_factory=list)

    def copy(self, plans: Sequence[FilePlan], tensors: Mapping[tuple[str, Box], Tensor]) -> dict[str, memoryview]:
        """Start to copy the files of `plans`. Returns their bytes, which are valid after `wait`."""
        total = sum(-(-plan.size // PAGE) * PAGE for plan in plans)
        use_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        if len(self.memory) < total or (total and use_cuda and not self.memory.is_pinned()):
            self.memory = aligned(0)  # free the old one first, so that the two never exist together
            logger.info("asynchronous checkpoints: %.2f GB on this rank for a copy of the state", total / 1e9)
            self.memory = aligned(total)
        self._files, start = {}, 0
        large: list[tuple[memoryview, memoryview]] = []
        for plan in plans:
            image = self.memory[start : start + plan.size]
            content = self._files[plan.name] = as_bytes(image)
            begin = len(plan.header)
            content[:begin] = plan.header
            for key in plan.contents:
                tensor = tensors[key].detach()
                end = begin + tensor.nbytes
                if end - begin > SMALL and is_plain(tensor):
                    source = as_bytes(tensor)
                    target = content[begin:end]
                    large += [(target[i : i + LARGE], source[i : i + LARGE]) for i in range(0, len(source), LARGE)]
                else:
                    _copy_row_major(image[begin:end], tensor)
                begin = end
            start += -(-plan.size // PAGE) * PAGE
        # Plain threads: torch's pool synchronises after every tensor.
        for _ in run_in_threads(lambda task: copy(*task), large, "copy"):
            pass
        on_cuda = [tensors[key] for plan in plans for key in plan.contents if tensors[key].is_cuda]
        for device in {tensor.device for tensor in on_cuda}:
            # Referenced until they are copied: some were made for this save only.
            self._pending.append((torch.cuda.current_stream(device).record_event(), on_cuda))
        return self._files

    def content(self, plan: FilePlan) -> Iterable[Bytes]:
        self.wait()
        return [self._files[plan.name]]

    def wait(self) -> None:
        for event, _ in self._pending:
            event.synchronize()
        self._pending.clear()


def _copy_row_major(target: Tensor, tensor: Tensor) -> None:
    """Copy the bytes of `tensor`, row-major. A copy from CUDA completes when its stream reaches it."""
    if not tensor.numel():
        return
    non_blocking = tensor.is_cuda  # other devices have no event to wait for
    if target.storage_offset() % tensor.itemsize == 0:
        target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=non_blocking)
    else:
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        target.copy_(plain.view(-1).view(torch.uint8), non_blocking=non_blocking)


@dataclass(frozen=True)
class ExtraFiles:
    """Files that go into a checkpoint as they are."""

    files: Mapping[str, SourceFile] = field(default_factory=dict)  # this rank's, by paths in the checkpoint
    names: Collection[str] = ()  # of all ranks' files
    close: Callable[[], None] = lambda: None  # called after the copy or after an error; may be called twice


NO_FILES = ExtraFiles()


def copy_files(
    files: Mapping[str, SourceFile], storage: Storage, folder: str, tick: Tick = ignore
) -> dict[str, FileRecord]:
    """Copy `files` below `folder` of `storage`, durably; a later `sync` of `folder` covers the names in it."""
    parts = [name.split("/") for name in files]
    subfolders = dict.fromkeys("/".join(names[:count]) for names in parts for count in range(1, len(names)))
    for name in subfolders:  # each after its parent
        with suppress(FileExistsError):  # another rank was quicker
            storage.make(join(folder, name))
    records = {
        name: FileRecord(file.size, storage.put(join(folder, name), blocks_of(file), file.size, tick))
        for name, file in files.items()
    }
    for name in subfolders:
        storage.sync(join(folder, name))
    return records


def blocks_of(file: SourceFile) -> Iterator[Bytes]:
    """The bytes of a file, a block at a time, verified if checksums are known."""
    for begin in range(0, file.size, BLOCK):
        block = memoryview(bytearray(min(BLOCK, file.size - begin)))
        file.fetch([(begin, block)])
        yield block


class Target(NamedTuple):
    """The folder of a checkpoint, and its description in the manifest."""

    storage: Storage
    name: str
    step: int
    plan: Mapping[str, Any]


@dataclass(eq=False)
class Saves:
    """The saves of a run on one `line` of checkpoints, one at a time. All ranks make each call."""

    world: World
    line: SaveLine = field(default_factory=SaveLine)
    _meeting: Meeting | None = None
    _plan: SavePlan = SavePlan()
    _planned: tuple[Sequence[LocalChunk], Mapping[str, str]] | None = None  # this rank's chunks and aliases
    _host_copy: HostCopy = field(default_factory=HostCopy)
    thread: threading.Thread | None = None  # of an asynchronous save that nothing has waited for
    _error: CheckpointError | None = None

    def save(
        self,
        target: Target,
        items: Sequence[Saveable],
        asynchronous: bool = False,
        limit: int | None = None,
        tick: Tick = ignore,
        extra: ExtraFiles = NO_FILES,
    ) -> None:
        """Write a checkpoint of `items`; errors, also of an asynchronous save before it, are raised on all ranks."""
        check_name(target.name)
        self.wait()
        self._meeting = self._meeting or Meeting(self.world)
        snapshot = self._collect(items)
        check_extra(extra.names, [INDEX, *(file.name for file in self._plan.files)])
        host_copy = self._host_copy if asynchronous else None
        save = Save(self._meeting, self.line, target, limit, self._plan, snapshot, host_copy, extra, tick)
        if not asynchronous:
            save.run()
            return
        run_on_all(self.world, save.copy_to_host, NOT_BEGUN)
        # Not a daemon, so that an ending interpreter waits for it before it forbids new threads, which write files.
        self.thread = threading.Thread(target=self._run, args=(save,), name="easymp-save", daemon=False)
        self.thread.start()

    def _collect(self, items: Sequence[Saveable]) -> Snapshot:
        """Collect the state of `items` on all ranks. Make a new plan unless every rank has the same tensors again."""
        snapshot = Snapshot(self.world.rank)

        def collect() -> bool:
            for item in items:
                item.collect(snapshot)
            snapshot.pack()
            return self._planned == (snapshot.chunks, snapshot.aliases)

        try:
            if not all(run_on_all(self.world, collect, NOT_BEGUN)):
                planned = snapshot.chunks, snapshot.aliases
                by_rank = self.world.gather_objects(planned)
                aliases = {name: target for _, aliases in by_rank for name, target in aliases.items()}
                self._plan = plan_files([chunks for chunks, _ in by_rank])._replace(aliases=aliases)
                self._planned = planned
        except WorldError as error:
            raise CheckpointError(f"the ranks could not agree on a checkpoint: {error}") from error
        return snapshot

    def _run(self, save: Save) -> None:
        if sys.platform == "linux":  # there each thread has a priority, which threads that it starts inherit
            nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        try:
            save.run()
        except Exception as error:
            self._error = CheckpointError(error_text(error))
            logger.error("asynchronous checkpoint: %s", self._error)

    def wait(self) -> None:
        """Wait until an asynchronous save is committed; raises its error."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait at the end of the run; a run that ends with an error waits only for ranks with a heartbeat."""
        is_failing = failing()
        if is_failing and self._meeting is not None:
            self._meeting.hurried = True
        try:
            self.wait()
        except CheckpointError:
            if not is_failing:
                raise
        finally:
            self._host_copy = HostCopy()


@dataclass
class Save:
    """One save. All ranks call `run`, in any thread. With a `host_copy` the files are written from there."""

    meeting: Meeting
    line: SaveLine
    target: Target
    limit: int | None
    plan: SavePlan
    snapshot: Snapshot
    host_copy: HostCopy | None
    extra: ExtraFiles
    tick: Tick
    commit: Commit | None = None  # on rank 0

    @cached_property
    def own_files(self) -> list[FilePlan]:
        return [file for file in self.plan.files if file.rank == self.meeting.rank]

    def copy_to_host(self) -> None:
        assert self.host_copy is not None
        self.host_copy.copy(self.own_files, self.snapshot.tensors)

    def run(self) -> None:
        with closing(self.extra), self.meeting:
            try:  # `Meeting.run` returns all ranks' results, and that of rank 0
                _, (folder, digests) = self.meeting.run(self._begin, self._close)
                reports, _ = self.meeting.run(lambda: self._write(folder, digests), self._close)
                self.meeting.run(lambda: self._commit(reports), self._close)
            except Exception as error:
                path = join(self.target.storage.root, self.target.name)
                text = f"{path} was not written, and what was there before is untouched: {error_text(error)}"
                raise CheckpointError(text) from error
            finally:
                self._close()

    def _close(self) -> None:
        """On rank 0, delete the folder unless it is committed, and unlock the checkpoint."""
        if self.commit is not None:
            self.commit.close()
            self.commit = None

    def _begin(self) -> Any:
        """On rank 0, make the folder; returns it with digests of rank 0's states, which others need not send again."""
        if self.meeting.rank:
            return None
        storage, name, step, _ = self.target
        self.commit = Commit(storage, name, self.line.next_record(storage, name, step))
        states = self.snapshot.states if self.meeting.size > 1 else {}
        return self.commit.folder, {name: _digest(state) for name, state in states.items()}

    def _write(self, folder: str, digests: Mapping[str, str]) -> Any:
        """Write this rank's files; returns sizes and checksums, and the states that rank 0 does not have."""
        storage, checksums = self.target.storage, dict[str, list[int]]()
        extra_size = sum(file.size for file in self.extra.files.values())
        expect(self.tick, sum(file.size for file in self.own_files) + extra_size)
        tick = self._tick_unless_failed if self.meeting.size > 1 else self.tick
        for file in self.own_files:
            name = f"{folder}/{file.name}"
            content = self.host_copy.content(file) if self.host_copy else file_content(file, self.snapshot.tensors)
            try:
                checksums[file.name] = [file.size, *storage.put(name, content, file.size, tick)]
            except FileNotFoundError as error:
                if self.meeting.rank == 0:
                    raise
                fault = "cannot be made: the folder, which rank 0 made, is not visible here"
                raise CheckpointError(f"{join(storage.root, name)} {fault}: {SHARE}") from error
        for name, record in copy_files(self.extra.files, storage, folder, tick).items():
            checksums[name] = [record.size, *record.checksums]
        states = self.snapshot.states if self.meeting.rank else {}
        return checksums, {name: state for name, state in states.items() if digests.get(name) != _digest(state)}

    def _tick_unless_failed(self, count: int) -> None:
        if self.meeting.failed:
            raise CheckpointError(STOPPED)
        self.tick(count)

    def _commit(self, reports: Sequence[Any]) -> None:
        """On rank 0, write the manifest, and commit."""
        if self.commit is None:
            return
        storage, tensors, states = self.target.storage, self.plan.tensors, dict(self.snapshot.states)
        folder, record = self.commit.folder, self.commit.record
        files: dict[str, FileRecord] = {}
        extra: dict[str, FileRecord] = {}
        planned = {file.name for file in self.plan.files}
        for rank, (checksums, rank_states) in enumerate(reports):
            for name, (size, *crcs) in checksums.items():
                records = files if name in planned else extra
                records[name] = FileRecord(size, tuple(crcs))
                if rank and storage.size(f"{folder}/{name}") != size:
                    raise CheckpointError(f"{name} of rank {rank} is not visible on rank 0: {SHARE}")
            for name, state in rank_states.items():
                states[name] = merge_states(states[name], state, name) if name in states else state
        weights = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
        if weights and all([chunk.box for chunk in t.chunks] == [full_box(t.shape)] for t in weights.values()):
            # Whole tensors: other programs read the first model by an index of Hugging Face's form.
            file_of = {name: t.chunks[0].file for name, t in weights.items()}
            index = encode_index(file_of, sum(t.bytes for t in weights.values()))
            files[INDEX] = FileRecord(len(index), storage.put(f"{folder}/{INDEX}", [index], len(index)))
        manifest = Manifest(
            step=self.target.step,
            world_size=self.meeting.size,
            written=record.written,
            made_by=f"easymp {__version__}",
            plan=dict(self.target.plan),
            tensors=dict(tensors),
            files=files,
            states=states,
            aliases=dict(self.plan.aliases),
            extra=extra,
            lineage=record.lineage,
        )
        text = manifest.encode()
        for name, content in ((MANIFEST, text), (COMMIT, seal(text))):
            storage.put(f"{folder}/{name}", [content], len(content))
            storage.sync(folder)  # COMMIT seals a manifest that is on disk
        self.commit.finish()
        self.line.saved(storage, record)
        retain(storage, record, self.limit)
        self._close()


def _digest(state: Any) -> str:
    return hashlib.sha256(dumps(state)).hexdigest()


def merge_states(state: Any, rank_state: Any, name: str) -> Any:
    """Merge two ranks' states of one object: mappings are united, other values must be equal."""
    if state == rank_state:
        return state
    if isinstance(state, dict) and isinstance(rank_state, dict):
        common = {key: merge_states(state[key], rank_state[key], f"{name}/{key}") for key in state.keys() & rank_state}
        return {**state, **rank_state, **common}
    raise CheckpointError(f"{name}: the ranks have different values, {state!r} and {rank_state!r}, of one thing")
