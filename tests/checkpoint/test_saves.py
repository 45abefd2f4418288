"""Saving.

What is saved is there, bit for bit; one writer; trouble on one rank is every rank's, and costs nothing; progress is
told.
"""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr

import pytest
import torch

from easymp import Accelerator, CheckpointError
from easymp.checkpoint import locks, progress, storage
from easymp.checkpoint import save as saving
from easymp.checkpoint.locks import Heartbeat, acquire, lock_name, owner_record
from easymp.checkpoint.manifest import full_box
from easymp.checkpoint.progress import Progress, expect
from easymp.checkpoint.save import HostCopy, LocalChunk, Saves, file_content, plan_files
from easymp.checkpoint.storage import LocalStorage

from .things import Fails, Rows, loaded, save, target, values, world

STEP = "step-00000001"


def listed(root):
    return sorted(os.listdir(root))


@contextmanager
def refusing(operation, path_part=".tmp-", act=None):
    """That operation on a path with that word, but for locks, finds a broken disk, or `act` is called instead."""
    real = storage.do

    def do(operation_name, path, call, *arguments):
        if operation_name == operation and path_part in path and not path.endswith(".lock"):
            if act is None:
                raise OSError(5, "Input/output error", path)
            act()
        return real(operation_name, path, call, *arguments)

    storage.do = do
    try:
        yield
    finally:
        storage.do = real


@pytest.mark.parametrize("call", ["save", "wait", "close", "none"])
def test_trouble_in_the_background_comes_back_once(tmp_path, call):
    saves = Saves(world())
    with refusing("create", "model"):
        saves.save(target(tmp_path, 1), [Rows(0, 1, 1)], asynchronous=True)
        saves.thread.join()
    if call == "none":  # a run that fails ends by its own error
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            saves.close()
        return
    arguments = (target(tmp_path, 2), [Rows(0, 1, 2)]) if call == "save" else ()
    with pytest.raises(CheckpointError, match=r"step-00000001 was not written.*Input/output error"):
        getattr(saves, call)(*arguments)
    saves.save(target(tmp_path, 2), [Rows(0, 1, 2)])
    saves.close()
    assert listed(tmp_path) == ["latest", "step-00000002"]


ENDS = """
import sys, time
from easymp.checkpoint.save import Saves
from tests.checkpoint.test_saves import Rows, refusing, target, world
with refusing("create", act=lambda: time.sleep(0.5)):
    saves = Saves(world())
    saves.save(target(sys.argv[1], 1), [Rows(0, 1, 1)], asynchronous=True)
    if sys.argv[2] == "error":
        raise RuntimeError("the training failed")
"""


@pytest.mark.parametrize("end", ["error", pytest.param("end", marks=pytest.mark.slow)])
def test_the_end_of_the_process_waits(tmp_path, end):
    command = [sys.executable, "-c", ENDS, str(tmp_path), end]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert process.returncode == (end == "error"), process.stderr
    assert loaded(tmp_path, STEP) == values(1)


TROUBLE = [
    ("bring", 1, False),
    ("create", 1, False),
    ("write", 1, True),
    ("fsync", 0, True),
    ("mkdir", 0, False),
    ("rename", 0, False),
]


def one_fails(root):
    """What is said, left, kept and saved again when one rank has trouble; and when the ranks do not share a folder."""
    ranks, results = world(timeout=20), []
    saves = Saves(ranks)
    for number, (operation, rank, asynchronous) in enumerate(TROUBLE):
        folder, message = f"{root}/{number}", ""
        saves.save(target(folder, 1), [Rows(ranks.rank, ranks.size, 1)])
        rows = [Rows(ranks.rank, ranks.size, 2)]
        with refusing(operation if ranks.rank == rank else "nothing"):
            try:
                saves.save(target(folder, 1), [Fails(rank)] if operation == "bring" else rows, asynchronous)
                saves.wait()
            except CheckpointError as error:
                message = str(error)
        left, is_kept = listed(folder), loaded(folder, STEP, ranks) == values(1, ranks.rank, ranks.size)
        saves.save(target(folder, 1), rows, asynchronous)
        saves.wait()
        is_saved = loaded(folder, STEP, ranks) == values(2, ranks.rank, ranks.size)
        results.append((message, left, is_kept, is_saved))
    with pytest.raises(CheckpointError, match=r"rank 1: .*must share the file system"):
        saves.save(target(f"{root}/own-{ranks.rank}", 1), rows)
    saves.close()
    ranks.close()
    return results


def test_trouble_on_one_rank_is_every_ranks(ranks, tmp_path):
    for results in ranks(one_fails, str(tmp_path)):
        for (operation, rank, _), (message, left, is_kept, is_saved) in zip(TROUBLE, results, strict=True):
            broken = r"\[Errno 5\] Input/output error: '/"
            reason = "ValueError: the state is lost" if operation == "bring" else broken
            assert re.search(rf"rank {rank}: {reason}", message), message
            assert left == ["latest", STEP]
            assert is_kept and is_saved, operation
    assert listed(tmp_path / "own-0") == []


def dies(root, operation, asynchronous):
    ranks = world()
    ranks.timeout = 3  # for this, not for coming here
    saves = Saves(ranks)
    saves.save(target(root, 1), [Rows(ranks.rank, ranks.size, 1)])
    last = ranks.rank == ranks.size - 1
    try:
        with refusing(operation if last else "nothing", act=lambda: os.kill(os.getpid(), 9)):
            saves.save(target(root, 2), [Rows(ranks.rank, ranks.size, 2)], asynchronous)
            saves.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        saves.close()
        ranks.close()
    return "saved"


@pytest.mark.parametrize(("size", "asynchronous"), [(2, True), pytest.param(4, False, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_missed(ranks, tmp_path, size, asynchronous):
    *alive, dead = ranks.fails(dies, str(tmp_path), "write", asynchronous, processes=size)
    assert dead.type == "SIGKILL"
    for message in alive:
        assert re.search(rf"was not written.*untouched: rank {size - 1}: no sign of life for 3 s", message), message
    assert listed(tmp_path) == ["latest", STEP]
    save(tmp_path, 2)
    assert loaded(tmp_path, "step-00000002") == values(2)


@pytest.mark.parametrize("kind", ["lock", "heartbeat"])
def test_one_owner_within_a_process(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(locks, "BEAT", 0.05)
    monkeypatch.setattr(locks, "PATIENCE", 30.0)  # who lives is seen to do so, however busy the machine
    storage = LocalStorage(tmp_path / "new" / "root")  # made for the claim

    def lock():
        if kind == "lock":
            return acquire(storage, "best")
        return Heartbeat(storage, lock_name("best"), "best", owner_record())

    acquire(storage, "other").release()
    first = lock()
    message = rf"best is being written by process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(CheckpointError, match=message):
        lock()
    first.release()
    assert storage.list() == []
    second = lock()
    assert second.previous == {}
    second.release()


def test_forked_children_do_not_keep_the_claim(tmp_path):
    storage = LocalStorage(tmp_path)
    lock = acquire(storage, "best")
    child = os.fork()
    if not child:
        signal.pause()
    try:
        lock.release()
        acquire(storage, "best").release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


MIB = 2**20


def run(seconds: float, step: float, stream: io.StringIO) -> str:
    """64 MiB in even steps over so many seconds; what was written."""
    clock_time = [100.0]
    with Progress("saving x", "saved x", stream=stream, clock=lambda: clock_time[0]) as tick:
        steps = round(seconds / step)
        expect(tick, 64 * MIB)
        for _ in range(steps):
            clock_time[0] += step
            tick(64 * MIB // steps)
    return stream.getvalue()


def test_there_is_a_line_every_ten_seconds():
    assert run(32, 0.5, io.StringIO()).splitlines() == [
        "saving x: 20.0 MiB of 64.0 MiB (31%), 2.0 MiB/s",
        "saving x: 40.0 MiB of 64.0 MiB (62%), 2.0 MiB/s",
        "saving x: 60.0 MiB of 64.0 MiB (94%), 2.0 MiB/s",
        "saved x: 64.0 MiB in 32.0 s, 2.0 MiB/s",
    ]
    assert run(4, 0.5, io.StringIO()) == "saved x: 64.0 MiB in 4.0 s, 16.0 MiB/s\n"


def progress_lines(folder: str) -> list[str]:
    """What a rank says of saves and loads when all are long."""
    progress.SILENT = 0.0
    output = io.StringIO()
    try:
        with redirect_stderr(output), Accelerator(strategy="fsdp") as acc:
            model = acc.prepare(torch.nn.Linear(100, 100))
            for asynchronous in (False, True):
                acc.save_state(folder, async_=asynchronous)
                acc._settle_saves()
                acc.load_state(folder)
        del model
    finally:
        progress.SILENT = 2.0
    return [line for line in output.getvalue().splitlines() if line.startswith(("sav", "load"))]


def test_an_accelerator_speaks_on_its_main_process(tmp_path, ranks):
    first, second = ranks(progress_lines, str(tmp_path / "x"))
    for line, verb in zip(first, ("saved", "loaded", "loaded"), strict=True):  # none of a save in the background
        assert re.match(rf"{verb} {re.escape(str(tmp_path))}/x \(rank 0 of 2\): [\d,.]+ KiB in", line)
    assert second == []


TENSORS = {
    "bools": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "bf16": torch.randn(5, 3).bfloat16(),
    "transposed": torch.randn(40, 30).t(),
    "every other": torch.randn(64, 6)[:, ::2],
    "conjugated": torch.randn(4, 4, dtype=torch.complex64).conj(),
    "fp8": torch.randn(9).to(torch.float8_e4m3fn),
    "large": torch.randn(300, 300),
}


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_of_the_moment_of_the_call(monkeypatch):
    for name, size in {"COPIED": 64, "SMALL": 1000, "LARGE": 50_000}.items():
        monkeypatch.setattr(saving, name, size)
    parts = {(f"model/{n}", full_box(tuple(t.shape))): t.to("cuda") for n, t in TENSORS.items()}
    (plan,) = plan_files([[LocalChunk(n, t.dtype, tuple(t.shape), box) for (n, box), t in parts.items()]]).files
    full = [parts[at].cpu() for at in plan.contents if parts[at].numel()]
    rows = [part.resolve_conj().contiguous().view(-1).view(torch.uint8) for part in full]
    right, image = plan.header + torch.cat(rows).numpy().tobytes(), HostCopy()
    for _ in range(3):
        content = image.copy([plan], parts)[plan.name]
        clones = {at: tensor.clone() for at, tensor in parts.items()}
        for tensor in parts.values():
            tensor.zero_()  # enqueued behind the copy
        image.wait()
        assert image.memory.is_pinned() and bytes(content) == right
        parts = clones
    assert b"".join(file_content(plan, parts)) == right
