"""A claim where there are no locks: a file that is written anew every few seconds; one that stops changing is nobody's."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from . import strict
from .claims import LARGEST, pid_namespace, read, refusal, started
from .storage import Storage

BEAT = 3.0  # seconds between two writes of a marker
PATIENCE = 4 * BEAT  # one that has not changed for so long is nobody's
LONG_AGO = 900.0  # seconds; by two machines' clocks


class Marker:
    """A claim by the file `name` of `storage`, which a thread writes anew every BEAT seconds.

    Raises:
        CheckpointError: somebody else does.
        OSError: it cannot be written.
    """

    def __init__(self, storage: Storage, name: str, place: str, said: bytes) -> None:
        self._storage, self._name = storage, name
        self._said, self._count = {**read(said), "claim": os.urandom(8).hex()}, 0
        self.left = self._wait(place)
        self._write()
        if self._read().get("claim") != self._said["claim"]:
            raise refusal(place, self._read())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="easymp-claim", daemon=True)
        self._thread.start()

    def _wait(self, place: str) -> Mapping[str, Any]:
        """What a dead owner left; raises when it turns out to be alive."""
        there = self._read()
        until = time.monotonic() + PATIENCE
        while there and not abandoned(self._storage, self._name) and time.monotonic() < until:
            time.sleep(BEAT / 10)
            now = self._read()
            if now and now != there:
                raise refusal(place, now)
            there = now
        return there

    def _read(self) -> Mapping[str, Any]:
        return _owner(self._storage, self._name)

    def _write(self) -> None:
        self._count += 1
        self._storage.replace(self._name, strict.dumps({**self._said, "count": self._count}))

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self._write()
            except OSError:
                pass  # the writes of the checkpoint itself meet the same

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        try:
            self._storage.remove(self._name)
        except OSError:
            pass  # it will be found, and found old


def abandoned(storage: Storage, name: str) -> bool:
    """Whether it is certain, without watching it for a while, that nobody writes a marker any more."""
    owner = _owner(storage, name)
    if (
        owner.get("host") == socket.gethostname()
        and owner.get("space", pid_namespace()) == pid_namespace()
        and type(owner.get("pid")) is int
    ):
        try:
            os.kill(owner["pid"], 0)
            if owner.get("started", "") != started(owner["pid"]) != "" != owner.get("started", ""):
                return True  # another process has that number now
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass
    try:
        return time.time() - storage.modified(name) > LONG_AGO
    except OSError:
        return False


def _owner(storage: Storage, name: str) -> Mapping[str, Any]:
    try:
        return read(storage.get(name, LARGEST))
    except (FileNotFoundError, CheckpointError):
        return {}
