"""`easymp.checkpoint`.

Checkpoints in a folder or at a URL are listed, inspected, verified and pruned; damage is named.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from easymp import CheckpointError, checkpoint
from easymp.checkpoint.folders import open_checkpoint
from easymp.checkpoint.locks import acquire
from easymp.checkpoint.storage import LocalStorage

from .samples import lineage_of, rewrite

OF_ONE, OF_TWO = "step-00000002", "step-00000003"
FIRST = "model-00001-of-00002.safetensors"
COMMIT, MANIFEST = "COMMIT", "manifest.json"
LEFT = ".tmp-step-00000009-0123abcd"


@pytest.fixture
def bucket(samples: Path) -> Iterator[str]:
    """The samples, in a store in memory."""
    memory = fsspec.filesystem("memory")
    memory.put(f"{samples}/", "/bucket/runs/", recursive=True)
    yield "memory://bucket/runs"
    memory.rm("/bucket", recursive=True)


def content_of(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.iterdir() if f.name not in (MANIFEST, COMMIT))


def test_checkpoints_are_listed_in_order_and_read_whole_here_and_at_a_url(samples, bucket):
    one, second = entries = checkpoint.list_checkpoints(samples)
    facts = (one.name, one.step, one.world_size, one.committed, one.why, one.newest)
    assert facts == (OF_ONE, 2, 1, True, "", False)
    expected = replace(one, name=OF_TWO, step=3, world_size=2, newest=True, parent=OF_ONE)
    assert replace(second, size=0, written=None) == replace(expected, size=0, written=None)
    for entry in entries:
        read: list[int] = []
        folder = samples / entry.name
        assert checkpoint.verify(folder, read.append) == checkpoint.verify(f"{bucket}/{entry.name}") == []
        assert entry.size == sum(read) == content_of(folder)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", entry.written or "")
        manifest = open_checkpoint(folder).manifest
        assert len(manifest.tensors) > 100 and open_checkpoint(f"{bucket}/{entry.name}").manifest == manifest
    assert checkpoint.list_checkpoints(bucket) == entries
    assert checkpoint.inspect(f"{bucket}/{OF_TWO}").tensors == checkpoint.inspect(samples / OF_TWO).tensors
    assert checkpoint.list_checkpoints(samples / "nothing") == []
    with pytest.raises(CheckpointError, match="is itself a checkpoint"):
        checkpoint.list_checkpoints(samples / OF_ONE)


WHY = [
    (COMMIT, None, "^not committed: COMMIT is missing"),
    (MANIFEST, None, "^manifest.json is missing"),
    (MANIFEST, lambda text: text + b" ", "was changed"),
    (MANIFEST, lambda text: text[:100], "was changed"),
    (COMMIT, lambda text: b"", "was changed"),
]


def test_the_list_says_why_a_folder_does_not_count(root):
    for name, change, message in WHY:
        file = root / OF_TWO / name
        content = file.read_bytes()
        file.write_bytes(change(content)) if change else file.unlink()
        wrong, intact = checkpoint.list_checkpoints(root)
        assert (wrong.name, wrong.committed, wrong.step) == (OF_TWO, False, None)
        assert (intact.name, intact.newest) == (OF_ONE, True)
        assert re.search(message, wrong.why) and wrong.size > 10_000
        file.write_bytes(content)


def test_the_list_tells_leftovers_and_repeated_saves_apart(root):
    (root / OF_ONE).rename(root / ".tmp-step-00000002-01234567")
    (root / ".tmp-step-00000002-01234567" / COMMIT).unlink()
    (root / "runs").mkdir()
    (root / "notes.txt").write_text("not mine")
    shutil.copytree(root / OF_TWO, root / f"{OF_TWO}.save-2")  # where folders cannot swap names
    left, *committed = checkpoint.list_checkpoints(root)
    assert left.why.startswith("left over from a save that did not end (not committed") and not left.committed
    states = {entry.name: (entry.why, entry.newest) for entry in committed}
    assert states == {OF_TWO: (f"replaced by {OF_TWO}.save-2", False), f"{OF_TWO}.save-2": ("", True)}
    lock = acquire(LocalStorage(root), OF_ONE)
    left, *_ = checkpoint.list_checkpoints(root)
    lock.release()
    assert left.why.startswith("being written, or left over from a save that did not end")


@pytest.fixture
def run(root: Path) -> Path:
    """Steps 2 to 6 committed, 7 not.

    A checkpoint of another name; leftovers of a dead writer of step 9; a folder of the user's.
    """
    for step in (4, 5, 6, 7):
        folder = root / f"step-0000000{step}"
        shutil.copytree(root / OF_ONE, folder)
        rewrite(folder, lineage_of(root / OF_ONE), written=f"2999-01-01T00:00:0{step}+00:00")
    for name in ("best", LEFT):
        shutil.copytree(root / OF_ONE, root / name)
    for name in ("step-00000007", LEFT):
        (root / name / COMMIT).unlink()
    (root / "notes").mkdir()
    return root


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {"latest"}


def test_prune_keeps_the_newest_and_a_dry_run_says_the_same(run):
    before, files = names(run), {path.relative_to(run) for path in run.rglob("*")}
    dry = checkpoint.prune(run, keep=2, dry_run=True)
    assert {path.relative_to(run) for path in run.rglob("*")} == files
    gone = [file for name in (*dry.removed, LEFT) for file in (run / name).iterdir()]
    assert dry.size == sum(file.stat().st_size for file in gone) > 0
    pruned = checkpoint.prune(run, keep=2)
    assert pruned == dry and pruned.kept == ("step-00000006", "step-00000005")
    assert pruned.removed == (OF_ONE, OF_TWO, "step-00000004")
    assert (pruned.left_over, pruned.busy) == ((LEFT,), ())
    assert names(run) == before - {*pruned.removed, LEFT}
    assert all(checkpoint.verify(run / name) == [] for name in (*pruned.kept, "best"))
    assert checkpoint.prune(run, keep=2).removed == ()


def test_prune_leaves_a_live_writer_alone(run):
    locks = [acquire(LocalStorage(run), step) for step in (OF_ONE, "step-00000009")]
    try:
        pruned = checkpoint.prune(run, keep=3)
    finally:
        for lock in locks:
            lock.release()
    assert set(pruned.busy) == {OF_ONE, "step-00000009"}
    assert (pruned.removed, pruned.left_over) == ((OF_TWO,), ()) and {OF_ONE, LEFT} <= names(run)
    assert checkpoint.prune(run, keep=3).removed == (OF_ONE,)


def test_prune_at_a_url_removes_a_dead_writers_folder_only(bucket):
    memory = fsspec.filesystem("memory")
    memory.rm(f"/bucket/runs/{OF_ONE}/COMMIT")
    memory.pipe_file(f"/bucket/runs/step-00000009/{FIRST}", b"half")
    dead = {"host": socket.gethostname(), "pid": 2**31 - 1, "folder": "step-00000009"}
    memory.pipe_file("/bucket/runs/.tmp-step-00000009.lock", json.dumps(dead).encode())
    pruned = checkpoint.prune(bucket, keep=1)
    assert (pruned.removed, pruned.left_over, pruned.busy) == ((), ("step-00000009",), ())
    memory.copy(f"/bucket/runs/{OF_TWO}", "/bucket/runs/step-00000004", recursive=True)
    pruned = checkpoint.prune(bucket, keep=1)
    assert (pruned.kept, pruned.removed) == (("step-00000004",), (OF_TWO,))
    assert [e.name for e in checkpoint.list_checkpoints(bucket)] == [OF_ONE, "step-00000004"]
