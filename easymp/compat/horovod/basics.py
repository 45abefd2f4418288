"""`init` and `shutdown`, ranks and sizes, and process sets: subsets of the ranks that run operations together."""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

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
    *"local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank".split(),
    *"rocm_built shutdown size".split(),
]
T = TypeVar("T")
layer = Layer("Horovod", "horovod", "horovod.torch")
PATIENCE = 5.0  # seconds that rank 0 waits for the others before it leaves
NO_MPI = "Horovod has not been built with MPI support"


class NotInitializedError(EasympError, ValueError):
    """A call that needs `init` first."""


class ProcessSet:
    """Subset of the ranks: pass it to `init` or `add_process_set`, then to operations."""

    mpi_comm = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        self.process_set_id: int | None = None  # while it is not added; 0 of all ranks
        ranks: list[Any] = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): pass a list of ranks. {NO_MPI}")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"ProcessSet names a rank twice: {sorted(ranks)}; pass each rank once")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Number of its ranks; None before it is added."""
        return None if self.process_set_id is None else len(self.ranks)

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
    """The world and engine that `init` made."""

    world: World
    engine: Engine
    process: int  # id of the process that called `init`; a forked child has no part in the run
    process_sets: dict[int, ProcessSet]  # by their numbers
    handle_numbers: count[int] = field(default_factory=lambda: count(1))
    handles: dict[int, tuple[list[Pending], bool]] = field(default_factory=dict)  # operations; whether they are a group
    name_counts: Counter[Any] = field(default_factory=Counter)  # operations without a name, by kind and process set

    def next_name(self, kind: str, process_set: ProcessSet) -> str:
        """Name of an operation without one; the same on all ranks that request in the same order."""
        self.name_counts[kind, process_set.process_set_id] += 1
        return f"noname.{self.name_counts[kind, process_set.process_set_id]}"

    def submit(self, operations: list[Pending], grouped: bool = False) -> int:
        """Request operations; returns a handle for all of them."""
        for pending in operations:
            self.engine.submit(pending)
        handle = next(self.handle_numbers)
        self.handles[handle] = operations, grouped
        return handle

    def members(self, process_set: ProcessSet) -> tuple[int, ...]:
        """Ranks of a process set that was added and that this process is part of; ``()`` for all."""
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"process_set={process_set!r}: pass an hvd.ProcessSet that hvd.init was given")
        if self.process_sets.get(process_set.process_set_id or 0) is not process_set:
            raise ValueError(f"{process_set} does not exist, or has not been registered: pass it to hvd.init")
        if not process_set.included():
            raise ValueError(f"Rank {self.world.rank} is not a member of the provided process set: {process_set}")
        return tuple(process_set.ranks) if process_set.process_set_id else ()


_run: Run | None = None


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other processes, which a launcher started; a second call only adds process sets that are new."""
    global _run
    timeout = resolve().timeout
    ranks = locate(read_ranks(), timeout) if _run is None else _run.world.ranks
    if comm and sorted(comm if isinstance(comm, Iterable) else ()) != list(range(ranks.size)):
        raise RefusedError(
            f"hvd.init(comm={comm}): the launcher started {ranks.size} processes, and all of them take part; {NO_MPI}. "
            "Leave comm out, and pass subsets of the ranks as process_sets=[hvd.ProcessSet([…])]"
        )
    if _run is None:
        world = World(ranks, device_of(ranks), timeout)
        global_process_set.ranks = list(range(world.size))
        _run = Run(world, Engine(world), os.getpid(), {0: global_process_set})
        atexit.register(shutdown)
    # "dynamic" has no effect: `add_process_set` always works.
    for process_set in process_sets if process_sets and not isinstance(process_sets, str) else ():
        if _run.process_sets.get(process_set.process_set_id or 0) is not process_set:
            add_process_set(process_set)


def shutdown() -> None:
    """Leave the other ranks, whose operations raise HorovodInternalError from then on; also called at exit."""
    global _run
    if _run is None or _run.process != os.getpid():
        return
    run, _run = _run, None
    atexit.unregister(shutdown)
    for process_set in run.process_sets.values():
        process_set.process_set_id = None
    global_process_set.process_set_id = 0
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    reason = f"{type(error).__name__}: {error}" if error else "hvd.shutdown(), or the end of its script"
    run.engine.close(reason.splitlines()[0], PATIENCE if error is None else 0.0)
    run.world.close()


def running() -> Run:
    """The run that `init` made."""
    if _run is None:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    return _run


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add and return a new process set, or one of these ranks; every rank of the world calls it alike."""
    run = running()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks_by_rank = run.world.gather_objects(added.ranks)
    if any(ranks != added.ranks for ranks in ranks_by_rank):
        difference = odd_one_out(ranks_by_rank)
        raise HorovodInternalError(f"add_process_set: the ranks pass different sets: {difference}")
    if not added.ranks or not set(added.ranks) <= set(range(run.world.size)):
        raise ValueError(f"{added} holds ranks that are not among 0 … {run.world.size - 1}, or none")
    if any(added.ranks == process_set.ranks for process_set in run.process_sets.values()):
        raise ValueError(f"Attempted to add a duplicate process set: {added}")
    run.engine.open(added.ranks)
    added.process_set_id = max(run.process_sets) + 1
    run.process_sets[added.process_set_id] = added
    return added


# -- facts about the run and this installation


def _query(name: str, summary: str, answer: Callable[[], T]) -> Callable[[], T]:
    """`answer`, with a name and a docstring."""
    answer.__name__, answer.__qualname__, answer.__doc__ = name, name, summary
    return answer


def nccl_built() -> int:
    """NCCL's version as its own number (22703 for 2.27.3); 0 where this torch has no NCCL."""
    major, minor, patch = torch.cuda.nccl.version()[:3] if dist.is_nccl_available() and cuda_built() else (0, 0, 0)
    return int(major * 10000 + minor * 100 + patch)


def mpi_threads_supported() -> bool:
    """Raise Horovod's ValueError for a run without MPI."""
    raise ValueError("Horovod MPI is not enabled; operations go over torch.distributed's own backends")


rank = _query("rank", "Rank of this process.", lambda: running().world.rank)
size = _query("size", "Number of processes.", lambda: running().world.size)
local_rank = _query("local_rank", "Rank on this node.", lambda: running().world.local_rank)
local_size = _query("local_size", "Processes of this node.", lambda: running().world.local_size)
cross_rank = _query("cross_rank", "This node's number.", lambda: rank() // max(1, local_size()))
cross_size = _query("cross_size", "Nodes.", lambda: running().world.ranks.nodes)
is_homogeneous = _query("is_homogeneous", "True: all nodes have as many processes.", lambda: bool(running()))
is_initialized = _query("is_initialized", "Whether `init` has been called.", lambda: _run is not None)
cuda_built = _query("cuda_built", "Whether this torch has CUDA.", lambda: torch.version.cuda is not None)
rocm_built = _query("rocm_built", "Whether this torch has ROCm.", lambda: torch.version.hip is not None)
mpi_built = _query("mpi_built", "False: data goes over torch's backends; mpirun may start processes.", lambda: False)
gloo_built = gloo_enabled = dist.is_gloo_available  # gloo carries CPU tensors
mpi_enabled = ddl_built = ccl_built = mpi_built
