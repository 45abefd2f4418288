"""`init` and `shutdown`, ranks and sizes, and process sets: parts of the ranks that run operations together."""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from ...distributed import World, locate, read_ranks
from ...distributed.process_group import odd_one_out
from ...errors import EasympError, RefusedError
from ...settings import resolve
from ..layer import Layer, device_of
from .engine import Engine, HorovodInternalError, Pending

__all__ = [
    *"HorovodInternalError NotInitializedError ProcessSet add_process_set ccl_built cross_rank cross_size".split(),
    *"cuda_built ddl_built global_process_set gloo_built gloo_enabled init is_homogeneous is_initialized".split(),
    *"local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank remove_process_set".split(),
    *"rocm_built shutdown size".split(),
]
layer = Layer("Horovod")
NATIVE = """
acc = Accelerator(strategy="ddp")  # hvd.init, broadcast_parameters, DistributedOptimizer
model, optimizer, loader = acc.prepare(model, optimizer, loader)
acc.backward(loss); optimizer.step(); optimizer.zero_grad()
mean = acc.mean(value)  # hvd.allreduce(value)
"""
PATIENCE = 5.0  # seconds that rank 0 waits for the others before it leaves
NO_MPI = "Horovod has not been built with MPI support"


class NotInitializedError(EasympError, ValueError):
    """A call that needs `init` first."""


class ProcessSet:
    """Ranks that run operations together: pass it to `init` or `add_process_set`, then to operations.

    `process_set_id` is None before it is added, and after it is removed; 0 of `global_process_set`. Raises ValueError for anything but a
    list of ranks, each once; such as an MPI communicator.
    """

    mpi_comm = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        self.process_set_id: int | None = None
        given = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
        if any(not isinstance(rank, int) for rank in given):
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): pass a list of ranks. {NO_MPI}")
        self.ranks = sorted(given)
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"ProcessSet names a rank twice: {self.ranks}; pass each rank once")

    def size(self) -> int | None:
        """Number of its ranks; None before it is added."""
        return None if self.process_set_id is None else len(self.ranks) if self.process_set_id else size()

    def rank(self) -> int | None:
        """Rank of this process among its ranks, of which it must be one; None before it is added."""
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"Process is not part of provided process set: rank {rank()} of {self}")
        return self.ranks.index(rank())

    def included(self) -> bool:
        """Whether this process is one of its ranks."""
        return rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


@dataclass
class Run:
    """The world and engine that `init` made, process sets by number, and operations by handle, with whether they are a group."""

    world: World
    engine: Engine
    process: int
    sets: dict[int, ProcessSet]
    numbers: count[int] = field(default_factory=lambda: count(1))
    handles: dict[int, tuple[list[Pending], bool]] = field(default_factory=dict)
    objects: dict[ProcessSet, Any] = field(default_factory=dict)  # the groups of objects
    asked: Counter[Any] = field(default_factory=Counter)

    def unnamed(self, kind: str, among: ProcessSet) -> str:
        """A name for an operation without one; the same on all ranks that ask in the same order."""
        self.asked[kind, among.process_set_id] += 1
        return f"noname.{self.asked[kind, among.process_set_id]}"

    def members(self, among: ProcessSet) -> tuple[int, ...]:
        """The ranks of a process set that was added and that this process is part of, ``()`` for all."""
        if not isinstance(among, ProcessSet):
            raise ValueError(f"process_set={among!r}: pass an hvd.ProcessSet that hvd.init was given")
        if self.sets.get(among.process_set_id or 0) is not among:
            raise ValueError(f"{among} does not exist, or has not been registered: pass it to hvd.init")
        if not among.included():
            raise ValueError(f"Rank {self.world.rank} is not a member of the provided process set: {among}")
        return tuple(among.ranks) if among.process_set_id else ()


_run: Run | None = None


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other processes, which `easymp launch`, torchrun, srun, mpirun or a launcher that sets RANK and WORLD_SIZE started.

    Called again, it only adds process sets that are new. "dynamic" has no effect: `add_process_set` always works. Raises WorldError where
    announced processes did not arrive, and RefusedError for a `comm` that leaves ranks out.
    """
    global _run
    timeout = resolve().timeout
    ranks = locate(read_ranks(), timeout) if _run is None else _run.world.ranks
    if comm and sorted(comm if isinstance(comm, Iterable) else ()) != list(range(ranks.size)):
        raise RefusedError(
            f"hvd.init(comm={comm}): the launcher started {ranks.size} processes, and all of them take part; {NO_MPI}. Leave comm out, "
            "and pass parts of the ranks as process_sets=[hvd.ProcessSet([…])]"
        )
    if _run is None:
        layer.use("init, DistributedOptimizer, allreduce", NATIVE)
        world = World(ranks, device_of(ranks), timeout)
        global_process_set.ranks = list(range(world.size))
        _run = Run(world, Engine(world), os.getpid(), {0: global_process_set})
        atexit.register(shutdown)
    for process_set in process_sets if process_sets and not isinstance(process_sets, str) else ():
        if _run.sets.get(process_set.process_set_id or 0) is not process_set:
            add_process_set(process_set)


def shutdown() -> None:
    """Leave the other ranks, where operations in flight and later ones raise HorovodInternalError. The end of the process calls it, too."""
    global _run
    if _run is None or _run.process != os.getpid():  # a forked child has no part in it
        return
    run, _run = _run, None
    atexit.unregister(shutdown)
    for process_set in run.sets.values():
        process_set.process_set_id = None
    global_process_set.process_set_id = 0
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    why = f"{type(error).__name__}: {error}" if error else "hvd.shutdown(), or the end of its script"
    run.engine.close(why.splitlines()[0], PATIENCE if error is None else 0.0)
    run.world.close()


def running() -> Run:
    """The run that `init` made."""
    if _run is None:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    return _run


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add and return a process set, or one of these ranks, which must be new; every rank of the world calls it alike."""
    run = running()
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    asked = run.world.gather_objects(new.ranks)
    if any(ranks != new.ranks for ranks in asked):
        raise HorovodInternalError(f"add_process_set: the ranks pass different sets: {odd_one_out(asked)}")
    if not new.ranks or not set(new.ranks) <= set(range(run.world.size)):
        raise ValueError(f"{new} holds ranks that are not among 0 … {run.world.size - 1}, or none")
    if any(new.ranks == other.ranks for other in run.sets.values()):
        raise ValueError(f"Attempted to add a duplicate process set: {new}")
    run.engine.open(new.ranks)
    run.objects[new] = run.world.group(new.ranks) if run.world.size > 1 else None
    new.process_set_id = max(run.sets) + 1
    run.sets[new.process_set_id] = new
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, and return whether it was there; every rank of the world calls it. The set of all ranks stays."""
    run = running()
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"remove_process_set({process_set!r}): pass what add_process_set returned")
    if not process_set.process_set_id or run.sets.get(process_set.process_set_id) is not process_set:
        return False
    run.world.barrier()
    del run.sets[process_set.process_set_id]
    process_set.process_set_id = None
    run.engine.close_set(process_set.ranks)
    group = run.objects.pop(process_set)
    if process_set.included() and group is not None:
        dist.destroy_process_group(group)
    return True


def _fact(name: str, words: str, read: Callable[[], Any]) -> Callable[[], Any]:
    """`read`, with a name and a doc string."""
    read.__name__, read.__qualname__, read.__doc__ = name, name, words
    return read


def nccl_built() -> int:
    """NCCL's version as its own number (22703 for 2.27.3); 0 where this torch has no NCCL."""
    major, minor, patch = (
        torch.cuda.nccl.version()[:3] if dist.is_nccl_available() and cuda_built() else (0, 0, 0)
    )
    return major * 10000 + minor * 100 + patch


def mpi_threads_supported() -> bool:
    """Raise Horovod's ValueError for a run without MPI."""
    raise ValueError("Horovod MPI is not enabled; operations go over torch.distributed's own backends")


rank = _fact("rank", "Rank of this process.", lambda: running().world.rank)
size = _fact("size", "Number of processes.", lambda: running().world.size)
local_rank = _fact("local_rank", "Rank on this node.", lambda: running().world.local_rank)
local_size = _fact("local_size", "Processes of this node.", lambda: running().world.local_size)
cross_rank = _fact("cross_rank", "This node's number.", lambda: rank() // max(1, local_size()))
cross_size = _fact("cross_size", "Nodes.", lambda: running().world.ranks.nodes)
is_homogeneous = _fact("is_homogeneous", "True: all nodes have as many processes.", lambda: bool(running()))
is_initialized = _fact("is_initialized", "Whether `init` has been called.", lambda: _run is not None)
cuda_built = _fact("cuda_built", "Whether this torch has CUDA.", lambda: torch.version.cuda is not None)
rocm_built = _fact("rocm_built", "Whether this torch has ROCm.", lambda: torch.version.hip is not None)
mpi_built = _fact(
    "mpi_built", "False: data goes over torch's backends; mpirun may start processes.", lambda: False
)
gloo_built = gloo_enabled = dist.is_gloo_available  # gloo carries CPU tensors
mpi_enabled = ddl_built = ccl_built = mpi_built
