"""Rows as JSON lines in a file of the project's folder: ``log.jsonl``, a row an object, and beside it ``log.json`` with what the run is.

A row has ``_step``, ``_time`` (seconds since 1970) and the values by name. JSON has no NaN and no infinities: they are the words "NaN",
"Infinity" and "-Infinity", of which float(), pandas.read_json and JavaScript's Number make numbers again.

A run that goes on from a checkpoint goes on in its file, from the row at which the checkpoint was taken: rows after it, which will be
logged again, move to ``log.jsonl.cut``. Another run in the same folder begins ``log-2.jsonl``; no file is written over.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import SettingError
from ..logging import get_logger
from .config import as_json
from .folders import fresh_file
from .rows import Row

logger = get_logger(__name__)


class JsonLines:
    """The file.

    Args:
        folder: where it lies.
        options: none.
    """

    name = "jsonl"

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        if options:
            raise SettingError(
                f"init_kwargs={{'jsonl': {dict(options)!r}}}: it takes no options. Leave them out"
            )
        self._folder = folder
        self._file: BinaryIO | None = None
        self._id = ""
        self._size = 0
        self.path: Path = folder  # the file, from `start` on

    @property
    def tracker(self) -> Path:
        return self.path

    # -- the run ------------------------------------------------------------------------------------------------------

    def start(self, run: str, config: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        starts = self._go_on(position) if position is not None else None
        if starts is None:
            self._leave()
            self.path, self._file = fresh_file(self._folder / run, ".jsonl")
            self._id, self._size, starts = uuid.uuid4().hex, 0, []
        starts.append({"time": time.time(), "config": config})
        about = _about(self.path)
        fresh = about.with_name(about.name + ".new")
        fresh.write_text(
            as_json({"run": run, "id": self._id, "starts": starts}, indent=2) + "\n", encoding="utf-8"
        )
        fresh.replace(about)
        logger.info("rows are logged to %s", self.path)

    def _go_on(self, position: Mapping[str, Any]) -> list[Any] | None:
        """Opens the file of the run that the checkpoint is of, and cuts it; what its starts were. None where it is not here."""
        path, why = self._folder / position["file"], ""
        try:
            about = json.loads(_about(path).read_text(encoding="utf-8"))
            file = open(path, "r+b", buffering=0)  # noqa: SIM115
        except (OSError, ValueError) as error:
            about, file, why = {}, None, f" ({error})"
        if file is None or about.get("id") != position["id"]:
            if file is not None:
                file.close()
            logger.warning(
                "%s is not the file of the run that is resumed: its rows go to a new one%s", path, why
            )
            return None
        self._leave()
        self._cut(path, file, position["bytes"])
        self._file, self.path, self._id = file, path, position["id"]
        return list(about["starts"])

    def _leave(self) -> None:
        """Lets go of the file, and of all of it where a tracker was asked for before the run was resumed and it has no rows."""
        was_open = self._file is not None
        self.finish()
        if was_open and not self._size:
            self.path.unlink()
            _about(self.path).unlink()

    def _cut(self, path: Path, file: BinaryIO, size: int) -> None:
        there = os.fstat(file.fileno()).st_size
        if there < size:
            logger.warning(
                "%s has %d bytes and had %d at the checkpoint: rows are missing", path, there, size
            )
        self._size = min(size, there)
        file.seek(self._size)
        after = file.read()
        if after:
            with open(path.with_name(path.name + ".cut"), "ab") as cut:
                cut.write(after)
            file.truncate(self._size)
            file.seek(self._size)

    def position(self) -> dict[str, Any]:
        """Where the file ends, with all on disk."""
        assert self._file is not None
        os.fsync(self._file.fileno())
        return {"file": self.path.relative_to(self._folder).as_posix(), "id": self._id, "bytes": self._size}

    # -- rows ---------------------------------------------------------------------------------------------------------

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """A row now, beside those of `acc.log`."""
        self.write([Row(0 if step is None else step, time.time(), dict(values))])

    def write(self, rows: Sequence[Row]) -> None:
        assert self._file is not None
        lines = [as_json({"_step": r.step, "_time": round(r.time, 3), **r.values}) for r in rows]
        text = memoryview(("\n".join(lines) + "\n").encode())
        try:
            done = 0
            while done < len(text):
                done += self._file.write(text[done:])
        except OSError:
            self._file.truncate(self._size)  # half a line would spoil the next one
            self._file.seek(self._size)
            raise
        self._size += len(text)

    def finish(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _about(path: Path) -> Path:
    """The file that says what the run is, of its rows at `path`."""
    return path.with_name(path.name.removesuffix("l"))
