"""Gradients and weights that scripts change by torch: the plain loop's numbers, or a refusal of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, GradScalerKwargs, Settings, StepError

from ..words import make_accelerator

STEPS = 3
SCALE = GradScalerKwargs(init_scale=1024.0)  # gradients of 1 times 2^16 overflow in fp16
BATCH = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
clip_norm, clip_value = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_


def make() -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 0.25)
    return model


def prepared(acc: Accelerator) -> tuple[Any, Any]:
    model = make()
    return acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))


def assign(model: nn.Module) -> None:
    model.weight.grad = model.weight.grad * 0.5


def swap(model: nn.Module) -> None:
    model.weight.data = torch.tensor([[0.5, -0.75]], dtype=model.weight.dtype)


def clear(model: nn.Module) -> None:
    model.weight.grad = None


GRADIENTS: dict[str, Callable[[Any], object]] = {
    "clip_grad_norm_": lambda model: clip_norm(model.parameters(), 0.1),
    "clip_grad_value_": lambda model: clip_value(model.parameters(), 0.25),
    "grad.mul_": lambda model: model.weight.grad.mul_(0.5),
    "grad = tensor": assign,
}
WITHOUT_TRACE: dict[str, Callable[[Any], object]] = {  # in the version of a tensor
    "grad.data.clamp_": lambda model: model.weight.grad.data.clamp_(-0.25, 0.25),
    "grad.data.add_": lambda model: model.weight.grad.data.add_(model.weight.data, alpha=0.5),
}
CLEARED: dict[str, Callable[[Any], object]] = {
    "model.zero_grad": lambda model: model.zero_grad(),
    "model.zero_grad, to zeros": lambda model: model.zero_grad(set_to_none=False),
    "grad = None": clear,
}
WEIGHTS: dict[str, Callable[[Any], object]] = {
    "data.fill_": lambda model: model.weight.data.fill_(0.5),
    "data.copy_": lambda model: model.weight.data.copy_(torch.tensor([[0.0, 1.0]])),
    "data.clamp_": lambda model: model.weight.data.clamp_(-0.125, 0.125),
    "data.mul_(mask)": lambda model: model.weight.data.mul_(torch.tensor([[0.0, 1.0]])),
    "data = tensor": swap,
    "no_grad": lambda model: torch.no_grad()(model.weight.neg_)(),
}
SCALED = ("fp16", "fp16-true", "O1", "O2")
PRECISIONS = ("no", "bf16", "bf16-true", *SCALED)


def loss_of(model: nn.Module, scale: float = 1.0) -> Tensor:
    dtype = next(model.parameters()).dtype
    return scale * model(BATCH.to(dtype)).float().square().mean()


def plain(change: Callable[[Any], object], weights: bool = False, micro: int = 1) -> list[float]:
    """The weights of the plain loop, which changes gradients before each step, or weights after it."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    for _ in range(STEPS):
        for _ in range(micro):
            (loss_of(model) / micro).backward()
        if not weights:
            change(model)
        optimizer.step()
        if weights:
            change(model)
        optimizer.zero_grad()
    return model.weight.flatten().tolist()


def ours(precision: Any, change: Callable[[Any], object], when: str = "", micro: int = 1, **how: Any) -> list[float]:
    """The same by easymp. `when`: weights after the step, gradients after "unscale" or a "clip" without effect."""
    how |= {"mixed_precision": precision, "gradient_accumulation_steps": micro}
    with make_accelerator(cpu=True, settings=Settings(scaler_options=SCALE), **how) as acc:
        model, optimizer = prepared(acc)
        for _ in range(STEPS):
            for _ in range(micro):
                with acc.accumulate(model):
                    acc.backward(loss_of(model))
                    if acc.sync_gradients:
                        if when == "unscale":
                            acc.unscale_gradients()
                        if when == "clip":
                            acc.clip_grad_norm_(model.parameters(), 1e6)
                        if when != "weights":
                            change(model)
                    optimizer.step()
                    if acc.sync_gradients and when == "weights":
                        change(model)
                    optimizer.zero_grad()
        return model.weight.float().flatten().tolist()


def close(precision: str) -> float:
    return {"no": 1e-6}.get(precision, 0.02)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", GRADIENTS | WITHOUT_TRACE | CLEARED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_changed_before_the_step(precision: str, name: str, micro: int) -> None:
    change = {**GRADIENTS, **WITHOUT_TRACE, **CLEARED}[name]
    if precision in SCALED and name not in CLEARED:
        with pytest.raises(StepError, match=r"multiplied by the loss scale 1024: call acc.unscale_gradients\(\)"):
            ours(precision, change, micro=micro)
        return
    if precision in SCALED and name in ("model.zero_grad", "grad = None"):
        with pytest.raises(StepError, match="has no gradients yet"):
            ours(precision, change, micro=micro)
        return
    assert ours(precision, change, micro=micro) == pytest.approx(plain(change, micro=micro), abs=close(precision))


@pytest.mark.parametrize(("micro", "fused"), [(1, True), (2, False)])
@pytest.mark.parametrize("when", ["unscale", "clip"])
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_changed_after_they_were_unscaled(
    precision: str, name: str, when: str, micro: int, fused: Any
) -> None:
    change = GRADIENTS[name]
    ended = ours(precision, change, when, micro, fused=fused)
    assert ended == pytest.approx(plain(change, micro=micro), abs=close(precision))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_written_between_two_steps(precision: str, name: str) -> None:
    expected = plain(WEIGHTS[name], weights=True)
    assert ours(precision, WEIGHTS[name], "weights") == pytest.approx(expected, abs=close(precision))


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16-true", "fp16-true"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_the_models_own_zero_grad_inside_accumulate(precision: Any, where: str) -> None:
    """Kept, as by the optimizer's own, where an fp32 sum holds the gradients; else refused at the next backward."""
    with Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=2, settings=Settings(scaler_options=SCALE)
    ) as acc:
        model, optimizer = prepared(acc)

        def update() -> None:
            for _ in range(2):
                with acc.accumulate(model):
                    if where == "first":
                        model.zero_grad()
                    acc.backward(loss_of(model))
                    optimizer.step()
                    if where == "last":
                        model.zero_grad()

        if precision.endswith("true"):
            for _ in range(STEPS):
                update()
            expected = plain(lambda model: None, micro=2)
            assert model.weight.float().flatten().tolist() == pytest.approx(expected, abs=0.02)
        else:
            with pytest.raises(StepError, match=r"call optimizer.zero_grad\(\)"):
                update()


@pytest.mark.parametrize("precision", ["fp16", "fp16-true", "O3"])
def test_gradients_that_the_model_sets_to_zero_after_each_step(precision: Any) -> None:
    with Accelerator(cpu=True, mixed_precision=precision, settings=Settings(scaler_options=SCALE)) as acc:
        model, optimizer = prepared(acc)
        for _ in range(STEPS):
            acc.backward(loss_of(model))
            optimizer.step()
            model.zero_grad(set_to_none=False)
        assert model.weight.float().flatten().tolist() == pytest.approx(plain(lambda model: None), abs=0.02)


def test_an_update_that_the_script_drops_under_masters() -> None:
    with Accelerator(cpu=True, mixed_precision="bf16-true") as acc:
        model, optimizer = prepared(acc)
        for _ in range(STEPS):
            acc.backward(loss_of(model, 100.0))
            acc.clip_grad_norm_(model.parameters(), 1e6)
            model.zero_grad()  # this batch is left out
            acc.backward(loss_of(model))
            optimizer.step()
            optimizer.zero_grad()
        assert model.weight.float().flatten().tolist() == pytest.approx(plain(lambda model: None), abs=0.02)
        assert acc.clip_grad_norm_(model.parameters(), 1.0) == 0


def test_the_tools_of_the_step_take_the_models_own_parameters() -> None:
    with Accelerator(mixed_precision="O2", cpu=True, settings=Settings(fused=False, scaler_options=SCALE)) as acc:
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        model = acc.prepare(model)
        optimizer = acc.prepare(torch.optim.SGD(model.parameters(), lr=1.0))  # in a later call
        (master,) = optimizer.param_groups[0]["params"]

        def backward_of_threes() -> None:
            acc.backward(model(torch.full((1, 4), 3.0)).sum())

        backward_of_threes()
        assert model.weight.grad.dtype == torch.float16
        assert float(acc.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(6.0, rel=1e-3)
        assert float(model.weight.grad.float().norm()) == pytest.approx(1.0, rel=1e-3)  # as the master's
        assert master.grad.norm().item() == pytest.approx(1.0, rel=1e-3)
        optimizer.step()
        assert model.weight[0].tolist() == pytest.approx([0.5] * 4, abs=1e-2)
        optimizer.zero_grad()
        backward_of_threes()
        acc.clip_grad_value_(model.weight, 0.25)
        assert master.grad.flatten().tolist() == [0.25] * 4
        backward_of_threes()
        optimizer.step()
        # However gradients are cleared, of the optimizer or of the model: nothing of the last step comes again.
        for clear in (optimizer.zero_grad, model.zero_grad, lambda: optimizer.zero_grad(set_to_none=False)):
            clear()
            backward_of_threes()
            acc.unscale_gradients()
            assert master.grad.flatten().tolist() == [3.0] * 4
            optimizer.step()
        assert acc._prepared.optimizers_of([master]) == [optimizer]
        later = acc.prepare(nn.Linear(2, 2))
        optimizer.add_param_group({"params": [later.weight], "lr": 0.1})
        optimizer.given.add_param_group({"params": [later.bias], "lr": 0.1})
        assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}
        raw_optimizer = optimizer.optimizer
    assert [p.dtype for group in raw_optimizer.param_groups for p in group["params"]] == [torch.float16] * 3


def clipped_by_torch(strategy: str, precision: Any = "no") -> str:
    how: Any = {"strategy": strategy} if strategy else {"optimizer_in_backward": True}
    with make_accelerator(cpu=True, mixed_precision=precision, **how) as acc:
        model: Any = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.125)
        model, optimizer = acc.prepare(model, optimizer)
        acc.forward_backward(model, lambda y: y.square().mean(), BATCH)
        clip_norm(model.parameters(), 0.1)
        try:
            optimizer.step()
        except StepError as error:
            return str(error)
        return "stepped"


def test_a_clip_by_torch_on_two_ranks(ranks: Any) -> None:
    for error in ranks(clipped_by_torch, "pipeline"):
        assert "Call acc.clip_grad_norm_" in error
    assert ranks(clipped_by_torch, "ddp") == ["stepped"] * 2
    for error in ranks(clipped_by_torch, "fsdp", "fp16"):  # of DTensors, whose versions stay
        assert "multiplied by the loss scale" in error


def given_by_data(strategy: Any, micro: int) -> str:
    with make_accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=micro) as acc:
        built = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        model, optimizer = acc.prepare(built, torch.optim.SGD(built.parameters(), lr=0.125))
        try:
            for _ in range(micro):
                with acc.accumulate(model):
                    acc.backward(model(BATCH).square().mean())
                    if acc.sync_gradients:
                        bias: Any = model[2].bias  # no parameter that comes first
                        bias.grad.data = bias.grad.data * 0.5
                    optimizer.step()
        except StepError as error:
            return str(error)
        return "stepped"


@pytest.mark.parametrize("micro", [1, 2])
def test_values_that_do_not_reach_what_ranks_average(ranks: Any, micro: int) -> None:
    for strategy in ("ddp", "zero1", "fsdp"):
        for error in ranks(given_by_data, strategy, micro):
            assert "write p.grad.copy_(value), or p.grad = value" in error
    assert given_by_data(None, micro) == "stepped"


def test_a_clip_by_torch_after_steps_in_backward_is_refused() -> None:
    assert "Leave the clip out, or optimizer_in_backward" in clipped_by_torch("")


@pytest.mark.parametrize("name", [*WITHOUT_TRACE, "grad = None"])
def test_gradients_that_steps_in_backward_have_freed_are_not_there(name: str) -> None:
    with pytest.raises(StepError, match="freed"):
        ours("no", {**WITHOUT_TRACE, **CLEARED}[name], optimizer_in_backward=True)


def vector_of_halves(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(torch.full((17,), 0.5), model.parameters())


def exchange_with_copies(model: nn.Module) -> None:
    for parameter in model.parameters():
        copied = parameter.detach().clone()
        parameter.data, copied.data = copied.data, parameter.data


def halves(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(0.5)


WRITES: dict[str, Callable[[Any], object]] = {
    "vector_to_parameters": vector_of_halves,
    "data = data": exchange_with_copies,
    "data.fill_": halves,
    "to, float": lambda model: model.to("cpu").float(),
}


def weights_written_on_ranks(strategy: Any, early: bool) -> dict[str, Any]:
    """Of each of `WRITES`, before or after the first update: the first weight after one more, or the error."""
    results: dict[str, Any] = {}
    with Accelerator(cpu=True, mixed_precision="no", strategy=strategy) as acc:
        for name, write in {"nothing": lambda model: None, **WRITES}.items():
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
            model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.125))
            try:
                for writes in (early, not early):
                    if writes:
                        write(model)
                    acc.backward(model(BATCH).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                weight = model[2].weight
                results[name] = getattr(weight, "full_tensor", lambda w=weight: w)().flatten()[0].item()
            except StepError as error:
                results[name] = str(error)
            acc.free_memory()
    return results


@pytest.mark.parametrize("early", [True, False])
def test_weights_written_into_shards_are_those_of_replicas_or_refused(ranks: Any, early: bool) -> None:
    replicas = ranks(weights_written_on_ranks, "ddp", early)[0]
    assert replicas["data = data"] == replicas["to, float"] == replicas["nothing"] != replicas["data.fill_"]
    for strategy in ("fsdp", "tensor_parallel"):
        for shards in ranks(weights_written_on_ranks, strategy, early):
            for name in ("vector_to_parameters", "data = data"):
                assert "do not reach its shard" in shards.pop(name)
            assert shards == pytest.approx({name: replicas[name] for name in shards}, rel=1e-5)
