"""Whatever happens in a save, the last committed checkpoint loads bit for bit, or one sentence says what is wrong.

The next save works. A sample in the fast tests, all of it in the slow ones.
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
from pathlib import Path
from typing import Any

import pytest

from easymp import CheckpointError
from easymp.checkpoint import folders, locks, storage
from easymp.checkpoint.folders import is_committed, open_folder
from easymp.checkpoint.storage import LocalStorage, SourceFile

from .disk import CHANGES, Disk, Recorder, put
from .things import loaded, save, values

FIRST = "step-00000001"
SAME, NEXT = "the same step", "the next step"
STAYING = f"{SAME}, where nothing can be renamed"
HOOKED, ANEW = f"{SAME}, with files of hooks", f"{SAME}, on another line"
NEXT_STAYING, ANEW_STAYING = (f"{kind}, where nothing can be renamed" for kind in (NEXT, ANEW))
ALL = [SAME, NEXT, STAYING, NEXT_STAYING, HOOKED, ANEW, ANEW_STAYING]
Do = Callable[..., Any]


@contextmanager
def seam(do: Do) -> Iterator[None]:
    real = storage.do
    storage.do = do
    try:
        yield
    finally:
        storage.do = real


def unsynced(operation: str, path: str, call: Do, *arguments: Any) -> Any:
    """Without waiting for the disk.

    A killed process loses nothing that the system has, and power fails in a model only.
    """
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
    try:
        LocalStorage.renames = not kind.endswith("renamed")
        options = {"step": 2, "limit": 0} if kind.startswith(NEXT) else {"step": 1}
        yield {**options, "hooked": kind == HOOKED, "anew": kind.startswith(ANEW)}
    finally:
        LocalStorage.renames = True


def newest(root: Path) -> list[Any] | None:
    """The values in what counts as the latest checkpoint."""
    folder, _, _ = folders.find_newest(LocalStorage(root))
    return None if folder is None else loaded(root, folders.checkpoint_of(folder))


def committed_values(root: Path) -> list[list[Any]]:
    """The values in all that counts."""
    storage = LocalStorage(root)
    steps = [name for name in storage.list() if name.startswith("step-") and is_committed(storage, name)]
    return [loaded(root, name) for name in steps]


def leftovers(root: Path) -> list[str]:
    """What is left of saves that did not end."""
    storage = LocalStorage(root)
    hints = ("latest", ".new-latest")
    return [name for name in storage.list() if not name.startswith(hints) and not is_committed(storage, name)]


def counted(at: int, act: Callable[[str, str], Any], operations: list[str]) -> Do:
    """A seam that calls `act` before that change of the disk, counted from 1; the changes so far are in `seen`."""
    real = storage.do

    def do(operation: str, path: str, call: Do, *arguments: Any) -> Any:
        if operation in CHANGES:
            operations.append(operation)
            if len(operations) == at:
                act(operation, path)
        return real(operation, path, call, *arguments)

    return do


def killed(root: Path, at: int, options: dict[str, Any]) -> bool:
    """Save in another process; whether it was killed on the way."""
    child = os.fork()
    if not child:
        try:
            with seam(counted(at, lambda *_: os.kill(os.getpid(), signal.SIGKILL), [])):
                save(root, 2, **options)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def killed_everywhere(base: str, kind: str, step: int) -> list[str]:
    """In a process without threads, as each kill is of a fork of it."""
    with file_system(kind) as options, seam(unsynced):
        base = Path(base)
        save(base / "template", 1)
        outcomes = []
        for at in range(1, 1000, step):
            root = base / str(at)
            shutil.copytree(base / "template", root)
            if not killed(root, at, options):
                assert newest(root) == values(2)
                break
            outcomes.append("new" if newest(root) == values(2) else "old")
            assert outcomes[-1] == "new" or newest(root) == values(1), at
            save(root, 3, **options)
            assert newest(root) == values(3), at
            assert not options["anew"] or values(1) in committed_values(root), at
            assert leftovers(root) == [], at
            shutil.rmtree(root)
        return outcomes


# What is killed before a change was killed after the one before it.
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ALL)
def test_killed_before_and_after_every_change_of_the_disk(ranks, tmp_path, kind, step):
    (outcomes,) = ranks(killed_everywhere, str(tmp_path), kind, step, processes=1, timeout=110)
    assert {"old", "new"} == set(outcomes) and len(outcomes) * step > 20


def recorded(base: Path, kind: str) -> tuple[Disk, list[Any]]:
    """The disk with the first checkpoint (none, for "the first"), and what the second one did to it."""
    root, recorder = base / "disk" / "root", Recorder()
    (base / "disk").mkdir()
    if kind != "the first":
        save(root, 1)
    disk = Disk(base / "disk")
    with file_system(kind) as options, seam(recorder.do):
        save(root, 2, **options)
    return disk, recorder.steps


def violations(disk, steps, base, before=True, without="", seeds=(1, 2), anew=False):
    """Power failures that were tried, and those after which there is no checkpoint, or a wrong one."""
    chance, results, wrong, tried = random.Random(0), {}, [], 0
    allowed = [values(seed) for seed in seeds] + ([] if before else [None])
    steps = [step for step in steps if step.operation != without]
    for number in range(len(steps) + 1):
        if without and len(wrong) > 10:
            break  # enough is known
        if number:
            disk.apply(steps[number - 1])
        for crash in disk.crashes(chance):
            tried += 1
            key = frozen(crash)
            if key not in results:
                root = base / f"crash-{len(results)}"
                put(crash, root)
                try:
                    results[key] = newest(root / "root")
                    if anew and values(1) not in committed_values(root / "root"):
                        results[key] = "the other line's is lost"
                except CheckpointError as error:
                    results[key] = str(error)
                shutil.rmtree(root)
            last = number == len(steps)
            if results[key] not in ([values(seeds[-1])] if last else allowed):
                wrong.append(f"after {number} of {len(steps)}, {steps[number - 1].operation}: {results[key]}")
    return tried, wrong


def frozen(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return hash(tree)
    return tuple((name, frozen(entry)) for name, entry in tree.items())


@pytest.mark.parametrize("kind", ["the first", *ALL])
def test_power_fails_at_any_time(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(storage, "PIECE", 4096)  # several writes a file
    disk, steps = recorded(tmp_path, kind)
    tried, wrong = violations(disk, steps, tmp_path, kind != "the first", anew=kind.startswith(ANEW))
    assert wrong == [] and tried > 200


@pytest.mark.parametrize("without", ["fsync", "fsync directory"])
def test_the_model_sees_what_an_fsync_is_for(tmp_path, without):
    tried, wrong = violations(*recorded(tmp_path, SAME), tmp_path, without=without)
    assert len(wrong) > 10, tried


class Killed(BaseException):
    pass


def killed_then_power(base: Path, at: int) -> tuple[int, list[str]] | None:
    """A save that is killed after that change, then another one, and power that fails at any time of either."""
    root, recorder, count = base / "disk" / "root", Recorder(), 0
    save(root, 1)
    disk = Disk(base / "disk")

    def do(operation: str, path: str, call: Do, *arguments: Any) -> Any:
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
        locks._owned.clear()
    with seam(recorder.do):
        save(root, 3, step=1)
    return violations(disk, recorder.steps, base, seeds=(1, 2, 3))


@pytest.mark.slow
def test_power_fails_after_a_kill(tmp_path):
    tried = 0
    for at in [*range(1, 16, 5), *range(16, 100)]:
        base = tmp_path / str(at)
        (base / "disk").mkdir(parents=True)
        result = killed_then_power(base, at)
        if result is None:
            break
        tried += result[0]
        assert result[1] == [], at
    assert tried > 10000


def failed_everywhere(root: Path, kind: str, number: int, step: int) -> int:
    def refuse(operation: str, path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    tries = 0
    with file_system(kind) as options:
        save(root / "template", 1)
        for at in range(1 + number % step, 1000, step):
            folder, operations, message = root / f"{number}-{at}", [], ""
            shutil.copytree(root / "template", folder)
            with seam(counted(at, refuse, operations)):
                try:
                    save(folder, 2, **options)
                except CheckpointError as error:
                    message = str(error)
            if len(operations) < at:
                break
            tries, refused_one = tries + 1, operations[at - 1]
            if message:
                assert os.strerror(number) in message
                assert newest(folder) == values(1) or refused_one == "fsync directory", (at, operations)
            else:
                assert newest(folder) == values(2), (at, operations)  # what failed was no part of it
            save(folder, 3, **options)
            assert newest(folder) == values(3)
            # What cannot be removed where nothing is renamed stays, and the log says so.
            may_stay = kind.endswith("renamed") and refused_one in ("unlink", "rmdir", "fsync directory")
            assert may_stay or leftovers(folder) == [], (at, operations)
            shutil.rmtree(folder)
    return tries


ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES]
SAMPLE = [(SAME, number, 5) for number in ERRORS]
EVERY = [pytest.param(kind, ERRORS[i % 4], 1, marks=pytest.mark.slow) for i, kind in enumerate(ALL)]


@pytest.mark.parametrize(("kind", "number", "step"), [*SAMPLE, *EVERY])
def test_the_system_refuses_a_change(tmp_path, kind, number, step):
    assert failed_everywhere(tmp_path, kind, number, step) * step > 20


def test_writes_may_be_short(tmp_path):
    real = storage.do
    for limit in (1, 1000, 4097):

        def do(operation: str, path: str, call: Do, *arguments: Any, limit: int = limit) -> Any:
            if operation == "write":
                descriptor, buffers, at = arguments
                arguments = (descriptor, [buffers[0][:limit]], at)
            return real(operation, path, call, *arguments)

        with seam(do):
            save(tmp_path / str(limit), 1)
        assert newest(tmp_path / str(limit)) == values(1)


def refused(root: Path, file: Path) -> bool:
    """Whether loading refuses, as it does but for the index, which is for other tools; what it accepts is right."""
    try:
        assert loaded(root, FIRST) == values(1)
    except CheckpointError:
        return True
    return "index" in file.name


@pytest.fixture
def one(tmp_path):
    """A folder with one checkpoint; its files."""
    save(tmp_path, 1)
    return sorted((tmp_path / FIRST).iterdir())


@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_any_byte_and_any_other_length(one, tmp_path, step):
    storage, files = LocalStorage(tmp_path), open_folder(LocalStorage(tmp_path), FIRST).manifest.files

    def verify(name: str) -> None:
        record = files.get(name)
        if record is None:
            open_folder(storage, FIRST)
        else:
            SourceFile(storage, f"{FIRST}/{name}", record.size, record.checksums).verify()

    assert len(one) == 5
    for file in one:
        content = bytearray(file.read_bytes())
        size = len(content)
        for at in range(0, size, step if file.name in files else min(step, 3)):
            content[at] ^= 1 << at % 8
            file.write_bytes(content)
            with pytest.raises(CheckpointError):
                verify(file.name)
            assert at % (97 * step) or refused(tmp_path, file), (file.name, at)
            content[at] ^= 1 << at % 8
        lengths = {0, 1, 8, 9, 64, size // 2, *(size + n for n in (-4096, -8, -1, 1, 4096))} - {size}
        for length in (n for n in lengths if n >= 0):
            file.write_bytes((content + bytes(4096))[:length])
            with pytest.raises(CheckpointError):
                verify(file.name)
            assert refused(tmp_path, file), (file.name, length)
        file.unlink()
        with pytest.raises(CheckpointError):
            verify(file.name)
        assert refused(tmp_path, file), file.name
        file.write_bytes(content)
        verify(file.name)
        assert loaded(tmp_path, FIRST) == values(1)
