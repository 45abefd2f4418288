"""Logging through the Accelerator.

What lands in the file, on which rank, what trackers may do wrong, and what follows a resume.
"""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch

from easymp import Accelerator, SettingError, Settings, StepError, TrackerError
from easymp.trackers import logbook

from .trackers.runs import KILLED, SAVED, UPDATES, rows, train


class Kept:
    """A tracker that remembers; `trouble` is raised by the method of that name."""

    name = "Kept"

    def __init__(self, **trouble):
        self.trouble, self.said = trouble, []

    def _stumble(self, method):
        if method in self.trouble:
            raise self.trouble[method]

    def start(self, run, config):
        self._stumble("start")

    def log(self, values, step):
        self._stumble("log")
        self.said.append((step, dict(values)))

    def finish(self):
        self._stumble("finish")


def test_rows_are_json_lines_in_the_projects_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(logbook, "EVERY", 1000.0)
    acc = Accelerator(cpu=True, project_dir=tmp_path)
    loss = torch.tensor(1.0)
    acc.log({"loss": loss, "phase": "train", "parts": {"a": 1, "b": None}})
    loss += 1  # what was logged does not change
    acc.log({"loss": loss}, step=7)
    assert not list(tmp_path.iterdir())  # rows wait
    acc.end_training()
    first, second = rows(tmp_path)
    assert {**first, "_time": 0} == {"_step": 0, "_time": 0, "loss": 1.0, "phase": "train", "parts/a": 1}
    assert (second["_step"], second["loss"]) == (7, 2.0) and second["_time"] >= first["_time"] > 1e9
    about = json.loads((tmp_path / "log.json").read_text())
    assert about["starts"][0]["config"]["easymp"]["plan"]["strategy"]["value"] == "single"


def test_without_a_step_updates_are_counted():
    kept = Kept()
    with Accelerator(cpu=True, log_with=kept, gradient_accumulation_steps=2) as acc:
        model = torch.nn.Linear(1, 1)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(4):
            with acc.accumulate(model):
                acc.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                acc.log({"norm": acc.clip_grad_norm_(model.parameters(), 1.0), "x": 1})
    assert [step for step, _ in kept.said] == [0, 1, 1, 2]
    # None leaves a value out
    assert ["norm" in values for _, values in kept.said] == [False, True, False, True]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda acc: acc.log([1]), SettingError, "got a list: pass a dict"),
        (lambda acc: acc.log({"x": torch.ones(2)}), SettingError, "reduce it to one number"),
        (lambda acc: acc.log({"a": {"x": object()}}), SettingError, "got a object, which is neither"),
        (lambda acc: acc.log({"x": 1}, step=1.5), SettingError, r"step=1.5\): pass a whole number"),
        (lambda acc: acc.log({"x": 1}, step=torch.tensor(1)), SettingError, "pass a whole number"),
        (lambda acc: acc.log({"x": 1}, step=True), SettingError, "whole number"),
        (lambda acc: acc.log({"x": 1}, step="1"), SettingError, "whole number"),
        (lambda acc: acc.log({1: 2}), SettingError, "got 1 as a name"),
        (lambda acc: acc.log({"x": torch.tensor(1j)}), SettingError, "it has no real value"),
        (lambda acc: acc.log({"x": torch.ones((), device="meta")}), SettingError, "on meta: it has no real value"),
        (lambda acc: acc.log({"x": np.ones(2)}), SettingError,
         "got a ndarray, which is neither a number nor a word: for images"),
        (lambda acc: acc.log({"x": 1}, log_kwargs={"wandb": {}}), SettingError, "'wandb' is not a tracker"),
        (lambda acc: acc.log({"x": 1}, log_kwargs={"jsonl": {}}), SettingError, "jsonl takes nothing beside"),
        (lambda acc: acc.get_tracker("jsnl"), SettingError, "'jsnl' is not a tracker of this run, did you"),
        (lambda acc: acc.get_tracker(3), SettingError, "get_tracker: 3 is not a tracker of this run"),
        (lambda acc: acc.init_trackers("../x"), SettingError, "pass a name"),
        (lambda acc: acc.init_trackers("x", init_kwargs={"tensorboard": {}}), SettingError, "kwargs: 'tensorboard'"),
        (lambda acc: (acc.log({"x": 1}), acc.init_trackers("x")), StepError, "Call it first"),
        (lambda acc: (acc.log_table("x", ["a"], []), acc.init_trackers("x")), StepError, "Call it first"),
        (lambda acc: (acc.end_training(), acc.log({"x": 1})), StepError, "after end_training"),
    ],
)  # fmt: skip
def test_the_calls_refuse(tmp_path, call, error, words):
    with Accelerator(cpu=True, project_dir=tmp_path) as acc, pytest.raises(error, match=words):
        call(acc)


# -- trackers that fail ------------------------------------------------------------------------------------------------


def test_one_that_cannot_start_is_an_error_and_the_others_have_their_rows(tmp_path):
    acc = Accelerator(cpu=True, project_dir=tmp_path, log_with=[Kept(start=OSError("no login")), "jsonl"])
    acc.log({"x": 1})
    with pytest.raises(TrackerError, match="tracker kept could not start: OSError: no login"):
        acc.end_training()
    assert [row["x"] for row in rows(tmp_path)] == [1]


def test_one_that_fails_later_is_said_once_and_the_run_goes_on(tmp_path, caplog):
    kept = Kept(log=OSError("disk full"), finish=OSError("gone"))
    acc = Accelerator(cpu=True, project_dir=tmp_path, log_with=[kept, "jsonl"])
    for number in range(3):
        acc.log({"x": number})
        acc._logbook.settle_rows()
    acc.save_state()
    acc.end_training()
    assert [row["x"] for row in rows(tmp_path)] == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "tracker kept: OSError: disk full; the training goes on, 1 rows are not kept there",
        "tracker kept: OSError: gone; the training goes on",
        "tracker kept: 3 rows were not kept",
    ]


# -- several processes -------------------------------------------------------------------------------------------------


def on_all_or_on_one(folder: str) -> list[str]:
    acc = Accelerator(cpu=True, project_dir=folder, settings=Settings(timeout=20))
    if acc.is_main_process:
        acc.init_trackers("run")
    acc.log({"everyone": acc.process_index})
    if acc.is_main_process:
        acc.log({"main": 1})
    acc.wait_for_everyone()
    acc.get_tracker("jsonl").log({"direct": acc.process_index})
    acc.get_tracker("jsonl", unwrap=True).any.method(1).does["nothing"] if not acc.is_main_process else None
    names = [tracker.name for tracker in acc._logbook.all()]
    acc.end_training()
    return names


def test_only_the_main_process_writes(ranks, tmp_path):
    assert ranks(on_all_or_on_one, str(tmp_path)) == [["jsonl"], []]
    found = [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows(tmp_path, "run")]
    assert sorted(map(str, found)) == sorted(map(str, [{"everyone": 0}, {"main": 1}, {"direct": 0}]))


def wrong(folder: str, how: str) -> None:
    kept = Kept(start=OSError("no login"))
    with Accelerator(cpu=True, project_dir=folder, log_with=kept, settings=Settings(timeout=1000)) as acc:
        acc.log({"x": 1 if how == "start" else [1]})
        if how == "start":
            acc.get_tracker("Kept")
        acc.wait_for_everyone()


@pytest.mark.parametrize(
    ("how", "errors"), [("start", ["TrackerError", "WorldError"]), ("value", ["SettingError", "SettingError"])]
)
def test_an_error_leaves_no_rank_waiting(ranks, tmp_path, how, errors):
    ended = ranks.fails(wrong, str(tmp_path), how, timeout=60)  # less than they would wait
    assert [failure.type for failure in ended] == errors


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_was_killed_goes_on_in_its_file(ranks, tmp_path, processes):
    died = ranks.fails(train, str(tmp_path), "jsonl", True, processes=processes)
    assert {failure.type for failure in died} == {"SIGKILL"}
    assert [row["_step"] for row in rows(tmp_path, "run")] == list(range(1, KILLED + 1))
    assert ranks(train, str(tmp_path), "jsonl", processes=processes) == [SAVED] * processes
    kept = [(row["_step"], row["loss"]) for row in rows(tmp_path, "run")]
    assert kept == [(n, n) for n in range(1, UPDATES + 1)]
    about = json.loads((tmp_path / "run.json").read_text())
    assert [start["config"]["lr"] for start in about["starts"]] == [0.1, 0.1]
    cut = [json.loads(line)["_step"] for line in (tmp_path / "run.jsonl.cut").read_text().splitlines()]
    assert cut == list(range(SAVED + 1, KILLED + 1))  # nothing is thrown away
