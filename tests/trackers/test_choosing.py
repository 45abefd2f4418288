"""`log_with`: which trackers it means, and what is said of those that are not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from easymp import GeneralTracker, LoggerType
from easymp.errors import SettingError
from easymp.trackers import TRACKERS, choose, words_of

PACKAGES = {name: entry.package for name, entry in TRACKERS.items() if entry.package}


class Mine(GeneralTracker):
    name = "Mine"


def names(log_with: object) -> list[str]:
    words, own = words_of(log_with)
    return choose(words or "jsonl", "asked for", own)


def test_names_members_and_own_ones() -> None:
    assert (
        names("jsonl")
        == names(" JSONL ")
        == names([LoggerType.JSONL])
        == names(LoggerType.JSONL)
        == ["jsonl"]
    )
    assert names(["jsonl", Mine(), "jsonl"]) == ["jsonl", "mine"]
    assert names(Mine) == ["mine"]
    assert names("none") == names([]) == []
    assert words_of(None) == (None, {})


def test_all_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)
    assert names("all") == ["jsonl"]
    assert names(["all", Mine()]) == ["jsonl", "mine"]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(
        SettingError, match=rf"needs the package {PACKAGES[name]}, .* pip install 'easymp\[{name}\]'"
    ):
        names(name)


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # as wandb itself makes one
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(SettingError, match="needs the package wandb"):
        names("wandb")


def test_every_tracker_is_there() -> None:
    assert {kind.value for kind in LoggerType} >= set(TRACKERS)
    assert set(PACKAGES) == set(TRACKERS) - {"jsonl"}


@pytest.mark.parametrize(
    ("log_with", "words"),
    [
        ("tensorbord", r"\(asked for\): 'tensorbord' is no tracker, did you mean 'tensorboard'"),
        (LoggerType.AIM, "'aim' is no tracker.* or pass an object of your own"),
        (object(), r"has no name and no start and no log and no finish. Pass a name"),
        ([Mine(), Mine()], "two trackers called 'Mine'"),
        (7, "is no tracker"),
    ],
)
def test_what_is_no_tracker(log_with: object, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        names(log_with)
