"""The trackers that keep rows: JSON lines, TensorBoard, Weights & Biases and MLflow.

Each of the last three imports its package when it starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from ..base import env
from ..errors import SettingError, failing
from ..logging import get_logger
from .rows import CHANNELS, Row, concise, finite

logger = get_logger(__name__)
T = TypeVar("T")

# Of MLflow
URI = "MLFLOW_TRACKING_URI"
AT_ONCE = {"params": 100, "tags": 100, "metrics": 1000}  # items that it takes in one request
TABLES = "mlflow.loggedArtifacts"  # the tag that lists tables
KEY = re.compile(r"[^\w\-. :/]")  # what it refuses in names of values
PATH = re.compile(r"[^a-zA-Z0-9_\-./ ]")  # and in those of images and files
LONGEST = 500  # characters of a parameter that all of its versions take


class JsonLines:
    """Rows as JSON lines in the project's folder: ``log.jsonl``, an object a row; ``log.json`` describes the run.

    A row has ``_step``, ``_time`` (seconds since 1970) and the values by name. JSON has no NaN and no infinities: they
    are the words "NaN", "Infinity" and "-Infinity", which float(), pandas.read_json and JavaScript's Number read as
    numbers. A row of a table has ``_table``, the table's name, and the values by column. Images are PNG files in the
    folder ``log-images``, which a row with ``_images``, their name, lists as `files`.

    A resumed run continues its file from the row at which the checkpoint was taken: later rows, which will be logged
    again, move to ``log.jsonl.cut``. Another run in the same folder begins ``log-2.jsonl``; no file is overwritten.
    `path` is the file's path from `start` on.
    """

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
    """Call `create` on `path`, ``path-2``, ``path-3`` …, until one raises no FileExistsError; returns its result."""
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


class TensorBoard:
    """The event files of one run, in `logging_dir` from `start` on. `options` are those of torch's SummaryWriter.

    A resumed run writes to the same folder, and `purge_step` makes TensorBoard hide the values of steps after the
    checkpoint; the files keep them. Another run of that name gets its own folder, ``log-2``.
    """

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
            self.logging_dir, self._last = first_free(self._folder / run, _new_folder), None
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


def _new_folder(path: Path) -> Path:
    path.mkdir()
    return path


def _await_next_second(folder: Path) -> None:
    """Wait for the next second if a file of this one exists. Names begin with the second, and are read in order."""
    newest = max((path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")), default="")
    while newest == f"{int(time.time()):010d}":
        time.sleep(0.02)


class WandB:
    """One run, online, offline or off as WANDB_MODE says. `options` are those of `wandb.init`; `folder` gets its files.

    A resumed run keeps its id. The service takes no step twice: steps that it had before the crash stay as they are.
    Offline each process has its own folder of that id, and `wandb sync` joins them.
    """

    name = "wandb"

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self._folder, self._options = folder, options
        self.run: Any = None
        self._logged_steps = 0  # that the service had before this start

    @property
    def tracker(self) -> Any:
        return self.run

    def start(self, run: str, config: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        import wandb

        if self.run is not None:
            if position is not None and self.run.id == position["id"]:
                return  # an earlier checkpoint of this run
            self.finish()
        self._folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"project": run, "dir": str(self._folder), "config": dict(config)}
        if position is not None:
            options |= {"id": position["id"], "resume": "allow"}
        self.run = wandb.init(**{**options, **self._options})
        self._logged_steps = self.run.step if position is not None and self.run.resumed else 0
        if self._logged_steps:
            self.run.config.update(dict(config), allow_val_change=True)
            text = "wandb has run %s up to step %d: rows of steps before it are not logged again"
            logger.info(text, self.run.id, self._logged_steps - 1)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log as `wandb.Run.log` does, pictures and tables too."""
        self.run.log(dict(values), step=step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log lists of pictures by name."""
        import wandb

        self.log({name: [wandb.Image(image) for image in images] for name, images in values.items()}, step, **options)

    def log_table(
        self,
        table_name: str,
        columns: Any = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Log one `wandb.Table`."""
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step, **options)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.step >= self._logged_steps:
                self.log(row.values, row.step, **row.options.get(self.name, {}))

    def position(self) -> dict[str, Any]:
        return {"id": self.run.id}

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish(exit_code=1 if failing() else 0)
            self.run = None


class MLflow:
    """A run at MLFLOW_TRACKING_URI, or in ``mlflow.db`` (SQLite) in the project's folder.

    It is the active run of MLflow's own functions, so that `mlflow.log_artifact` adds to it. A resumed run keeps its
    id, and values of steps that a metric has already stay. The training waits for the request that sends the rows.
    `options` are those of `mlflow.start_run`, and `experiment_name`, by default the run's name.
    """

    name = "mlflow"

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self._folder, self._options = folder, dict(options)
        self._former_variables: dict[str, str | None] | None = None  # if this class has changed the environment
        self.run: Any = None
        self._client: Any = None
        self._logged_steps: dict[str, int] = {}  # by metric, its last step before this start

    @property
    def tracker(self) -> Any:
        return self.run

    def start(self, run: str, config: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        import mlflow

        self.finish()
        options = dict(self._options)
        name = options.pop("experiment_name", env.read("MLFLOW_EXPERIMENT_NAME") or run)
        if "nested_run" in options:  # as Accelerate calls it
            options["nested"] = options.pop("nested_run")
        artifacts = None
        if not env.read(URI):
            self._folder.mkdir(parents=True, exist_ok=True)
            database = (self._folder / "mlflow.db").absolute().as_posix()
            self._former_variables = env.put({URI: f"sqlite:///{database}"})
            artifacts = (self._folder / "mlartifacts").absolute().as_uri()
        self._client = client = mlflow.MlflowClient(env.read(URI))
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name, artifacts) if experiment is None else experiment.experiment_id
        options = {"experiment_id": number, **options} if position is None else {"run_id": position["id"]}
        self.run = mlflow.start_run(**options)
        run_id = self.run.info.run_id
        data = client.get_run(run_id).data
        self._logged_steps = {
            name: max(metric.step for metric in client.get_metric_history(run_id, name))
            for name in (data.metrics if position is not None else ())
        }
        self._log_parameters(config, data.params)

    def _log_parameters(self, config: Mapping[str, Any], logged: Mapping[str, str]) -> None:
        """Log parameters; MLflow never changes one, so a resumed run adds new ones only."""
        from mlflow.entities import Param

        values = {KEY.sub("_", key): str(value) for key, value in concise(config).items()}
        if cut := [key for key, value in values.items() if len(value) > LONGEST]:
            logger.warning("MLflow takes %d characters of a parameter, and these are cut: %s", LONGEST, ", ".join(cut))
        values = {key: value[:LONGEST] for key, value in values.items()}
        if changed := [key for key, value in values.items() if logged.get(key, value) != value]:
            logger.warning("MLflow keeps the first values of these parameters: %s", ", ".join(changed))
        self._send("params", [Param(key, value) for key, value in values.items() if key not in logged])

    def _send(self, kind: str, items: Sequence[Any]) -> None:
        for begin in range(0, len(items), AT_ONCE[kind]):
            self._client.log_batch(self.run.info.run_id, **{kind: items[begin : begin + AT_ONCE[kind]]})

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers as metrics, at once, and words as tags."""
        self.write([Row(step or 0, time.time(), dict(values))])

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log arrays of images by name, each image as `MlflowClient.log_image` does."""
        for name, images in values.items():
            for number, image in enumerate(images):
                key = PATH.sub("_", name if len(images) == 1 else f"{name}/{number}")
                self._client.log_image(self.run.info.run_id, image, key=key, step=step, **options)

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Log ``tables/NAME-STEP.json`` as `mlflow.log_table` does, which MLflow's page shows as a table."""
        path, run_id = f"tables/{PATH.sub('_', table_name)}-{step or 0}.json", self.run.info.run_id
        self._client.log_dict(run_id, {"columns": list(columns), "data": data}, path)
        logged = json.loads(self._client.get_run(run_id).data.tags.get(TABLES, "[]"))
        if (entry := {"path": path, "type": "table"}) not in logged:
            self._client.set_tag(run_id, TABLES, json.dumps([*logged, entry]))

    def write(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric, RunTag

        metrics, tags = [], {}
        for row in rows:
            for name, value in row.values.items():
                key = KEY.sub("_", name)
                if isinstance(value, str):
                    tags[key] = RunTag(key, value)
                elif row.step > self._logged_steps.get(key, row.step - 1):
                    metrics.append(Metric(key, float(value), int(row.time * 1000), row.step))
        self._send("metrics", metrics)
        self._send("tags", list(tags.values()))

    def position(self) -> dict[str, Any]:
        return {"id": self.run.info.run_id}

    def finish(self) -> None:
        import mlflow

        try:
            if self.run is not None:
                mlflow.end_run("FAILED" if failing() else "FINISHED")
                self.run = None
        finally:
            if self._former_variables is not None:
                env.put(self._former_variables)
                self._former_variables = None
