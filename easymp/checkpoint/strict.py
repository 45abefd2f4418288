"""JSON that is what it seems: no key twice, no NaN, no depth without end, no numbers that take forever.

What is read here may have been written by anyone. Everything that would cost more than its length is refused before it is parsed.
"""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate
from typing import Any

from ..errors import CheckpointError

LONGEST = 2**28  # bytes of a document: it is held and parsed in memory, by every rank
MARKS = 20_000_000  # commas, brackets and quotes in a document; one takes up to 72 bytes once parsed
DEPTH = 200  # lists and objects in one another; Python's own parser recurses, and so do those who walk what it returns
DIGITS = 20  # of an integer: those of 64 bits
NUMBER = 40  # characters of a float; repr needs 24

_NO_BONES = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes, 1 and -1


def dumps(value: Any) -> bytes:
    """`value`, which is made of JSON's own types, as text that `loads` takes.

    Raises:
        CheckpointError: it is made of others.
    """
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
        _measure(text)
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"this cannot be stored as JSON ({error}): pass plain values, and not too many"
        ) from None


def loads(text: bytes, what: str) -> Any:
    """The value that `text` says.

    Raises:
        CheckpointError: it is no JSON, or of a kind that nobody writes; `what` names the file.
    """
    try:
        _measure(text)
        value = json.loads(
            text.decode(),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
        if re.search(
            rb"\\u[dD][89a-fA-F]", text
        ):  # half of a surrogate pair is no text: it cannot be written or printed again
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise CheckpointError(
            f"{what}: its text is not UTF-8 ({error.reason}): damaged, or another kind of file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what}: no JSON that is read here ({error}): damaged, or another kind of file"
        ) from None
    return value


def _measure(text: bytes) -> None:
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} bytes, and {LONGEST} are the most")
    if sum(map(text.count, (b",", b"[", b"{", b'"'))) > MARKS:
        raise ValueError(f"more than {MARKS} commas, brackets and quotes")
    bones = re.sub(rb"\\.", b"", text, flags=re.DOTALL) if b"\\" in text else text
    brackets = b"".join(bones.translate(None, _NO_BONES).split(b'"')[::2])  # those outside of strings
    if max(accumulate(memoryview(brackets.translate(_STEPS)).cast("b")), default=0) > DEPTH:
        raise ValueError(f"nested more than {DEPTH} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} stands twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > NUMBER or math.isinf(float(digits)):
        raise ValueError(f"a number like {digits[:NUMBER]}")
    return float(digits)


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
