"""TensorBoard's event files, in a folder of the project with the run's name.

A resumed run writes to the same folder, and `purge_step` makes TensorBoard hide the values of steps after the
checkpoint; the files keep them. Another run of that name gets its own folder, ``log-2``.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .jsonl import first_free
from .rows import CHANNELS, Row, concise


class TensorBoard:
    """The event files of one run, in `logging_dir` from `start` on. `options` are those of torch's SummaryWriter."""

    name = "tensorboard"

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self._folder, self._options = folder, options
        self.logging_dir = folder
        self.writer: Any = None
        self._last: int | None = None  # the largest step so far

    @property
    def tracker(self) -> Any:
        return self.writer

    def start(self, run: str, config: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional package

        if self.writer is not None:
            self.finish()
            if self._last is None:  # a tracker was asked for before the run was resumed: nothing is in it
                shutil.rmtree(self.logging_dir)
        purge = None
        if position is not None and (self._folder / position["folder"]).is_dir():
            self.logging_dir, self._last = self._folder / position["folder"], position["step"]
            purge = 0 if self._last is None else self._last + 1
            _await_next_second(self.logging_dir)
        else:
            self.logging_dir, self._last = first_free(self._folder / run, _create), None
        self.writer = SummaryWriter(**{"log_dir": str(self.logging_dir), "purge_step": purge, **self._options})
        self._describe(config, purge or 0)

    def _describe(self, config: Mapping[str, Any], step: int) -> None:
        """Write the whole config as a text, and its single values to the table of hyperparameters."""
        from torch.utils.tensorboard.summary import hparams

        self.writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", step)
        values = {k: v if isinstance(v, (bool, int, float)) else str(v) for k, v in concise(config).items()}
        for summary in hparams(values, {}):
            self.writer.file_writer.add_summary(summary, step)
        self.writer.flush()

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write numbers as scalars and words as texts."""
        for name, value in values.items():
            add = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
            add(name, value, global_step=step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write batches of images by name, as `SummaryWriter.add_images` does; NHWC without ``dataformats``, too."""
        for name, images in values.items():
            dataformats = "NHWC" if np.shape(images)[-1] in CHANNELS else "NCHW"
            self.writer.add_images(name, images, global_step=step, **{"dataformats": dataformats, **options})

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Write a table as a text in Markdown."""
        rows = [columns, ["---"] * len(columns), *data]
        cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
        self.writer.add_text(table_name, "\n".join(f"| {' | '.join(row)} |" for row in cells), step)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.log(row.values, row.step, **{"walltime": row.time, **row.options.get(self.name, {})})
            self._last = row.step if self._last is None else max(self._last, row.step)
        self.writer.flush()

    def position(self) -> dict[str, Any]:
        self.writer.flush()
        return {"folder": self.logging_dir.relative_to(self._folder).as_posix(), "step": self._last}

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def _create(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _await_next_second(folder: Path) -> None:
    """Wait until a new file sorts last: the files' names, and with them the order of reading, begin with the second."""
    newest = max((path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")), default="")
    while newest == f"{int(time.time()):010d}":
        time.sleep(0.02)
