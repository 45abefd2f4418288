"""Synchronised batch-norm: batch-norm on the batches of all ranks in one, whatever their sizes, on CPUs too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from easymp import PrepareError, RefusedError, SyncBatchNorm, convert_sync_batchnorm
from easymp.distributed import World, read_ranks

from .models import make, message, refuses, under

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SHAPES = {2: (3,), 3: (3, 5), 4: (3, 4, 2), 5: (3, 2, 2, 3)}


def norm(dims: int = 4, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    module = KINDS[dims](3, **options)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    return module


def ran(model: nn.Module, batches: list[Tensor], autocast: bool = False) -> dict[str, Any]:
    """Outputs, gradients of inputs and parameters, and buffers, for a loss of squares and cubes of the outputs."""
    outputs, of_inputs = [], []
    for batch in batches:
        x = batch.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            y = model(x)
        outputs.append(y.detach())
        if y.requires_grad:
            weights = torch.linspace(-1, 1, y[0].numel() if len(y) else 1, dtype=y.dtype)
            (y.flatten(1) * weights + y.flatten(1) ** 3 / 5).sum().backward()
            of_inputs.append(x.grad)
    parameters = {name: p.grad for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    return {"outputs": outputs, "inputs": of_inputs, "parameters": parameters, "buffers": buffers}


@contextmanager
def joined() -> Iterator[World]:
    world = World(read_ranks(), torch.device("cpu"), 20)
    try:
        yield world
    finally:
        world.close()


def spread(model: nn.Module, batches: list[list[Tensor]], autocast: bool = False) -> dict[str, Any]:
    """`ran` on this rank's part of each batch, synchronised; gradients of parameters are summed over the ranks."""
    with joined() as world:
        convert_sync_batchnorm(model)
        results = ran(model, [parts[world.rank] for parts in batches], autocast)
        for name, gradient in results["parameters"].items():
            results["parameters"][name] = None if gradient is None else world.reduce(gradient)
        return results


def batches(dims: int, counts: list[int], center: float = 3.0, dtype: Any = None) -> list[list[Tensor]]:
    torch.manual_seed(2)
    return [[(torch.randn(n, *SHAPES[dims]) * 2 + center).to(dtype or torch.float32) for n in counts] for _ in range(3)]


def compare(ranks: Any, model: nn.Module, inputs: Any, rtol: float, atol: float, *autocast: bool) -> list[Any]:
    """Each rank's results, which are those of one process."""
    one = ran(copy.deepcopy(model), [torch.cat(parts) for parts in inputs], *autocast)
    results = ranks(spread, model, inputs, *autocast, processes=len(inputs[0]))
    for kind in ("outputs", "inputs"):
        for step, expected in enumerate(one[kind]):
            parts = torch.cat([got[kind][step] for got in results])
            assert parts.dtype == expected.dtype
            torch.testing.assert_close(parts, expected, rtol=rtol, atol=atol)
    for got in results:
        assert len(got["inputs"]) == len(one["inputs"])
        for kind in ("parameters", "buffers"):
            assert got[kind].keys() == one[kind].keys()
            torch.testing.assert_close(got[kind], one[kind], rtol=rtol, atol=20 * atol)
    return results


@pytest.mark.parametrize(
    ("dims", "counts", "options", "frozen"),
    [
        (2, [4, 4], {}, ()),
        (5, [4, 4], {}, ()),
        (4, [5, 2], {}, ("weight",)),
        (4, [1, 1], {"momentum": None}, ()),
        (4, [3, 0, 1, 6], {}, ()),
        (4, [3, 2], {"momentum": 0.7, "eps": 0.3, "affine": False}, ()),
        (4, [3, 2], {"track_running_stats": False}, ("weight", "bias")),
    ],
)
def test_it_is_batch_norm_of_all_ranks_samples(ranks, dims, counts, options, frozen):
    model = norm(dims, **options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    compare(ranks, model, batches(dims, counts), 1e-5, 2e-5)


@pytest.mark.parametrize("tracked", [True, False])
def test_evaluation_is_local(ranks: Any, tracked: bool) -> None:
    model, inputs = norm(track_running_stats=tracked).eval(), batches(4, [3, 2])
    for rank, got in enumerate(ranks(spread, model, inputs)):
        expected = ran(copy.deepcopy(model), [parts[rank] for parts in inputs])["outputs"]
        assert all(torch.equal(a, b) for a, b in zip(got["outputs"], expected))


def test_a_large_mean_costs_no_digits(ranks: Any) -> None:
    """Sums of squares in fp32 would leave nothing of a variance of 4 beside a mean of 30 000."""
    inputs = batches(4, [4, 3], center=30000.0)
    exact = ran(norm().double(), [torch.cat(parts).double() for parts in inputs])["outputs"]
    results = ranks(spread, norm(), inputs)
    for step, expected in enumerate(exact):
        parts = torch.cat([got["outputs"][step] for got in results]).double()
        torch.testing.assert_close(parts, expected, rtol=1e-3, atol=2e-3)


def test_under_autocast_statistics_are_fp32(ranks: Any) -> None:
    inputs = batches(4, [4, 3], center=100.0, dtype=torch.bfloat16)
    exact = torch.cat(inputs[-1]).float().mean((0, 2, 3))
    for got in compare(ranks, norm(), inputs, 0.02, 0.02, True):
        assert got["outputs"][0].dtype == torch.bfloat16
        assert got["buffers"]["running_mean"].dtype == torch.float32
        # bf16 sums would be off by tens
        assert (got["buffers"]["running_mean"] / (1 - 0.9**3) - exact).abs().max() < 1


def penalty(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Gradients of a squared gradient."""
    x = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((model(x) ** 3).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def synchronized_penalty(model: nn.Module, parts: list[Tensor]) -> dict[str, Tensor]:
    with joined() as world:
        grads = penalty(convert_sync_batchnorm(model), parts[world.rank])
        return {name: world.reduce(grad) for name, grad in grads.items()}


def test_the_gradient_of_a_gradient(ranks: Any) -> None:
    model, (parts, *_) = norm(), batches(4, [3, 2])
    expected = penalty(copy.deepcopy(model), torch.cat(parts))
    for grads in ranks(synchronized_penalty, model, parts):
        torch.testing.assert_close(grads, expected, rtol=1e-3, atol=1e-3)


def one_value(count: int) -> None:
    with joined() as world:
        SyncBatchNorm(3)(torch.ones(count if world.rank == 0 else 0, 3))


def test_one_value_a_channel_is_refused_on_all_ranks(ranks: Any) -> None:
    for failure in ranks.fails(one_value, 1):
        assert failure.type == "ValueError" and "one value a channel over all ranks" in failure.message
    ranks(one_value, 0)  # none at all: as torch's, nothing happens
    with pytest.raises(ValueError, match="at least"):
        SyncBatchNorm(3)(torch.ones(3))


@pytest.mark.on_ranks(4)
def test_statistics_of_a_group() -> None:
    with joined() as world:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = convert_sync_batchnorm(nn.BatchNorm1d(1, momentum=1.0), groups[world.rank // 2])
        for one in (model, copy.deepcopy(model)):
            one(torch.full((2, 1), float(world.rank)))
            assert one.running_mean.item() == (0.5 if world.rank < 2 else 2.5)
        assert pickle.loads(pickle.dumps(model)).process_group is None


class Named(nn.BatchNorm2d):
    """Other defaults only."""

    def __init__(self, n: int) -> None:
        super().__init__(n, eps=1e-3)


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def tensors(model: nn.Module) -> dict[str, int]:
    return {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}


def test_conversion_changes_classes_only() -> None:
    shared, x, calls = nn.BatchNorm2d(2), torch.ones(2, 2, 1, 1), []
    inner = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.InstanceNorm2d(3), nn.GroupNorm(1, 2))
    model = nn.ModuleDict({"a": shared, "b": inner, "c": shared, "d": Named(2)})
    before = list(map(id, model.modules())), tensors(model)
    shared.register_forward_hook(lambda *_: calls.append(1))
    expected = shared(x)
    assert convert_sync_batchnorm(model) is model
    assert (list(map(id, model.modules())), tensors(model)) == before
    classes = [type(m) for m in (model.a, *model.b, model.d)]
    assert classes == [SyncBatchNorm, SyncBatchNorm, nn.InstanceNorm2d, nn.GroupNorm, SyncBatchNorm]
    assert not model.b[0].training and model.d.eps == 1e-3
    assert torch.equal(model.c(x), expected) and len(calls) == 2  # one process: plain batch-norm
    root = nn.BatchNorm1d(3)
    assert convert_sync_batchnorm(root) is root and type(root) is SyncBatchNorm
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.SyncBatchNorm(3))) is SyncBatchNorm


def test_what_would_be_lost_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), Activated(2))
    nn.utils.parametrize.register_parametrization(inner := nn.BatchNorm1d(3), "weight", nn.Identity())
    for module, pattern in (
        (model, "module '1' is a Activated, a batch-norm that adds forward"),
        (nn.LazyBatchNorm1d(), "the model is a LazyBatchNorm1d without a shape yet"),
        (nn.Sequential(inner), "module '0' is a ParametrizedBatchNorm1d"),
    ):
        assert pattern in message(PrepareError, convert_sync_batchnorm, module)
    assert type(model[0]) is nn.BatchNorm2d


def norms_in(model: nn.Module) -> list[str]:
    classes = {type(m) for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    return sorted(kind.__name__ for kind in classes)


def check_conversion(size: int) -> None:
    model = make("conv")
    names = list(model.state_dict())
    with under(convert_sync_batchnorm=True) as acc:
        view = acc.prepare(model)
        assert norms_in(model) == ["SyncBatchNorm" if size > 1 else "BatchNorm2d"]
        assert list(view.state_dict()) == names
        if size > 1:
            join = acc.join_uneven_inputs([view])
            refuses(RefusedError, "every forward needs the statistics of all ranks", join.__enter__)
        acc.free_memory()
        if acc.is_main_process:
            view(torch.ones(2, 12))  # alone: a synchronised one would wait for the other rank
        root = acc.prepare(nn.BatchNorm1d(3))
        root(torch.full((2, 3), float(acc.process_index)))
        assert isinstance(root, SyncBatchNorm) == (size > 1)
        assert root.running_mean[0].item() == pytest.approx(0.05 * (size - 1))
    assert norms_in(model) == ["BatchNorm2d"]


@pytest.mark.on_ranks(2)
def test_batch_norms_are_synchronised_while_prepared() -> None:
    check_conversion(2)


def test_one_process_is_left_as_it_is() -> None:
    check_conversion(1)
