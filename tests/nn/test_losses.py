"""linear_cross_entropy: the numbers of the plain pair, in every precision and strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from easymp import Accelerator, BatchError, SettingError, StepError, TensorParallelOptions
from easymp.nn import linear_cross_entropy

from ..words import make_accelerator

WORDS = 101


def data(dtype: torch.dtype, bias: bool) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((3, 67, 16), (WORDS, 16), (WORDS,))]
    targets = torch.randint(WORDS, (3, 67))
    targets[0, :5] = -100
    return [t.requires_grad_() for t in inputs[: 3 if bias else 2]], targets


def relative_error(got: Any, right: Any) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, right))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_plain_pair(reduction: str, bias: bool) -> None:
    (hidden, weight, *biases), targets = data(torch.float32, bias)
    inputs, first = [hidden, weight, *biases], biases[0] if biases else None
    for smoothing in (0.0, 0.1):
        options: Any = {"reduction": reduction, "label_smoothing": smoothing}
        plain = F.cross_entropy(F.linear(hidden, weight, first).flatten(0, 1), targets.flatten(), **options)
        loss = linear_cross_entropy(hidden, weight, targets, bias=first, chunk_tokens=50, **options)
        torch.testing.assert_close(loss.view_as(plain), plain)
        arrived = torch.randn_like(plain)
        right = torch.autograd.grad(plain, inputs, arrived)
        for retain in (True, False):  # the second backward makes the logits anew
            gradients = torch.autograd.grad(loss, inputs, arrived.view_as(loss), retain_graph=retain)
            assert relative_error(gradients, right) < 1e-6


def test_no_target_counts() -> None:
    (hidden, weight), targets = data(torch.float32, False)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss.isnan()
    assert hidden.grad is not None and not hidden.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_as_exact_as_the_plain_pair(dtype: torch.dtype) -> None:
    inputs, targets = data(torch.float32, True)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = F.cross_entropy(F.linear(*wide).flatten(0, 1), targets.flatten())
    right = torch.autograd.grad(exact, wide)
    with torch.autocast("cpu", dtype):
        plain = F.cross_entropy(F.linear(*inputs).flatten(0, 1), targets.flatten())
        loss = linear_cross_entropy(*inputs[:2], targets, bias=inputs[2], chunk_tokens=50)
    assert loss.dtype == torch.float32
    assert abs(loss - exact) < 0.01
    off = relative_error(torch.autograd.grad(plain, inputs), right)
    assert relative_error(torch.autograd.grad(loss, inputs), right) < 1.5 * off


def test_a_gradient_is_divided_by_the_tokens_before_it_is_rounded_to_fp16() -> None:
    hidden, weight = torch.full((40_000, 4), 8.0), torch.zeros(5, 4, dtype=torch.float16, requires_grad=True)
    targets = torch.zeros(40_000, dtype=torch.int64)
    linear_cross_entropy(hidden.half(), weight, targets, chunk_tokens=512).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0], torch.full((4,), -6.4, dtype=torch.float16))


def test_a_gradient_of_a_gradient_is_refused() -> None:
    (hidden, weight), targets = data(torch.float32, False)
    with pytest.raises(StepError, match=r"F\.cross_entropy"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)


@pytest.mark.slow
def test_it_is_compiled_whole() -> None:
    (hidden, weight), targets = data(torch.float32, False)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    losses = [f(hidden, weight, targets, chunk_tokens=64) for f in (compiled, linear_cross_entropy)]
    gradients, right = (torch.autograd.grad(loss, (hidden, weight)) for loss in losses)
    assert relative_error(gradients, right) < 1e-6


WRONG: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    r"weight \(5, 3\)": (BatchError, {"weight": torch.ones(5, 3)}),
    "a weight in torch.bfloat16": (BatchError, {"weight": torch.ones(101, 16, dtype=torch.bfloat16)}),
    r"\(5,\), not \(101,\)": (BatchError, {"bias": torch.ones(5)}),
    "float32, not int64": (BatchError, {"targets": torch.ones(3, 67)}),
    "'max' is not one of mean, sum, none": (SettingError, {"reduction": "max"}),
    "0 to 1": (SettingError, {"label_smoothing": 2.0}),
    "at least 1": (SettingError, {"chunk_tokens": 0}),
    "an integer": (SettingError, {"chunk_tokens": 2.5}),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_named(words: str) -> None:
    (hidden, weight), targets = data(torch.float32, False)
    error, changed = WRONG[words]
    with pytest.raises(error, match=words):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets, **changed})


class Language(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(WORDS, 16)
        self.hidden = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor, targets: Tensor, plain: bool) -> Tensor:
        y = self.hidden(self.words(x))
        if plain:
            return F.cross_entropy(self.head(y).flatten(0, 1), targets.flatten(), label_smoothing=0.1)
        return linear_cross_entropy(y, self.head.weight, targets, bias=self.head.bias, label_smoothing=0.1)


def losses(strategy: str, tied: bool, plain: bool, **keywords: Any) -> list[float]:
    """Of five steps on the same batch, which is the next word of a sequence; data ranks share it."""
    with make_accelerator(strategy=strategy, cpu=True, mixed_precision="fp32", **keywords) as acc:
        model = Language(tied)
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        sequence = torch.arange(411).remainder(WORDS).repeat(4, 1)  # chunks depend on the number of words
        x, targets = sequence[:, :-1], sequence[:, 1:]
        step_losses = []
        for _ in range(5):
            loss = model(x, targets, plain)
            acc.backward(loss)
            acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step_losses.append(loss.item())
        return step_losses


def on_two_ranks() -> list[tuple[str, bool, list[float]]]:
    split = TensorParallelOptions(plan={"words": "rowwise_rep", "head": "colwise_rep"})
    strategies = [("ddp", {}), ("fsdp", {}), ("tensor_parallel", {"strategy_options": split})]
    return [
        (name, tied, losses(name, tied, False, **keywords)) for name, keywords in strategies for tied in (False, True)
    ]


def test_every_strategy_trains_as_the_plain_pair_does(ranks: Any) -> None:
    right = {tied: losses("single", tied, True) for tied in (False, True)}
    for rank_losses in ranks(on_two_ranks):
        for name, tied, step_losses in rank_losses:
            assert step_losses == pytest.approx(right[tied], rel=1e-5), (name, tied)


def shards() -> None:
    from torch.distributed.tensor import distribute_tensor

    with Accelerator(strategy="ddp", cpu=True):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        (hidden, weight), targets = data(torch.float32, False)
        linear_cross_entropy(hidden, distribute_tensor(weight.detach(), mesh), targets)


def test_shards_of_unknown_kind_are_refused(ranks: Any) -> None:
    for failure in ranks.fails(shards):
        assert "inside the forward of the module that holds the weight" in failure.message
