"""One factor for unscaling and clipping: the step that reads it does what dividing and clipping in memory does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, EasympWarning, GradScalerKwargs, Settings, StepError
from easymp.cuda import cupy_launcher
from easymp.optim import engine as torch_engine

from ..cuda.compiled import CompiledLauncher, kernels_on_cpu
from ..strategies.models import make, mean_square, train_step, under, whole
from ..strategies.ways import WAYS
from ..words import make_accelerator
from .test_own import Failing

SCALE = GradScalerKwargs(init_scale=1024.0, growth_interval=3)
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


@contextmanager
def stepping(engine: str) -> Iterator[CompiledLauncher | None]:
    """Inside, `prepare` finds kernels ("kernels"), or torch's steps.

    A factor is left to these for small models, too.
    """
    launcher = CompiledLauncher() if engine == "kernels" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine, "WORTH", 0)
        if launcher is not None:
            kernels_on_cpu(patch, launcher)
        yield launcher


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "WORTH", 0)


def training(engine: str, *args: Any, **options: Any) -> dict[str, Any]:
    """By "torch", which reads the factor, by "kernels", or with gradients changed in "memory"; see `updates`."""
    with stepping(engine) as launcher:
        result = updates(engine != "memory", *args, **options)
        return {**result, "launches": launcher.launches if launcher else []}


def updates(
    fused: bool,
    kind: str,
    precision: str,
    clip: float | None,
    strategy: str = "auto",
    options: dict[str, Any] | None = None,
    overflow: tuple[int, int] | None = None,
    accumulation: int = 1,
    model_kind: str = "idle",
    cpu: bool = True,
) -> dict[str, Any]:
    """Six updates, `fused` or with gradients changed in memory; in step and rank `bad` a gradient overflows."""
    keywords: Any = {"cpu": cpu, "fused": fused, "scaler_options": SCALE}
    with under(strategy, options, accumulation, precision, **keywords) as acc:
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
                if overflow == (step, acc.process_index):
                    x = x * 1e30
                with acc.accumulate(model):
                    train_step(acc, model, mean_square, x.to(acc.device))
                    norm = acc.clip_grad_norm_(model.parameters(), clip) if clip else None
                    left.append(optimizer.turn.clip is not None)
                    moved.update(p for g in optimizer.param_groups for p in g["params"] if p.grad is not None)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            norms.append(float(norm) if norm is not None else 0.0)
            skipped.append(optimizer.step_was_skipped)
        states = [v for p, s in optimizer.state.items() if p in moved for v in s.values()]
        return {
            "parameters": {name: whole(p) for name, p in model.named_parameters()},
            "state": [whole(v) for v in states if isinstance(v, Tensor)],
            "norms": norms,
            "skipped": skipped,
            "scale": acc.scaler.get_scale(),
            "left": any(left),
            "engine": optimizer.engine.name,
        }


def same(result: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-5) -> None:
    tolerance = {"rtol": rtol, "atol": max(1e-6, rtol / 100)}
    assert (result["skipped"], result["scale"]) == (expected["skipped"], expected["scale"])
    rel = rtol if rtol > 1e-5 else 1e-6
    assert result["norms"] == pytest.approx(expected["norms"], rel=rel, nan_ok=True)
    torch.testing.assert_close(result["parameters"], expected["parameters"], **tolerance)
    torch.testing.assert_close(result["state"], expected["state"], **tolerance)


SLOW = pytest.mark.slow
STEPS = [  # the optimizer, precision, clip, and the step in which a gradient overflows on rank 0
    ("AdamW", "fp32", None, None),
    ("SGD", "fp16", None, None),
    ("AdamW", "fp16", 0.1, (2, 0)),
    ("Adagrad", "fp32", 0.1, None),
    pytest.param("Adam", "fp16", 0.1, None, marks=SLOW),
]


@pytest.mark.parametrize(("kind", "precision", "clip", "bad"), STEPS)
def test_the_step_that_reads_the_factor_is_the_one_in_memory(kind, precision, clip, bad):
    expected = training("memory", kind, precision, clip, overflow=bad)
    assert not expected["left"]
    assert expected["skipped"] == [bad is not None and step == bad[0] for step in range(6)]
    for engine in ("torch", "kernels"):
        result = training(engine, kind, precision, clip, overflow=bad)
        same(result, expected)
        assert bool(result["launches"]) is (engine == "kernels" and (clip is not None or precision == "fp16"))
        assert result["left"] == (clip is not None)


def all_three(label, precision, accumulation, overflow):
    strategy = WAYS[label]
    kind, model = ("AdamW" if strategy.adam else "SGD"), "mlp"
    arguments = (strategy.strategy, {**strategy.options, **strategy.more.get(model, {})}, overflow, accumulation, model)
    return [training(step, kind, precision, 0.1, *arguments) for step in ("memory", "torch", "kernels")]


FAST = ("zero1", "fsdp", "pipeline")


@pytest.mark.parametrize(
    "label", [pytest.param(way, marks=[SLOW] * (way not in FAST)) for way in WAYS if way != "single"]
)
def test_under_every_strategy(ranks: Any, label: str) -> None:
    """Of zero1 and fsdp with an overflow on one rank, which skips the step on all."""
    number, size = list(WAYS).index(label), WAYS[label].sizes[0]
    overflow = (2, 1) if label in ("zero1", "fsdp") else None
    precision = "fp16" if number % 2 or overflow else "fp32"
    for memory, *results in ranks(all_three, label, precision, 1 + number % 3, overflow, processes=size):
        assert memory["skipped"] == [overflow is not None and step == overflow[0] for step in range(6)]
        for one in results:
            same(one, memory, 1e-3 if precision == "fp16" else 1e-5)
            assert one["left"]
        assert results[1]["launches"]


@pytest.mark.parametrize(("name", "precision"), [("squares", "fp16"), ("prepare", "O2"), ("adam", "fp16")])
def test_a_kernel_that_fails_gives_way_to_torch(monkeypatch, name, precision):
    memory = updates(False, "AdamW", precision, 0.1)
    kernels_on_cpu(monkeypatch, Failing(name))
    monkeypatch.setattr(cupy_launcher, "_warned", [])
    with pytest.warns(EasympWarning, match="torch's own steps run instead: .*no compiler"):
        got = updates(True, "AdamW", precision, 0.1)
    same(got, memory, 1e-3)


def plan_of(optimizer: Callable[[Any], torch.optim.Optimizer], engine: str = "kernels") -> tuple[str, str]:
    with (
        stepping(engine),
        Accelerator(mixed_precision="no", cpu=True, settings=Settings(fused=engine != "memory")) as acc,
    ):
        model = make("mlp")
        acc.prepare(model, optimizer(model.parameters()))
        return acc.plan.optimizer.value, acc.plan.optimizer.reason


def test_the_plan_says_which_and_why() -> None:
    assert plan_of(torch.optim.AdamW) == ("CuPy", "norm, unscale, clip and AdamW in one pass")
    assert plan_of(torch.optim.AdamW, "torch") == ("fused", "torch's fused AdamW")
    assert plan_of(torch.optim.AdamW, "memory") == ("as given", "fused=False")
    by_caller = ("as given", "fused or foreach was chosen by the caller")
    for options in ({"foreach": True}, {"fused": False}):
        assert plan_of(lambda p, options=options: torch.optim.AdamW(p, **options)) == by_caller
    assert plan_of(lambda p: torch.optim.AdamW(p, fused=True))[0] == "CuPy"
    assert plan_of(torch.optim.RMSprop) == ("as given", "torch has no fused step for RMSprop")


def started(precision: str = "fp16", **options: Any) -> tuple[Accelerator, nn.Module, Any]:
    acc = make_accelerator(mixed_precision=precision, cpu=True, settings=Settings(scaler_options=SCALE), **options)
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    backward_of_threes(acc, model)
    return acc, model, optimizer


def backward_of_threes(acc: Accelerator, model: nn.Module) -> None:
    """The gradient is 3.0 four times: its norm is 6."""
    acc.backward(model(torch.full((1, 4), 3.0)).sum())


def moves(optimizer: Any, model: nn.Module, to: float) -> None:
    optimizer.step()
    assert model.weight[0].tolist() == pytest.approx([to] * 4, rel=1e-3)


def second(acc: Accelerator, model: nn.Module, optimizer: Any) -> None:
    """Gradients in memory are as backward left them, scaled."""
    assert not optimizer.turn.clip or model.weight.grad[0].tolist() == pytest.approx([3072.0] * 4, rel=1e-3)
    acc.clip_grad_norm_(model.parameters(), 0.5)


def cleared(acc: Accelerator, model: nn.Module, optimizer: Any) -> None:
    for clear in (optimizer.zero_grad, model.zero_grad, lambda: model.zero_grad(False)):
        clear()
        backward_of_threes(acc, model)
        acc.clip_grad_norm_(model.parameters(), 1.0)


# What comes between a clip and the step, and the weights after it.
LOOKS: dict[str, tuple[Callable[[Accelerator, nn.Module, Any], Any], float]] = {
    "nothing": (lambda acc, model, optimizer: None, 0.5),
    "a second clip": (second, 0.75),
    "of another kind": (lambda acc, model, o: acc.clip_grad_norm_(model.parameters(), 0.25, math.inf), 0.75),
    "a clip by value": (lambda acc, model, o: acc.clip_grad_value_(model.parameters(), 0.25), 0.75),
    "unscale_gradients": (lambda acc, model, optimizer: acc.unscale_gradients(), 0.5),
    "a gradient taken away": (lambda acc, model, optimizer: setattr(model.weight, "grad", None), 1.0),
    "gradients that are cleared": (cleared, 0.5),
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_follows_a_clip_finds_clipped_gradients(look: str) -> None:
    act, to = LOOKS[look]
    for fused in (True, False):
        acc, model, optimizer = started(fused=fused)
        with acc:
            norm = acc.clip_grad_norm_(model.parameters(), 1.0)
            assert norm.item() == pytest.approx(6.0, rel=1e-3)
            act(acc, model, optimizer)
            moves(optimizer, model, to)


def test_unscaled_first_and_then_clipped() -> None:
    acc, model, optimizer = started()
    with acc:
        acc.unscale_gradients()
        assert model.weight.grad[0].tolist() == pytest.approx([3.0] * 4, rel=1e-3)
        assert float(acc.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(6.0, rel=1e-3)
        assert optimizer.turn.clip is not None
        moves(optimizer.optimizer, model, 0.5)  # the wrapped optimizer by itself clips, too


def test_a_hook_before_the_step_sees_clipped_gradients() -> None:
    acc, model, optimizer = started()
    with acc:
        norms = []
        optimizer.register_step_pre_hook(lambda *_: norms.append(model.weight.grad.norm().item()))
        acc.clip_grad_norm_(model.parameters(), 1.0)
        moves(optimizer, model, 0.5)
        assert norms == [pytest.approx(1.0, rel=1e-3)]


def test_a_backward_after_a_clip_adds_to_clipped_gradients() -> None:
    acc, model, optimizer = started("no")
    with acc:
        acc.clip_grad_norm_(model.parameters(), 1.0)
        backward_of_threes(acc, model)
        assert model.weight.grad[0].tolist() == pytest.approx([3.5] * 4)
        moves(optimizer, model, -2.5)


def test_gradients_changed_in_between_are_an_error_that_names_the_way_out() -> None:
    acc, model, optimizer = started()
    with acc:
        acc.clip_grad_norm_(model.parameters(), 1.0)
        model.weight.grad.mul_(2)
        with pytest.raises(StepError, match=r"shape \(1, 4\) was changed between clip_grad_norm_ and"):
            optimizer.step()


def test_two_optimizers_and_one_clip() -> None:
    results = []
    for fused in (True, False):
        with Accelerator(mixed_precision="no", cpu=True, settings=Settings(fused=fused)) as acc:
            body, head = make("mlp"), make("mlp")
            raw_optimizers = torch.optim.AdamW(body.parameters(), lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)
            body, head, *optimizers = acc.prepare(body, head, *raw_optimizers)
            parameters = [*body.parameters(), *head.parameters()]
            for _ in range(3):
                acc.backward((body(torch.ones(2, 12)) * head(torch.ones(2, 12))).sum())
                norm = acc.clip_grad_norm_(parameters, 0.1)
                for optimizer in optimizers:
                    assert (optimizer.turn.clip is not None) is fused
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            results.append((norm, [p.detach() for p in parameters]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


# -- the loss scale ----------------------------------------------------------------------------------------------------


def fp16() -> Accelerator:
    return make_accelerator(mixed_precision="fp16", cpu=True, scaler_options=SCALE)


def test_four_launches_a_step() -> None:
    with stepping("kernels") as kernels, fp16() as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        scales = []
        for overflow in (False, False, True, False, False, False):
            kernels.launches.clear()
            acc.backward(model(torch.ones(2, 12) * (1e30 if overflow else 1)).square().mean())
            acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scales.append(acc.scaler.get_scale())
            assert optimizer.step_was_skipped is overflow
            assert kernels.launches == ["squares_f32", "total", "prepare_adam", "adam_f32_f32_f32_f32"]
    assert scales == [1024, 1024, 512, 512, 512, 1024]


def test_a_save_after_a_step_has_the_scale_of_the_next(tmp_path):
    ends = []
    for first in (0, 2):
        with stepping("kernels"), fp16() as acc:
            model = make("mlp")
            model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            if first:
                acc.load_state(tmp_path / "a")
            for step in range(first, 4):
                x = torch.full((2, 12), 1e30 if step == 1 else float(step))
                acc.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    acc.save_state(tmp_path / "a")
            ends.append((acc.scaler.state_dict(), [p.detach().clone() for p in model.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert (ends[0][0]["scale"], ends[0][0]["_growth_tracker"]) == (512, 2)
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=0, atol=0)


def test_reading_the_scaler_between_two_steps_moves_nothing() -> None:
    results = []
    for reads in (False, True):
        with fp16() as acc:
            body, head = make("mlp"), make("mlp")
            optimizers = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (body, head))
            body, head, body_optimizer, head_optimizer = acc.prepare(body, head, *optimizers)
            for step, scale in enumerate((1024, 1024, 512, 512, 512)):
                x = torch.ones(2, 12) * (1e30 if step == 2 else 1)
                acc.backward((body(x) * head(torch.ones(2, 12))).sum())
                body_optimizer.step()
                if reads:
                    acc.scaler.state_dict()
                    assert acc.scaler.get_scale() == scale
                head_optimizer.step()
                body_optimizer.zero_grad()
                head_optimizer.zero_grad()
            weights = [p.detach() for p in [*body.parameters(), *head.parameters()]]
            results.append((acc.scaler.state_dict(), weights))
    torch.testing.assert_close(*results, rtol=0, atol=0)
