"""Prepared optimizers and schedulers: the user's own, stepped once a window; fused steps where torch has them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import easymp.compat.accelerate as of_accelerate
from easymp import Accelerator, GradScalerKwargs, StepError
from easymp.optim import PreparedOptimizer, fuse

from ..strategies.models import under
from ..words import make_accelerator


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def run(accumulation: int = 1, precision: str = "no", **options: Any) -> tuple[Accelerator, Any, Any]:
    keywords: Any = {"gradient_accumulation_steps": accumulation, "scaler_options": GradScalerKwargs(4.0)}
    accelerator, model = make_accelerator(cpu=True, mixed_precision=precision, **keywords), net()
    raw_optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})
    return accelerator, *accelerator.prepare(model, raw_optimizer)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(1, 4)).sum()


class Wrapping(torch.optim.Optimizer):
    """Drives another optimizer, as Lookahead does, without torch's own constructor."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.defaults = inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_without_torchs_constructor_is_prepared() -> None:
    accelerator, model = Accelerator(cpu=True), net()
    before = model[0].weight.detach().clone()
    prepared, optimizer = accelerator.prepare(model, Wrapping(torch.optim.SGD(model.parameters(), lr=0.1)))
    accelerator.backward(loss_of(prepared))
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_it_is_the_users_optimizer_in_everything_else() -> None:
    accelerator, _, optimizer = run(momentum=0.9)
    with accelerator:
        raw = optimizer.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is raw.param_groups
        assert optimizer.state is raw.state
        assert optimizer.defaults is raw.defaults
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        assert raw.param_groups[0]["lr"] == 0.5
        optimizer.add_param_group({"params": list(accelerator.prepare(nn.Linear(1, 1)).parameters())})
        assert len(raw.param_groups) == 2
        assert "Prepared(SGD" in repr(optimizer)
        assert optimizer.state_dict().keys() == raw.state_dict().keys()
        with pytest.raises(AttributeError, match="nonsense"):
            optimizer.nonsense  # noqa: B018


def test_hooks_run_on_real_steps_only() -> None:
    accelerator, model, optimizer = run(2)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda o, a, k: calls.append(f"pre {type(o).__name__}"))
    removed = optimizer.register_step_post_hook(lambda o, a, k: calls.append("post"))
    with accelerator:
        for number in range(6):
            if number == 4:
                removed.remove()
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model))
                optimizer.step()
                optimizer.zero_grad()
        assert calls == ["pre SGD", "post", "pre SGD", "post", "pre SGD"]
        optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mark": 1})
        assert optimizer.state_dict()["mark"] == 1


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_copies_and_pickles_step_by_themselves(precision: str) -> None:
    accelerator, model, optimizer = run(2, precision, momentum=0.9)
    with accelerator:
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model))
                optimizer.step()
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert isinstance(copied, PreparedOptimizer)
            assert len(copied.state) == 4
            parameter = copied.param_groups[0]["params"][0]
            before, parameter.grad = parameter.detach().clone(), torch.ones_like(parameter)
            copied.step()
            copied.zero_grad()
            assert not torch.equal(parameter, before)
            assert torch.equal(optimizer.param_groups[0]["params"][0], before)


BATCHES = list(torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(2)))


def zero_first(optimizer: Any, step: Callable[[], None]) -> None:
    optimizer.zero_grad()
    step()
    optimizer.step()


def zero_last(optimizer: Any, step: Callable[[], None]) -> None:
    step()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("idiom", [zero_first, zero_last])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_four_micro_batches_are_one_big_batch(idiom: Callable[..., None], set_to_none: bool) -> None:
    accelerator, model, optimizer = run(4)
    window_gradients: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: window_gradients.append([p.grad.clone() for p in model.parameters()]))
    zero = optimizer.zero_grad
    optimizer.zero_grad = lambda: zero(set_to_none)
    with accelerator:
        for x in BATCHES:
            with accelerator.accumulate(model):
                idiom(optimizer, lambda x=x: accelerator.backward(model(x).pow(2).mean()))
    reference = net()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for window, gradients in zip((BATCHES[:4], BATCHES[4:]), window_gradients, strict=True):
        plain.zero_grad()
        reference(torch.cat(window)).pow(2).mean().backward()
        torch.testing.assert_close(gradients, [p.grad for p in reference.parameters()])
        plain.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))


@pytest.mark.parametrize("idiom", [zero_first, zero_last])
def test_two_optimizers_in_one_micro_step(idiom: Callable[..., None]) -> None:
    """As a GAN trains: the second one's zero_grad comes after the first one's backward."""

    def train(accumulation: int) -> list[Tensor]:
        with under(None, None, accumulation, cpu=True) as accelerator:
            a, b = net(), net()
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b)]
            a, b, *optimizers = accelerator.prepare(a, b, *optimizers)
            for micro in range(4 * accumulation):
                x = BATCHES[micro % 2] if accumulation > 1 else torch.cat(BATCHES[:2])
                with accelerator.accumulate(a, b):
                    for model, optimizer in zip((a, b), optimizers):
                        idiom(optimizer, lambda m=model, x=x: accelerator.backward(m(x).pow(2).mean()))
            return [*a.state_dict().values(), *b.state_dict().values()]

    torch.testing.assert_close(train(2), train(1))


def test_a_step_outside_of_accumulate_is_refused() -> None:
    accelerator, model, optimizer = run(4)
    with accelerator:
        accelerator.backward(loss_of(model))
        with pytest.raises(StepError, match=r"outside `with accelerator.accumulate.*accumulation_steps=4"):
            optimizer.step()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [lambda o: StepLR(o, 1, gamma=0.5), lambda o: LambdaLR(o, lambda n: 0.5**n)])
@pytest.mark.parametrize("on", ["raw", "prepared"])
@pytest.mark.filterwarnings("error")
def test_a_scheduler_counts_updates(make: Callable[[Any], Any], on: str) -> None:
    accelerator, model, optimizer = run(2, "fp16")
    with accelerator:
        scheduler = accelerator.prepare(make(optimizer if on == "prepared" else optimizer.optimizer))
        rates = []
        for value in (1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0, 1.0, 1.0):  # a skipped step is none
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model) * value)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                rates.append(optimizer.param_groups[0]["lr"])
        assert rates == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0.025]
        assert (scheduler.get_last_lr(), scheduler.last_epoch) == ([0.025], 2)


@pytest.mark.filterwarnings("ignore:Detected call of")  # stepped before its optimizer, as asked
def test_a_scheduler_that_is_asked_to_steps_at_every_call() -> None:
    with under(
        None, None, 2, cpu=True, step_scheduler_with_optimizer=False, kind=of_accelerate.Accelerator
    ) as accelerator:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, StepLR(optimizer, 1))
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model))
                optimizer.step()
                scheduler.step()
        assert scheduler.last_epoch == 4


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (torch.optim.SGD, nn.Embedding(5, 2, sparse=True)),
        (torch.optim.Adagrad, nn.EmbeddingBag(5, 2, mode="sum", sparse=True)),
    ],
)
def test_sparse_gradients_take_the_plain_step(kind: Any, table: nn.Module) -> None:
    model = nn.ModuleDict({"table": table, "head": nn.Linear(2, 1)})
    optimizer = kind(model.parameters(), lr=0.1)
    assert "does not take the sparse gradients of 'table'" in str(fuse(optimizer, [model]))
    model["head"](table(torch.tensor([[1, 2]]))).sum().backward()
    optimizer.step()
    assert fuse(kind(model["head"].parameters(), lr=0.1), [model]) is None  # the rest of the model


def test_a_gradient_that_comes_later_than_the_others() -> None:
    """A branch that the first batches do not take: torch's fused SGD alone fails on it."""

    def run(fused: bool) -> list[Tensor]:
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([a, b], lr=0.1, momentum=0.9)
        if fused:
            assert fuse(optimizer) is None
        for step in range(3):
            a.grad = torch.full((2,), 1.0 + step)
            b.grad = torch.full((2,), 2.0) if step else None
            optimizer.step()
        return [a.data, b.data]

    torch.testing.assert_close(run(True), run(False), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("change", ["unfrozen", "state dropped"])
def test_momentum_begins_at_a_later_step(change: str, precision: str) -> None:
    """A layer that trains from the second update on, or whose momentum the script has dropped."""

    def train(model: nn.Module, optimizer: Any, backward: Callable[[Tensor], None]) -> list[Tensor]:
        for step in range(3):
            model[0].requires_grad_(change != "unfrozen" or step > 0)
            if change == "state dropped" and step == 1:
                del optimizer.state[model[0].weight]
            backward(loss_of(model))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    plain = net()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), lambda loss: loss.backward())
    accelerator, model = make_accelerator(mixed_precision=precision, scaler_options=GradScalerKwargs(4.0)), net()
    model[0].requires_grad_(change != "unfrozen")
    raw_optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    result = train(*accelerator.prepare(model, raw_optimizer), accelerator.backward)
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)


class Gaps(nn.Module):
    """A parameter that does not fill its memory, which torch's fused steps write wrongly."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(4, 12, generator=generator)[:, ::2])
        self.last = nn.Parameter(torch.randn(6, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first).tanh() @ self.last


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1"])
def test_a_group_added_later_steps_fused_only_where_that_is_right(ranks, strategy: str, precision: str) -> None:
    for result in ranks(with_later_group, strategy, precision, processes=1 if strategy == "single" else 2):
        torch.testing.assert_close(result, with_later_group(None), rtol=1e-2, atol=1e-2)


def with_later_group(strategy: str | None, precision: str = "no") -> list[Tensor]:
    """Weights after six updates; of plain torch without a strategy."""
    model: Any = Gaps()
    optimizer: Any = torch.optim.Adam([model.last], lr=0.1)
    acc = make_accelerator(strategy=strategy, mixed_precision=precision, scaler_options=GradScalerKwargs(4.0))
    if strategy:
        model, optimizer = acc.prepare(model, optimizer)
    optimizer.add_param_group({"params": [model.first]})
    for _ in range(6):
        loss = loss_of(model).square()
        acc.backward(loss) if strategy else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    acc.end_training()
    return [p.detach().contiguous() for p in (model.first, model.last)]


@pytest.mark.parametrize("precision", ["fp16", "fp16-true"])
@pytest.mark.parametrize("between", ["unscale", "clip", "step of the other"])
def test_gradients_that_wait_for_a_later_step_keep_the_loss_scale(between: str, precision: str) -> None:
    """The second optimizer steps at every third backward, whose gradients add up; the scale doubles at each step."""

    def run(precision: str) -> list[Tensor]:
        rule = GradScalerKwargs(init_scale=8.0, growth_interval=1)
        accelerator, model = make_accelerator(mixed_precision=precision, scaler_options=rule), net()
        optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.02) for i in (0, 2)]
        model, *optimizers = accelerator.prepare(model, *optimizers)
        for step in range(6):
            accelerator.backward(loss_of(model).square())
            if between == "unscale":
                accelerator.unscale_gradients()
            elif between == "clip":
                accelerator.clip_grad_norm_(model.parameters(), 1000.0)
            for optimizer in optimizers if step % 3 == 2 else optimizers[: between == "step of the other"]:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().float() for p in model.parameters()]

    torch.testing.assert_close(run(precision), run("no"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("kind", "dtype"), [(torch.optim.SGD, torch.float16), (torch.optim.AdamW, torch.bfloat16)])
def test_low_precision_steps_are_those_of_the_plain_step(kind, dtype):
    """torch 2.13's fused SGD is not, on CPUs."""
    results = []
    for fused in (True, False):
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(70, generator=generator).to(dtype))
        optimizer = kind([p], lr=0.05, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        if fused:
            fuse(optimizer)
        for _ in range(3):
            p.grad = torch.randn(70, generator=generator).to(dtype)
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)
