"""hsdp on four real processes, which pretend to be two nodes of two or are told to shard in pairs."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import nn

from easymp import EasympError, PrepareError

from .models import make, message, part, refuses, under, whole


def nodes_of(size: int) -> None:
    """Pretend that each node has `size` ranks; `ranks` puts the variables back."""
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % size)


@pytest.mark.on_ranks(4)
def test_a_node_is_a_group() -> None:
    nodes_of(2)
    with under("hsdp") as acc:
        weight: Any = next(acc.prepare(make("mlp")).parameters())
        assert [str(p) for p in weight.placements] == ["R", "S(0)"]
        assert tuple(weight.device_mesh.shape) == (2, 2)


def refused(options: Any, local: int) -> str:
    nodes_of(local)
    return message(EasympError, under, "hsdp", options)


@pytest.mark.parametrize(
    ("options", "local", "pattern"),
    [
        (None, 1, "2 ranks make no such groups of 1, a node's ranks"),
        ({"shard_size": 2}, 2, "2 ranks make no such groups of shard_size=2: use strategy='fsdp' or 'ddp'"),
        ({"shard_size": 1}, 2, "shard_size=1 is not a whole number of at least 2"),
        ({"shard_size": 3}, 4, r"shard_size=3: pass HSDPOptions\(shard_size=...\) with one of \[2\], or"),
    ],
)
def test_refusals(ranks, options: Any, local: int, pattern: str) -> None:
    for error_text in ranks(refused, options, local, processes=max(local, 2)):
        assert re.search(pattern, error_text), error_text


def norms(strategy: str) -> list[float]:
    """Norms of every kind, and of gradients that are whole and in shards.

    A rank of four holds nothing of a bias of 5.
    """
    with under(strategy) as acc:
        torch.manual_seed(0)
        model = acc.prepare(make("mlp"))
        x = part(acc, torch.randn(8, 12, generator=torch.Generator().manual_seed(1)))
        acc.backward(model(x).square().mean())
        values = [float(acc.clip_grad_norm_(model.parameters(), 0.5, kind)) for kind in (1.0, 2.0, torch.inf)]
        plain = nn.Parameter(torch.zeros(3))
        plain.grad = torch.full((3,), 2.0)
        values.append(float(acc.clip_grad_norm_([*model.parameters(), plain], 0.1)))
        return [*values, *plain.grad.tolist()]


def after_another_run(groups: int) -> float:
    """Sum of whole parameters after a step of a run that has made `groups` other groups before."""
    with under("hsdp", {"shard_size": 2}, timeout=30) as acc:
        for _ in range(groups):
            acc._run.world.group(range(acc.num_processes))
        torch.manual_seed(0)
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        acc.backward(model(torch.ones(2, 12)).sum())
        optimizer.step()
        return float(sum(whole(p).sum() for p in model.parameters()))


def on_four() -> tuple[list[float], float, float]:
    return norms("fsdp"), after_another_run(3), after_another_run(0)


@pytest.mark.slow
def test_norms_of_every_kind_and_a_run_that_does_not_use_the_groups_of_another(ranks) -> None:
    """torch keeps layouts of tensors in caches, with their mesh, and takes equal meshes for the same."""
    expected = norms("single")
    for values, one, second in ranks(on_four, processes=4):
        assert values == pytest.approx(expected, rel=1e-5)
        assert one == second


@pytest.mark.on_ranks(4)
def test_adagrad_is_built_after_its_model() -> None:
    with under("hsdp", {"shard_size": 2}) as acc:
        plain = torch.nn.Linear(4, 4)
        early = torch.optim.Adagrad(plain.parameters())
        refuses(PrepareError, "built from the prepared model's parameters", acc.prepare, plain, early)
    with under("hsdp", {"shard_size": 2}) as acc:
        model = acc.prepare(torch.nn.Linear(4, 4))
        optimizer: Any = acc.prepare(torch.optim.Adagrad(model.parameters(), lr=0.1))
        before = whole(model.weight).clone()
        acc.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        torch.testing.assert_close(whole(model.weight), before - 0.1)
