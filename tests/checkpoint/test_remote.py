"""Object stores and far file systems, beyond what every storage does: uploads are whole or absent, and nothing is remembered."""

from __future__ import annotations

import errno
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from easymp import CheckpointError
from easymp.checkpoint import storage_local
from easymp.checkpoint.manifest import BLOCK
from easymp.checkpoint.storage import SourceFile
from easymp.checkpoint.storage_remote import RemoteStorage
from easymp.cli import main

from .test_storage import content, crcs


@pytest.fixture(params=["memory", "fsspec", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteStorage]:
    start = {"memory": "memory://", "fsspec": "file://"}.get(request.param) or request.getfixturevalue("s3")
    yield RemoteStorage(f"{start}{tmp_path}")
    fsspec.filesystem("memory").store.clear()


def breaking(data: bytes) -> Iterator[bytes]:
    yield data
    raise KeyboardInterrupt


@pytest.mark.parametrize("size", [100, BLOCK + 100])
def test_an_upload_that_is_broken_off_leaves_nothing(storage: RemoteStorage, size: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        storage.put("file", breaking(content(size)), size + 1)
    assert storage.list() == [] and storage.size("file") is None
    if storage.place.startswith("s3"):
        bucket, _, prefix = storage.place.removeprefix("s3://").partition("/")
        assert "Uploads" not in storage._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)


@pytest.mark.parametrize("operation", ["write", "replace"])
def test_a_store_that_fails_is_an_error_with_the_url(storage, operation, monkeypatch):
    do = storage_local.do

    def fail(name: str, path: str, call: Callable[..., Any], *arguments: Any) -> Any:
        if name == operation:
            raise RuntimeError("the token has expired")
        return do(name, path, call, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(storage_local, "do", fail)
        with pytest.raises(OSError, match="RuntimeError: the token has expired") as caught:
            storage.put("file", [content(BLOCK + 1)], BLOCK + 1)
    assert (
        caught.value.errno == errno.EIO
        and caught.value.filename.endswith("/file")
        and "://" in caught.value.filename
    )
    assert storage.list() == []


def test_a_file_that_came_short_is_refused(storage: RemoteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    checksums = storage.put("file", [b"abcdef"], 6)
    assert checksums == crcs(b"abcdef")
    do = storage_local.do
    shorten = lambda name, *call: [c[:-1] for c in do(name, *call)] if name == "read" else do(name, *call)  # noqa: E731
    monkeypatch.setattr(storage_local, "do", shorten)
    with pytest.raises(CheckpointError, match="file: 5 bytes came of 6"):
        SourceFile(storage, "file", 6, checksums).verify()


def test_an_import_that_draws_changes_no_random_number_of_the_training(tmp_path, monkeypatch):
    (tmp_path / "drawing_store.py").write_text(
        "import random\nfrom fsspec.implementations.memory import MemoryFileSystem\n\n"
        "random.random()\n\n\nclass Drawing(MemoryFileSystem):\n    protocol = 'drawing'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fsspec.register_implementation("drawing", "drawing_store.Drawing", clobber=True)
    before = random.getstate()
    assert RemoteStorage("simplecache::drawing://run").place == "simplecache::drawing://run"
    assert "drawing_store" in sys.modules and random.getstate() == before
    sys.modules.pop("drawing_store")


def test_a_password_in_a_url_stays_out_of_messages(capfd: pytest.CaptureFixture[str]) -> None:
    for place in ("ftp://me:secret@127.0.0.1:9/run", "nowhere://me:secret@127.0.0.1/run"):
        assert main(["checkpoint", "list", place]) != 0
    said = "".join(capfd.readouterr())
    assert "me:***@" in said and "secret" not in said
