"""Storage of every kind: what is put is there, whole or not at all; and what the system or a store may do to a file."""

from __future__ import annotations

import errno
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
import torch

import easymp
from easymp import CheckpointError
from easymp.checkpoint import storage as storages
from easymp.checkpoint.buffers import aligned, as_bytes
from easymp.checkpoint.folders import open_storage
from easymp.checkpoint.manifest import BLOCK, COMMIT
from easymp.checkpoint.progress import Progress
from easymp.checkpoint.storage import LocalStorage, SourceFile, Storage, crc32, read_small
from easymp.checkpoint.storage_remote import RemoteStorage
from easymp.cli import main
from easymp.errors import EasympError, redact
from easymp.logging import get_logger

MEGABYTE = random.Random(0).randbytes(2**20 - 1)  # no period that fits a page
LARGE = 2 * BLOCK + 12_345
Do = Callable[..., Any]


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
            if request.param == "buffered":
                monkeypatch.setattr(storages, "DIRECT", 0)
            yield LocalStorage(root)
        case "memory":
            yield RemoteStorage(f"memory://{root}")
            fsspec.filesystem("memory").store.clear()
        case "fsspec":
            root.mkdir()
            yield RemoteStorage(f"file://{root}")
        case "s3":
            yield RemoteStorage(f"{request.getfixturevalue('s3')}{root}")


NEAR = pytest.mark.parametrize("storage", KINDS[:4], indirect=True)  # megabytes take seconds with the server
FAR = pytest.mark.parametrize("storage", KINDS[2:], indirect=True)


@pytest.fixture
def folder(storage: Storage) -> str:
    storage.make("step-1")
    return "step-1"


def staged(data: bytes) -> list[bytes | memoryview]:
    view = as_bytes(aligned(len(data)))
    view[:] = data
    return [view[:4096], view[4096:]]


PARTS: list[Callable[[bytes], Any]] = [
    lambda data: [data],
    lambda data: [memoryview(bytearray(data))],
    staged,
    lambda data: (data[at : at + 7_777] for at in range(0, len(data), 7_777)),
]


def test_what_is_put_is_there_with_its_checksums(storage, folder, request):
    s3 = storage.root.startswith("s3")
    sizes = (0, 1, BLOCK + 1) if s3 else (0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, LARGE)
    for size, parts in [(size, PARTS[0]) for size in sizes] + [(LARGE, parts) for parts in PARTS[1:] * (not s3)]:
        data, counts = content(size), []
        checksums = storage.put(f"{folder}/file", parts(data), size, counts.append)
        assert checksums == crcs(data) and sum(counts) == size
        assert storage.size(f"{folder}/file") == size and storage.head(f"{folder}/file", 100) == data[:100]
        SourceFile(storage, f"{folder}/file", size, checksums).verify()
        read_back = bytearray(size)
        SourceFile(storage, f"{folder}/file", size, checksums).fetch([(0, memoryview(read_back))])
        assert read_back == data
        storage.remove(f"{folder}/file")


@NEAR
def test_any_runs_are_fetched_and_only_touched_blocks_are_read(storage, folder):
    data = content(LARGE)
    checksums = storage.put(f"{folder}/file", [data], len(data))
    for longest, checked in [(n, has_checksums) for n in (100, 5_000, 3_000_000) for has_checksums in (True, False)]:
        dice, targets, at = random.Random(longest), [], max(50, BLOCK - 1000 * longest)
        while at < len(data) and len(targets) < 5_000:
            count = min(dice.randint(0, longest), len(data) - at)
            targets.append((at, memoryview(bytearray(count))))
            at += count + dice.choice([0, dice.randint(0, 4 * longest)])
        counts: list[int] = []
        file = SourceFile(storage, f"{folder}/file", len(data), checksums if checked else None)
        file.fetch(targets, counts.append)
        assert all(view == data[at : at + len(view)] for at, view in targets)
        touched = {offset // BLOCK for at, view in targets if view for offset in (at, at + len(view) - 1)}
        blocks = sum(min(BLOCK, len(data) - number * BLOCK) for number in touched)
        assert sum(counts) == (blocks if checked else sum(len(view) for _, view in targets))
    file = SourceFile(storage, f"{folder}/file", len(data), (checksums[0], checksums[1] ^ 1, checksums[2]))
    view, counts = memoryview(bytearray(8)), []
    file.fetch([(BLOCK - 8, view)], counts.append)
    assert view == data[BLOCK - 8 : BLOCK] and sum(counts) == BLOCK
    file.fetch([])
    with pytest.raises(CheckpointError, match=r"file: block 1 \(from byte 16777216\) is not what was"):
        file.fetch([(BLOCK - 4, view)])
    with pytest.raises(CheckpointError, match="block 1 "):
        file.verify()


def test_a_file_that_is_missing_or_of_another_size_is_refused(storage, folder):
    (crc,) = storage.put(f"{folder}/file", [b"abc"], 3)
    for name, size, checksums, message in [
        ("file", 4, (crc,), "3 bytes, and 4 were"),
        ("file", 2, (crc,), "3 bytes, and 2 were"),
        ("other", 3, (crc,), "other: no such file"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            SourceFile(storage, f"{folder}/{name}", size, checksums).verify()
        with pytest.raises(CheckpointError, match=message):
            SourceFile(storage, f"{folder}/{name}", size, checksums).fetch([(0, memoryview(bytearray(1)))])


def test_folders_and_small_files(storage, folder):
    assert storage.list("nowhere") == []
    for name in ("b", COMMIT, "a"):
        storage.put(f"{folder}/{name}", [b"1"], 1)
    storage.sync(folder)
    storage.sync()
    assert storage.list(folder) == [COMMIT, "a", "b"] and storage.list() == [folder]
    assert storage.size(folder) is None
    for text in (b"one", b"another", b""):
        storage.replace("latest", [text], len(text))
        assert read_small(storage, "latest", 100) == text
        storage.replace(f"{folder}/x", [text], len(text))
    assert storage.list() == ["latest", folder] and storage.list(folder) == [COMMIT, "a", "b", "x"]
    storage.put("step-10", [b"a file of which the folder's name is a prefix"], 45)
    storage.remove(folder)
    assert storage.list() == ["latest", "step-10"] and storage.list(folder) == []
    storage.remove(folder)
    with pytest.raises(CheckpointError, match="is not removed"):
        storage.remove("")


def test_no_name_leads_out_of_the_folder(storage):
    calls = [storage.size, storage.list, storage.remove, storage.make, storage.sync]
    calls += [lambda name: storage.put(name, [b""], 0), lambda name: read_small(storage, name, 1)]
    for name in ("../x", "/x", "a/../../x", "a//x", "./x", "a/.", "x\0y"):
        for call in calls:
            with pytest.raises(CheckpointError, match="is not a file's name below"):
                call(name)


def through(monkeypatch: pytest.MonkeyPatch, hook: Do) -> None:
    """`hook(do, operation, path, call, *arguments)` instead of every call."""
    do = storages.do
    monkeypatch.setattr(storages, "do", lambda *call: hook(do, *call))


@FAR
@pytest.mark.parametrize("operation", ["write", "replace"])
def test_a_store_that_fails_is_an_error_with_the_url(storage, operation, monkeypatch):
    def fail(do: Do, name: str, *call: Any) -> Any:
        if name == operation:
            raise RuntimeError("the token has expired")
        return do(name, *call)

    with monkeypatch.context() as patch:
        through(patch, fail)
        with pytest.raises(OSError, match="RuntimeError: the token has expired") as caught:
            storage.put("file", [content(BLOCK + 1)], BLOCK + 1)
    filename = caught.value.filename
    assert caught.value.errno == errno.EIO and filename.endswith("/file") and "://" in filename
    assert storage.list() == []


@FAR
def test_an_upload_that_is_broken_off_leaves_nothing_and_a_file_that_came_short_is_refused(storage, monkeypatch):
    def breaking(size: int) -> Iterator[bytes]:
        yield content(size)
        raise KeyboardInterrupt

    for size in (100, BLOCK + 100):
        with pytest.raises(KeyboardInterrupt):
            storage.put("file", breaking(size), size + 1)
        assert storage.list() == [] and storage.size("file") is None
    if storage.root.startswith("s3"):
        bucket, _, prefix = storage.root.removeprefix("s3://").partition("/")
        assert "Uploads" not in storage._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
    checksums = storage.put("file", [b"abcdef"], 6)
    through(
        monkeypatch, lambda do, name, *call: [c[:-1] for c in do(name, *call)] if name == "read" else do(name, *call)
    )
    with pytest.raises(CheckpointError, match="file: 5 bytes came of 6"):
        SourceFile(storage, "file", 6, checksums).verify()


@pytest.mark.parametrize("direct", [False, True])
def test_what_the_system_refuses_is_an_error_with_its_name(monkeypatch, tmp_path, direct):
    if not direct:
        monkeypatch.setattr(storages, "DIRECT", 0)
    data, refused = content(2 * BLOCK + 5), ""

    def refuse(do: Do, name: str, path: str, call: Do, *arguments: Any) -> Any:
        def full(*_: Any) -> None:
            if name == "close":
                call(*arguments)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return do(name, path, full if name == refused else call, *arguments)

    through(monkeypatch, refuse)
    for refused in ("create", "allocate", "write", "fsync", "close"):
        with pytest.raises(OSError) as caught:
            LocalStorage(tmp_path).put(refused, [data], len(data))
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, f"{tmp_path}/{refused}")


def test_checksums_are_the_same_without_their_package(monkeypatch):
    data = memoryview(MEGABYTE)[3:77_777]
    for module in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        assert crc32.__wrapped__()(data, 123) == zlib.crc32(data, 123)
        monkeypatch.setitem(sys.modules, module, None)
    assert crc32.__wrapped__() is zlib.crc32


def test_links_pipes_and_folders_are_no_files(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    storage = LocalStorage(tmp_path)
    for name, message in {
        "link": "a link, ",
        "linked/file": "a link",
        "pipe": "not a reg",
        "real": "not a reg",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            read_small(storage, name, 10)
        with pytest.raises(CheckpointError, match=message):
            SourceFile(storage, name, 3, crcs(b"abc")).fetch([(0, memoryview(bytearray(3)))])
    names = ("link", "pipe", "real", "linked/file", "real/file")
    assert [storage.size(name) for name in names] == [None] * 4 + [3]
    listed = [storage.list(name) for name in ("link", "linked", "linked/real", "real")]
    assert listed == [[], [], [], ["file"]]
    assert LocalStorage(tmp_path / "linked").list() == ["file"], "what the user names may be a link"
    for name in ("linked/file", "linked/other"):
        with pytest.raises(CheckpointError, match="a link"):
            storage.put(name, [b"abc"], 3)


def test_short_reads_go_on_where_they_stopped(monkeypatch, tmp_path):
    data, storage = content(BLOCK + 100), LocalStorage(tmp_path)
    checksums = storage.put("file", [data], len(data))

    def shorten(do: Do, name: str, path: str, call: Do, *arguments: Any) -> Any:
        if name == "read":
            descriptor, views, at = arguments
            arguments = (descriptor, [views[0][:60_001]], at)
        return do(name, path, call, *arguments)

    through(monkeypatch, shorten)
    targets = [(at, memoryview(bytearray(70_000))) for at in range(3, BLOCK, 100_000)]
    SourceFile(storage, "file", len(data), checksums).fetch(targets)
    assert all(view == data[at : at + len(view)] for at, view in targets)


def test_an_import_that_draws_changes_no_random_number_of_the_training(tmp_path, monkeypatch):
    (tmp_path / "drawing_store.py").write_text(
        "import random\nfrom fsspec.implementations.memory import MemoryFileSystem\n\n"
        "random.random()\n\n\nclass Drawing(MemoryFileSystem):\n    protocol = 'drawing'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fsspec.register_implementation("drawing", "drawing_store.Drawing", clobber=True)
    before = random.getstate()
    assert RemoteStorage("simplecache::drawing://run").root == "simplecache::drawing://run"
    assert "drawing_store" in sys.modules and random.getstate() == before
    sys.modules.pop("drawing_store")


def test_places_that_cannot_be_opened_are_refused_and_no_password_is_shown(capfd):
    for url, message in {
        "file://elsewhere/a": "names a machine, not a folder: write file:///",
        "nowhere://a": "Protocol not known: nowhere.*Install the package",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            open_storage(url)
    for url in ("ftp://me:secret@127.0.0.1:9/run", "nowhere://me:secret@127.0.0.1/run"):
        assert main(["checkpoint", "list", url]) != 0
    output = "".join(capfd.readouterr())
    assert "me:***@" in output and "secret" not in output


SECRET_URLS = (
    "nowhere://me:SECRET@host/run",
    "nowhere://KEY:SEC/SECRET@bucket/run",
    "nowhere://KEY:SECRET/RET@bucket",
    "nowhere://me:p@SECRET@host/run",
    "nowhere://SECRET@host/run",
    "nowhere://host/run?se=2027&sig=SECRET",
    "nowhere://host/run?X-Amz-Signature=SECRET&v=1",
    "simplecache::nowhere://me:SECRET@host/run",
    "s3://KEY:SEC/SECRET@bucket/run",
    "simplecache::s3://KEY:SECRET@bucket/run",
    "gs://SECRET@bucket/run",
)


@pytest.mark.parametrize("url", SECRET_URLS)
def test_no_secret_of_a_url_is_in_a_message(url, caplog, capfd):
    acc = easymp.Accelerator(cpu=True)
    model = acc.prepare(torch.nn.Linear(2, 1))
    for use in (
        lambda: acc.save_model(model, url),
        lambda: acc.save({}, f"{url}/object.safetensors"),
        lambda: acc.save_state(url),
        lambda: acc.load_state(url),
        lambda: easymp.load_weights(model, url),
        lambda: easymp.load(url),
    ):
        with pytest.raises(EasympError) as caught:
            use()
        assert "SECRET" not in str(caught.value)
    get_logger("easymp.test").warning("%s is slow", url)
    get_logger("easymp.test").warning(f"{url} is slow")
    get_logger("easymp.test").warning("http://%s:%d@%s", "host", 80, "v1")
    with Progress(f"saving {url}", "saved", clock=iter(range(0, 1000, 100)).__next__) as progress:
        progress(1)
    assert main(["checkpoint", "list", url]) != 0
    acc.end_training()
    messages = "".join(capfd.readouterr()) + caplog.text
    assert "SECRET" not in messages and messages.count("***") >= 3 and "http://host:80@v1" in messages


def test_urls_without_secrets_and_other_text_stay_as_they_are():
    for text in ("s3://bucket/run@v1/a:b@c", "http://host:8080/run?page=2", "mail me@host: a://b", "memory://run"):
        assert redact(text) == text
