"""The global norm counts each element once, whatever layouts the gradients have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator
from easymp.strategies.single import clip_to_norm, copies

SHAPES = [(7, 6), (5,), (8, 4), (3, 3), (2, 9), (4,), (1,), (6, 5)]
TYPES = [1.0, 2.0, 3.0, math.inf]


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def mixed(norm_type: float) -> tuple[float, list[Tensor], list[int]]:
    """Plain gradients, and DTensors on meshes of one and two dimensions: sharded, replicated, strided, not yet added up."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    with Accelerator(mixed_precision="no", strategy="ddp") as acc:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        layouts = [
            None,
            (grid["tensor"], [Shard(0)]),
            (grid, [Shard(0), Replicate()]),
            (grid, [Shard(0), Shard(1)]),
            (grid, [Replicate(), Replicate()]),
            (grid["data"], [Replicate()]),
            (grid, [Shard(0), Shard(0)]),  # of one element
            (grid["tensor"], [Partial()]),
        ]
        given = []
        for grad, layout in zip(gradients(), layouts):
            if layout is None:
                parameter = nn.Parameter(torch.zeros_like(grad))
                parameter.grad = grad
            elif layout[1] == [Partial()]:
                parameter = nn.Parameter(distribute_tensor(torch.zeros_like(grad), layout[0], [Shard(0)]))
                part = grad / 4 if layout[0].get_local_rank() else grad * 3 / 4
                parameter.grad = DTensor.from_local(part, layout[0], [Partial()], run_check=False)
                parameter.grad = parameter.grad
            else:
                parameter = nn.Parameter(distribute_tensor(torch.zeros_like(grad), *layout))
                parameter.grad = distribute_tensor(grad, *layout)
            given.append(parameter)
        norm = float(clip_to_norm(given, 0.5, norm_type, acc._world))
        grads = [p.grad for p in given]
        whole = [(g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for g in grads]
        return norm, whole, [copies(g, 4) for g in grads]


@pytest.mark.parametrize("norm_type", TYPES)
def test_each_element_counts_once(ranks, norm_type: float) -> None:
    flat = torch.cat([g.flatten() for g in gradients()])
    expected = float(torch.linalg.vector_norm(flat, norm_type))
    for norm, clipped, counts in ranks(mixed, norm_type, processes=4):
        assert norm == pytest.approx(expected, rel=1e-6)
        for got, grad in zip(clipped, gradients()):
            assert torch.allclose(got, grad * (0.5 / (expected + 1e-6)), rtol=1e-5)
        assert counts == [4, 2, 2, 1, 4, 4, 1, 2]


def of_fsdp_and_tensor(norm_type: float) -> tuple[float, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with Accelerator(mixed_precision="no", strategy="ddp") as acc:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6))
        parallelize_module(model, grid["tensor"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=grid["data"])
        model.set_force_sum_reduction_for_comms(True)  # torch 2.8 takes a sum for the mean
        model(torch.arange(24.0).view(4, 6) / 7).square().mean().backward()
        norm = clip_to_norm(list(model.parameters()), 1e9, norm_type, acc._world)
        return float(norm), str(model[1].weight.placements)


def test_under_fsdp_and_tensor_parallelism_together(ranks) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6))
    model(torch.arange(24.0).view(4, 6) / 7).square().mean().backward()
    for norm_type in (2.0, math.inf):
        expected = float(nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type))
        for norm, layout in ranks(of_fsdp_and_tensor, norm_type, processes=4):
            assert norm == pytest.approx(expected, rel=1e-5)
            assert "_StridedShard" in layout
