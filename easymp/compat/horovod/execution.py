"""Requests of the ranks, the orders that rank 0 makes of them, and their execution by torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.process_group import MOVABLE, OPS, odd_one_out

FUSED = 64 << 20  # bytes that are reduced at a time
# Fields that must be equal on all ranks, by kind of operation.
REDUCED = ("shape", "dtype", "op", "prescale", "postscale", "device")
ALIKE = {
    "allreduce": REDUCED,
    "reducescatter": REDUCED,
    "broadcast": ("shape", "dtype", "root", "device"),
    "allgather": ("dtype", "device"),
    "alltoall": ("dtype", "device"),
    "barrier": (),
}
ROWS = ("allgather", "alltoall")  # dimension 0 may differ


class Op(IntEnum):
    """Kind of a reduction, with Horovod's numbers. Averages of integers are rounded toward zero."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


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
        self._leaving: list[int] = []
        self._waiting: dict[Any, dict[int, Request]] = {}

    def add(self, rank: int, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.kind == "join":
                self.joined.append(rank)
            elif request.kind == "leave":
                self.left[rank] = request.name
                self._leaving.append(rank)
            else:
                self._waiting.setdefault(request.key, {})[rank] = request

    def complete(self) -> list[Order]:
        """Remove and return operations that every rank asked for (or joined before), or that a rank left; then the ranks that left."""
        orders = []
        for key, asked in list(self._waiting.items()):
            joined = [] if key[1] else self.joined  # a rank that joined still takes part in its process sets
            if len(asked.keys() | set(joined)) == (len(key[1]) or self.size):
                orders.append(agree(self._waiting.pop(key), self.size, joined))
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
        orders += [Order(Request(self.left[rank], "leave", root=rank)) for rank in self._leaving]
        self._leaving.clear()
        return orders


def agree(asked: Mapping[int, Request], size: int, joined: Sequence[int] = ()) -> Order:
    """The order that follows from the ranks' requests of one name."""
    ranks = sorted(asked)
    several = [asked[rank] for rank in ranks]
    first = several[0]
    if error := _fault(ranks, several, size, joined):
        return Order(first, error=f"{first.name}: {error}")
    rows = {"allgather": [request.shape[:1] for request in several], "alltoall": [r.splits for r in several]}
    return Order(first, rows.get(first.kind, ()))


def _fault(ranks: Sequence[int], asked: Sequence[Request], size: int, joined: Sequence[int]) -> str:
    """Why the requests do not fit together, or ``""``."""
    first, shapes = asked[0], [request.shape for request in asked]
    for word in ALIKE[first.kind]:
        values = [getattr(request, word) for request in asked]
        if any(value != values[0] for value in values):
            return f"the ranks' calls differ in {word}: {odd_one_out(values, ranks=ranks)}"
    if first.kind in ROWS and not all(shapes):
        return "a scalar has no dimension 0: pass tensor[None]"
    if first.kind in ROWS and any(shape[1:] != shapes[0][1:] for shape in shapes):
        return f"the ranks' calls differ in shape, beyond dimension 0: {odd_one_out(shapes, ranks=ranks)}"
    if joined and first.kind not in ("allreduce", "barrier"):
        return f"{first.kind} needs every rank, and rank {', '.join(map(str, joined))} joined: it has no more data"
    return ""


def fusable(orders: Sequence[Order]) -> Iterator[list[Order]]:
    """`orders` in their sequence; neighbours that one reduction can carry out are together, up to 64 MiB."""
    batch: list[Order] = []
    held = 0
    for order in orders:
        request, error = order.request, order.error
        fuses = request.kind == "allreduce" and request.op != "Adasum" and not error
        size = (
            getattr(torch, request.dtype).itemsize * torch.Size(request.shape).numel() if fuses else FUSED + 1
        )
        how = request._replace(name="", shape=())
        if batch and (held + size > FUSED or batch[0].request._replace(name="", shape=()) != how):
            yield batch
            batch, held = [], 0
        batch.append(order)
        held += size
    if batch:
        yield batch


class Carrier:
    """Carries operations out among the ranks of a process set; `group` is None where this process is alone."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int) -> None:
        self.group, self._size = group, len(ranks)
        self._rank = list(ranks).index(rank)

    def carry(self, orders: Sequence[Order], tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Outputs of `orders` that `fusable` put together, as new tensors."""
        kind = orders[0].request.kind
        if kind == "allreduce":
            return self._reduce(orders[0].request, tensors)
        if kind == "barrier":
            self._all(tensors[0])
            return [None]
        return [getattr(self, kind)(orders[0], tensors[0])]

    def _reduce(self, how: Request, tensors: Sequence[Tensor]) -> list[Tensor]:
        if len(tensors) == 1:
            return [self._reduced(_copy(tensors[0]), how)]
        flat = self._reduced(torch.cat([t.reshape(-1) for t in tensors]), how)
        parts = flat.split([t.numel() for t in tensors])
        # Clones: a small one does not hold the memory of all.
        return [part.view(tensor.shape).clone() for tensor, part in zip(tensors, parts)]

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
    """Adasum of the ranks' tensors, a power of two of them, in rank order, as a tree."""
    level = list(tensors)
    while len(level) > 1:
        level = [pair(a, b) for a, b in zip(level[::2], level[1::2])]
    return level[0]


def pair(a: Tensor, b: Tensor) -> Tensor:
    """Adasum of two tensors; dot products in double precision, and a tensor of zeros has no effect."""
    x, y = a.double(), b.double()
    dot, xx, yy = (x * y).sum(), (x * x).sum(), (y * y).sum()
    left = 1 - dot / (2 * xx) if xx > 0 else 1.0
    right = 1 - dot / (2 * yy) if yy > 0 else 1.0
    return (left * x + right * y).to(a.dtype)
