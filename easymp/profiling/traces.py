"""Where traces are written, and how: whole under their names or not at all."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ..errors import SettingError


def ready_folder(given: str | os.PathLike[str] | None, project: str | None) -> Path:
    """The folder for traces, which can be written to from now on.

    Raises:
        SettingError: it is none that this machine has, or cannot be written to.
    """
    if given is None and project is not None and "://" in project:
        raise SettingError(
            f"traces are local files, and project_dir={project!r} is a URL: name a folder with ProfileKwargs(output_trace_dir=...)"
        )
    folder = Path(given) if given is not None else Path(project or os.curdir, "profile")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _new(folder, f".{os.getpid()}").touch()
        _new(folder, f".{os.getpid()}").unlink()
    except OSError as error:
        raise SettingError(
            f"traces cannot be written to {folder}: {error.strerror or error}. Name another folder with ProfileKwargs(output_trace_dir=...)"
        ) from error
    return folder


def write(folder: Path, rank: int, export: Callable[[str], object]) -> Path:
    """What `export` writes, as the rank's next trace: ``rank0-001.json``, ``rank0-002.json`` …"""
    number = 1
    while (place := folder / f"rank{rank}-{number:03d}.json").exists():
        number += 1
    new = _new(folder, place.name)
    try:
        export(str(new))
        new.replace(place)
    finally:
        new.unlink(missing_ok=True)
    return place


def copy(trace: Path, place: str) -> None:
    """A copy of a trace, compressed if its name ends in ``.gz``."""
    with (
        open(trace, "rb") as old,
        gzip.open(place, "wb") if place.endswith(".gz") else open(place, "wb") as new,
    ):
        shutil.copyfileobj(old, new)


def _new(folder: Path, name: str) -> Path:
    return folder / f".new-{os.getpid()}-{name}.json"
