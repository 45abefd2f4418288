"""The newest stay, and nothing goes that may be somebody's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from easymp.checkpoint import list_checkpoints, prune, verify
from easymp.checkpoint.manifest import COMMIT
from easymp.checkpoint.storage_local import LocalStorage

from .samples import lineage_of, rewrite

OF_ONE, OF_TWO = "step-00000002", "step-00000003"
LEFT = ".tmp-step-00000009-0123abcd"


@pytest.fixture
def run(root: Path) -> Path:
    """Steps 2 to 6 committed, 7 not; a checkpoint of another name; what a dead writer left of step 9; a folder of the user's."""
    for name in ("step-00000004", "step-00000005", "step-00000006", "step-00000007"):
        shutil.copytree(root / OF_ONE, root / name)
        rewrite(root / name, lineage_of(root / OF_ONE), written=f"2999-01-01T00:00:0{name[-1]}+00:00")
    for name in ("best", LEFT):
        shutil.copytree(root / OF_ONE, root / name)
    for name in ("step-00000007", LEFT):
        (root / name / COMMIT).unlink()
    (root / "notes").mkdir()
    return root


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {"latest"}


def test_the_newest_committed_ones_stay(run: Path) -> None:
    before = names(run)
    found = prune(run, keep=2)
    assert found.kept == ("step-00000006", "step-00000005")
    assert found.removed == (OF_ONE, OF_TWO, "step-00000004")
    assert (found.left_over, found.busy) == ((LEFT,), ())
    assert names(run) == before - {*found.removed, LEFT}
    assert all(verify(run / name) == [] for name in (*found.kept, "best"))
    assert next(e.name for e in list_checkpoints(run) if e.newest) == "step-00000006"
    assert prune(run, keep=2).removed == ()


def test_a_dry_run_says_the_same_and_removes_nothing(run: Path) -> None:
    before = {path.relative_to(run) for path in run.rglob("*")}
    said = prune(run, keep=1, dry_run=True)
    assert {path.relative_to(run) for path in run.rglob("*")} == before
    sizes = {name: sum(f.stat().st_size for f in (run / name).iterdir()) for name in (*said.removed, LEFT)}
    assert said.size == sum(sizes.values()) > 0
    assert prune(run, keep=1) == said


def test_what_is_being_written_is_left_alone(run: Path) -> None:
    storage = LocalStorage(run)
    held = [storage.claim(checkpoint) for checkpoint in (OF_ONE, "step-00000009")]
    try:
        found = prune(run, keep=3)
    finally:
        for claim in held:
            claim.release()
    assert set(found.busy) == {OF_ONE, "step-00000009"}
    assert (found.removed, found.left_over) == ((OF_TWO,), ())
    assert {OF_ONE, LEFT} <= names(run)
    assert prune(run, keep=3).removed == (OF_ONE,)
