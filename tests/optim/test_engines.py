"""One factor for unscaling and clipping: the step that reads it does what dividing and clipping in memory does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, GradScalerKwargs
from easymp.errors import StepError
from easymp.optim import TorchEngine
from easymp.optim.engines import multiply

from ..strategies.models import make, whole
from ..strategies.ways import WAYS

SCALE = GradScalerKwargs(init_scale=1024.0, growth_interval=3)
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def training(
    kind: str,
    precision: str,
    clip: float | None,
    fused: bool,
    strategy: str = "auto",
    options: dict[str, Any] | None = None,
    bad: tuple[int, int] | None = None,
    accumulation: int = 1,
    model_kind: str = "idle",
) -> dict[str, Any]:
    """Six updates: parameters, norms, skipped steps, scale, what the optimizer remembers.

    Args:
        bad: step and rank in which a gradient overflows.
    """
    with Accelerator(
        mixed_precision=precision,
        cpu=True,
        strategy=strategy,
        strategy_options=options,
        fused=fused,
        kwargs_handlers=[SCALE],
        gradient_accumulation_steps=accumulation,
    ) as acc:
        model = make(model_kind)
        optimizer: Any = KINDS[kind](list(model.parameters()))
        schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 6)
        model, optimizer, schedule = acc.prepare(model, optimizer, schedule)
        spread = acc._prepared.strategy
        generator = torch.Generator().manual_seed(7)
        norms, skipped, left, moved = [], [], [], set()
        for step in range(6):
            for _ in range(accumulation):
                x = torch.randn(8, 12, generator=generator).chunk(spread.data_size)[spread.data_rank]
                if bad == (step, acc.process_index):
                    x = x * 1e30
                with acc.accumulate(model):
                    acc.backward(model(x).square().mean())
                    norm = acc.clip_grad_norm_(model.parameters(), clip) if clip else None
                    left.append(optimizer.factor is not None)
                    moved.update(p for g in optimizer.param_groups for p in g["params"] if p.grad is not None)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            norms.append(float(norm) if norm is not None else 0.0)
            skipped.append(optimizer.step_was_skipped)
        return {
            "parameters": {name: whole(p) for name, p in model.named_parameters()},
            "state": [whole(v) for p, s in optimizer.state.items() if p in moved for v in s.values() if isinstance(v, Tensor)],
            "norms": norms,
            "skipped": skipped,
            "scale": acc.scaler.get_scale(),
            "left": any(left),
        }


def same(ours: dict[str, Any], theirs: dict[str, Any], rtol: float = 1e-5) -> None:
    assert ours["skipped"] == theirs["skipped"]
    assert ours["scale"] == theirs["scale"]
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-6, nan_ok=True)
    torch.testing.assert_close(ours["parameters"], theirs["parameters"], rtol=rtol, atol=1e-6)
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_that_reads_the_factor_is_the_one_in_memory(kind: str, precision: str, clip: float | None) -> None:
    ours, theirs = (training(kind, precision, clip, fused) for fused in (True, False))
    same(ours, theirs)
    assert ours["left"] == (clip is not None)
    assert not theirs["left"]


@pytest.mark.parametrize("clip", [None, 0.1])
def test_an_overflow_skips_and_changes_nothing(clip: float | None) -> None:
    ours, theirs = (training("AdamW", "fp16", clip, fused, bad=(2, 0)) for fused in (True, False))
    assert ours["skipped"] == [False, False, True, False, False, False]
    same(ours, theirs)


def both(label: str, precision: str, accumulation: int, bad: tuple[int, int] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    way = WAYS[label]
    kind, model = ("AdamW" if way.adam else "SGD"), "mlp"
    options = {**way.options, **way.more.get(model, {})}
    found = [training(kind, precision, 0.1, fused, way.strategy, options, bad, accumulation, model) for fused in (True, False)]
    return found[0], found[1]


@pytest.mark.parametrize("label", WAYS)
def test_under_every_strategy(ranks: Any, label: str) -> None:
    number, size = list(WAYS).index(label), WAYS[label].sizes[0]
    precision = "fp16" if number % 2 else "fp32"
    for ours, theirs in ranks(both, label, precision, 1 + number % 3, None, processes=size):
        same(ours, theirs, 1e-4 if precision == "fp16" else 1e-5)
        assert ours["left"] == (not label.startswith("tensor_parallel"))  # torch's fused step does not take all of its parameters


@pytest.mark.parametrize("label", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_skips_on_all(ranks: Any, label: str) -> None:
    for ours, theirs in ranks(both, label, "fp16", 1, (2, 1), processes=2):
        assert ours["skipped"] == [False, False, True, False, False, False]
        same(ours, theirs, 1e-4)


# -- who looks at gradients in between -------------------------------------------------------------------------------------


def started(precision: str = "fp16", **options: Any) -> tuple[Accelerator, nn.Module, Any]:
    acc = Accelerator(mixed_precision=precision, cpu=True, kwargs_handlers=[SCALE], **options)
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    back(acc, model)
    return acc, model, optimizer


def back(acc: Accelerator, model: nn.Module) -> None:
    """The gradient is 3.0 four times: its norm is 6."""
    acc.backward(model(torch.full((1, 4), 3.0)).sum())


def moves(optimizer: Any, model: nn.Module, to: float) -> None:
    optimizer.step()
    assert model.weight[0].tolist() == pytest.approx([to] * 4, rel=1e-3)


def test_in_between_gradients_are_as_backward_left_them_and_the_norm_is_not() -> None:
    acc, model, optimizer = started()
    with acc:
        norm = acc.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, Tensor)
        assert norm.item() == pytest.approx(6.0, rel=1e-3)
        assert model.weight.grad[0].tolist() == pytest.approx([3072.0] * 4, rel=1e-3)
        moves(optimizer, model, 0.5)


LOOKS: dict[str, tuple[Callable[[Accelerator, nn.Module, Any], Any], float]] = {
    "a second clip": (lambda acc, model, optimizer: acc.clip_grad_norm_(model.parameters(), 0.5), 0.75),
    "a clip of another kind": (lambda acc, model, optimizer: acc.clip_grad_norm_(model.parameters(), 0.25, float("inf")), 0.75),
    "a clip by value": (lambda acc, model, optimizer: acc.clip_grad_value_(model.parameters(), 0.25), 0.75),
    "unscale_gradients": (lambda acc, model, optimizer: acc.unscale_gradients(), 0.5),
    "a gradient taken away": (lambda acc, model, optimizer: setattr(model.weight, "grad", None), 1.0),
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_follows_a_clip_finds_clipped_gradients(look: str) -> None:
    act, to = LOOKS[look]
    for fused in (True, False):
        acc, model, optimizer = started(fused=fused)
        with acc:
            acc.clip_grad_norm_(model.parameters(), 1.0)
            act(acc, model, optimizer)
            moves(optimizer, model, to)


def test_unscaled_first_and_then_clipped() -> None:
    acc, model, optimizer = started()
    with acc:
        acc.unscale_gradients()
        assert model.weight.grad[0].tolist() == pytest.approx([3.0] * 4, rel=1e-3)
        assert float(acc.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(6.0, rel=1e-3)
        assert optimizer.factor is not None
        moves(optimizer, model, 0.5)


def test_gradients_changed_in_between_are_an_error_that_names_the_way_out() -> None:
    acc, model, optimizer = started()
    with acc:
        acc.clip_grad_norm_(model.parameters(), 1.0)
        model.weight.grad.mul_(2)
        with pytest.raises(StepError, match=r"shape \(1, 4\) was changed between clip_grad_norm_ and step\(\).*fused=False"):
            optimizer.step()


def test_a_hook_before_the_step_sees_clipped_gradients() -> None:
    acc, model, optimizer = started()
    with acc:
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.norm().item()))
        acc.clip_grad_norm_(model.parameters(), 1.0)
        moves(optimizer, model, 0.5)
        assert seen == [pytest.approx(1.0, rel=1e-3)]


def test_the_wrapped_optimizer_by_itself_steps_on_clipped_gradients() -> None:
    acc, model, optimizer = started()
    with acc:
        acc.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.optimizer.step()
        assert model.weight[0].tolist() == pytest.approx([0.5] * 4, rel=1e-3)


@pytest.mark.parametrize("clear", [lambda m, o: o.zero_grad(), lambda m, o: m.zero_grad(), lambda m, o: m.zero_grad(False)])
def test_a_clip_without_a_step_is_forgotten_with_the_gradients(clear: Callable[..., None]) -> None:
    acc, model, optimizer = started()
    with acc:
        for _ in range(2):
            acc.clip_grad_norm_(model.parameters(), 1.0)
            clear(model, optimizer)
            back(acc, model)
        acc.clip_grad_norm_(model.parameters(), 1.0)
        moves(optimizer, model, 0.5)


def test_a_backward_after_a_clip_adds_to_clipped_gradients() -> None:
    acc, model, optimizer = started("no")
    with acc:
        acc.clip_grad_norm_(model.parameters(), 1.0)
        back(acc, model)
        assert model.weight.grad[0].tolist() == pytest.approx([3.5] * 4)
        moves(optimizer, model, -2.5)


def test_two_optimizers_and_one_clip() -> None:
    found = []
    for fused in (True, False):
        with Accelerator(mixed_precision="no", cpu=True, fused=fused) as acc:
            body, head = make("mlp"), make("mlp")
            one, two = torch.optim.AdamW(body.parameters(), lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)
            body, head, one, two = acc.prepare(body, head, one, two)
            for _ in range(3):
                acc.backward((body(torch.ones(2, 12)) * head(torch.ones(2, 12))).sum())
                norm = acc.clip_grad_norm_([*body.parameters(), *head.parameters()], 0.1)
                assert (one.factor is not None) is (two.factor is not None) is fused
                one.step(), two.step()
                one.zero_grad(), two.zero_grad()
            found.append((norm, [p.detach() for p in [*body.parameters(), *head.parameters()]]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_a_part_of_the_parameters_is_clipped_in_memory() -> None:
    acc, model, optimizer = started()
    with acc:
        later = acc.prepare(nn.Linear(4, 1, bias=False))
        optimizer.add_param_group({"params": list(later.parameters())})
        acc.clip_grad_norm_(model.parameters(), 1.0)
        assert optimizer.factor is None
        assert model.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-3)


def test_parameters_gain_and_lose_gradients() -> None:
    found = []
    for fused in (True, False):
        with Accelerator(mixed_precision="no", cpu=True, fused=fused) as acc:
            model = make("mlp")
            model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
            for step in range(4):
                model[2].requires_grad_(step % 2 == 0)
                acc.backward(model(torch.ones(2, 12)).square().sum())
                acc.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_is_torchs_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((7, 5), (), (0,), (3000,))]
    for p in parameters:
        p.grad = torch.randn(p.shape).to(dtype) * 64
    engine = TorchEngine(torch.optim.AdamW(parameters, fused=True))
    norm, factor, bad, inverse = engine.measure(0.5, torch.tensor(64.0)).tolist()
    expected = torch.cat([p.grad.float().flatten() for p in parameters]).div(64).norm().item()
    assert (norm, inverse, bad) == (pytest.approx(expected, rel=1e-6), 1 / 64, 0)
    assert factor == pytest.approx(0.5 / (expected + 1e-6) / 64, rel=1e-6)
    over = engine.measure(0.5, torch.tensor(64.0), lambda totals: totals.mul_(4)).tolist()
    assert over[0] == pytest.approx(2 * expected, rel=1e-6)
    multiply([p.grad for p in parameters], torch.tensor(float("inf")))
    assert engine.measure()[2] == 1
    assert engine.measure(1.0, None, lambda totals: None)[2] == 1
