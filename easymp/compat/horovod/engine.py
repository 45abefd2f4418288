"""Operations by name: ranks may request them in different orders, and all ranks execute them in one sequence.

Each rank puts its requests into rank 0's queue in the store. Rank 0 puts an order into every rank's queue for each
operation that every rank has requested. A thread of each rank executes the orders by torch.distributed while the
program goes on. Threads sleep in the store, so there is no polling. Reductions ordered together are executed as one.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from ...distributed import World
from ...distributed.process_group import MOVABLE, OPS, odd_one_out
from ...errors import WorldError

FOREVER = timedelta(days=30)
FUSION_BYTES = 64 << 20  # reduced as one at most
RAGGED = ("allgather", "alltoall")  # dimension 0 may differ between the ranks


class HorovodInternalError(WorldError):
    """An operation failed on all ranks, or the ranks' requests did not fit together."""


class Op(IntEnum):
    """Kind of a reduction, with Horovod's numbers. Averages of integers are rounded toward zero."""

    Average, Sum, Adasum, Min, Max, Product = range(6)


# -- what the ranks agree on


class Request(NamedTuple):
    """One operation of one rank."""

    name: str  # the same on all ranks; the reason for leaving, for the kind "leave"
    kind: str  # a method of `Collectives`, "join" or "leave"
    ranks: Sequence[int] = ()  # of its process set; empty for all ranks
    shape: Sequence[int] = ()
    dtype: str = "uint8"
    device: str = "cpu"  # its type
    op: str = ""  # the name of an `Op`
    root: int = -1  # of a broadcast
    prescale: float = 1.0
    postscale: float = 1.0
    splits: Sequence[int] = ()  # rows for each rank, of an alltoall

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Name and process set."""
        return self.name, tuple(self.ranks)


JOIN = Request("join", "join")


class Order(NamedTuple):
    """An operation that its ranks execute next."""

    request: Request  # that of the first rank
    rows: Sequence[Sequence[int]] = ()  # by rank: the length of an allgather, the splits of an alltoall
    error: str = ""  # why it fails on all ranks


class Table:
    """Rank 0's table of the ranks' requests."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.departures: dict[int, str] = {}  # rank that shut down → its reason; later requests fail
        self._waiting: dict[Any, dict[int, Request]] = {}

    def add(self, rank: int, request: Request) -> list[Order]:
        """Take a request of a rank; returns the operations that every rank has requested now, then a departure."""
        orders: list[Order] = []
        if request.kind == "leave":
            self.departures[rank] = request.name
        else:
            self._waiting.setdefault(request.key, {})[rank] = request
        joined = list(self._waiting.get(JOIN.key, ()))  # ranks without more data, in the order of their calls
        for key in list(self._waiting) if request.key == JOIN.key else [request.key]:
            # A rank that joined still takes part in its process sets.
            by_rank, ranks = self._waiting.get(key, {}), key[1]
            absent = [] if ranks or key == JOIN.key else [rank for rank in joined if rank not in by_rank]
            if by_rank and len(by_rank) + len(absent) == (len(ranks) or self.size):
                order = Order(JOIN._replace(root=joined[-1])) if key == JOIN.key else make_order(by_rank, absent)
                orders.append(order)
                del self._waiting[key]
        if self.departures:  # every waiting operation fails
            reason = "; ".join(f"rank {rank} has left ({reason})" for rank, reason in self.departures.items())
            reason += ". A rank that only runs out of data calls hvd.join() first"
            waiting = [next(iter(by_rank.values())) for by_rank in self._waiting.values()]
            orders += [Order(request, error=f"{request.name}: {reason}") for request in waiting]
            self._waiting.clear()
        return [*orders, Order(request._replace(root=rank))] if request.kind == "leave" else orders


def make_order(requests_by_rank: Mapping[int, Request], joined: Sequence[int] = ()) -> Order:
    """The order for the ranks' requests of one name, with an error where they do not fit together."""
    ranks, requests = zip(*sorted(requests_by_rank.items()))
    request: Request = requests[0]
    kind, error = request.kind, ""
    facts = {name: [getattr(request, name) for request in requests] for name in Request._fields if name != "splits"}
    if kind in RAGGED:
        facts["shape, beyond dimension 0"] = [shape[1:] for shape in facts.pop("shape")]
    different = next((name for name, values in facts.items() if any(value != values[0] for value in values)), None)
    if kind in RAGGED and not all(request.shape for request in requests):
        error = "a scalar has no dimension 0: pass tensor[None]"
    elif different is not None:
        error = f"the ranks' calls differ in {different}: {odd_one_out(facts[different], ranks=ranks)}"
    elif joined and kind != "allreduce":
        error = f"{kind} needs every rank, and rank {', '.join(map(str, joined))} joined: it has no more data"
    rows = [request.shape[:1] if kind == "allgather" else request.splits for request in requests]
    return Order(request, rows, error and f"{request.name}: {error}")


def fused(orders: Sequence[Order]) -> list[list[Order]]:
    """`orders` in their sequence, in batches; neighbouring reductions of one kind are together, about 64 MiB."""

    def kind(order: Order) -> Request:
        request = order.request
        fuses = request.kind == "allreduce" and request.op != "Adasum" and not order.error
        return request._replace(name="", shape=()) if fuses else request

    sizes = (getattr(torch, o.request.dtype).itemsize * torch.Size(o.request.shape).numel() for o in orders)
    numbered = [(kind(order), end // FUSION_BYTES, order) for order, end in zip(orders, accumulate(sizes))]
    return [[order for *_, order in batch] for _, batch in groupby(numbered, key=lambda item: item[:2])]


# -- their execution


class Collectives:
    """Executes orders among the ranks of a process set; `group` is None in a world of one."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int) -> None:
        self.group, self._size = group, len(ranks)
        self._rank = list(ranks).index(rank)

    def execute(self, orders: Sequence[Order], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Results of a batch of `fused`, which share no memory with `tensors`; those of several are views."""
        if len(tensors) == 1:
            return [getattr(self, orders[0].request.kind)(orders[0], tensors[0])]
        flat = self.allreduce(orders[0], torch.cat([tensor.reshape(-1) for tensor in tensors]), copy=False)
        return list(_unflatten_dense_tensors(flat, tensors))

    def allreduce(self, order: Order, tensor: Tensor, copy: bool = True) -> Tensor:
        request, dtype = order.request, tensor.dtype
        movable = dtype if dtype in MOVABLE else torch.float32 if dtype.is_floating_point else torch.int64
        contiguous = tensor.to(movable, copy=copy, memory_format=torch.contiguous_format)
        result = _scaled(contiguous, request.prescale)
        if request.op == "Adasum":
            result = adasum(self._all_gather(result))
        elif self.group is not None:
            dist.all_reduce(result, OPS["sum" if request.op == "Average" else request.op.lower()], group=self.group)
        if request.op == "Average":
            result = result.div(self._size, rounding_mode=None if result.is_floating_point() else "trunc")
        return _scaled(result, request.postscale).to(dtype)

    def reducescatter(self, order: Order, tensor: Tensor) -> Tensor:
        # Earlier ranks get one row more, where the size does not divide.
        return self.allreduce(order, tensor).tensor_split(self._size)[self._rank].clone()

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        if self.group is None:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(self._size)]
        dist.all_gather(tensors, tensor, group=self.group)
        return tensors

    # Moves go as bytes: backends do not have all dtypes.

    def allgather(self, order: Order, tensor: Tensor) -> Tensor:
        lengths, row_shape = [rows for (rows,) in order.rows], tensor.shape[1:]
        longest = max(lengths)
        padded = tensor.new_zeros((longest, *row_shape))
        padded[: tensor.shape[0]] = tensor
        gathered = self._all_gather(padded.reshape(-1).view(torch.uint8))
        tensors = (data.view(tensor.dtype).view(longest, *row_shape) for data in gathered)
        return torch.cat([padded[:length] for padded, length in zip(tensors, lengths)])

    def broadcast(self, order: Order, tensor: Tensor) -> Tensor:
        result = tensor.contiguous().clone()
        if self.group is not None and result.numel():
            dist.broadcast(result.reshape(-1).view(torch.uint8), order.request.root, group=self.group)
        return result

    def alltoall(self, order: Order, tensor: Tensor) -> Tensor:
        rows_in, rows_out = [splits[self._rank] for splits in order.rows], order.rows[self._rank]
        sent = tensor[: sum(rows_out)].contiguous().clone()
        if self.group is None:
            return sent
        received = tensor.new_empty((sum(rows_in), *tensor.shape[1:]))
        row_bytes = torch.Size(tensor.shape[1:]).numel() * tensor.element_size()
        dist.all_to_all_single(
            received.reshape(-1).view(torch.uint8),
            sent.reshape(-1).view(torch.uint8),
            [row_bytes * rows for rows in rows_in],
            [row_bytes * rows for rows in rows_out],
            group=self.group,
        )
        return received


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """`tensor` times `factor`, integers by way of doubles."""
    if factor == 1.0:
        return tensor
    return (tensor * factor if tensor.is_floating_point() else tensor.double() * factor).to(tensor.dtype)


def adasum(tensors: Sequence[Tensor]) -> Tensor:
    """Adasum of a power of two of tensors, in rank order, as a tree. Dot products are in double precision."""
    if len(tensors) > 2:
        return adasum([adasum(tensors[i : i + 2]) for i in range(0, len(tensors), 2)])
    if len(tensors) == 1:
        return tensors[0]
    a, b = (tensor.double() for tensor in tensors)
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    # A tensor of zeros has no effect: 0 / 1 stands for 0 / 0.
    mixed = (1 - dot / (2 * aa).where(aa > 0, 1)) * a + (1 - dot / (2 * bb).where(bb > 0, 1)) * b
    return mixed.to(tensors[0].dtype)


# -- one rank's part


@dataclass
class Pending:
    """An operation between its request and its end."""

    request: Request
    tensor: Any = None  # the input; None for a join
    target: Tensor | None = None  # of an operation in place
    input_event: Any = None  # on a GPU: recorded once the input is computed
    result: Future[tuple[Any, Order]] = field(default_factory=Future)  # the output, None of a join


class Engine:
    """One rank's part: `submit` an operation, then `wait` for it. In a world of one it is executed at once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: dict[Any, Pending] = {}
        self._lock = threading.Lock()
        self._failure = ""  # of all later operations
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._table = Table(world.size)
        self._collectives: dict[tuple[int, ...], Collectives] = {}
        self.open(())
        self._threads: list[threading.Thread] = []
        if world.size == 1:
            return
        number = world.store().add(f"horovod/{world.rank}", 1)
        loops = {"requests": self._send_requests, "orders": self._execute_orders}
        for name, loop in (loops if world.rank else {**loops, "table": self._write_orders}).items():
            store = dist.PrefixStore(f"horovod/{number}", world.store())  # the thread's own connection
            store.set_timeout(FOREVER)
            thread = threading.Thread(target=self._run, args=(loop, store), name=f"easymp-horovod-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def open(self, ranks: Sequence[int]) -> None:
        """Make the collectives of these ranks; ``()`` means all. Every rank of the world calls it."""
        members = ranks or range(self._world.size)
        group = self._world.group(members) if self._world.size > 1 else None
        if self._world.rank in members:
            self._collectives[tuple(ranks)] = Collectives(group, members, self._world.rank)

    # -- on the program's thread

    def submit(self, pending: Pending) -> None:
        """Request an operation; it may be executed before earlier ones."""
        request = pending.request
        if pending.tensor is not None and pending.tensor.is_cuda:
            pending.input_event = torch.cuda.current_stream(pending.tensor.device).record_event()
        with self._lock:
            if self._failure:
                raise HorovodInternalError(self._failure)
            if request.key in self._pending:
                raise ValueError(f"{request.name!r} is in flight: synchronize it before one of this name")
            self._pending[request.key] = pending
        if self._threads:
            self._requests.put(request)
        else:
            self._execute(self._table.add(0, request))

    def wait(self, pending: Pending) -> tuple[Any, Order]:
        """The output, and the order that all ranks executed once they had requested the operation."""
        request = pending.request
        limit = None if request.kind == "join" else self._world.timeout  # a join waits for the other ranks' data to end
        try:
            output, order = pending.result.result(limit)
        except TimeoutError:
            reason = f"not every rank asked for it within {limit:g} s (EASYMP_TIMEOUT sets the limit)"
            raise HorovodInternalError(f"{request.name}: {reason}\n{self._report()}") from None
        if output is not None and output.is_cuda:
            # The engine's stream, which owns the memory, must not use it again before this stream has read it.
            output.record_stream(torch.cuda.current_stream(output.device))
        return output, order

    def _report(self) -> str:
        return self._world.watch.report() if self._world.watch is not None else ""

    def close(self, reason: str, patience: float) -> None:
        """Tell the other ranks why this one leaves, and end the threads; rank 0 waits `patience` seconds for theirs."""
        if not self._threads:
            return
        self._requests.put(Request(reason, "leave"))
        for thread, limit in zip(self._threads, (5.0, 5.0, patience)):
            thread.join(limit)
        self._fail_all(f"this rank has left: {reason}")

    # -- on the engine's threads

    def _run(self, loop: Callable[[dist.Store], None], store: dist.Store) -> None:
        try:
            loop(store)
        except Exception as error:
            self._fail_all(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _send_requests(self, store: dist.Store) -> None:
        """Put requests into rank 0's queue, all together that have come meanwhile."""
        requests: list[Request] = []
        while not requests or requests[-1].kind != "leave":
            requests = [self._requests.get()]
            while not self._requests.empty():
                requests.append(self._requests.get())
            store.queue_push("requests", json.dumps([self._world.rank, requests]))

    def _write_orders(self, store: dist.Store) -> None:
        """On rank 0: read the requests as they come, and put orders into the queues of all ranks."""
        while len(self._table.departures) < self._world.size:
            rank, requests = json.loads(store.queue_pop("requests"))
            orders = [order for fields in requests for order in self._table.add(rank, Request(*fields))]
            for receiver in range(self._world.size if orders else 0):
                store.queue_push(f"orders/{receiver}", json.dumps(orders))

    def _execute_orders(self, store: dist.Store) -> None:
        cuda = self._world.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self._world.device)
        departed: list[int] = []
        # Beside the program's stream; torch.cuda.stream(None) does nothing.
        with torch.cuda.stream(torch.cuda.Stream() if cuda else None):
            while self._world.rank not in departed:
                fields = json.loads(store.queue_pop(f"orders/{self._world.rank}"))
                orders = [Order(Request(*request), *results) for request, *results in fields]
                self._execute([order for order in orders if order.request.kind != "leave"])
                departed = [order.request.root for order in orders if order.request.kind == "leave"]

    def _execute(self, orders: list[Order]) -> None:
        for batch in fused([order for order in orders if tuple(order.request.ranks) in self._collectives]):
            pendings = [self._pending.get(order.request.key) or self._of_joined(order.request) for order in batch]
            outputs: Sequence[Any] = [None] * len(batch)
            if not batch[0].error and batch[0].request.kind != "join":
                outputs = self._execute_batch(batch, pendings)
            for order, pending, output in zip(batch, pendings, outputs):
                with self._lock:
                    self._pending.pop(order.request.key, None)
                if order.error:
                    pending.result.set_exception(HorovodInternalError(order.error))
                else:
                    pending.result.set_result((output, order))

    def _of_joined(self, request: Request) -> Pending:
        """The part of a rank that joined: zeros."""
        device = self._world.device if request.device == self._world.device.type else torch.device(request.device)
        dtype = getattr(torch, request.dtype)
        return Pending(request, torch.zeros(tuple(request.shape), dtype=dtype, device=device))

    @torch.no_grad()
    def _execute_batch(self, batch: list[Order], pendings: list[Pending]) -> list[Tensor]:
        """Results, computed: the program's stream need not wait for this one."""
        events = [pending.input_event for pending in pendings if pending.input_event]
        for event in events:
            event.wait()
        tensors = [pending.tensor for pending in pendings]
        outputs = list(self._collectives[tuple(batch[0].request.ranks)].execute(batch, tensors))
        for i, pending in enumerate(pendings):
            if pending.target is not None:
                pending.target.detach().copy_(outputs[i])
                outputs[i] = pending.target
            elif len(batch) > 1:  # a small result must not hold the memory of all
                outputs[i] = outputs[i].clone()
        if events and self._threads:
            torch.cuda.current_stream().synchronize()
        return outputs

    def _fail_all(self, reason: str) -> None:
        """End every operation in flight, and each later one, with an error."""
        report = f"\n{self._report()}" if self._pending else ""
        with self._lock:
            self._failure = (self._failure or f"the ranks no longer talk ({reason})") + report
            pendings = list(self._pending.values())
            self._pending.clear()
        for pending in pendings:
            pending.result.set_exception(HorovodInternalError(self._failure))
