"""Requests of the ranks, the orders that rank 0 makes of them, and their execution by torch.distributed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.process_group import MOVABLE, OPS, odd_one_out

FUSED = 64 << 20  # bytes that are reduced at a time
# Fields that must be equal on all ranks, by kind of operation.
ALIKE = {
    "allreduce": ("shape", "dtype", "op", "prescale", "postscale", "device"),
    "allgather": ("dtype", "device"),
    "broadcast": ("shape", "dtype", "root", "device"),
    "alltoall": ("dtype", "device"),
    "reducescatter": ("shape", "dtype", "op", "device"),
    "barrier": (),
}
ROWS = ("allgather", "alltoall")  # dimension 0 may differ


class Request(NamedTuple):
    """One operation of one rank.

    Attributes:
        name: brings the ranks' requests together, in any order; the reason, of a rank that leaves.
        kind: a key of `ALIKE`, "join" or "leave".
        shape, dtype, device: of the tensor; `device` is the type.
        op: "sum", "average", "min", "max", "product", "adasum", or "".
        root: of a broadcast.
        prescale, postscale: factors before and after a reduction.
        splits: rows for each rank, of an alltoall.
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = "cpu"
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()


class Order(NamedTuple):
    """An agreed operation, which all ranks carry out next.

    Attributes:
        request: that of the first rank that asked.
        rows: dimension 0 of each rank's tensor, where it may differ; 0 of ranks that joined.
        splits: of each rank, of an alltoall.
        error: why it is not carried out; on all ranks.
    """

    request: Request
    rows: tuple[int, ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    error: str = ""


def written(items: Sequence[Request] | Sequence[Order]) -> str:
    """The JSON text of requests or orders."""
    return json.dumps(items)


def read_requests(text: str) -> list[Request]:
    """Requests from their JSON text."""
    return [Request(*fields) for fields in _tuples(json.loads(text))]


def read_orders(text: str) -> list[Order]:
    """Orders from their JSON text."""
    return [Order(Request(*request), *others) for request, *others in _tuples(json.loads(text))]


def _tuples(tree: Any) -> Any:
    return tuple(map(_tuples, tree)) if isinstance(tree, list) else tree


class Table:
    """Rank 0's table of the ranks' requests.

    Attributes:
        joined: ranks that have no more data, in the order in which they said so.
        left: ranks that shut down, and why; from then on nothing can be agreed on.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.joined: list[int] = []
        self.left: dict[int, str] = {}
        self._leaving: list[int] = []
        self._waiting: dict[str, dict[int, Request]] = {}

    def add(self, rank: int, requests: list[Request]) -> None:
        for request in requests:
            if request.kind == "join":
                self.joined.append(rank)
            elif request.kind == "leave":
                self.left[rank] = request.name
                self._leaving.append(rank)
            else:
                self._waiting.setdefault(request.name, {})[rank] = request

    def complete(self) -> list[Order]:
        """Remove and return operations that every rank asked for (or joined before), or that a rank left; then the ranks that left."""
        joined = set(self.joined)
        ready = [name for name, asked in self._waiting.items() if len(asked.keys() | joined) == self.size]
        orders = [agree(self._waiting.pop(name), self.size, self.joined) for name in ready]
        if len(self.joined) == self.size:
            orders.append(Order(Request("join", "join", root=self.joined[-1])))
            self.joined.clear()
        if self.left:
            why = "; ".join(f"rank {rank} has left ({why})" for rank, why in self.left.items())
            why += ". A rank that only runs out of data calls hvd.join() first"
            asked = [next(iter(requests.values())) for requests in self._waiting.values()]
            asked += [Request("join", "join")] * bool(self.joined)
            orders += [Order(request, error=f"{request.name}: {why}") for request in asked]
            self._waiting.clear()
            self.joined.clear()
        orders += [Order(Request(self.left[rank], "leave", root=rank)) for rank in self._leaving]
        self._leaving.clear()
        return orders


def agree(asked: Mapping[int, Request], size: int, joined: Sequence[int] = ()) -> Order:
    """The order that follows from the ranks' requests of one name."""
    ranks = sorted(asked)
    first = asked[ranks[0]]
    fault = _fault([asked[rank] for rank in ranks], size, joined)
    rows: tuple[int, ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    if first.kind in ROWS:
        rows = tuple(asked[r].shape[0] if r in asked and asked[r].shape else 0 for r in range(size))
    if first.kind == "alltoall":
        splits = tuple(asked[r].splits if r in asked else (0,) * size for r in range(size))
    return Order(first, rows, splits, fault)


def _fault(asked: list[Request], size: int, joined: Sequence[int]) -> str:
    """Why the requests do not fit together, or ``""``."""
    first = asked[0]
    where = f"{first.name}: the ranks' calls differ"
    kinds = [request.kind for request in asked]
    if len(set(kinds)) > 1:
        return f"{where}: {odd_one_out(kinds)}"
    for word in ALIKE[first.kind]:
        values = [getattr(request, word) for request in asked]
        if len(set(values)) > 1:
            return f"{where} in {word}: {odd_one_out(values)}"
    shapes = [request.shape for request in asked]
    if first.kind in ROWS and len({shape[1:] for shape in shapes}) > 1:
        return f"{where} in shape, beyond dimension 0: {odd_one_out(shapes)}"
    if first.kind == "broadcast" and not 0 <= first.root < size:
        return f"{first.name}: root rank {first.root} is not one of 0 … {size - 1}"
    if joined and first.kind not in ("allreduce", "allgather", "barrier"):
        return f"{first.name}: {first.kind} needs every rank, and rank {', '.join(map(str, joined))} joined: it has no more data"
    return ""


def fusable(orders: Sequence[Order]) -> Iterator[list[Order]]:
    """`orders` in their sequence; neighbours that one reduction can carry out are together, up to 64 MiB."""

    def key(order: Order) -> object:
        request = order.request
        fuses = request.kind == "allreduce" and request.op != "adasum" and not order.error
        how = (request.op, request.dtype, request.device, request.prescale, request.postscale)
        return how if fuses else id(order)

    for _, several in groupby(orders, key):
        batch: list[Order] = []
        held = 0
        for order in several:
            dtype, shape = order.request.dtype, torch.Size(order.request.shape)
            size = getattr(torch, dtype).itemsize * shape.numel() if dtype else 0
            if batch and held + size > FUSED:
                yield batch
                batch, held = [], 0
            batch.append(order)
            held += size
        yield batch


class Carrier:
    """Carries operations out among the ranks of `group`; None: this process is alone."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, device: torch.device) -> None:
        self._group, self._rank, self._size, self._device = group, rank, size, device

    def carry(self, orders: Sequence[Order], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Outputs of `orders` that `fusable` put together; None stands for the tensor of a rank that joined."""
        kind = orders[0].request.kind
        if kind == "barrier":
            if self._group is not None:
                dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
            return [None]
        given = [self._zeros(o) if t is None else t.detach() for o, t in zip(orders, tensors)]
        if kind == "allreduce":
            return list(self._reduce(orders[0].request, given))
        does = {
            "allgather": self._gather,
            "broadcast": self._broadcast,
            "alltoall": self._exchange,
            "reducescatter": self._scatter,
        }
        return [does[kind](orders[0], given[0])]

    def _zeros(self, order: Order) -> Tensor:
        request = order.request
        shape = (0, *request.shape[1:]) if request.kind == "allgather" else request.shape
        device = self._device if request.device == self._device.type else torch.device(request.device)
        return torch.zeros(shape, dtype=getattr(torch, request.dtype), device=device)

    # -- reductions ---------------------------------------------------------------------------------------------------

    def _reduce(self, request: Request, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        if len(tensors) == 1:
            yield self._reduced(_copy(tensors[0]), request)
            return
        flat = self._reduced(torch.cat([t.reshape(-1) for t in tensors]), request)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            yield part.view(tensor.shape)

    def _reduced(self, flat: Tensor, how: Request) -> Tensor:
        """A new tensor of the same dtype; averages of integers are rounded toward zero."""
        dtype = flat.dtype
        if dtype not in MOVABLE:
            flat = flat.to(torch.float32 if dtype.is_floating_point else torch.int64)
        if how.prescale != 1.0:
            flat = (flat * how.prescale).to(flat.dtype)
        if how.op == "adasum":
            flat = adasum(self._all(flat))
        elif self._group is not None:
            dist.all_reduce(flat, OPS["sum" if how.op == "average" else how.op], group=self._group)
        if how.op == "average":
            flat = flat.div(self._size, rounding_mode=None if flat.is_floating_point() else "trunc")
        if how.postscale != 1.0:
            flat = flat * how.postscale
        return flat.to(dtype)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """The ranks' tensors of one shape."""
        if self._group is None:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        dist.all_gather(parts, tensor, group=self._group)
        return parts

    def _scatter(self, order: Order, tensor: Tensor) -> Tensor:
        # Earlier ranks get one row more, where the size does not divide.
        return _copy(self._reduced(_copy(tensor), order.request).tensor_split(self._size)[self._rank])

    # -- moves, as bytes --------------------------------------------------------------------------------------------------

    def _gather(self, order: Order, tensor: Tensor) -> Tensor:
        if self._group is None:
            return tensor.clone()
        longest, rest = max(order.rows), tensor.shape[1:]
        padded = tensor.new_zeros((longest, *rest))
        padded[: tensor.shape[0]] = tensor
        parts = zip(self._all(padded.reshape(-1).view(torch.uint8)), order.rows)
        return torch.cat([part.view(tensor.dtype).view(longest, *rest)[:rows] for part, rows in parts])

    def _broadcast(self, order: Order, tensor: Tensor) -> Tensor:
        done = _copy(tensor)
        if self._group is not None and done.numel():
            dist.broadcast(done.reshape(-1).view(torch.uint8), order.request.root, group=self._group)
        return done

    def _exchange(self, order: Order, tensor: Tensor) -> Tensor:
        if self._group is None:
            return tensor.clone()
        rows = [splits[self._rank] for splits in order.splits]
        out = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        row = torch.Size(tensor.shape[1:]).numel() * tensor.element_size()  # bytes
        dist.all_to_all_single(
            out.reshape(-1).view(torch.uint8),
            tensor.contiguous().reshape(-1).view(torch.uint8),
            [row * n for n in rows],
            [row * n for n in order.splits[self._rank]],
            group=self._group,
        )
        return out


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy: callers may change results in place, under autograd too."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def adasum(tensors: Sequence[Tensor]) -> Tensor:
    """Adasum of the ranks' tensors in rank order, as a tree; with an odd number the last one moves up unchanged."""
    level = list(tensors)
    while len(level) > 1:
        pairs = [pair(a, b) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def pair(a: Tensor, b: Tensor) -> Tensor:
    """Adasum of two tensors; dot products in double precision, and a tensor of zeros has no effect."""
    x, y = a.double(), b.double()
    dot, xx, yy = (x * y).sum(), (x * x).sum(), (y * y).sum()
    left = 1 - dot / (2 * xx) if xx > 0 else 1.0
    right = 1 - dot / (2 * yy) if yy > 0 else 1.0
    return (left * x + right * y).to(a.dtype)
