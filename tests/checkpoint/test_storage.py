"""What every kind of storage does."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator

import fsspec
import pytest

from easymp import CheckpointError
from easymp.checkpoint import storage_local
from easymp.checkpoint.manifest import BLOCK, COMMIT
from easymp.checkpoint.storage import SourceFile, Storage, aligned, as_bytes
from easymp.checkpoint.storage_local import LocalStorage
from easymp.checkpoint.storage_remote import RemoteStorage

MEGABYTE = random.Random(0).randbytes(2**20 - 1)  # no period that fits a page
SIZES = [0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 12_345]


def content(size: int) -> bytes:
    return (MEGABYTE * (size // len(MEGABYTE) + 1))[:size]


def crcs(data: bytes) -> tuple[int, ...]:
    return tuple(zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))


KINDS = ["buffered", "direct", "memory", "fsspec", "s3"]


@pytest.fixture(params=KINDS)
def storage(request, tmp_path, monkeypatch):
    root = tmp_path / "root"
    match request.param:
        case "buffered" | "direct":
            monkeypatch.setattr(
                storage_local, "past_is_quicker", {os.stat(tmp_path).st_dev: request.param == "direct"}
            )
            yield LocalStorage(root)
        case "memory":
            yield RemoteStorage(f"memory://{root}")
            fsspec.filesystem("memory").store.clear()
        case "fsspec":
            root.mkdir()
            yield RemoteStorage(f"file://{root}")
        case "s3":
            yield RemoteStorage(f"{request.getfixturevalue('s3')}{root}")


@pytest.fixture
def folder(storage: Storage) -> str:
    storage.make("step-1")
    return "step-1"


def one(data: bytes) -> list[bytes | memoryview]:
    return [data]


def writable(data: bytes) -> list[bytes | memoryview]:
    return [memoryview(bytearray(data))]


def staged(data: bytes) -> list[bytes | memoryview]:
    view = as_bytes(aligned(len(data)))
    view[:] = data
    return [view[:4096], view[4096:]]


def many(data: bytes) -> Iterator[bytes | memoryview]:
    return (data[at : at + 7_777] for at in range(0, len(data), 7_777))


WHOLE = [(k, one, s) for k in KINDS for s in SIZES if k != "s3" or s in (0, 1, BLOCK + 1)]
PUTS = WHOLE + [(k, p, s) for k in KINDS[:-1] for p in (writable, staged, many) for s in (4096, SIZES[-1])]


@pytest.mark.parametrize(
    ("storage", "parts", "size"), PUTS, indirect=["storage"], ids=lambda x: getattr(x, "__name__", None)
)
def test_what_is_put_is_there_with_its_checksums(storage, folder, parts, size):
    data, told = content(size), []
    checksums = storage.put(f"{folder}/file", parts(data), size, told.append)
    assert checksums == crcs(data) and sum(told) == size
    assert storage.size(f"{folder}/file") == size and storage.head(f"{folder}/file", 100) == data[:100]
    SourceFile(storage, f"{folder}/file", size, checksums).verify()
    back = bytearray(size)
    SourceFile(storage, f"{folder}/file", size, checksums).fetch([(0, memoryview(back))])
    assert back == data


NEAR = pytest.mark.parametrize(
    "storage", KINDS[:-1], indirect=True
)  # megabytes take seconds with the S3 server


@NEAR
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("longest", [100, 5_000, 3_000_000])
def test_any_runs_are_fetched(storage: Storage, folder: str, longest: int, checked: bool) -> None:
    data = content(2 * BLOCK + 12_345)
    checksums = storage.put(f"{folder}/file", [data], len(data))
    dice, wanted, at = random.Random(longest), [], max(50, BLOCK - 1000 * longest)
    while at < len(data) and len(wanted) < 5_000:
        count = min(dice.randint(0, longest), len(data) - at)
        wanted.append((at, memoryview(bytearray(count))))
        at += count + dice.choice([0, dice.randint(0, 4 * longest)])
    told: list[int] = []
    SourceFile(storage, f"{folder}/file", len(data), checksums if checked else None).fetch(
        wanted, told.append
    )
    assert all(view == data[at : at + len(view)] for at, view in wanted)
    touched = {place // BLOCK for at, view in wanted if view for place in (at, at + len(view) - 1)}
    blocks = sum(min(BLOCK, len(data) - number * BLOCK) for number in touched)
    assert sum(told) == (blocks if checked else sum(len(view) for _, view in wanted))


@NEAR
def test_only_touched_blocks_are_read(storage: Storage, folder: str) -> None:
    data = content(3 * BLOCK)
    checksums = storage.put(f"{folder}/file", [data], len(data))
    wrong = (checksums[0], checksums[1] ^ 1, checksums[2])
    view, told = memoryview(bytearray(8)), []
    SourceFile(storage, f"{folder}/file", len(data), wrong).fetch([(BLOCK - 8, view)], told.append)
    assert view == data[BLOCK - 8 : BLOCK] and sum(told) == BLOCK
    SourceFile(storage, f"{folder}/file", len(data), wrong).fetch([])
    with pytest.raises(CheckpointError, match=r"file: block 1 \(from byte 16777216\) is not what was"):
        SourceFile(storage, f"{folder}/file", len(data), wrong).fetch([(BLOCK - 4, view)])
    with pytest.raises(CheckpointError, match="block 1 "):
        SourceFile(storage, f"{folder}/file", len(data), wrong).verify()


def test_a_file_that_is_held_is_the_same_when_it_is_read_again(storage: Storage, folder: str) -> None:
    (crc,) = storage.put(f"{folder}/file", [b"abc"], 3)
    with storage.held() as again:
        SourceFile(storage, f"{folder}/file", 3, (crc,)).verify()
        assert again == isinstance(storage, LocalStorage)
        if again:
            storage.remove(folder)
            found = bytearray(3)
            SourceFile(storage, f"{folder}/file", 3, (crc,)).fetch([(0, memoryview(found))])
            assert found == b"abc"
    if again:
        with pytest.raises(CheckpointError, match="no such file"):
            SourceFile(storage, f"{folder}/file", 3, (crc,)).verify()


def test_a_file_that_is_missing_or_of_another_size_is_refused(storage: Storage, folder: str) -> None:
    (crc,) = storage.put(f"{folder}/file", [b"abc"], 3)
    for size, checksums, why in [
        (4, (crc,), "3 bytes, and 4 were"),
        (2, (crc,), "3 bytes, and 2 were"),
        (3, (), "0 checksums for 1"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            SourceFile(storage, f"{folder}/file", size, checksums).verify()
        with pytest.raises(CheckpointError, match=why):
            SourceFile(storage, f"{folder}/file", size, checksums).fetch([(0, memoryview(bytearray(1)))])
    with pytest.raises(CheckpointError, match="other: no such file"):
        SourceFile(storage, f"{folder}/other", 3, (crc,)).verify()


def test_folders(storage: Storage, folder: str) -> None:
    assert storage.list("nowhere") == []
    storage.put(f"{folder}/b", [b"1"], 1)
    storage.put(f"{folder}/a", [b"1"], 1)
    storage.sync(folder)
    storage.sync()
    assert storage.list(folder) == ["a", "b"] and storage.list() == [folder]
    assert storage.modified(f"{folder}/a") > 1.7e9
    assert storage.size(folder) is None


def test_a_file_is_replaced_at_once(storage: Storage, folder: str) -> None:
    for text in (b"one", b"another", b""):
        storage.replace("latest", text)
        assert storage.get("latest", 100) == text
        storage.replace(f"{folder}/x", text)
    assert storage.list() == ["latest", folder] and storage.list(folder) == ["x"]


def test_a_folder_is_removed_with_what_is_in_it(storage: Storage, folder: str) -> None:
    for name in (COMMIT, "a", "b"):
        storage.put(f"{folder}/{name}", [b"1"], 1)
    storage.put("step-10", [b"a file of which the folder's name is a prefix"], 45)
    storage.remove(folder)
    assert storage.list() == ["step-10"] and storage.list(folder) == []
    storage.remove(folder)
    storage.remove("step-10")
    assert storage.list() == []
    with pytest.raises(CheckpointError, match="is not removed"):
        storage.remove("")


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a//x", "./x", "a/.", "x\0y"])
def test_no_name_leads_out_of_the_folder(storage: Storage, folder: str, name: str) -> None:
    for call in (storage.size, storage.list, storage.remove, storage.modified, storage.make, storage.sync):
        with pytest.raises(CheckpointError, match="is not a file's name below"):
            call(name)
    with pytest.raises(CheckpointError, match="is not a file's name below"):
        storage.put(name, [b""], 0)
    with pytest.raises(CheckpointError, match="is not a file's name below"):
        storage.get(name, 1)
