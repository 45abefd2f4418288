"""Trackers of other packages: TensorBoard, Weights & Biases and MLflow. Each imports its package when it starts."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..base import env
from ..errors import failing
from ..logging import get_logger
from .jsonl import first_free
from .rows import CHANNELS, Row, concise

logger = get_logger(__name__)

# Of MLflow
URI = "MLFLOW_TRACKING_URI"
AT_ONCE = {"params": 100, "tags": 100, "metrics": 1000}  # items that it takes in one request
TABLES = "mlflow.loggedArtifacts"  # the tag that lists tables
KEY = re.compile(r"[^\w\-. :/]")  # what it refuses in names of values
PATH = re.compile(r"[^a-zA-Z0-9_\-./ ]")  # and in those of images and files
LONGEST = 500  # characters of a parameter that all of its versions take


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
    """Wait until a new file sorts last: the files' names, and with them the order of reading, begin with the second."""
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
