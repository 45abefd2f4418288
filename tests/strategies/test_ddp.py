"""ddp on real processes: how gradients travel, what is asked of torch, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from easymp import PrepareError, RefusedError, StepError

from .models import Of, make, message, mlp, refuses, sgd, trained, under


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
        arrived, own = [p.grad.clone() for p in model.parameters()], [p.grad for p in plain.parameters()]
        assert all(g.dtype == dtype for g in arrived)
        return arrived, own


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
            parts = [(own[i].to(wide) / before).to(moved) for _, own in results]
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


def thin() -> nn.Module:
    """Gradients of a rank that is known: one sample a process makes products of two vectors."""
    torch.manual_seed(2)
    scale, empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))
    call = lambda m, x: m.last(m.first(x) * m.scale) + m.empty.sum()  # noqa: E731
    return Of(call, scale=scale, empty=empty, first=nn.Linear(24, 20), last=nn.Linear(20, 24))


EXACT = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "use_error_feedback": False}


@pytest.mark.parametrize(
    ("more", "rel"),
    [
        ({"find_unused_parameters": True}, 1e-4),
        ({"comm_state_option": {**EXACT, "batch_tensors_with_same_shape": True}}, 1e-4),
        ({"comm_wrapper": "fp16"}, 2e-2),
        ({"comm_wrapper": "bf16"}, 1e-1),
    ],
    ids=str,
)
def test_gradients_of_low_rank_arrive_whole(ranks, more: dict[str, Any], rel: float) -> None:
    """The average of two processes' products of vectors has rank 2."""
    options = {"comm_hook": "power_sgd", "comm_state_option": EXACT, **more}
    (a, own_a), (b, own_b) = ranks(gradients, options, thin, (1, 24), 5)
    for x, y, p, q in zip(a, b, own_a, own_b):
        assert torch.equal(x, y)
        assert float((x - (p + q) / 2).norm()) <= rel * float((p + q).norm())


@pytest.mark.parametrize(
    ("hook", "wrapper", "size"),
    [("power_sgd", "no", 2), pytest.param("batched_power_sgd", "bf16", 4, marks=pytest.mark.slow)],
)
def test_it_learns_with_a_part_of_the_gradient(ranks, hook: str, wrapper: str, size: int) -> None:
    """In many buckets, and with a reduction of torch's own for unused parameters: in one order on all ranks."""
    options = {
        "comm_hook": hook,
        "comm_wrapper": wrapper,
        "bucket_cap_mb": 0.001,
        "find_unused_parameters": True,
    }
    options["comm_state_option"] = {"start_powerSGD_iter": 2, "min_compression_rate": 0.5}
    results = ranks(trained, "ddp", "idle", 2, 1.0, "bf16", options, processes=size)
    assert all(got["losses"] == results[0]["losses"] for got in results)
    assert all(torch.isfinite(p).all() for p in results[0]["parameters"].values())
    assert results[0]["losses"] == pytest.approx(trained("single", "idle", 2, 1.0, "bf16")["losses"], rel=0.2)


def of_two() -> nn.Module:
    call = lambda m, x, both: m.later(m.always(x)) if both else m.always(x)  # noqa: E731
    return Of(call, always=nn.Linear(12, 12), later=nn.Linear(12, 12))


@pytest.mark.on_ranks(2)
def test_a_parameter_that_comes_into_use_late_is_a_number() -> None:
    """A gradient of zeros has no direction: torch's default would have made NaN of it, for good."""
    state = {"start_powerSGD_iter": 2, "min_compression_rate": 0.1}
    options = {"comm_hook": "power_sgd", "comm_state_option": state, "find_unused_parameters": True}
    with under("ddp", options) as acc:
        model = acc.prepare(of_two())
        for step in range(8):
            model.zero_grad()
            acc.backward(model(torch.ones(2, 12), step > 4).sum())
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_loss_scale_goes_with_a_hook_that_remembers_nothing(ranks) -> None:
    state = {"start_powerSGD_iter": 1, "use_error_feedback": False, "warm_start": False}
    state["min_compression_rate"] = 0.1
    options = {"comm_hook": "power_sgd", "comm_state_option": state}
    got = ranks(trained, "ddp", "mlp", 1, None, "fp16", options)[0]
    assert not got["skipped"][-1]
    assert all(torch.isfinite(p).all() for p in got["parameters"].values())


@pytest.mark.on_ranks(2)
def test_refusals_have_sentences() -> None:
    x = torch.ones(2, 12)
    with under("ddp", precision="bf16") as acc:
        model = acc.prepare(make("idle"))
        acc.backward(model(x).sum())
        said = message(StepError, lambda: acc.backward(model(x).sum()))
        assert "no gradient came for 'unused.weight', 'unused.bias', 'blocks.2.0.weight'" in said
        assert "DistributedDataParallelKwargs(find_unused_parameters=True)" in said
    with under("ddp", {"static_graph": True}, precision="bf16") as acc:
        model = acc.prepare(of_two())
        for both in (True, True, False):
            acc.backward(model(x, both).sum())
        said = message(StepError, lambda: acc.backward(model(x, False).sum()))
        assert "'later.weight', 'later.bias'" in said
        assert "With static_graph=True each step must use the same parameters" in said
    with under("ddp", {"comm_hook": "fp16"}) as acc:
        refuses(PrepareError, "'0' has sparse gradients", acc.prepare, sparse())
    with under("ddp", {"comm_hook": "power_sgd"}, precision="fp16") as acc:
        remembers = "the overflow that fp16 with a loss scale is meant to skip would stay in it"
        refuses(RefusedError, remembers, acc.prepare, model := make("mlp"), sgd(list(model.parameters())))
    for options in ({"comm_hook": "bf16"}, {"gradient_predivide_factor": 1.0}):
        with under("ddp", options) as acc:
            join = acc.join_uneven_inputs([acc.prepare(make("mlp"))])
            refuses(RefusedError, "divide by the number of all ranks", join.__enter__)
