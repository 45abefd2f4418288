"""Two writers of one checkpoint: the second is refused by name, and the dead own nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from easymp import CheckpointError
from easymp.checkpoint import commit
from easymp.checkpoint.commit import Heartbeat, claim, lock_of, words
from easymp.checkpoint.storage_local import LocalStorage

HOLD = """
import sys
from easymp.checkpoint.commit import Heartbeat, claim, lock_of, words
from easymp.checkpoint.storage_local import LocalStorage
storage = LocalStorage(sys.argv[1])
said = words(folder="mine")
held = claim(storage, "best", "mine") if sys.argv[2] == "lock" else Heartbeat(storage, lock_of("best"), "best", said)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Starts another process that claims ``best`` and dies with the test."""
    running = []

    def start(kind):
        command = [sys.executable, "-c", HOLD, str(tmp_path), kind]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(commit, "BEAT", 0.05)
    monkeypatch.setattr(commit, "PATIENCE", 30.0)  # who lives is seen to do so, however busy the machine


def take(storage, kind):
    return claim(storage, "best") if kind == "lock" else Heartbeat(storage, lock_of("best"), "best", words())


@pytest.mark.parametrize("kind", ["lock", "marker"])
def test_one_owner_within_a_process(tmp_path, kind, quick):
    storage = LocalStorage(tmp_path / "new" / "root")  # made for the claim
    claim(storage, "other").release()
    first = take(storage, kind)
    with pytest.raises(
        CheckpointError, match=rf"best is being written by process {os.getpid()} on {socket.gethostname()}"
    ):
        take(storage, kind)
    first.release()
    assert storage.list() == []
    second = take(storage, kind)
    assert second.left == {}
    second.release()


def test_another_process_is_refused_by_name_and_owns_nothing_once_killed(tmp_path, holder):
    storage, other = LocalStorage(tmp_path), holder("lock")
    with pytest.raises(
        CheckpointError,
        match=rf"process {other.pid} on {socket.gethostname()} since 2.* s\), and two writers",
    ):
        take(storage, "lock")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(CheckpointError, match=rf"is gone, remove {tmp_path}/.tmp-best.lock"):
            take(storage, "lock")
    other.send_signal(signal.SIGKILL)
    other.wait()
    held = take(storage, "lock")
    assert held.left["folder"] == "mine"
    held.release()
    assert storage.list() == []


def test_another_process_with_the_number_of_a_dead_one_is_not_its_owner(tmp_path):
    storage = LocalStorage(tmp_path)
    dead = {**json.loads(words(folder="mine")), "started": "1"}  # this process's number, long ago
    storage.replace(lock_of("best"), json.dumps(dead).encode())
    assert commit.abandoned(storage, lock_of("best")) == (commit.started(os.getpid()) != "")
    storage.replace(lock_of("best"), json.dumps({**dead, "space": "another container"}).encode())
    assert not commit.abandoned(storage, lock_of("best"))


def test_forked_children_do_not_keep_the_claim(tmp_path):
    storage = LocalStorage(tmp_path)
    held = claim(storage, "best")
    child = os.fork()
    if not child:
        signal.pause()
    try:
        held.release()
        claim(storage, "best").release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_of_many_at_once_one_has_it(tmp_path):
    storage, got, refused = LocalStorage(tmp_path), [], []
    start = threading.Barrier(8)

    def attempt():
        start.wait()
        try:
            got.append(claim(storage, "best"))
        except CheckpointError:
            refused.append(1)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)
    got[0].release()
