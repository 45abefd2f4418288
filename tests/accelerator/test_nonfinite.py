"""Losses and gradients that are not finite.

Said once, skipped or raised, by all ranks alike; and an fp16 step past `backward`.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator, CompileOptions, NonfiniteError, StepError

from ..strategies.models import under, whole
from .models import heard, make

NAN, INF = float("nan"), float("inf")
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
LOG = "easymp.parts.nonfinite"


def prepared(acc: Accelerator) -> tuple[Any, Any]:
    model = make()
    return acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def here(model: nn.Module) -> list[torch.Tensor]:
    return [whole(p) for p in model.parameters() if not p.is_meta]


def unlike(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return any(not torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-true"])
def test_it_is_said_once(precision: str) -> None:
    with heard(LOG) as said, Accelerator(mixed_precision=precision, cpu=True) as acc:
        model, optimizer = prepared(acc)
        for factor in (1, 1, NAN, NAN):
            acc.backward(model(X).square().mean() * factor)
            optimizer.step()
            assert not acc.optimizer_step_was_skipped
            optimizer.zero_grad()
    (_, line), (_, last) = said
    assert line.startswith(f"rank 0, step 3: the loss is nan (precision {precision}, no loss scale)")
    assert "nonfinite='skip'" in line
    assert last.startswith(
        "rank 0, step 4: the run ends with a loss that is not finite, and no loss has been finite since update 3."
    )


def losses(*factors: float) -> list[str]:
    """What is said of a run whose losses are multiplied by these; of rank 1 only, where there is one."""
    with heard(LOG) as said, Accelerator(mixed_precision="fp32", cpu=True) as acc:
        model, optimizer = prepared(acc)
        for factor in factors:
            acc.backward(
                model(X).square().mean() + (factor if acc.process_index == acc.num_processes - 1 else 1)
            )  # gradients are finite
            optimizer.step()
            optimizer.zero_grad()
    return [line for _, line in said if "the run ends" in line]


def test_a_run_that_ends_with_such_a_loss_says_so(ranks: Any) -> None:
    assert losses(1, NAN, 1) == []
    (line,) = losses(NAN, 1, INF, NAN)
    words = "the run ends with a loss that is not finite, and no loss has been finite since update 3. Load a checkpoint"
    assert line.startswith(f"rank 0, step 4: {words}")
    first, (line,) = ranks(losses, 1, 1, NAN)
    assert first == [] and line.startswith("rank 1, step 3: ") and "since update 3" in line


@pytest.mark.parametrize("precision", ["fp32", "bf16-true", "fp16"])
def test_raised(precision: str) -> None:
    with Accelerator(mixed_precision=precision, cpu=True, nonfinite="raise") as acc:
        model, optimizer = prepared(acc)
        before = here(model)
        acc.backward(model(X).sum() * NAN)
        words = rf"step 1: the loss is not finite on rank 0 \(precision {precision}, .*loss scale"
        with pytest.raises(NonfiniteError, match=words):
            optimizer.step()
        assert not unlike(here(model), before)
        optimizer.zero_grad()
        acc.backward(model(X).sum())  # a script that catches it goes on
        optimizer.step()
        optimizer.zero_grad()
        acc.backward(model(X).sum() + INF)  # whose gradients are finite
        with pytest.raises(NonfiniteError, match="step 2: the loss is not finite on rank 0"):
            optimizer.step()


def among_ranks(strategy: str, mode: str, steps: int, items: bool) -> dict[str, Any]:
    """Three updates; in the second, one micro-batch of rank 1 has a NaN."""
    options = {"every": 1} if strategy == "local_sgd" else None
    found: dict[str, Any] = {"skipped": [], "moved": [], "error": ""}
    with heard(LOG) as said, under(strategy, options, steps, "bf16", nonfinite=mode, cpu=True) as acc:
        model, optimizer = prepared(acc)
        for update in range(3):
            before = here(model)
            for micro in range(steps):
                x = X.clone()
                if (update, micro) == (1, 0) and (acc.process_index == 1 or strategy in ONE_BATCH):
                    x[0, 0] = NAN
                with acc.accumulate(model):
                    loss = model(x).square().sum()
                    acc.backward(loss, num_items=len(x)) if items else acc.backward(loss / len(x))
                    try:
                        optimizer.step()
                    except NonfiniteError as error:
                        found["error"] = str(error)
                    optimizer.zero_grad()
            found["moved"].append(unlike(here(model), before))
            found["skipped"].append(acc.optimizer_step_was_skipped)
    return {**found, "said": said}


def skip_and_raise(*how: Any) -> list[dict[str, Any]]:
    strategy, *more = how
    return [among_ranks(strategy, mode, *more) for mode in ("skip", "raise")]


ONE_BATCH = ("pipeline", "tensor_parallel")
CASES = [
    ("ddp", 1, False), ("ddp", 2, True), ("zero1", 2, False), ("fsdp", 1, False),
    ("fsdp", 2, True), ("tensor_parallel", 1, False), ("pipeline", 1, False), ("local_sgd", 1, False),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "steps", "items"), CASES)
def test_all_ranks_skip_or_raise(ranks: Any, strategy: str, steps: int, items: bool) -> None:
    both = ranks(skip_and_raise, strategy, steps, items)
    where = "rank 0, 1" if strategy in ONE_BATCH else "rank 1"
    for skipping, raising in both:
        assert skipping["moved"] == raising["moved"] == [True, False, True]
        assert skipping["skipped"] == [False, True, False]
        assert raising["error"].startswith(f"step 2: the loss is not finite on {where} (")
    ((_, line),) = [line for skipping, _ in both for line in skipping["said"]]
    assert "step 2: the loss is nan (precision bf16, no loss scale)" in line


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("precision", "mode"), [("fp16", None), ("bf16", "skip")])
def test_a_plain_backward_is_named(precision: str, mode: str | None, clip: bool) -> None:
    with Accelerator(mixed_precision=precision, nonfinite=mode, cpu=True) as acc:
        model, optimizer = prepared(acc)
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


# -- the first module --------------------------------------------------------------------------------------------------


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


def planted(where: str, strategy: str | None = None, precision: str = "no", clip: bool = True, **more: Any) -> str:
    """The report of a fault in layer 7 of 12, in the second micro-batch of update 3 and later, on the last rank."""
    torch.manual_seed(0)
    with heard(LOG) as said, under(strategy, None, 2, precision, cpu=True, **more) as acc:
        layers = [Layer() for _ in range(12)]
        given = nn.Sequential(*layers)
        model, optimizer = acc.prepare(given, torch.optim.AdamW(given.parameters()))
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
PARAMETER = "16 of 24 parameters have such gradients; "
PARAMETER += "the last of them in the model, where backward came first, is '7.linear.bias'"
EAGER = CompileOptions("blocks", backend="eager")
PLANTED = [
    ({"where": "forward", "nonfinite": "warn"}, FORWARD),
    # calls of a plain model are not seen
    ({"where": "forward"}, "makes them an error, and finds the first module"),
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
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def run(mode: str) -> list[torch.Tensor]:
        model = build()
        with heard(LOG) as said, Accelerator(cpu=True, nonfinite=mode) as acc:  # type: ignore[arg-type]
            prepared, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
            acc.backward(prepared(X).sum() * NAN)
            if mode == "raise":
                words = "outputs of the model are finite, so the loss function"
                with pytest.raises(NonfiniteError, match=words):
                    optimizer.step()
            else:
                assert "A second forward, with other random numbers, is finite" in said[0][1]
        return [torch.rand(1), *model.buffers()]

    plain = build()
    plain(X)
    expected = [torch.rand(1), *plain.buffers()]
    for mode in ("warn", "raise"):
        assert not unlike(run(mode), expected)
