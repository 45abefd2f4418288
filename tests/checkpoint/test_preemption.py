"""SIGTERM and SIGUSR1: all ranks save together, leave, and exit with a code that says that they may be started again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from easymp import Accelerator
from easymp.checkpoint import resume

from ..conftest import Ranks
from .runs import Case, signalled, train

NEVER = 10**9  # updates between two saves
TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


@pytest.mark.parametrize(
    ("case", "processes", "number", "to", "step"),
    [
        (Case("ddp", every=NEVER, accumulation=2), 2, TERM, [0, 1], 4),
        (Case("ddp", every=NEVER), 2, USR1, [1], 7),
        pytest.param(Case("fsdp", every=NEVER), 2, TERM, [0], 5, marks=pytest.mark.slow),
        pytest.param(Case("local_sgd", {"every": 3}, every=NEVER), 2, USR1, [0], 6, marks=pytest.mark.slow),
        pytest.param(Case("ddp", every=NEVER, workers=1), 2, TERM, [1], 6, marks=pytest.mark.slow),
        pytest.param(
            Case("pipeline", {"microbatches": 2}, every=NEVER), 4, TERM, [2], 6, marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: "" if isinstance(value, Case) else str(value),
)
def test_a_signal_saves_on_all_ranks_and_the_next_run_goes_on(
    ranks: Ranks, tmp_path: Path, case: Case, processes: int, number: int, to: list[int], step: int
) -> None:
    folder = str(tmp_path / "stopped")
    ended = ranks.fails(signalled, folder, case, number, to, step, processes=processes)
    assert {(outcome.type, outcome.message) for outcome in ended} == {("SystemExit", "75")}
    again = ranks(train, folder, case, processes=processes)
    straight = ranks(train, str(tmp_path / "straight"), case, processes=processes)
    for one, other in zip(straight, again):
        assert other["resumed"] is not None
        assert other["seen"] == one["seen"][-len(other["seen"]) :] and len(other["seen"]) < len(one["seen"])
        assert case.strategy == "local_sgd" or all(
            torch.equal(w, one["weights"][name]) for name, w in other["weights"].items()
        )


def again_later(folder: str, again: float, signals: list[tuple[int, float]]) -> None:
    """Sends itself signals, each after some seconds, in a body that never ends; two within `again` are one."""
    resume.AGAIN = again  # this process ends with the test
    acc = Accelerator(project_dir=folder, save_on_signal=True)
    for number, pause in signals:
        time.sleep(pause)
        os.kill(os.getpid(), number)
    acc.close()
    raise ValueError("the body went on")


def test_one_signal_twice_at_once_is_one_and_another_later_ends_it(ranks: Ranks, tmp_path: Path) -> None:
    (outcome,) = ranks.fails(
        again_later, str(tmp_path), 1000.0, [(TERM, 0), (TERM, 0.1), (USR1, 0)], processes=1
    )
    assert outcome.message == "the body went on"
    (outcome,) = ranks.fails(again_later, str(tmp_path), 0.1, [(TERM, 0), (TERM, 0.2)], processes=1)
    assert outcome.type == "SIGTERM"


def test_scripts_that_never_save_end_as_they_did(ranks: Ranks) -> None:
    (outcome,) = ranks.fails(plain, processes=1)
    assert outcome.type == "SIGTERM"


def plain() -> None:
    Accelerator()
    os.kill(os.getpid(), signal.SIGTERM)


def handlers(folder: str) -> list[Any]:
    heard: list[int] = []

    def mine(number: int, frame: Any) -> None:
        heard.append(number)

    signal.signal(signal.SIGUSR1, mine)
    before = signal.getsignal(signal.SIGTERM)
    acc = Accelerator(project_dir=folder)
    kept = signal.getsignal(signal.SIGUSR1) is mine
    acc.resume()
    taken = signal.getsignal(signal.SIGUSR1) is not mine
    os.kill(os.getpid(), signal.SIGUSR1)
    acc.close()
    back = signal.getsignal(signal.SIGUSR1) is mine and signal.getsignal(signal.SIGTERM) == before
    acc = Accelerator(project_dir=folder, save_on_signal=False)
    acc.resume()
    never = signal.getsignal(signal.SIGUSR1) is mine
    acc.close()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return [kept, taken, heard, back, never]


def test_handlers_come_with_resume_call_the_former_ones_and_go_with_the_accelerator(ranks, tmp_path):
    assert ranks(handlers, str(tmp_path), processes=1) == [[True, True, [int(signal.SIGUSR1)], True, True]]
