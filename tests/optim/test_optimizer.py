"""Prepared optimizers and schedulers: the user's own, stepped once a window."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from easymp import Accelerator
from easymp.base.accumulation import StepClock
from easymp.errors import StepError
from easymp.optim import PreparedOptimizer, PreparedScheduler
from easymp.precision import LossScale, Scaler


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def prepared(
    model: nn.Module, accumulation: int = 1, scaler: Scaler | None = None, **options: Any
) -> tuple[PreparedOptimizer, StepClock]:
    clock = StepClock(accumulation)
    raw = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})
    return PreparedOptimizer(raw, clock, scaler or Scaler(enabled=False)), clock


def micro_steps(clock: StepClock, n: int) -> Iterator[int]:
    """What `accumulate` does, without an Accelerator."""
    for i in range(n):
        clock.inside = True
        clock.tick()
        yield i
        clock.inside = False


def backward(clock: StepClock, loss: Tensor) -> None:
    clock.backwards += 1
    (loss / clock.accumulation).backward()


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


def test_attributes_of_its_own_are_seen() -> None:
    class Mine(torch.optim.SGD):
        flavour = "salt"

        def taste(self) -> str:
            return self.flavour

    optimizer = PreparedOptimizer(Mine(net().parameters(), lr=0.1), StepClock(), Scaler(enabled=False))
    assert (optimizer.flavour, optimizer.taste()) == ("salt", "salt")


def test_hooks_run_on_real_steps_only() -> None:
    model = net()
    optimizer, clock = prepared(model, 2)
    seen: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda o, a, k: seen.append(f"pre {type(o).__name__}")),
        optimizer.register_step_post_hook(lambda o, a, k: seen.append("post")),
    ]
    for _ in micro_steps(clock, 4):
        backward(clock, model(torch.ones(1, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert seen == ["pre SGD", "post"] * 2
    for handle in handles:
        handle.remove()
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mark": 1})
    assert optimizer.state_dict()["mark"] == 1


def test_a_closure_and_its_value() -> None:
    model = net()
    optimizer = PreparedOptimizer(torch.optim.LBFGS(model.parameters()), StepClock(), Scaler(enabled=False))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).pow(2).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert model(torch.ones(1, 4)).pow(2).sum() < first


@pytest.mark.parametrize("enabled", [False, True])
def test_an_optimizer_whose_step_takes_no_closure(enabled: bool) -> None:
    class Plain(torch.optim.SGD):
        def step(self) -> str:
            super().step()
            return "stepped"

    model = net()
    optimizer = PreparedOptimizer(Plain(model.parameters(), lr=0.1), StepClock(), Scaler(enabled=enabled))
    model(torch.ones(1, 4)).sum().backward()
    assert optimizer.step() == "stepped"


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


def test_a_state_dict_goes_in_and_out() -> None:
    model = net()
    optimizer, _ = prepared(model, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    plain = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.9)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.1
    optimizer.load_state_dict(plain.state_dict())
    assert torch.equal(
        optimizer.state[model[0].weight]["momentum_buffer"], plain.state[model[0].weight]["momentum_buffer"]
    )
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


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
    optimizer, clock = prepared(model, 4)
    seen: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(grads(model)))
    zero = optimizer.zero_grad
    optimizer.zero_grad = lambda: zero(set_to_none)  # type: ignore[method-assign]
    for i in micro_steps(clock, BATCHES):
        idiom(optimizer, lambda i=i: backward(clock, model(batches[i]).pow(2).mean()))
    reference = net()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    assert len(seen) == 2
    for window in (0, 1):
        plain.zero_grad()
        reference(torch.cat(batches[4 * window : 4 * window + 4])).pow(2).mean().backward()
        torch.testing.assert_close(seen[window], grads(reference))
        plain.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_zero_grad_before_the_loop_and_outside_the_block() -> None:
    model = net()
    optimizer, clock = prepared(model, 2)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()  # what was left from before
    assert all(p.grad is None for p in model.parameters())
    for i in range(4):
        optimizer.zero_grad()
        assert (model[0].weight.grad is None) == (i % 2 == 0)
        for _ in micro_steps(clock, 1):
            backward(clock, model(torch.ones(1, 4)).sum())
            optimizer.step()


def test_zero_grad_as_often_as_one_likes() -> None:
    model = net()
    optimizer, clock = prepared(model, 2)
    for i in micro_steps(clock, 2):
        optimizer.zero_grad()
        optimizer.zero_grad()
        backward(clock, model(torch.ones(1, 4)).sum())
        optimizer.step()
        if i == 0:
            optimizer.zero_grad()
            assert model[0].weight.grad is not None


@pytest.mark.parametrize("idiom", [zero_first, zero_last])
def test_two_optimizers_in_one_micro_step(idiom: Callable[..., None]) -> None:
    """As a GAN trains: the second one's zero_grad comes after the first one's backward."""

    def run(accumulation: int) -> list[Tensor]:
        a, b, batches = net(), net(), data()
        clock = StepClock(accumulation)
        first, second = (
            PreparedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), clock, Scaler(enabled=False))
            for m in (a, b)
        )
        for _ in micro_steps(clock, 4 * accumulation):
            x = batches[(clock.micro - 1) % 2] if accumulation > 1 else torch.cat(batches[:2])
            for model, optimizer in ((a, first), (b, second)):
                idiom(optimizer, lambda model=model, x=x: backward(clock, model(x).pow(2).mean()))
        return [*a.state_dict().values(), *b.state_dict().values()]

    torch.testing.assert_close(run(2), run(1))


def test_a_batch_whose_gradients_are_thrown_away() -> None:
    """A guard against a bad loss at the end of a window: clear, and no step."""
    model = net()
    optimizer, clock = prepared(model, 2)
    for i in micro_steps(clock, 2):
        backward(clock, model(torch.ones(1, 4)).sum())
        if i == 0:
            optimizer.step()
        optimizer.zero_grad()
    assert model[0].weight.grad is None


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


# -- overflows ---------------------------------------------------------------------------------------------------------


def test_a_skipped_step_says_so() -> None:
    model = net()
    optimizer, _ = prepared(model, scaler=(scaler := Scaler(LossScale(4.0))))
    before = copy.deepcopy(model.state_dict())
    for value, skipped in ((float("inf"), True), (1.0, False)):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4)).sum() * value).backward()
        optimizer.step()
        scaler.update()
        assert optimizer.step_was_skipped == skipped
        assert (model.state_dict()["0.bias"] == before["0.bias"]).all() == skipped


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
    optimizer, clock = prepared(model, 2)
    scheduler = PreparedScheduler(make(optimizer if on == "prepared" else optimizer.optimizer), [optimizer])
    rates = []
    for _ in micro_steps(clock, 6):
        backward(clock, model(torch.ones(1, 4)).sum())
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
    scaler = Scaler(LossScale(4.0))
    optimizer, _clock = prepared(model, scaler=scaler)
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


def test_a_scheduler_follows_its_own_optimizer_only() -> None:
    with Accelerator(cpu=True, mixed_precision="fp16") as accelerator:
        models = [net(), net()]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        schedulers = [StepLR(o, 1, gamma=0.5) for o in optimizers]
        a, b, first, second, one, two = accelerator.prepare(*models, *optimizers, *schedulers)
        accelerator.backward(a(torch.ones(1, 4)).sum() * float("inf"))
        accelerator.backward(b(torch.ones(1, 4)).mean() * 0.01)
        for item in (first, second, one, two):
            item.step()
        assert (first.step_was_skipped, second.step_was_skipped) == (True, False)
        assert (one.get_last_lr(), two.get_last_lr()) == ([0.1], [0.05])


@pytest.mark.filterwarnings("ignore:Detected call of")  # stepped before its optimizer, as asked
def test_steps_per_process_and_free_schedulers() -> None:
    model = net()
    optimizer, clock = prepared(model, 2)
    peers = PreparedScheduler(LambdaLR(optimizer.optimizer, lambda n: 1.0), [optimizer], steps=3)
    free = PreparedScheduler(LambdaLR(optimizer.optimizer, lambda n: 1.0), [optimizer], with_optimizer=False)
    for _ in micro_steps(clock, 4):
        backward(clock, model(torch.ones(1, 4)).sum())
        optimizer.step()
        peers.step()
        free.step()
    assert (peers.last_epoch, free.last_epoch) == (6, 4)


def test_arguments_reach_the_scheduler() -> None:
    optimizer, _clock = prepared(net())
    plateau = PreparedScheduler(ReduceLROnPlateau(optimizer.optimizer, patience=0, factor=0.5), [optimizer])
    for metric in (1.0, 1.0, 1.0):
        optimizer.step()
        plateau.step(metric)
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_a_schedulers_state_goes_in_and_out() -> None:
    optimizer, _clock = prepared(net(), momentum=0.9)
    scheduler = PreparedScheduler(OneCycleLR(optimizer.optimizer, 0.1, total_steps=10), [optimizer])
    optimizer.step()
    scheduler.step()
    state = scheduler.state_dict()
    again = PreparedScheduler(OneCycleLR(optimizer.optimizer, 0.1, total_steps=10), [optimizer])
    again.load_state_dict(state)
    assert again.last_epoch == 1
    assert copy.deepcopy(again).last_epoch == 1
