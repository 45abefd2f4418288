"""Prepared optimizers and schedulers: the user's own, stepped once a window."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from easymp import Accelerator, GradScalerKwargs, StepError
from easymp.base.accumulation import UpdateWindow
from easymp.optim import PreparedOptimizer, PreparedScheduler
from easymp.precision import Scaler


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def prepared(
    model: nn.Module, accumulation: int = 1, scaler: Scaler | None = None, **options: Any
) -> tuple[PreparedOptimizer, UpdateWindow]:
    window = UpdateWindow(accumulation)
    raw = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})
    return PreparedOptimizer(raw, window, scaler or Scaler(enabled=False)), window


def micro_steps(window: UpdateWindow, n: int) -> Iterator[int]:
    """What `accumulate` does, without an Accelerator."""
    for i in range(n):
        window.inside = True
        window.tick()
        yield i
        window.inside = False


def backward(window: UpdateWindow, loss: Tensor) -> None:
    window.backwards += 1
    (loss / window.accumulation).backward()


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


# -- the user's own optimizer ------------------------------------------------------------------------------------------


def test_it_is_the_users_optimizer_in_everything_else() -> None:
    optimizer, _ = prepared(net(), momentum=0.9)
    raw = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is raw.param_groups
    assert optimizer.state is raw.state
    assert optimizer.defaults is raw.defaults
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    assert raw.param_groups[0]["lr"] == 0.5
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(raw.param_groups) == 2
    assert optimizer.param_groups is raw.param_groups
    assert "Prepared(SGD" in repr(optimizer)
    assert optimizer.state_dict().keys() == raw.state_dict().keys()
    with pytest.raises(AttributeError, match="nonsense"):
        optimizer.nonsense  # noqa: B018


def test_hooks_run_on_real_steps_only() -> None:
    model = net()
    optimizer, window = prepared(model, 2)
    seen: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda o, a, k: seen.append(f"pre {type(o).__name__}")),
        optimizer.register_step_post_hook(lambda o, a, k: seen.append("post")),
    ]
    for _ in micro_steps(window, 4):
        backward(window, model(torch.ones(1, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert seen == ["pre SGD", "post"] * 2
    for handle in handles:
        handle.remove()
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mark": 1})
    assert optimizer.state_dict()["mark"] == 1


def test_a_closure_and_its_value() -> None:
    model = net()
    optimizer = PreparedOptimizer(
        torch.optim.LBFGS(model.parameters()), UpdateWindow(), Scaler(enabled=False)
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).pow(2).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert model(torch.ones(1, 4)).pow(2).sum() < first


def test_copies_and_pickles() -> None:
    model = net()
    optimizer, _ = prepared(model, momentum=0.9, scaler=Scaler())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert isinstance(again, PreparedOptimizer)
        assert len(again.state) == 4
        again.zero_grad()
        assert again.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]


# -- accumulation ------------------------------------------------------------------------------------------------------

BATCHES = 8


def data() -> list[Tensor]:
    return list(torch.randn(BATCHES, 3, 4, generator=torch.Generator().manual_seed(2)))


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
    """Gradient by gradient, in both places where people write zero_grad."""
    model, batches = net(), data()
    optimizer, window = prepared(model, 4)
    seen: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(grads(model)))
    zero = optimizer.zero_grad
    optimizer.zero_grad = lambda: zero(set_to_none)  # type: ignore[method-assign]
    for i in micro_steps(window, BATCHES):
        idiom(optimizer, lambda i=i: backward(window, model(batches[i]).pow(2).mean()))
    reference = net()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    assert len(seen) == 2
    for window in (0, 1):
        plain.zero_grad()
        reference(torch.cat(batches[4 * window : 4 * window + 4])).pow(2).mean().backward()
        torch.testing.assert_close(seen[window], grads(reference))
        plain.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("idiom", [zero_first, zero_last])
def test_two_optimizers_in_one_micro_step(idiom: Callable[..., None]) -> None:
    """As a GAN trains: the second one's zero_grad comes after the first one's backward."""

    def run(accumulation: int) -> list[Tensor]:
        a, b, batches = net(), net(), data()
        window = UpdateWindow(accumulation)
        first, second = (
            PreparedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), window, Scaler(enabled=False))
            for m in (a, b)
        )
        for _ in micro_steps(window, 4 * accumulation):
            x = batches[(window.micro - 1) % 2] if accumulation > 1 else torch.cat(batches[:2])
            for model, optimizer in ((a, first), (b, second)):
                idiom(optimizer, lambda model=model, x=x: backward(window, model(x).pow(2).mean()))
        return [*a.state_dict().values(), *b.state_dict().values()]

    torch.testing.assert_close(run(2), run(1))


def test_a_step_outside_of_accumulate_is_refused() -> None:
    model = net()
    optimizer, _ = prepared(model, 4)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(
        StepError,
        match=r"optimizer.step\(\) outside `with accelerator.accumulate.*gradient_accumulation_steps=4",
    ):
        optimizer.step()
    assert all(p.grad is not None for p in model.parameters())


def test_the_last_batch_of_a_loader_ends_the_window() -> None:
    with Accelerator(cpu=True, mixed_precision="fp32", gradient_accumulation_steps=4) as accelerator:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(list(torch.randn(6, 4)), batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(True))
        for epoch in (1, 2):
            for x in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            assert len(steps) == 2 * epoch  # after the fourth and the sixth batch
            assert model[0].weight.grad is None


# -- schedulers --------------------------------------------------------------------------------------------------------

SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: StepLR(o, 1, gamma=0.5),
    lambda o: LambdaLR(o, lambda n: 0.5**n),
]


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("on", ["raw", "prepared"])
@pytest.mark.filterwarnings("error")
def test_a_scheduler_counts_updates(make: Callable[[Any], Any], on: str) -> None:
    model = net()
    optimizer, window = prepared(model, 2)
    scheduler = PreparedScheduler(make(optimizer if on == "prepared" else optimizer.optimizer), [optimizer])
    rates = []
    for _ in micro_steps(window, 6):
        backward(window, model(torch.ones(1, 4)).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.05, 0.05, 0.025, 0.025, 0.0125]
    assert scheduler.get_last_lr() == [0.0125]
    assert scheduler.last_epoch == 3


@pytest.mark.filterwarnings("error")
def test_a_scheduler_skips_with_its_optimizer() -> None:
    model = net()
    scaler = Scaler(GradScalerKwargs(4.0))
    optimizer, _window = prepared(model, scaler=scaler)
    scheduler = PreparedScheduler(StepLR(optimizer.optimizer, 1, gamma=0.5), [optimizer])
    rates = []
    for value in (float("inf"), 1.0, float("nan"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4)).sum() * value).backward()
        optimizer.step()
        scheduler.step()
        scaler.update()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.05, 0.05, 0.025]


@pytest.mark.filterwarnings("ignore:Detected call of")  # stepped before its optimizer, as asked
def test_steps_per_process_and_free_schedulers() -> None:
    model = net()
    optimizer, window = prepared(model, 2)
    peers = PreparedScheduler(LambdaLR(optimizer.optimizer, lambda n: 1.0), [optimizer], steps=3)
    free = PreparedScheduler(LambdaLR(optimizer.optimizer, lambda n: 1.0), [optimizer], with_optimizer=False)
    for _ in micro_steps(window, 4):
        backward(window, model(torch.ones(1, 4)).sum())
        optimizer.step()
        peers.step()
        free.step()
    assert (peers.last_epoch, free.last_epoch) == (6, 4)
