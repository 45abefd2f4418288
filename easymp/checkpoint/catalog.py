"""`easymp checkpoint list`, `inspect`, `verify` and `prune`. They need neither a model nor a process group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointError, check_whole
from . import folders
from .folders import checkpoint_of, committed_folders, drop, find_newest, join, owner_of, remove_leftover
from .locks import lock_held, lock_name
from .manifest import BLOCK, Manifest
from .progress import Tick, expect, ignore
from .storage import SourceFile, Storage, block_count


@dataclass(frozen=True)
class Entry:
    """A folder that is a checkpoint or an unfinished save.

    Attributes:
        name: of the folder.
        size: bytes in its files.
        written: when, in ISO 8601, UTC; None without a manifest.
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
    written: str | None = None
    step: int | None = None
    world_size: int | None = None
    committed: bool = False
    why: str = ""
    newest: bool = False
    line: str | None = None
    parent: str = ""
    abandoned: bool = False


def list_checkpoints(root: str | os.PathLike[str]) -> list[Entry]:
    """List the checkpoints in the folder or URL `root` in the order of their saves, those without a manifest first.

    Raises:
        CheckpointError: `root` is itself a checkpoint.
        OSError: it cannot be read.
    """
    storage = folders.open_storage(root)
    names = storage.list()
    if folders.is_checkpoint(names):
        raise CheckpointError(f"{storage.root} is itself a checkpoint: inspect it, or pass the folder above")
    listed = [
        name
        for name in names
        if name != lock_name(owner_of(name) or "")
        and (owner_of(name) or folders.step_of(name) is not None or folders.is_checkpoint(storage.list(name)))
    ]
    entries = [_entry(storage, name, names) for name in listed]
    entries.sort(key=lambda e: (e.step is not None, e.written or "", e.step or 0, e.name))
    newest, (saves, _) = find_newest(storage).folder, folders.list_saves(storage)
    abandoned = {save.folder for save in saves if not save.leads_to(saves[-1])}
    return [replace(e, newest=e.name == newest, abandoned=e.committed and e.name in abandoned) for e in entries]


def _entry(storage: Storage, name: str, names: Sequence[str]) -> Entry:
    owner = owner_of(name)
    is_locked = lock_name(owner or checkpoint_of(name)) in names
    leftover = "being written, or left over" if is_locked else "left over"
    try:
        manifest = folders.open_folder(storage, name).manifest
    except (CheckpointError, OSError) as error:
        committed = False
        with suppress(OSError):
            committed = folders.is_committed(storage, name)
        reason = str(error).removeprefix(f"{join(storage.root, name)}: ")
        if owner is not None or (is_locked and not committed):
            reason = f"{leftover} from a save that did not end ({reason})"
        return Entry(name, _bytes_in(storage, name), committed=committed, why=reason)
    reason = ""
    if owner is not None:
        reason = f"{leftover}: it was replaced, or its save ended before its renaming"
    elif (newest := folders.newest_save(storage, checkpoint_of(name))) != name:
        reason = f"replaced by {newest}"
    return Entry(
        name,
        size=_bytes_of(manifest),
        written=manifest.written,
        step=manifest.step,
        world_size=manifest.world_size,
        committed=not reason,
        why=reason,
        line=manifest.lineage.line,
        parent=manifest.lineage.parent,
    )


def _bytes_of(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.all_files.values())


def _bytes_in(storage: Storage, folder: str) -> int:
    paths = [join(folder, name) for name in storage.list(folder)]
    return sum(_bytes_in(storage, path) if (size := storage.size(path)) is None else size for path in paths)


@dataclass(frozen=True)
class TensorFacts:
    """A tensor in a checkpoint. `size` is in bytes; `pieces` counts its chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    pieces: int


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
    manifest = opened.manifest
    return Contents(
        place=opened.path,
        step=manifest.step,
        world_size=manifest.world_size,
        written=manifest.written,
        made_by=manifest.made_by,
        size=_bytes_of(manifest),
        plan=manifest.plan,
        tensors=tuple(
            TensorFacts(name, str(t.dtype).removeprefix("torch."), t.shape, t.bytes, len(t.chunks))
            for name, t in manifest.tensors.items()
        ),
        aliases=manifest.aliases,
        states=tuple(manifest.states),
        files={name: file.size for name, file in manifest.all_files.items()},
        extra=tuple(manifest.extra),
        line=manifest.lineage.line,
        parent=manifest.lineage.parent,
    )


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


def verify(folder: str | os.PathLike[str], tick: Tick = ignore) -> list[Damage]:
    """Check every byte of the committed checkpoint in `folder` (a path or URL) against its checksum.

    Args:
        tick: called with the number of bytes read since the last call.

    Returns:
        All damage; an empty list if the checkpoint is as it was written.

    Raises:
        CheckpointError: there is no manifest that COMMIT seals, so nothing is known about the rest.
    """
    opened = folders.open_checkpoint(folder)
    expect(tick, _bytes_of(opened.manifest))
    return [damage for name, file in opened.files.items() for damage in _damage_in(opened.manifest, name, file, tick)]


def _damage_in(manifest: Manifest, name: str, file: SourceFile, tick: Tick) -> Iterator[Damage]:
    size = file.storage.size(file.name)
    if size != file.size:
        reason = "is missing" if size is None else f"has {size} bytes, and {file.size} were written"
        yield Damage(name, reason, None, _tensors_in(manifest, name, 0, file.size))
        return

    def fault_in(blocks: Sequence[int] | None = None, tick: Tick = ignore) -> str:
        try:
            file.verify(tick, blocks)
        except (CheckpointError, OSError) as error:
            return str(error).removeprefix(f"{file}: ")
        return ""

    if reason := fault_in(tick=tick):  # it ends at the first fault: each block alone tells which ones are wrong
        blocks = [block for block in range(block_count(file.size)) if fault_in([block])]
        for block in blocks:
            tensors = _tensors_in(manifest, name, block * BLOCK, (block + 1) * BLOCK)
            yield Damage(name, "is not what was written", block, tensors)
        if not blocks:
            yield Damage(name, reason)


def _tensors_in(manifest: Manifest, file: str, begin: int, end: int) -> tuple[str, ...]:
    return tuple(
        name
        for name, t in manifest.tensors.items()
        if any(c.file == file and begin - c.box.numel * t.dtype.itemsize < c.begin < end for c in t.chunks)
    )


@dataclass(frozen=True)
class Pruned:
    """Names of folders: checkpoints kept and removed, leftovers of dead writers removed, and folders being written now.

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

    The last `keep` checkpoints of the current line stay, and the last one of each other line. So do checkpoints that
    are not named by a step, and folders without COMMIT, unless their writer is known to be dead.

    Args:
        keep: 1 or more.
        abandoned: remove the last checkpoints of other lines, too.
        dry_run: report what would be removed, and remove nothing.

    Raises:
        SettingError: `keep` is not 1 or more.
        OSError: `root` cannot be read or written.
    """
    check_whole(f"keep={keep!r}", keep)
    storage = folders.open_storage(root)
    saves = folders.committed_saves(storage)
    line = [save for save in saves if save.leads_to(saves[-1])]
    line_ends = {} if abandoned else {save.lineage.line: save for save in saves if save not in line}
    kept = [save.folder for save in reversed(saves) if save in line[-keep:] or save in line_ends.values()]
    outdated = [checkpoint_of(save.folder) for save in saves if save.folder not in kept]
    owners = [owner for name in storage.list() if (owner := owner_of(name)) is not None]
    removed, left_over, busy, size = list[str](), list[str](), list[str](), 0
    storage.sync()  # a writer may have died just after a swap: what it replaced goes once that is on disk
    for checkpoint in dict.fromkeys([*outdated, *owners]):
        committed = committed_folders(storage, checkpoint)[::-1] if checkpoint in outdated else []
        try:
            # The lock names the folder, so that the next writer can clean up after a kill.
            with lock_held(storage, checkpoint, committed[-1] if committed else "") as dead_owner:
                names = storage.list()
                leftovers = folders.leftovers_of(names, checkpoint)
                folder = str(dead_owner.get("folder"))  # of a dead writer where folders are not renamed
                is_its_own = folder in names and checkpoint_of(folder) == checkpoint
                if is_its_own and not folders.is_committed(storage, folder):
                    leftovers.append(folder)
                size += sum(_bytes_in(storage, name) for name in (*committed, *leftovers))
                for folder in () if dry_run else leftovers:
                    remove_leftover(storage, folder)
                for folder in () if dry_run else committed:
                    drop(storage, folder)
        except CheckpointError:
            busy.append(checkpoint)
            continue
        removed += committed
        left_over += leftovers
    return Pruned(tuple(kept), tuple(removed), tuple(left_over), tuple(busy), size)
