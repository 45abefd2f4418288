"""`context_parallel`: equal to one process that sees whole sequences, on two and four processes; and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, BatchError, RefusedError, SettingError, StepError, memory

from .models import refuses, under, whole

LENGTH, IGNORED = 8, -100


class Attending(nn.Module):
    """Two heads of attention, by the function or by nn.MultiheadAttention, between an embedding and a head."""

    def __init__(self, causal: bool = True, multihead: bool = False, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 12)
        self.multihead = nn.MultiheadAttention(12, heads, batch_first=True) if multihead else None
        self.up = None if multihead else nn.Linear(12, 36)
        self.head = nn.Linear(12, 11)
        self.causal, self.heads = causal, heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.multihead is not None:
            return self.head(self.multihead(x, x, x, need_weights=False)[0])
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.up(x).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.head(attended.transpose(1, 2).flatten(2))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = (torch.randint(11, (16, LENGTH), generator=generator) for _ in range(2))
    labels[torch.rand(16, LENGTH, generator=generator) < 0.4] = IGNORED  # parts of sequences with other counts
    return inputs, labels


def summed(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients_are_those_of_one_process(causal: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(2, heads, LENGTH, 8, generator=generator).to(dtype) for heads in (4, 2, 2)]
    q, k, v = (tensor.clone().requires_grad_() for tensor in tensors)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    expected.square().sum().backward()
    with under("ddp", {"context_parallel": 2}) as acc:
        parts = [tensor.clone() for tensor in tensors]
        with acc.context_parallel(parts, [2, 2, 2]):
            leaves = [part.clone().requires_grad_() for part in parts]
            attended = functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
            attended.square().sum().backward()
        rows = slice(acc.process_index * LENGTH // 2, (acc.process_index + 1) * LENGTH // 2)
        tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(attended, expected[:, :, rows].detach(), **tolerance)
        for part, tensor in zip(leaves, (q, k, v)):
            torch.testing.assert_close(part.grad, tensor.grad[:, :, rows], **tolerance)
        assert all(torch.equal(part, tensor) for part, tensor in zip(parts, tensors))


@pytest.mark.on_ranks(2)
def test_refusals_have_sentences() -> None:
    pattern = "context_parallel=3 does not divide 2 processes into groups: use one of [2]"
    refuses(SettingError, pattern, under, "fsdp", {"context_parallel": 3})
    with under("ddp", {"context_parallel": 2}) as acc:

        def attend(heads: int = 2, **keywords: Any) -> None:
            x = torch.zeros(1, heads, LENGTH, 4)
            with acc.context_parallel([x], dims=[2]):
                functional.scaled_dot_product_attention(x, x, x, **keywords)

        refuses(RefusedError, "[3, 3, 3] heads of queries, keys and values do not all divide by it", attend, 3)
        refuses(RefusedError, "takes no attn_mask", attend, attn_mask=torch.ones(4, 4))

        def weights() -> None:
            x = torch.zeros(1, LENGTH, 12)
            with acc.context_parallel([x], dims=[1]):
                nn.MultiheadAttention(12, 2, batch_first=True)(x, x, x)

        refuses(RefusedError, "call it with need_weights=False", weights)


def test_one_process_has_nobody_to_share_with() -> None:
    pattern = "context_parallel=2 does not divide 1 processes into groups: leave it out, or start several"
    with pytest.raises(SettingError, match=pattern):
        Accelerator(cpu=True, strategy="single", strategy_options={"context_parallel": 2})
    x = torch.zeros(2, 3)
    with Accelerator(cpu=True) as acc, acc.context_parallel([x], dims=[1]):
        assert x.shape == (2, 3)


def test_a_rank_keeps_the_activations_of_its_part() -> None:
    model, sample = Attending(), torch.zeros(2, LENGTH, dtype=torch.int64)
    single_process, shared = (
        memory.estimate(model, strategy="ddp", world=2, sample=sample, options={"context_parallel": n}) for n in (1, 2)
    )
    assert (
        shared.activations * 2 == single_process.activations and "activations of 1/2 of each sequence" in shared.notes
    )
    assert shared.weights == single_process.weights


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "model"),
    [("ddp", {"causal": False}), ("zero1", {"multihead": True}), ("fsdp", {}), ("hsdp", {"causal": False})],
    ids=str,
)
def test_groups_train_as_one_process_does(strategy: str, model: dict[str, bool]) -> None:
    shares(strategy, 2, Attending(**model), Attending(**model))


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize(("strategy", "size"), [("fsdp", 4), ("ddp", 4)])
def test_all_ranks_may_share_a_sequence(strategy: str, size: int) -> None:
    shares(strategy, size, Attending(heads=4), Attending(heads=4))


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize(
    "settings", [{"activation_checkpointing": "Attending"}, {"compile": {"backend": "eager"}}], ids=str
)
def test_recomputed_and_compiled_attention(settings: dict[str, Any]) -> None:
    inputs, labels = tokens()
    plain = Attending()
    summed(plain, inputs[:2], labels[:2]).backward()
    with Accelerator(
        cpu=True, strategy="ddp", strategy_options={"context_parallel": 2}, log_with="none", **settings
    ) as acc:
        model = acc.prepare(Outer(Attending()))
        x, y = inputs[:2].clone(), labels[:2].clone()
        with acc.context_parallel([x, y], dims=[1, 1]):
            acc.backward(summed(model, x, y))
        for name, parameter in acc.unwrap_model(model).inner.named_parameters():
            torch.testing.assert_close(parameter.grad * 2, plain.get_parameter(name).grad, msg=name)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def backward(acc: Accelerator, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    with acc.context_parallel([x, y], dims=[1, 1]):
        assert x.shape == (len(x), LENGTH // acc._prepared.strategy.context_size)
        acc.backward(summed(model, x, y), num_items=(y != IGNORED).sum())


def shares(strategy: str, size: int, plain: nn.Module, model: nn.Module) -> None:
    options: dict[str, Any] = {"context_parallel": size, **({"shard_size": 2} if strategy == "hsdp" else {})}
    inputs, labels = tokens()
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for start in (0, 8):  # an update of two micro-batches of two groups with two samples each
        batch = slice(start, start + 8)
        (summed(plain, inputs[batch], labels[batch]) / (labels[batch] != IGNORED).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with under(strategy, options, steps=2) as acc:
        assert f"; {size} neighbouring processes share each sequence" in acc.plan.strategy.reason
        steps = torch.optim.SGD(model.parameters(), 0.5)
        loader = DataLoader(TensorDataset(*tokens()), batch_size=size)
        model, steps, loader = acc.prepare(model, steps, loader)
        batches = []
        for x, y in loader:
            with acc.accumulate(model):
                backward(acc, model, x, y)
                assert x.shape == y.shape == (size, LENGTH)
                batches.append(x)
                steps.step()
                steps.zero_grad()
        gathered = acc.gather(torch.cat(batches)).view(4, -1, LENGTH)
        assert torch.equal(gathered[0], gathered[1]) and torch.equal(gathered[2], gathered[3])
        assert torch.equal(gathered[0], gathered[2]) == (size == 4)
        for name, parameter in acc.unwrap_model(model).named_parameters():
            torch.testing.assert_close(whole(parameter), plain.get_parameter(name).detach(), msg=name)
        refuses(
            StepError,
            "gather_for_metrics() under context_parallel, where each process has a part",
            acc.gather_for_metrics,
            x,
        )
        odd = (torch.zeros(2, 7), torch.zeros(2, 8).t())
        for buffers, dims, pattern in (
            (odd[:1], [1], rf"sequences of length \[7\]: pad all to one length, a multiple of {size}"),
            (odd[:1], [], "1 buffers and 0 dims"),
            ((x.t(),), [0], "pass plain tensors of the batch, no views"),
        ):
            with pytest.raises(BatchError, match=pattern), acc.context_parallel(buffers, dims):
                pass
        with pytest.raises(StepError, match="no attention was called inside"), acc.context_parallel([x], dims=[1]):
            pass
