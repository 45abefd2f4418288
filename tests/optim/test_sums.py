"""Sums over micro-batches.

Low-precision gradients in fp32, the same on every rank, and losses divided by counts of items.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, Settings, StepError

from ..strategies.models import make, under, whole

BF16 = torch.bfloat16


def window(strategy, kind, dtype, steps, items=False):
    """Gradients after one window of micro-batches that the ranks share."""
    with under(strategy, None, steps, cpu=True) as acc:
        model = acc.prepare(make(kind).to(dtype))
        spread, generator = acc._prepared.strategy, torch.Generator().manual_seed(1)
        for _ in range(steps):
            x = torch.randn(4, 12, generator=generator).chunk(spread.data_size)[spread.data_rank].to(dtype)
            with acc.accumulate(model):
                y = model(x).float()
                if items:
                    acc.backward(y.square().sum(), num_items=y.numel())
                else:
                    acc.backward(y.square().mean())
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
        return [None if p.grad is None else whole(p.grad).float() for p in model.parameters()]


def off(gradients: list[Tensor | None], expected: list[Tensor | None]) -> float:
    assert [g is None for g in gradients] == [w is None for w in expected]
    flat, right = (torch.cat([g.flatten() for g in grads if g is not None]) for grads in (gradients, expected))
    return float((flat - right).norm() / right.norm())


def test_many_micro_batches_in_bf16_add_up() -> None:
    """Of 512 equal gradients: in bf16 the sum stops at 256, where one more is half of its last bit."""

    def gradient(by_accelerator: bool) -> float:
        with Accelerator(mixed_precision="no", gradient_accumulation_steps=512, cpu=True) as acc:
            model = acc.prepare(nn.Linear(1, 1, bias=False).to(BF16))
            for _ in range(512):
                with acc.accumulate(model):
                    loss = model(torch.ones(1, 1, dtype=BF16)).sum() * 512
                    acc.backward(loss) if by_accelerator else (loss / 512).backward()
            return model.weight.grad.item()

    assert gradient(by_accelerator=True) == 512.0
    assert gradient(by_accelerator=False) == 256.0


def windows() -> list[list[Tensor | None]]:
    return [window(*case) for case in WINDOWS]


WINDOWS: list[tuple[Any, ...]] = [
    ("ddp", "tied", BF16, 12, False),
    ("fsdp", "mlp", BF16, 12, True),
    ("zero1", "mlp", BF16, 12, False),
    ("tensor_parallel", "tied", BF16, 12, False),
]


def test_ranks_sum_in_fp32(ranks) -> None:
    first, second = ranks(windows)
    for (_, kind, *arguments), gradients, other_gradients in zip(WINDOWS, first, second):
        single = window("single", kind, *arguments)
        if kind != "tied":  # whose words are made of the inputs' digits
            assert off(single, window("single", kind, torch.float32, *arguments[1:])) < 0.03
        assert off(gradients, single) < 0.01  # less than the sums' own rounding to bf16
        assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients) if a is not None)


class Unlike(nn.Module):
    """Rank 1 uses a branch that rank 0 does not, none uses the third, a norm is fp32, and there are buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([*(nn.Linear(2, 2).to(BF16) for _ in range(3)), nn.BatchNorm1d(2)])

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = self.parts[3](self.parts[0](x).float()).to(BF16)
        return self.parts[1](x) if branch else x


def unlike() -> list[Any]:
    rounding = Settings(stochastic_rounding=True)
    with under("ddp", {"find_unused_parameters": True}, 2, settings=rounding) as acc:
        net = Unlike()
        net, optimizer = acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        torch.manual_seed(acc.process_index)
        for step in range(4):
            with acc.accumulate(net):
                y = net(torch.randn(4, 2).to(BF16), branch=acc.process_index == 1)
                acc.backward(y.float().square().mean())
                if step == 3:
                    gradients = [None if p.grad is None else p.grad.float().clone() for p in net.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        with acc.no_sync(net):
            net(torch.zeros(4, 2, dtype=BF16), branch=False)  # buffers are shared as it begins
        return [gradients, [p.detach().float() for p in net.parameters()], net.parts[3].running_mean.clone()]


def test_ranks_that_use_different_parameters_agree(ranks) -> None:
    a, b = ranks(unlike)
    assert [g is None for g in a[0]] == [False] * 4 + [True] * 2 + [False] * 2
    torch.testing.assert_close([g for g in a[0] if g is not None], [g for g in b[0] if g is not None], rtol=0, atol=0)
    torch.testing.assert_close(a[1:], b[1:], rtol=0, atol=1e-6)


def two_losses(strategy: str, twice: bool) -> list[Tensor]:
    with Accelerator(mixed_precision="no", strategy=strategy, gradient_accumulation_steps=2, cpu=True) as acc:
        model = acc.prepare(make("mlp").to(BF16))
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(1)).to(BF16)
        x = x.chunk(acc.num_processes)[acc.process_index]
        for _ in range(2):
            with acc.accumulate(model):
                for _ in range(1 + twice):
                    acc.backward(model(x).float().square().mean())
        return [whole(p.grad).float() for p in model.parameters()]


def test_two_backwards_a_micro_step(ranks) -> None:
    single = two_losses("single", twice=False)
    for got in (two_losses("single", twice=True), ranks(two_losses, "ddp", True)[0]):
        assert off(got, [2 * g for g in single]) < 0.01


def test_gradients_that_are_cleared_or_kept() -> None:
    rounding = Settings(stochastic_rounding=True)
    with Accelerator(mixed_precision="no", gradient_accumulation_steps=2, cpu=True, settings=rounding) as acc:
        model = nn.Linear(1, 1, bias=False).to(BF16)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

        def one(step: bool = True, clear: str = "") -> float | None:
            with acc.accumulate(model):
                acc.backward(model(torch.ones(1, 1, dtype=BF16)).float().sum())
                grad = None if model.weight.grad is None else model.weight.grad.item()
                if step:
                    optimizer.step()
                {"": lambda: None, "optimizer": optimizer.zero_grad, "model": model.zero_grad}[clear]()
            return grad

        assert [one(clear="optimizer"), one(clear="optimizer")] == [None, 1.0]
        assert [one(), one()] == [None, 1.0]  # kept: as in torch, the next window adds to it
        assert [one(), one(clear="model")] == [None, 2.0]
        assert [one(), one(step=False, clear="model")] == [None, 1.0]
        assert [one(), one(clear="optimizer")] == [None, 1.0]
        assert model.weight.grad is None


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def test_a_window_that_began_with_items_takes_no_other_loss() -> None:
    with Accelerator(cpu=True, mixed_precision="fp32", gradient_accumulation_steps=2) as acc:
        model = acc.prepare(nn.Linear(4, 2))
        with acc.accumulate(model):
            acc.backward(model(torch.ones(2, 4)).sum(), num_items=2)
        with acc.accumulate(model), pytest.raises(StepError, match="without num_items in a window that began with it"):
            acc.backward(model(torch.ones(2, 4)).sum())
