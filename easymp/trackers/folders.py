"""Names of a run's files and folders that are not taken: ``log``, else ``log-2``, ``log-3`` … Nobody's rows are written over or mixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")


def _numbered(first: Path) -> Iterator[Path]:
    yield first
    for number in count(2):
        yield first.with_name(f"{first.name}-{number}")


def _first_free(first: Path, make: Callable[[Path], T]) -> T:
    first.parent.mkdir(parents=True, exist_ok=True)
    for place in _numbered(first):
        try:
            return make(place)
        except FileExistsError:
            continue
    raise AssertionError("there is no last number")


def fresh_folder(first: Path) -> Path:
    """A folder that was not there, as `first` or with a number; made."""

    def make(place: Path) -> Path:
        place.mkdir()
        return place

    return _first_free(first, make)


def fresh_file(first: Path, ending: str) -> tuple[Path, BinaryIO]:
    """A file that was not there, as `first` and `ending`, or with a number between; open, without a buffer."""

    def make(place: Path) -> tuple[Path, BinaryIO]:
        path = place.with_name(place.name + ending)
        return path, open(path, "xb", buffering=0)

    return _first_free(first, make)
