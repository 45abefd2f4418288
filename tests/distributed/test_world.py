"""Collectives on real gloo ranks, the identities of a world of one, and what is said when a rank is missing."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from easymp.distributed import Ranks, World, process_group, read_ranks
from easymp.distributed.mailbox import Watch

CPU = torch.device("cpu")
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


@contextmanager
def joined(ranks=None, **options):
    world = World(ranks or read_ranks(), CPU, **options)
    try:
        yield world
    finally:
        world.close()


def test_alone_every_collective_is_the_identity():
    with joined(Ranks()) as world:
        tensor = torch.arange(3.0)
        assert (world.size, world.backend, dist.is_initialized()) == (1, None, False)
        world.barrier()
        for op in ("sum", "mean", "max", "min", "product"):
            assert torch.equal(world.reduce(tensor, op), tensor)
        assert world.reduce(tensor) is not tensor
        assert world.broadcast(tensor) is tensor
        for gather in (world.gather, world.gather_uneven):
            assert torch.equal(gather(tensor), tensor) and gather(torch.tensor(4.0)).tolist() == [4.0]
        assert world.gather_objects("x") == ["x"] and world.broadcast_objects([1, 2]) == [1, 2]
        assert world.any(True) and not world.any(False)
        world.close()  # twice does no harm


@pytest.mark.on_ranks(2)
def test_collectives_of_every_dtype_of_uneven_tensors_and_of_objects():
    with joined() as world:
        for dtype in DTYPES:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            tensor = torch.tensor([[0, 1], [1, world.rank]]).to(dtype)
            results = world.gather(tensor), world.gather(tensor.t()), world.broadcast(tensor, source=1)
            results += (world.gather(torch.tensor(world.rank).to(dtype)),)
            joined_rows = [[0, 1], [1, 0], [0, 1], [1, 1]]  # also of what is not contiguous
            values = [got.to(wide).real.tolist() for got in results]
            assert values == [joined_rows, joined_rows, joined_rows[2:], [0, 1]]
            assert all(got.dtype == dtype for got in results)
            if dtype.is_complex or dtype == torch.bool:
                continue
            tensor = (torch.tensor([1, 2, 3]) * (world.rank + 1)).to(dtype)
            before, mean = tensor.clone(), [1.5, 3.0, 4.5] if dtype.is_floating_point else [1.0, 3.0, 4.0]
            expected = {"sum": [3, 6, 9], "max": [2, 4, 6], "min": [1, 2, 3], "product": [2, 8, 18], "mean": mean}
            for op, values in expected.items():
                reduced = world.reduce(tensor, op)
                assert reduced.dtype == dtype and reduced.float().tolist() == values, (dtype, op)
            assert torch.equal(tensor.float(), before.float())
        for shape in ((), (2,)):
            uneven = world.gather_uneven(torch.full((1 + world.rank, *shape), float(world.rank)))
            assert torch.equal(uneven, torch.cat([torch.zeros(1, *shape), torch.ones(2, *shape)]))
        assert world.gather_uneven(torch.tensor(world.rank)).tolist() == [0, 1]
        items = [world.rank, {"of": world.rank}]
        assert world.broadcast_objects(items, source=1) is items and items == [1, {"of": 1}]
        assert world.gather_objects(("rank", world.rank)) == [("rank", 0), ("rank", 1)]
        assert world.any(world.rank == 1) and not world.any(False)


@pytest.mark.parametrize("device", [torch.device("cuda", 1), torch.device("xpu", 3)])
def test_a_ranks_device_becomes_its_current_one(device, monkeypatch):
    set_devices = []
    monkeypatch.setattr(getattr(torch, device.type), "set_device", set_devices.append)
    World(Ranks(), device)
    assert set_devices == [device]
    World(Ranks(), torch.device("mps"))
    World(Ranks(), CPU)
    assert set_devices == [device]


@pytest.mark.parametrize(
    ("device", "binds", "backend", "bound"),
    [
        (torch.device("cuda", 1), True, "cpu:gloo,cuda:nccl", torch.device("cuda", 1)),
        (torch.device("cuda", 1), False, "cpu:gloo,cuda:nccl", None),
        (torch.device("xpu", 1), True, "cpu:gloo,xpu:xccl", None),
        (CPU, True, "gloo", None),
    ],
)
def test_a_group_has_a_backend_and_is_bound_where_it_can_be_split(device, binds, backend, bound, monkeypatch):
    options = {}
    begin = lambda backend, **keywords: options.update(keywords, backend=backend)  # noqa: E731
    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(process_group, "BINDS", binds)
    world = World(Ranks(), CPU)
    world.device = device
    world._connect(dist.HashStore())
    assert (options["backend"], options["device_id"]) == (backend, bound)


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def leave_long_before(late_rank, directory):
    """What this rank's close took, and what torch printed meanwhile."""
    world = World(read_ranks(), CPU)
    world.barrier()
    before, output_file = os.dup(2), directory / str(world.rank)
    with output_file.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        if world.rank == late_rank:
            wait_for(directory / f"left {1 - late_rank}")
        start = time.monotonic()
        with mock.patch.object(process_group, "FAREWELL", 1000.0 if world.rank == late_rank else 0.3):
            world.close()
        took = time.monotonic() - start
        (directory / f"left {world.rank}").touch()
        wait_for(directory / f"left {1 - world.rank}")  # as a process that has more to do than to train
    finally:
        os.dup2(before, 2)
        os.close(before)
    return took, output_file.read_text()


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_rank_that_works_on_alone_is_left_in_peace(ranks, tmp_path, late_rank):
    results = ranks(leave_long_before, late_rank, tmp_path)
    assert results[1 - late_rank][0] > 0.2
    assert [output for _, output in results] == ["", ""]


def test_a_rank_leaves_quietly_where_the_store_ends_meanwhile(monkeypatch):
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    watch = Watch(1, 2, dist.TCPStore("127.0.0.1", servers[0].port))
    monkeypatch.setattr(watch, "reachable", lambda: servers.clear() is None)
    watch.leave(1, 1)
    watch.close()
    assert not watch._thread.is_alive()


def fail_and_leave():
    with mock.patch.object(process_group, "FAREWELL", 1000.0), joined() as world:
        if world.rank == 0:
            world.reduce(torch.ones(1))
        sys.last_value = ValueError("as the interpreter does")
    del sys.last_value
    return "gone"


def test_a_failing_rank_leaves_at_once_and_the_others_hear_of_it(ranks):
    failure, gone = ranks.fails(fail_and_leave)
    assert gone == "gone"
    assert failure.type == "WorldError"


def join_alone(ranks=None):
    World(ranks or read_ranks(), CPU, timeout=0.5)


@pytest.mark.parametrize(
    ("env", "ranks_", "message"),
    [
        ({"WORLD_SIZE": "3"}, None, "=3 was .* rank 1, 2 did not arrive within 0.5 s.*unset RANK and WORLD"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": None}, None, "MASTER_ADDR is not"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": None}, None, "MASTER_PORT is not"),
        ({}, Ranks(1, 2, 1, 2, "test"), "rank 1 of 2 could not reach rank 0 at 127.0.0.1:"),  # nobody listens
    ],
)
def test_a_rank_that_never_comes_and_an_address_that_is_missing_are_named(ranks, env, ranks_, message):
    (failure,) = ranks.fails(join_alone, ranks_, processes=1, env=env)
    assert failure.type == "WorldError" and re.search(message, failure.message), failure.message


def late_here(path):
    """Until the other rank has given up; not in `wait_for`, as it is here that this rank is to be found."""
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def one_is_late_in_a_group(path):
    """Rank 0 waits for a second, and rank 1 until it has given up: where it is looked for, it is."""
    try:
        with joined() as world:
            world.barrier()
            group = dist.new_group()
            world.barrier()  # until here: to come may take long on a busy machine
            if world.rank == 1:
                late_here(path)
                return
            world.timeout = 1.0
            world.set_group_timeouts()
            with world.explained("a group's reduce"):
                dist.all_reduce(torch.ones(3), group=group)
    finally:
        path.touch()


@pytest.mark.timeout(60)
def test_a_timeout_in_a_group_made_later_says_where_the_late_rank_is(ranks, tmp_path):
    failure, _ = ranks.fails(one_is_late_in_a_group, tmp_path / "given up")
    assert failure.type == "WorldError" and failure.message.startswith("rank 0 gave up in a group's reduce: ")
    # A worker of the pool may have had other groups, or collectives.
    line = r"rank 1: (no collective yet|last collective (unknown|#\d+ \w.*)); at .*test_world.py.* in late_here"
    assert re.search(line, failure.message)
