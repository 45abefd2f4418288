"""`easymp checkpoint list`, `inspect`, `verify`, `diff` and `prune`. They need neither a model nor a process group."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, SettingError
from . import folders
from .codec import TAG
from .commit import claim, committed_saves, drop, lock_of, take_away
from .folders import Opened, committed, newest
from .load import expected, faults, one_by_one, room
from .manifest import BLOCK, MANIFEST, Manifest, Stored, slices, whole
from .snapshot import group
from .storage import SourceFile, Storage, Tick, block_count, expect, no_tick

LONG = 60  # characters of a value that is shown
TRACKING = "state/tracking"  # names and positions of logs, which differ between equal runs

# -- list --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A folder that is a checkpoint or an unfinished save.

    Attributes:
        name: of the folder.
        size: bytes in its files.
        written: when, in ISO 8601, UTC; None if unknown.
        step: optimizer updates until then; None without a manifest.
        world_size: ranks that wrote it; None without a manifest.
        committed: whether it counts.
        why: why it does not count, in a sentence; "" if it does.
        newest: whether `resume` takes it: the last committed checkpoint of the current line.
        line: identifier of its line of saves; None without a manifest.
        parent: name of the checkpoint that its run had loaded or saved before; "" for the first.
        abandoned: whether `resume` leaves it out, because a run went on from an earlier one or began anew.
    """

    name: str
    size: int
    written: str | None
    step: int | None = None
    world_size: int | None = None
    committed: bool = False
    why: str = ""
    newest: bool = False
    line: str | None = None
    parent: str = ""
    abandoned: bool = False


def list_checkpoints(root: str | os.PathLike[str]) -> list[Entry]:
    """List the checkpoints in the folder or URL `root` in the order of their saves; those without a manifest come first.

    Raises:
        CheckpointError: `root` is itself a checkpoint.
        OSError: it cannot be read.
    """
    storage = folders.open_storage(root)
    names = storage.list()
    if MANIFEST in names:
        raise CheckpointError(f"{storage.place} is itself a checkpoint: inspect it, or pass the folder above")
    found = [_entry(storage, name, names) for name in names if _is_listed(storage, name)]
    found.sort(key=lambda e: (e.step is not None, e.written or "", e.step or 0, e.name))
    last, (saved, _) = newest(storage)[0], folders.survey(storage)
    left = {it.folder for it in saved if not it.leads_to(saved[-1])}
    return [replace(e, newest=e.name == last, abandoned=e.committed and e.name in left) for e in found]


def _is_listed(storage: Storage, name: str) -> bool:
    owner = folders.writing(name)
    left = owner is not None and name != lock_of(owner)
    return left or folders.step_of(name) is not None or folders.is_checkpoint(storage, name)


def _entry(storage: Storage, name: str, names: Sequence[str]) -> Entry:
    owner = folders.writing(name)
    locked = lock_of(owner or folders.checkpoint_of(name)) in names
    left_over = "being written, or left over" if locked else "left over"
    try:
        it = folders.open_manifest(storage, name)
    except (CheckpointError, OSError) as error:
        sealed = False
        with suppress(OSError):
            sealed = folders.is_committed(storage, name)
        why = str(error).removeprefix(f"{folders.inside(storage.place, name)}: ")
        if owner is not None or (locked and not sealed):
            why = f"{left_over} from a save that did not end ({why})"
        return Entry(name, _bytes_in(storage, name), _modified(storage, name), committed=sealed, why=why)
    why = ""
    if owner is not None:
        why = f"{left_over}: it was replaced, or its save ended before its renaming"
    elif (counts := folders.current(storage, folders.checkpoint_of(name))) != name:
        why = f"replaced by {counts}"
    facts = (name, _bytes_of(it), it.written, it.step, it.world_size, not why, why)
    return Entry(*facts, line=it.lineage.line, parent=it.lineage.parent)


def _bytes_of(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.all_files.values())


def _bytes_in(storage: Storage, folder: str) -> int:
    below = [folders.inside(folder, name) for name in storage.list(folder)]
    return sum(_bytes_in(storage, path) if (size := storage.size(path)) is None else size for path in below)


def _modified(storage: Storage, name: str) -> str | None:
    try:
        return datetime.fromtimestamp(storage.modified(name), UTC).isoformat(timespec="seconds")
    except OSError:  # object stores have no folders
        return None


# -- inspect -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorFacts:
    """A tensor in a checkpoint. `size` is in bytes; `pieces` counts its chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    pieces: int


@dataclass(frozen=True)
class GroupFacts:
    """The tensors of one group ("model", "optimizer" …): their number, elements and bytes, the bytes by dtype, the files."""

    name: str
    tensors: int
    elements: int
    size: int
    dtypes: Mapping[str, int]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        size: bytes of all files except the manifest.
        plan: of the run (`Plan.as_dict`).
        aliases: further names of tied tensors → the stored name.
        states: names of the states that are not tensors.
        files: bytes by name.
        extra: names of the files that hooks wrote.
        line: identifier of its line of saves.
        parent: the checkpoint that its run had loaded or saved before; "" for the first.
    """

    place: str
    step: int
    world_size: int
    written: str
    made_by: str
    size: int
    plan: Mapping[str, Any]
    groups: tuple[GroupFacts, ...]
    tensors: tuple[TensorFacts, ...]
    aliases: Mapping[str, str]
    states: tuple[str, ...]
    files: Mapping[str, int]
    extra: tuple[str, ...]
    line: str
    parent: str


def inspect(folder: str | os.PathLike[str]) -> Contents:
    """Describe the committed checkpoint in `folder` (a path or URL). No tensor is read.

    Raises:
        CheckpointError: there is no committed checkpoint, or it cannot be read.
    """
    opened = folders.open_checkpoint(folder)
    it = opened.manifest
    facts = {
        name: TensorFacts(name, str(t.dtype).removeprefix("torch."), t.shape, t.bytes, len(t.pieces))
        for name, t in it.tensors.items()
    }
    return Contents(
        *(opened.place, it.step, it.world_size, it.written, it.made_by, _bytes_of(it), it.plan),
        groups=tuple(_group(word, it, facts) for word in dict.fromkeys(map(group, facts))),
        tensors=tuple(facts.values()),
        aliases=it.aliases,
        states=tuple(it.states),
        files={name: file.size for name, file in it.all_files.items()},
        extra=tuple(it.extra),
        line=it.lineage.line,
        parent=it.lineage.parent,
    )


def _group(word: str, manifest: Manifest, facts: Mapping[str, TensorFacts]) -> GroupFacts:
    names = [name for name in facts if group(name) == word]
    dtypes: Counter[str] = Counter()
    for name in names:
        dtypes[facts[name].dtype] += facts[name].size
    files = sorted({piece.file for name in names for piece in manifest.tensors[name].pieces})
    elements = sum(prod(facts[name].shape) for name in names)
    return GroupFacts(word, len(names), elements, dtypes.total(), dict(dtypes), tuple(files))


# -- verify ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """A part of a checkpoint that is not what was written.

    Attributes:
        file: its name in the checkpoint.
        why: in words.
        block: which `BLOCK` (16 MiB) of the file, from 0; None for the whole file or its header.
        tensors: full names of the tensors that lie there, whole or in part.
    """

    file: str
    why: str
    block: int | None = None
    tensors: tuple[str, ...] = ()


def verify(folder: str | os.PathLike[str], tick: Tick = no_tick) -> list[Damage]:
    """Check every byte of the committed checkpoint in `folder` (a path or URL) against its checksum, and headers against the manifest.

    Args:
        tick: called with the number of bytes read since the last call.

    Returns:
        All damage; an empty list if the checkpoint is as it was written.

    Raises:
        CheckpointError: there is no manifest that COMMIT seals, so nothing is known about the rest.
    """
    opened = folders.open_checkpoint(folder)
    found: list[Damage] = []
    expect(tick, _bytes_of(opened.manifest))
    held = expected(opened.manifest, opened.manifest.files)
    for name, file in {**opened.files, **opened.extra}.items():
        wrong = list(_damage_in(opened.manifest, name, file, tick))
        if not wrong and name in held:
            wrong = [Damage(name, why, None, tensors) for why, tensors in faults(file, held[name])]
        found += wrong
    return found


def _damage_in(manifest: Manifest, name: str, file: SourceFile, tick: Tick) -> Iterator[Damage]:
    size = file.storage.size(file.name)
    if size != file.size:
        why = "is missing" if size is None else f"has {size} bytes, and {file.size} were written"
        yield Damage(name, why, None, _tensors_in(manifest, name, 0, file.size))
        return

    def fault(numbers: Sequence[int] | None = None, tick: Tick = no_tick) -> str:
        try:
            file.verify(tick, numbers)
        except (CheckpointError, OSError) as error:
            return str(error).removeprefix(f"{file}: ")
        return ""

    if why := fault(tick=tick):  # it ends at the first fault: each block alone tells which ones are wrong
        blocks = [block for block in range(block_count(file.size)) if fault([block])]
        for block in blocks:
            tensors = _tensors_in(manifest, name, block * BLOCK, (block + 1) * BLOCK)
            yield Damage(name, "is not what was written", block, tensors)
        if not blocks:
            yield Damage(name, why)


def _tensors_in(manifest: Manifest, file: str, begin: int, end: int) -> tuple[str, ...]:
    """The tensors that have a byte in ``[begin, end)`` of a file."""

    def lies_there(stored: Stored) -> bool:
        size = stored.dtype.itemsize
        return any(p.file == file and begin - p.box.count * size < p.begin < end for p in stored.pieces)

    return tuple(name for name, stored in manifest.tensors.items() if lies_there(stored))


# -- diff --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """A tensor that both checkpoints have, with different values.

    Attributes:
        count: elements that are not equal bit for bit, of `of`.
        largest: absolute difference; None if it is not finite.
    """

    name: str
    count: int
    of: int
    largest: float | None


@dataclass(frozen=True)
class Unequal:
    """A difference in dtype, shape, or a value of a state, with its path."""

    path: str
    one: str
    other: str


@dataclass(frozen=True)
class Difference:
    """The difference between two checkpoints.

    Attributes:
        missing: tensors of the first that the second lacks.
        added: tensors of the second that the first lacks.
        kinds: tensors of another dtype or shape.
        values: tensors of the same kind with other values.
        states: states that are not tensors, facts of the run (step, ranks, plan), and files of hooks by size and checksums. The
            trackers' run ids and positions are left out.
        equal: number of tensors that are equal bit for bit.
    """

    missing: tuple[str, ...]
    added: tuple[str, ...]
    kinds: tuple[Unequal, ...]
    values: tuple[Values, ...]
    states: tuple[Unequal, ...]
    equal: int

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.added or self.kinds or self.values or self.states)


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str], tick: Tick = no_tick) -> Difference:
    """Compare the committed checkpoints `one` and `other` (paths or URLs), however their tensors are sharded.

    At most 64 MiB of tensors of each are in memory at a time, more if there are more than four files.

    Raises:
        CheckpointError: one is not a checkpoint, or has bytes that are not what was written.
        OSError: one cannot be read.
    """
    a, b = folders.open_checkpoint(one), folders.open_checkpoint(other)
    left, right = _all_names(a.manifest), _all_names(b.manifest)
    common = [name for name in left if name in right]
    kinds = [Unequal(n, x, y) for n in common if (x := _kind(left[n])) != (y := _kind(right[n]))]
    tied = {name for name, _ in a.manifest.aliases.items() & b.manifest.aliases.items()}
    skip = tied | {it.path for it in kinds}  # tied ones are compared under their other name
    pairs = [(name, left[name], right[name]) for name in common if name not in skip]
    expect(tick, 2 * sum(stored.bytes for _, stored, _ in pairs))
    values = list(_compare(a, b, pairs, tick))
    return Difference(
        missing=tuple(n for n in left if n not in right),
        added=tuple(n for n in right if n not in left),
        kinds=tuple(kinds),
        values=tuple(v for v in values if v.count),
        states=tuple(_unequal(_states_of(a.manifest), _states_of(b.manifest), "")),
        equal=sum(not v.count for v in values),
    )


def _all_names(manifest: Manifest) -> dict[str, Stored]:
    return manifest.tensors | {name: manifest.tensors[of] for name, of in manifest.aliases.items()}


def _kind(stored: Stored) -> str:
    return f"{stored.dtype} {list(stored.shape)}".removeprefix("torch.")


def _compare(a: Opened, b: Opened, pairs: list[tuple[str, Stored, Stored]], tick: Tick) -> Iterator[Values]:
    parts = [
        (i, x, y, box)
        for i, (_, x, y) in enumerate(pairs)
        for box in slices(whole(x.shape), BLOCK // x.dtype.itemsize)
    ]
    together = room(max(len(a.files), len(b.files)))
    here = one_by_one(a.files, ((x, box) for _, x, _, box in parts), together, tick)
    there = one_by_one(b.files, ((y, box) for _, _, y, box in parts), together, tick)
    count, largest = [0] * len(pairs), [0.0] * len(pairs)
    for (i, *_), x, y in zip(parts, here, there, strict=True):
        wrong = x.reshape(-1).view(torch.uint8) != y.reshape(-1).view(torch.uint8)
        if wrong.any():
            count[i] += int(wrong.view(-1, x.itemsize).any(1).sum())
            largest[i] = max(largest[i], _distance(x, y))
    for (name, x, _), n, far in zip(pairs, count, largest):
        yield Values(name, n, prod(x.shape), far if math.isfinite(far) else None)


def _distance(x: Tensor, y: Tensor) -> float:
    """The largest absolute difference; infinite if a NaN is on one side only."""
    if x.dtype is torch.float4_e2m1fn_x2:
        return math.inf  # two numbers a byte, which torch does not compute with
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    x, y = x.to(wide), y.to(wide)
    far = (x - y).abs()
    far[(x == y) | (x.isnan() & y.isnan())] = 0.0  # the same infinity, and NaN with other bits
    return float(far.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _states_of(manifest: Manifest) -> dict[str, Any]:
    run = {"step": manifest.step, "world_size": manifest.world_size, "plan": manifest.plan}
    extra = {name: {"bytes": f.size, "crc32": list(f.checksums)} for name, f in manifest.extra.items()}
    states = {name: state for name, state in manifest.states.items() if name != TRACKING}
    return {**run, "tied": manifest.aliases, "extra": extra, **states}


def _unequal(one: Any, other: Any, path: str) -> Iterator[Unequal]:
    """The differences of two packed states (see `codec`)."""
    here, there = _children(one), _children(other)
    if here is None or there is None or _form(one) != _form(other):
        if type(one) is not type(other) or one != other:
            yield Unequal(path, _shown(one), _shown(other))
        return
    for key in dict.fromkeys([*here, *there]):
        below = f"{path}/{key}" if path else str(key)
        if key in here and key in there:
            yield from _unequal(here[key], there[key], below)
        else:
            yield Unequal(below, *(_shown(tree[key]) if key in tree else "nothing" for tree in (here, there)))


def _children(value: Any) -> dict[Any, Any] | None:
    """The items of a packed list or mapping; None for other values."""
    if isinstance(value, dict):
        if TAG not in value:
            return value
        value = value.get("items")
    return dict(enumerate(value)) if isinstance(value, list) else None


def _form(value: Any) -> Any:
    return value.get(TAG, dict) if isinstance(value, dict) else type(value)


def _shown(value: Any) -> str:
    if isinstance(value, dict) and TAG in value:
        value = value.get("value", value.get("name", value.get("items")))
    text = repr(value)
    return text if len(text) <= LONG else f"{text[:LONG]}…"


# -- prune -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pruned:
    """Names of folders: checkpoints kept, checkpoints removed, leftovers of dead writers removed, and folders being written now.

    Attributes:
        size: bytes in what goes.
    """

    kept: tuple[str, ...]
    removed: tuple[str, ...]
    left_over: tuple[str, ...]
    busy: tuple[str, ...]
    size: int


def prune(root: str | os.PathLike[str], keep: int, dry_run: bool = False, abandoned: bool = False) -> Pruned:
    """Remove older committed checkpoints below the folder or URL `root`, and leftovers of dead writers.

    The last `keep` checkpoints of the current line stay, and the last one of each other line. So do checkpoints that are not named by a
    step, and folders without COMMIT, unless their writer is known to be dead.

    Args:
        keep: 1 or more.
        abandoned: remove the last checkpoints of other lines, too.
        dry_run: report what would be removed, and remove nothing.

    Raises:
        SettingError: `keep` is not 1 or more.
        OSError: `root` cannot be read or written.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise SettingError(f"keep={keep!r}: at least 1 must stay; remove the folder to keep none")
    storage = folders.open_storage(root)
    there = committed(storage)
    line = [it for it in there if it.leads_to(there[-1])]
    ends = {} if abandoned else {it.lineage.line: it for it in there if it not in line}
    kept = [it.folder for it in reversed(there) if it in line[-keep:] or it in ends.values()]
    old = [folders.checkpoint_of(it.folder) for it in there if it.folder not in kept]
    owners = [owner for name in storage.list() if (owner := folders.writing(name)) is not None]
    removed, left_over, busy, size = list[str](), list[str](), list[str](), 0
    storage.sync()  # a writer may have died just after a swap: what it replaced goes once that is on disk
    for checkpoint in dict.fromkeys([*old, *owners]):
        gone = committed_saves(storage, checkpoint) if checkpoint in old else []
        try:
            # The lock names it, so that the next writer can clean up after a kill.
            lock = claim(storage, checkpoint, gone[-1] if gone else "")
        except CheckpointError:
            busy.append(checkpoint)
            continue
        try:
            rest = _leftovers(storage, checkpoint, lock.left)
            size += sum(_bytes_in(storage, name) for name in (*gone, *rest))
            if not dry_run:
                for folder in rest:
                    take_away(storage, folder)
                for folder in gone:
                    drop(storage, folder)
        finally:
            lock.release()
        removed += gone
        left_over += rest
    return Pruned(tuple(kept), tuple(removed), tuple(left_over), tuple(busy), size)


def _leftovers(storage: Storage, checkpoint: str, words: Mapping[str, Any]) -> list[str]:
    """Folders of a dead writer of `checkpoint`: temporary ones, and the one that its lock names."""
    there = storage.list()
    left = [name for name in there if folders.writing(name) == checkpoint and name != lock_of(checkpoint)]
    named = words.get("folder")
    if (
        named in there
        and folders.checkpoint_of(str(named)) == checkpoint
        and not folders.is_committed(storage, str(named))
    ):
        left.append(str(named))
    return left
