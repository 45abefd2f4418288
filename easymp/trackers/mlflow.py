"""MLflow: a run at MLFLOW_TRACKING_URI, or in ``mlflow.db`` (SQLite) in the project's folder.

It belongs to the experiment that the script names, and is the active run of MLflow's own functions, so that
`mlflow.log_artifact` adds to it. A resumed run keeps its id, and values of steps that a metric has already stay as they
are. Rows are sent about once a second, together, and the training waits for that request.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import env
from ..errors import failing
from ..logging import get_logger
from .rows import Row, concise

logger = get_logger(__name__)
URI = "MLFLOW_TRACKING_URI"
AT_ONCE = {"params": 100, "tags": 100, "metrics": 1000}  # items that MLflow takes in one request
TABLES = "mlflow.loggedArtifacts"  # the tag that lists tables
PATH = re.compile(r"[^a-zA-Z0-9_\-./ ]")  # what MLflow refuses in names of images and files
LONGEST = 500  # characters of a parameter that all versions of MLflow take


class MLflow:
    """One run. `options` are those of `mlflow.start_run`, and `experiment_name`, by default the run's name."""

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

        values = {allowed(key): str(value) for key, value in concise(config).items()}
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
                key = allowed(name)
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


def allowed(key: str) -> str:
    """`key` with ``_`` for each character that MLflow refuses in names."""
    return "".join(letter if letter.isalnum() or letter in "_-. :/" else "_" for letter in key)
