"""Losses and gradients that are not finite: said once, skipped or raised, by all ranks alike; and an fp16 step past `backward`."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator, CompileOptions, NonfiniteError, StepError

from ..strategies.models import under, whole
from .models import heard

NAN, INF = float("nan"), float("inf")
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


LOG = "easymp.training.nonfinite"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(
    acc: Accelerator, factors: list[Any], clip: bool = False, kind: Any = torch.optim.AdamW
) -> list[bool]:
    """Steps whose loss is multiplied by each of `factors`, or is what one of them makes of it; whether each has moved the weights."""
    model = net()
    model, optimizer = acc.prepare(model, kind(model.parameters(), lr=0.01))
    moved = []
    for factor in factors:
        before = [whole(p) for p in model.parameters() if not p.is_meta]
        loss = model(X).square().mean()
        acc.backward(factor(loss) if callable(factor) else loss * factor)
        if clip:
            acc.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after = [whole(p) for p in model.parameters() if not p.is_meta]
        moved.append(any(not torch.equal(a, b) for a, b in zip(after, before)))
        assert acc.optimizer_step_was_skipped == (not moved[-1])
        optimizer.zero_grad()
    return moved


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-true"])
def test_it_is_said_once(precision: str) -> None:
    with heard(LOG) as said, Accelerator(mixed_precision=precision, cpu=True) as acc:
        assert train(acc, [1, 1, NAN, NAN]) == [True] * 4  # what is NaN is equal to nothing
    ((_, line),) = said
    assert line.startswith(f"rank 0, step 3: the loss is nan (precision {precision}, no loss scale)")
    assert "nonfinite='skip'" in line


@pytest.mark.parametrize("precision", ["fp32", "bf16-true", "fp16"])
def test_raised(precision: str) -> None:
    with Accelerator(mixed_precision=precision, cpu=True, nonfinite="raise") as acc:
        model = net()
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
        before = [p.detach().clone() for p in model.parameters()]
        acc.backward(model(X).sum() * NAN)
        with pytest.raises(
            NonfiniteError,
            match=rf"step 1: the loss is not finite on rank 0 \(precision {precision}, .*loss scale",
        ):
            optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before))
        optimizer.zero_grad()
        acc.backward(model(X).sum())  # a script that catches it goes on
        optimizer.step()
        optimizer.zero_grad()
        acc.backward(model(X).sum() + INF)  # whose gradients are finite
        with pytest.raises(NonfiniteError, match="step 3: the loss is not finite on rank 0"):
            optimizer.step()


def among_ranks(strategy: str, mode: str, steps: int, items: bool) -> dict[str, Any]:
    """Three updates; in the second, one micro-batch of rank 1 has a NaN."""
    options = {"every": 1} if strategy == "local_sgd" else None
    found: dict[str, Any] = {"skipped": [], "moved": [], "error": ""}
    more = {"nonfinite": mode, "cpu": True}
    with heard(LOG) as said, under(strategy, options, steps, "bf16", **more) as acc:
        model = net()
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for update in range(3):
            before = [whole(p) for p in model.parameters() if not p.is_meta]
            for micro in range(steps):
                x = X.clone()
                if (
                    update == 1
                    and micro == 0
                    and (acc.process_index == 1 or strategy in ("pipeline", "tensor_parallel"))
                ):
                    x[0, 0] = NAN
                with acc.accumulate(model):
                    loss = model(x).square().sum()
                    acc.backward(loss, num_items=len(x)) if items else acc.backward(loss / len(x))
                    try:
                        optimizer.step()
                    except NonfiniteError as error:
                        found["error"] = str(error)
                    optimizer.zero_grad()
            after = [whole(p) for p in model.parameters() if not p.is_meta]
            found["moved"].append(any(not torch.equal(a, b) for a, b in zip(after, before)))
            found["skipped"].append(acc.optimizer_step_was_skipped)
    return {**found, "said": said}


CASES = [
    ("ddp", 1, False),
    ("ddp", 2, True),
    ("zero1", 2, False),
    ("fsdp", 1, False),
    ("fsdp", 2, True),
    ("tensor_parallel", 1, False),
    ("pipeline", 1, False),
    ("local_sgd", 1, False),
]


@pytest.mark.parametrize(("strategy", "steps", "items"), CASES)
def test_all_ranks_skip_or_raise(ranks: Any, strategy: str, steps: int, items: bool) -> None:
    skipping = ranks(among_ranks, strategy, "skip", steps, items)
    assert [got["moved"] for got in skipping] == [[True, False, True]] * 2
    assert [got["skipped"] for got in skipping] == [[False, True, False]] * 2
    ((_, line),) = [line for got in skipping for line in got["said"]]
    assert "step 2: the loss is nan (precision bf16, no loss scale)" in line
    raising = ranks(among_ranks, strategy, "raise", steps, items)
    assert [got["moved"] for got in raising] == [[True, False, True]] * 2
    where = "rank 0, 1" if strategy in ("pipeline", "tensor_parallel") else "rank 1"
    assert {got["error"].partition(" (")[0] for got in raising} == {
        f"step 2: the loss is not finite on {where}"
    }


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("precision", "mode"), [("fp16", None), ("bf16", "skip")])
def test_a_plain_backward_is_named(precision: str, mode: str | None, clip: bool) -> None:
    with Accelerator(mixed_precision=precision, nonfinite=mode, cpu=True) as acc:
        model = net()
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
        model(X).sum().backward()
        act = (lambda: acc.clip_grad_norm_(model.parameters(), 1.0)) if clip else optimizer.step
        said = r"loss.backward\(\) was called by itself.*Replace it by accelerator.backward\(loss\)"
        with pytest.raises(StepError, match=said):
            act()
        optimizer.zero_grad()
        acc.backward(model(X).sum())
        optimizer.step()
        model(X).sum().backward()
        with pytest.raises(StepError, match=r"without accelerator.backward\(loss\) in between"):
            optimizer.step()


# -- the first module ------------------------------------------------------------------------------------------------------


class Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        return x * (NAN if where == "forward" else 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * (NAN if ctx.where == "backward" else 1), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.fault = nn.Linear(4, 4), nn.Dropout(0.1), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Fault.apply(self.drop(self.linear(x).tanh()), self.fault)


def planted(
    where: str, strategy: str | None = None, precision: str = "no", clip: bool = True, **more: Any
) -> str:
    """The report of a fault in layer 7 of 12, in the second micro-batch of update 3 and later, on the last rank."""
    torch.manual_seed(0)
    with heard(LOG) as said, under(strategy, None, 2, precision, cpu=True, **more) as acc:
        layers = [Layer() for _ in range(12)]
        model, optimizer = acc.prepare(
            (whole_model := nn.Sequential(*layers)), torch.optim.AdamW(whole_model.parameters())
        )
        for micro in range(44):
            late = micro >= 5 and micro % 2 and acc.process_index == acc.num_processes - 1
            layers[7].fault = where if late else ""
            x = torch.randn(4, 4)
            held = weakref.ref(x)
            with acc.accumulate(model):
                acc.backward(model(x).square().mean())
                if clip:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                try:
                    optimizer.step()
                except NonfiniteError as error:
                    return str(error)
                optimizer.zero_grad()
            del x
            assert held() is None or not acc.sync_gradients, "arguments live until the step"
    return " ".join(line for _, line in said)


INPUTS = ", whose inputs range from -"
FORWARD = f"First not finite: the output of '7' (Layer){INPUTS}"
HOOKED = f"first not finite: the gradient that arrives at the output of '7.drop' (Dropout){INPUTS}"
PARAMETER = "16 of 24 parameters have such gradients; the last of them in the model, where backward came first, is '7.linear.bias'"
EAGER = CompileOptions("blocks", backend="eager")
PLANTED = [
    ({"where": "forward", "nonfinite": "warn"}, FORWARD),
    (
        {"where": "forward"},
        "makes them an error, and finds the first module",
    ),  # calls of a plain model are not seen
    ({"where": "forward", "precision": "bf16"}, FORWARD),
    ({"where": "forward", "precision": "bf16", "nonfinite": "skip"}, FORWARD),
    ({"where": "forward", "nonfinite": "raise", "compile": EAGER}, FORWARD),
    ({"where": "backward", "nonfinite": "raise"}, PARAMETER),
    ({"where": "backward", "nonfinite": "raise", "clip": False}, PARAMETER),
    ({"where": "backward", "nonfinite": "skip", "compile": EAGER}, HOOKED),
    ({"where": "backward", "precision": "fp16"}, HOOKED),  # the descent of the loss scale does not end
]


@pytest.mark.parametrize(("how", "expected"), PLANTED)
def test_the_first_module_is_named(how: dict[str, Any], expected: str) -> None:
    assert expected in planted(**how)


def planted_on_ranks(strategy: str) -> list[str]:
    ways = [("forward", "raise"), ("backward", "raise"), ("backward", "skip")]
    return [planted(where, strategy, nonfinite=mode) for where, mode in ways]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_rank_is_named(ranks: Any, strategy: str) -> None:
    first, second = ranks(planted_on_ranks, strategy)
    for raised, expected in ((0, FORWARD), (1, PARAMETER)):
        assert first[raised] == second[raised] and expected in first[raised]
    assert "step 3: the loss is not finite on rank 1" in first[0]
    assert HOOKED in second[2] and "rank 1, step 4: first not finite" in second[2] and HOOKED not in first[2]


def test_a_second_forward_leaves_no_trace() -> None:
    def run(mode: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        with heard(LOG) as said, Accelerator(cpu=True, nonfinite=mode) as acc:  # type: ignore[arg-type]
            prepared, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
            acc.backward(prepared(X).sum() * NAN)
            if mode == "raise":
                with pytest.raises(
                    NonfiniteError, match="outputs of the model are finite, so the loss function"
                ):
                    optimizer.step()
            else:
                assert "A second forward, with other random numbers, is finite" in said[0][1]
        return [torch.rand(1), *model.buffers()]

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    plain(X)
    expected = [torch.rand(1), *plain.buffers()]
    for mode in ("warn", "raise"):
        assert all(torch.equal(a, b) for a, b in zip(run(mode), expected))
