"""Which checkpoints there are, and what is said of what is none."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from easymp import CheckpointError
from easymp.checkpoint import list_checkpoints
from easymp.checkpoint.manifest import COMMIT, MANIFEST
from easymp.checkpoint.storage_local import LocalStorage

OF_ONE, OF_TWO = "step-00000002", "step-00000003"


def test_good_ones_by_step_and_the_newest(samples: Path) -> None:
    one, two = list_checkpoints(samples)
    assert [one.name, one.step, one.world_size, one.committed, one.why, one.newest] == [
        OF_ONE,
        2,
        1,
        True,
        "",
        False,
    ]
    assert replace(two, size=0, written=None) == replace(
        one, name=OF_TWO, step=3, world_size=2, newest=True, size=0, written=None, parent=OF_ONE
    )
    for entry in (one, two):
        files = [
            f.stat().st_size for f in (samples / entry.name).iterdir() if f.name not in (MANIFEST, COMMIT)
        ]
        assert entry.size == sum(files)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", entry.written)


@pytest.mark.parametrize(
    ("name", "change", "committed", "words"),
    [
        (COMMIT, None, False, "^not committed: COMMIT is missing"),
        (MANIFEST, None, False, "^manifest.json is missing"),
        (MANIFEST, lambda text: text + b" ", False, "was changed"),
        (MANIFEST, lambda text: text[:100], False, "was changed"),
        (COMMIT, lambda text: b"", False, "was changed"),
    ],
)
def test_a_damaged_one_does_not_count(
    root: Path, name: str, change: object, committed: bool, words: str
) -> None:
    file = root / OF_TWO / name
    file.write_bytes(change(file.read_bytes())) if callable(change) else file.unlink()
    wrong, good = list_checkpoints(root)
    assert (wrong.name, wrong.committed, wrong.step) == (OF_TWO, committed, None)
    assert re.search(words, wrong.why)
    assert wrong.size > 10_000 and wrong.written
    assert (good.name, good.newest) == (OF_ONE, True)


def test_what_a_save_left_is_told_apart(root: Path) -> None:
    (root / OF_ONE).rename(root / ".tmp-step-00000002-01234567")
    (root / ".tmp-step-00000002-01234567" / COMMIT).unlink()
    (root / "runs").mkdir()
    (root / "notes.txt").write_text("not mine")
    left, good = list_checkpoints(root)
    assert (left.name, left.committed) == (".tmp-step-00000002-01234567", False)
    assert left.why.startswith("left over from a save that did not end (not committed")
    assert good.name == OF_TWO
    claim = LocalStorage(root).claim(OF_ONE)
    left, good = list_checkpoints(root)
    claim.release()
    assert left.why.startswith("being written, or left over from a save that did not end")


def test_of_several_saves_of_a_step_one_counts(root: Path) -> None:
    """As where folders cannot swap names."""
    shutil.copytree(root / OF_TWO, root / f"{OF_TWO}.save-2")
    said = {entry.name: (entry.why, entry.newest) for entry in list_checkpoints(root)}
    assert said == {
        OF_ONE: ("", False),
        OF_TWO: (f"replaced by {OF_TWO}.save-2", False),
        f"{OF_TWO}.save-2": ("", True),
    }


def test_nothing_is_an_empty_list_and_a_checkpoint_is_no_folder_of_them(root: Path) -> None:
    assert list_checkpoints(root / "nothing") == []
    with pytest.raises(CheckpointError, match="is itself a checkpoint"):
        list_checkpoints(root / OF_ONE)
    assert LocalStorage(root).list()  # nothing was removed
