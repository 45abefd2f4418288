"""easymp's own optimizers on shards: resumed under an Accelerator, and on FSDP2 by hand."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from easymp import Accelerator
from easymp import optim as ours

from .test_own import SPREAD, kernels_here, net


def steps(acc, model, optimizer, turns):
    for turn in turns:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(turn)).chunk(acc.num_processes)[
            acc.process_index
        ]
        acc.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def resumed(strategy, kernels, folder):
    """Whether each run that was cut in two ends as the straight one did, bit for bit."""
    same = {}
    for name, make in SPREAD.items():
        if name == "LARC" or (kernels and name == "NovoGrad"):
            continue  # refused under zero1; and each kernel that g++ compiles is half a second a rank
        ends = []
        for first, last in ((0, 4), (0, 2), (2, 4)):
            model = net()
            optimizer = make(model.parameters())
            with kernels_here(kernels), Accelerator(strategy=strategy, cpu=True, mixed_precision="no") as acc:
                model, optimizer = acc.prepare(model, optimizer)
                if first:
                    acc.load_state(f"{folder}/{name}")
                steps(acc, model, optimizer, range(first, last))
                if last == 2:
                    acc.save_state(f"{folder}/{name}")
                ends.append({key: value.clone() for key, value in acc.get_state_dict(model).items()})
        same[name] = all(torch.equal(ends[0][key], ends[2][key]) for key in ends[0])
    return same


@pytest.mark.parametrize(
    ("strategy", "kernels"), [("zero1", False), pytest.param("fsdp", True, marks=pytest.mark.slow)]
)
def test_runs_are_resumed_bit_for_bit(strategy, kernels, ranks, tmp_path):
    for same in ranks(resumed, strategy, kernels, str(tmp_path)):
        assert all(same.values()), same


@contextmanager
def closing():
    try:
        yield
    finally:
        dist.destroy_process_group()


def by_hand(kernels):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    with kernels_here(kernels), closing():
        for kind in (ours.LAMB,) if kernels else (ours.LAMB, ours.NovoGrad):
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
                torch.testing.assert_close(norms[0], norms[1])
            for p, q in zip(whole.parameters(), split.parameters()):
                torch.testing.assert_close(p, q.full_tensor(), rtol=1e-4, atol=1e-5)
            assert optimizers[1].engine.name == ("CuPy" if kernels else "torch")


@pytest.mark.parametrize("kernels", [False, True])
def test_fsdp_by_hand_is_stepped_as_whole_tensors(kernels, ranks):
    ranks(by_hand, kernels)


def rounded(strategy, kernels):
    """bf16 weights after a few steps of each optimizer, rounded stochastically, on the same batch on each rank."""
    ends = []
    for make in (ours.AdamW, ours.Lion):
        model = net().bfloat16()
        optimizer = make(model.parameters(), lr=0.01, state_dtype=torch.bfloat16, stochastic_rounding=3)
        with kernels_here(kernels), Accelerator(strategy=strategy, cpu=True, mixed_precision="no") as acc:
            model, optimizer = acc.prepare(model, optimizer)
            for turn in range(3):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(turn)).bfloat16()
                acc.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            ends.append([value.clone() for value in acc.get_state_dict(model).values()])
    return ends


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shards_are_rounded_as_whole_tensors_are(kernels, ranks):
    alone = rounded("single", kernels)
    for ends in ranks(rounded, "zero1", kernels):
        torch.testing.assert_close(ends, alone, rtol=0, atol=0)
