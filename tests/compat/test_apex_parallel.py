"""apex.parallel on real ranks: gradients by each option, batch-norm over ranks, and amp under both kinds of DDP."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from easymp import RefusedError
from easymp.compat.apex import amp, parallel

from .test_apex_amp import as_before_initialize as as_before_initialize
from .test_apex_amp import backward, initialize, network, train_digits


def joined(function):
    """Between init_process_group and its end; what wraps a model is gone by then, for torch may wait forever for it."""

    @functools.wraps(function)
    def program(*args):
        dist.init_process_group("gloo")
        try:
            result = function(dist.get_rank(), *args)
            gc.collect()
            dist.barrier()
            return result
        finally:
            amp.initialize(nn.Linear(1, 1), enabled=False)
            dist.destroy_process_group()

    return program


def layer(rank, dtype=torch.float32):
    torch.manual_seed(rank)  # other weights on each rank
    return nn.Linear(2, 2, bias=False).to(dtype)


OPTIONS = [
    ({}, torch.float32, 1.5),
    ({"gradient_average": False}, torch.float32, 3.0),
    ({"gradient_predivide_factor": 4.0}, torch.float32, 1.5),
    ({"gradient_average": False, "gradient_predivide_factor": 4.0}, torch.float32, 0.75),
    ({"message_size": 1}, torch.float32, 1.5),
    ({"delay_allreduce": True}, torch.float32, 1.5),
    ({}, torch.float16, 1.5),
    ({"allreduce_always_fp32": True}, torch.float16, 1.5),
    ({"message_size": None}, torch.float32, 1.5),  # torch's second argument
]


@joined
def reduced(rank):
    weights = layer(0).weight.detach()
    for options, dtype, expected in OPTIONS:
        model = parallel.DistributedDataParallel(layer(rank, dtype), **options)
        model(torch.full((1, 2), rank + 1.0, dtype=dtype)).sum().backward()
        assert model.module.weight.grad.tolist() == [[expected] * 2] * 2, (options, dtype)
        assert torch.equal(model.module.weight.detach(), weights.to(dtype))
    for wide in (False, True):  # a sum that is no number in fp16, and a mean that is
        model = parallel.DistributedDataParallel(layer(rank, torch.float16), allreduce_always_fp32=wide)
        (model(torch.full((1, 2), 1.0, dtype=torch.float16)) * 4e4).sum().backward()
        assert model.module.weight.grad.isfinite().all().item() == wide


def test_gradients_by_option(ranks):
    ranks(reduced)


def two_layers(**options):
    """Of which one is used."""
    model = parallel.DistributedDataParallel(nn.ModuleList([layer(0), layer(1)]), **options)
    model.module.forward = model.module[0].forward
    return model


@joined
def turned_off_and_on(rank):
    model, x = parallel.DistributedDataParallel(layer(rank)), torch.full((1, 2), rank + 1.0)
    model.disable_allreduce()
    for calls in (1, 2):
        model(x).sum().backward()
        assert model.module.weight.grad[0, 0] == calls * (rank + 1.0)
    loss = model(x).sum()
    model.enable_allreduce()  # also between forward and backward
    loss.backward()
    assert model.module.weight.grad[0, 0] == 3 * 1.5
    model.zero_grad()
    first, second = model(x), model(x)  # one backward through two calls
    (first + second).sum().backward()
    assert model.module.weight.grad[0, 0] == 2 * 1.5
    unused, strict = two_layers(delay_allreduce=True), two_layers()
    for _ in range(2):
        unused(x).sum().backward()
    assert unused.module[0].weight.grad[0, 0] == 3.0 and unused.module[1].weight.grad is None
    strict(x).sum().backward()
    with pytest.raises(RuntimeError, match="pass delay_allreduce=True"):
        strict(x)
    reference = weakref.ref(parallel.DistributedDataParallel(layer(0)))
    gc.collect()
    assert reference() is None  # torch's reducer does not hold what it is for


def test_reduction_is_turned_off_and_on_and_waits_for_no_unused_parameter(ranks):
    ranks(turned_off_and_on)


@joined
def by_hand(rank):
    module, x = nn.Sequential(layer(rank), layer(rank).half()), torch.full((1, 2), rank + 1.0)
    reducer = parallel.Reducer(module)
    (module[0](x).sum() + module[1](x.half()).sum()).backward()
    reducer.reduce()
    assert [p.grad.float().unique().tolist() for p in module.parameters()] == [[1.5], [1.5]]
    assert torch.equal(module[0].weight, layer(0).weight)
    grads = [torch.full((3,), float(rank)), torch.ones(2)]
    parallel.Reducer(grads).reduce()
    assert [g.tolist() for g in grads] == [[0.5] * 3, [1.0] * 2]
    groups = [parallel.create_syncbn_process_group(size) for size in (2, 1)]
    assert [dist.get_world_size(group) for group in groups] == [2, 1]
    assert parallel.create_syncbn_process_group(0) is None
    with pytest.raises(RuntimeError, match="group_size=5 does not divide the 2 ranks"):
        parallel.create_syncbn_process_group(5)


def norms():
    last = nn.Sequential(nn.BatchNorm1d(3, momentum=None))
    return nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, affine=True), last)


def normed(norm, x):
    """Outputs of a batch-norm, and gradients of its inputs."""
    x = x.clone().requires_grad_()
    output = norm(x)
    output.square().sum().backward()
    return output.detach(), x.grad


@joined
def over_ranks(rank):
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4) * 2 + 5
    rank_rows = slice(0, 4) if rank == 0 else slice(4, 6)  # unequal batches
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-4)
    exact_norm, plain = nn.BatchNorm1d(3), parallel.SyncBatchNorm(3)
    close(normed(plain, x[rank_rows]), tuple(value[rank_rows] for value in normed(exact_norm, x)))
    close(plain.running_var, exact_norm.running_var)
    model, exact = norms(), norms()
    assert parallel.convert_syncbn_model(model) is model
    class_names = ["Sequential", "SyncBatchNorm", "InstanceNorm1d", "Sequential", "SyncBatchNorm"]
    assert [type(m).__name__ for m in model.modules()] == class_names
    assert isinstance(model[0], parallel.SyncBatchNorm)
    close(model(x[rank_rows]), exact(x)[rank_rows])
    close(model[2][0].running_mean, exact[2][0].running_mean)


@pytest.mark.parametrize("program", [by_hand, over_ranks])
def test_reducers_groups_and_batch_norm_over_all_samples(ranks, program):
    ranks(program)


@joined
def trained(rank, level, kind):
    """K1 and K2 on two ranks, each with its half of the batches; the accuracy, and the weights."""
    wrappers = {
        "torch": nn.parallel.DistributedDataParallel,
        "apex": parallel.DistributedDataParallel,
        "delayed": functools.partial(parallel.DistributedDataParallel, delay_allreduce=True),
    }
    options = {"make_model": lambda: parallel.convert_syncbn_model(network(), None), "wrap": wrappers[kind]}
    right, *_, model = train_digits(level, **options, rank=rank, size=2)
    with pytest.raises(RuntimeError, match="Parallel wrappers should only be applied"):
        amp.initialize(model)
    return right, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("level", "kind"), [("O2", "apex"), ("O2", "torch"), ("O1", "delayed")])
def test_amp_trains_under_both_kinds_of_ddp(ranks, level, kind):
    (right, first_state), (_, second_state) = ranks(trained, level, kind)
    assert right > 0.88
    for name, value in first_state.items():
        assert value.dtype in (torch.float32, torch.int64)
        assert torch.equal(value, second_state[name]), name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shared_param": True}, RuntimeError, "pass delay_allreduce=True"),
        ({"gradient_average_split_factor": 2.0}, RuntimeError, "pass gradient_predivide_factor"),
        ({"retain_allreduce_buffers": True}, RefusedError, "both are torch's"),
        ({"gradient_predivide_factor": 0.0}, RuntimeError, "must be above 0"),
        ({"message_size": 0}, RuntimeError, "at least 1"),
    ],
)
def test_what_ddp_refuses(options, error, message):
    with pytest.raises(error, match=message):
        parallel.DistributedDataParallel(layer(0), **options)


def test_batch_norm_has_torchs_layout():
    with pytest.raises(RefusedError, match="channels are dimension 1"):
        parallel.convert_syncbn_model(nn.BatchNorm1d(3), channel_last=True)
    with pytest.raises(RefusedError, match=r"fuse_relu=True.*nn\.ReLU follows"):
        parallel.SyncBatchNorm(3, fuse_relu=True)


def larc(order, level, overflow):
    """The weight after two steps of LARC around SGD, of which the first may overflow."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    if order == "before":
        optimizer = parallel.LARC(optimizer)
    if level is not None:
        model, optimizer = initialize(model, optimizer, opt_level=level, max_loss_scale=128.0)
    if order == "after":
        optimizer = parallel.LARC(optimizer)
    start = model.weight.detach().clone()
    for factor in (float("inf") if overflow else 1.0, 1.0):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum() * factor
        if level is None:
            loss.backward()
        else:
            backward(loss, optimizer)
        optimizer.step()
        assert factor == 1.0 or torch.equal(model.weight, start)
    return model.weight.detach().float()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_larc_before_and_after_initialize(order, level):
    exact = larc("before", None, False)
    assert torch.allclose(larc(order, level, False), exact, atol=2e-3)
    larc(order, level, True)
