"""What goes wrong on one rank, in every strategy.

An overflow skips the step on all, a rank that is killed is named by the others.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch

from easymp import Accelerator
from easymp.distributed import mailbox

from ..words import make_accelerator
from .models import make, mean_square, train_step, whole
from .ways import WAYS, Way

SEVERAL = [label for label, way in WAYS.items() if way.sizes[0] > 1]


def accelerator(case: Way, **settings: Any) -> Accelerator:
    return make_accelerator(strategy=case.strategy, strategy_options=dict(case.options), **settings)


def overflowing(outputs: torch.Tensor, factor: float, steep: bool) -> torch.Tensor:
    loss = outputs.sum() / 1000 * factor
    return loss + (outputs * 0).sum().sqrt() if steep else loss


def overflow(case: Way) -> list[tuple[bool, float, bool]]:
    """Whether each of five steps was skipped, the scale after it, and whether parameters moved.

    On the last rank the second loss overflows, and the fourth one's gradients.
    """
    steps = []
    with accelerator(case, mixed_precision="fp16") as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        last = acc.process_index == acc.num_processes - 1
        for step in range(5):
            factor = torch.inf if last and step == 1 else 1
            steep = last and step == 3  # the root of zero is finite, and its gradient is not
            loss_fn = partial(overflowing, factor=factor, steep=steep)
            train_step(acc, model, loss_fn, torch.randn(8, 12))
            parameters = [p for p in model.parameters() if not p.is_meta]
            before = [whole(p) for p in parameters]
            optimizer.step()
            optimizer.zero_grad()
            moved = any(not torch.equal(whole(p), old) for p, old in zip(parameters, before))
            steps.append((acc.optimizer_step_was_skipped, acc.scaler.get_scale(), moved))
    return steps


@pytest.mark.parametrize("label", WAYS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Any, label: str) -> None:
    expected = [(step % 2 == 1, 65536.0 / 2 ** ((step + 1) // 2), step % 2 == 0) for step in range(5)]
    assert ranks(overflow, WAYS[label], processes=WAYS[label].sizes[0]) == [expected] * WAYS[label].sizes[0]


def killed(case: Way, victim: int, phase: str) -> None:
    # for the answer of a rank that cannot give one; this process ends with the test
    mailbox.PATIENCE = 1.0
    with accelerator(case, mixed_precision="no", timeout=8) as acc:
        model = make("tied")
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        one_call = case.options.get("schedule", "gpipe") != "gpipe"
        for step in range(4):

            def die(*phases: str, is_time: bool = step == 2 and acc.process_index == victim) -> None:
                if is_time and phase in phases:
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


def check_killed(ranks: Any, label: str, phase: str, victim: int) -> None:
    size = WAYS[label].sizes[0]
    victim %= size
    failures = ranks.fails(killed, WAYS[label], victim, phase, processes=size)
    assert failures[victim] == ("SIGKILL", "killed by signal 9")
    for rank, failure in enumerate(failures):
        if rank != victim:
            assert failure.type == "WorldError", failure
            patterns = [f"rank {victim}: no answer: it has ended, was killed, or is stopped"]
            patterns += ["rank 0, which holds the store"] * (victim == 0)
            assert any(one in failure.message for one in patterns), failure


FOUR = [pytest.param(label, marks=pytest.mark.slow) for label in SEVERAL if WAYS[label].sizes[0] > 2]


@pytest.mark.parametrize("label", [*(label for label in SEVERAL if WAYS[label].sizes[0] < 4), *FOUR])
def test_a_rank_that_is_killed_in_backward_is_named(ranks: Any, label: str) -> None:
    check_killed(ranks, label, "backward", -1)


@pytest.mark.slow
@pytest.mark.parametrize("label", SEVERAL)
def test_a_rank_that_is_killed_anywhere_is_named(ranks: Any, label: str) -> None:
    phase, victim = (("forward", 0), ("step", -1))[SEVERAL.index(label) % 2]
    check_killed(ranks, label, phase, victim)
