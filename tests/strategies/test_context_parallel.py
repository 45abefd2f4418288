"""`context_parallel`: refusals, and on two groups of two CPU processes all but the ring, which torch has for CUDA's kernels only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, BatchError, RefusedError, SettingError, StepError, memory
from easymp.strategies import single

from .models import refuses, under, whole

LENGTH, IGNORED = 8, -100


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 11))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = (torch.randint(11, (16, LENGTH), generator=generator) for _ in range(2))
    labels[torch.rand(16, LENGTH, generator=generator) < 0.4] = (
        IGNORED  # parts of sequences with other counts
    )
    return inputs, labels


def summed(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_refused_where_torch_has_no_ring(strategy: str) -> None:
    options = {"context_parallel": 2}
    refuses(
        RefusedError,
        "CUDA devices only, and this run is on cpu. Leave it out",
        under,
        strategy,
        options,
    )
    refuses(
        SettingError,
        "context_parallel=3 does not divide 2 processes into groups: use one of [2]",
        under,
        strategy,
        {"context_parallel": 3},
    )


def test_one_process_has_nobody_to_share_with() -> None:
    words = "context_parallel=2 does not divide 1 processes into groups: leave it out, or start several"
    with pytest.raises(SettingError, match=words):
        Accelerator(cpu=True, strategy="single", strategy_options={"context_parallel": 2})
    x = torch.zeros(2, 3)
    with Accelerator(cpu=True) as acc, acc.context_parallel([x], dims=[1]):
        assert x.shape == (2, 3)


def test_a_rank_keeps_the_activations_of_its_part() -> None:
    model, sample = made(), torch.zeros(2, LENGTH, dtype=torch.int64)
    alone, shared = (
        memory.estimate(model, strategy="ddp", world=2, sample=sample, options={"context_parallel": n})
        for n in (1, 2)
    )
    assert (
        shared.activations * 2 == alone.activations and "activations of 1/2 of each sequence" in shared.notes
    )
    assert shared.weights == alone.weights


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "hsdp"])
def test_groups_share_sequences_and_count_each_token_once(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "RINGED", ("cpu",))
        shares(strategy)


def backward(acc: Accelerator, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    with acc.context_parallel([x, y], dims=[1, 1]):
        assert x.shape == (2, LENGTH // 2)
        acc.backward(summed(model, x, y), num_items=(y != IGNORED).sum())


def shares(strategy: str) -> None:
    options: dict[str, Any] = {"context_parallel": 2, **({"shard_size": 2} if strategy == "hsdp" else {})}
    inputs, labels = tokens()
    plain = made()
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for start in (0, 8):  # an update of two micro-batches of two groups with two samples each
        batch = slice(start, start + 8)
        (summed(plain, inputs[batch], labels[batch]) / (labels[batch] != IGNORED).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with under(strategy, options, steps=2) as acc:
        assert "; 2 neighbouring processes share each sequence" in acc.plan.strategy.reason
        model = made()
        steps = torch.optim.SGD(model.parameters(), 0.5)
        loader = DataLoader(TensorDataset(*tokens()), batch_size=2)
        model, steps, loader = acc.prepare(model, steps, loader)
        seen = []
        for x, y in loader:
            with acc.accumulate(model):
                # No CPU kernel is ringed, and this model sees no other tokens: gradients are there when that is said.
                refuses(StepError, "no attention was ringed", backward, acc, model, x, y)
                assert x.shape == y.shape == (2, LENGTH)
                seen.append(x)
                steps.step()
                steps.zero_grad()
        every = acc.gather(torch.cat(seen)).view(4, -1, LENGTH)
        assert torch.equal(every[0], every[1]) and torch.equal(every[2], every[3])
        assert not torch.equal(every[0], every[2])
        for name, parameter in acc.unwrap_model(model).named_parameters():
            torch.testing.assert_close(whole(parameter), plain.get_parameter(name).detach(), msg=name)
        refuses(
            StepError,
            "gather_for_metrics() under context_parallel, where each process has a part",
            acc.gather_for_metrics,
            x,
        )
        odd = (torch.zeros(2, 6), torch.zeros(2, 6).t())
        for buffers, dims, words in (
            (odd[:1], [1], r"sequences of length \[6\]: pad all to one length, a multiple of 4"),
            (odd[:1], [], "1 buffers and 0 dims"),
            ((x.t(),), [0], "pass plain tensors of the batch, no views"),
        ):
            with pytest.raises(BatchError, match=words), acc.context_parallel(buffers, dims):
                pass
        q = torch.zeros(1, 1, LENGTH, 4)
        with pytest.raises(StepError, match="was imported by its name"), acc.context_parallel([q], dims=[2]):
            torch._C._nn.scaled_dot_product_attention(q, q, q)
