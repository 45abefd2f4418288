"""Every precision with every strategy: it trains, or is refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator, GradScalerKwargs, PrepareError, RefusedError
from easymp.registry import PRECISIONS, STRATEGIES

# tf32 and fp8 need a GPU
ON_CPU = ["no", *(name for name in PRECISIONS if name not in ("fp32", "tf32", "fp8")), "auto"]
ALONE = {"single", "data_parallel"}
OPTIONS: dict[str, Any] = {"hsdp": {"shard_size": 2}, "local_sgd": {"every": 1}}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)
    )


def outcome(strategy: str, precision: str) -> list[float] | str:
    """Losses of 4 updates of 2 micro-batches, or the refusal."""
    try:
        with Accelerator(
            mixed_precision=precision,
            strategy=strategy,
            strategy_options=OPTIONS.get(strategy),
            gradient_accumulation_steps=2,
            kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
            cpu=True,
            probe=False,
        ) as acc:
            model = net()
            model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5))
            generator = torch.Generator().manual_seed(1)
            spread = acc._prepared.strategy
            x, y = torch.randn(8, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)
            x, y = (t.chunk(spread.data_size)[spread.data_rank] for t in (x, y))
            losses = []
            for _ in range(8):
                with acc.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    acc.backward(loss)
                    acc.clip_grad_norm_(
                        model.parameters(), 5.0
                    )  # local_sgd's norms are each rank's own, so nothing is cut
                    optimizer.step()
                    assert not acc.optimizer_step_was_skipped
                    optimizer.zero_grad()
                losses.append(acc.reduce(loss.detach(), "mean").item())
            return losses[::2]
    except (RefusedError, PrepareError) as error:
        return str(error)


def outcomes(strategy: str) -> dict[str, list[float] | str]:
    return {precision: outcome(strategy, precision) for precision in ON_CPU}


@pytest.fixture(scope="module")
def alone() -> list[float]:
    found = outcome("single", "no")
    assert isinstance(found, list)
    return found


FAST = ("single", "ddp", "fsdp", "pipeline")


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in STRATEGIES]
)
def test_every_pair_trains_or_is_refused(ranks, alone: list[float], strategy: str) -> None:
    processes = 4 if strategy == "hsdp" else 2
    found = (
        [outcomes(strategy)]
        if strategy in ALONE
        else ranks(outcomes, strategy, processes=processes, timeout=110)
    )
    for mine in found:
        for precision, got in mine.items():
            if isinstance(got, str):
                assert "; use " in got or "; start " in got or " Use " in got, (strategy, precision, got)
            else:
                assert got == pytest.approx(alone, rel=0.05), (strategy, precision)
    assert isinstance(found[0]["no"], list)
