"""Scripts written for Horovod, on real ranks.

What each call promises, in any order, and what it says when ranks disagree.
"""

from __future__ import annotations

import importlib
import inspect
import os
import time
import tomllib
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch import nn

import easymp.compat.horovod as hvd
from easymp.compat.horovod.engine import adasum

from ..test_announced import NO_MPI, by_mpirun

Average, Sum, Min, Max, Product, Adasum = hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Adasum
NAMES = tomllib.loads(Path(__file__).with_name("horovod_names.toml").read_text())


@contextmanager
def started(on=True, **init_arguments):
    """A run, or a rank of one without Horovod where it is not `on`."""
    if on:
        hvd.init(**init_arguments)
    try:
        yield (hvd.rank(), hvd.size()) if on else (0, 1)
    finally:
        hvd.shutdown()


@pytest.fixture(params=[1, 2])
def on(request, ranks):
    """Runs a function as a rank of one, and on two ranks."""
    return ranks if request.param == 2 else lambda function, *args: [function(*args)]


def refused(*cases):
    """Each call raises an error; its type and words begin with, or hold, those named."""
    for call, message in cases:
        with pytest.raises(Exception) as caught:
            call()
        assert message in f"{type(caught.value).__name__}: {caught.value}"


def parameters(value) -> str:
    """Names and defaults, in order, as in `NAMES`."""
    unannotated = [p.replace(annotation=p.empty) for p in inspect.signature(value).parameters.values()]
    text = str(inspect.Signature(unannotated))[1:-1]
    for name in ("global_process_set", "Compression.none", "Average"):
        text = text.replace(repr(attrgetter(name)(hvd)), name)
    return text


def test_names_and_parameters_are_those_of_horovod():
    for address, names in NAMES.items():
        module = importlib.import_module(f"easymp.compat.horovod.{address}")
        for name, expected in names.items():
            value = attrgetter(name)(module)
            assert parameters(value) == expected, (address, name)
            if address in ("mpi_ops", "functions", "optimizer") and "." not in name:
                assert getattr(hvd, name) is value
    refused(
        (lambda: hvd.elastic.run, "ImportError: horovod.torch.elastic is not part of easymp.compat: restart a run"),
        (lambda: hvd.alreduce, "did you mean 'allreduce'?"),
        (hvd.mpi_threads_supported, "ValueError: Horovod MPI is not enabled"),
    )  # fmt: skip
    assert [int(op) for op in (Average, Sum, Adasum, Min, Max, Product)] == list(range(6))
    assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.ddl_built() or hvd.ccl_built())
    assert hvd.gloo_built() and hvd.gloo_enabled() and isinstance(hvd.nccl_built(), int)
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)
    plain = "rank size local_rank local_size cross_rank cross_size is_homogeneous barrier join"
    calls = [getattr(hvd, name) for name in plain.split()]
    calls += [lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.broadcast_object(1)]
    calls += [lambda: hvd.add_process_set([0]), lambda: hvd.DistributedOptimizer(sgd)]
    refused(*((call, "Error: Horovod has not been initialized; use hvd.init()") for call in calls))
    assert issubclass(hvd.NotInitializedError, ValueError)


NUMBERS = "float16 float32 float64 int8 int16 int32 int64 bfloat16 uint8"


def reductions(rank, size):
    """Out of place, in every type; factors before and after, integers by way of doubles."""
    values = torch.tensor([[r + 1, 4, 3 - r] for r in range(size)])
    expected = {Sum: values.sum(0), Min: values.amin(0), Max: values.amax(0), Product: values.prod(0)}
    for dtype in (getattr(torch, name) for name in NUMBERS.split()):
        x = torch.tensor([rank + 1, 4, 3 - rank], dtype=dtype)
        mean = values.sum(0) / size
        for op, value in {**expected, Average: mean if dtype.is_floating_point else mean.trunc()}.items():
            result = hvd.allreduce(x, op=op)
            approximately = pytest.approx(value.tolist(), rel=1e-2 if op is Average else 0)
            assert result.dtype == dtype and result.tolist() == approximately, (dtype, op)
        assert x.tolist() == [rank + 1, 4, 3 - rank]
    scale, total = {"prescale_factor": 2.0, "postscale_factor": 0.25}, size * (size + 1) / 2
    x, big_integers = torch.full((2 * size,), rank + 1.0), torch.tensor([2**24 + 1, 3])
    with pytest.warns(DeprecationWarning, match="`average` has been replaced"):
        mean = hvd.allreduce(x, average=True)
    for result, value in [
        (mean, total / size),
        (hvd.allreduce(x, op=Sum, **scale), total / 2),
        (hvd.allreduce(x, **scale), total / size / 2),
        (hvd.allreduce_(x.clone(), op=Max, **scale), size / 2),
        (hvd.synchronize(hvd.allreduce_async(x, op=Sum, **scale)), total / 2),
        (hvd.grouped_allreduce([x, x], op=Sum, **scale)[1], total / 2),
        (hvd.grouped_allreduce_([x.clone()], op=Sum, **scale)[0], total / 2),
        (hvd.reducescatter(x, op=Sum, **scale), total / 2),
        (hvd.grouped_reducescatter([x, x], **scale)[1], total / size / 2),
    ]:
        assert result.tolist() == [pytest.approx(value)] * len(result)
    assert hvd.allreduce(big_integers, op=Max, prescale_factor=0.5, postscale_factor=2.0).tolist() == [2**24, 2]
    assert hvd.allreduce_(x, op=Sum) is x and x[0].item() == total
    compressed = hvd.allreduce(torch.tensor([1 / 3]), compression=hvd.Compression.fp16)
    assert compressed.dtype == torch.float32 and compressed.item() == pytest.approx(1 / 3, rel=1e-3)
    assert hvd.allreduce(torch.zeros(0, 3)).shape == (0, 3) and hvd.allreduce(torch.tensor(3.0)).item() == 3.0

    def entries(r):
        shape, values = (size + 2, 2), [[1.0, 2.0], [3.0, 4.0]]
        return torch.sparse_coo_tensor([[r, 2]], values, shape, check_invariants=True)

    for op, divisor in ((Sum, 1), (Average, size)):
        gathered = hvd.sparse_allreduce_async(entries(rank), "embedding", op)()
        dense = sum(entries(r).to_dense() for r in range(size)) / divisor
        assert gathered.is_sparse and torch.allclose(gathered.to_dense(), dense)


def movements(rank, size):
    expected_rows = [[r, r] for r in range(size) for _ in range(r + 1)]
    for dtype in (torch.int16, torch.bool, torch.bfloat16):
        gathered = hvd.allgather(torch.full((rank + 1, 2), rank, dtype=dtype))
        assert gathered.dtype == dtype and torch.equal(gathered, torch.tensor(expected_rows).to(dtype))
    assert hvd.broadcast(torch.tensor([rank == 0, True]), size - 1).tolist() == [size == 1, True]
    x = torch.full((2,), float(rank))
    assert hvd.broadcast_(x, 0) is x and x.tolist() == [0.0, 0.0]
    assert hvd.alltoall(torch.arange(size) + 10 * rank).tolist() == [10 * r + rank for r in range(size)]
    rows = torch.full((1 + size * (size - 1) // 2, 2), rank)  # the last one goes nowhere
    uneven, received_rows = hvd.alltoall(rows, splits=torch.arange(size, dtype=torch.int32))
    assert uneven.tolist() == [[r, r] for r in range(size) for _ in range(rank)]
    assert received_rows.tolist() == [rank] * size and received_rows.dtype == torch.int32
    part = hvd.reducescatter(torch.arange(2.0 * size + 1), op=Sum)
    assert torch.equal(part, size * torch.arange(2.0 * size + 1).tensor_split(size)[rank])
    assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert hvd.broadcast_object({"x": rank}, size - 1) == {"x": size - 1}
    hvd.barrier()


def handles(rank, size):
    """A group has one handle, and a tuple as result; a handle is waited for once."""
    x, y = torch.full((size,), float(rank)), torch.ones(1, 1)
    handle = hvd.grouped_allreduce_async([x, y], op=Sum, name="group")
    a, b = hvd.synchronize(handle)
    assert a.tolist() == [size * (size - 1) / 2] * size and b.item() == size
    assert hvd.synchronize(handle) is None
    refused((lambda: hvd.poll(handle), "was not created or has been cleared"))
    gathered = hvd.synchronize(hvd.grouped_allgather_async([x, y]))
    assert [len(t) for t in gathered] == [size * size, size]
    assert len(hvd.synchronize(hvd.grouped_reducescatter_async([x]))[0]) == 1
    output, received_rows = hvd.synchronize(hvd.alltoall_async(x))
    assert output.tolist() == [float(r) for r in range(size)] and received_rows.tolist() == [1] * size
    hvd.grouped_allreduce_([x, y], op=Sum)
    assert y.item() == size
    # Results are changed in place, under autograd too, and hold no more memory than their own.
    x = torch.ones(2, requires_grad=True)
    for result in (hvd.allreduce(x), hvd.grouped_allreduce([x, x])[1], hvd.broadcast(x, 0)):
        result.mul_(2)
    hvd.reducescatter(x.repeat(size)).mul_(2)
    big, small = (hvd.allreduce_async(torch.ones(n)) for n in (100_000, 1))
    hvd.synchronize(big)
    assert hvd.synchronize(small).untyped_storage().nbytes() == 4
    strided = torch.arange(6.0).view(2, 3).t()
    hvd.allreduce_(strided[::2], op=Sum)
    assert (strided / size)[::2].tolist() == [[0.0, 3.0], [2.0, 5.0]]


def out_of_order(rank, size):
    names = [f"t{i}" for i in range(20)]
    ordered_names, pending = names if rank == 0 else names[::-1], {}
    for name in ordered_names:
        pending[name] = hvd.allreduce_async_(torch.full((3,), float(name[1:])), name=name, op=Sum)
        time.sleep(0.001 * rank)
    while not hvd.poll(pending[ordered_names[0]]):
        time.sleep(0.005)
    values = [hvd.synchronize(pending[name])[0].item() for name in names]
    assert values == [float(i) * size for i in range(20)]

    sums = [hvd.allreduce(torch.tensor([1.0]), op=Sum).item() for i in range(3 - rank)]  # without names
    assert sums == [float(min(size, 3 - i)) for i in range(3 - rank)]
    for call in (lambda x: hvd.broadcast(x, 0), hvd.allgather) if rank == 0 and size > 1 else ():
        refused((lambda call=call: call(torch.ones(1)), "needs every rank, and rank 1 joined"))
    assert hvd.allgather_object(hvd.join()) in [[last] * size for last in range(size)]
    assert hvd.allreduce(torch.ones(1), op=Sum).item() == size


def every_kind():
    with started() as (rank, size):
        hvd.init()  # twice is nothing
        facts = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()
        assert facts == (rank, size, 0, 1, True)
        for check in (reductions, movements, handles, out_of_order):
            check(rank, size)
    hvd.shutdown()
    return rank, size, hvd.is_initialized()


def test_operations(on):
    results = on(every_kind)
    assert results == [(r, len(results), False) for r in range(len(results))]


SCALE = {"prescale_factor": 2.0, "postscale_factor": 3.0}
GRADIENTS = [  # a function of two numbers, and Horovod's gradient on two ranks, of which rank 1 weighs twice
    (hvd.allreduce, [1.5, 1.5]),
    (lambda x: hvd.allreduce(x, op=Sum), [3.0, 3.0]),
    (lambda x: hvd.allreduce(x, op=Sum, **SCALE), [18.0, 18.0]),
    (lambda x: hvd.grouped_allreduce([x, x * 2])[1], [3.0, 3.0]),
    (hvd.allgather, [1.5, 1.5]),
    (lambda x: hvd.grouped_allgather([x * 0, x])[1], [1.5, 1.5]),
    (lambda x: hvd.broadcast(x, 0), [1.5, 1.5], [0.0, 0.0]),
    (lambda x: hvd.reducescatter(x, op=Sum), [2.0, 4.0]),
    (hvd.reducescatter, [1.0, 2.0]),
    (lambda x: hvd.reducescatter(x, **SCALE), [6.0, 12.0]),
    (lambda x: hvd.grouped_reducescatter([x], op=Sum)[0], [2.0, 4.0]),
    (hvd.alltoall, [1.0, 2.0]),
    (lambda x: hvd.alltoall(x, [1, 1])[0], [1.0, 2.0]),
    (lambda x: hvd.allgather(x[: hvd.rank() + 1]), [1.5, 0.0], [1.5, 1.5]),  # of unlike lengths
]


def gradients(rank, _):
    for i, (function, *expected) in enumerate(GRADIENTS):
        x = torch.ones(2, requires_grad=True)
        (function(x) * (rank + 1)).sum().backward()
        assert x.grad.tolist() == expected[min(rank, len(expected) - 1)], i


def process_sets():
    """Process sets given to `init` and added later; rank 2 has no part in the first one."""
    pair_set, last = hvd.ProcessSet([1, 0]), hvd.ProcessSet([2])
    assert (pair_set.size(), pair_set.rank()) == (None, None)
    with started(process_sets=[pair_set]) as (rank, _):
        assert pair_set.ranks == [0, 1] and (pair_set.process_set_id, pair_set.size()) == (1, 2)
        assert hvd.global_process_set.ranks == [0, 1, 2]
        assert hvd.add_process_set(last) is last
        own_set, x = (last, torch.ones(2)) if rank == 2 else (pair_set, torch.full((2,), rank + 1.0))
        among = {"process_set": own_set}
        x.requires_grad_()
        # At the same time an operation of all ranks, and none of the other set's has to wait.
        everyone = hvd.allreduce_async(torch.ones(1), op=Sum, name="x")
        reduced = hvd.allreduce(x, op=Sum, name="x", **among)
        (reduced.sum() * (rank + 1)).backward()
        facts = [
            reduced.tolist(),
            x.grad.tolist(),
            hvd.allgather(x[:1], **among).tolist(),
            hvd.broadcast(x, own_set.ranks[-1], **among).tolist(),
            hvd.alltoall(x[: own_set.size()], **among).tolist(),
            hvd.reducescatter(torch.ones(2), op=Sum, **among).tolist(),
            hvd.grouped_allreduce([x * 2], **among)[0].tolist(),
            hvd.broadcast_object(rank, own_set.ranks[-1], **among),
            hvd.synchronize(everyone).item(),
        ]
        hvd.barrier(process_set=own_set)
        weight = nn.Parameter(torch.ones(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), process_set=pair_set)
        (weight * (rank + 1)).sum().backward()
        optimizer.step()
        facts.append(round(weight.item(), 4))
        foreign_set, part = pair_set if rank == 2 else last, [0, 1]
        refused(
            (lambda: hvd.allreduce(x, process_set=foreign_set), f"ValueError: Rank {rank} is not a member of the"),
            (foreign_set.rank, "ValueError: Process is not part of provided process set"),
            (lambda: hvd.broadcast(x, 2 - rank // 2, **among), "ValueError: broadcast received invalid root rank"),
            (lambda: hvd.add_process_set(part), "ValueError: Attempted to add a duplicate process set"),
            (lambda: hvd.add_process_set([rank]), "HorovodInternalError: add_process_set: the ranks pass diff"),
            (lambda: hvd.allreduce(x, op=Adasum, **among), "NotImplementedError: Adasum does not support"),
            (lambda: hvd.init(comm=part), "RefusedError: hvd.init(comm=[0, 1]): the launcher started 3 proc"),
        )  # fmt: skip
        stranger = hvd.ProcessSet([0, 1, 2])
        refused((lambda: hvd.allreduce(x, process_set=stranger), "does not exist, or has not been registered"))
    assert last.process_set_id is None
    return facts


def test_process_sets(ranks):
    pairs = [[3.0, 3.0], [3.0, 3.0], [1.0, 2.0], [2.0, 2.0], [1.0, 2.0], [2.0], [3.0, 3.0], 1, 3.0, 0.85]
    last = [[1.0, 1.0], [3.0, 3.0], [1.0], [1.0, 1.0], [1.0], [1.0, 1.0], [2.0, 2.0], 2, 3.0, 0.7]
    assert ranks(process_sets, processes=3) == [pairs, pairs, last]


def wrong_calls(rank, _):
    """What does not fit is an error on all ranks, and the others go on."""
    one, kind, differ = torch.ones(1), [torch.float32, torch.float64][rank], "the ranks' calls differ in"
    refused(  # on all ranks
        (lambda: hvd.allreduce(torch.ones(rank + 1), name="a"), f"a: {differ} shape: rank 0 has [1], rank 1 has [2]"),
        (lambda: hvd.allreduce(one.to(kind), name="b"), f"b: {differ} dtype: rank 0 has float32, rank 1 "),
        (lambda: hvd.reducescatter(torch.ones(2), name="c", prescale_factor=rank + 1.0), f"c: {differ} prescale"),
        (lambda: hvd.broadcast(one, rank, name="d"), f"broadcast.d: {differ} root: rank 0 has 0, rank 1 has 1"),
        (lambda: hvd.allgather(torch.ones(()), name="e"), "e: a scalar has no dimension 0: pass tensor[None]"),
        (lambda: hvd.allgather(torch.ones(1, rank + 1), name="f"), f"allgather.f: {differ} shape, beyond dimension 0"),
        (lambda: hvd.allreduce(one, op=[Sum, Max][rank], name="g"), f"Error: allreduce.g: {differ} op: rank 0"),
    )  # fmt: skip
    if rank == 0:
        handle = hvd.allreduce_async(one, name="twice")
        refused((lambda: hvd.allreduce_async(one, name="twice"), "ValueError: 'allreduce.twice' is in flight"))
    hvd.synchronize(handle if rank == 0 else hvd.allreduce_async(one, name="twice"))
    refused(
        (lambda: hvd.allreduce(one, average=True, op=Sum), "ValueError: The op parameter supersedes average"),
        (lambda: hvd.alltoall(torch.ones(3)), "splits [1, 1] do not divide 3 rows among 2 ranks"),
        (lambda: hvd.alltoall(torch.ones(3), splits=[1, 3]), "splits [1, 3] do not divide 3 rows among 2 ranks"),
        (lambda: hvd.alltoall(torch.ones(3), splits=torch.ones(2)), "ValueError: alltoall expects 1D splits of int32"),
        (lambda: hvd.alltoall(torch.arange(4), splits=[1.5, 1.5]), "TypeError"),
        (lambda: hvd.broadcast(one, 7), "ValueError: broadcast received invalid root rank 7"),
        (lambda: hvd.allreduce(torch.ones(2).to_sparse()), "pass tensor.to_dense()"),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), "does not support scalar inputs"),
        (lambda: hvd.reducescatter(one, op=Adasum), "ValueError: reducescatter: op="),
        (lambda: hvd.allreduce(torch.ones(1, dtype=torch.complex64)), "view_as_real"),
        (lambda: hvd.allreduce(1.5), "ValueError: 1.5 is a float: pass a tensor"),
        (lambda: hvd.grouped_allreduce_async([one, 1.5]), "ValueError: 1.5 is a float: pass a tensor"),
        (lambda: hvd.allreduce(one, process_set=0), "ValueError: process_set=0: pass an hvd.ProcessSet"),
        (lambda: hvd.ProcessSet([0, 0]), "ValueError: ProcessSet names a rank twice: [0, 0]"),
        (lambda: hvd.ProcessSet(3), "ValueError: ProcessSet(3): pass a list of ranks"),
    )  # fmt: skip
    assert hvd.grouped_allreduce([]) == []
    assert hvd.allreduce(one, op=Sum).item() == 2  # and it goes on


def one_rank_is_missing(reported):
    with started() as (rank, _):
        hvd.mpi_ops.running().world.timeout = 1.0
        if rank == 0:
            with pytest.raises(hvd.HorovodInternalError, match="lonely: not every rank asked for") as caught:
                hvd.allreduce(torch.ones(1), name="lonely")
            reported.touch()
            return str(caught.value)
        while not reported.exists():
            time.sleep(0.05)


def test_a_rank_that_does_not_ask_is_reported(ranks, tmp_path):
    assert "rank 1" in ranks(one_rank_is_missing, tmp_path / "reported")[0]


def one_rank_fails(failing_rank):
    """Rank `who` ends by an error, with an operation in flight, while the others wait for it."""
    try:
        with started() as (rank, _):
            handle = hvd.allreduce_async(torch.ones(1), name=f"of {rank == failing_rank}")
            if rank == failing_rank:
                raise KeyError("what it was")
            left = f"rank {failing_rank} has left (KeyError: 'what it was')"
            refused(
                (lambda: hvd.synchronize(handle), f"HorovodInternalError: allreduce.of False: {left}"),
                (lambda: hvd.allreduce(torch.ones(1), name="later"), f"InternalError: allreduce.later: {left}"),
            )  # fmt: skip
    except KeyError:
        assert not hvd.is_initialized()


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_fails_is_heard_of_at_once(ranks, failing_rank):
    ranks(one_rank_fails, failing_rank, processes=3)


def forked(_, size):
    """A child that ends is not this rank: it speaks over its parent's connections."""
    world = hvd.mpi_ops.running().world
    child = os.fork()
    if not child:
        hvd.shutdown()
        world.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert hvd.allreduce(torch.ones(1), op=Sum).item() == size and "rank 1" in world.watch.report()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(net, rows, step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 4, generator=generator), torch.randn(12, 2, generator=generator)
    return ((net(x[rows]) - y[rows]) ** 2).mean()


def close(values, expected, rtol=1e-5, atol=1e-6):
    for a, b in zip(values, expected, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=rtol, atol=atol)


def trained(kind, options, wrapper_options=None, clip=None, passes=1):
    """Three steps on all ranks together; by one process without Horovod where `how` is None."""
    with started(wrapper_options is not None) as (rank, size):
        net = model()
        with torch.no_grad():
            for p in net.parameters():
                p.add_(rank)
        optimizer = kind(net.parameters(), **options)
        if wrapper_options is not None:
            hvd.broadcast_parameters(net.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            wrapper_options = {"backward_passes_per_step": passes, **wrapper_options}
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), **wrapper_options)
        assert isinstance(optimizer, kind)
        rows = 12 // size // passes
        for step in range(3):
            for i in range(rank * passes, (rank + 1) * passes):
                (loss_of(net, slice(i * rows, (i + 1) * rows), step) / passes).backward()
            if clip is not None:
                if wrapper_options is not None:
                    optimizer.synchronize()
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            with nullcontext() if wrapper_options is None or clip is None else optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        return [p.tolist() for p in net.parameters()]


KINDS = {"sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), "adamw": (torch.optim.AdamW, {"lr": 0.01})}


@pytest.mark.parametrize(
    ("kind", "wrapper_options", "clip", "passes"),
    [
        ("sgd", {}, None, 1),
        ("adamw", {}, 0.1, 1),
        ("sgd", {"gradient_predivide_factor": 2.0}, None, 2),
        ("sgd", {"compression": hvd.Compression.fp16}, 0.5, 1),
    ],
)
def test_it_trains_as_one_process_on_all_data(on, kind, wrapper_options, clip, passes):
    expected = trained(*KINDS[kind], clip=clip)
    for parameters_of_rank in on(trained, *KINDS[kind], wrapper_options, clip, passes):
        close(parameters_of_rank, expected, *((1e-2, 1e-3) if wrapper_options else (1e-5, 1e-6)))


def misuse(*_):
    """Told as Horovod tells it."""
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    named_parameters, wrap = list(net.named_parameters()), hvd.DistributedOptimizer
    refused(
        (lambda: wrap(net), "ValueError: DistributedOptimizer takes an optimizer, not a Sequential"),
        (lambda: wrap(sgd, named_parameters, compression="fp16"), "ValueError: compression='fp16': pass hvd.Comp"),
        (lambda: wrap(sgd, [*named_parameters, named_parameters[0]]), "must be unique. Found duplicates: 0.weight"),
        (lambda: wrap(sgd, named_parameters[1:]), "one or more model parameters were not named (1 of them)"),
        (lambda: wrap(sgd, net.parameters()), "should be a sequence of tuples"),
        (lambda: wrap(sgd, named_parameters, op=Max), "ValueError: op supports only hvd.Average, hvd.Sum and hvd"),
        (lambda: wrap(sgd, op=Sum, gradient_predivide_factor=2.0), "predivide_factor not supported with"),
        (lambda: wrap(sgd, backward_passes_per_step=0), "backward_passes_per_step must be > 0"),
        (lambda: wrap(sgd, groups=[[named_parameters[0][1]] * 2]), "ValueError: A parameter can only appear once in"),
    )
    optimizer = wrap(sgd, named_parameters)
    loss_of(net, slice(None), 0).backward()
    refused(
        (lambda: wrap(optimizer), "pass the optimizer that it was made of"),
        (lambda: loss_of(net, slice(None), 0).backward(), "AssertionError: Gradients of 2.bias were computed"),
        (optimizer.zero_grad, "AssertionError: optimizer.zero_grad() was called after loss.backward()"),
    )  # fmt: skip
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"without optimizer\.skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()


def around_it(rank, _):
    """Schedules made before, states loaded, parameters added, optimizers made anew: what scripts do around it."""
    net, head = model(), nn.Linear(2, 1)
    only_of_rank_0 = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([*net.parameters(), only_of_rank_0], lr=1.0 + rank, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(sgd)
    hvd.broadcast_parameters(net.state_dict(), 0)
    hvd.broadcast_parameters(head.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    schedule.step()  # of the rates that came from rank 0
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    optimizer.load_state_dict(optimizer.state_dict())
    schedule.step()
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    loss = loss_of(net, slice(rank, rank + 4), 0) + head(torch.ones(1, 2) * rank).sum()
    (loss + (only_of_rank_0.sum() if rank == 0 else 0)).backward()
    optimizer.step()
    flat_weights = torch.cat([p.detach().reshape(-1) for p in [*net.parameters(), *head.parameters()]])
    assert bool((hvd.allgather(flat_weights[None]) == hvd.broadcast(flat_weights, 0)).all())
    assert (optimizer.param_groups[0]["lr"], steps, only_of_rank_0.tolist()) == (0.25, [1], [0.875, 0.875])
    for _ in range(2):  # each one in place of the last
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters())
        for _ in range(2):
            loss_of(net, slice(None), 0).backward()
            optimizer.step()
            optimizer.zero_grad()


def adasum_of_steps(rank, _):
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0])
    expected = pytest.approx(((1 - 1 / 2) * a + (1 - 1 / 10) * b).tolist())
    p, gradient = nn.Parameter(torch.zeros(2)), [a, b][rank]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=Adasum)
    (-p * gradient).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert p.tolist() == expected == hvd.allreduce(gradient, op=Adasum).tolist()
    assert adasum([a, a, a, a]).tolist() == pytest.approx(a.tolist())  # equal ones are averaged
    assert adasum([a, torch.tensor([0.0, 3.0])]).tolist() == [1.0, 3.0]  # orthogonal ones are added
    assert adasum([a, 0 * a]).tolist() == a.tolist()


def optimizer_states(rank, _):
    """They travel, and weights stay."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * (rank + 1), weight_decay=0.1)
    if rank == 0:
        loss_of(net, slice(None), 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [p.detach().clone() for p in net.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    values = optimizer.state_dict()["state"].values()
    assert [float(value["step"]) for value in values] == [1.0] * 4
    facts = optimizer.param_groups[0]["lr"], [float(value["exp_avg"].sum()) for value in values]
    assert facts[0] == 0.1 and hvd.allgather_object(facts) == [facts] * 2


def one_after_another():
    for program in (gradients, wrong_calls, misuse, around_it, adasum_of_steps, optimizer_states, forked):
        with started() as (rank, size):
            program(rank, size)


def test_calls_and_optimizers_on_two_ranks(ranks):
    ranks(one_after_another)


def by_closure(wrap=True):
    with started(wrap) as (rank, size):
        net = model()
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())

        def closure():
            optimizer.zero_grad()
            loss = loss_of(net, slice(rank * 12 // size, (rank + 1) * 12 // size), 0)
            loss.backward()
            return loss

        first, second = (optimizer.step(closure).item() for _ in range(2))
        assert second < first
        return [p.tolist() for p in net.parameters()]


def embedding(dense, wrap=True):
    """Sparse gradients, of rows that differ between the ranks, and an optimizer that takes no others."""
    with started(wrap) as (rank, _):
        torch.manual_seed(0)
        table = nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=dense)
        for step in range(2):
            rows = [[0, 2], [2, 4 + step]]
            for r in [rank] if wrap else [0, 1]:
                ((table(torch.tensor(rows[r])) ** 2).sum() / (1 if wrap else 2)).backward()
            optimizer.step()
            assert table.weight.grad.is_sparse
            optimizer.zero_grad()
        return table.weight.tolist()


def test_closures_are_reduced_call_by_call(on):
    for weights in on(by_closure):
        close(weights, by_closure(wrap=False), 1e-2, 1e-3)


def test_sparse_gradients(ranks):
    for weights in ranks(embedding, False):
        close(weights, embedding(False, wrap=False))
    # Rows without an entry on any rank have zeros in a dense gradient, which SparseAdam steps on.
    first, second = ranks(embedding, True)
    assert first == second


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_mpirun_starts_a_horovod_script():
    program = """
import torch, easymp.compat.horovod as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), total.item())
hvd.shutdown()
"""
    completed = by_mpirun(program)
    assert completed.returncode == 0, completed.stderr
    assert sorted(completed.stdout.splitlines()) == ["0 2 0 2 3.0", "1 2 1 2 3.0"]
