"""wandb without a network: what its offline runs hold, read back from their files; and what a resumed run of the service is sent."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from easymp.base import env
from easymp.trackers.rows import Row
from easymp.trackers.wandb import WandB

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

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            break
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
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
                self.config |= {
                    u.key or "/".join(u.nested_key): json.loads(u.value_json)
                    for u in record.run.config.update
                }
            elif kind == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                self.rows.append((record.history.step.num, items))
            elif kind == "exit":
                self.code = record.exit.exit_code


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


class Service:
    """`wandb.init` of a run that the service has up to step 8."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.step, self.resumed, self.config = (
            9,
            True,
            SimpleNamespace(update=lambda values, allow_val_change: None),
        )

    def init(self, **given: Any) -> Service:
        self.given, self.id = given, given.get("id", "new")
        return self

    def log(self, values: Any, step: int) -> None:
        self.sent.append(step)

    def finish(self, exit_code: int) -> None:
        self.code = exit_code


def test_the_service_is_sent_no_step_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=service.init))
    tracker = WandB(tmp_path, {"name": "mine", "project": "other"})
    tracker.start("run", {"lr": 0.1}, {"id": "abc"})
    assert service.given["id"] == "abc" and service.given["resume"] == "allow"
    assert (service.given["project"], service.given["name"]) == ("other", "mine")  # options win
    tracker.write([Row(step, 0.0, {"x": step}) for step in range(7, 12)])
    tracker.start("run", {"lr": 0.1}, {"id": "abc"})  # back to a checkpoint of this very run
    tracker.write([Row(12, 0.0, {"x": 12})])
    assert service.sent == [9, 10, 11, 12]
    try:
        raise ValueError("the training failed")
    except ValueError:
        tracker.finish()
    assert service.code == 1


@needs_wandb
@pytest.mark.slow
def test_rows_of_a_script_that_ends_without_end_training(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from easymp import Accelerator\n"
        f"acc = Accelerator(cpu=True, project_dir={str(tmp_path)!r}, log_with=['wandb', 'jsonl'])\n"
        "acc.get_tracker('wandb')\n"
        "for step in range(3):\n"
        "    acc.log({'x': step}, step=step)\n"
        "raise SystemError('at the end')\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], env=env.merged(OFFLINE), capture_output=True, text=True, timeout=100
    )
    assert "SystemError: at the end" in done.stderr
    (run,) = runs(tmp_path)
    assert [step for step, _ in run.rows] == [0, 1, 2] and run.code == 1
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3
