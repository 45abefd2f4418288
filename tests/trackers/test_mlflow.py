"""MLflow with a data base, and with a store of files, in the project's folder: what is there afterwards, by MLflow's own client."""

from __future__ import annotations

import io
import logging
import os
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from easymp import Accelerator

from ..conftest import Ranks
from .runs import SAVED, UPDATES, train

MISSING = [package for package in ("mlflow", "sqlalchemy", "alembic") if find_spec(package) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"optional packages are not installed: {' and '.join(MISSING)} (the extra 'mlflow')",
    ),
]


def said(folder: str, uri: str) -> dict[str, Any]:
    """What the only run of the experiment holds."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("run")
    (run,) = client.search_runs([experiment.experiment_id])
    steps = {
        name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    files = [item.path for item in client.list_artifacts(run.info.run_id)]
    return {
        "params": run.data.params,
        "tags": run.data.tags,
        "steps": steps,
        "status": run.info.status,
        "files": files,
    }


def with_a_file(folder: str, uri: str | None) -> str | None:
    """A run to which the script adds a file by MLflow's own function; what is in the environment afterwards."""
    import mlflow

    heard = io.StringIO()
    listening = logging.StreamHandler(heard)
    logging.getLogger("easymp").addHandler(listening)
    with Accelerator(cpu=True, project_dir=folder, log_with="mlflow") as acc:
        acc.init_trackers(
            "run", {"long": "x" * 9999}, init_kwargs={"mlflow": {"run_name": "mine", "nested_run": False}}
        )
        acc.log({"a, b": 1.0, "many": {f"{n}": n for n in range(250)}})
        assert acc.get_tracker("mlflow", unwrap=True).info.run_name == "mine"
        assert "these are cut: long" in heard.getvalue()
        mlflow.log_text("text", "note.txt")
    logging.getLogger("easymp").removeHandler(listening)
    return os.environ.get("MLFLOW_TRACKING_URI")


def drawn_by_it(folder: str) -> bool:
    """Whether MLflow, which draws a run's name, left Python's stream where it was."""
    with Accelerator(cpu=True, project_dir=folder, log_with="mlflow") as acc:
        before = random.getstate()
        acc.init_trackers("run")
        assert acc.get_tracker("mlflow", unwrap=True).info.run_name
        return random.getstate() == before


def test_a_name_is_not_drawn_from_the_training_s_stream(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(drawn_by_it, str(tmp_path), processes=1, env={"MLFLOW_TRACKING_URI": None}) == [True]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_was_killed_goes_on_under_its_id(ranks: Ranks, tmp_path: Path, processes: int) -> None:
    uri = f"file:{tmp_path}/mlruns"
    env = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true"}
    ranks.fails(train, str(tmp_path), "mlflow", True, processes=processes, env=env)
    assert ranks(train, str(tmp_path), "mlflow", processes=processes, env=env) == [SAVED] * processes
    (found,) = ranks(said, str(tmp_path), uri, processes=1, env=env)
    assert found["steps"]["loss"] == [(n, n) for n in range(1, UPDATES + 1)]
    assert found["steps"]["half/of it"] == [(n, n / 2) for n in range(1, UPDATES + 1)]
    assert found["params"]["lr"] == "0.1" and found["params"]["model/depth"] == "1"
    assert found["params"]["easymp/plan/processes"] == str(processes)
    assert found["tags"]["phase"] == "train" and found["status"] == "FINISHED"


def test_the_run_is_that_of_mlflows_own_functions(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(with_a_file, str(tmp_path), None, processes=1, env={"MLFLOW_TRACKING_URI": None}) == [None]
    (found,) = ranks(said, str(tmp_path), f"sqlite:///{tmp_path}/mlflow.db", processes=1)
    assert found["files"] == ["note.txt"] and (tmp_path / "mlartifacts").is_dir()
    assert found["steps"]["a_ b"] == [(0, 1.0)] and len(found["steps"]) == 251
