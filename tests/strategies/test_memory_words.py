"""Parameters stepped in backward, and activations offloaded.

The same training with less memory, or a refusal that says why.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import easymp
from easymp import Accelerator, Part, PrepareError, RefusedError, StepError
from easymp.strategies.transforms import Offload

from ..words import make_accelerator
from .models import make, message, refuses, sgd, under, whole


class GradientPeak(Part):
    """The most bytes of gradients that there are at once."""

    name = "peak"
    bytes = 0

    def gradients(self, pairs: Any) -> None:
        parameters = [p for route in self.run.prepared.models for p in route.original.parameters()]
        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters if p.grad is not None]
        self.bytes = max(self.bytes, sum(gradient.nbytes for gradient in gradients))


def fit(acc: Any, kind: str, optimizer: Any = torch.optim.AdamW, folder: str = "", **keywords: Any) -> Any:
    """Four updates, and the gradients' bytes at most; with a `folder`, left after two and resumed."""
    model = make(kind)
    first, *other_parameters = list(model.parameters())
    prepared: Any = optimizer([{"params": other_parameters}, {"params": [first], "lr": 0.02}], lr=0.01, **keywords)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(prepared, 1.0, 0.2, 4)
    model, prepared, schedule = acc.prepare(model, prepared, schedule)
    spread = acc._prepared.strategy
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
            prepared.step()
            schedule.step()
            prepared.zero_grad()
    assert (prepared.updates, schedule.get_last_lr()[0]) == (4, pytest.approx(0.002))
    states = [prepared.state[p] for group in prepared.param_groups for p in group["params"] if p in prepared.state]
    state = [s[key] for s in states for key in sorted(s)]
    return {name: whole(p) for name, p in model.named_parameters()}, state, acc._parts.get("peak").bytes


def run(
    in_backward: bool,
    strategy: str = "single",
    kind: str = "tied",
    options: Any = None,
    settings: Any = (),
    **keywords: Any,
) -> Any:
    with under(
        strategy, options, optimizer_in_backward=in_backward, cpu=True, parts=[GradientPeak()], **dict(settings)
    ) as acc:
        return fit(acc, kind, **keywords)


AVERAGED = {"ema_decay": 0.9, "activation_checkpointing": "attention"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("tied", {}),
    ("idle", {"optimizer": torch.optim.SGD, "momentum": 0.9}),
    ("tied", {"optimizer": torch.optim.AdamW, "settings": AVERAGED}),
    ("conv", {"optimizer": easymp.optim.Lion, "settings": {"fused": False, "precision": "bf16"}}),
]


@pytest.mark.parametrize(("kind", "keywords"), CASES)
def test_parameters_stepped_in_backward_are_those_of_plain_training(kind: str, keywords: Any) -> None:
    (stepped, state, peak), (plain, states, plain_peak) = (
        run(True, kind=kind, **keywords),
        run(False, kind=kind, **keywords),
    )
    torch.testing.assert_close(stepped, plain, rtol=1e-6, atol=1e-7)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(state, states, strict=True))
    predicted = easymp.memory.estimate(make(kind), strategy="single", optimizer_in_backward=True).gradients
    assert peak == predicted < plain_peak


def test_a_resumed_run_goes_on_bit_by_bit(tmp_path: Any) -> None:
    plain, resumed = run(True), run(True, folder=str(tmp_path / "here"))
    assert all(torch.equal(value, resumed[0][name]) for name, value in plain[0].items())


def on_ranks(cases: list[tuple[str, Any]]) -> list[Any]:
    results = []
    for strategy, options in cases:
        values, _, peak = run(True, strategy, "tied", options, optimizer=torch.optim.SGD, momentum=0.9)
        settings = {"strategy": strategy, "world": 2, "options": options, "optimizer_in_backward": True}
        results.append((values, peak, easymp.memory.estimate(make("tied"), **settings).gradients))
    return results


@pytest.mark.parametrize(
    ("cases", "size"),
    [
        ([("fsdp", None), ("local_sgd", {"every": 1})], 2),
        pytest.param([("hsdp", {"shard_size": 2})], 4, marks=pytest.mark.slow),
    ],
)
def test_on_ranks(ranks: Any, cases: Any, size: int) -> None:
    plain = run(False, optimizer=torch.optim.SGD, momentum=0.9)
    for results in ranks(on_ranks, cases, processes=size):
        for parameters, peak, predicted in results:
            torch.testing.assert_close(parameters, plain[0], rtol=1e-4, atol=1e-6)
            assert peak <= predicted < plain[2] / 2, (peak, predicted, plain[2])


def test_activations_are_offloaded_from_a_gpu_only() -> None:
    with pytest.raises(RefusedError, match="cannot run here: activations are copied from a CUDA device"):
        make_accelerator(cpu=True, activation_offload=True)


@pytest.mark.on_ranks(2)
def test_ranks_that_need_all_gradients_refuse() -> None:
    pattern = "ignored parameters are averaged at the end of backward"
    refuses(RefusedError, pattern, under, "fsdp", {"ignore": ("head",)}, cpu=True, optimizer_in_backward=True)
    with under("fsdp", cpu=True, optimizer_in_backward=True) as acc:
        muon = easymp.optim.Muon(acc.prepare(make("mlp")), lr=0.1)
        refuses(PrepareError, "the ranks share its step", acc.prepare, muon)


def test_calls_that_come_too_late_or_too_early_are_refused() -> None:
    with under(cpu=True, optimizer_in_backward=True) as acc:
        model, optimizer = acc.prepare(plain_model := make("mlp"), sgd(list(plain_model.parameters())))
        loss = lambda: model(torch.ones(2, 12)).sum()  # noqa: E731
        acc.backward(loss())
        refuses(StepError, "a second backward() before optimizer.step()", acc.backward, loss())
        refuses(StepError, "a second gradient of a parameter before", loss().backward)
        together = "and optimizer_in_backward do not go together: each parameter is stepped"
        refuses(RefusedError, together, setattr, acc, "gradient_accumulation_steps", 2)
        refuses(StepError, "backward has stepped already", optimizer.zero_grad)
        optimizer.step()
        optimizer.zero_grad()
        assert "each parameter is stepped in backward" in str(acc)


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["number"] = self.param_groups[0].get("number", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_its_steps_itself_is_refused() -> None:
    with under(cpu=True, optimizer_in_backward=True) as acc:
        model, _ = acc.prepare(plain_model := make("mlp"), Counting(plain_model.parameters(), lr=0.1))
        error_text = message(StepError, acc.backward, model(torch.ones(2, 12)).sum())
        assert "has changed 'number', which counts for all of them" in error_text


def test_an_optimizer_whose_step_needs_a_closure_is_refused() -> None:
    with under(cpu=True, optimizer_in_backward=True) as acc:
        model = make("mlp")
        refuses(PrepareError, "its step needs a closure", acc.prepare, model, torch.optim.LBFGS(model.parameters()))


class Counted(Offload):
    """On a CPU, where streams wait for nothing: what is copied, both ways."""

    def __init__(self, min_bytes: int = 0) -> None:
        super().__init__(torch.device("cpu"), min_bytes)
        self.offloaded: list[Tensor] = []
        self.fetches = 0

    def _pack(self, tensor: Tensor) -> Any:
        packed = super()._pack(tensor)
        if packed is not tensor:
            self.offloaded.append(tensor.detach().clone())
        return packed

    def _fetch(self, saved: Any) -> None:
        before = saved.fetched
        super()._fetch(saved)
        self.fetches += saved.fetched is not before


def gradients(model: nn.Module, x: Tensor, context: Any) -> list[Tensor]:
    model.zero_grad()
    with context:
        loss = model(x).square().mean()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["mlp", "tied", "conv"])
@pytest.mark.parametrize("checkpointing", [None, "blocks"])
def test_offloaded_activations_give_the_same_gradients(kind: str, checkpointing: Any) -> None:
    if checkpointing and kind != "tied":
        checkpointing = "Linear"
    with Accelerator(cpu=True, mixed_precision="no", activation_checkpointing=checkpointing) as acc:
        model, x = acc.prepare(make(kind)), torch.randn(6, 12)
        plain, counted = gradients(model, x, nullcontext()), Counted()
        grads = gradients(model, x, counted)
        assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
        assert counted.offloaded and counted.fetches
        shapes = {p.shape for p in model.parameters()} | {p.T.shape for p in model.parameters() if p.ndim == 2}
        # Parameters stay where they are.
        assert kind == "conv" or all(t.shape not in shapes for t in counted.offloaded)
        for _ in range(2):  # an object serves all forwards
            assert all(torch.equal(a, b) for a, b in zip(gradients(model, x, counted), plain, strict=True))


def test_garbage_collection_is_frozen_after_the_first_update_and_put_back() -> None:
    gc.unfreeze()  # what the suite has frozen

    def update(acc: Accelerator, freezes: bool, updates: int) -> None:
        model, optimizer = acc.prepare(plain_model := make("mlp"), torch.optim.SGD(plain_model.parameters(), lr=0.1))
        for _ in range(updates):
            acc.backward(model(torch.ones(2, 12)).sum())
            assert gc.isenabled() is (not freezes or optimizer.updates == 0)
            optimizer.step()
            optimizer.zero_grad()

    for freezes in (True, False):
        assert gc.isenabled() and not gc.get_freeze_count()
        with under(cpu=True, gc=freezes) as acc:
            update(acc, freezes, 2)
            assert gc.isenabled() is not freezes and bool(gc.get_freeze_count()) is freezes
            acc.free_memory()
            assert gc.isenabled() and not gc.get_freeze_count()
    try:
        gc.disable()
        with under(cpu=True) as acc:
            acc.prepare(plain_model := make("mlp"), torch.optim.SGD(plain_model.parameters(), lr=0.1))
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.freeze()
