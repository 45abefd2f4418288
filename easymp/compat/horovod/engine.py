"""Operations by name, in one sequence on all ranks, while the program goes on.

Ranks may ask in different orders, as backward passes do. Each rank writes its requests to the store, rank 0 writes orders for the
operations that every rank has asked for, and each rank's thread carries out the orders in sequence, by torch.distributed. There is no
polling: a thread sleeps in the store until there is a next line. Operations that come together are reduced together.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from ...distributed import World
from ...distributed.process_group import MOVABLE, OPS, odd_one_out
from ...errors import WorldError
from ...logging import get_logger

logger = get_logger(__name__)
FOREVER = timedelta(days=30)
STALLED = 60.0  # seconds of waiting before a warning
FUSED = 64 << 20  # bytes that are reduced at a time
ROWS = ("allgather", "alltoall")  # dimension 0 may differ
# Fields that must be equal on all ranks, by kind of operation.
ALIKE = {
    **dict.fromkeys(
        ("allreduce", "reducescatter"), ("shape", "dtype", "op", "prescale", "postscale", "device")
    ),
    **dict.fromkeys(ROWS, ("dtype", "device")),
    "broadcast": ("shape", "dtype", "root", "device"),
    "barrier": (),
}


class Op(IntEnum):
    """Kind of a reduction, with Horovod's numbers. Averages of integers are rounded toward zero."""

    Average, Sum, Adasum, Min, Max, Product = range(6)


class Request(NamedTuple):
    """One operation of one rank."""

    name: str  # brings the requests of the ranks together, in any order; the reason, of a rank that leaves
    kind: str  # a key of `ALIKE`, "join" or "leave"
    ranks: Sequence[int] = ()  # of its process set; empty for all ranks
    shape: Sequence[int] = ()
    dtype: str = ""
    device: str = ""  # its type
    op: str = ""  # the name of an `Op`
    root: int = -1  # of a broadcast
    prescale: float = 1.0
    postscale: float = 1.0
    splits: Sequence[int] = ()  # rows for each rank, of an alltoall

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Name and process set."""
        return self.name, tuple(self.ranks)


class Order(NamedTuple):
    """An agreed operation, which its ranks carry out next."""

    request: Request  # that of the first rank that asked
    rows: Sequence[Sequence[int]] = ()  # by rank: the length of an allgather, the splits of an alltoall
    error: str = ""  # why it is not carried out, on all ranks


class Table:
    """Rank 0's table of the ranks' requests."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.joined: list[int] = []  # ranks without more data, in the order in which they said so
        self.left: dict[int, str] = {}  # ranks that shut down, and why; from then on nothing can be agreed on
        self._leaving: list[Order] = []
        self._waiting: dict[Any, dict[int, Request]] = {}

    def add(self, rank: int, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.kind == "join":
                self.joined.append(rank)
            elif request.kind == "leave":
                self.left[rank] = request.name
                self._leaving.append(Order(Request(request.name, "leave", root=rank)))
            else:
                self._waiting.setdefault(request.key, {})[rank] = request

    def complete(self) -> list[Order]:
        """Remove and return operations that every rank asked for (or joined before), or that a rank left; then the ranks that left."""
        orders = []
        for (name, ranks), asked in list(self._waiting.items()):
            joined = [] if ranks else self.joined  # a rank that joined still takes part in its process sets
            if len(asked.keys() | set(joined)) == (len(ranks) or self.size):
                orders.append(agree(self._waiting.pop((name, ranks)), joined))
        if len(self.joined) == self.size:
            orders.append(Order(Request("join", "join", root=self.joined[-1])))
            self.joined.clear()
        if self.left:
            why = "; ".join(f"rank {rank} has left ({why})" for rank, why in self.left.items())
            why += ". A rank that only runs out of data calls hvd.join() first"
            waiting = [next(iter(requests.values())) for requests in self._waiting.values()]
            waiting += [Request("join", "join")] * bool(self.joined)
            orders += [Order(request, error=f"{request.name}: {why}") for request in waiting]
            self._waiting.clear()
            self.joined.clear()
        orders, self._leaving = orders + self._leaving, []
        return orders


def agree(asked: Mapping[int, Request], joined: Sequence[int] = ()) -> Order:
    """The order that follows from the ranks' requests of one name."""
    ranks, several = zip(*sorted(asked.items()))
    if error := _fault(ranks, several, joined):
        return Order(several[0], error=f"{several[0].name}: {error}")
    rows = {"allgather": [request.shape[:1] for request in several], "alltoall": [r.splits for r in several]}
    return Order(several[0], rows.get(several[0].kind, ()))


def _fault(ranks: Sequence[int], asked: Sequence[Request], joined: Sequence[int]) -> str:
    """Why the requests do not fit together, or ``""``."""
    kind, shapes = asked[0].kind, [request.shape for request in asked]
    facts = {word: [getattr(request, word) for request in asked] for word in ALIKE[kind]}
    if kind in ROWS:
        facts["shape, beyond dimension 0"] = [shape[1:] for shape in shapes]
        if not all(shapes):
            return "a scalar has no dimension 0: pass tensor[None]"
    for word, values in facts.items():
        if any(value != values[0] for value in values):
            return f"the ranks' calls differ in {word}: {odd_one_out(values, ranks=ranks)}"
    if joined and kind not in ("allreduce", "barrier"):
        return f"{kind} needs every rank, and rank {', '.join(map(str, joined))} joined: it has no more data"
    return ""


def fusable(orders: Sequence[Order]) -> Iterator[list[Order]]:
    """`orders` in their sequence; neighbours that one reduction can carry out are together, up to 64 MiB."""
    batch: list[Order] = []
    last, held = None, 0
    for order in orders:
        request = order.request
        fuses = request.kind == "allreduce" and request.op != "Adasum" and not order.error
        how = request._replace(name="", shape=()) if fuses else None
        size = getattr(torch, request.dtype or "uint8").itemsize * torch.Size(request.shape).numel()
        if batch and (how is None or how != last or held + size > FUSED):
            yield batch
            batch, held = [], 0
        batch.append(order)
        last, held = how, held + size
    if batch:
        yield batch


class Carrier:
    """Carries operations out among the ranks of a process set; `group` is None where this process is alone."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int) -> None:
        self.group, self._size = group, len(ranks)
        self._rank = list(ranks).index(rank)

    def carry(self, orders: Sequence[Order], tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Outputs of `orders` that `fusable` put together, as new tensors."""
        how = orders[0].request
        if len(tensors) == 1:
            return [getattr(self, how.kind)(orders[0], tensors[0])]
        flat = self._reduced(torch.cat([tensor.reshape(-1) for tensor in tensors]), how)
        # Clones: a small one does not hold the memory of all.
        return [part.clone() for part in _unflatten_dense_tensors(flat, tensors)]

    def allreduce(self, order: Order, tensor: Tensor) -> Tensor:
        return self._reduced(_copy(tensor), order.request)

    def _reduced(self, flat: Tensor, how: Request) -> Tensor:
        """A reduction in place, or by way of a type that every backend has; averages of integers are rounded toward zero."""
        dtype = flat.dtype
        if dtype not in MOVABLE:
            flat = flat.to(torch.float32 if dtype.is_floating_point else torch.int64)
        flat = _scaled(flat, how.prescale)
        if how.op == "Adasum":
            flat = adasum(self._all(flat))
        elif self.group is not None:
            dist.all_reduce(flat, OPS["sum" if how.op == "Average" else how.op.lower()], group=self.group)
        if how.op == "Average":
            flat = flat.div(self._size, rounding_mode=None if flat.is_floating_point() else "trunc")
        return _scaled(flat, how.postscale).to(dtype)

    def barrier(self, order: Order, tensor: Tensor) -> None:
        self._all(tensor)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """The ranks' tensors of one shape."""
        if self.group is None:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        dist.all_gather(parts, tensor, group=self.group)
        return parts

    def reducescatter(self, order: Order, tensor: Tensor) -> Tensor:
        # Earlier ranks get one row more, where the size does not divide.
        return _copy(self._reduced(_copy(tensor), order.request).tensor_split(self._size)[self._rank])

    # Moves go as bytes: backends do not have all types.

    def allgather(self, order: Order, tensor: Tensor) -> Tensor:
        lengths, rest = [rows for (rows,) in order.rows], tensor.shape[1:]
        longest = max(lengths)
        padded = tensor.new_zeros((longest, *rest))
        padded[: tensor.shape[0]] = tensor
        parts = zip(self._all(padded.reshape(-1).view(torch.uint8)), lengths)
        return torch.cat([part.view(tensor.dtype).view(longest, *rest)[:rows] for part, rows in parts])

    def broadcast(self, order: Order, tensor: Tensor) -> Tensor:
        done = _copy(tensor)
        if self.group is not None and done.numel():
            dist.broadcast(done.reshape(-1).view(torch.uint8), order.request.root, group=self.group)
        return done

    def alltoall(self, order: Order, tensor: Tensor) -> Tensor:
        rows, own = [splits[self._rank] for splits in order.rows], order.rows[self._rank]
        sent = _copy(tensor[: sum(own)])
        if self.group is None:
            return sent
        out = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        row = torch.Size(tensor.shape[1:]).numel() * tensor.element_size()  # bytes
        flat = [each.reshape(-1).view(torch.uint8) for each in (out, sent)]
        dist.all_to_all_single(*flat, [row * n for n in rows], [row * n for n in own], group=self.group)
        return out


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy: callers may change results in place, under autograd too."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """`tensor` times `factor`, integers by way of doubles."""
    if factor == 1.0:
        return tensor
    return (tensor * factor if tensor.is_floating_point() else tensor.double() * factor).to(tensor.dtype)


def adasum(tensors: Sequence[Tensor]) -> Tensor:
    """Adasum of the ranks' tensors, a power of two of them, in rank order, as a tree; dot products in double precision."""
    if len(tensors) > 2:
        return adasum([adasum(tensors[i : i + 2]) for i in range(0, len(tensors), 2)])
    if len(tensors) == 1:
        return tensors[0]
    a, b = (tensor.double() for tensor in tensors)
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    # A tensor of zeros has no effect: 0 / 1 stands for 0 / 0.
    mixed = (1 - dot / (2 * aa).where(aa > 0, 1)) * a + (1 - dot / (2 * bb).where(bb > 0, 1)) * b
    return mixed.to(tensors[0].dtype)


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
    """One rank's part: `submit`, then `wait`. In a `world` of one, operations are done at once."""

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
                raise ValueError(f"{request.name!r} is in flight: synchronize it before one of this name")
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
        report = f"\n{self._report()}" if self._pending else ""
        with self._lock:
            self._broken += report
            for pending in self._pending.values():
                pending.error = self._broken
                pending.done.set()
            self._pending.clear()
