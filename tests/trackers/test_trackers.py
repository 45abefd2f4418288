"""Trackers by name and of the script's own: values in, rows out. test_tracking.py has the calls of an Accelerator."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from easymp import Accelerator, GeneralTracker, LoggerType, SettingError
from easymp.trackers import TRACKERS
from easymp.trackers import rows as pending
from easymp.trackers.rows import Pending, Row

from .runs import rows

PACKAGES = ("tensorboard", "wandb", "mlflow")  # each is also the name of its tracker and of the extra


class Theirs(GeneralTracker):
    """A tracker as scripts for Accelerate have them."""

    name = "theirs"

    def __init__(self, tag: str = "") -> None:
        super().__init__()
        self.calls: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        self.calls.append((values, step, commit))


# -- which trackers ----------------------------------------------------------------------------------------------------


def names(log_with: Any, folder: Path) -> list[str]:
    with Accelerator(cpu=True, project_dir=folder, log_with=log_with) as acc:
        return [tracker.name for tracker in acc._logbook.all()]


def test_names_members_and_own_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for log_with in ("jsonl", " JSONL ", [LoggerType.JSONL], LoggerType.JSONL, None):
        assert names(log_with, tmp_path) == ["jsonl"]
    assert names(["jsonl", Theirs(), "jsonl"], tmp_path) == ["jsonl", "theirs"]
    assert names("none", tmp_path) == names([], tmp_path) == []
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(SettingError, match=rf"needs the package {package}, .*'easymp\[{package}\]'"):
            Accelerator(cpu=True, log_with=package)
    installed = names(["all", Theirs], tmp_path)
    assert {"jsonl", "theirs"} <= {*installed} <= {*TRACKERS, "theirs"} - {*PACKAGES, "console"}
    (tmp_path / "wandb").mkdir()  # as wandb itself makes one: a folder is not a package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb")
    with pytest.raises(SettingError, match="needs the package wandb"):
        Accelerator(cpu=True, log_with="wandb")


@pytest.mark.parametrize(
    ("log_with", "message"),
    [
        ("tensorbord", r"'tensorbord' is not a tracker, did you mean 'tensorboard'"),
        (LoggerType.AIM, "'aim' is not a tracker.* or pass an object with name"),
        (object(), "has no name and no start and no log and no finish. Pass a name"),
        ([Theirs(), Theirs()], "two trackers called 'theirs'"),
        (7, "is not a tracker"),
    ],
)
def test_wrong_trackers_are_refused(log_with: object, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Accelerator(cpu=True, log_with=log_with)


# -- values ------------------------------------------------------------------------------------------------------------


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


def test_values_of_all_kinds_become_json(tmp_path: Path) -> None:
    plain = {"int": 3, "float": 0.5, "bool": True, "word": "ü\u2028\n", "large": 10**30}
    numpy = {"np": np.float32(0.5), "np0": np.array(2), "np_bool": np.bool_(True)}
    nonfinite = {"a": math.nan, "b": math.inf, "c": -math.inf}
    nested = {"none": None, "d": {"e": {"f": 1}}, "loss": torch.tensor(2.0, requires_grad=True)}
    with Accelerator(cpu=True, project_dir=tmp_path) as acc:
        acc.log({**plain, **numpy, **nonfinite, **nested, "fraction": Fraction(1, 4)}, step=np.int64(4))
    (line,) = (tmp_path / "log.jsonl").read_text().split("\n")[:-1]
    row = strict(line)
    assert row.pop("_step") == 4 and row.pop("_time") > 1e9
    assert [row.pop(name) for name in "abc"] == ["NaN", "Infinity", "-Infinity"]
    assert row == {**plain, "np": 0.5, "np0": 2, "np_bool": True, "fraction": 0.25, "d/e/f": 1, "loss": 2.0}


@dataclass
class Model:
    depth: int = 2
    sizes: tuple[int, ...] = (1, 2)
    kind: LoggerType = LoggerType.JSONL
    extra: dict[str, Any] = field(default_factory=lambda: {"path": Path("a/b"), "dtype": torch.float16})


def test_hyperparameters_of_all_kinds(tmp_path: Path) -> None:
    tracker = Theirs()
    plain = {"lr": 0.1, "name": None}
    converted = {"model": Model(), "tags": {"b", "a"}, "scale": torch.tensor(2.0), "limit": math.inf}
    with Accelerator(cpu=True, mixed_precision="no", project_dir=tmp_path, log_with=[tracker, "jsonl"]) as acc:
        acc.init_trackers("run", argparse.Namespace(**plain, **converted))
        acc.log({"x": 1})
        cpu = acc.plan.hardware.cpu.name
    config = strict((tmp_path / "run.json").read_text())["starts"][0]["config"]
    assert config.pop("easymp")
    model = {"depth": 2, "sizes": [1, 2], "kind": "jsonl", "extra": {"path": "a/b", "dtype": "torch.float16"}}
    assert config == {**plain, "model": model, "tags": ["a", "b"], "scale": 2.0, "limit": "Infinity"}
    flat = tracker.calls[0]  # for lists of parameters
    assert flat["model/extra/path"] == "a/b" and flat["model/sizes"] == "[1, 2]"
    assert (flat["easymp/plan/precision"], flat["easymp/machine/cpu"]) == ("fp32", cpu)
    assert all(value is None or isinstance(value, (str, int, float, bool)) for value in flat.values())


# -- the file of JSON lines --------------------------------------------------------------------------------------------


def test_a_line_that_could_not_be_written_leaves_none_behind(tmp_path: Path) -> None:
    with Accelerator(cpu=True, project_dir=tmp_path) as acc:
        tracker = acc.get_tracker("jsonl")
        tracker.log({"a": 1}, 1)
        file, left = tracker._file, [20]

        def write(text: Any) -> int:
            if not left:
                raise OSError("No space left on device")
            return file.write(text[: left.pop()])

        tracker._file = mock.Mock(wraps=file, write=write)
        with pytest.raises(OSError, match="No space left"):
            tracker.log({"a": 2}, 2)
        tracker._file = file
        tracker.log({"a": 4}, 4)
    assert [row["_step"] for row in rows(tmp_path)] == [1, 4]


def test_a_file_that_is_shorter_than_at_the_checkpoint_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Accelerator(cpu=True, project_dir=tmp_path) as acc:
        for step in (1, 2):
            acc.log({"a": step}, step=step)
        acc.save_state()
    log = tmp_path / "log.jsonl"
    log.write_text(log.read_text().split("\n")[0] + "\n")
    with Accelerator(cpu=True, project_dir=tmp_path) as acc:
        acc.resume()
        acc.log({"a": 3}, step=3)
    assert [row["_step"] for row in rows(tmp_path)] == [1, 3]
    assert "rows are missing" in caplog.text
    with Accelerator(cpu=True, project_dir=tmp_path) as acc:
        acc.init_trackers("run", init_kwargs={"jsonl": {"flush": 1}})
        with pytest.raises(SettingError, match="it takes no options"):
            acc.get_tracker("jsonl")


# -- own ones ----------------------------------------------------------------------------------------------------------


class Resumable:
    """A tracker of a service that keeps rows by position."""

    name = "resumable"
    service: list[Any] = []  # noqa: RUF012

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def start(self, run: str, config: Any) -> None:
        self.service.append(f"{run} {self.tag}")

    def log(self, values: Any, step: int | None) -> None:
        self.service.append(step)

    def finish(self) -> None:
        self.service.append("end")

    def position(self) -> dict[str, Any]:
        return {"rows": len(self.service)}

    def resume(self, position: dict[str, Any]) -> None:
        del self.service[position["rows"] :]


def test_one_that_resumes(tmp_path: Path) -> None:
    Resumable.service.clear()
    for first in (1, 3):
        with Accelerator(cpu=True, project_dir=tmp_path, log_with=Resumable) as acc:
            acc.init_trackers("run", init_kwargs={"resumable": {"tag": f"{first}"}})
            acc.resume()
            acc.log({"x": 1}, step=first)
            acc.log({"x": 1}, step=first + 1)
            if first == 1:
                acc.save_state()
                acc.log({"x": 1}, step=3)
    assert Resumable.service == ["run 1", 1, 2, "run 3", 3, 4, "end"]


# -- rows on their way from a device -----------------------------------------------------------------------------------


@pytest.fixture
def device_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device, played by the CPU, whose transfers arrive when its event says so."""
    empty, module = torch.empty, mock.MagicMock()
    module.current_stream.return_value = mock.Mock(device=torch.device("cpu"))
    module.Event.return_value.query.return_value = False
    monkeypatch.setattr(pending, "HOST", "elsewhere")
    monkeypatch.setattr(pending, "EVENTS", ("cpu",))
    monkeypatch.setattr(torch, "get_device_module", lambda d: module)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    return module


def row(step: int, **values: Any) -> Row:
    return Row(step, 0.0, values)


def test_rows_arrive_in_order_when_their_numbers_do(device_module: Any) -> None:
    rows, loss, event = Pending(), torch.tensor(1.0), device_module.Event.return_value
    rows.add(row(1, loss=loss, count=torch.tensor(2**60), flag=torch.tensor(True), word="x"))
    loss.add_(1)
    rows.add(row(2, loss=loss, half=torch.tensor(0.5, dtype=torch.bfloat16)))
    rows.add(row(3, plain=3))
    rows.send()
    rows.add(row(4, loss=loss))
    assert rows.arrived() == [] and rows and len(rows) == 1
    event.query.return_value = True
    assert [r.values for r in rows.arrived()] == [
        {"loss": 1.0, "count": 2**60, "flag": True, "word": "x"},
        {"loss": 2.0, "half": 0.5},
        {"plain": 3},
    ]
    assert (
        device_module.Event.call_count == 4 and not event.synchronize.called
    )  # one a dtype, whatever the number of rows
    first_stream, stream = device_module.current_stream.return_value, mock.Mock(device=torch.device("cpu"))
    device_module.current_stream.return_value = stream
    rows.send()
    stream.wait_stream.assert_called_once_with(first_stream)  # the copy of row 4 was made there
    event.query.return_value = False
    assert [r.step for r in rows.arrived(wait=True)] == [4] and event.synchronize.call_count == 1
    assert not rows


@pytest.mark.gpu
def test_log_does_not_wait_for_the_device(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class Keeping:
        name = "keeping"
        start = finish = staticmethod(lambda *_: None)
        log = staticmethod(lambda values, step: logged.append((step, values["x"], values["y"])))

    monkeypatch.setattr("easymp.trackers.logbook.EVERY", 0.0)
    with Accelerator(log_with=Keeping(), project_dir=tmp_path) as acc:
        x, y = torch.zeros((), device=acc.device), torch.zeros((), device=acc.device, dtype=torch.bfloat16)
        acc.log({"x": x, "y": y}, step=0)
        acc._logbook.settle_rows()  # the first pinned memory of a process is the driver's to give, which may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(1, 200):
                x += 1
                y += 1
                acc.log({"x": x, "y": y}, step=step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert logged == [(step, step, step) for step in range(200)]
