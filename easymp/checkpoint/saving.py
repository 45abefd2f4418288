"""Saving: every rank writes its files into a folder that does not count yet; rank 0 makes it count.

`.tmp-<name>-<id>/` → every file written and on disk → the folder, too → all ranks done → manifest → COMMIT → renamed → the parent folder on
disk. A folder without a COMMIT that fits its manifest does not exist for anyone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, EasympError
from ..version import __version__
from ..world import World
from .boxes import Box, whole
from .contents import write
from .folders import temporary
from .manifest import COMMIT, MANIFEST, FileRecord, Manifest, seal
from .meeting import Meeting
from .planning import Division, divide
from .snapshot import Kept, Snapshot
from .storage import Storage, Tick
from .strict import dumps


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes, and what is said of it."""

    storage: Storage
    name: str
    step: int
    plan: Mapping[str, Any]


class Save:
    """One checkpoint on its way to the disk. Made on all ranks together; `run` may be another thread's.

    Args:
        number: of this save in the run, the same on all ranks.
    """

    def __init__(self, world: World, target: Target, kept: Sequence[Kept], number: int) -> None:
        self._world, self._target = world, target
        snapshot = Snapshot(world.rank)
        said = _trouble(lambda: [k.bring(snapshot) for k in kept])
        together = world.gather_objects((said, snapshot.brought, snapshot.states, snapshot.aliases))
        _raise_first([said for said, *_ in together])
        self._parts: Mapping[tuple[str, Box], Tensor] = snapshot.parts
        self._states: dict[str, Any] = {}
        for _, _, states, _ in together:
            for name, state in states.items():
                self._states[name] = merged(self._states[name], state, name) if name in self._states else state
        self._aliases = {name: of for *_, aliases in together for name, of in aliases.items()}
        self._division: Division = divide([brought for _, brought, _, _ in together])
        self._meeting = Meeting(world, f"save/{number}")
        folder = temporary(target.name)
        self._folder, said = world.broadcast_objects(
            [folder, _trouble(lambda: target.storage.make(folder)) if world.rank == 0 else ""]
        )
        _raise_first([said])

    def run(self, tick: Tick = lambda n: None) -> None:
        """Write, and commit.

        Raises:
            CheckpointError: on every rank, if it failed on one; what was there before is untouched.
        """
        records: dict[str, FileRecord] = {}

        def progress(count: int) -> None:
            self._meeting.alive()
            tick(count)

        def work() -> None:
            for plan in self._division.files:
                if plan.rank == self._world.rank:
                    records[plan.name] = write(self._target.storage, self._folder, plan, self._parts, progress)

        said = _trouble(work)
        mine = json.dumps([said, {name: [r.size, *r.checksums] for name, r in records.items()}]).encode()
        everyones = self._meeting.gather("written", mine)
        if everyones is not None:
            said = _trouble(lambda: self._commit([json.loads(e) for e in everyones]))
            if said:
                _trouble(lambda: self._target.storage.remove(self._folder))
        end = self._meeting.announce("end", json.dumps(said).encode())
        _raise_first([json.loads(end)])

    def _commit(self, everyones: Sequence[Any]) -> None:
        _raise_first([said for said, _ in everyones])
        storage, target, folder = self._target.storage, self._target, self._folder
        files = {name: FileRecord(size, tuple(crcs)) for _, found in everyones for name, (size, *crcs) in found.items()}
        index = hugging_face_index(self._division)
        if index is not None:
            name = "model.safetensors.index.json"
            files[name] = FileRecord(len(index), storage.put(f"{folder}/{name}", [index], len(index)))
        manifest = Manifest(
            step=target.step,
            world_size=self._world.size,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            made_by=f"easymp {__version__}",
            plan=dict(target.plan),
            tensors=self._division.tensors,
            files=files,
            states=self._states,
            aliases=self._aliases,
        ).encode()
        storage.put(f"{folder}/{MANIFEST}", [manifest], len(manifest))
        storage.sync(folder)
        sealed = seal(manifest)
        storage.put(f"{folder}/{COMMIT}", [sealed], len(sealed))
        storage.sync(folder)
        if target.name in storage.list():
            storage.exchange(folder, target.name)
            storage.sync()
            storage.remove(folder)
        else:
            storage.rename(folder, target.name)
            storage.sync()


def merged(one: Any, other: Any, name: str) -> Any:
    """Two ranks' states of one thing: mappings add up, all else must agree.

    Raises:
        CheckpointError: it does not.
    """
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        both = dict(one)
        for word, value in other.items():
            both[word] = merged(one[word], value, f"{name}/{word}") if word in one else value
        return both
    raise CheckpointError(f"{name}: the ranks have different values, {one!r} and {other!r}, of what should be one")


def hugging_face_index(division: Division) -> bytes | None:
    """The index that Hugging Face's tools read, where all weights of the first model are whole in their files."""
    weights = {name: stored for name, stored in division.tensors.items() if name.startswith("model/")}
    if not weights or any(len(s.pieces) != 1 or s.pieces[0].box != whole(s.shape) for s in weights.values()):
        return None
    total = sum(s.pieces[0].box.count * s.dtype.itemsize for s in weights.values())
    table = {name.partition("/")[2]: stored.pieces[0].file for name, stored in weights.items()}
    return dumps({"metadata": {"total_size": total}, "weight_map": table})


def _trouble(act: Callable[[], Any]) -> str:
    """What went wrong in `act`, in words; "" where nothing did."""
    try:
        act()
    except (OSError, EasympError) as error:
        return str(error)
    return ""


def _raise_first(said: Sequence[str]) -> None:
    for rank, words in enumerate(said):
        if words:
            raise CheckpointError(f"the checkpoint was not written (rank {rank}: {words})" if len(said) > 1 else words)
