"""Local folders, beyond what every storage does: what the system may do to a file, and the order in which it is asked."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from easymp.checkpoint import blocks
from easymp.checkpoint.blocks import aligned, as_bytes
from easymp.checkpoint.manifest import BLOCK, COMMIT
from easymp.checkpoint.storage_local import LocalStorage
from easymp.errors import CheckpointError

from .test_storage import content, crcs

WAYS = pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
Do = Callable[..., Any]


def through(monkeypatch: pytest.MonkeyPatch, hook: Callable[..., Any]) -> None:
    """`hook(do, operation, path, call, *arguments)` instead of every call."""
    do = blocks.do
    monkeypatch.setattr(blocks, "do", lambda *call: hook(do, *call))


@pytest.fixture(autouse=True)
def _no_trial_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "past_is_quicker", {})


# -- writing -----------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("operation", ["create", "allocate", "write", "fsync", "close"])
@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT], ids=errno.errorcode.get
)
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
    with pytest.raises(OSError) as caught:
        LocalStorage(tmp_path, direct).put("file", [data], len(data))
    assert (caught.value.errno, caught.value.filename) == (code, f"{tmp_path}/file")


@WAYS
@pytest.mark.parametrize("most", [1_000_003, 4096 * 70, 4096 * 100 + 1])
def test_short_writes_go_on_where_they_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direct: bool, most: int
) -> None:
    def shorten(do: Do, name: str, path: str, call: Do, *arguments: Any) -> Any:
        if name == "write":
            descriptor, (view, *_), at = arguments
            return (
                do(name, path, os.pwrite, descriptor, view[:most], at)
                if len(view) > most
                else do(name, path, call, *arguments)
            )
        return do(name, path, call, *arguments)

    through(monkeypatch, shorten)
    data = content(BLOCK + 4096 * 3 + 17)
    storage = LocalStorage(tmp_path, direct)
    for name, parts in {"one": [data], "staged": [staged(data)]}.items():
        assert storage.put(name, parts, len(data)) == crcs(data)
        assert (tmp_path / name).read_bytes() == data


def staged(data: bytes) -> memoryview:
    view = as_bytes(aligned(len(data)))
    view[:] = data
    return view


def test_a_disk_that_writes_nothing_does_not_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    through(
        monkeypatch, lambda do, name, path, call, *rest: 0 if name == "write" else do(name, path, call, *rest)
    )
    with pytest.raises(OSError, match="wrote nothing"):
        LocalStorage(tmp_path).put("file", [b"abc"], 3)


@pytest.mark.parametrize("operation", ["open", "write"])
def test_without_o_direct_files_go_through_the_page_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, operation: str
) -> None:
    """Some file systems refuse to open a file so, others refuse our alignment."""
    (device,) = {os.stat(tmp_path).st_dev}
    direct = []

    def refuse(do: Do, name: str, path: str, call: Do, *arguments: Any) -> Any:
        found = do(name, path, call, *arguments) if operation != "open" or name != "open" else None
        if name == "open" and found is None:
            raise OSError(errno.EINVAL, "no O_DIRECT", path)
        if name == "open":
            direct.append(found)
        if name == "write" and arguments[0] in direct:
            raise OSError(errno.EINVAL, "another alignment, please", path)
        return found

    through(monkeypatch, refuse)
    monkeypatch.setattr(blocks, "TRIAL", BLOCK)
    data = content(3 * BLOCK + 1)
    assert LocalStorage(tmp_path).put("file", [data], len(data)) == crcs(data)
    assert (tmp_path / "file").read_bytes() == data
    assert blocks.past_is_quicker == {device: False}


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
    monkeypatch.setattr(blocks, "perf_counter", lambda: float(len(ticks)))
    monkeypatch.setattr(blocks, "ROUND", 1)
    monkeypatch.setattr(blocks, "TRIAL", 5 * BLOCK)
    data = content(5 * BLOCK)
    storage = LocalStorage(tmp_path)
    assert storage.put("small", [data[: 2 * BLOCK]], 2 * BLOCK) == crcs(data[: 2 * BLOCK])
    assert blocks.past_is_quicker == {}
    assert storage.put("file", [staged(data)], len(data)) == crcs(data)
    assert (tmp_path / "file").read_bytes() == data
    assert blocks.past_is_quicker == {os.stat(tmp_path).st_dev: slow == "through"}


@WAYS
def test_the_order_in_which_a_file_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direct: bool
) -> None:
    said = []
    through(monkeypatch, lambda do, name, *call: (said.append(name), do(name, *call))[1])
    data = content(2 * BLOCK)
    LocalStorage(tmp_path, direct).put("file", [data], len(data))
    first = ["create", "allocate", "open"] if direct else ["create", "allocate"]
    last = ["fsync", "close", "close"] if direct else ["fsync", "close"]
    assert said[: len(first)] == first and said[-len(last) :] == last
    assert set(said[len(first) : -len(last)]) == {"write"}


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
        ("pipe", "no regular"),
        ("real", "no reg"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            storage.get(name, 10)
        with pytest.raises(CheckpointError, match=why):
            storage.fetch(name, 3, crcs(b"abc"), [(0, memoryview(bytearray(3)))])
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


def test_a_file_that_shrinks_while_it_is_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = content(2 * BLOCK)
    storage = LocalStorage(tmp_path)
    checksums = storage.put("file", [data], len(data))

    def shrink(do: Do, name: str, path: str, *call: Any) -> Any:
        if name == "read":
            os.truncate(path, BLOCK // 2 + 5)
        return do(name, path, *call)

    through(monkeypatch, shrink)
    with pytest.raises(CheckpointError, match=r"file: ends at byte \d+ while it is read"):
        storage.fetch("file", len(data), checksums, [(0, memoryview(bytearray(len(data))))])


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
    storage.fetch("file", len(data), checksums, wanted)
    assert all(view == data[at : at + len(view)] for at, view in wanted)


def test_a_disk_that_cannot_be_read_is_an_error_with_the_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(do: Do, name: str, path: str, call: Do, *arguments: Any) -> Any:
        def act(*_: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        return do(name, path, act if name == "read" else call, *arguments)

    storage = LocalStorage(tmp_path)
    checksums = storage.put("file", [b"abc"], 3)
    through(monkeypatch, fail)
    with pytest.raises(OSError, match=r"Input/output error.*file"):
        storage.verify("file", 3, checksums)


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 2**20, BLOCK - 1, BLOCK, BLOCK + 99])
def test_every_flipped_bit_is_found(tmp_path: Path, at: int) -> None:
    data = content(BLOCK + 100)
    storage = LocalStorage(tmp_path)
    checksums = storage.put("file", [data], len(data))
    with open(tmp_path / "file", "r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 64]))
    with pytest.raises(CheckpointError, match=f"block {at // BLOCK} "):
        storage.verify("file", len(data), checksums)


# -- names -------------------------------------------------------------------------------------------------------------


def test_folders_above_are_made_and_are_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = []
    through(monkeypatch, lambda do, name, path, *call: (said.append((name, path)), do(name, path, *call))[1])
    storage = LocalStorage(tmp_path / "a" / "b")
    storage.make("step")
    a, b = f"{tmp_path}/a", f"{tmp_path}/a/b"
    assert [s for s in said if s[0] in blocks.CHANGES] == [
        ("mkdir", a), ("fsync directory", str(tmp_path)), ("mkdir", b), ("fsync directory", a), ("mkdir", f"{b}/step")
    ]  # fmt: skip
    with pytest.raises(FileExistsError):
        storage.make("step")


def test_nothing_is_renamed_over(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for folder in ("one", "empty"):
        storage.make(folder)
    storage.put("one/file", [b"1"], 1)
    with pytest.raises(FileExistsError):
        storage.rename("one", "empty")
    storage.rename("one", "two")
    assert storage.list() == ["empty", "two"] and storage.get("two/file", 1) == b"1"
    with pytest.raises(FileNotFoundError):
        storage.rename("one", "three")


def test_two_folders_swap_names(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for folder in ("one", "two"):
        storage.make(folder)
        storage.put(f"{folder}/{folder}", [b"1"], 1)
    swapped = storage.exchange("one", "two")
    assert [storage.list("one"), storage.list("two")] == (
        [["two"], ["one"]] if swapped else [["one"], ["two"]]
    )
    if not swapped:
        return  # it says so, and has changed nothing: some file systems cannot
    with pytest.raises(FileNotFoundError):
        storage.exchange("one", "three")


def test_commit_is_gone_for_good_before_the_rest_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    storage = LocalStorage(tmp_path)
    storage.make("step/inner")
    for name in ("A", COMMIT, "inner/z"):
        storage.put(f"step/{name}", [b"1"], 1)
    (tmp_path / "step" / "link").symlink_to(tmp_path)
    said = []
    through(
        monkeypatch,
        lambda do, name, path, *call: (said.append((name, Path(path).name)), do(name, path, *call))[1],
    )
    storage.remove("step")
    assert [s for s in said if s[0] in blocks.CHANGES] == [
        ("unlink", COMMIT), ("fsync directory", "step"),
        ("unlink", "A"), ("unlink", "z"), ("rmdir", "inner"), ("unlink", "link"), ("rmdir", "step"),
    ]  # fmt: skip
    assert tmp_path.is_dir()


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "replace"])
def test_a_replacement_that_fails_leaves_the_old_file_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, operation: str
) -> None:
    storage = LocalStorage(tmp_path)
    storage.replace("latest", b"old")

    def fail(do: Do, name: str, path: str, *call: Any) -> Any:
        if name == operation:
            raise OSError(errno.ENOSPC, "full", path)
        return do(name, path, *call)

    with monkeypatch.context() as patch:
        through(patch, fail)
        with pytest.raises(OSError, match="full"):
            storage.replace("latest", b"new")
    assert storage.list() == ["latest"] and storage.get("latest", 9) == b"old"


def test_what_a_killed_process_left_of_a_replacement_goes_in_time(tmp_path: Path) -> None:
    for name, age in {".new-latest-0": 7200, ".new-latest-1": 10, ".new-other-2": 7200}.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, times=(time.time() - age,) * 2)
    storage = LocalStorage(tmp_path)
    storage.replace("latest", b"new")
    assert storage.list() == [".new-latest-1", ".new-other-2", "latest"]


def test_a_relative_place_stays_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("runs")
    storage.make("step")
    storage.replace("latest", b"x")
    assert sorted(os.listdir(tmp_path / "runs")) == ["latest", "step"]
