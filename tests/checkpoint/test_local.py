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
from easymp.checkpoint.storage import SourceFile, aligned, as_bytes
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


# -- writing -----------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("operation", ["create", "allocate", "write", "fsync", "close"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_what_the_system_refuses_is_an_error_with_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direct: bool, operation: str, code: int
) -> None:
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


def staged(data: bytes) -> memoryview:
    view = as_bytes(aligned(len(data)))
    view[:] = data
    return view


@pytest.mark.parametrize("slow", ["past", "through"])
def test_the_quicker_way_is_found_and_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: str
) -> None:
    """By a clock that only the writes of the slow way move on."""
    plain, ticks = [], []

    def count(do: Do, name: str, path: str, call: Do, *arguments: Any) -> Any:
        found = do(name, path, call, *arguments)
        if name == "create":
            plain.append(found)
        if name == "write" and (arguments[0] in plain) == (slow == "through"):
            ticks.append(1)
        return found

    through(monkeypatch, count)
    monkeypatch.setattr(storage_local, "perf_counter", lambda: float(len(ticks)))
    monkeypatch.setattr(storage_local, "ROUND", 1)
    monkeypatch.setattr(storage_local, "TRIAL", 5 * BLOCK)
    data = content(5 * BLOCK)
    storage = LocalStorage(tmp_path)
    assert storage.put("small", [data[: 2 * BLOCK]], 2 * BLOCK) == crcs(data[: 2 * BLOCK])
    assert storage_local.past_is_quicker == {}
    assert storage.put("file", [staged(data)], len(data)) == crcs(data)
    assert (tmp_path / "file").read_bytes() == data
    assert storage_local.past_is_quicker == {os.stat(tmp_path).st_dev: slow == "through"}


# -- reading -----------------------------------------------------------------------------------------------------------


def test_links_pipes_and_folders_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    storage = LocalStorage(tmp_path)
    for name, why in [
        ("link", "a link, and links are not followed"),
        ("linked/file", "a link"),
        ("pipe", "not a regular"),
        ("real", "not a reg"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            storage.get(name, 10)
        with pytest.raises(CheckpointError, match=why):
            SourceFile(storage, name, 3, crcs(b"abc")).fetch([(0, memoryview(bytearray(3)))])
    assert [storage.size(name) for name in ("link", "pipe", "real", "linked/file", "real/file")] == [
        None,
        None,
        None,
        None,
        3,
    ]
    assert [storage.list(name) for name in ("link", "linked", "linked/real", "real")] == [
        [],
        [],
        [],
        ["file"],
    ]
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
