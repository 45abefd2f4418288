"""Local folders, beyond what every storage does: what the system may do to a file, and the order in which it is asked."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from easymp import CheckpointError
from easymp.checkpoint import storage_local
from easymp.checkpoint.manifest import BLOCK
from easymp.checkpoint.storage import SourceFile
from easymp.checkpoint.storage_local import LocalStorage

from .test_storage import content, crcs

WAYS = pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
Do = Callable[..., Any]


def through(monkeypatch: pytest.MonkeyPatch, hook: Callable[..., Any]) -> None:
    """`hook(do, operation, path, call, *arguments)` instead of every call."""
    do = storage_local.do
    monkeypatch.setattr(storage_local, "do", lambda *call: hook(do, *call))


@pytest.fixture(autouse=True)
def _no_trial_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_local, "past_is_quicker", {})


@WAYS
@pytest.mark.parametrize("operation", ["create", "allocate", "write", "fsync", "close"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_what_the_system_refuses_is_an_error_with_its_name(monkeypatch, tmp_path, direct, operation, code):
    def refuse(do: Do, name: str, path: str, call: Do, *arguments: Any) -> Any:
        def act(*_: Any) -> None:
            if name == "close":
                call(*arguments)
            raise OSError(code, os.strerror(code))

        return do(name, path, act if name == operation else call, *arguments)

    through(monkeypatch, refuse)
    data = content(2 * BLOCK + 5)
    monkeypatch.setattr(storage_local, "past_is_quicker", {os.stat(tmp_path).st_dev: direct})
    with pytest.raises(OSError) as caught:
        LocalStorage(tmp_path).put("file", [data], len(data))
    assert (caught.value.errno, caught.value.filename) == (code, f"{tmp_path}/file")


def test_links_pipes_and_folders_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    storage = LocalStorage(tmp_path)
    for name, why in [
        ("link", "a link, "),
        ("linked/file", "a link"),
        ("pipe", "not a regular"),
        ("real", "not a reg"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            storage.get(name, 10)
        with pytest.raises(CheckpointError, match=why):
            SourceFile(storage, name, 3, crcs(b"abc")).fetch([(0, memoryview(bytearray(3)))])
    names = ("link", "pipe", "real", "linked/file", "real/file")
    assert [storage.size(name) for name in names] == [None] * 4 + [3]
    found = [storage.list(name) for name in ("link", "linked", "linked/real", "real")]
    assert found == [[], [], [], ["file"]]
    assert LocalStorage(tmp_path / "linked").list() == ["file"], "what the user names may be a link"
    for name in ("linked/file", "linked/other"):
        with pytest.raises(CheckpointError, match="a link"):
            storage.put(name, [b"abc"], 3)


def test_short_reads_go_on_where_they_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = content(BLOCK + 100)
    storage = LocalStorage(tmp_path)
    checksums = storage.put("file", [data], len(data))

    def shorten(do: Do, name: str, path: str, call: Do, *arguments: Any) -> Any:
        if name == "read":
            descriptor, views, at = arguments
            return do(name, path, call, descriptor, [views[0][:60_001]], at)
        return do(name, path, call, *arguments)

    through(monkeypatch, shorten)
    wanted = [(at, memoryview(bytearray(70_000))) for at in range(3, BLOCK, 100_000)]
    SourceFile(storage, "file", len(data), checksums).fetch(wanted)
    assert all(view == data[at : at + len(view)] for at, view in wanted)
