"""fp8's linear layer, by real scaled products on the CPU, against fp32; and what the precision does to a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, PrepareError
from easymp.precision.policies import FP8, Float8Linear

CPU = torch.device("cpu")


def pair(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(32, 48, bias)
    swapped = copy.deepcopy(plain)
    FP8().convert(swapped)
    assert type(swapped) is Float8Linear
    return plain, swapped


def off(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm().clamp(min=1e-9)).detach())


@pytest.mark.parametrize("shape", [(16,), (2, 3), (0,)])
@pytest.mark.parametrize("half", [True, False])
def test_its_three_products_are_fp32s_within_rounding(shape: tuple[int, ...], half: bool) -> None:
    plain, swapped = pair()
    given = torch.randn(*shape, 32, generator=torch.Generator().manual_seed(1))
    a, b = given.clone().requires_grad_(), given.clone().requires_grad_()
    wanted = plain(a)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        got = swapped(b)
    assert got.shape == wanted.shape
    assert got.dtype == (torch.bfloat16 if half else torch.float32)
    along = torch.randn_like(wanted)
    (wanted * along).sum().backward()
    (got * along).sum().backward()
    # e4m3 rounds by 2^-4 at most, e5m2 by 2^-3; errors of many products partly cancel
    assert off(got, wanted) < 0.06
    assert off(b.grad, a.grad) < 0.12
    assert off(swapped.weight.grad, plain.weight.grad) < 0.12
    assert off(swapped.bias.grad, plain.bias.grad) < 0.01
    assert swapped.weight.grad.dtype == b.grad.dtype == torch.float32


def test_non_finite_values_stay() -> None:
    _, swapped = pair()
    assert not swapped(torch.full((2, 32), float("inf"))).isfinite().any()
    assert swapped(torch.full((2, 32), float("nan"))).isnan().all()


class Odd(nn.Linear):
    pass


def test_plain_linear_layers_are_swapped() -> None:
    shared = nn.Linear(16, 16)
    layers = (nn.Linear(16, 32), nn.Linear(32, 10), nn.Linear(20, 16), Odd(16, 16))
    model = nn.Sequential(*layers, nn.MultiheadAttention(16, 2), shared, shared)
    before, hooks = dict(model.named_parameters()), []
    shared.register_forward_hook(lambda *_: hooks.append(1))
    assert FP8().convert(model) is model
    kinds = [type(m).__name__ for m in model]
    assert kinds == ["Float8Linear", "Linear", "Linear", "Odd", "MultiheadAttention", *["Float8Linear"] * 2]
    assert type(model[4].out_proj) is not Float8Linear
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert isinstance(model[0], nn.Linear)
    FP8().forward(model[5], CPU)(torch.ones(2, 16))
    assert hooks == [1]
    assert FP8().convert(model) is model  # as a second run does
    again = copy.deepcopy(model)
    assert type(again[0]) is Float8Linear
    with pytest.raises(PrepareError, match=r"multiples of 16, and none of the 1 in this Linear .* Use"):
        FP8().convert(nn.Linear(16, 10))


def falls(policy: FP8, device: torch.device, steps: int = 40) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(device)
    called = policy.forward(policy.convert(model), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(24, 16, device=device)
    found = []
    for _ in range(steps):
        loss = (called(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found[0], found[-1]


def test_training_falls() -> None:
    first, last = falls(FP8(), CPU)
    assert last < 0.5 * first


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    found = torch.cuda.get_device_capability()
    if found < (8, 9):
        pytest.skip(f"needs an NVIDIA GPU with fp8 Tensor Cores (sm_89 or newer); this one is {found}")
    first, last = falls(FP8(), torch.device("cuda"))
    assert last < 0.5 * first
    with Accelerator(mixed_precision="fp8") as acc:
        model, optimizer = nn.Linear(32, 16), None
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
        out = model(torch.randn(5, 32, device=acc.device))
        assert out.dtype == torch.float32
        acc.backward(out.square().mean())
        optimizer.step()
        assert type(acc.unwrap_model(model)) is Float8Linear
