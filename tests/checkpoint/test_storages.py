"""Which storage a path or URL opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from easymp.checkpoint.folders import open_storage
from easymp.checkpoint.storage_local import LocalStorage
from easymp.checkpoint.storage_remote import RemoteStorage
from easymp.errors import CheckpointError


@pytest.mark.parametrize(
    ("place", "kind", "path"),
    [
        ("/a/b", LocalStorage, "/a/b"),
        ("runs/x", LocalStorage, "runs/x"),
        (Path("/a/b"), LocalStorage, "/a/b"),
        ("odd/x://y", LocalStorage, "odd/x://y"),
        ("file:///a/b c", LocalStorage, "/a/b c"),
        ("file://localhost/a", LocalStorage, "/a"),
        ("memory://a/b", RemoteStorage, "memory://a/b"),
    ],
)
def test_a_place_opens_its_storage(place: str, kind: type, path: str) -> None:
    storage = open_storage(place)
    assert (type(storage), storage.place, storage.renames) == (kind, path, kind is LocalStorage)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("file://elsewhere/a", "names a machine, not a folder: write file:///"),
        ("nowhere://a", "Protocol not known: nowhere.*Install the package"),
    ],
)
def test_a_place_that_nobody_knows_is_refused(place: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_storage(place)
