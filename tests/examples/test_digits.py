"""examples/digits.py: accuracy, and one model whatever the number of processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..conftest import Ranks
from .run import ROOT, environment, number, run, within

SCRIPT = "examples/digits.py"
FP32 = ("--precision", "fp32")


def scores(printed: str) -> tuple[float, float]:
    """Test accuracy in per cent, and training loss."""
    return number("test accuracy", printed), number("training loss", printed)


def test_a_few_epochs_learn_and_two_processes_with_accumulation_the_same(ranks: Ranks) -> None:
    (alone,) = ranks(within, SCRIPT, "--epochs", "3", *FP32, processes=1)
    accuracy, loss = scores(alone)
    assert accuracy > 90 and loss < 0.5
    assert alone.splitlines()[2].split()[:2] == ["precision", "fp32"]
    assert "64 per device × 1 process = 64" in alone and "samples/s" in alone
    spread, silent = ranks(within, SCRIPT, "--epochs", "3", *FP32, "--accumulation", "2")
    assert "16 per device × 2 processes × 2 accumulation = 64" in spread and silent == ""
    assert scores(spread) == (accuracy, pytest.approx(loss, abs=1e-5))


# The example, whose ranks wait for the signal once they have saved themselves.
WAITING = f"""
import signal, time
from easymp import Accelerator

heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
save = Accelerator.save_state

def save_state(self, *args, **options):
    place = save(self, *args, **options)
    while not heard:
        time.sleep(0.02)
    return place

Accelerator.save_state = save_state
exec(compile(open({str(ROOT / SCRIPT)!r}).read(), "digits.py", "exec"))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_preempted_ends_as_one_that_is_not(ranks: Ranks, tmp_path: Path) -> None:
    """By the launcher, to which the signal goes."""
    folder, flags = str(tmp_path / "run"), (*FP32, "--epochs", "2")
    (tmp_path / "waiting.py").write_text(WAITING)
    command = [sys.executable, str(tmp_path / "waiting.py"), "--processes", "2", *flags, "--folder", folder]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True)
    while process.poll() is None and not list(Path(folder).glob("checkpoints/step-*/COMMIT")):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=250)[1]
    assert process.returncode == 75, said
    place = re.escape(f"{folder}/checkpoints/step-") + r"\d+"
    last = rf"stopped by SIGTERM \(signal 15\); the ranks saved {place} and can be started again\n\Z"
    assert re.search(last, said), said
    again, _ = ranks(within, SCRIPT, *flags, "--folder", folder)
    assert f"resumed from {folder}/checkpoints/step-" in again
    assert scores(again) == scores(ranks(within, SCRIPT, *flags)[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accuracy_of_launched_processes_and_of_bf16() -> None:
    launched, half = run(SCRIPT, *FP32, "--processes", "2"), run(SCRIPT, "--precision", "bf16")
    assert [scores(printed)[0] for printed in (launched, half) if scores(printed)[0] < 98.5] == []
