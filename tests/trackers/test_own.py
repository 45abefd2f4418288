"""Trackers of a script's own: of easymp's form, of Accelerate's, as objects and as classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from easymp import Accelerator, GeneralTracker
from easymp.logging import get_logger
from easymp.training.tracking import GeneralTracker as TheirName
from easymp.training.tracking import on_main_process


class Theirs(GeneralTracker):
    """As Accelerate's documentation has it."""

    name = "theirs"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str) -> None:
        self.run_name, self.said = run_name, []

    @property
    def tracker(self) -> list[Any]:
        return self.said

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.said.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        self.said.append((values, step, commit))


class Resumable:
    """Keeps rows in a class attribute, as a service would, and drops those that a resumed run logs again."""

    name = "resumable"
    service: ClassVar[list[Any]] = []

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def start(self, run: str, config: dict[str, Any]) -> None:
        self.service.append(f"{run} {self.tag}")

    def log(self, values: dict[str, Any], step: int | None) -> None:
        self.service.append(step)

    def finish(self) -> None:
        self.service.append("end")

    def position(self) -> dict[str, Any]:
        return {"rows": len(self.service)}

    def resume(self, position: dict[str, Any]) -> None:
        del self.service[position["rows"] :]


def test_accelerates() -> None:
    mine = Theirs("x")
    with Accelerator(cpu=True, mixed_precision="no", log_with=mine) as acc:
        acc.init_trackers("run", {"lr": 0.1, "model": {"depth": 2}})
        acc.log({"loss": 1.0}, step=3, log_kwargs={"theirs": {"commit": False}})
        acc.log({"loss": 2.0}, step=4)
        assert acc.get_tracker("theirs") is mine and acc.get_tracker("theirs", unwrap=True) is mine.said
    config, *said = mine.said
    assert (config["lr"], config["model/depth"], config["easymp/plan/precision"]) == (0.1, 2, "fp32")
    assert said == [({"loss": 1.0}, 3, False), ({"loss": 2.0}, 4, True)]


def test_the_modules_have_the_names_that_accelerates_have() -> None:
    assert TheirName is GeneralTracker and get_logger(__name__)


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
