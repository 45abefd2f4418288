"""Who writes a checkpoint, in words: one process at a time, and one that dies owns nothing any more. See `locks` and `markers`."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from . import strict

if TYPE_CHECKING:
    from .storage import Claim, Storage

LARGEST = 2**16  # bytes of words about an owner

_held: dict[tuple[int, str], list[Any]] = {}
"""Claims of this process that its Accelerators share, and by how many, by process and place."""
_guard = threading.Lock()


def words(**more: str) -> bytes:
    """Who this process is, for those who come second."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    me = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": since,
        "space": pid_namespace(),
        "started": started(os.getpid()),
    }
    return strict.dumps({**me, **more})


def pid_namespace() -> str:
    """Identifier of the running machine and PID namespace, within which a process number is unique; "" where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int) -> str:
    """When a process was started, as the system counts: another one that gets its number later has another; "" where that is not told."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def hold(storage: Storage, name: str) -> Callable[[], None]:
    """Claim `name` for this process, in which others may hold it too; what is returned lets go of it.

    Raises:
        CheckpointError: another process has it.
        OSError: `storage` cannot be written to.
    """
    key = os.getpid(), f"{os.path.realpath(storage.place)}/{name}"
    with _guard:
        if key not in _held:
            _held[key] = [storage.claim(name, words()), 0]
        _held[key][1] += 1
    return partial(_let_go, key)


def _let_go(key: tuple[int, str]) -> None:
    if key[0] != os.getpid():
        return  # a fork, which has nothing of its parent's
    with _guard:
        _held[key][1] -= 1
        if not _held[key][1]:
            claim: Claim = _held.pop(key)[0]
            claim.release()


def read(said: bytes) -> Mapping[str, Any]:
    """The words of an owner; nothing where it was killed before it could say them."""
    try:
        found = json.loads(said)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def refusal(place: str, owner: Mapping[str, Any], lock: str = "") -> CheckpointError:
    """What the second writer of `place` is told. `lock` is a file that a machine which is gone may hold on to."""
    who = f"process {owner.get('pid', '?')} on {owner.get('host', 'a host that it does not name')}"
    return CheckpointError(
        f"{place} is being written by {who}{_since(owner.get('since'))}, and two writers would only overtake each other: give this run a "
        "folder of its own, or wait until that one is done"
        + (
            f". If that machine is gone, remove {lock}"
            if lock and owner.get("host") != socket.gethostname()
            else ""
        )
    )


def _since(said: object) -> str:
    try:
        began = datetime.fromisoformat(str(said))
        seconds = int((datetime.now(UTC) - began).total_seconds())
    except (ValueError, TypeError):
        return ""
    age = next(
        (
            f"{seconds // n} {unit}"
            for n, unit in ((86400, "days"), (3600, "h"), (60, "min"))
            if seconds >= 2 * n
        ),
        f"{seconds} s",
    )
    return f" since {said} ({age})"
