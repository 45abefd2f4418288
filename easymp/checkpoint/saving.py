"""Saving: every rank writes its files into a folder that does not count yet; rank 0 makes it count.

`.tmp-<name>-<id>/` → every file written and on disk → all ranks done → manifest → the folder on disk → COMMIT → the folder → renamed → the
parent folder on disk → only then what retention drops. A folder without a COMMIT that fits its manifest does not exist for anyone.
(`commits` has the first and the last step, also for places where nothing can be renamed.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from ..version import __version__
from .agreeing import Agreement, first, merged, trouble
from .commits import Commit, begin
from .committed import inside, write_manifest
from .hooks import copied
from .huggingface import index_of
from .lineage import Line, Saved, retain
from .manifest import FileRecord, Manifest
from .meeting import Meeting, Store
from .planning import FilePlan
from .progress import expect
from .sources import INDEX
from .storage import Part, Storage, Tick
from .strict import dumps
from .tensor_files import SourceFile

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
