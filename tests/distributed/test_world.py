"""Collectives on real gloo ranks, the identities of a world of one, and what is said when a rank is missing."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from easymp.distributed import Ranks, World, process_group, read_ranks

from .hurry import hurry

CPU = torch.device("cpu")
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


@contextmanager
def joined(**options):
    world = World(read_ranks(), CPU, **options)
    try:
        yield world
    finally:
        world.close()


# -- a world of one ----------------------------------------------------------------------------------------------------


def test_alone_every_collective_is_the_identity():
    world = World(Ranks(), CPU)
    tensor = torch.arange(3.0)
    assert world.size == 1
    assert world.backend is None
    assert not dist.is_initialized()
    world.barrier()
    for op in ("sum", "mean", "max", "min", "product"):
        assert torch.equal(world.reduce(tensor, op), tensor)
    assert world.reduce(tensor) is not tensor
    assert torch.equal(world.gather(tensor), tensor)
    assert world.gather(torch.tensor(4.0)).tolist() == [4.0]
    assert torch.equal(world.gather_uneven(tensor), tensor)
    assert world.gather_uneven(torch.tensor(1)).tolist() == [1]
    assert world.broadcast(tensor) is tensor
    assert world.gather_objects("x") == ["x"]
    assert world.broadcast_objects([1, 2]) == [1, 2]
    assert world.any(True)
    assert not world.any(False)
    world.close()
    world.close()


def announced_alone():
    with joined() as world:
        assert dist.is_initialized()
        return world.size, world.backend, world.reduce(torch.ones(2)).tolist()


def test_one_announced_process_has_a_group(ranks):
    assert ranks(announced_alone, processes=1) == [(1, "gloo", [1.0, 1.0])]


# -- collectives -------------------------------------------------------------------------------------------------------


def reduce_all(dtype):
    with joined() as world:
        ones = torch.tensor([1, 0, 1]) if dtype == torch.bool else torch.tensor([1, 2, 3]) * (world.rank + 1)
        given = ones.to(dtype)
        before = given.clone()
        found = {op: world.reduce(given, op) for op in ("sum", "mean", "max", "min", "product")}
        assert torch.equal(given.float(), before.float())
        assert all(v.dtype == dtype for v in found.values())
        return {op: v.float().tolist() for op, v in found.items()}


@pytest.mark.parametrize("dtype", [d for d in DTYPES if not d.is_complex and d != torch.bool])
def test_reduce(ranks, dtype):
    expected = {
        "sum": [3.0, 6.0, 9.0], "max": [2.0, 4.0, 6.0], "min": [1.0, 2.0, 3.0], "product": [2.0, 8.0, 18.0],
        "mean": [1.5, 3.0, 4.5] if dtype.is_floating_point else [1.0, 3.0, 4.0],
    }  # fmt: skip
    if dtype == torch.float8_e4m3fn:
        expected["sum"][2], expected["product"][2] = 9.0, 18.0
    assert ranks(reduce_all, dtype) == [expected] * 2


def move(dtype):
    with joined() as world:
        given = torch.tensor([[0, 1], [1, world.rank]]).to(dtype)
        whole = world.gather(given)
        sent = world.broadcast(given, source=1)
        assert whole.dtype == sent.dtype == dtype
        turned = world.gather(given.t())  # not contiguous
        scalar = world.gather(torch.tensor(world.rank).to(dtype))
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return [t.to(wide).real.tolist() for t in (whole, sent, turned, scalar)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_broadcast_move_every_dtype(ranks, dtype):
    whole, turned = [[0, 1], [1, 0], [0, 1], [1, 1]], [[0, 1], [1, 0], [0, 1], [1, 1]]
    assert ranks(move, dtype) == [[whole, [[0, 1], [1, 1]], turned, [0, 1]]] * 2


def gather_uneven(shape):
    with joined() as world:
        given = torch.full((world.rank * 2, *shape), world.rank, dtype=torch.float32)
        return world.gather_uneven(given).tolist(), world.gather_uneven(torch.tensor(world.rank)).tolist()


def test_gather_of_different_lengths(ranks):
    assert ranks(gather_uneven, (), processes=3) == [([1.0] * 2 + [2.0] * 4, [0, 1, 2])] * 3
    assert ranks(gather_uneven, (2,)) == [([[1.0, 1.0]] * 2, [0, 1])] * 2


def objects():
    with joined() as world:
        world.barrier()
        items = [world.rank, {"of": world.rank}]
        back = world.broadcast_objects(items, source=1)
        assert back is items
        return world.gather_objects(("rank", world.rank)), items, world.any(world.rank == 1), world.any(False)


def test_objects_and_flags(ranks):
    assert ranks(objects) == [([("rank", 0), ("rank", 1)], [1, {"of": 1}], True, False)] * 2


# -- joining and leaving -----------------------------------------------------------------------------------------------


def again_and_again():
    for _ in range(2):
        with joined() as world:
            world.barrier()
    return dist.is_initialized()


def test_a_world_can_be_left_and_joined_again(ranks):
    assert ranks(again_and_again) == [False, False]


def adopt():
    dist.init_process_group("gloo")
    world = World(read_ranks(), CPU)
    total = world.reduce(torch.ones(1)).item()
    world.close()
    running = dist.is_initialized()
    dist.destroy_process_group()
    return total, world.owned, running, world.ranks.announced


def test_a_running_group_is_adopted_and_left_running(ranks):
    assert ranks(adopt) == [(2.0, False, True, "the process group")] * 2


@contextmanager
def patient(seconds):
    """Leaving waits so long for the others."""
    before, process_group.FAREWELL = process_group.FAREWELL, seconds
    try:
        yield
    finally:
        process_group.FAREWELL = before


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def leave_long_before(late, directory):
    """What this rank's close took, and what torch printed meanwhile."""
    world = World(read_ranks(), CPU)
    world.barrier()
    before, said = os.dup(2), directory / str(world.rank)
    with said.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        if world.rank == late:
            wait_for(directory / f"left {1 - late}")
        start = time.monotonic()
        with patient(1000.0 if world.rank == late else 0.3):
            world.close()
        took = time.monotonic() - start
        (directory / f"left {world.rank}").touch()
        wait_for(directory / f"left {1 - world.rank}")  # as a process that has more to do than to train
    finally:
        os.dup2(before, 2)
        os.close(before)
    return took, said.read_text()


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_works_on_alone_is_left_in_peace(ranks, tmp_path, late):
    found = ranks(leave_long_before, late, tmp_path)
    assert found[1 - late][0] > 0.2
    assert [said for _, said in found] == ["", ""]


def fail_and_leave():
    world = World(read_ranks(), CPU)
    if world.rank == 1:
        sys.last_value = ValueError("as the interpreter does")
        try:
            with patient(1000.0):
                world.close()
        finally:
            del sys.last_value
        return "gone"
    try:
        world.reduce(torch.ones(1))
    finally:
        world.close()


def test_a_failing_rank_leaves_at_once_and_the_others_hear_of_it(ranks):
    failure, gone = ranks.fails(fail_and_leave)
    assert gone == "gone"
    assert failure.type == "WorldError"


def missing_rank(size):
    os.environ["WORLD_SIZE"] = str(size)
    World(read_ranks(), CPU, timeout=0.5)


def test_a_rank_that_never_comes_is_named(ranks):
    (failure,) = ranks.fails(missing_rank, 3, processes=1)
    assert failure.type == "WorldError"
    assert "WORLD_SIZE=3 was announced, but rank 1, 2 did not arrive within 0.5 s" in failure.message
    assert "unset RANK and WORLD_SIZE" in failure.message


def no_address():
    World(read_ranks(), CPU)


def test_missing_address_names_the_variable(ranks):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        (failure,) = ranks.fails(no_address, processes=1, env={name: None, "WORLD_SIZE": "2"})
        assert failure.type == "WorldError"
        assert f"{name} is not" in failure.message


def unreachable():
    World(Ranks(1, 2, 1, 2, "test"), CPU, timeout=1.0)


def test_nobody_listens_at_the_address(ranks):
    (failure,) = ranks.fails(unreachable, processes=1)
    assert failure.type == "WorldError"
    assert "rank 1 of 2 could not reach rank 0 at 127.0.0.1:" in failure.message


# -- when a rank is elsewhere ------------------------------------------------------------------------------------------


def late_here(path):
    """Until the other rank has given up; not in `wait_for`, as it is here that this rank is to be found."""
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def given_up(path):
    """Rank 0 waits for a second, and rank 1 until it has given up: where it is looked for, it is."""
    try:
        with joined() as world:
            world.barrier()
            yield world
    finally:
        path.touch()


def one_is_late(path):
    with given_up(path) as world:
        if world.rank == 1:
            late_here(path)
            return "woke up"
        hurry(world, 1.0)
        world.reduce(torch.ones(3))


@pytest.mark.timeout(60)
def test_a_timeout_says_where_the_late_rank_is(ranks, tmp_path):
    failure, _ = ranks.fails(one_is_late, tmp_path / "given up")
    assert failure.type == "WorldError"
    assert failure.message.startswith("rank 0 gave up in reduce (sum): ")
    # The recorder is on from a process's first group on, if it was a World's; a worker of the pool may have had others, or collectives.
    assert re.search(r"rank 1: (no collective yet|last collective (unknown|#\d+ \w.*)); at ", failure.message)
    assert "test_world.py" in failure.message
    assert "in late_here" in failure.message


def one_is_late_in_a_group(path):
    with given_up(path) as world:
        group = dist.new_group()
        world.barrier()
        if world.rank == 1:
            late_here(path)
            return
        hurry(world, 1.0)
        with world.explained("a group's reduce"):
            dist.all_reduce(torch.ones(3), group=group)


@pytest.mark.timeout(60)
def test_groups_made_later_have_the_worlds_timeout(ranks, tmp_path):
    failure, _ = ranks.fails(one_is_late_in_a_group, tmp_path / "given up")
    assert "rank 0 gave up in a group's reduce" in failure.message
    assert "in late_here" in failure.message


def one_dies():
    with joined() as world:
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.reduce(torch.ones(3))


def test_a_dead_rank_is_called_so(ranks):
    survivor, dead = ranks.fails(one_dies)
    assert dead == ("SIGKILL", "killed by signal 9")
    assert survivor.type == "WorldError"
    assert "rank 1: no answer: it has ended, was killed, or is stopped" in survivor.message


def wrapped():
    with joined() as world:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        grad = world.gather(model.module.bias.grad).tolist()
        del model
        gc.collect()
        return grad


@pytest.mark.slow
def test_leaving_after_ddp_never_hangs(ranks):
    for _ in range(40):
        assert ranks(wrapped) == [[1.0] * 4] * 2
