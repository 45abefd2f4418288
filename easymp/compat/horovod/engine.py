"""Operations by name, in one sequence on all ranks, while the program goes on.

Ranks may ask in different orders, as backward passes do. Each rank writes its requests to the store, rank 0 writes orders for the
operations that every rank has asked for, and each rank's thread carries out the orders in sequence. There is no polling: a thread
sleeps in the store until there is a next line. Operations that come together are reduced together.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed import World, locate, read_ranks
from ...errors import EasympError, RefusedError, WorldError
from ...logging import get_logger
from ...settings import resolve
from ..layer import Layer, device_of
from .execution import Carrier, Order, Request, Table, agree, fusable, read_orders, read_requests, written

logger = get_logger(__name__)
layer = Layer("Horovod")
NATIVE = """
acc = Accelerator(strategy="ddp")  # hvd.init, broadcast_parameters, DistributedOptimizer
model, optimizer, loader = acc.prepare(model, optimizer, loader)
acc.backward(loss); optimizer.step(); optimizer.zero_grad()
mean = acc.mean(value)  # hvd.allreduce(value)
"""
FOREVER = timedelta(days=30)
STALLED = 60.0  # seconds of waiting before a warning
PATIENCE = 5.0  # seconds that rank 0 waits for the others before it leaves


class HorovodInternalError(WorldError):
    """An operation failed on all ranks, or the ranks could not agree on it."""


class NotInitializedError(EasympError, ValueError):
    """A call that needs `init` first."""


@dataclass
class Pending:
    """An operation between its request and its end.

    Attributes:
        tensor: the input; None for a barrier and a join.
        into: the target of an operation in place.
        finish: makes the caller's result of the output and the order.
        ready: on a GPU: event after which the input is computed.
        event: on a GPU: event after which the output is computed.
    """

    request: Request
    tensor: Tensor | None
    into: Tensor | None = None
    finish: Callable[[Tensor | None, Order], Any] = lambda output, order: output
    ready: Any = None
    event: Any = None
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: str = ""


class Engine:
    """One rank's part. `submit`, then `wait`.

    Args:
        world: of all ranks. In a world of one, operations are done at once.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: dict[str, Pending] = {}
        self._lock = threading.Lock()
        self._broken = ""
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        alone = world.size == 1
        group = None if alone else world.group(range(world.size))
        self._carrier = Carrier(group, world.rank, world.size, world.device)
        if alone:
            return
        number = world.store().add(f"horovod/{world.rank}", 1)
        self._start("requests", self._send, number)
        self._start("orders", self._follow, number)
        if world.rank == 0:
            self._start("table", self._decide, number)

    def _start(self, name: str, run: Callable[[dist.Store], None], number: int) -> None:
        store = dist.PrefixStore(
            f"horovod/{number}", self._world.store()
        )  # its own connection: the thread sleeps in it

        def guarded() -> None:
            try:
                run(store)
            except Exception as error:
                self._break(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

        thread = threading.Thread(target=guarded, name=f"easymp-horovod-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- the program's side -------------------------------------------------------------------------------------------

    def submit(self, pending: Pending) -> None:
        """Ask for an operation; it may be done before earlier ones."""
        request = pending.request
        if pending.tensor is not None and pending.tensor.is_cuda:
            pending.ready = torch.cuda.Event()
            pending.ready.record(torch.cuda.current_stream(pending.tensor.device))
        with self._lock:
            if self._broken:
                raise HorovodInternalError(self._broken)
            if request.name in self._pending:
                raise ValueError(
                    f"{request.name!r} is in flight: an operation of one name has to end (synchronize) before the next begins"
                )
            self._pending[request.name] = pending
        if self._threads:
            self._requests.put(request)
        else:
            self._carry(
                [Order(request._replace(root=0)) if request.kind == "join" else agree({0: request}, 1)]
            )

    def wait(self, pending: Pending) -> Any:
        """Its result, once all ranks have asked for it."""
        if pending.request.kind == "join":
            pending.done.wait()  # until the others have no more data
        elif not pending.done.wait(min(STALLED, self._world.timeout)):
            self._wait_longer(pending)
        if pending.error:
            raise HorovodInternalError(pending.error)
        if pending.event is not None:
            here = torch.cuda.current_stream(self._world.device)
            here.wait_event(pending.event)
            for part in pending.result if isinstance(pending.result, tuple) else (pending.result,):
                if isinstance(part, Tensor) and part.is_cuda:
                    part.record_stream(here)  # allocated on another stream, which must not reuse it earlier
        return pending.result

    def _wait_longer(self, pending: Pending) -> None:
        name, limit = pending.request.name, self._world.timeout
        if limit > STALLED:
            logger.warning("%s waits for other ranks since %g s\n%s", name, STALLED, self._report())
            if pending.done.wait(limit - STALLED):
                return
        late = f"not every rank asked for it within {limit:g} s (EASYMP_TIMEOUT sets the limit)"
        raise HorovodInternalError(f"{name}: {late}\n{self._report()}")

    def _report(self) -> str:
        return self._world.watch.report() if self._world.watch is not None else ""

    def close(self, why: str, patience: float) -> None:
        """Say to the others that this rank leaves, and end the threads. Operations in flight fail, here and there.

        Args:
            why: the reason for the others.
            patience: seconds that rank 0 waits for the others to leave.
        """
        if not self._threads:
            return
        self._requests.put(Request(why, "leave"))
        for thread in self._threads:
            thread.join(patience if thread.name.endswith("table") else 5.0)
        self._break(f"this rank has left: {why}")

    # -- the threads' side --------------------------------------------------------------------------------------------

    def _send(self, store: dist.Store) -> None:
        """Write requests, one line for all that have come meanwhile."""
        while True:
            batch = [self._requests.get()]
            while not self._requests.empty():
                batch.append(self._requests.get())
            store.set(f"ticket/{store.add('tickets', 1)}", f"{self._world.rank} {written(batch)}")
            if batch[-1].kind == "leave":
                return

    def _decide(self, store: dist.Store) -> None:
        """Rank 0: from tickets, in the order in which they were drawn, to lines that all ranks follow."""
        table, line = Table(self._world.size), count(1)
        for ticket in count(1):
            key = f"ticket/{ticket}"
            store.wait([key], FOREVER)
            rank, _, text = store.get(key).decode().partition(" ")
            store.delete_key(key)
            table.add(int(rank), read_requests(text))
            orders = table.complete()
            if orders:
                store.set(f"order/{next(line)}", written(orders))
            if len(table.left) == self._world.size:
                return

    def _follow(self, store: dist.Store) -> None:
        """Carry out the orders, line by line."""
        if self._world.device.type == "cuda":
            torch.cuda.set_device(self._world.device)
        readers = self._world.size
        for line in count(1):
            key = f"order/{line}"
            store.wait([key], FOREVER)
            text = store.get(key).decode()
            if store.add(f"read/{line}", 1) == readers:
                store.delete_key(key)
                store.delete_key(f"read/{line}")
            orders = read_orders(text)
            for batch in fusable([order for order in orders if order.request.kind != "leave"]):
                self._carry(batch)
            left = [order.request.root for order in orders if order.request.kind == "leave"]
            readers -= len(left)
            if self._world.rank in left:
                return

    def _carry(self, orders: list[Order]) -> None:
        with self._lock:
            found = [self._pending.get(order.request.name) for order in orders]
        done = orders[0].error or orders[0].request.kind == "join"
        outputs = [None] if done else self._on_stream(orders, found)
        for order, pending, output in zip(orders, found, outputs):
            if pending is None:
                continue
            pending.error = order.error
            if not order.error:
                in_place = pending.into is not None
                pending.result = pending.into if in_place else pending.finish(output, order)
            with self._lock:
                del self._pending[order.request.name]
            pending.done.set()

    def _on_stream(self, orders: list[Order], found: list[Pending | None]) -> list[Tensor | None]:
        tensors = [pending.tensor if pending is not None else None for pending in found]
        here = [pending for pending in found if pending is not None]
        if not any(pending.ready is not None for pending in here):
            return _into(found, self._carrier.carry(orders, tensors))
        stream = torch.cuda.Stream(self._world.device)
        with torch.cuda.stream(stream):
            for pending in here:
                stream.wait_event(pending.ready)
            outputs = _into(found, self._carrier.carry(orders, tensors))
            event = torch.cuda.Event()
            event.record(stream)
        for pending in here:
            pending.event = event
        for tensor in (*tensors, *outputs):
            if tensor is not None:
                tensor.record_stream(stream)
        return outputs

    def _break(self, why: str) -> None:
        """The ranks no longer talk: end every operation in flight with an error."""
        with self._lock:
            self._broken = self._broken or f"the ranks no longer talk ({why})"
            waited = bool(self._pending)
        report = f"\n{self._report()}" if waited else ""
        with self._lock:
            self._broken += report
            for pending in self._pending.values():
                pending.error = self._broken
                pending.done.set()
            self._pending.clear()


def _into(found: list[Pending | None], outputs: list[Tensor | None]) -> list[Tensor | None]:
    """Copy results of in-place operations to their tensors, and return the results.

    Parts of a fused reduction are cloned, so that a small one does not hold the memory of all.
    """
    given: list[Tensor | None] = []
    with torch.no_grad():
        for pending, output in zip(found, outputs):
            if pending is not None and output is not None and pending.into is not None:
                pending.into.detach().copy_(output)
            elif pending is not None and output is not None and output._base is not None:
                output = output.clone()
            given.append(output)
    return given


# -- init and shutdown, ranks and sizes ----------------------------------------------------------------------------------


@dataclass
class Run:
    """The world and engine that `init` made."""

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
    """Leave the other ranks: operations in flight, and later ones, raise HorovodInternalError there. Without `init` it does nothing.

    It is also called when the process ends; the other ranks are told the error that ended it.
    """
    global _run
    if _run is None or _run.process != os.getpid():  # a forked child has no part in it
        return
    run, _run = _run, None
    atexit.unregister(shutdown)
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    why = "hvd.shutdown(), or the end of its script"
    if error is not None:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    run.engine.close(why, PATIENCE if error is None else 0.0)
    run.world.close()


def running() -> Run:
    """The run that `init` made."""
    if _run is None:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    return _run


def is_initialized() -> bool:
    """Whether `init` has been called."""
    return _run is not None


def rank() -> int:
    """Rank of this process."""
    return running().world.rank


def size() -> int:
    """Number of processes."""
    return running().world.size


def local_rank() -> int:
    """Rank on this node."""
    return running().world.local_rank


def local_size() -> int:
    """Processes of this node."""
    return running().world.local_size


def cross_rank() -> int:
    """This node's number."""
    return running().world.rank // max(1, local_size())


def cross_size() -> int:
    """Nodes."""
    return running().world.ranks.nodes


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of processes: always."""
    running()
    return True
