"""What goes wrong on one rank, in every strategy: an overflow skips the step on all, a rank that is killed is named by the others."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch

from easymp import Accelerator
from easymp.base.dtensor import local
from easymp.distributed import hang_report

from .models import make, mean_square, train_step, whole
from .ways import WAYS, Way

SEVERAL = [label for label, way in WAYS.items() if way.sizes[0] > 1]


def accelerator(way: Way, **more: Any) -> Accelerator:
    return Accelerator(strategy=way.strategy, strategy_options=dict(way.options), **more)


def overflow(way: Way) -> list[tuple[bool, float, bool]]:
    """Of five steps, in the second of which the last rank's loss overflows, and in the fourth its gradients: whether it was
    skipped, the scale after it, and whether parameters moved."""
    found = []
    with accelerator(way, mixed_precision="fp16") as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        last = acc.process_index == acc.num_processes - 1
        for step in range(5):
            factor = torch.inf if last and step == 1 else 1
            loss_fn = lambda outputs, factor=factor: outputs.sum() / 1000 * factor  # noqa: E731
            train_step(acc, model, loss_fn, torch.randn(8, 12))
            here = [p for p in model.parameters() if not p.is_meta]
            before = [whole(p) for p in here]
            for p in here if last and step == 3 else ():
                if p.grad is not None:
                    local(p.grad).fill_(torch.inf)
            optimizer.step()
            optimizer.zero_grad()
            moved = any(not torch.equal(whole(p), old) for p, old in zip(here, before))
            found.append((acc.optimizer_step_was_skipped, acc.scaler.get_scale(), moved))
    return found


@pytest.mark.parametrize("label", WAYS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Any, label: str) -> None:
    expected = [(step % 2 == 1, 65536.0 / 2 ** ((step + 1) // 2), step % 2 == 0) for step in range(5)]
    assert ranks(overflow, WAYS[label], processes=WAYS[label].sizes[0]) == [expected] * WAYS[label].sizes[0]


def killed(way: Way, victim: int, where: str) -> None:
    # for the answer of a rank that cannot give one; this process ends with the test
    hang_report.PATIENCE = timedelta(seconds=1)
    with accelerator(way, mixed_precision="no", timeout=8) as acc:
        model = make("tied")
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        one_call = way.options.get("schedule", "gpipe") != "gpipe"
        for step in range(4):

            def die(*places: str, now: bool = step == 2 and acc.process_index == victim) -> None:
                if now and where in places:
                    os.kill(os.getpid(), signal.SIGKILL)

            die("forward", *["backward"] * one_call)
            if one_call:
                acc.forward_backward(model, mean_square, torch.randn(8, 12))
            else:
                loss = mean_square(model(torch.randn(8, 12)))
                die("backward")
                acc.backward(loss)
            acc.clip_grad_norm_(model.parameters(), 1.0)
            die("step")
            optimizer.step()
            optimizer.zero_grad()


def check_killed(ranks: Any, label: str, where: str, victim: int) -> None:
    size = WAYS[label].sizes[0]
    victim %= size
    found = ranks.fails(killed, WAYS[label], victim, where, processes=size)
    assert found[victim] == ("SIGKILL", "killed by signal 9")
    for rank, failure in enumerate(found):
        if rank != victim:
            assert failure.type == "WorldError", failure
            words = [f"rank {victim}: no answer: it has ended, was killed, or is stopped"]
            words += ["rank 0, which holds the store"] * (victim == 0)
            assert any(one in failure.message for one in words), failure


FOUR = [pytest.param(label, marks=pytest.mark.slow) for label in SEVERAL if WAYS[label].sizes[0] > 2]


@pytest.mark.parametrize("label", [*(label for label in SEVERAL if WAYS[label].sizes[0] < 4), *FOUR])
def test_a_rank_that_is_killed_in_backward_is_named(ranks: Any, label: str) -> None:
    check_killed(ranks, label, "backward", -1)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "victim"), [("forward", 0), ("step", -1)])
@pytest.mark.parametrize("label", SEVERAL)
def test_a_rank_that_is_killed_anywhere_is_named(ranks: Any, label: str, where: str, victim: int) -> None:
    check_killed(ranks, label, where, victim)
