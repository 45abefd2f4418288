"""Saving: what is saved is there, bit for bit; what replaces it does so at once; trouble on one rank is every rank's, and costs nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

from easymp import CheckpointError
from easymp.checkpoint import folders, storage_local
from easymp.checkpoint.folders import committed
from easymp.checkpoint.load import load_checkpoint as load
from easymp.checkpoint.save import Saves, Target
from easymp.checkpoint.storage_local import LocalStorage
from easymp.checkpoint.storage_remote import RemoteStorage

from .things import Fails, Rows, alone, loaded, save, target, values, world

STEP = "step-00000001"


def listed(root):
    return sorted(os.listdir(root))


@pytest.fixture(params=["swaps", "renames", "neither"])
def storage(request, monkeypatch):
    """What a file system may be able to do."""
    if request.param == "renames":
        monkeypatch.setattr(LocalStorage, "exchange", lambda self, one, other: False)
    if request.param == "neither":
        monkeypatch.setattr(LocalStorage, "renames", False)
    return request.param


def test_any_name_will_do_but_not_every_one(tmp_path):
    saves = Saves(world())
    saves.save(target(tmp_path, 7, "best"), [Rows(0, 1, 7)])
    assert listed(tmp_path) == ["best"]  # no step, so no hint
    assert loaded(tmp_path, "best") == values(7)
    for name in ("", "a/b", ".tmp-best", "best.save-2"):
        with pytest.raises(CheckpointError, match="is not a name for a checkpoint"):
            saves.save(target(tmp_path, 7)._replace(name=name), [])


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    saves = Saves(world())
    for name in ("file", "folder"):
        with pytest.raises(
            CheckpointError, match=rf"/{name} is there and is not a checkpoint .*pass another name"
        ):
            saves.save(target(tmp_path, 1, name), [Rows(0, 1, 1)])
    saves.save(target(tmp_path, 1, "empty"), [Rows(0, 1, 1)])
    assert loaded(tmp_path, "empty") == values(1)
    assert listed(tmp_path) == ["empty", "file", "folder"]
    assert (tmp_path / "folder" / "notes.txt").read_text() == "mine"


def test_retention_keeps_the_newest_and_touches_nothing_else(tmp_path, storage):
    for name in ("step-00000000", "mine", ".tmp-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    save(tmp_path, 9, step=9)
    saves = Saves(world())
    saves.save(target(tmp_path, 100, "best"), [Rows(0, 1, 9)])
    kept = []
    for step in (1, 2, 3, 4):
        saves.save(target(tmp_path, step), [Rows(0, 1, step)], limit=2)
        kept.append([it.folder.removeprefix("step-0000000") for it in committed(LocalStorage(tmp_path))])
    assert kept == [
        ["9", *more] for more in (["1"], ["1", "2"], ["1", "2", "3"], ["2", "3", "4"])
    ]  # 9: another run
    assert loaded(tmp_path, "best") == values(9)
    saves.save(target(tmp_path, 2), [Rows(0, 1, 2)], limit=0)  # a lower step than others, and saved last
    last = folders.current(LocalStorage(tmp_path), "step-00000002")
    assert listed(tmp_path) == [".tmp-mine", "best", "latest", "mine", "step-00000000", last, "step-00000009"]
    assert (tmp_path / "latest").read_text() == f"{last}\n"


@contextmanager
def broken(monkeypatch, operation, word):
    """That operation on a path with that word finds no space."""
    real = storage_local.do

    def do(what, path, call, *arguments):
        if what == operation and word in path:
            raise OSError(28, "No space left on device", path)
        return real(what, path, call, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(storage_local, "do", do)
        yield


def test_a_store_where_nothing_is_renamed(monkeypatch):
    place = f"memory://saves-{os.getpid()}"
    storage, saves = RemoteStorage(place), Saves(world())
    for step, seed, limit in ((1, 1, None), (1, 2, None), (2, 3, None), (3, 4, 1)):
        saves.save(Target(storage, f"step-{step:08d}", step, {}), [Rows(0, 1, seed)], seed % 2 == 0, limit)
    saves.wait()
    assert storage.list() == ["latest", "step-00000002", "step-00000003"]
    with broken(monkeypatch, "replace", "COMMIT"), pytest.raises(CheckpointError, match="was not written"):
        saves.save(Target(storage, "step-00000003", 3, {}), [Rows(0, 1, 5)])
    assert storage.list() == ["latest", "step-00000002", "step-00000003"]
    rows = Rows(0, 1, 0)
    load(alone(), storage, "step-00000003", [rows])
    assert rows.values() == values(4)


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_trouble_in_the_background_comes_back_once(tmp_path, monkeypatch, call):
    saves = Saves(world())
    with broken(monkeypatch, "create", "model"):
        saves.save(target(tmp_path, 1), [Rows(0, 1, 1)], asynchronous=True)
        saves._thread.join()
    arguments = (target(tmp_path, 2), [Rows(0, 1, 2)]) if call == "save" else ()
    with pytest.raises(CheckpointError, match=r"step-00000001 was not written.*No space left on device"):
        getattr(saves, call)(*arguments)
    saves.save(target(tmp_path, 2), [Rows(0, 1, 2)])
    saves.close()
    assert listed(tmp_path) == ["latest", "step-00000002"]


def test_a_run_that_fails_ends_by_its_own_error(tmp_path, monkeypatch):
    saves = Saves(world())
    with broken(monkeypatch, "create", "model"):
        try:
            saves.save(target(tmp_path, 1), [Rows(0, 1, 1)], asynchronous=True)
            raise ZeroDivisionError
        except ZeroDivisionError:
            saves.close()  # says nothing


ENDS = """
import sys, time
from easymp.checkpoint import storage_local
from tests.checkpoint.things import Rows, target, world
from easymp.checkpoint.save import Saves
from easymp.checkpoint.save import Target
real = storage_local.do
def slow(what, path, call, *arguments):
    time.sleep(0.02)
    return real(what, path, call, *arguments)
storage_local.do = slow
saves = Saves(world())
saves.save(target(sys.argv[1], 1), [Rows(0, 1, 1)], asynchronous=True)
if sys.argv[2] == "error":
    raise RuntimeError("the training failed")
"""


@pytest.mark.parametrize("end", ["error", pytest.param("end", marks=pytest.mark.slow)])
def test_the_end_of_the_process_waits(tmp_path, end):
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path), end],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == (end == "error"), done.stderr
    assert loaded(tmp_path, STEP) == values(1)


def _one_fails(root, where, asynchronous):
    ranks = world(timeout=20)
    saves, rows = Saves(ranks), Rows(ranks.rank, ranks.size, 1)
    saves.save(target(root, 1), [rows])
    real = storage_local.do

    def do(what, path, call, *arguments):
        if ranks.rank == where[1] and what == where[0] and ".tmp-" in path and not path.endswith(".lock"):
            raise OSError(5, "Input/output error", path)
        return real(what, path, call, *arguments)

    rows = Rows(ranks.rank, ranks.size, 2)
    storage_local.do = do
    said = ""
    try:
        saves.save(target(root, 1), [Fails(where[1])] if where[0] == "bring" else [rows], asynchronous)
        saves.wait()
    except CheckpointError as error:
        said = str(error)
    finally:
        storage_local.do = real
    left = listed(root)
    kept = loaded(root, STEP, ranks) == values(1, ranks.rank, ranks.size)
    saves.save(target(root, 1), [rows], asynchronous)
    saves.wait()
    again = loaded(root, STEP, ranks) == values(2, ranks.rank, ranks.size)
    saves.close()
    ranks.close()
    return said, left, kept, again


@pytest.mark.parametrize(
    ("operation", "rank", "asynchronous"),
    [
        ("bring", 1, False), ("create", 1, False), ("write", 1, True), ("fsync", 0, True), ("mkdir", 0, False), ("exchange", 0, False),
    ],
)  # fmt: skip
def test_trouble_on_one_rank_is_every_ranks(ranks, tmp_path, operation, rank, asynchronous):
    for said, left, kept, again in ranks(_one_fails, str(tmp_path), (operation, rank), asynchronous):
        reason = (
            "ValueError: the state is lost" if operation == "bring" else r"\[Errno 5\] Input/output error: '/"
        )
        assert re.search(rf"rank {rank}: {reason}", said), said
        assert left == ["latest", STEP]
        assert kept
        assert again


def _elsewhere(root):
    ranks = world(timeout=20)
    with pytest.raises(CheckpointError) as found:
        Saves(ranks).save(target(f"{root}/{ranks.rank}", 1), [Rows(ranks.rank, ranks.size, 1)])
    ranks.close()
    return str(found.value)


def test_ranks_that_do_not_share_a_folder_are_told_so(ranks, tmp_path):
    for said in ranks(_elsewhere, str(tmp_path)):
        assert "rank 1: " in said
        assert "must share the file system" in said
    assert listed(tmp_path / "0") == []


def _dies(root, when, asynchronous):
    ranks = world()
    ranks.timeout = 3  # for this, not for coming here
    saves = Saves(ranks)
    saves.save(target(root, 1), [Rows(ranks.rank, ranks.size, 1)])
    real = storage_local.do

    def do(what, path, call, *arguments):
        if what == when and ".tmp-" in path and ranks.rank == ranks.size - 1:
            os.kill(os.getpid(), 9)
        return real(what, path, call, *arguments)

    storage_local.do = do
    try:
        saves.save(target(root, 2), [Rows(ranks.rank, ranks.size, 2)], asynchronous)
        saves.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        storage_local.do = real
        saves.close()
        ranks.close()
    return "saved"


@pytest.mark.parametrize(
    ("processes", "asynchronous"), [(2, True), pytest.param(4, False, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_killed_is_missed(ranks, tmp_path, processes, asynchronous):
    *alive, dead = ranks.fails(_dies, str(tmp_path), "write", asynchronous, processes=processes)
    assert dead.type == "SIGKILL"
    for said in alive:
        assert re.search(
            rf"was not written.*untouched: rank {processes - 1}: no sign of life for 3 s", said
        ), said
    assert listed(tmp_path) == ["latest", STEP]
    save(tmp_path, 2)
    assert loaded(tmp_path, "step-00000002") == values(2)
