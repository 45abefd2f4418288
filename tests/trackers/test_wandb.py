"""wandb without a network.

What its offline runs hold, read back from their files; and what a resumed run of the service is sent.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from easymp.base import env
from easymp.trackers.rows import Row
from easymp.trackers.writers import WandB

from ..conftest import Ranks
from .runs import SAVED, UPDATES, train

needs_wandb = pytest.mark.skipif(
    find_spec("wandb") is None, reason="an optional package is not installed: wandb (the extra 'wandb')"
)

OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
OPTIONS = {"wandb": {"settings": {"x_disable_stats": True}}}


def records(path: Path) -> Iterator[Any]:
    """The records of a run's file: LevelDB's log format, blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, content = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            break
        content += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(content)
            content = b""
            yield record


class Offline:
    """What an offline run holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.config: dict[str, Any] = {}
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.id, self.project = record.run.run_id, record.run.project
                self.config |= values_by_name(record.run.config.update)
            elif kind == "history":
                self.rows.append((record.history.step.num, values_by_name(record.history.item)))
            elif kind == "exit":
                self.code = record.exit.exit_code


def values_by_name(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def runs(folder: Path) -> list[Offline]:
    return [Offline(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def train_once(folder: str, kill: bool) -> int:
    """The training, and then an end of wandb's own threads, which it keeps for the next run of the process."""
    import wandb

    begin = train(folder, "wandb", kill, OPTIONS)
    wandb.teardown()
    return begin


@needs_wandb
@pytest.mark.slow
def test_an_offline_run_that_was_killed_goes_on_under_its_id(ranks: Ranks, tmp_path: Path) -> None:
    ranks.fails(train_once, str(tmp_path), True, env=OFFLINE)
    assert ranks(train_once, str(tmp_path), False, env=OFFLINE) == [SAVED] * 2
    killed, second = runs(tmp_path)  # wandb writes 32 KiB at a time, which a kill takes along
    assert killed.path.name == second.path.name == f"run-{second.id}.wandb" and second.project == "run"
    assert second.config["lr"] == 0.1 and second.config["easymp"]["plan"]["strategy"]["value"] == "ddp"
    assert [step for step, _ in second.rows] == list(range(SAVED + 1, UPDATES + 1))
    assert [row["loss"] for _, row in second.rows] == list(range(SAVED + 1, UPDATES + 1))
    assert second.rows[0][1]["phase"] == "train" and second.rows[0][1]["half/of it"] == (SAVED + 1) / 2
    assert second.code == 0


def test_the_service_is_sent_no_step_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = mock.Mock(id="abc", step=9, resumed=True)  # a run that the service has up to step 8
    init = mock.Mock(return_value=run)
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=init))
    tracker = WandB(tmp_path, {"name": "mine", "project": "other"})
    tracker.start("run", {"lr": 0.1}, {"id": "abc"})
    options = init.call_args.kwargs
    assert (options["id"], options["resume"], options["project"], options["name"]) == ("abc", "allow", "other", "mine")
    tracker.write([Row(step, 0.0, {"x": step}) for step in range(7, 12)])
    tracker.start("run", {"lr": 0.1}, {"id": "abc"})  # back to a checkpoint of this very run
    tracker.write([Row(12, 0.0, {"x": 12})])
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [9, 10, 11, 12]
    try:
        raise ValueError("the training failed")
    except ValueError:
        tracker.finish()
    run.finish.assert_called_once_with(exit_code=1)


SCRIPT = """
import sys, torch
from easymp import Accelerator

acc = Accelerator(cpu=True, project_dir=sys.argv[1], log_with=["wandb", "jsonl"])
acc.get_tracker("wandb")
for step in range(3):
    acc.log({"x": step}, step=step)
acc.log_images("val/digits", torch.eye(4).repeat(2, 3, 1, 1), step=3)
acc.log_table("found", ["digit", "as"], [[torch.tensor(1), "one"], [2, None]], step=3)
raise SystemError("at the end")
"""


@needs_wandb
@pytest.mark.slow
@pytest.mark.cold
def test_a_script_that_ends_without_end_training(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="an optional package is not installed: PIL")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    process = subprocess.run(command, env=env.merged(OFFLINE), capture_output=True, text=True, timeout=100)
    assert "SystemError: at the end" in process.stderr
    (run,) = runs(tmp_path)
    assert [step for step, _ in run.rows][:3] == [0, 1, 2] and run.code == 1
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 6
    media = sorted(path.suffix for path in tmp_path.rglob("media/*/**/*") if path.is_file())
    assert media == [".json", ".png"]  # named by their content, which is the same
