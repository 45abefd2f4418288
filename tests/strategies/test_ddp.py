"""ddp on real processes: how gradients travel, what is asked of torch, and what it says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from easymp import PrepareError, RefusedError, StepError

from .models import Of, make, message, mlp, refuses, under


def gradients(
    options: Any, build: Any, sample: Any, steps: int = 1, dtype: Any = torch.float32
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What arrives, and what this rank alone would have had."""
    with under("ddp", options) as acc:
        plain, model = make(build).to(dtype), acc.prepare(make(build).to(dtype))
        generator = torch.Generator().manual_seed(acc.process_index)
        for _ in range(steps):
            x = torch.randn(sample, generator=generator).to(dtype)
            model.zero_grad()
            acc.backward(model(x).square().mean())
        plain(x).square().mean().backward()
        arrived, local_grads = [p.grad.clone() for p in model.parameters()], [p.grad for p in plain.parameters()]
        assert all(g.dtype == dtype for g in arrived)
        return arrived, local_grads


TRAVEL = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
JOURNEYS = [
    ("no", 3.0, torch.float32, 2),
    ("fp16", None, torch.float32, 4),
    ("fp16", 0.25, torch.bfloat16, 2),
    ("bf16", 1.0, torch.float32, 2),
    ("bf16", None, torch.bfloat16, 2),
    ("fp32", None, torch.bfloat16, 2),
    ("fp32", 3.0, torch.float64, 2),
]


@pytest.mark.parametrize(("hook", "factor", "dtype", "size"), JOURNEYS)
def test_what_arrives_is_the_average_in_the_type_of_the_journey(ranks, hook, factor, dtype, size):
    for view in [True, False] if size == 2 else [True]:
        options = {"comm_hook": hook, "gradient_predivide_factor": factor, "gradient_as_bucket_view": view}
        options["bucket_cap_mb"] = 0.002
        results = ranks(gradients, options, mlp, (8, 12), 1, dtype, processes=size)
        before = factor or size
        moved = dtype if hook == "no" or dtype == torch.float64 else TRAVEL[hook]
        wide = torch.promote_types(moved, dtype)  # divided where there is more room
        for i, _ in enumerate(results[0][0]):
            parts = [(local_grads[i].to(wide) / before).to(moved) for _, local_grads in results]
            by_hand = (torch.stack(parts).sum(0).to(wide) / (size / before)).to(dtype).double()
            # a sum of two has one order
            slack = torch.finfo(moved).eps * (0 if size == 2 and factor != 3.0 else 4)
            scale = torch.stack([p.abs().double() for p in parts]).sum(0) * (before / size)
            allowed = slack * scale + 4 * torch.finfo(dtype).eps * by_hand.abs()
            for arrived, _ in results:
                assert ((arrived[i].double() - by_hand).abs() - allowed).max() <= 1e-12


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 3, sparse=True, _weight=torch.ones(6, 3)))


@pytest.mark.on_ranks(2)
def test_sparse_gradients_travel_as_they_are() -> None:
    with under("ddp", {"gradient_predivide_factor": 1.0}) as acc:
        model = acc.prepare(sparse())
        acc.backward(model(torch.tensor([acc.process_index, 5])).sum())
        by_hand = torch.tensor([0.5, 0.5, 0, 0, 0, 1])[:, None].expand(6, 3)
        assert torch.equal(model[0].weight.grad.to_dense(), by_hand)


def of_two() -> nn.Module:
    call = lambda m, x, uses_later: m.later(m.always(x)) if uses_later else m.always(x)  # noqa: E731
    return Of(call, always=nn.Linear(12, 12), later=nn.Linear(12, 12))


@pytest.mark.on_ranks(2)
def test_unused_parameters_are_searched_in_all_calls_before_a_backward() -> None:
    x = torch.ones(2, 12)
    with under("ddp", {"find_unused_parameters": True}) as acc:
        model = acc.prepare(of_two())
        plain = copy.deepcopy(acc.unwrap_model(model))
        for called, backward in ((model, acc.backward), (plain, torch.Tensor.backward)):
            backward(called(x, True).sum() + called(x, False).sum())  # torch searches the last call's outputs only
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


@pytest.mark.on_ranks(2)
def test_refusals_have_sentences() -> None:
    x = torch.ones(2, 12)
    with under("ddp", precision="bf16") as acc:
        model = acc.prepare(make("idle"))
        acc.backward(model(x).sum())
        error_text = message(StepError, lambda: acc.backward(model(x).sum()))
        assert "no gradient came for 'unused.weight', 'unused.bias', 'blocks.2.0.weight'" in error_text
        assert "DistributedDataParallelKwargs(find_unused_parameters=True)" in error_text
    for strategy in ("ddp", "zero1"):
        with under(strategy) as acc:
            model = make("idle")
            model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            acc.backward(model(x).sum())
            assert "no gradient came for 'unused.weight'" in message(StepError, optimizer.step)
            another = make("mlp")  # beside one that was given up
            another, optimizer = acc.prepare(another, torch.optim.SGD(another.parameters(), lr=0.1))
            acc.backward(another(x).sum())
            optimizer.step()
            assert optimizer.updates == 1
    with under("ddp", {"static_graph": True}, precision="bf16") as acc:
        model = acc.prepare(of_two())
        for uses_later in (True, True, False):
            acc.backward(model(x, uses_later).sum())
        error_text = message(StepError, lambda: acc.backward(model(x, False).sum()))
        assert "'later.weight', 'later.bias'" in error_text
        assert "With static_graph=True each step must use the same parameters" in error_text
    with under("ddp", {"comm_hook": "fp16"}) as acc:
        refuses(PrepareError, "'0' has sparse gradients", acc.prepare, sparse())
    for options in ({"comm_hook": "bf16"}, {"gradient_predivide_factor": 1.0}):
        with under("ddp", options) as acc:
            model = acc.prepare(make("mlp"))
            refuses(RefusedError, "divides by the number of all ranks", acc.join_uneven_inputs, [model])
