"""The folders of checkpoints below a root: their names, which of them count, how one is opened, and their order.

| name | content |
|---|---|
| ``step-00000100`` | the checkpoint of step 100; users may choose other names |
| ``step-00000100.save-2`` | the same, saved again where two folders cannot swap names (object stores, some network file systems); of those with a COMMIT, the highest number counts |
| ``step-00000100.line-1c9e02d7`` | the same, of another line of saves: it was set aside when the current line came to that step |
| ``.tmp-step-00000100-5f0c3a9e`` | a folder being written, or replaced, or removed; never a checkpoint |
| ``.tmp-step-00000100.lock`` | the owner of the writer lock |
| ``latest`` | a file with the name of the checkpoint that was saved last: a hint for readers, the truth is COMMIT and the manifest |
"""  # noqa: E501

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError
from ..logging import get_logger
from .codec import LONGEST, Slot, decode_header, header_length
from .manifest import BLOCK, COMMIT, MANIFEST, FileRecord, Lineage, Manifest, decode, head, seal
from .storage import Part, SourceFile, Storage, Tick, no_tick, shown
from .storage_local import LocalStorage
from .storage_remote import RemoteStorage

logger = get_logger(__name__)
HEAD = 2**16  # bytes of a manifest in which its plan usually ends
FEW = 5  # names in a sentence before the rest is counted
LATEST = "latest"
TEMPORARY = ".tmp-"
FIRST = 2**16  # bytes of a file that are read at once: its header, mostly
SEAL = 65  # bytes of COMMIT: a SHA-256 in hexadecimal and a line feed
# Ours, and Accelerate's automatic names.
_STEP = re.compile(r"(?:step-(?=\d{8})|checkpoint_)(\d+)(\.line-[0-9a-f]+(-\d+)?)?")
_AGAIN = re.compile(r"(.+)\.save-(\d+)")
_TEMPORARY = re.compile(r"\.tmp-(.+)(-[0-9a-f]{8}|\.lock)")


def inside(folder: str, name: str) -> str:
    """Join `folder` and `name`; either may be ""."""
    return f"{folder.rstrip('/')}/{name}" if folder and name else folder or name


# -- names ------------------------------------------------------------------------------------------------------------


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step in a checkpoint folder's name; None for other names."""
    found = _STEP.fullmatch(checkpoint_of(folder))
    return int(found[1]) if found else None


def checkpoint_of(folder: str) -> str:
    """The checkpoint's name without the number of the save."""
    found = _AGAIN.fullmatch(folder)
    return found[1] if found else folder


def save_of(folder: str) -> int:
    """The number of the save in a folder's name, from 1."""
    found = _AGAIN.fullmatch(folder)
    return int(found[2]) if found else 1


def saves_of(names: Iterable[str], checkpoint: str) -> list[str]:
    """The saves of one checkpoint among folders, the newest first; committed or not."""
    return sorted((n for n in names if checkpoint_of(n) == checkpoint), key=save_of, reverse=True)


def next_save(names: Iterable[str], checkpoint: str) -> str:
    """A name for one more save of a checkpoint, beside the folders `names`."""
    taken = saves_of(names, checkpoint)
    return f"{checkpoint}.save-{save_of(taken[0]) + 1}" if taken else checkpoint


def aside(names: Iterable[str], checkpoint: str, line: str) -> str:
    """A new name for a checkpoint of another line, unused among `names`."""
    name = plain = f"{checkpoint}.line-{line}"
    taken, number = {checkpoint_of(n) for n in names}, 1
    while name in taken:
        number += 1
        name = f"{plain}-{number}"
    return name


def temporary(checkpoint: str) -> str:
    """A new temporary name for a folder that is being written or removed."""
    return f"{TEMPORARY}{checkpoint}-{secrets.token_hex(4)}"


def writing(name: str) -> str | None:
    """The checkpoint that a temporary folder or lock belongs to; None for other names."""
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found else None


# -- commit -----------------------------------------------------------------------------------------------------------


def is_committed(storage: Storage, folder: str) -> bool:
    """Whether `folder` holds a manifest and the COMMIT that seals it. The manifest is not decoded."""
    manifest, commit = inside(folder, MANIFEST), inside(folder, COMMIT)
    if storage.size(commit) != SEAL or (size := storage.size(manifest)) is None or size > LONGEST:
        return False
    try:
        return storage.get(commit, SEAL) == seal(storage.get(manifest, LONGEST))
    except FileNotFoundError:  # another process removes this checkpoint right now
        return False


def is_checkpoint(storage: Storage, folder: str) -> bool:
    """Whether `folder` is itself a checkpoint, complete or not, and not a folder of checkpoints."""
    return any(storage.size(inside(folder, file)) is not None for file in (COMMIT, MANIFEST))


def current(storage: Storage, checkpoint: str) -> str:
    """The folder of the newest committed save of `checkpoint`; the plain name if none is committed."""
    found = saves_of(storage.list(), checkpoint)
    if found in ([], [checkpoint]):
        return checkpoint
    return next((folder for folder in found if is_committed(storage, folder)), checkpoint)


def open_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest of the checkpoint in `folder` of `storage` ("" for `storage` itself), checked against its COMMIT."""
    place, manifest, commit = inside(storage.place, folder), inside(folder, MANIFEST), inside(folder, COMMIT)
    sealed, described = storage.size(commit) is not None, storage.size(manifest) is not None
    if not (sealed or described):
        said = f"not a checkpoint: neither {MANIFEST} nor {COMMIT} is there; pass the folder of one step"
    elif not sealed:
        said = f"not committed: {COMMIT} is missing, so the save did not end; load an earlier checkpoint"
    elif not described:
        said = f"{MANIFEST} is missing though {COMMIT} is there: load another checkpoint"
    elif storage.get(commit, SEAL) != seal(text := storage.get(manifest, LONGEST)):
        said = f"{MANIFEST} is not what {COMMIT} seals: one of them was changed; load another checkpoint"
    else:
        return decode(text, inside(storage.place, manifest))
    raise CheckpointError(f"{place}: {said}")


def write_manifest(storage: Storage, folder: str, manifest: Manifest) -> None:
    """Write the manifest and then COMMIT, which makes `folder` a checkpoint."""
    text = manifest.encode()
    for name, content in ((MANIFEST, text), (COMMIT, seal(text))):
        storage.put(inside(folder, name), [content], len(content))
        storage.sync(folder)  # before the next


# -- paths and URLs ---------------------------------------------------------------------------------------------------


def open_storage(place: str | os.PathLike[str]) -> Storage:
    """The folder `place`: a path or ``file://`` URL on this machine, any other URL by fsspec. Nothing is read or made."""
    path = os.fspath(place)
    kind, mark, rest = path.partition("://")
    if not mark or "/" in kind:
        return LocalStorage(path)
    if kind not in ("file", "local"):
        return RemoteStorage(path)
    rest = rest.removeprefix("localhost")
    if not rest.startswith("/"):
        raise CheckpointError(f"{path} names a machine, not a folder: write {kind}:///{rest}, or the path")
    return LocalStorage(rest)


def parted(place: str | os.PathLike[str]) -> tuple[str, str]:
    """Split a path into its parent folder and its name. A link to a folder is followed."""
    said = os.fspath(place)
    kind, mark, rest = said.partition("://")
    if not mark:
        path = os.path.abspath(said)
        return os.path.split(os.path.realpath(path) if os.path.isdir(path) else path)
    folder, _, name = rest.rstrip("/").rpartition("/")
    return f"{kind}://{folder}", name


class Opened(NamedTuple):
    """A committed checkpoint: `folder` of `storage`, and its manifest."""

    storage: Storage
    folder: str
    manifest: Manifest

    @property
    def place(self) -> str:
        return inside(self.storage.place, self.folder)

    @property
    def files(self) -> dict[str, SourceFile]:
        """The checkpoint's own, by name."""
        return self._files(self.manifest.files)

    @property
    def extra(self) -> dict[str, SourceFile]:
        """Those of hooks."""
        return self._files(self.manifest.extra)

    def _files(self, files: Mapping[str, FileRecord]) -> dict[str, SourceFile]:
        below = f"{self.folder}/" if self.folder else ""
        return {n: SourceFile(self.storage, below + n, f.size, f.checksums) for n, f in files.items()}


def open_checkpoint(place: str | os.PathLike[str]) -> Opened:
    """Open the committed checkpoint at a path or URL, the newest of several saves of one name; CheckpointError if there is none."""
    root, name = parted(place)
    try:
        storage = open_storage(root)
        folder = current(storage, name)
        return Opened(storage, folder, open_manifest(storage, folder))
    except OSError as error:
        raise CheckpointError(f"{shown(os.fspath(place))}: cannot be read ({error})") from error


# -- files of other programs ------------------------------------------------------------------------------------------


def found_at(place: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The storage of a file's folder, and the file's name in it."""
    folder, name = parted(place)
    return open_storage(folder), name


def file_in(folder: Storage, name: str) -> SourceFile:
    """A file of another program. Links are followed, as caches of downloads consist of them."""
    if isinstance(folder, LocalStorage):
        real = Path(folder.place, name).resolve()
        folder, name = LocalStorage(real.parent), real.name
    size = folder.size(name)
    if size is None:
        raise CheckpointError(f"{folder.place}/{name}: there is no such file")
    return SourceFile(folder, name, size)


def read_header(file: SourceFile) -> tuple[dict[str, Slot], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    text, what = file.storage.head(file.name, FIRST), str(file)
    if (base := header_length(text, file.size, what)) > len(text):
        text = file.storage.head(file.name, base)
    return decode_header(text, file.size, what)


# -- files that a checkpoint holds as they are: those of hooks ---------------------------------------------------------


@dataclass(frozen=True)
class Extra:
    """Files that go into a checkpoint as they are."""

    files: Mapping[str, SourceFile] = field(default_factory=dict)  # this rank's, by paths in the checkpoint
    names: Collection[str] = ()  # of all ranks' files
    close: Callable[[], None] = lambda: None  # for when they are copied, or never will be; once or more


NONE = Extra()


def copied(
    files: Mapping[str, SourceFile], storage: Storage, folder: str, tick: Tick = no_tick
) -> dict[str, FileRecord]:
    """Copy `files` below `folder` of `storage`, durably; a later `sync` of `folder` covers the names in it."""
    paths = [name.split("/") for name in files]
    below = dict.fromkeys("/".join(words[:count]) for words in paths for count in range(1, len(words)))
    for name in below:  # each after its parent
        with suppress(FileExistsError):  # another rank was quicker
            storage.make(inside(folder, name))
    written = {
        name: FileRecord(file.size, storage.put(inside(folder, name), blocks_in(file), file.size, tick))
        for name, file in files.items()
    }
    for name in below:
        storage.sync(inside(folder, name))
    return written


def blocks_in(file: SourceFile) -> Iterator[Part]:
    """The bytes of a file, a block at a time, verified if checksums are known."""
    for begin in range(0, file.size, BLOCK):
        block = memoryview(bytearray(min(BLOCK, file.size - begin)))
        file.fetch([(begin, block)])
        yield block


# -- order: a run that loads a checkpoint and saves continues its line, or begins one of its own if that line has later ones ---


@dataclass(frozen=True)
class Saved:
    """A checkpoint's position among others: its folder, when and at which step it was saved, and its lineage."""

    folder: str
    written: str
    step: int
    lineage: Lineage

    @property
    def position(self) -> tuple[str, int]:
        """The key of the order in a folder. It does not depend on clocks: see `Line.next`."""
        return self.written, self.step

    def leads_to(self, tip: Saved) -> bool:
        """Whether `tip` is this checkpoint, or was continued from it."""
        marks = ((tip.lineage.line, *tip.position), *tip.lineage.forks)
        return any(self.lineage.line == line and self.position <= tuple(at) for line, *at in marks)


def survey(storage: Storage) -> tuple[list[Saved], list[str]]:
    """Checkpoints named by steps that have a COMMIT, unverified, in the order of their saves; and other folders with such names."""
    found = {folder: saved_in(storage, folder) for folder in storage.list() if step_of(folder) is not None}
    saved = sorted(filter(None, found.values()), key=lambda it: (it.position, save_of(it.folder), it.folder))
    return saved, [folder for folder, it in found.items() if it is None]


def saved_in(storage: Storage, folder: str) -> Saved | None:
    """The position of the checkpoint in `folder`, unverified; None without a COMMIT."""
    try:
        if not re.fullmatch(rb"[0-9a-f]{64}\n", storage.head(inside(folder, COMMIT), SEAL + 1)):
            return None  # power failed while it was written
        there = head(storage.head(inside(folder, MANIFEST), HEAD))
        if there is None:
            manifest = open_manifest(storage, folder)
            there = manifest.written, manifest.step, manifest.lineage
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return None
    return Saved(folder, *there)


def committed(storage: Storage) -> list[Saved]:
    """Committed checkpoints named by steps, in the order of their saves; the last save of each."""
    counts: dict[str, Saved] = {}
    for it in survey(storage)[0]:
        if is_committed(storage, it.folder):
            counts.pop(checkpoint_of(it.folder), None)
            counts[checkpoint_of(it.folder)] = it
    return list(counts.values())


def newest(storage: Storage, passed: Collection[str] = ()) -> tuple[str | None, list[str], bool]:
    """Find the checkpoint to continue from: the last save, or its parent if that save is damaged.

    Returns its folder or None; sentences about newer folders that are left out, but for `passed`; whether one is damaged.
    """
    found, others = survey(storage)
    said: list[str] = []

    def opens(folder: str) -> bool:
        try:
            open_manifest(storage, folder)
        except CheckpointError as error:
            said.append(str(error))
            return False
        return True

    line = [it.folder for it in reversed(found) if it.folder not in passed and it.leads_to(found[-1])]
    chosen = next(filter(opens, line), None)
    damaged = bool(said)
    for folder in sorted(others, key=lambda name: (step_of(name), name), reverse=True):
        if (chosen is None or (step_of(folder) or 0) > (step_of(chosen) or 0)) and not opens(folder):
            damaged |= storage.size(inside(folder, COMMIT)) is not None
    return chosen, said, damaged


def damage(storage: Storage, folder: str) -> str:
    """The damage to a committed checkpoint, in words; "" if there is none. Reads all of it."""
    try:
        opened = Opened(storage, folder, open_manifest(storage, folder))
        for file in (*opened.files.values(), *opened.extra.values()):
            file.verify()
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


# -- the line of a run -------------------------------------------------------------------------------------------------


class Line:
    """The line of saves that a run continues. Rank 0 decides."""

    def __init__(self) -> None:
        self.last: Saved | None = None  # the checkpoint that the run loaded or saved last
        self._loaded: Storage | None = None  # the storage of `last`, if it was loaded
        self._surveyed: set[str] = set()

    def loaded(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        """The run continues from this checkpoint."""
        self.last, self._loaded = Saved(folder, manifest.written, manifest.step, manifest.lineage), storage
        self._surveyed.clear()  # what this run saved after it is on another line now

    def begin_anew(self) -> None:
        """The run continues from a checkpoint that easymp did not write."""
        self.last = self._loaded = None
        self._surveyed.clear()

    def next(self, storage: Storage, name: str, step: int) -> Saved:
        """Lineage of the next save. It sorts after all existing ones, even if clocks disagree or were set back."""
        there = [] if _real(storage) in self._surveyed else survey(storage)[0]
        last, parent, forks, line = self.last, "", (), secrets.token_hex(4)
        if last is not None:
            parent = "".join(filter(str.isprintable, checkpoint_of(last.folder)))[:200]
            forks = last.lineage.forks
            if self._continues(last, storage, there):
                line = last.lineage.line
            else:
                forks = (*forks, (last.lineage.line, *last.position))
        after = max((it.written for it in [*there, *([last] if last else [])]), default="")
        it = Saved(name, _later(after), step, Lineage(line, parent, forks))
        left = [other.folder for other in there if not other.leads_to(it)]
        if left and step_of(name) is not None:
            logger.warning(
                "%s: a new line of checkpoints begins %s, and resume() goes on with it from now on. Not on it, and kept: %s",
                storage.place,
                f"at {parent}" if parent else "without resume()",
                ", ".join(left[:FEW]) + (f" and {len(left) - FEW} more" if len(left) > FEW else ""),
            )
        return it

    def _continues(self, last: Saved, storage: Storage, there: Sequence[Saved]) -> bool:
        """Whether the next save continues the line of the last one; False if that line has later saves."""
        return self._loaded is None or (
            _real(self._loaded) == _real(storage)
            and step_of(last.folder) is not None
            and not any(it.lineage.line == last.lineage.line and it.position > last.position for it in there)
        )

    def saved(self, storage: Storage, it: Saved) -> None:
        """Note that `it`, a result of `next`, is committed."""
        self.last, self._loaded = it, None
        if step_of(it.folder) is not None:
            self._surveyed.add(_real(storage))


def _real(storage: Storage) -> str:
    return os.path.realpath(storage.place)


def _later(than: str) -> str:
    """The time now, or one microsecond after `than` if the clock is behind it; ISO 8601."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    if now > than:
        return now
    try:
        return (datetime.fromisoformat(than) + timedelta(microseconds=1)).isoformat(timespec="microseconds")
    except (ValueError, OverflowError):  # a time that easymp did not write
        return now
