"""Rows as JSON lines in the project's folder: ``log.jsonl``, an object a row, and beside it ``log.json``, which describes the run.

A row has ``_step``, ``_time`` (seconds since 1970) and the values by name. JSON has no NaN and no infinities: they are the words "NaN",
"Infinity" and "-Infinity", which float(), pandas.read_json and JavaScript's Number read as numbers.

A row of a table has ``_table``, the table's name, and the values by column. Images are PNG files in the folder ``log-images``, which a row
with ``_images``, their name, lists as `files`.

A resumed run continues its file from the row at which the checkpoint was taken: later rows, which will be logged again, move to
``log.jsonl.cut``. Another run in the same folder begins ``log-2.jsonl``; no file is overwritten.
"""

from __future__ import annotations

import json
import os
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..errors import SettingError
from ..logging import get_logger
from .rows import Row, as_json

logger = get_logger(__name__)
T = TypeVar("T")


class JsonLines:
    """The file; `path` is its place from `start` on."""

    name = "jsonl"

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        if options:
            words = "it takes no options. Leave them out"
            raise SettingError(f"init_kwargs={{'jsonl': {dict(options)!r}}}: {words}")
        self._folder, self.path = folder, folder
        self._file: BinaryIO | None = None
        self._id, self._size = "", 0

    @property
    def tracker(self) -> Path:
        return self.path

    def start(self, run: str, config: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        starts = self._continue(position) if position is not None else None
        if starts is None:
            self._leave()
            self.path, self._file = first_free(self._folder / run, _create)
            self._id, self._size, starts = uuid.uuid4().hex, 0, []
        starts.append({"time": time.time(), "config": config})
        about = _about(self.path)
        fresh = about.with_name(about.name + ".new")
        text = as_json({"run": run, "id": self._id, "starts": starts}, indent=2)
        fresh.write_text(text + "\n", encoding="utf-8")
        fresh.replace(about)
        logger.info("rows are logged to %s", self.path)

    def _continue(self, position: Mapping[str, Any]) -> list[Any] | None:
        """Open and cut the file of the resumed run and return its starts; None if it is not here."""
        path = self._folder / position["file"]
        try:
            about = json.loads(_about(path).read_text(encoding="utf-8"))
            if about["id"] != position["id"]:
                raise ValueError("it belongs to another run")
            file = open(path, "r+b", buffering=0)  # noqa: SIM115
        except (OSError, ValueError, KeyError) as error:
            logger.warning("%s cannot be continued, so rows go to a new file (%s)", path, error)
            return None
        self._leave()
        self._file, self.path, self._id = file, path, position["id"]
        self._cut(position["bytes"])
        return list(about["starts"])

    def _cut(self, size: int) -> None:
        """Move the rows after `size` bytes to a file beside this one."""
        assert self._file is not None
        there = os.fstat(self._file.fileno()).st_size
        if there < size:
            words = "%s has %d bytes and had %d at the checkpoint: rows are missing"
            logger.warning(words, self.path, there, size)
        self._size = min(size, there)
        self._file.seek(self._size)
        if after := self._file.read():
            with open(self.path.with_name(self.path.name + ".cut"), "ab") as cut:
                cut.write(after)
            self._rewind()

    def _rewind(self) -> None:
        assert self._file is not None
        self._file.truncate(self._size)
        self._file.seek(self._size)

    def _leave(self) -> None:
        """Close the file; delete it if it has no rows, because a tracker was asked for before the run was resumed."""
        was_open = self._file is not None
        self.finish()
        if was_open and not self._size:
            self.path.unlink()
            _about(self.path).unlink()

    def position(self) -> dict[str, Any]:
        """The end of the file, after a sync to disk."""
        assert self._file is not None
        os.fsync(self._file.fileno())
        return {"file": self.path.relative_to(self._folder).as_posix(), "id": self._id, "bytes": self._size}

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write a row now, beside those of `acc.log`."""
        self.write([Row(0 if step is None else step, time.time(), dict(values))])

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write arrays of shape NHWC (uint8) as PNG files beside the rows, and a row with ``_images``, the name, and their `files`."""
        for name, images in values.items():
            safe = "".join(x if x.isalnum() or x in "-." else "_" for x in name)
            folder, files = self.path.parent / f"{self.path.stem}-images", []
            for i, image in enumerate(images):
                place = folder / f"{safe}-{step or 0:08d}-{i}"
                path, file = first_free(place, partial(_create, suffix=".png"))
                with file:
                    file.write(png(image))
                files.append(f"{folder.name}/{path.name}")
            self.write([Row(step or 0, time.time(), {"_images": name, "files": files})])

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Write a row for each row of the table: ``_table``, the name, and the values by column."""
        now = time.time()
        self.write([Row(step or 0, now, {"_table": table_name, **dict(zip(columns, row))}) for row in data])

    def write(self, rows: Sequence[Row]) -> None:
        assert self._file is not None
        lines = [as_json({"_step": r.step, "_time": round(r.time, 3), **r.values}) + "\n" for r in rows]
        text = memoryview("".join(lines).encode())
        done = 0
        try:
            while done < len(text):
                done += self._file.write(text[done:])
        except OSError:
            self._rewind()  # half a line would spoil the next one
            raise
        self._size += len(text)

    def finish(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _create(path: Path, suffix: str = ".jsonl") -> tuple[Path, BinaryIO]:
    path = path.with_name(path.name + suffix)
    return path, open(path, "xb", buffering=0)


def first_free(first: Path, create: Callable[[Path], T]) -> T:
    """`create` at `first`, else at ``first-2``, ``first-3`` …: the first that raises no FileExistsError."""
    first.parent.mkdir(parents=True, exist_ok=True)
    place, number = first, 1
    while True:
        with suppress(FileExistsError):
            return create(place)
        number += 1
        place = first.with_name(f"{first.name}-{number}")


def png(image: Any) -> bytes:
    """A PNG file of a uint8 array of shape HWC with 1, 3 or 4 channels (W3C, Portable Network Graphics)."""
    height, width, channels = image.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in image)  # 0: no filter
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _about(path: Path) -> Path:
    """The file that describes the run with rows at `path`."""
    return path.with_name(path.name.removesuffix("l"))
