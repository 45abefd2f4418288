"""The one door between checkpoints and the operating system: every call that reads or changes files goes through `do`.

Tests put another function in its place (``monkeypatch.setattr(calls, "do", …)``) to kill the process before or after any call, to
fail one, to shorten a write, or to record the order. It may be called from several threads at once.

| operation | arguments | what it is |
|---|---|---|
| ``"mkdir"`` | path | a new folder |
| ``"create"`` | path, flags, mode → descriptor | a new, empty file; one that is there fails |
| ``"open"`` | path, flags → descriptor | an existing file or folder; or a lock, which is made where it is not there |
| ``"allocate"`` | descriptor, size | room for the whole file; its size is `size` from now on, its content zeros |
| ``"write"`` | descriptor, buffers, offset → count | as ``os.pwritev``: may write less than all |
| ``"fsync"`` | descriptor | the file's content and size are on disk |
| ``"fsync directory"`` | descriptor | the names in a folder are on disk |
| ``"rename"`` | old, new | `new` is not there |
| ``"exchange"`` | one, other → whether | two folders swap names |
| ``"replace"`` | old, new | of a file; `new` may be there |
| ``"copy"`` | old, new | of a file, in an object store |
| ``"unlink"``, ``"rmdir"`` | path | one file, one empty folder |
| ``"close"`` | descriptor | |
| ``"read"`` | descriptor, buffers, offset → count | as ``os.preadv`` |
| ``"list"``, ``"stat"`` | path | |

A file of one block or less is "create", "write", "fsync", "close"; a larger one is allocated after "create", and written from a few
threads. Behind a URL the operations have the same names and the arguments of fsspec's calls; a file is there with its "replace".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

CHANGES = frozenset(
    (
        "mkdir",
        "create",
        "allocate",
        "write",
        "fsync",
        "fsync directory",
        "rename",
        "exchange",
        "replace",
        "copy",
        "unlink",
        "rmdir",
    )
)
T = TypeVar("T")


def do(operation: str, path: str, call: Callable[..., T], *arguments: Any) -> T:
    """``call(*arguments)``, an `operation` of the table above on the file or folder `path`, which an OSError then names."""
    try:
        return call(*arguments)
    except OSError as error:
        if (
            error.filename is None and error.errno is not None
        ):  # without a number, a name would take the place of its words
            error.filename = path
        raise
