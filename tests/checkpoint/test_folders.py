"""Names of checkpoints' folders, and the storage that a path or URL opens."""

from __future__ import annotations

import pytest

from easymp import CheckpointError
from easymp.checkpoint import commit, folders
from easymp.checkpoint.folders import open_storage


@pytest.mark.parametrize(
    ("name", "step", "checkpoint", "save", "writing"),
    [
        ("step-00000100", 100, "step-00000100", 1, None),
        ("step-00000100.save-12", 100, "step-00000100", 12, None),
        ("step-00000100.line-1c9e02d7", 100, "step-00000100.line-1c9e02d7", 1, None),
        ("step-00000100.line-0-2.save-3", 100, "step-00000100.line-0-2", 3, None),
        ("best", None, "best", 1, None),
        ("step-100", None, "step-100", 1, None),
        (".tmp-step-00000100-5f0c3a9e", None, ".tmp-step-00000100-5f0c3a9e", 1, "step-00000100"),
        (".tmp-a-b-5f0c3a9e", None, ".tmp-a-b-5f0c3a9e", 1, "a-b"),
        (".tmp-best.lock", None, ".tmp-best.lock", 1, "best"),
    ],
)
def test_names(name, step, checkpoint, save, writing):
    assert folders.step_of(name) == step
    assert folders.checkpoint_of(name) == checkpoint
    assert folders.save_of(name) == save
    assert folders.writing(name) == writing


def test_a_name_leads_there_and_back():
    assert folders.step_of(folders.step_folder(7)) == 7
    assert folders.writing(folders.temporary("best")) == "best"
    assert folders.writing(commit.lock_of("best")) == "best"
    assert folders.next_save([], "best") == "best"
    assert folders.aside(["a"], "a", "0") == "a.line-0"
    assert folders.aside(["a", "a.line-0.save-2"], "a", "0") == "a.line-0-2"
    assert (
        folders.next_save(["best", "best.save-9", "best.save-10", "other.save-11"], "best") == "best.save-11"
    )


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("file://elsewhere/a", "names a machine, not a folder: write file:///"),
        ("nowhere://a", "Protocol not known: nowhere.*Install the package"),
    ],
)
def test_an_unknown_place_is_refused(place: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_storage(place)
