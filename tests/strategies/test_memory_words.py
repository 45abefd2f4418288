"""Parameters stepped in backward, and activations offloaded: the same training with less memory, or a refusal that says why."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import easymp
from easymp import Accelerator, PrepareError, RefusedError, StepError
from easymp.strategies.transforms import Offload

from .models import make, message, refuses, sgd, under, whole


def fit(acc: Any, kind: str, optimizer: Any = torch.optim.AdamW, folder: str = "", **more: Any) -> Any:
    """Four updates, and the gradients' bytes at most; with a `folder`, left after two and resumed."""
    model = make(kind)
    first, *rest = list(model.parameters())
    given: Any = optimizer([{"params": rest}, {"params": [first], "lr": 0.02}], lr=0.01, **more)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(given, 1.0, 0.2, 4)
    model, given, schedule = acc.prepare(model, given, schedule)
    spread, most = acc._prepared.strategy, 0

    def count(*parameters: Any) -> None:
        nonlocal most
        held = [p.grad for p in model.parameters() if p.grad is not None]
        most = max(most, sum(getattr(g, "_local_tensor", g).nbytes for g in held))
        if parameters:
            step_now(*parameters)

    step_now, given.step_now = given.step_now, count
    for step in range(4):
        if folder and step == 2:
            acc.save_state(folder)
            for parameter in model.parameters():
                with torch.no_grad():
                    parameter.mul_(2)
            acc.load_state(folder)
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 12, generator=generator), torch.randint(0, 5, (8,), generator=generator)
        x, y = (t.chunk(spread.data_size)[spread.data_rank] for t in (x, y))
        with acc.accumulate(model):
            acc.backward(nn.functional.cross_entropy(model(x), y))
            count()
            given.step()
            schedule.step()
            given.zero_grad()
    assert (given.updates, schedule.get_last_lr()[0]) == (4, pytest.approx(0.002))
    held = [given.state[p] for group in given.param_groups for p in group["params"] if p in given.state]
    state = [s[key] for s in held for key in sorted(s)]
    return {name: whole(p) for name, p in model.named_parameters()}, state, most


def run(
    early: bool, strategy: str = "single", kind: str = "tied", options: Any = None, how: Any = (), **more: Any
) -> Any:
    with under(strategy, options, optimizer_in_backward=early, cpu=True, **dict(how)) as acc:
        return fit(acc, kind, **more)


AVERAGED = {"ema_decay": 0.9, "activation_checkpointing": "attention"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("tied", {}),
    ("idle", {"optimizer": torch.optim.SGD, "momentum": 0.9}),
    ("tied", {"optimizer": easymp.optim.AdamW, "how": AVERAGED}),
    ("conv", {"optimizer": easymp.optim.Lion, "how": {"fused": False, "precision": "bf16"}}),
]


@pytest.mark.parametrize(("kind", "more"), CASES)
def test_parameters_stepped_in_backward_are_those_of_plain_training(kind: str, more: Any) -> None:
    (ours, state, few), (plain, states, many) = run(True, kind=kind, **more), run(False, kind=kind, **more)
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(state, states, strict=True))
    predicted = easymp.memory.estimate(make(kind), strategy="single", optimizer_in_backward=True).gradients
    assert few == predicted < many


def test_a_resumed_run_goes_on_bit_by_bit(tmp_path: Any) -> None:
    plain, resumed = run(True), run(True, folder=str(tmp_path / "here"))
    assert all(torch.equal(value, resumed[0][name]) for name, value in plain[0].items())


def on_ranks(ways: list[tuple[str, Any]]) -> list[Any]:
    found = []
    for strategy, options in ways:
        values, _, most = run(True, strategy, "tied", options, optimizer=torch.optim.SGD, momentum=0.9)
        how = {"strategy": strategy, "world": 2, "options": options, "optimizer_in_backward": True}
        found.append((values, most, easymp.memory.estimate(make("tied"), **how).gradients))
    return found


@pytest.mark.parametrize(
    ("ways", "size"),
    [
        ([("ddp", {"bucket_cap_mb": 0.002}), ("fsdp", None), ("local_sgd", {"every": 1})], 2),
        pytest.param([("hsdp", {"shard_size": 2})], 4, marks=pytest.mark.slow),
    ],
)
def test_on_ranks(ranks: Any, ways: Any, size: int) -> None:
    plain = run(False, optimizer=torch.optim.SGD, momentum=0.9)
    for found in ranks(on_ranks, ways, processes=size):
        for ours, few, predicted in found:
            torch.testing.assert_close(ours, plain[0], rtol=1e-4, atol=1e-6)
            assert few <= predicted < plain[2] / 2, (few, predicted, plain[2])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps above 1 adds up gradients"),
        ({"mixed_precision": "fp16"}, "the loss scale of fp16 looks at all gradients"),
        ({"nonfinite": "skip"}, "nonfinite='skip' looks at all gradients"),
        ({"activation_offload": True}, "cannot run here: activations are copied from a CUDA device"),
    ],
)
def test_what_needs_all_gradients_is_refused(how: Any, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        Accelerator(cpu=True, **{"optimizer_in_backward": "activation_offload" not in how, **how})


@pytest.mark.on_ranks(2)
def test_strategies_that_need_all_gradients_refuse() -> None:
    for strategy, options, words in (
        ("zero1", None, "which steps the shards of all parameters together"),
        ("fsdp", {"ignore": ("head",)}, "ignored parameters at the end of backward"),
        ("ddp", {"static_graph": True}, "without find_unused_parameters"),
        ("pipeline", None, "adds up the gradients of its micro-batches"),
    ):
        refuses(RefusedError, words, under, strategy, options, cpu=True, optimizer_in_backward=True)
    with under("ddp", cpu=True, optimizer_in_backward=True, timeout=5) as acc:
        model, _ = acc.prepare(given := make("idle"), sgd(list(given.parameters())))
        missing = "no gradient came for 'blocks.2.0.bias'"
        refuses(StepError, missing, acc.backward, model(torch.ones(2, 12)).sum())
        acc.free_memory()
        first, second = acc.prepare(nn.Linear(2, 2), nn.Linear(2, 2))
        acc.prepare(sgd([*first.parameters(), *second.parameters()]))
        hook = first.weight.register_hook(lambda _: 1 / 0)
        x = torch.full((1, 2), 1.0 + acc.process_index)
        with pytest.raises(ZeroDivisionError):
            acc.backward(second(first(x)).sum())
        hook.remove()
        for optimizer in acc._prepared.optimizers:
            first.zero_grad()
            optimizer.step()
        acc.backward(first(x).sum())  # without the second model, after a backward that was cut short
        assert all(p.grad is None for p in first.parameters())
        assert torch.equal(*acc.gather(first.weight.detach()[None]))
        acc.free_memory()
        sparse = nn.Embedding(4, 2, sparse=True)
        refuses(PrepareError, "'Embedding' has sparse gradients", acc.prepare, sparse)
        muon = easymp.optim.Muon(acc.prepare(make("mlp")), lr=0.1)
        refuses(PrepareError, "a step that the ranks share", acc.prepare, muon)


def test_calls_that_come_too_late_or_too_early_are_refused() -> None:
    with under(cpu=True, optimizer_in_backward=True) as acc:
        model, optimizer = acc.prepare(given := make("mlp"), sgd(list(given.parameters())))
        loss = lambda: model(torch.ones(2, 12)).sum()  # noqa: E731
        refuses(RefusedError, "a second backward", acc.backward, loss(), retain_graph=True)
        acc.backward(loss())
        refuses(StepError, "a second gradient of a parameter before", loss().backward)
        for call in (
            lambda: acc.backward(loss()),
            lambda: acc.clip_grad_norm_(model.parameters(), 1.0),
            lambda: acc.clip_grad_value_(model.parameters(), 1.0),
            lambda: acc.no_sync().__enter__(),
            lambda: setattr(acc, "gradient_accumulation_steps", 2),
        ):
            refuses(RefusedError, "under optimizer_in_backward=True", call)
        refuses(StepError, "backward has stepped already", optimizer.zero_grad)
        optimizer.step()
        optimizer.zero_grad()
        refuses(StepError, "the backward in the closure", optimizer.step, loss)
        assert "each parameter is stepped in backward" in str(acc)


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["number"] = self.param_groups[0].get("number", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_its_steps_itself_is_refused() -> None:
    with under(cpu=True, optimizer_in_backward=True) as acc:
        model, _ = acc.prepare(given := make("mlp"), Counting(given.parameters(), lr=0.1))
        said = message(StepError, acc.backward, model(torch.ones(2, 12)).sum())
        assert "has changed 'number', which counts for all of them" in said


@pytest.mark.parametrize(
    ("make_optimizer", "precision", "words"),
    [
        (easymp.optim.LAMB, "no", "a step that needs the gradients of all parameters"),
        (torch.optim.LBFGS, "no", "a step that needs a closure"),
        (torch.optim.AdamW, "bf16-true", "fp32 masters"),
        (easymp.optim.AdamW, "bf16-true", "stochastic rounding"),
    ],
)
def test_optimizers_that_need_all_gradients_are_refused(make_optimizer, precision, words):
    with under(cpu=True, precision=precision, optimizer_in_backward=True) as acc:
        model = make("mlp")
        assert words in message(PrepareError, acc.prepare, model, make_optimizer(model.parameters()))


class Counted(Offload):
    """On a CPU, where streams wait for nothing: what is copied, both ways."""

    def __init__(self, least: int = 0) -> None:
        super().__init__(torch.device("cpu"), least)
        self.went: list[Tensor] = []
        self.came = 0

    def _pack(self, tensor: Tensor) -> Any:
        packed = super()._pack(tensor)
        if packed is not tensor:
            self.went.append(tensor.detach().clone())
        return packed

    def _bring(self, saved: Any) -> None:
        before = saved.coming
        super()._bring(saved)
        self.came += saved.coming is not before


def gradients(model: nn.Module, x: Tensor, around: Any) -> list[Tensor]:
    model.zero_grad()
    with around:
        loss = model(x).square().mean()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["mlp", "tied", "conv"])
@pytest.mark.parametrize("which", [None, "blocks"])
def test_offloaded_activations_give_the_same_gradients(kind: str, which: Any) -> None:
    if which and kind != "tied":
        which = "Linear"
    with Accelerator(cpu=True, mixed_precision="no", activation_checkpointing=which) as acc:
        model, x = acc.prepare(make(kind)), torch.randn(6, 12)
        plain, counted = gradients(model, x, nullcontext()), Counted()
        ours = gradients(model, x, counted)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
        assert counted.went and counted.came
        own = {p.shape for p in model.parameters()} | {p.T.shape for p in model.parameters() if p.ndim == 2}
        # Parameters stay where they are.
        assert kind == "conv" or all(t.shape not in own for t in counted.went)
        for _ in range(2):  # an object serves all forwards
            assert all(torch.equal(a, b) for a, b in zip(gradients(model, x, counted), plain, strict=True))


def test_garbage_collection_is_frozen_after_the_first_update_and_put_back() -> None:
    gc.unfreeze()  # what the suite has frozen

    def update(acc: Accelerator, wanted: bool, updates: int) -> None:
        model, optimizer = acc.prepare(given := make("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
        for _ in range(updates):
            acc.backward(model(torch.ones(2, 12)).sum())
            assert gc.isenabled() is (not wanted or optimizer.updates == 0)
            optimizer.step()
            optimizer.zero_grad()

    for wanted in (True, False):
        assert gc.isenabled() and not gc.get_freeze_count()
        with under(cpu=True, gc=wanted) as acc:
            update(acc, wanted, 2)
            assert gc.isenabled() is not wanted and bool(gc.get_freeze_count()) is wanted
            acc.free_memory()
            assert gc.isenabled() and not gc.get_freeze_count()
    try:
        gc.disable()
        with under(cpu=True) as acc:
            acc.prepare(given := make("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.freeze()
