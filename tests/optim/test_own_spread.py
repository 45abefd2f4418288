"""easymp's own optimizers on shards: resumed under an Accelerator, and on FSDP2 by hand."""

import pytest
import torch
import torch.distributed as dist

from easymp import Accelerator
from easymp import optim as ours

from ..strategies.models import part
from .test_own import SPREAD, kernels_here, net


def ends(strategy, kernels, folder, cut=True):
    """Weights after a straight run of each optimizer, and after one that is cut in two; all ranks together on one batch."""
    found = {}
    for name, make in SPREAD.items():
        if (strategy == "zero1" and name == "LARC") or (kernels and name == "NovoGrad"):
            continue  # refused under zero1; and each kernel that g++ compiles is half a second a rank
        found[name] = []
        for first, last in ((0, 4), (0, 2), (2, 4)) if cut else ((0, 4),):
            model = net()
            optimizer = make(model.parameters())
            with kernels_here(kernels), Accelerator(strategy=strategy, cpu=True, mixed_precision="no") as acc:
                model, optimizer = acc.prepare(model, optimizer)
                assert "easymp's" in acc.plan.optimizer.reason
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
                    found[name].append([value.clone() for value in acc.get_state_dict(model).values()])
    return found


@pytest.mark.parametrize(
    ("strategy", "kernels"), [("zero1", False), pytest.param("fsdp", True, marks=pytest.mark.slow)]
)
def test_shards_are_stepped_as_whole_tensors_and_resumed_bit_for_bit(strategy, kernels, ranks, tmp_path):
    alone = ends("single", False, "", cut=False)
    (main, *_) = every = ranks(ends, strategy, kernels, str(tmp_path))
    for name, (straight, resumed) in ((name, both) for found in every for name, both in found.items()):
        assert all(map(torch.equal, straight, resumed)), name
    for name, (straight, _) in main.items():
        torch.testing.assert_close(straight, alone[name][0], rtol=1e-4, atol=1e-5)


def by_hand():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    try:
        for kind, kernels in ((ours.LAMB, False), (ours.NovoGrad, False), (ours.LAMB, True)):
            with kernels_here(kernels):
                whole, split = net(), net()
                fully_shard(split, mesh=init_device_mesh("cpu", (2,)))
                split.set_force_sum_reduction_for_comms(True)  # torch 2.8 takes a sum for the mean
                optimizers = [kind(model.parameters(), lr=0.1) for model in (whole, split)]
                for turn in range(3):
                    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(turn))
                    norms = []
                    for model, optimizer in zip((whole, split), optimizers):
                        optimizer.zero_grad()
                        (model(x).square().mean() * 10).backward()
                        norms.append(optimizer.clip_grad_norm_(0.3))
                        optimizer.step()
                    torch.testing.assert_close(*norms)
                for p, q in zip(whole.parameters(), split.parameters()):
                    torch.testing.assert_close(p, q.full_tensor(), rtol=1e-4, atol=1e-5)
                assert optimizers[1].engine.name == ("CuPy" if kernels else "torch")
    finally:
        dist.destroy_process_group()


def test_fsdp_by_hand_is_stepped_as_whole_tensors(ranks):
    ranks(by_hand)


def rounded(strategy):
    """bf16 weights after a few steps of each optimizer, rounded stochastically, on the same batch on each rank."""
    found = []
    for make, kernels in ((ours.AdamW, False), (ours.Lion, False), (ours.AdamW, True), (ours.Lion, True)):
        model = net().bfloat16()
        optimizer = make(model.parameters(), lr=0.01, state_dtype=torch.bfloat16, stochastic_rounding=3)
        with kernels_here(kernels), Accelerator(strategy=strategy, cpu=True, mixed_precision="no") as acc:
            model, optimizer = acc.prepare(model, optimizer)
            for turn in range(3):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(turn)).bfloat16()
                acc.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            found.append([value.clone() for value in acc.get_state_dict(model).values()])
    return found


def test_shards_are_rounded_as_whole_tensors_are(ranks):
    alone = rounded("single")
    for found in ranks(rounded, "zero1"):
        torch.testing.assert_close(found, alone, rtol=0, atol=0)
