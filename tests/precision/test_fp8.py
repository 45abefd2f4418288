"""fp8's linear layer, by real scaled products on the CPU, against fp32; and what the precision does to a model."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor, nn

from easymp import Accelerator, Choice, PrepareError, Source
from easymp.parts import fp8 as parts_fp8
from easymp.precision import policies
from easymp.precision.policies import FP8, Float8Linear

from ..words import make_accelerator

CPU = torch.device("cpu")
SLOW = pytest.mark.slow


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
@pytest.mark.parametrize("autocast", [True, False])
def test_its_three_products_are_fp32s_within_rounding(shape: tuple[int, ...], autocast: bool) -> None:
    plain, swapped = pair()
    inputs = torch.randn(*shape, 32, generator=torch.Generator().manual_seed(1))
    a, b = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    expected = plain(a)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = swapped(b)
    assert result.shape == expected.shape
    assert result.dtype == (torch.bfloat16 if autocast else torch.float32)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (result * weights).sum().backward()
    # e4m3 rounds by 2^-4 at most, e5m2 by 2^-3; errors of many products partly cancel
    assert off(result, expected) < 0.06
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
    class_names = [type(m).__name__ for m in model]
    assert class_names == ["Float8Linear", "Linear", "Linear", "Odd", "MultiheadAttention", *["Float8Linear"] * 2]
    assert type(model[4].out_proj) is not Float8Linear
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert isinstance(model[0], nn.Linear)
    FP8().forward(model[5], CPU)(torch.ones(2, 16))
    assert hooks == [1]
    assert FP8().convert(model) is model  # as a second run does
    copied = copy.deepcopy(model)
    assert type(copied[0]) is Float8Linear
    with pytest.raises(PrepareError, match=r"multiples of 16, and none of the 1 in this Linear .* Use"):
        FP8().convert(nn.Linear(16, 10))


def falls(policy: FP8, device: torch.device, steps: int = 40) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(device)
    forward_model = policy.forward(policy.convert(model), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(24, 16, device=device)
    losses = []
    for _ in range(steps):
        loss = (forward_model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


def test_training_falls() -> None:
    first, last = falls(FP8(), CPU)
    assert last < 0.5 * first


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.utils.weight_norm(nn.Linear(32, 16))  # its weight is not a parameter

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def fp8_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plan take fp8 on a CPU, where torch's scaled products run, too."""
    monkeypatch.setattr(FP8, "refuse", staticmethod(lambda facts: None))


def losses(path: Path, prepared: bool = True, **settings: Any) -> tuple[list[float], list[Tensor]]:
    """Two updates of three micro-batches, an evaluation with other weights, a load of the first one, another update."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)  # which does not count versions
    x, results = torch.randn(16, 32), []
    if prepared:
        settings["gradient_accumulation_steps"] = 3
    with make_accelerator(cpu=True, mixed_precision="fp8", **settings) as acc:
        original, model = model, acc.prepare(model)
        stepped = acc.prepare(optimizer) if prepared else optimizer
        for update in range(3):
            for micro in range(3):
                with acc.accumulate(model) if prepared else nullcontext():
                    loss = model(x + micro).square().mean()
                    acc.backward(loss)
                    if prepared or micro == 2:
                        stepped.step()
                        stepped.zero_grad()
                results.append(loss.item())
            if update == 0:
                acc.save_state(path)
                with torch.no_grad():
                    for parameter in original.parameters():
                        parameter.data.mul_(2)
                    results.append(model(x).sum().item())
                    for parameter in original.parameters():
                        parameter.data.div_(2)
            else:
                acc.load_state(path)
        halves = {n: p / 2 for n, p in original.named_parameters()}
        results.append(torch.func.functional_call(original, halves, x).sum().item())
        torch.save(copy.deepcopy(original.blocks), path / "model.pt")  # without what was rounded
        return results, [p.detach().clone() for p in original.parameters()]


@pytest.mark.usefixtures("fp8_on_cpu")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    ("settings", "prepared"),
    [
        ({}, True),
        ({}, False),
        ({"activation_checkpointing": "blocks"}, True),
        ({"compile": {"what": "blocks", "backend": "aot_eager"}}, True),
        ({"compile": {"what": "model", "backend": "aot_eager"}, "activation_checkpointing": "blocks"}, True),
    ],
    ids=["plain", "an optimizer that is not prepared", "recomputed", "blocks compiled", "compiled and recomputed"],
)
def test_a_weight_is_rounded_once_an_update_with_the_bits_of_rounding_it_each_time(
    settings: Any, prepared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded, times, counters = policies.rounded, {True: 0, False: 0}, torch._dynamo.utils.counters
    sizes = {(64, 32), (32, 64)}

    def count(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling() and tuple(tensor.shape) in sizes:
            times[torch.is_grad_enabled()] += 1  # inside of products no gradients are enabled
        return rounded(tensor, dtype)

    monkeypatch.setattr(policies, "rounded", count)
    counters.clear()
    cached = losses(tmp_path / "once", prepared, **settings)
    assert times[True] == 4 * 3  # four weights, and three updates
    if "compile" not in settings:
        assert times[False] == 4 + 4  # the evaluation, and the call with other weights
    assert not counters["graph_break"]
    compiled = counters["stats"].get("unique_graphs", 0)
    assert compiled <= 6  # with and without gradients, and of a first block, whose input needs none
    monkeypatch.setattr(parts_fp8, "round_once", lambda layers: None)
    uncached = losses(tmp_path / "each", prepared, **settings)
    assert cached[0] == uncached[0]
    assert all(torch.equal(a, b) for a, b in zip(cached[1], uncached[1]))


@pytest.mark.usefixtures("fp8_on_cpu")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_is_implied_compiles_blocks_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    implied = Choice("blocks", "as on a GPU", Source.DETECTED)
    monkeypatch.setattr("easymp.plan._compile", lambda *_: implied)
    for model, reason in ((Net(), "as on a GPU"), (nn.Linear(32, 16), "no repeated blocks, or compiled")):
        with Accelerator(cpu=True, mixed_precision="fp8") as acc:
            acc.prepare(model)
            compiled = [m for m in model.modules() if m._compiled_call_impl is not None]
            assert compiled == ([*model.blocks] if isinstance(model, Net) else [])
            assert acc.plan.compiles == bool(compiled) and reason in acc.plan.compile.reason


def two_updates(path: Path, precision: str, settings: Any) -> tuple[list[float], str]:
    """Losses before each of two updates and after them, the second one again from a checkpoint; the plan's reason."""
    torch.manual_seed(0)
    model, losses = nn.Sequential(Block(), Block(), nn.Linear(32, 16)), []
    x = torch.randn(8, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FP8, "refuse", staticmethod(lambda facts: None))
        with make_accelerator(cpu=True, mixed_precision=precision, **settings) as acc:
            model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

            def update() -> None:
                loss = model(x).square().mean()
                acc.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())

            update()
            acc.save_state(path)
            update()
            acc.load_state(path)
            update()
            losses.append(model(x).square().mean().item())
            return losses, acc.plan.weights.reason


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ({"strategy": "fsdp", "activation_checkpointing": "blocks"}, 3),  # uneven shards
        pytest.param({"strategy": "fsdp", "compile": {"what": "blocks", "backend": "aot_eager"}}, 2, marks=SLOW),
        pytest.param({"strategy": "hsdp", "strategy_options": {"shard_size": 2}}, 4, marks=SLOW),
    ],
    ids=["recomputed", "blocks compiled", "hsdp"],
)
def test_shards_are_rounded_after_each_gather(settings: Any, processes: int, ranks: Any, tmp_path: Path) -> None:
    losses, reason = ranks(two_updates, tmp_path / "fp8", "fp8", settings, processes=processes)[0]
    assert reason == "gathered in bf16, and rounded for fp8 after each gather"
    alone, _ = two_updates(tmp_path / "alone", "fp8", {})
    half, _ = two_updates(tmp_path / "half", "bf16", {})
    assert losses == pytest.approx(alone, rel=0.02)
    assert losses[1] == losses[2]  # resumed to the same bits
    assert losses != pytest.approx(half, rel=1e-4)  # which bf16 gives to the last bit on any number of processes


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip(f"needs an NVIDIA GPU with fp8 Tensor Cores (sm_89 or newer); this one is {capability}")
    first, last = falls(FP8(), torch.device("cuda"))
    assert last < 0.5 * first
    with Accelerator(mixed_precision="fp8") as acc:
        model, optimizer = nn.Linear(32, 16), None
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
        outputs = model(torch.randn(5, 32, device=acc.device))
        assert outputs.dtype == torch.float32
        acc.backward(outputs.square().mean())
        optimizer.step()
        assert type(acc.unwrap_model(model)) is Float8Linear
