"""init and shutdown, and who this process is."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ...distributed import World, locate, read_ranks
from ...errors import EasympError, RefusedError
from ...settings import resolve
from ..devices import device_of
from ..saying import Layer
from .engine import Engine

NATIVE = """
acc = Accelerator(strategy="ddp")  # hvd.init, broadcast_parameters, DistributedOptimizer
model, optimizer, loader = acc.prepare(model, optimizer, loader)
acc.backward(loss); optimizer.step(); optimizer.zero_grad()
mean = acc.mean(value)  # hvd.allreduce(value)
"""

layer = Layer("Horovod")
PATIENCE = 5.0  # seconds that rank 0 waits for the others before it leaves


class NotInitializedError(EasympError, ValueError):
    """A call that needs `init` first."""


@dataclass
class Run:
    """What `init` made."""

    world: World
    engine: Engine
    numbers: count[int]
    process: int

    def unnamed(self, kind: str) -> str:
        """A name for an operation without one; the same on all ranks that ask in the same order."""
        return f"{kind}.noname.{next(self.numbers)}"


_run: Run | None = None


def init(comm: Sequence[int] | None = None, process_sets: Any = None) -> None:
    """Join the other processes, which `easymp launch`, torchrun, srun or any launcher that sets RANK and WORLD_SIZE started.

    Calling it again does nothing.

    Raises:
        RefusedError: `comm` or `process_sets`: all ranks take part here.
        WorldError: announced processes did not arrive.
    """
    global _run
    if comm or process_sets:
        raise RefusedError(
            "hvd.init(comm=…, process_sets=…): parts of the ranks are not known here; use torch.distributed.new_group"
        )
    if _run is not None:
        return
    timeout = resolve().timeout
    ranks = locate(read_ranks(), timeout)
    layer.use("init, DistributedOptimizer, allreduce", NATIVE)
    world = World(ranks, device_of(ranks), timeout)
    _run = Run(world, Engine(world), count(), os.getpid())
    atexit.register(shutdown)


def shutdown() -> None:
    """Leave the others. What is in flight, and what they ask for afterwards, is a HorovodInternalError. Without `init` it does nothing.

    It is also called when the process ends; by an error, too, of which the others hear.
    """
    global _run
    if _run is None or _run.process != os.getpid():  # a forked child has no part in it
        return
    run, _run = _run, None
    atexit.unregister(shutdown)
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    why = (
        "hvd.shutdown(), or the end of its script"
        if error is None
        else f"{type(error).__name__}: {error}".splitlines()[0]
    )
    run.engine.close(why, PATIENCE if error is None else 0.0)
    run.world.close()


def running() -> Run:
    """What `init` made.

    Raises:
        NotInitializedError: a ValueError, as in Horovod.
    """
    if _run is None:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    return _run


def is_initialized() -> bool:
    return _run is not None


def rank() -> int:
    return running().world.rank


def size() -> int:
    return running().world.size


def local_rank() -> int:
    """On this node."""
    return running().world.local_rank


def local_size() -> int:
    """Processes of this node."""
    return running().world.local_size


def cross_rank() -> int:
    """This node, among those that have a process of this local rank."""
    world = running().world
    return world.rank // max(1, world.local_size)


def cross_size() -> int:
    """Nodes."""
    return running().world.ranks.nodes


def is_homogeneous() -> bool:
    """Whether every node has as many processes: launchers here see to it."""
    running()
    return True
