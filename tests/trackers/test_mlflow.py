"""MLflow with a data base, and with a store of files, in the project's folder.

What is there afterwards, by MLflow's own client.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from easymp import Accelerator

from ..conftest import Ranks
from .runs import SAVED, UPDATES, train

MISSING = [package for package in ("mlflow", "sqlalchemy", "alembic", "PIL") if find_spec(package) is None]
WHY = f"optional packages are not installed: {' and '.join(MISSING)} (the extra 'mlflow')"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=WHY)]


def read_run(uri: str) -> tuple[Any, dict[str, list[tuple[int, float]]], list[str]]:
    """The only run of the experiment, its metrics, and its files."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("run").experiment_id])
    number = run.info.run_id
    metrics = {name: [(m.step, m.value) for m in client.get_metric_history(number, name)] for name in run.data.metrics}
    files = [item.path for folder in (None, "images") for item in client.list_artifacts(number, folder)]
    return run, metrics, files


def log_images_tables_and_files(folder: str) -> None:
    """A run with images and a table, to which the script adds a file by MLflow's own function."""
    import mlflow

    log_text = io.StringIO()
    listening = logging.StreamHandler(log_text)
    logging.getLogger("easymp").addHandler(listening)
    with Accelerator(cpu=True, project_dir=folder, log_with="mlflow") as acc:
        options = {"mlflow": {"run_name": "mine", "nested_run": False}}
        acc.init_trackers("run", {"long": "x" * 9999}, init_kwargs=options)
        acc.log({"a, b": 1.0, "many": {f"{n}": n for n in range(250)}})
        acc.log_images("val/digits", torch.eye(4).repeat(2, 3, 1, 1), step=3)
        acc.log_table("found", ["digit", "as"], [[1, "one"], [2, None]], step=3)
        assert acc.get_tracker("mlflow", unwrap=True).info.run_name == "mine"
        assert "these are cut: long" in log_text.getvalue()
        mlflow.log_text("text", "note.txt")
    logging.getLogger("easymp").removeHandler(listening)
    assert "MLFLOW_TRACKING_URI" not in os.environ
    run, metrics, files = read_run(f"sqlite:///{folder}/mlflow.db")
    assert {"note.txt", "images", "tables"} <= set(files) and Path(folder, "mlartifacts").is_dir()
    assert metrics["a_ b"] == [(0, 1.0)] and len(metrics) == 251
    images = [name for name in files if name.endswith(".png")]
    assert len(images) == 2 and all(name.startswith("images/val~digits~") for name in images)
    table = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/tables/found-3.json")
    assert table == {"columns": ["digit", "as"], "data": [[1, "one"], [2, None]]}
    tag = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert tag == [{"path": "tables/found-3.json", "type": "table"}]
    with Accelerator(cpu=True, project_dir=folder, log_with="mlflow") as acc:
        before = random.getstate()
        acc.init_trackers("run")
        assert acc.get_tracker("mlflow", unwrap=True).info.run_name  # which MLflow draws
        assert random.getstate() == before


def test_the_run_is_that_of_mlflows_own_functions(ranks: Ranks, tmp_path: Path) -> None:
    ranks(log_images_tables_and_files, str(tmp_path), processes=1, env={"MLFLOW_TRACKING_URI": None})


def killed(uri: str) -> None:
    run, metrics, _ = read_run(uri)
    assert metrics["loss"] == [(n, n) for n in range(1, UPDATES + 1)]
    assert metrics["half/of it"] == [(n, n / 2) for n in range(1, UPDATES + 1)]
    assert run.data.params["lr"] == "0.1" and run.data.params["model/depth"] == "1"
    assert run.data.params["easymp/plan/processes"] == "2"
    assert run.data.tags["phase"] == "train" and run.info.status == "FINISHED"


def test_a_run_that_was_killed_goes_on_under_its_id(ranks: Ranks, tmp_path: Path) -> None:
    uri = f"file:{tmp_path}/mlruns"
    env = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true"}
    ranks.fails(train, str(tmp_path), "mlflow", True, env=env)
    assert ranks(train, str(tmp_path), "mlflow", env=env) == [SAVED] * 2
    ranks(killed, uri, processes=1, env=env)
