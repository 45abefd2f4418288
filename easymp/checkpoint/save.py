"""Saving: every rank writes its files into a folder that does not count yet; rank 0 makes it count.

`.tmp-<name>-<id>/` → every file written and on disk → all ranks done → manifest → the folder on disk → COMMIT → the folder → renamed → the
parent folder on disk → only then what retention drops. A folder without a COMMIT that fits its manifest does not exist for anyone.
(`commits` has the first and the last step, also for places where nothing can be renamed.)
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed import World
from ..errors import CheckpointError, failing
from ..logging import get_logger
from ..version import __version__
from .barrier import Meeting, Store
from .blocks import Part, Tick, address, aligned, as_bytes, no_tick, spread
from .codec import dumps
from .commit import Commit, begin, check_name
from .folders import SourceFile, inside, write_manifest
from .hooks import NONE, Extra, copied
from .huggingface import index_of
from .layout import Box
from .lineage import Line, Saved, retain
from .manifest import INDEX, FileRecord, Manifest, check_extra
from .progress import expect
from .snapshot import Agreement, FilePlan, Kept, Parts, agree, contents, first, is_plain, merged, trouble
from .storage import Storage

INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes, and what is said of it."""

    storage: Storage
    name: str
    step: int
    plan: Mapping[str, Any]


@dataclass(frozen=True)
class Save:
    """One checkpoint on its way to the disk. All ranks `run` theirs, each in any of its threads; no collectives.

    Attributes:
        number: of this save in the run, the same on all ranks.
        line: that the run continues.
        limit: as `retention.retain` has it.
        states: this rank's Python state.
        files: the bytes of a file that this rank writes.
        extra: files of hooks that this rank puts there, too.
    """

    store: Store
    number: int
    line: Line
    target: Target
    limit: int | None
    agreement: Agreement
    states: Mapping[str, Any]
    files: Callable[[FilePlan], Iterable[Part]]
    extra: Mapping[str, SourceFile]

    def run(self, tick: Tick) -> None:
        """Write, and commit.

        Raises:
            CheckpointError: on every rank, if it failed on one; what was there before is untouched.
        """
        with Meeting(self.store, self.number) as meeting:
            said = self._lead(meeting, tick) if self.store.rank == 0 else self._follow(meeting, tick)
        if said:
            place = inside(self.target.storage.place, self.target.name)
            raise CheckpointError(f"{place} was not written, and what was there before is untouched: {said}")

    def _lead(self, meeting: Meeting, tick: Tick) -> str:
        """Rank 0's part: it has the folder, the manifest and the last word. Returns what went wrong."""
        commit: Commit | None = None
        place: Saved | None = None
        said = INTERRUPTED

        def start() -> None:
            nonlocal commit, place
            place = self.line.next(self.target.storage, self.target.name, self.target.step)
            commit = begin(self.target.storage, self.target.name, place)

        try:
            said = self._mine(trouble(start))
        finally:
            folder = commit.folder if commit is not None else ""
            meeting.announce("begin", dumps([said, folder, self._digests()]))
        if commit is None or place is None:
            return said
        said = INTERRUPTED
        try:
            given = meeting.gather("written", self._report(meeting, folder, tick))
            reports = [[str(r), {}, {}] if isinstance(r, CheckpointError) else json.loads(r) for r in given]
            said = first([words for words, *_ in reports]) or self._mine(
                trouble(lambda: self._commit(commit, place, reports))
            )
        finally:
            if said:
                meeting.fail()
            commit.close()
            meeting.announce("end", said.encode())
        return said

    def _mine(self, said: str) -> str:
        return f"rank 0: {said}" if said and self.store.size > 1 else said

    def _follow(self, meeting: Meeting, tick: Tick) -> str:
        """The other ranks'."""
        said, folder, digests = json.loads(meeting.announced("begin"))
        if said:
            return str(said)
        report = dumps([INTERRUPTED, {}, {}])
        try:
            report = self._report(meeting, folder, tick, digests)
        finally:
            meeting.give("written", report)
        return meeting.announced("end").decode()

    def _report(
        self, meeting: Meeting, folder: str, tick: Tick, known: Mapping[str, str] | None = None
    ) -> bytes:
        """Write this rank's files into `folder`: what went wrong, what is written, and those of its states that rank 0 does not know."""
        written: dict[str, list[int]] = {}

        def ticked(count: int) -> None:
            meeting.check()
            tick(count)

        def work() -> None:
            mine = [plan for plan in self.agreement.division.files if plan.rank == self.store.rank]
            expect(tick, sum(plan.size for plan in mine) + sum(file.size for file in self.extra.values()))
            for plan in mine:
                meeting.check()
                written[plan.name] = [plan.size, *self._put(f"{folder}/{plan.name}", plan, ticked)]
            records = copied(self.extra, self.target.storage, folder, ticked)
            written.update({name: [record.size, *record.checksums] for name, record in records.items()})

        said = trouble(work)
        if said:
            meeting.fail()
        states = (
            {}
            if known is None
            else {name: s for name, s in self.states.items() if known.get(name) != _digest(s)}
        )
        return dumps([said, written, states])

    def _put(self, name: str, plan: FilePlan, tick: Tick) -> tuple[int, ...]:
        try:
            return self.target.storage.put(name, self.files(plan), plan.size, tick)
        except FileNotFoundError as error:
            if not self.store.rank:
                raise
            raise CheckpointError(
                f"{inside(self.target.storage.place, name)} cannot be made: the folder, which rank 0 made, is not to be seen here. All "
                "ranks must share the file system: pass a folder of one that they share, or a URL"
            ) from error

    def _digests(self) -> dict[str, str]:
        return {name: _digest(state) for name, state in self.states.items()} if self.store.size > 1 else {}

    def _commit(self, commit: Commit, place: Saved, reports: Sequence[Any]) -> None:
        storage, folder = self.target.storage, commit.folder
        files: dict[str, FileRecord] = {}
        extra: dict[str, FileRecord] = {}
        ours = {plan.name for plan in self.agreement.division.files}
        for rank, (_, written, _) in enumerate(reports):
            for name, (size, *crcs) in written.items():
                (files if name in ours else extra)[name] = FileRecord(size, tuple(crcs))
                if rank and storage.size(f"{folder}/{name}") != size:
                    raise CheckpointError(
                        f"{name}, which rank {rank} wrote, is not to be seen on rank 0: all ranks must share the file system: pass a "
                        "folder of one that they share, or a URL"
                    )
        states = dict(self.states)
        for _, _, others in reports[1:]:
            for name, state in others.items():
                states[name] = merged(states[name], state, name) if name in states else state
        index = index_of(self.agreement.division.tensors)
        if index is not None:
            files[INDEX] = FileRecord(len(index), storage.put(f"{folder}/{INDEX}", [index], len(index)))
        manifest = Manifest(
            step=self.target.step,
            world_size=self.store.size,
            written=place.written,
            made_by=f"easymp {__version__}",
            plan=dict(self.target.plan),
            tensors=self.agreement.division.tensors,
            files=files,
            states=states,
            aliases=dict(self.agreement.aliases),
            extra=extra,
            lineage=place.lineage,
        )
        write_manifest(storage, folder, manifest)
        commit.finish()
        self.line.saved(storage, place)
        retain(storage, place, self.limit)


def _digest(state: Any) -> str:
    return hashlib.sha256(dumps(state)).hexdigest()


# -- The saves of a run: one at a time, here or in the background.


logger = get_logger(__name__)
NICE = 10  # by how much the thread that writes stands back behind those that train


class Saves:
    """One a run; every call is made by all ranks together.

    Attributes:
        line: that the saves continue; rank 0's counts.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.line = Line()
        self._store: Store | None = None
        self._agreed: Agreement | None = None
        self._image = Image()
        self._number = 0
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def save(
        self,
        target: Target,
        kept: Sequence[Kept],
        asynchronous: bool = False,
        limit: int | None = None,
        tick: Tick = no_tick,
        extra: Extra = NONE,
    ) -> None:
        """Write a checkpoint of what is `kept`.

        Args:
            asynchronous: return as soon as the state is copied; a thread writes. The next save waits for it.
            limit: committed checkpoints of the same line, named by steps, that stay beside `target`'s; the last ones. None for all.
            tick: told how many more bytes this rank has written, now and then; by that thread, where there is one.
            extra: files that go with it, and are let go when it is over, unless this raises before it has begun.

        Raises:
            CheckpointError: on every rank; also what an asynchronous save before this one met with.
        """
        check_name(target.name)
        self.wait()
        if self._store is None:
            self._store = Store(self._world)
        parts, self._agreed = agree(self._world, kept, self._agreed)
        check_extra(extra.names, [INDEX, *(plan.name for plan in self._agreed.division.files)])
        Meeting(self._store, self._number).forget()
        self._number += 1
        files = (
            self._copied(parts, self._agreed) if asynchronous else lambda plan: contents(plan, parts.tensors)
        )
        save = Save(
            self._store,
            self._number,
            self.line,
            target,
            limit,
            self._agreed,
            parts.states,
            files,
            extra.files,
        )
        if not asynchronous:
            try:
                save.run(tick)
            finally:
                extra.close()
            return
        # No daemon: the interpreter waits for it at its end, while threads (each file is written by some) can still be started.
        self._thread = threading.Thread(
            target=self._run, args=(save, tick, extra), name="easymp-save", daemon=False
        )
        self._thread.start()

    def _copied(self, parts: Parts, agreed: Agreement) -> Callable[[FilePlan], Iterable[Part]]:
        """The bytes of this rank's files, from a copy that is made now."""
        files: dict[str, memoryview] = {}
        mine = [plan for plan in agreed.division.files if plan.rank == self._world.rank]
        said = trouble(lambda: files.update(self._image.take(mine, parts.tensors)))

        def copied(plan: FilePlan) -> Iterable[Part]:
            if said:  # where the other ranks hear of it
                raise CheckpointError(f"no copy of the state could be made: {said}")
            self._image.wait()
            return [files[plan.name]]

        return copied

    def _run(self, save: Save, tick: Tick, extra: Extra) -> None:
        if sys.platform == "linux":  # where a priority can be one thread's; those that it starts inherit it
            os.setpriority(
                os.PRIO_PROCESS, threading.get_native_id(), min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
            )
        try:
            said = trouble(lambda: save.run(tick))
        finally:
            extra.close()
        if said:
            self._error = CheckpointError(said)
            logger.error("asynchronous checkpoint: %s", said)

    def wait(self) -> None:
        """Until what is being written is committed; raises what it met with."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """As `wait`; the run is over. One that ends by an error ends by that one, and waits only for ranks that show life."""
        fails = failing()
        if fails and self._store is not None:
            self._store.hurried = True
        try:
            self.wait()
        except CheckpointError:
            if not fails:
                raise
        finally:
            self._image = Image()


# -- A copy of a rank's files in memory, from which a thread writes while the run goes on.


PAGE = 4096
SMALL = 2**18  # bytes of a tensor that is not worth handing to another thread
CHUNK = 2**25  # bytes of a large one that one thread copies at a time


class Image:
    """Memory for the files of one save, which each save uses again; it grows when they do."""

    def __init__(self) -> None:
        self._memory = aligned(0)
        self._pending: list[tuple[torch.cuda.Event, Sequence[Tensor]]] = []

    def take(
        self, plans: Sequence[FilePlan], parts: Mapping[tuple[str, Box], Tensor]
    ) -> dict[str, memoryview]:
        """Copy the files of `plans`; the bytes of each, to be read after `wait`.

        Large tensors on the CPU by a few plain threads: torch's own meet once a tensor, which waits for whoever has the cores.

        Copies from a GPU run in the order of its current stream: what is enqueued there later may change the tensors, and this
        process does not wait.
        """
        self._reserve(sum(_padded(plan.size) for plan in plans))
        files, at = {}, 0
        large: list[tuple[memoryview, memoryview]] = []
        for plan in plans:
            image = self._memory[at : at + plan.size]
            files[plan.name] = as_bytes(image)
            files[plan.name][: len(plan.header)] = plan.header
            begin = len(plan.header)
            for name in plan.contents:
                tensor = parts[name].detach()
                end = begin + tensor.numel() * tensor.itemsize
                if end - begin > SMALL and is_plain(tensor):
                    source = as_bytes(tensor)
                    large += [
                        (files[plan.name][begin + i : end][:CHUNK], source[i : i + CHUNK])
                        for i in range(0, len(source), CHUNK)
                    ]
                else:
                    _copy(image[begin:end], tensor)
                begin = end
            at += _padded(plan.size)
        for _ in spread(_move, large, "copy"):
            pass
        there = [parts[name] for plan in plans for name in plan.contents if parts[name].is_cuda]
        for device in {tensor.device for tensor in there}:
            # Held until they are copied: some were made for this save only.
            self._pending.append((torch.cuda.current_stream(device).record_event(), there))
        return files

    def wait(self) -> None:
        """Until the copy is whole."""
        for event, _ in self._pending:
            event.synchronize()
        self._pending.clear()

    def _reserve(self, size: int) -> None:
        pinned = torch.cuda.is_available() and torch.cuda.is_initialized()
        if len(self._memory) < size or (size and pinned and not self._memory.is_pinned()):
            self._memory = aligned(0)  # the old one goes first
            logger.info(
                "asynchronous checkpoints: %.2f GB of memory on this rank for a copy of what is written",
                size / 1e9,
            )
            self._memory = aligned(size)


def _move(task: tuple[memoryview, memoryview]) -> None:
    into, source = task
    ctypes.memmove(address(into), address(source), len(source))  # lets other threads run; a slice does not


def _copy(into: Tensor, tensor: Tensor) -> None:
    """The bytes of `tensor`, row-major, in the row of bytes `into`; of CUDA's, once its stream has come so far."""
    if not tensor.numel():
        return
    later = tensor.is_cuda  # of no other device is there an event to wait for
    if into.storage_offset() % tensor.itemsize == 0:
        into.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=later)
    else:
        into.copy_(
            tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8), non_blocking=later
        )


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE
