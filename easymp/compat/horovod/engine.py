"""Operations by name, in one sequence on all ranks, while the program goes on.

Ranks may ask in different orders, as backward passes do. Each rank writes its requests to the store, rank 0 writes orders for the
operations that every rank has asked for, and each rank's thread carries out the orders in sequence. There is no polling: a thread
sleeps in the store until there is a next line. Operations that come together are reduced together.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed import World
from ...errors import WorldError
from ...logging import get_logger
from .execution import Carrier, Order, Request, Table, fusable

logger = get_logger(__name__)
FOREVER = timedelta(days=30)
STALLED = 60.0  # seconds of waiting before a warning


class HorovodInternalError(WorldError):
    """An operation failed on all ranks, or the ranks could not agree on it."""


@dataclass
class Pending:
    """An operation between its request and its end."""

    request: Request
    tensor: Tensor | None = None  # the input; None for a barrier and a join
    into: Tensor | None = None  # the target of an operation in place
    finish: Callable[[Any, Order], Any] | None = None  # makes the caller's result of the output and the order
    ready: Any = None  # on a GPU: event after which the input is computed
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
        self._pending: dict[Any, Pending] = {}
        self._lock = threading.Lock()
        self._broken = ""
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._table = Table(world.size)
        self._carriers: dict[tuple[int, ...], Carrier] = {}
        self.open(())
        if world.size == 1:
            return
        number = world.store().add(f"horovod/{world.rank}", 1)
        self._start("requests", self._send, number)
        self._start("orders", self._follow, number)
        if world.rank == 0:
            self._start("table", self._decide, number)

    def open(self, ranks: Sequence[int]) -> None:
        """Connect these ranks, or all of them for ``()``; every rank calls it."""
        members = ranks or range(self._world.size)
        group = self._world.group(members) if self._world.size > 1 else None
        if self._world.rank in members:
            self._carriers[tuple(ranks)] = Carrier(group, members, self._world.rank)

    def close_set(self, ranks: Sequence[int]) -> None:
        """Forget what `open` connected."""
        carrier = self._carriers.pop(tuple(ranks), None)
        if carrier is not None and carrier.group is not None:
            dist.destroy_process_group(carrier.group)

    def _start(self, name: str, run: Callable[[dist.Store], None], number: int) -> None:
        # Its own connection: the thread sleeps in it.
        store = dist.PrefixStore(f"horovod/{number}", self._world.store())

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
            pending.ready = torch.cuda.current_stream(pending.tensor.device).record_event()
        with self._lock:
            if self._broken:
                raise HorovodInternalError(self._broken)
            if request.key in self._pending:
                raise ValueError(
                    f"{request.name!r} is in flight: an operation of one name has to end (synchronize) before the next begins"
                )
            self._pending[request.key] = pending
        if self._threads:
            self._requests.put(request)
        else:
            self._table.add(0, [request])
            self._carry_all(self._table.complete())

    def wait(self, pending: Pending) -> Any:
        """Its result, once all ranks have asked for it."""
        name, limit = pending.request.name, self._world.timeout
        if pending.request.kind == "join":
            pending.done.wait()  # until the others have no more data
        elif not pending.done.wait(min(STALLED, limit)):
            if limit > STALLED:
                logger.warning("%s waits for other ranks since %g s\n%s", name, STALLED, self._report())
            if not pending.done.wait(max(0.0, limit - STALLED)):
                late = f"not every rank asked for it within {limit:g} s (EASYMP_TIMEOUT sets the limit)"
                raise HorovodInternalError(f"{name}: {late}\n{self._report()}")
        if pending.error:
            raise HorovodInternalError(pending.error)
        for part in pending.result if isinstance(pending.result, tuple) else (pending.result,):
            if isinstance(part, Tensor) and part.is_cuda:
                # Its memory is the other stream's, which must not use it again before this stream has read it.
                part.record_stream(torch.cuda.current_stream(part.device))
        return pending.result

    def _report(self) -> str:
        return self._world.watch.report() if self._world.watch is not None else ""

    def close(self, why: str, patience: float) -> None:
        """Tell the others why this rank leaves, and end the threads; rank 0 waits `patience` seconds for the others to leave, too."""
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
            store.set(f"ticket/{store.add('tickets', 1)}", json.dumps([self._world.rank, batch]))
            if batch[-1].kind == "leave":
                return

    def _decide(self, store: dist.Store) -> None:
        """Rank 0: from tickets, in the order in which they were drawn, to lines that all ranks follow."""
        line = count(1)
        for ticket in count(1):
            key = f"ticket/{ticket}"
            store.wait([key], FOREVER)
            rank, requests = json.loads(store.get(key))
            store.delete_key(key)
            self._table.add(rank, [Request(*fields) for fields in requests])
            orders = self._table.complete()
            if orders:
                store.set(f"order/{next(line)}", json.dumps(orders))
            if len(self._table.left) == self._world.size:
                return

    def _follow(self, store: dist.Store) -> None:
        """Carry out the orders, line by line."""
        cuda = self._world.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self._world.device)
        # Beside the program's stream; torch.cuda.stream(None) does nothing.
        with torch.cuda.stream(torch.cuda.Stream() if cuda else None):
            readers = self._world.size
            for line in count(1):
                key = f"order/{line}"
                store.wait([key], FOREVER)
                orders = [Order(Request(*request), *more) for request, *more in json.loads(store.get(key))]
                if store.add(f"read/{line}", 1) == readers:
                    store.delete_key(key)
                    store.delete_key(f"read/{line}")
                self._carry_all([order for order in orders if order.request.kind != "leave"])
                left = [order.request.root for order in orders if order.request.kind == "leave"]
                readers -= len(left)
                if self._world.rank in left:
                    return

    def _carry_all(self, orders: list[Order]) -> None:
        """Carry out those orders that concern this rank."""
        for batch in fusable([o for o in orders if tuple(o.request.ranks) in self._carriers]):
            with self._lock:
                found = [self._pending.get(order.request.key) for order in batch]
            skipped = batch[0].error or batch[0].request.kind == "join"
            outputs = [None] * len(batch) if skipped else self._carry(batch, found)
            for order, pending, output in zip(batch, found, outputs):
                if pending is None:
                    continue
                pending.error, pending.result = order.error, output
                if pending.finish is not None and not order.error:
                    pending.result = pending.finish(output, order)
                with self._lock:
                    del self._pending[order.request.key]
                pending.done.set()

    @torch.no_grad()
    def _carry(self, batch: list[Order], found: list[Pending | None]) -> list[Tensor | None]:
        """Outputs, computed: the program's stream need not wait for this one."""
        carrier = self._carriers[tuple(batch[0].request.ranks)]
        events = [pending.ready for pending in found if pending is not None and pending.ready is not None]
        for event in events:
            event.wait()
        outputs = list(carrier.carry(batch, list(map(self._input, batch, found))))
        for i, (pending, output) in enumerate(zip(found, outputs)):
            if pending is not None and pending.into is not None and output is not None:
                outputs[i] = pending.into
                pending.into.detach().copy_(output)
        if events and self._threads:
            torch.cuda.current_stream().synchronize()
        return outputs

    def _input(self, order: Order, pending: Pending | None) -> Tensor:
        """The tensor; the zeros of a rank that joined, and of a barrier."""
        if pending is not None and pending.tensor is not None:
            return pending.tensor
        request, own = order.request, self._world.device
        kind = getattr(torch, request.dtype or "float32")
        place = own if request.device in ("", own.type) else request.device
        return torch.zeros(tuple(request.shape), dtype=kind, device=place)

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
