"""Scripts written for Horovod, on real ranks: what each call promises, in any order, and what it says when ranks disagree."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

import easymp.compat.horovod as hvd
from easymp.compat.horovod.execution import adasum, pair

Average, Sum, Min, Max, Product, Adasum = hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Adasum


@contextmanager
def started():
    hvd.init()
    try:
        yield hvd.rank(), hvd.size()
    finally:
        hvd.shutdown()


def alone(function, *args):
    """On this process, as on a rank of one."""
    return [function(*args)]


@pytest.fixture(params=[1, 2, 3])
def on(request, ranks):
    if request.param == 1:
        return alone
    return lambda function, *args: ranks(function, *args, processes=request.param)


@pytest.mark.parametrize(
    "call",
    [
        hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.barrier, hvd.join,
        lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.broadcast_object(1),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)),
    ],
)  # fmt: skip
def test_a_call_before_init_is_a_value_error(call):
    with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
        call()


def who():
    with started() as (rank, size):
        hvd.init()  # twice is nothing
        facts = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()
    hvd.shutdown()
    return rank, size, facts, hvd.is_initialized()


def test_who_this_process_is(on):
    said = on(who)
    size = len(said)
    assert said == [(r, size, (r, size, 0, 1, True), False) for r in range(size)]


DTYPES = [getattr(torch, f"float{n}") for n in (16, 32, 64)] + [
    getattr(torch, f"int{n}") for n in (8, 16, 32, 64)
]
DTYPES += [torch.bfloat16, torch.uint8]


def reductions():
    with started() as (rank, size):
        values = torch.tensor([[r + 1, 4, 3 - r] for r in range(size)])
        wanted = {Sum: values.sum(0), Min: values.amin(0), Max: values.amax(0), Product: values.prod(0)}
        for dtype in DTYPES:
            x = torch.tensor([rank + 1, 4, 3 - rank], dtype=dtype)
            mean = values.sum(0) / size
            for op, value in {**wanted, Average: mean if dtype.is_floating_point else mean.trunc()}.items():
                out = hvd.allreduce(x, op=op)
                assert out.dtype == dtype
                assert out.tolist() == pytest.approx(value.tolist(), rel=1e-2 if op is Average else 0), (
                    dtype,
                    op,
                )
            assert x.tolist() == [rank + 1, 4, 3 - rank]  # out of place
        total = size * (size + 1) / 2
        y = torch.tensor([rank + 1.0])
        assert hvd.allreduce(y, op=Sum, prescale_factor=2.0, postscale_factor=0.5).item() == total
        assert hvd.allreduce(y, average=True).item() == pytest.approx(total / size)
        assert hvd.allreduce(y, average=False).item() == total
        assert hvd.allreduce_(y, op=Sum) is y and y.item() == total
        compressed = hvd.allreduce(torch.tensor([1 / 3]), compression=hvd.Compression.fp16)
        assert compressed.dtype == torch.float32 and compressed.item() == pytest.approx(1 / 3, rel=1e-3)
        grouped = hvd.grouped_allreduce([torch.ones(2) * rank, torch.ones(1, 1)], op=Sum)
        assert [t.tolist() for t in grouped] == [[total - size] * 2, [[size]]]
        assert hvd.allreduce(torch.zeros(0, 3)).shape == (0, 3)


def test_reductions(on):
    on(reductions)


def movements():
    with started() as (rank, size):
        whole = [[r, r] for r in range(size) for _ in range(r + 1)]
        for dtype in (torch.int16, torch.bool, torch.bfloat16):
            gathered = hvd.allgather(torch.full((rank + 1, 2), rank, dtype=dtype))
            assert gathered.dtype == dtype and torch.equal(gathered, torch.tensor(whole).to(dtype))
        assert hvd.broadcast(torch.tensor([rank == 0, True]), size - 1).tolist() == [size == 1, True]
        x = torch.full((2,), float(rank))
        assert hvd.broadcast_(x, 0) is x and x.tolist() == [0.0, 0.0]
        assert hvd.alltoall(torch.arange(size) + 10 * rank).tolist() == [10 * r + rank for r in range(size)]
        uneven, rows = hvd.alltoall(torch.full((size * (size - 1) // 2, 2), rank), splits=list(range(size)))
        assert uneven.tolist() == [[r, r] for r in range(size) for _ in range(rank)]
        assert rows.tolist() == [rank] * size
        part = hvd.reducescatter(torch.arange(2.0 * size + 1), op=Sum)
        assert torch.equal(part, size * torch.arange(2.0 * size + 1).tensor_split(size)[rank])
        assert hvd.reducescatter(torch.full((size,), float(rank))).tolist() == [(size - 1) / 2]
        assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
        assert hvd.broadcast_object({"x": rank}, size - 1) == {"x": size - 1}
        hvd.barrier()


def test_movements(on):
    on(movements)


def gradients():
    with started() as (rank, size):
        x = torch.tensor([1.0, 2.0], requires_grad=True)

        def grad(out):
            (found,) = torch.autograd.grad((out * (rank + 1)).sum(), x)
            return found.tolist()

        return [
            grad(hvd.allreduce(x)),
            grad(hvd.allreduce(x, op=Sum)),
            grad(hvd.allgather(x)),
            grad(hvd.broadcast(x, size - 1)),
            grad(hvd.alltoall(x.repeat(size))),
            grad(hvd.reducescatter(x.repeat(size), op=Sum)),
            grad(hvd.grouped_allreduce([x, x * 2])[1]),
            grad(hvd.reducescatter(x.repeat(size))),
            grad(hvd.grouped_allgather([x * 0, x[: rank + 1]])[1]),
            grad(hvd.grouped_reducescatter([x.repeat(size)], op=Sum)[0]),
        ]


def test_gradients_flow_through(on):
    said = on(gradients)
    size = len(said)
    total = size * (size + 1) / 2
    for rank, found in enumerate(said):
        assert found == [
            [pytest.approx(total / size)] * 2,
            [total] * 2,
            [pytest.approx(total / size)] * 2,
            [pytest.approx(total / size if rank == size - 1 else 0.0)] * 2,
            [total] * 2,
            [total * size] * 2,
            [pytest.approx(2 * total / size)] * 2,
            [total] * 2,
            [pytest.approx(total / size), pytest.approx(total / size if rank else 0.0)],
            [total * size] * 2,
        ]


def out_of_order():
    with started() as (rank, size):
        names = [f"t{i}" for i in range(20)]
        mine = names if rank == 0 else names[::-1] if rank == 1 else names[7:] + names[:7]
        handles = {}
        for name in mine:
            handles[name] = hvd.allreduce_async_(torch.full((3,), float(name[1:])), name=name, op=Sum)
            time.sleep(0.001 * rank)
        first = handles[mine[0]]
        deadline = time.monotonic() + 60
        while not hvd.poll(first) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert hvd.poll(first)
        values = [hvd.synchronize(handles[name])[0].item() for name in names]
        with pytest.raises(ValueError, match="was not created or has been cleared"):
            hvd.synchronize(first)
        return values == [float(i) * size for i in range(20)]


def test_ranks_may_ask_in_different_orders(on):
    assert all(on(out_of_order))


def refused(*calls):
    """What each call raises, as "type: words"."""
    said = []
    for call in calls:
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")
    return said


def wrong_calls():
    one = torch.ones(1)
    with started() as (rank, _):
        said = refused(
            lambda: hvd.allreduce(torch.ones(rank + 1), name="a"),
            lambda: hvd.allreduce(torch.ones(1, dtype=[torch.float32, torch.float64][rank]), name="b"),
            lambda: hvd.allreduce(one, name="c") if rank else hvd.broadcast(one, 0, name="c"),
            lambda: hvd.broadcast(one, rank, name="d"),
            lambda: hvd.broadcast(one, 7, name="e"),
            lambda: hvd.allgather(torch.ones(1, rank + 1), name="f"),
            lambda: hvd.allreduce(one, op=[Sum, Max][rank], name="g"),
        )
        handle = hvd.allreduce_async(one, name="twice") if rank == 0 else None
        said += refused(lambda: hvd.allreduce_async(one, name="twice") if rank == 0 else None)
        hvd.synchronize(handle) if handle is not None else hvd.allreduce(one, name="twice")
        said += refused(
            lambda: hvd.allreduce(one, average=True, op=Sum),
            lambda: hvd.alltoall(torch.ones(3)),
            lambda: hvd.alltoall(torch.ones(3), splits=[1, 1]),
            lambda: hvd.allgather(torch.ones(())),
            lambda: hvd.allreduce(torch.ones(2).to_sparse()),
            lambda: hvd.reducescatter(torch.tensor(1.0)),
            lambda: hvd.allreduce(torch.ones(1, dtype=torch.complex64)),
        )
        assert hvd.allreduce(one, op=Sum).item() == 2  # and it goes on
    return said


def test_what_does_not_fit_is_an_error_on_all_ranks_and_the_others_go_on(ranks):
    zero, one = ranks(wrong_calls)
    differ = [
        "a: the ranks' calls differ in shape: rank 0 has (1,), rank 1 has (2,)",
        "b: the ranks' calls differ in dtype: rank 0 has float32, rank 1 has float64",
        "c: the ranks' calls differ: rank 0 has broadcast, rank 1 has allreduce",
        "d: the ranks' calls differ in root: rank 0 has 0, rank 1 has 1",
        "e: root rank 7 is not one of 0 … 1",
        "f: the ranks' calls differ in shape, beyond dimension 0: rank 0 has (1, 1), rank 1 has (1, 2)",
        "g: the ranks' calls differ in op: rank 0 has sum, rank 1 has max",
    ]
    assert zero[:7] == one[:7] == [f"HorovodInternalError: {words}" for words in differ]
    own = ["ValueError: 'twice' is in flight", "ValueError: The op parameter supersedes average"]
    own += ["dimension 0 does not divide", "splits [1, 1] do not divide the 3 rows among 2 ranks"]
    own += ["allgather of a scalar", "pass tensor.to_dense()", "reducescatter of a scalar", "view_as_real"]
    for said, words in zip(zero[7:], own, strict=True):
        assert words in said


def one_rank_is_missing(reported):
    with started() as (rank, _):
        hvd.elastic.engine.running().world.timeout = 1.0
        if rank == 0:
            with pytest.raises(hvd.HorovodInternalError, match="lonely: not every rank asked for") as caught:
                hvd.allreduce(torch.ones(1), name="lonely")
            reported.touch()
            return str(caught.value)
        while not reported.exists():
            time.sleep(0.05)
        return ""


def test_a_rank_that_does_not_ask_is_reported(ranks, tmp_path):
    assert "rank 1" in ranks(one_rank_is_missing, tmp_path / "reported")[0]


def one_rank_fails(who):
    """Rank `who` ends by an error, with an operation in flight, while the others wait for it."""
    said = []
    try:
        with started() as (rank, _):
            handle = hvd.allreduce_async(torch.ones(1), name=f"of {rank == who}")
            if rank == who:
                raise KeyError("what it was")
            for name in (None, "asked for later"):
                with pytest.raises(hvd.HorovodInternalError) as caught:
                    hvd.synchronize(handle) if name is None else hvd.allreduce(torch.ones(1), name=name)
                said.append(str(caught.value))
    except KeyError:
        assert not hvd.is_initialized()
    return said


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_is_heard_of_at_once(ranks, who):
    for rank, said in enumerate(ranks(one_rank_fails, who, processes=3)):
        if rank != who:
            for name, words in zip(("of False", "asked for later"), said, strict=True):
                assert words.startswith(f"{name}: rank {who} has left (KeyError: 'what it was')")


def forked():
    """A child that ends leaves nothing: it speaks over its parent's connections."""
    with started() as (_, size):
        world = hvd.elastic.engine.running().world
        child = os.fork()
        if not child:
            hvd.shutdown()
            world.close()
            os._exit(0)
        os.waitpid(child, 0)
        return hvd.allreduce(torch.ones(1), op=Sum).item() == size and "rank 1" in world.watch.report()


def test_a_forked_child_that_ends_is_not_this_rank(ranks):
    assert ranks(forked) == [True, True]


def results():
    """Results are changed in place, under autograd too, and hold no more memory than their own."""
    with started() as (_, size):
        x = torch.ones(2, requires_grad=True)
        for out in (hvd.allreduce(x), hvd.grouped_allreduce([x, x])[1], hvd.broadcast(x, 0)):
            out.mul_(2)
        hvd.reducescatter(x.repeat(size)).mul_(2)
        big, small = (hvd.allreduce_async(torch.ones(n)) for n in (100_000, 1))
        hvd.synchronize(big)
        strided = torch.arange(6.0).view(2, 3).t()
        hvd.allreduce_(strided[::2], op=Sum)
        return (
            hvd.synchronize(small).untyped_storage().nbytes(),
            (strided / size).tolist(),
            hvd.allreduce(torch.tensor(3.0)).item(),
        )


def test_results_are_the_callers_own(on):
    for held, strided, scalar in on(results):
        assert held == 4
        assert strided[0] == [0.0, 3.0] and strided[2] == [2.0, 5.0]
        assert scalar == 3.0


def uneven():
    with started() as (rank, size):
        sums = [hvd.allreduce(torch.tensor([1.0]), name=f"step{i}", op=Sum).item() for i in range(3 - rank)]
        if rank == 0 and size > 1:
            with pytest.raises(hvd.HorovodInternalError, match=r"broadcast needs every rank, and rank"):
                hvd.broadcast(torch.ones(1), 0, name="b")
        last = hvd.join()
        again = hvd.allreduce(torch.ones(1), op=Sum).item()
        return sums, last, again == size


def test_join_lets_ranks_run_out_of_data(on):
    said = on(uneven)
    size = len(said)
    for rank, (sums, last, again) in enumerate(said):
        assert sums == [float(min(size, 3 - i)) for i in range(3 - rank)]
        assert again
        assert last in range(size)
    assert len({last for _, last, _ in said}) == 1


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(step, rows=12):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


def loss_of(net, rows, step):
    x, y = data(step)
    return ((net(x[rows]) - y[rows]) ** 2).mean()


def close(found, wanted, rtol=1e-5, atol=1e-6):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=rtol, atol=atol)


def by_hand(kind, options, steps=3, clip=None):
    net = model()
    optimizer = kind(net.parameters(), **options)
    for step in range(steps):
        loss_of(net, slice(None), step).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [p.tolist() for p in net.parameters()]


def distributed(kind, options, how, clip=None, passes=1):
    with started() as (rank, size):
        net = model()
        if rank:
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(rank)
        optimizer = kind(net.parameters(), **options)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=net.named_parameters(), backward_passes_per_step=passes, **how
        )
        assert isinstance(optimizer, kind)
        share = 12 // size
        for step in range(3):
            for i in range(passes):
                begin, rows = rank * share, share // passes
                (loss_of(net, slice(begin + i * rows, begin + (i + 1) * rows), step) / passes).backward()
            if clip is not None:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(net.parameters(), clip)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        return [p.tolist() for p in net.parameters()]


KINDS = {"sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), "adamw": (torch.optim.AdamW, {"lr": 0.01})}


@pytest.mark.parametrize(
    ("kind", "how", "clip", "passes"),
    [
        ("sgd", {}, None, 1),
        ("adamw", {}, 0.1, 1),
        ("sgd", {"gradient_predivide_factor": 2.0}, None, 2),
        ("sgd", {"compression": hvd.Compression.fp16}, 0.5, 1),
    ],
)
def test_it_trains_as_one_process_on_all_data(on, kind, how, clip, passes):
    wanted = by_hand(*KINDS[kind], clip=clip)
    for found in on(distributed, *KINDS[kind], how, clip, passes):
        close(found, wanted, *((1e-2, 1e-3) if how else (1e-5, 1e-6)))


def misuse():
    with started():
        net = model()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        named = list(net.named_parameters())
        said = refused(
            lambda: hvd.DistributedOptimizer(sgd, [*named, named[0]]),
            lambda: hvd.DistributedOptimizer(sgd, named[1:]),
            lambda: hvd.DistributedOptimizer(sgd, net.parameters()),
            lambda: hvd.DistributedOptimizer(sgd, named, op=Max),
            lambda: hvd.DistributedOptimizer(sgd, named, op=Sum, gradient_predivide_factor=2.0),
        )
        optimizer = hvd.DistributedOptimizer(sgd, named)
        loss_of(net, slice(None), 0).backward()
        said += refused(lambda: loss_of(net, slice(None), 0).backward(), optimizer.zero_grad)
        optimizer.synchronize()
        with pytest.warns(UserWarning, match=r"without optimizer\.skip_synchronize"):
            optimizer.step()
        optimizer.zero_grad()
    return said


def test_misuse_is_told_as_horovod_tells_it(ranks):
    wanted = [
        "ValueError: Parameter names in named_parameters must be unique. Found duplicates: 0.weight",
        "one or more model parameters were not named (1 of them)",
        "should be a sequence of tuples",
        "ValueError: op supports only hvd.Average, hvd.Sum and hvd.Adasum",
        "ValueError: gradient_predivide_factor not supported with op != Average",
        "got a gradient again before step() or synchronize(): for accumulation pass backward_passes_per_step=2",
        "AssertionError: optimizer.zero_grad() was called after loss.backward()",
    ]
    for said in ranks(misuse):
        for found, words in zip(said, wanted, strict=True):
            assert words in found


def of_one_rank_only():
    """A parameter that only rank 0 uses; and a scheduler made before."""
    with started() as (rank, _):
        used, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([used, other], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer)
        for _ in range(2):
            (used.sum() + (other.sum() if rank == 0 else 0)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return used.tolist(), other.tolist(), optimizer.param_groups[0]["lr"]


def test_a_parameter_without_a_gradient_here_takes_part(ranks):
    for used, other, rate in ranks(of_one_rank_only):
        assert (used, other, rate) == ([-0.5, -0.5], [0.25, 0.25], 0.25)


def alike(parameters):
    mine = torch.cat([p.detach().reshape(-1) for p in parameters])
    return bool((hvd.allgather(mine[None]) == hvd.broadcast(mine, 0)).all())


def around_it():
    """Schedules made before, states loaded, parameters added, optimizers made anew: what scripts do around it."""
    with started() as (rank, size):
        net, more = model(), nn.Linear(2, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0 + rank, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters())
        hvd.broadcast_parameters(net.state_dict(), 0)
        hvd.broadcast_parameters(more.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        schedule.step()  # of the rates that came from rank 0
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        optimizer.load_state_dict(optimizer.state_dict())
        schedule.step()
        optimizer.add_param_group({"params": more.parameters(), "lr": 0.5})
        (loss_of(net, slice(rank, rank + 4), 0) + more(torch.ones(1, 2) * rank).sum()).backward()
        optimizer.step()
        facts = optimizer.param_groups[0]["lr"], len(steps), alike([*net.parameters(), *more.parameters()])
        with pytest.raises(ValueError, match="pass the optimizer that it was made of"):
            hvd.DistributedOptimizer(optimizer)
        for _ in range(2):  # each one in place of the last
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
            )
            for _ in range(2):
                loss_of(net, slice(None), 0).backward()
                optimizer.step()
                optimizer.zero_grad()
        return facts, size


def test_schedules_states_and_groups_around_it(ranks):
    for (rate, steps, same), _ in ranks(around_it):
        assert (rate, steps, same) == (0.25, 1, True)


def by_closure(wrap=True):
    with started() if wrap else nullcontext((0, 1)) as (rank, size):
        net = model()
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())

        def closure():
            optimizer.zero_grad()
            loss = loss_of(net, slice(rank * 12 // size, (rank + 1) * 12 // size), 0)
            loss.backward()
            return loss

        first, then = (optimizer.step(closure).item() for _ in range(2))
        return first, then, [p.tolist() for p in net.parameters()]


def test_closures_are_reduced_call_by_call(on):
    *_, wanted = by_closure(wrap=False)
    for first, then, found in on(by_closure):
        assert then < first
        close(found, wanted, 1e-2, 1e-3)


def by_adasum():
    with started() as (rank, _):
        p = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=Adasum)
        (p * torch.tensor([[-1.0, 0.0], [-1.0, -2.0]][rank])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        direct = hvd.allreduce(torch.tensor([[1.0, 0.0], [1.0, 2.0]][rank]), op=Adasum)
        return p.tolist(), direct.tolist()


def test_adasum(ranks):
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0])
    wanted = ((1 - 1 / 2) * a + (1 - 1 / 10) * b).tolist()
    assert pair(a, b).tolist() == pytest.approx(wanted)
    assert adasum([a, a, a]).tolist() == pytest.approx(a.tolist())  # equal ones are averaged
    assert pair(a, torch.tensor([0.0, 3.0])).tolist() == [1.0, 3.0]  # orthogonal ones are added
    assert pair(a, 0 * a).tolist() == a.tolist()
    for stepped, direct in ranks(by_adasum):
        assert stepped == pytest.approx(wanted)
        assert direct == pytest.approx(wanted)


def states():
    with started() as (rank, _):
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * (rank + 1), weight_decay=0.1)
        if rank == 0:
            loss_of(net, slice(None), 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = [p.detach().clone() for p in net.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        moved = any(not torch.equal(a, b) for a, b in zip(before, net.parameters()))
        state = optimizer.state_dict()
        sums = [float(value["exp_avg"].sum()) for value in state["state"].values()]
        return (
            moved,
            state["param_groups"][0]["lr"],
            [float(v["step"]) for v in state["state"].values()],
            sums,
        )


def test_optimizer_states_travel_and_weights_stay(ranks):
    zero, one = ranks(states)
    assert zero == one
    assert zero[:3] == (False, 0.1, [1.0] * 4)


def elastic_run(folder, fail_at):
    """Steps that fail once on all ranks; the batches that counted."""
    with started() as (rank, _):
        net = model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
        )
        sampler = hvd.elastic.ElasticSampler(range(12), shuffle=True, seed=3)
        state = hvd.elastic.TorchState(
            net, optimizer, project_dir=folder, sampler=sampler, step=0, failures=0
        )
        resets = []
        state.register_reset_callbacks([lambda: resets.append(1)])
        seen = []

        @hvd.elastic.run
        def train(state):
            while state.step < 4:
                loss_of(net, slice(None), state.step).backward()
                if state.step == fail_at and not resets:  # with gradients in flight
                    hvd.allreduce(torch.ones(rank + 1), name="bad")
                optimizer.step()
                optimizer.zero_grad()
                seen.append(sampler.indices[0] if sampler.indices else None)
                sampler.record_batch(0, 1)
                sampler.reset()
                state.step += 1
                if state.step % 2 == 0:
                    state.commit()
            return state.step

        done = train(state)
        return done, len(resets), [p.tolist() for p in net.parameters()], seen


def test_a_failed_operation_goes_back_to_the_last_commit(ranks, tmp_path):
    wanted = by_hand(torch.optim.SGD, {"lr": 0.1}, steps=4)
    for done, resets, found, _ in ranks(elastic_run, str(tmp_path / "run"), 3):
        assert (done, resets) == (4, 1)
        close(found, wanted)
    assert os.listdir(tmp_path / "run") == ["elastic-state.safetensors"]
    # Started again, it is where it was committed: nothing is left to do.
    for done, _, found, seen in ranks(elastic_run, str(tmp_path / "run"), -1):
        assert (done, seen) == (4, [])
        close(found, wanted)


def samples_left(state):
    with started():
        sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
        sampler.load_state_dict(state)
        return list(sampler)


def test_the_sampler_gives_what_is_left(ranks):
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    assert list(sampler) == list(range(10))
    sampler.record_batch(1, 3)
    assert sampler.state_dict() == {"epoch": 0, "processed_indices": [3, 4, 5]}
    parts = ranks(samples_left, sampler.state_dict(), processes=3)
    assert [len(part) for part in parts] == [3, 3, 3]
    assert {i for part in parts for i in part} == {0, 1, 2, 6, 7, 8, 9}
    sampler.set_epoch(1)
    assert len(sampler) == 10 and sampler.processed_indices == set()


def test_names_that_are_not_here():
    with pytest.raises(ImportError, match=r"horovod.torch.start_timeline is not part of easymp.compat:"):
        hvd.start_timeline  # noqa: B018
    with pytest.raises(ImportError, match=r"did you mean 'allreduce'\?"):
        hvd.alreduce  # noqa: B018
    from easymp.compat.horovod.compression import Compression  # the address in Horovod

    assert Compression is hvd.Compression
    assert not hvd.mpi_built()
    assert hvd.gloo_built()
    assert isinstance(hvd.nccl_built(), bool)
