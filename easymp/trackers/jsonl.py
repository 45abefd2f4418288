"""Rows as JSON lines in the project's folder: ``log.jsonl``, an object a row; ``log.json`` describes the run.

A row has ``_step``, ``_time`` (seconds since 1970) and the values by name. JSON has no NaN and no infinities: they are
the words "NaN", "Infinity" and "-Infinity", which float(), pandas.read_json and JavaScript's Number read as numbers.

A row of a table has ``_table``, the table's name, and the values by column. Images are PNG files in the folder
``log-images``, which a row with ``_images``, their name, lists as `files`.

A resumed run continues its file from the row at which the checkpoint was taken: later rows, which will be logged again,
move to ``log.jsonl.cut``. Another run in the same folder begins ``log-2.jsonl``; no file is overwritten.
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
from .rows import Row, finite

logger = get_logger(__name__)
T = TypeVar("T")


class JsonLines:
    """The file; `path` is its path from `start` on."""

    name = "jsonl"

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        if options:
            raise SettingError(f"init_kwargs={{'jsonl': {dict(options)!r}}}: it takes no options. Leave them out")
        self._folder, self.path = folder, folder
        self._file: BinaryIO | None = None
        self._id, self._size = "", 0

    @property
    def tracker(self) -> Path:
        return self.path

    def start(self, run: str, config: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        starts = self._continue(position) if position is not None else None
        if starts is None:
            self._close_former()
            self.path, self._file = first_free(self._folder / run, _create)
            self._id, self._size, starts = uuid.uuid4().hex, 0, []
        starts.append({"time": time.time(), "config": config})
        description = _description(self.path)
        unfinished = description.with_name(description.name + ".new")
        text = json.dumps({"run": run, "id": self._id, "starts": starts}, indent=2)
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(description)
        logger.info("rows are logged to %s", self.path)

    def _continue(self, position: Mapping[str, Any]) -> list[Any] | None:
        """Open the resumed run's file, cut it at the checkpoint, and return its starts; None if it is not here."""
        path = self._folder / position["file"]
        try:
            description = json.loads(_description(path).read_text(encoding="utf-8"))
            if description["id"] != position["id"]:
                raise ValueError("it belongs to another run")
            file = open(path, "r+b", buffering=0)  # noqa: SIM115
        except (OSError, ValueError, KeyError) as error:
            logger.warning("%s cannot be continued, so rows go to a new file (%s)", path, error)
            return None
        self._close_former()
        self._file, self.path, self._id = file, path, position["id"]
        self._cut(position["bytes"])
        return list(description["starts"])

    def _cut(self, size: int) -> None:
        """Move the rows after `size` bytes to a file beside this one."""
        assert self._file is not None
        actual_size = os.fstat(self._file.fileno()).st_size
        if actual_size < size:
            logger.warning(
                "%s has %d bytes and had %d at the checkpoint: rows are missing", self.path, actual_size, size
            )
        self._size = min(size, actual_size)
        self._file.seek(self._size)
        if later_rows := self._file.read():
            with open(self.path.with_name(self.path.name + ".cut"), "ab") as cut:
                cut.write(later_rows)
            self._rewind()

    def _rewind(self) -> None:
        assert self._file is not None
        self._file.truncate(self._size)
        self._file.seek(self._size)

    def _close_former(self) -> None:
        """Close the file; delete it if it has no rows, because a tracker was asked for before the run was resumed."""
        was_open = self._file is not None
        self.finish()
        if was_open and not self._size:
            self.path.unlink()
            _description(self.path).unlink()

    def position(self) -> dict[str, Any]:
        """The end of the file, after a sync to disk."""
        assert self._file is not None
        os.fsync(self._file.fileno())
        return {"file": self.path.relative_to(self._folder).as_posix(), "id": self._id, "bytes": self._size}

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write a row at once, beside those of `acc.log`."""
        self.write([Row(step or 0, time.time(), dict(values))])

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write uint8 arrays of shape NHWC as PNG files, and a row with ``_images``, the name, and their `files`."""
        for name, images in values.items():
            file_name = "".join(x if x.isalnum() or x in "-." else "_" for x in name)
            folder, files = self.path.parent / f"{self.path.stem}-images", []
            for i, image in enumerate(images):
                path, file = first_free(folder / f"{file_name}-{step or 0:08d}-{i}", partial(_create, suffix=".png"))
                with file:
                    file.write(png(image))
                files.append(f"{folder.name}/{path.name}")
            self.write([Row(step or 0, time.time(), {"_images": name, "files": files})])

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Write a row for each row of the table: ``_table``, the name, and the values by column."""
        rows = [{"_table": table_name, **dict(zip(columns, row))} for row in data]
        self.write([Row(step or 0, time.time(), row) for row in rows])

    def write(self, rows: Sequence[Row]) -> None:
        assert self._file is not None
        values = ({"_step": row.step, "_time": round(row.time, 3), **row.values} for row in rows)
        lines = (json.dumps({name: finite(value) for name, value in row.items()}) + "\n" for row in values)
        text = memoryview("".join(lines).encode())
        count = 0
        try:
            while count < len(text):
                count += self._file.write(text[count:])
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


def first_free(path: Path, create: Callable[[Path], T]) -> T:
    """`create` at `path`, else at ``path-2``, ``path-3`` …: the first that raises no FileExistsError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        with suppress(FileExistsError):
            return create(path if number == 1 else path.with_name(f"{path.name}-{number}"))
        number += 1


def png(image: Any) -> bytes:
    """A PNG file of a uint8 array of shape HWC with 1, 3 or 4 channels (W3C, Portable Network Graphics)."""
    height, width, channels = image.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in image)  # 0: no filter
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _description(path: Path) -> Path:
    """The file that describes the run with rows at `path`."""
    return path.with_name(path.name.removesuffix("l"))
