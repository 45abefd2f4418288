"""apex.parallel on real ranks: gradients by each option, batch-norm over ranks, and amp under both kinds of DDP."""

from __future__ import annotations

import copy
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
from .test_apex_amp import digits


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


OPTIONS = {
    "plain": ({}, torch.float32, 1.5),
    "sum": ({"gradient_average": False}, torch.float32, 3.0),
    "predivided": ({"gradient_predivide_factor": 4.0}, torch.float32, 1.5),
    "predivided sum": ({"gradient_average": False, "gradient_predivide_factor": 4.0}, torch.float32, 0.75),
    "small buckets": ({"message_size": 1}, torch.float32, 1.5),
    "delayed": ({"delay_allreduce": True}, torch.float32, 1.5),
    "half": ({}, torch.float16, 1.5),
    "half, travels in fp32": ({"allreduce_always_fp32": True}, torch.float16, 1.5),
    "torch's second argument": ({"message_size": None}, torch.float32, 1.5),
}


@joined
def reduced(rank):
    weights = layer(0).weight.detach()
    for name, (how, dtype, expected) in OPTIONS.items():
        model = parallel.DistributedDataParallel(layer(rank, dtype), **how)
        model(torch.full((1, 2), rank + 1.0, dtype=dtype)).sum().backward()
        assert model.module.weight.grad.tolist() == [[expected] * 2] * 2, name
        assert torch.equal(model.module.weight.detach(), weights.to(dtype))
    for wide in (False, True):  # a sum that is no number in fp16, and a mean that is
        model = parallel.DistributedDataParallel(layer(rank, torch.float16), allreduce_always_fp32=wide)
        (model(torch.full((1, 2), 1.0, dtype=torch.float16)) * 4e4).sum().backward()
        assert model.module.weight.grad.isfinite().all().item() == wide


def test_gradients_by_option(ranks):
    ranks(reduced)


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
    unused = parallel.DistributedDataParallel(nn.ModuleList([layer(0), layer(1)]), delay_allreduce=True)
    unused.module.forward = unused.module[0].forward
    for _ in range(2):
        unused(x).sum().backward()
    assert unused.module[0].weight.grad[0, 0] == 3.0 and unused.module[1].weight.grad is None
    strict = parallel.DistributedDataParallel(nn.ModuleList([layer(0), layer(1)]))
    strict.module.forward = strict.module[0].forward
    strict(x).sum().backward()
    with pytest.raises(RuntimeError, match="pass delay_allreduce=True"):
        strict(x)
    held = weakref.ref(parallel.DistributedDataParallel(layer(0)))
    gc.collect()
    assert held() is None  # torch's reducer does not hold what it is for


def test_reduction_is_turned_off_and_on_and_waits_for_no_unused_parameter(ranks):
    ranks(turned_off_and_on)


@joined
def by_hand(rank):
    module = nn.Sequential(layer(rank), layer(rank).half())
    reducer = parallel.Reducer(module)
    module[0](torch.full((1, 2), rank + 1.0)).sum().backward()
    module[1](torch.full((1, 2), rank + 1.0).half()).sum().backward()
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


def test_reducer_and_groups(ranks):
    ranks(by_hand)


def norms():
    last = nn.Sequential(nn.BatchNorm1d(3, momentum=None))
    return nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, affine=True), last)


def normed(norm, x):
    """Outputs of a batch-norm, and gradients of its inputs."""
    x = x.clone().requires_grad_()
    out = norm(x)
    out.square().sum().backward()
    return out.detach(), x.grad


@joined
def over_ranks(rank):
    torch.manual_seed(0)
    x, z = torch.randn(6, 3, 4) * 2 + 5, torch.randn(6, 3, 4)
    mine = slice(0, 4) if rank == 0 else slice(4, 6)  # unequal batches
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-4)
    whole, plain = nn.BatchNorm1d(3), parallel.SyncBatchNorm(3)
    close(normed(plain, x[mine]), tuple(value[mine] for value in normed(whole, x)))
    close(plain.running_var, whole.running_var)
    last = parallel.SyncBatchNorm(3, channel_last=True, fuse_relu=True)
    relu = (nn.BatchNorm1d(3)(x) + z).relu().movedim(1, -1)
    close(last(x[mine].movedim(1, -1), z[mine].movedim(1, -1)), relu[mine])
    model, exact = norms(), norms()
    assert parallel.convert_syncbn_model(model) is model
    kinds = ["Sequential", "SyncBatchNorm", "InstanceNorm1d", "Sequential", "SyncBatchNorm"]
    assert [type(m).__name__ for m in model.modules()] == kinds
    close(model(x[mine]), exact(x)[mine])
    close(model[2][0].running_mean, exact[2][0].running_mean)


def test_batch_norm_is_over_all_samples_and_the_converter_leaves_instance_norm(ranks):
    ranks(over_ranks)


@joined
def trained(rank, level, kind):
    """K1 and K2 on two ranks, each with its half of the batches; the accuracy, and the weights."""
    torch.manual_seed(rank)
    model = parallel.convert_syncbn_model(
        nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)), None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if kind == "torch":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        model = parallel.DistributedDataParallel(model, delay_allreduce=kind == "delayed")
    x, y = (t.cpu() for t in digits())
    loss_fn = nn.CrossEntropyLoss()
    for _ in range(5):
        for i in range(0, 1500, 100):
            mine = slice(i + rank * 50, i + 50 + rank * 50)
            optimizer.zero_grad()
            loss = loss_fn(model(x[mine]), y[mine])
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    with pytest.raises(RuntimeError, match="Parallel wrappers should only be applied"):
        amp.initialize(model)
    return right, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("level", "kind"), [("O2", "apex"), ("O2", "torch"), ("O1", "delayed")])
def test_amp_trains_under_both_kinds_of_ddp(ranks, level, kind):
    (right, mine), (_, others) = ranks(trained, level, kind)
    assert right > 0.88
    for name, value in mine.items():
        assert value.dtype in (torch.float32, torch.int64)
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"shared_param": True}, RuntimeError, "pass delay_allreduce=True"),
        ({"gradient_average_split_factor": 2.0}, RuntimeError, "pass gradient_predivide_factor"),
        ({"retain_allreduce_buffers": True}, RefusedError, "both are torch's"),
        ({"gradient_predivide_factor": 0.0}, RuntimeError, "must be above 0"),
        ({"message_size": 0}, RuntimeError, "at least 1"),
    ],
)
def test_what_ddp_refuses(how, error, words):
    with pytest.raises(error, match=words):
        parallel.DistributedDataParallel(layer(0), **how)


def larc(order, level, overflow):
    """The weight after two steps of LARC around SGD, of which the first may overflow."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    if order == "before":
        optimizer = parallel.LARC(optimizer)
    if level is not None:
        how = {"verbosity": 0, "max_loss_scale": 128.0}
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, **how)
    if order == "after":
        optimizer = parallel.LARC(optimizer)
    start = model.weight.detach().clone()
    for i in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum() * (float("inf") if overflow and i == 0 else 1.0)
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        if overflow and i == 0:
            assert torch.equal(model.weight, start)
    return copy.deepcopy(model.weight.detach().float())


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_larc_before_and_after_initialize(order, level):
    exact = larc("before", None, False)
    assert torch.allclose(larc(order, level, False), exact, atol=2e-3)
    larc(order, level, True)
