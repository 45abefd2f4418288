"""easymp's own optimizers on shards: resumed under an Accelerator, and on FSDP2 by hand."""

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW

from easymp import Accelerator, Settings
from easymp import optim as ours

from ..strategies.models import part
from ..words import make_accelerator
from .test_own import SPREAD, kernels_here, net


def ends(strategy, kernels, folder, cut=True):
    """Weights after a straight run of each optimizer, and after one that is cut in two.

    All ranks together on one batch.
    """
    results = {}
    for name, optimizer_of in SPREAD.items():
        if (strategy == "zero1" and name == "LARC") or (kernels and name in ("LAMB", "NovoGrad")):
            continue  # refused under zero1; without kernels
        results[name] = []
        for first, last in ((0, 4), (0, 2), (2, 4)) if cut else ((0, 4),):
            model = net()
            optimizer = optimizer_of(model.parameters())
            with kernels_here(kernels), Accelerator(strategy=strategy, cpu=True, mixed_precision="no") as acc:
                model, optimizer = acc.prepare(model, optimizer)
                assert acc.plan.optimizer.value == ("CuPy" if kernels else "fused")
                if first:
                    acc.load_state(f"{folder}/{name}")
                for turn in range(first, last):
                    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(turn))
                    acc.backward(model(part(acc, x)).square().mean())
                    acc.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                if last == 2:
                    acc.save_state(f"{folder}/{name}")
                else:
                    results[name].append([value.clone() for value in dict(acc.weights(model)).values()])
    return results


@pytest.mark.parametrize(
    ("strategy", "kernels"), [("zero1", False), pytest.param("fsdp", True, marks=pytest.mark.slow)]
)
def test_shards_are_stepped_as_whole_tensors_and_resumed_bit_for_bit(strategy, kernels, ranks, tmp_path):
    single = ends("single", False, "", cut=False)
    (main, *_) = all_ranks = ranks(ends, strategy, kernels, str(tmp_path))
    for name, (straight, resumed) in (
        (name, runs) for rank_results in all_ranks for name, runs in rank_results.items()
    ):
        assert all(map(torch.equal, straight, resumed)), name
    for name, (straight, _) in main.items():
        torch.testing.assert_close(straight, single[name][0], rtol=1e-4, atol=1e-5)


def by_hand():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    try:
        for kind in (ours.LAMB, ours.NovoGrad, ours.Lion):
            with kernels_here(kind is ours.Lion):
                plain, split = net(), net()
                fully_shard(split, mesh=init_device_mesh("cpu", (2,)))
                split.set_force_sum_reduction_for_comms(True)  # torch 2.8 takes a sum for the mean
                optimizers = [ours.Engine(kind(model.parameters(), lr=0.1)) for model in (plain, split)]
                for turn in range(3):
                    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(turn))
                    norms = []
                    for model, optimizer in zip((plain, split), optimizers):
                        optimizer.zero_grad()
                        (model(x).square().mean() * 10).backward()
                        norms.append(optimizer.clip_grad_norm_(0.3))
                        optimizer.step()
                    torch.testing.assert_close(*norms)
                for p, q in zip(plain.parameters(), split.parameters()):
                    torch.testing.assert_close(p, q.full_tensor(), rtol=1e-4, atol=1e-5)
                assert optimizers[1].name == ("CuPy" if kind is ours.Lion else "torch")
    finally:
        dist.destroy_process_group()


def test_fsdp_by_hand_is_stepped_as_whole_tensors(ranks):
    ranks(by_hand)


def rounded(strategy):
    """bf16 weights after a few steps of each optimizer, rounded stochastically, on the same batch on each rank."""
    weights = []
    settings = Settings(stochastic_rounding=True, seed=3)
    for optimizer_of, kernels in ((AdamW, False), (ours.Lion, False), (AdamW, True), (ours.Lion, True)):
        model = net().bfloat16()
        optimizer = optimizer_of(model.parameters(), lr=0.01)
        keywords = {"strategy": strategy, "cpu": True, "mixed_precision": "no", "settings": settings}
        with kernels_here(kernels), make_accelerator(**keywords) as acc:
            model, optimizer = acc.prepare(model, optimizer)
            for turn in range(3):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(turn)).bfloat16()
                acc.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            weights.append([value.clone() for value in dict(acc.weights(model)).values()])
    return weights


def test_shards_are_rounded_as_whole_tensors_are(ranks):
    single = rounded("single")
    for weights in ranks(rounded, "zero1"):
        torch.testing.assert_close(weights, single, rtol=0, atol=0)
