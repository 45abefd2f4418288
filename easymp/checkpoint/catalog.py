"""Which checkpoints lie in a folder, and what became of the others that were begun there."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, SettingError
from .blocks import Tick, no_tick
from .codec import TAG
from .folders import (
    Opened,
    checkpoint_of,
    current,
    inside,
    is_committed,
    open_checkpoint,
    open_manifest,
    open_storage,
    saves_of,
    step_of,
    writing,
)
from .layout import slices, whole
from .lineage import committed, drop, newest, survey, take_away
from .lock import lock_of
from .manifest import BLOCK, COMMIT, MANIFEST, FileRecord, Manifest, Stored
from .progress import expect
from .read_plan import expected, faults, one_by_one, room
from .snapshot import group
from .storage import Storage


@dataclass(frozen=True)
class Entry:
    """A folder that is a checkpoint, or was to become one.

    Attributes:
        name: of the folder.
        size: bytes in its files.
        written: when, in ISO 8601, UTC; None where nobody knows.
        step: optimizer updates until then; None where no manifest says so.
        world_size: ranks that wrote it; likewise.
        committed: whether it counts.
        why: what is wrong with it, in a sentence; "" where nothing is.
        newest: whether `resume` takes it: of those that are named by steps, the committed one that was saved last.
        line: identifier of the line of saves that it belongs to; None where no manifest says so.
        parent: name of the checkpoint that its run had loaded or saved before; "" where there was none.
        abandoned: whether `resume` leaves it out, as a run went on from an earlier one, or began without any.
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
    """What is in the folder or URL `root`: in the order in which it was saved, first what has no manifest. Tensors
    are not read.

    Raises:
        CheckpointError: `root` is itself a checkpoint.
        OSError: it cannot be read.
    """
    storage = open_storage(root)
    names = storage.list()
    if MANIFEST in names:
        raise CheckpointError(
            f"{storage.place} is itself a checkpoint: pass the folder above it, or inspect this one"
        )
    found = sorted((_entry(storage, name, names) for name in names if _is_one(storage, name)), key=_order)
    last, _, _ = newest(storage)
    saved, _ = survey(storage)
    left = {it.folder for it in saved if not it.leads_to(saved[-1])}
    return [
        replace(entry, newest=entry.name == last, abandoned=entry.committed and entry.name in left)
        for entry in found
    ]


def _order(entry: Entry) -> tuple[bool, str, int, str]:
    return entry.step is not None, entry.written or "", entry.step or 0, entry.name


def _is_one(storage: Storage, name: str) -> bool:
    owner = writing(name)
    if step_of(name) is not None or (owner is not None and name != lock_of(owner)):
        return True
    return any(storage.size(inside(name, file)) is not None for file in (MANIFEST, COMMIT))


def _entry(storage: Storage, name: str, names: Sequence[str]) -> Entry:
    place, owner = inside(storage.place, name), writing(name)
    left_over = (
        "being written, or left over" if lock_of(owner or checkpoint_of(name)) in names else "left over"
    )
    try:
        manifest = open_manifest(storage, name)
    except (CheckpointError, OSError) as error:
        committed = _sealed(storage, name)
        why = str(error).removeprefix(f"{place}: ")
        if owner is not None or (left_over.startswith("being") and not committed):
            why = f"{left_over} from a save that did not end ({why})"
        return Entry(name, bytes_in(storage, name), _modified(storage, name), committed=committed, why=why)
    why = ""
    if owner is not None:
        why = f"{left_over}: it was replaced, or its save ended before its renaming"
    elif (counts := current(storage, checkpoint_of(name))) != name:
        why = f"replaced by {counts}"
    return Entry(
        *(name, bytes_of(manifest), manifest.written, manifest.step, manifest.world_size, not why, why),
        line=manifest.lineage.line,
        parent=manifest.lineage.parent,
    )


def bytes_of(manifest: Manifest) -> int:
    """Bytes of its files, beside the manifest."""
    return sum(file.size for file in manifest.all_files.values())


def bytes_in(storage: Storage, folder: str) -> int:
    """Bytes of the files in a folder, and in those below it."""
    below = [inside(folder, name) for name in storage.list(folder)]
    return sum(bytes_in(storage, path) if (size := storage.size(path)) is None else size for path in below)


def _modified(storage: Storage, name: str) -> str | None:
    try:
        return datetime.fromtimestamp(storage.modified(name), UTC).isoformat(timespec="seconds")
    except OSError:  # object stores have no folders
        return None


def _sealed(storage: Storage, name: str) -> bool:
    try:
        return is_committed(storage, name)
    except OSError:
        return False


# -- What a checkpoint says of itself: its manifest, summed up by groups of tensors.


@dataclass(frozen=True)
class TensorFacts:
    """A tensor in a checkpoint; `pieces` are the boxes that it lies in, 1 where it is whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    pieces: int


@dataclass(frozen=True)
class GroupFacts:
    """The tensors of one group ("model", "optimizer" …): how many, their elements and bytes, bytes of each dtype, the files."""

    name: str
    tensors: int
    elements: int
    size: int
    dtypes: Mapping[str, int]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Contents:
    """What is in a checkpoint. `plan` is that of the run (`Plan.as_dict`), `states` are names of what is no tensor.

    Attributes:
        size: bytes of all files but the manifest.
        files: their bytes by name.
        extra: names of those that hooks wrote.
        line: of saves that it belongs to.
        parent: the checkpoint that its run had loaded or saved before; "" where there was none.
        aliases: names of tensors that are other names of stored ones.
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
    """What the committed checkpoint in `folder` (or at that URL) holds; no tensor is read.

    Raises:
        CheckpointError: it is none, or cannot be read.
    """
    opened = open_checkpoint(folder)
    it = opened.manifest
    words = dict.fromkeys(group(name) for name in it.tensors)
    return Contents(
        place=opened.place,
        step=it.step,
        world_size=it.world_size,
        written=it.written,
        made_by=it.made_by,
        size=bytes_of(it),
        plan=it.plan,
        groups=tuple(_group(word, it) for word in words),
        tensors=tuple(
            TensorFacts(n, dtype_name(t.dtype), t.shape, t.bytes, len(t.pieces))
            for n, t in it.tensors.items()
        ),
        aliases=it.aliases,
        states=tuple(it.states),
        files={name: file.size for name, file in it.all_files.items()},
        extra=tuple(it.extra),
        line=it.lineage.line,
        parent=it.lineage.parent,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"``."""
    return str(dtype).removeprefix("torch.")


def _group(word: str, manifest: Manifest) -> GroupFacts:
    tensors = [t for name, t in manifest.tensors.items() if group(name) == word]
    dtypes: dict[str, int] = {}
    for t in tensors:
        name = dtype_name(t.dtype)
        dtypes[name] = dtypes.get(name, 0) + t.bytes
    files = sorted({piece.file for t in tensors for piece in t.pieces})
    elements = sum(prod(t.shape) for t in tensors)
    return GroupFacts(word, len(tensors), elements, sum(dtypes.values()), dtypes, tuple(files))


# -- Every byte of a checkpoint against its checksum, every header against the manifest; and what is lost where one is wrong.


@dataclass(frozen=True)
class Damage:
    """Something that is not what was written.

    Attributes:
        file: its name in the checkpoint.
        why: in words.
        block: which `BLOCK` (16 MiB) of the file, from 0; None where it is the whole file, or its header.
        tensors: full names of what lies there, whole or in part.
    """

    file: str
    why: str
    block: int | None = None
    tensors: tuple[str, ...] = ()


def verify(folder: str | os.PathLike[str], tick: Tick = no_tick) -> list[Damage]:
    """All that is wrong with the committed checkpoint in `folder` (or at that URL); empty where it is as it was written.

    Args:
        tick: told how many more bytes were read, now and then.

    Raises:
        CheckpointError: no manifest that COMMIT seals, so nothing is known of the rest.
    """
    opened = open_checkpoint(folder)
    found: list[Damage] = []
    expect(tick, bytes_of(opened.manifest))
    held = expected(opened.manifest, opened.manifest.files)
    for name, record in opened.manifest.all_files.items():
        wrong = list(_bytes_of(opened, name, record, tick))
        if not wrong and name in held:
            said = faults(opened.storage, opened.folder, name, record.size, held[name])
            wrong = [Damage(name, why, None, tensors) for why, tensors in said]
        found += wrong
    return found


def _bytes_of(opened: Opened, name: str, record: FileRecord, tick: Tick) -> Iterator[Damage]:
    storage, manifest, path = opened.storage, opened.manifest, inside(opened.folder, name)
    size = storage.size(path)
    if size is None:
        yield Damage(name, "is missing", None, _in_bytes(manifest, name, 0, record.size))
        return
    if size != record.size:
        yield Damage(
            name,
            f"has {size} bytes, and {record.size} were written",
            None,
            _in_bytes(manifest, name, 0, record.size),
        )
        return
    try:
        storage.verify(path, record.size, record.checksums, tick)
    except (CheckpointError, OSError) as error:
        # The first fault ended it. Which blocks are wrong is found by touching each one.
        blocks = [b for b in range(len(record.checksums)) if not _intact(storage, path, record, b)]
        if not blocks:
            yield Damage(name, str(error).removeprefix(f"{inside(storage.place, path)}: "))
        for block in blocks:
            yield Damage(
                name,
                "is not what was written",
                block,
                _in_bytes(manifest, name, block * BLOCK, (block + 1) * BLOCK),
            )


def _intact(storage: Storage, path: str, record: FileRecord, block: int) -> bool:
    if block * BLOCK >= record.size:
        return True
    try:
        storage.verify(path, record.size, record.checksums, numbers=[block])
    except (CheckpointError, OSError):
        return False
    return True


def _in_bytes(manifest: Manifest, file: str, begin: int, end: int) -> tuple[str, ...]:
    """The tensors that have a byte in ``[begin, end)`` of a file."""
    return tuple(
        name
        for name, stored in manifest.tensors.items()
        if any(
            p.file == file and p.begin < end and begin < p.begin + p.box.count * stored.dtype.itemsize
            for p in stored.pieces
        )
    )


# -- Two checkpoints side by side: which tensors, which values, which states differ.


LONG = 60  # characters of a value that is shown
TRACKING = "state/tracking"  # names and positions of logs, which differ between equal runs


@dataclass(frozen=True)
class Values:
    """A tensor that both have, and whose values differ.

    Attributes:
        count: elements that are not equal bit for bit, of `of`.
        largest: absolute difference; None where it is no number (an infinity, or NaN on one side).
    """

    name: str
    count: int
    of: int
    largest: float | None


@dataclass(frozen=True)
class Unequal:
    """Something else that differs: the dtype and shape of a tensor, or a value in a state, by its path."""

    path: str
    one: str
    other: str


@dataclass(frozen=True)
class Difference:
    """What differs between two checkpoints.

    Attributes:
        missing: tensors of the first that the second lacks.
        added: tensors of the second that the first lacks.
        kinds: tensors of another dtype or shape.
        values: tensors of the same kind with other values.
        states: what is no tensor, how the runs were made (step, ranks, plan), and files of hooks by size and checksums. Trackers'
            run ids and positions are left out.
        equal: how many tensors are equal, bit for bit.
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
    """What differs between the committed checkpoints `one` and `other`, folders or URLs, however their tensors are cut.

    Memory does not grow with the tensors: 64 MiB of each is held at a time, more where there are more than four files.

    Raises:
        CheckpointError: one of them is none, or has bytes that are not what was written.
        OSError: one of them cannot be read.
    """
    a, b = open_checkpoint(one), open_checkpoint(other)
    names = [_names(a.manifest), _names(b.manifest)]
    common = [name for name in names[0] if name in names[1]]
    kinds = [Unequal(n, x, y) for n in common if (x := _kind(names[0][n])) != (y := _kind(names[1][n]))]
    tied = a.manifest.aliases.items() & b.manifest.aliases.items()  # compared under their other name
    alike = [
        n
        for n in common
        if _kind(names[0][n]) == _kind(names[1][n]) and (n, a.manifest.aliases.get(n)) not in tied
    ]
    expect(tick, 2 * sum(names[0][n].bytes for n in alike))
    values = list(_compare(a, b, [(n, names[0][n], names[1][n]) for n in alike], tick))
    return Difference(
        missing=tuple(n for n in names[0] if n not in names[1]),
        added=tuple(n for n in names[1] if n not in names[0]),
        kinds=tuple(kinds),
        values=tuple(v for v in values if v.count),
        states=tuple(_unequal(_said(a.manifest), _said(b.manifest), "")),
        equal=sum(not v.count for v in values),
    )


def _names(manifest: Manifest) -> dict[str, Stored]:
    """Every name of a tensor."""
    return {
        **manifest.tensors,
        **{name: manifest.tensors[of] for name, of in manifest.aliases.items() if of in manifest.tensors},
    }


def _kind(stored: Stored) -> str:
    return f"{dtype_name(stored.dtype)} {list(stored.shape)}"


# -- values ------------------------------------------------------------------------------------------------------------


def _compare(a: Opened, b: Opened, both: list[tuple[str, Stored, Stored]], tick: Tick) -> Iterator[Values]:
    parts = [
        (i, x, y, box)
        for i, (_, x, y) in enumerate(both)
        for box in slices(whole(x.shape), BLOCK // x.dtype.itemsize)
    ]
    together = room(max(len(a.files), len(b.files)))
    here = one_by_one(a.files, ((x, box) for _, x, _, box in parts), together, tick)
    there = one_by_one(b.files, ((y, box) for _, _, y, box in parts), together, tick)
    count, largest = [0] * len(both), [0.0] * len(both)
    for (i, *_), x, y in zip(parts, here, there, strict=True):
        wrong = _bits(x) != _bits(y)
        if wrong.any():
            count[i] += int(wrong.view(-1, x.itemsize).any(1).sum())
            largest[i] = max(largest[i], _apart(x, y))
    for (name, x, _), n, far in zip(both, count, largest):
        yield Values(name, n, whole(x.shape).count, far if math.isfinite(far) else None)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _apart(x: Tensor, y: Tensor) -> float:
    """The largest absolute difference; infinite where one is no number and the other is."""
    if x.dtype is torch.float4_e2m1fn_x2:
        return math.inf  # two numbers a byte, which torch does not compute with
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    x, y = x.to(wide), y.to(wide)
    far = (x - y).abs()
    far[(x == y) | (x.isnan() & y.isnan())] = 0.0  # the same infinity, and NaN with other bits
    return float(far.nan_to_num(nan=math.inf, posinf=math.inf).max())


# -- states ------------------------------------------------------------------------------------------------------------


def _said(manifest: Manifest) -> dict[str, Any]:
    run = {"step": manifest.step, "world_size": manifest.world_size, "plan": manifest.plan}
    extra = {
        name: {"bytes": file.size, "crc32": list(file.checksums)} for name, file in manifest.extra.items()
    }
    states = {name: state for name, state in manifest.states.items() if name != TRACKING}
    return {**run, "tied": manifest.aliases, "extra": extra, **states}


def _unequal(one: Any, other: Any, path: str) -> Iterator[Unequal]:
    """Where two trees, as `trees.pack` leaves them, differ."""
    here, there = _inside(one), _inside(other)
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


def _inside(value: Any) -> dict[Any, Any] | None:
    """What a list or mapping holds; None for what holds nothing."""
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


# -- Older checkpoints removed by hand: those saved last stay, and so does everything that may have an owner.


@dataclass(frozen=True)
class Pruned:
    """Folders: checkpoints that stay, those that go, what dead writers left and goes too, and what somebody is writing just now.

    Attributes:
        size: bytes in what goes.
    """

    kept: tuple[str, ...]
    removed: tuple[str, ...]
    left_over: tuple[str, ...]
    busy: tuple[str, ...]
    size: int


def prune(root: str | os.PathLike[str], keep: int, dry_run: bool = False, abandoned: bool = False) -> Pruned:
    """Remove committed checkpoints below the folder or URL `root`, and what dead writers left.

    Of the line that `resume` goes on with, the `keep` that were saved last stay; of each other line, the last one. Checkpoints that are not
    named by a step stay, and so does a folder without COMMIT, unless its writer is known to be dead.

    Args:
        keep: at least 1.
        abandoned: remove the last checkpoints of other lines, too.
        dry_run: say what would go, and remove nothing.

    Raises:
        SettingError: `keep` is not at least 1.
        OSError: `root` cannot be read or written.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise SettingError(
            f"keep={keep!r}: at least 1 checkpoint must stay; remove the folder itself if none shall"
        )
    storage = open_storage(os.fspath(root))
    there = committed(storage)
    line = [it for it in there if it.leads_to(there[-1])]
    ends = {} if abandoned else {it.lineage.line: it for it in there if it not in line}
    kept = [it.folder for it in reversed(there) if it in line[-keep:] or it in ends.values()]
    old: dict[str, list[str]] = {}
    for folder in (it.folder for it in there if it.folder not in kept):
        # The newest save of a step last, or an older one would count for a moment.
        saves = reversed(saves_of(storage.list(), checkpoint_of(folder)))
        old[checkpoint_of(folder)] = [save for save in saves if is_committed(storage, save)]
    owners = dict.fromkeys(owner for name in storage.list() if (owner := writing(name)) is not None)
    removed, left_over, busy, size = [], [], [], 0
    storage.sync()  # a writer may have died just after a swap: what it replaced goes once that is on disk
    for checkpoint in dict.fromkeys([*old, *owners]):
        gone = old.get(checkpoint, [])
        try:
            # Named in the claim, so that who comes after a kill knows what was left half done.
            claim = storage.claim(checkpoint, gone[-1] if gone else "")
        except CheckpointError:
            busy.append(checkpoint)
            continue
        try:
            rest = _left(storage, checkpoint, claim.left)
            size += sum(bytes_in(storage, name) for name in (*gone, *rest))
            for folder in () if dry_run else rest:
                take_away(storage, folder)
            for folder in () if dry_run else gone:
                drop(storage, folder)
        finally:
            claim.release()
        removed += gone
        left_over += rest
    return Pruned(tuple(kept), tuple(removed), tuple(left_over), tuple(busy), size)


def _left(storage: Storage, checkpoint: str, words: Mapping[str, Any]) -> list[str]:
    """What a dead writer of `checkpoint` left: temporary folders, and the one that its claim names."""
    there = storage.list()
    left = [name for name in there if writing(name) == checkpoint and name != lock_of(checkpoint)]
    named = words.get("folder")
    if named in there and checkpoint_of(str(named)) == checkpoint and not is_committed(storage, str(named)):
        left.append(str(named))
    return left
