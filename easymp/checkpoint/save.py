"""Saving: every rank writes its files into a temporary folder; rank 0 commits it.

Stages: collect and plan (`snapshot`), write, commit (`commit`, which has the order of durable steps). Only a COMMIT makes
a folder a checkpoint, and retention removes others only after that.

During a save, ranks communicate through the process group's store and not by collectives, so that a background thread can save while the
others train. Each rank sends a heartbeat every second while it works. A waiting rank gives up when another one has sent none for the
world's timeout: it was killed, or its machine is gone. The work itself may take any time.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..distributed import World
from ..errors import CheckpointError, WorldError, failing
from ..logging import get_logger
from ..version import __version__
from . import snapshot
from .codec import dumps
from .commit import Commit, begin, check_name, retain
from .folders import NONE, Extra, Line, Saved, copied, inside, write_manifest
from .manifest import INDEX, FileRecord, Manifest, check_extra
from .snapshot import Agreement, FilePlan, Kept, Snapshot, first
from .storage import Part, Storage, Tick, expect, no_tick

logger = get_logger(__name__)
NICE = 10  # by how much the thread that writes stands back behind those that train
INTERRUPTED = "interrupted"
SHARE = "all ranks must share the file system: pass a folder of one that they share, or a URL"
BEAT = 1.0  # seconds between two signs of life
HURRY = 10.0  # seconds without a sign after which a rank counts as dead, for a process that is about to end
CHUNK = 2**22  # bytes of one value in the store: its server closes connections that send it more than 8 MiB
GONE = "the ranks' common store is gone: rank 0, which has it, ended or was killed"


class Target(NamedTuple):
    """The place of a checkpoint, and its description in the manifest."""

    storage: Storage
    name: str
    step: int
    plan: Mapping[str, Any]


class Saves:
    """The saves of a run on one `line` of checkpoints, one at a time, in the foreground or background. All ranks make each call."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.line = Line()
        self._barrier: Barrier | None = None
        self._agreed: Agreement | None = None
        self._image = snapshot.Image()
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
        """Write a checkpoint of what is `kept`; errors, also of an asynchronous save before it, are raised on every rank.

        Args:
            asynchronous: return as soon as the state is copied; a thread writes. The next save waits for it.
            limit: how many committed checkpoints of the same line, named by steps, stay in `target`'s folder; None for all.
            tick: called with the number of bytes that this rank has written since the last call, by the writing thread.
            extra: files of hooks. They are released after the save, unless it raises before it has begun.
        """
        check_name(target.name)
        self.wait()
        if self._barrier is None:
            self._barrier = Barrier(self._world)
        state, self._agreed = snapshot.agree(self._world, kept, self._agreed)
        plans = self._agreed.division.files
        check_extra(extra.names, [INDEX, *(plan.name for plan in plans)])
        mine = [plan for plan in plans if plan.rank == self._world.rank]
        files = (
            self._copied(mine, state) if asynchronous else lambda plan: snapshot.contents(plan, state.parts)
        )
        barrier = self._barrier.start()
        save = Save(barrier, self.line, target, limit, self._agreed, state.states, mine, files, extra, tick)
        if not asynchronous:
            try:
                save.run()
            finally:
                extra.close()
            return
        # Not a daemon: at its end the interpreter waits for it, while it can still start threads (several write each file).
        self._thread = threading.Thread(target=self._run, args=(save,), name="easymp-save", daemon=False)
        self._thread.start()

    def _copied(self, mine: Sequence[FilePlan], state: Snapshot) -> Callable[[FilePlan], Iterable[Part]]:
        """Copy this rank's files now, and return their bytes."""
        files: dict[str, memoryview] = {}
        said = snapshot.trouble(lambda: files.update(self._image.take(mine, state.parts)))

        def copied(plan: FilePlan) -> Iterable[Part]:
            if said:  # raised where the other ranks hear of it
                raise CheckpointError(f"no copy of the state could be made: {said}")
            self._image.wait()
            return [files[plan.name]]

        return copied

    def _run(self, save: Save) -> None:
        if sys.platform == "linux":  # where a priority can be one thread's; those that it starts inherit it
            nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        try:
            said = snapshot.trouble(save.run)
        finally:
            save.extra.close()
        if said:
            self._error = CheckpointError(said)
            logger.error("asynchronous checkpoint: %s", said)

    def wait(self) -> None:
        """Wait until an asynchronous save is committed; raises its error."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait at the end of the run. A run that ends with an error keeps that error, and waits only for ranks with a heartbeat."""
        fails = failing()
        if fails and self._barrier is not None:
            self._barrier.hurried = True
        try:
            self.wait()
        except CheckpointError:
            if not fails:
                raise
        finally:
            self._image = snapshot.Image()


@dataclass(frozen=True)
class Save:
    """One save. All ranks call `run`, in any thread; no collectives. `mine` are this rank's files, and `files` yields their bytes."""

    barrier: Barrier
    line: Line
    target: Target
    limit: int | None
    agreement: Agreement
    states: Mapping[str, Any]
    mine: Sequence[FilePlan]
    files: Callable[[FilePlan], Iterable[Part]]
    extra: Extra
    tick: Tick

    def run(self) -> None:
        """Write and commit; raises CheckpointError on every rank if it failed on one."""
        with self.barrier:
            said = self._lead() if self.barrier.rank == 0 else self._follow()
        if said:
            place = inside(self.target.storage.place, self.target.name)
            raise CheckpointError(f"{place} was not written, and what was there before is untouched: {said}")

    def _lead(self) -> str:
        """Rank 0's part: make the folder, write the manifest, and commit. Returns the error."""
        begun: list[tuple[Commit, Saved]] = []
        said = INTERRUPTED

        def start() -> None:
            saved = self.line.next(self.target.storage, self.target.name, self.target.step)
            begun.append((begin(self.target.storage, self.target.name, saved), saved))

        try:
            said = self._of_rank_0(snapshot.trouble(start))
        finally:
            folder = begun[0][0].folder if begun else ""
            digests = {n: _digest(s) for n, s in self.states.items()} if self.barrier.size > 1 else {}
            self.barrier.put("begin", dumps([said, folder, digests]))
        if not begun:
            return said
        commit, saved = begun[0]
        said = INTERRUPTED
        try:
            given = self.barrier.gather("written", self._write(folder, self.states))
            reports = [[str(r), {}, {}] if isinstance(r, CheckpointError) else json.loads(r) for r in given]
            said = first([words for words, *_ in reports])
            said = said or self._of_rank_0(snapshot.trouble(lambda: self._commit(commit, saved, reports)))
        finally:
            if said:
                self.barrier.put("failed", b"")
            commit.close()
            self.barrier.put("end", said.encode())
        return said

    def _of_rank_0(self, said: str) -> str:
        return f"rank 0: {said}" if said and self.barrier.size > 1 else said

    def _follow(self) -> str:
        """The part of the other ranks. Returns the error."""
        said, folder, digests = json.loads(self.barrier.take("begin"))
        if said:
            return str(said)
        report = dumps([INTERRUPTED, {}, {}])
        try:
            same = {name for name, state in self.states.items() if digests.get(name) == _digest(state)}
            report = self._write(folder, same)
        finally:
            self.barrier.put(f"written/{self.barrier.rank}", report)
        return self.barrier.take("end").decode()

    def _write(self, folder: str, known: Iterable[str]) -> bytes:
        """Write this rank's files. Returns the error, sizes and checksums, and the states that are not among rank 0's `known`."""
        written: dict[str, list[int]] = {}

        def check() -> None:
            if self.barrier.failed:
                raise CheckpointError(snapshot.STOPPED)

        def tick(count: int) -> None:
            check()
            self.tick(count)

        def work() -> None:
            sizes = [file.size for file in (*self.mine, *self.extra.files.values())]
            expect(self.tick, sum(sizes))
            for plan in self.mine:
                check()
                written[plan.name] = [plan.size, *self._put(f"{folder}/{plan.name}", plan, tick)]
            records = copied(self.extra.files, self.target.storage, folder, tick)
            written.update({name: [record.size, *record.checksums] for name, record in records.items()})

        said = snapshot.trouble(work)
        if said:
            self.barrier.put("failed", b"")
        return dumps([said, written, {name: s for name, s in self.states.items() if name not in known}])

    def _put(self, name: str, plan: FilePlan, tick: Tick) -> tuple[int, ...]:
        try:
            return self.target.storage.put(name, self.files(plan), plan.size, tick)
        except FileNotFoundError as error:
            if self.barrier.rank == 0:
                raise
            place = inside(self.target.storage.place, name)
            said = f"{place} cannot be made: the folder, which rank 0 made, is not visible here"
            raise CheckpointError(f"{said}: {SHARE}") from error

    def _commit(self, commit: Commit, saved: Saved, reports: Sequence[Any]) -> None:
        storage, folder, division = self.target.storage, commit.folder, self.agreement.division
        files: dict[str, FileRecord] = {}
        extra: dict[str, FileRecord] = {}
        ours = {plan.name for plan in division.files}
        states = dict(self.states)
        for rank, (_, written, others) in enumerate(reports):
            for name, (size, *crcs) in written.items():
                (files if name in ours else extra)[name] = FileRecord(size, tuple(crcs))
                if rank and storage.size(f"{folder}/{name}") != size:
                    raise CheckpointError(f"{name} of rank {rank} is not visible on rank 0: {SHARE}")
            for name, state in others.items():
                states[name] = snapshot.merged(states[name], state, name) if name in states else state
        index = snapshot.index_of(division.tensors)
        if index is not None:
            files[INDEX] = FileRecord(len(index), storage.put(f"{folder}/{INDEX}", [index], len(index)))
        manifest = Manifest(
            step=self.target.step,
            world_size=self.barrier.size,
            written=saved.written,
            made_by=f"easymp {__version__}",
            plan=dict(self.target.plan),
            tensors=division.tensors,
            files=files,
            states=states,
            aliases=dict(self.agreement.aliases),
            extra=extra,
            lineage=saved.lineage,
        )
        write_manifest(storage, folder, manifest)
        commit.finish()
        self.line.saved(storage, saved)
        retain(storage, saved, self.limit)


def _digest(state: Any) -> str:
    return hashlib.sha256(dumps(state)).hexdigest()


# -- the ranks' meeting ------------------------------------------------------------------------------------------------


class Barrier:
    """This rank's connection for the saves of a run. All ranks make it together, and each save begins with the same `start`.

    `failed`: a rank has failed, so that the others stop. `hurried`: wait at most HURRY seconds for ranks without a heartbeat.
    """

    def __init__(self, world: World) -> None:
        self.rank, self.size, self.failed, self.hurried = world.rank, world.size, False, False
        self._timeout, self._number = world.timeout, 0
        self._over = threading.Event()
        self._store: Any = None
        if world.size > 1:
            store = world.store()
            # The count is in the store, since another run of this process may have used that store before.
            self._store = dist.PrefixStore(f"saves/{store.add(f'saves/{world.rank}', 1)}", store)

    def start(self) -> Barrier:
        """Begin the next save; to be used in a ``with`` block."""
        self.forget()
        self._number += 1
        self.failed = False
        self._over = threading.Event()
        # By rank: the last heartbeat, and the time when it was seen.
        self._seen = dict.fromkeys(range(self.size), (0, time.monotonic()))
        self._thread = threading.Thread(target=self._beat, name="easymp-beat", daemon=True)
        return self

    def __enter__(self) -> Barrier:
        if self.size > 1:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self.size > 1:
            self._thread.join()

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone: the next wait says so
            while True:
                self._store.add(f"alive/{self.rank}", 1)
                self.failed = self._store.check([f"{self._number}/failed"])
                if self._over.wait(BEAT):
                    return

    def put(self, what: str, value: bytes) -> None:
        """Publish a value: `take` reads a value of rank 0, and `gather` those of ``what/rank``."""
        if self.size == 1:
            return
        name, value = f"{self._number}/{what}", zlib.compress(value, 1)
        chunks = [value[i : i + CHUNK] for i in range(0, len(value), CHUNK)]
        try:
            for i, chunk in enumerate(chunks[1:], 1):
                self._store.set(f"{name}/+{i}", chunk)
            self._store.set(name, len(chunks).to_bytes(4, "little") + chunks[0])
        except RuntimeError as error:
            raise CheckpointError(f"{GONE} ({error})") from error

    def gather(self, what: str, mine: bytes) -> list[bytes | CheckpointError]:
        """On rank 0: each rank's value, or the error that its heartbeat stopped."""
        gathered: list[bytes | CheckpointError] = [mine]
        for rank in range(1, self.size):
            try:
                gathered.append(self.take(f"{what}/{rank}", rank))
            except CheckpointError as error:
                gathered.append(error)
                self.put("failed", b"")
        return gathered

    def take(self, what: str, rank: int = 0) -> bytes:
        """Wait for a value of another rank."""
        name, pulse, pause = f"{self._number}/{what}", f"alive/{rank}", 0.001
        try:
            while not self._store.check([name]):
                now = self._store.add(pulse, 0)
                if now != self._seen[rank][0]:
                    self._seen[rank] = now, time.monotonic()
                silent = time.monotonic() - self._seen[rank][1]
                ending = self.hurried or not threading.main_thread().is_alive()
                if silent > (min(self._timeout, HURRY) if ending else self._timeout):
                    raise CheckpointError(
                        f"no sign of life for {silent:.0f} s: it ended, was killed or stopped"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            first = self._store.get(name)
            rest = [self._store.get(f"{name}/+{i}") for i in range(1, int.from_bytes(first[:4], "little"))]
            if rank:  # only rank 0 asks for it
                self._delete(name)
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{GONE} ({error})") from error
        return zlib.decompress(b"".join([first[4:], *rest]))

    def forget(self, also: Iterable[str] = ()) -> None:
        """Remove the values of a finished save from the store."""
        if self.size > 1 and self.rank == 0:
            with suppress(RuntimeError):  # the store is gone: the next wait says so
                for what in ("failed", "begin", "end", *also):
                    self._delete(f"{self._number}/{what}")

    def _delete(self, name: str) -> None:
        if self._store.check([name]):
            for i in range(1, int.from_bytes(self._store.get(name)[:4], "little")):
                self._store.delete_key(f"{name}/+{i}")
            self._store.delete_key(name)


# -- a save that the main process alone calls, as in ``if accelerator.is_main_process: accelerator.save_state(...)`` ------
#
# The main process cannot see from its own call whether the other ranks will make it, too. So it asks their listeners (threads that wait at
# the store) until each rank either makes the call, or has begun a collective that the main process has not begun. All ranks begin
# collectives in one order, so that rank has passed the call. It waits in that collective, and its state does not change meanwhile.


HERE = "here"
PAUSE = 0.02  # seconds between two questions


class SaveCalls:
    """Finds out which ranks call a save; all ranks make one. `ended` are ranks that do not answer.

    `help` is called with a world in a thread of a rank that has passed a save, if the main process needs that rank's part of the state.
    """

    def __init__(self, world: World, help: Callable[[StoreWorld], None]) -> None:
        self._world, self._help = world, help
        self.ended: list[int] = []
        self._waits = False  # whether this rank has made the call, and waits for the main process's answer
        self._words: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._number = 0  # saves in which helper threads took part
        if world.watch is not None:
            answers = {
                "save": lambda: HERE if self._waits else json.dumps(world.position()),
                "together": lambda: self._hear(True),
                "alone": lambda: self._hear(False),
                "help": self._start_helper,
            }
            world.watch.told.update(answers)

    def _hear(self, together: bool) -> str:
        self._waits = False
        self._words.put(together)
        return HERE

    def all_called(self) -> bool:
        """Whether all ranks make the call; WorldError if one neither makes it nor begins a collective in time."""
        world = self._world
        if world.rank:
            self._waits = True
            try:
                return self._words.get(timeout=world.timeout)
            except queue.Empty:
                raise WorldError(
                    f"rank {world.rank} came to save_state(), and rank 0 did not within {world.timeout:g} s"
                ) from None
            finally:
                self._waits = False
        here = [rank for rank in range(1, world.size) if self._comes(rank)]
        found = len(here) == world.size - 1
        for rank in here:
            self._ask(rank, "together" if found else "alone")
        return found

    def _comes(self, rank: int) -> bool:
        mine, until = self._world.position(), time.monotonic() + self._world.timeout
        while time.monotonic() < until:
            said = "" if self._world.has_left(rank) else self._ask(rank, "save")
            if said == HERE:
                return True
            if not said:
                self.ended.append(rank)
                return False
            theirs = json.loads(said)
            if any(theirs[kind] > number for kind, number in mine.items() if kind in theirs):
                return False
            time.sleep(PAUSE)
        raise WorldError(
            f"save_state(): rank {rank} neither came nor went on to a collective within {self._world.timeout:g} s"
        )

    def _ask(self, rank: int, word: str) -> str:
        assert self._world.watch is not None
        return self._world.watch.ask(rank, word)

    def with_helpers(self) -> StoreWorld:
        """On rank 0, make a world for a save in which helper threads of the other ranks take part."""
        for rank in range(1, self._world.size):
            self._ask(rank, "help")
        return self._store_world()

    def _start_helper(self) -> str:
        def act() -> None:
            try:
                self._help(there)
            except Exception as error:  # rank 0 hears of it by the store
                logger.error("save_state() of the main process: %s", error)

        there = self._store_world()
        threading.Thread(target=act, name="easymp-save", daemon=True).start()
        return HERE

    def _store_world(self) -> StoreWorld:
        self._number += 1
        return StoreWorld(self._world, self._number)


def one_rank(world: World) -> World:
    """A copy of `world` with one rank."""
    one = copy.copy(world)
    one.size = 1
    return one


class StoreWorld(World):
    """A world whose ranks exchange objects through the store, beside collectives of its process group. Use it in a ``with`` block."""

    def __init__(self, world: World, number: int) -> None:
        vars(self).update(vars(world))
        self._prefix, self._objects = f"apart/{number}", 0
        self._meeting = Barrier(self).start()

    def store(self) -> dist.Store:
        return dist.PrefixStore(self._prefix, super().store())

    def __enter__(self) -> StoreWorld:
        self._meeting.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._meeting.__exit__(*error)

    def gather_objects(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order, on every rank."""
        self._objects += 1
        given, found = f"given/{self._objects}", f"found/{self._objects}"
        if self.rank:
            self._meeting.put(f"{given}/{self.rank}", _packed(item))
            parts = _unpacked(self._meeting.take(found))
        else:
            parts = self._meeting.gather(given, _packed(item))
            for part in parts:
                if isinstance(part, CheckpointError):
                    raise part
            self._meeting.put(found, _packed(parts))
        return [_unpacked(part) for part in parts]


def _packed(item: Any) -> bytes:
    """Serialise an object as torch's collectives of objects do."""
    tensor, _ = dist.distributed_c10d._object_to_tensor(item, torch.device("cpu"), None)
    return bytes(tensor.numpy())


def _unpacked(data: bytes) -> Any:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return dist.distributed_c10d._tensor_to_object(tensor, len(data), None)
