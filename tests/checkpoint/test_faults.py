"""Whatever happens in a save, the last committed checkpoint loads bit for bit, or one sentence says what is wrong; the next save works.

A sample in the fast tests, all of it in the slow ones.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from easymp import CheckpointError
from easymp.checkpoint import commit, folders, storage, storage_local
from easymp.checkpoint.folders import is_committed, open_manifest
from easymp.checkpoint.storage import SourceFile
from easymp.checkpoint.storage_local import LocalStorage

from .disk import CHANGES, Disk, Recorder, Step, put
from .things import Rows, alone, loaded, save, values, world
from .things import target as target_of

FIRST, SECOND = "step-00000001", "step-00000002"
SAVES: dict[str, dict[str, Any]] = {"the same step": {"step": 1}, "the next step": {"step": 2, "limit": 0}}
NO_SWAP = "the same step, where names cannot be swapped"
STAYING = "the same step, where nothing can be renamed"
HOOKED = "the same step, with files of hooks"
ANEW = "the same step, on another line"
ALL = [
    *(*SAVES, NO_SWAP, STAYING, f"the next step{STAYING.removeprefix('the same step')}", HOOKED),
    *(ANEW, f"{ANEW}, where nothing can be renamed"),
]


@contextmanager
def seam(do: Callable[..., Any]) -> Iterator[None]:
    real = storage_local.do
    storage_local.do = do
    try:
        yield
    finally:
        storage_local.do = real


def unsynced(operation: str, path: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Without waiting for the disk: a killed process loses nothing that the system has, and power fails in a model only."""
    return None if operation.startswith("fsync") else call(*arguments)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with seam(unsynced):
        yield


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: thousands of small files."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = tempfile.mkdtemp(prefix="easymp-", dir="/dev/shm")
    yield Path(folder)
    shutil.rmtree(folder)


@contextmanager
def file_system(kind: str) -> Iterator[dict[str, Any]]:
    """What to save, on a file system that can do what `kind` says."""
    exchange = LocalStorage.exchange
    try:
        if kind == NO_SWAP:
            LocalStorage.exchange = lambda self, one, other: False
        if kind.endswith("renamed"):
            LocalStorage.renames = False
        how = SAVES.get(kind.partition(",")[0], {"step": 1})
        yield {**how, "hooked": kind == HOOKED, "anew": kind.startswith(ANEW)}
    finally:
        LocalStorage.exchange, LocalStorage.renames = exchange, True


def newest(root: Path) -> list[Any] | None:
    """The values in what counts as the latest checkpoint."""
    folder, _, _ = folders.newest(LocalStorage(root))
    return None if folder is None else loaded(root, folders.checkpoint_of(folder))


def kept(root: Path) -> list[list[Any]]:
    """The values in all that counts."""
    storage = LocalStorage(root)
    return [
        loaded(root, name)
        for name in storage.list()
        if name.startswith("step-") and is_committed(storage, name)
    ]


def clean(root: Path) -> bool:
    """Whether nothing is left of saves that did not end."""
    storage = LocalStorage(root)
    return all(
        name == "latest" or name.startswith(".new-latest-") or is_committed(storage, name)
        for name in storage.list()
    )


def dying(at: int, after: bool) -> Callable[..., Any]:
    """A seam that kills the process before or after that change."""
    real, count = storage_local.do, 0

    def do(operation: str, path: str, call: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal count
        turn = operation in CHANGES
        count += turn
        if turn and count == at and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        value = real(operation, path, call, *arguments)
        if turn and count == at and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    return do


def killed(root: Path, at: int, after: bool, how: dict[str, Any]) -> bool:
    """Save in another process; whether it was killed on the way."""
    child = os.fork()
    if not child:
        try:
            storage_local.do = dying(at, after)
            save(root, 2, **how)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _killed_everywhere(base: str, kind: str, step: int) -> list[str]:
    """In a process without threads, as each kill is of a fork of it."""
    with file_system(kind) as how, seam(unsynced):
        base = Path(base)
        save(base / "template", 1)
        seen = []
        for after in (False, True):
            at = 1 + len(seen) % step
            while True:
                root = base / f"{at}-{after}"
                shutil.copytree(base / "template", root)
                if not killed(root, at, after, how):
                    assert newest(root) == values(2)
                    break
                seen.append("new" if newest(root) == values(2) else "old")
                assert seen[-1] == "new" or newest(root) == values(1), (at, after)
                save(root, 3, **how)
                assert newest(root) == values(3), (at, after)
                assert not how["anew"] or values(1) in kept(root), (at, after)
                assert clean(root), (at, after, os.listdir(root))
                shutil.rmtree(root)
                at += step
        return seen


@pytest.mark.parametrize("kind", ALL)
def test_killed_before_or_after_a_change_of_the_disk(ranks, tmp_path, kind):
    (seen,) = ranks(_killed_everywhere, str(tmp_path), kind, 9, processes=1)
    assert {"old", "new"} == set(seen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_killed_before_and_after_every_change_of_the_disk(ranks, tmp_path, kind):
    (seen,) = ranks(_killed_everywhere, str(tmp_path), kind, 1, processes=1, timeout=110)
    assert len(seen) > 40


def recorded(base: Path, kind: str) -> tuple[Disk, list[Step]]:
    """The disk with the first checkpoint (none, for "the first"), and what the second one did to it."""
    root, recorder = base / "disk" / "root", Recorder()
    (base / "disk").mkdir()
    if kind != "the first":
        save(root, 1)
    disk = Disk(base / "disk")
    with file_system(kind) as how, seam(recorder.do):
        save(root, 2, **how)
    return disk, recorder.steps


def violations(disk, steps, base, before=True, without="", seeds=(1, 2), anew=False):
    """Power failures that were tried, and those after which there is no checkpoint, or a wrong one."""
    chance, known, wrong, tried = random.Random(0), {}, [], 0
    allowed = [values(seed) for seed in seeds] + ([] if before else [None])
    steps = [step for step in steps if step.operation != without]
    for number in range(len(steps) + 1):
        if without and len(wrong) > 10:
            break  # enough is known
        if number:
            disk.apply(steps[number - 1])
        for found in disk.crashes(chance):
            tried += 1
            key = frozen(found)
            if key not in known:
                root = base / f"crash-{len(known)}"
                put(found, root)
                try:
                    known[key] = newest(root / "root")
                    if anew and values(1) not in kept(root / "root"):
                        known[key] = "the other line's is lost"
                except CheckpointError as error:
                    known[key] = str(error)
                shutil.rmtree(root)
            last = number == len(steps)
            if known[key] not in ([values(seeds[-1])] if last else allowed):
                wrong.append(f"after {number} of {len(steps)}, {steps[number - 1].operation}: {known[key]}")
    return tried, wrong


def frozen(tree: Any) -> Any:
    return (
        tuple((name, frozen(there)) for name, there in tree.items()) if isinstance(tree, dict) else hash(tree)
    )


POWER = ["the first", *ALL]


@pytest.mark.parametrize("kind", POWER)
def test_power_fails_at_any_time(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(storage, "PIECE", 4096)  # several writes a file
    disk, steps = recorded(tmp_path, kind)
    tried, wrong = violations(disk, steps, tmp_path, kind != "the first", anew=kind.startswith(ANEW))
    assert wrong == []
    assert tried > 200


@pytest.mark.parametrize("without", ["fsync", "fsync directory"])
def test_the_model_sees_what_an_fsync_is_for(tmp_path, without):
    disk, steps = recorded(tmp_path, "the same step")
    tried, wrong = violations(disk, steps, tmp_path, without=without)
    assert len(wrong) > 10, tried


class Killed(BaseException):
    pass


def _killed_then_power(base: Path, at: int) -> tuple[int, list[str]] | None:
    """A save that is killed after that change, then another one, and power that fails at any time of either."""
    root, recorder, count = base / "disk" / "root", Recorder(), 0
    save(root, 1)
    disk = Disk(base / "disk")

    def do(operation: str, path: str, call: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal count
        if count >= at:
            raise Killed
        value = recorder.do(operation, path, call, *arguments)
        count += operation in CHANGES
        return value

    try:
        with seam(do):
            save(root, 2, step=1)
        return None
    except Killed:
        for path in list(commit._mine):
            del commit._mine[path]
    with seam(recorder.do):
        save(root, 3, step=1)
    return violations(disk, recorder.steps, base, seeds=(1, 2, 3))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_power_fails_after_a_kill(tmp_path):
    tried = 0
    for at in [*range(1, 16, 5), *range(16, 100)]:
        base = tmp_path / str(at)
        (base / "disk").mkdir(parents=True)
        result = _killed_then_power(base, at)
        if result is None:
            break
        tried += result[0]
        assert result[1] == [], at
    assert tried > 10000


def failing(at: int, number: int, seen: list[str]) -> Callable[..., Any]:
    real = storage_local.do

    def do(operation: str, path: str, call: Callable[..., Any], *arguments: Any) -> Any:
        if operation in CHANGES:
            seen.append(operation)
            if len(seen) == at:
                raise OSError(number, os.strerror(number), path)
        return real(operation, path, call, *arguments)

    return do


def failed_everywhere(root: Path, kind: str, number: int, step: int) -> int:
    tries = 0
    with file_system(kind) as how:
        save(root / "template", 1)
        for at in range(1 + number % step, 1000, step):
            place, seen, said = root / f"{number}-{at}", [], ""
            shutil.copytree(root / "template", place)
            with seam(failing(at, number, seen)):
                try:
                    save(place, 2, **how)
                except CheckpointError as error:
                    said = str(error)
            if len(seen) < at:
                break
            tries += 1
            if said:
                assert os.strerror(number) in said
                assert newest(place) == values(1) or seen[at - 1] == "fsync directory", (at, seen)
            else:
                assert newest(place) == values(2), (at, seen)  # what failed was no part of it
            save(place, 3, **how)
            assert newest(place) == values(3)
            # What cannot be removed where nothing is renamed stays, and the log says so.
            assert clean(place) or (
                kind.endswith("renamed") and seen[at - 1] in ("unlink", "rmdir", "fsync directory")
            ), (at, seen, os.listdir(place))
            shutil.rmtree(place)
    return tries


ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES]


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_the_system_refuses_a_change(tmp_path, number):
    assert failed_everywhere(tmp_path, "the same step", number, 5) > 4


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [(kind, ERRORS[i % 4]) for i, kind in enumerate(ALL)])
def test_the_system_refuses_any_change(tmp_path, kind, number):
    assert failed_everywhere(tmp_path, kind, number, 1) > 20


@pytest.mark.parametrize("most", [1, 1000, 4097])
def test_writes_may_be_short(tmp_path, most):
    real = storage_local.do

    def do(operation: str, path: str, call: Callable[..., Any], *arguments: Any) -> Any:
        if operation == "write":
            descriptor, buffers, at = arguments
            arguments = (descriptor, [buffers[0][:most]], at)
        return real(operation, path, call, *arguments)

    with seam(do):
        save(tmp_path, 1)
    assert newest(tmp_path) == values(1)


def faults(root: Path, name: str) -> bool:
    """Whether looking through the checkpoint finds something wrong."""
    storage = LocalStorage(root)
    try:
        manifest = open_manifest(storage, name)
        for file, record in manifest.files.items():
            SourceFile(storage, f"{name}/{file}", record.size, record.checksums).verify()
    except CheckpointError:
        return True
    return False


def refused(root: Path, name: str) -> bool:
    """Whether loading refuses; what it accepts is right."""
    rows = Rows(0, 1, seed=-1)
    try:
        found = loaded(root, name)
    except CheckpointError:
        return True
    assert rows.values() == values(-1)
    assert found == values(1)
    return False


@pytest.fixture
def one(tmp_path):
    """A folder with one checkpoint; its files."""
    save(tmp_path, 1)
    return sorted((tmp_path / FIRST).iterdir())


@pytest.mark.parametrize("number", range(5))
def test_a_file_of_another_length(one, tmp_path, number):
    assert len(one) == 5
    file = one[number]
    content = file.read_bytes()
    size = len(content)
    for length in sorted(
        {0, 1, 8, 9, 64, size // 2, size - 4096, size - 8, size - 1, size + 1, size + 4096} - {size}
    ):
        if length >= 0:
            file.write_bytes((content + bytes(4096))[:length])
            assert faults(tmp_path, FIRST), (file.name, length)
            assert refused(tmp_path, FIRST) or "index" in file.name, (file.name, length)
    file.unlink()
    assert faults(tmp_path, FIRST)
    assert refused(tmp_path, FIRST) or "index" in file.name
    file.write_bytes(content)
    assert not faults(tmp_path, FIRST)
    assert not refused(tmp_path, FIRST)


def flipped(one: list[Path], root: Path, step: int) -> None:
    storage = LocalStorage(root)
    records = open_manifest(storage, FIRST).files
    for file in one:
        content = bytearray(file.read_bytes())
        record = records.get(file.name)
        for at in range(0, len(content), step if record else min(step, 3)):
            content[at] ^= 1 << at % 8
            file.write_bytes(content)
            look = (
                SourceFile(storage, f"{FIRST}/{file.name}", record.size, record.checksums).verify
                if record
                else None
            )
            with pytest.raises(CheckpointError):
                (look or partial(open_manifest, storage, FIRST))()
            if at % (97 * step) == 0:
                assert refused(root, FIRST) or "index" in file.name, (file.name, at)
            content[at] ^= 1 << at % 8
        file.write_bytes(content)


def test_flipped_bits(one, tmp_path):
    flipped(one, tmp_path, 31)


@pytest.mark.slow
def test_a_flipped_bit_in_every_byte(one, tmp_path):
    flipped(one, tmp_path, 1)


def _shared(root: str) -> None:
    from easymp.checkpoint.save import Saves

    ranks = world()
    saves = Saves(ranks)
    saves.save(target_of(root, 1), [Rows(ranks.rank, ranks.size, 1)])
    saves.close()
    ranks.close()


def _load_shared(root: str) -> str:
    ranks = world()
    try:
        loaded(root, FIRST, ranks)
    except CheckpointError as error:
        return str(error)
    finally:
        ranks.close()
    return ""


def test_files_that_changed_places(ranks, tmp_path):
    ranks(_shared, str(tmp_path))
    one, other = (tmp_path / FIRST / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    for said in ranks(_load_shared, str(tmp_path)):
        assert "nothing has changed" in said
        assert "model-0000" in said
    assert faults(tmp_path, FIRST)
    assert alone().size == 1
