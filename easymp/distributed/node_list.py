"""Slurm's short form of host names: ``n[5-9,12],login1`` for n5, n6, n7, n8, n9, n12 and login1."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from ..errors import WorldError

ITEM = r"(?:[^\[\],\s]|\[[^\[\]]*\])+"  # up to a comma outside of brackets
LIST = re.compile(rf"{ITEM}(?:,{ITEM})*")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def hosts(text: str) -> list[str]:
    """The names, in Slurm's order: of several brackets in a name the last one counts fastest; leading zeros are kept.

    Raises:
        WorldError: it is no such list.
    """
    if not LIST.fullmatch(text):
        raise _wrong(text, "names are separated by commas, and numbers stand in brackets that are closed")
    found = []
    for item in re.findall(ITEM, text):
        plain, *rest = re.split(r"\[([^\]]*)\]", item)
        choices = [list(_numbers(text, inside)) for inside in rest[::2]]
        for numbers in product(*choices):
            found.append(plain + "".join(number + tail for number, tail in zip(numbers, rest[1::2])))
    return found


def _numbers(text: str, inside: str) -> Iterator[str]:
    for part in inside.split(","):
        match = RANGE.fullmatch(part)
        if match is None:
            raise _wrong(text, f"[{inside}] should hold numbers and ranges of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _wrong(text, f"{part} counts down")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _wrong(text: str, why: str) -> WorldError:
    return WorldError(f"{text!r} is no list of hosts as Slurm writes them, such as 'n[5-9,12]': {why}")
