"""Who writes a checkpoint, in words: one process at a time, and one that dies owns nothing any more. See `locks` and `markers`."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from . import strict

LARGEST = 2**16  # bytes of words about an owner


def words(**more: str) -> bytes:
    """Who this process is, for those who come second."""
    return strict.dumps({"host": socket.gethostname(), "pid": os.getpid(), **more})


def read(said: bytes) -> Mapping[str, Any]:
    """The words of an owner; nothing where it was killed before it could say them."""
    try:
        found = json.loads(said)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def refusal(place: str, owner: Mapping[str, Any]) -> CheckpointError:
    who = f"process {owner.get('pid', '?')} on {owner.get('host', 'a host that it does not name')}"
    return CheckpointError(
        f"{place} is being written by {who}, and two writers would only overtake each other: give this run a folder of its own, or wait "
        "until that one is done"
    )
