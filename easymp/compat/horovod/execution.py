"""Requests of the ranks, the orders that rank 0 makes of them, and their execution by torch.distributed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

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
    "join": (),
    "leave": (),
}
ROWS = ("allgather", "alltoall")  # dimension 0 may differ


@dataclass(frozen=True)
class Request:
    """One operation of one rank.

    Attributes:
        name: by which the ranks' requests are brought together, whatever their order; of one that leaves: why.
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


@dataclass(frozen=True)
class Order:
    """An agreed operation, which all ranks carry out next.

    Attributes:
        request: rank 0's, or of the first rank that is not done.
        rows: dimension 0 of each rank's tensor, where it may differ; 0 of those that joined.
        splits: of each rank, of an alltoall.
        joined: ranks that have no more data, and take part with zeros.
        error: why it is not done; on all ranks.
    """

    request: Request
    rows: tuple[int, ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    joined: tuple[int, ...] = ()
    error: str = ""


@dataclass
class Table:
    """Rank 0's table of the ranks' requests.

    Attributes:
        size: ranks.
        joined: those that have no more data, in the order in which they said so.
        left: those that shut down, and why; from then on nothing can be agreed on.
    """

    size: int
    joined: list[int] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)
    _leaving: list[int] = field(default_factory=list)
    _waiting: dict[str, dict[int, Request]] = field(default_factory=dict)

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
            asked = [next(iter(requests.values())) for requests in self._waiting.values()]
            asked += [Request("join", "join")] * bool(self.joined)
            orders += [Order(request, error=f"{request.name}: {self._gone()}") for request in asked]
            self._waiting.clear()
            self.joined.clear()
        orders += [Order(Request(self.left[rank], "leave", root=rank)) for rank in self._leaving]
        self._leaving.clear()
        return orders

    def _gone(self) -> str:
        said = "; ".join(f"rank {rank} has left ({why})" for rank, why in self.left.items())
        return f"{said}. A rank that only runs out of data calls hvd.join() first"

    def missing(self) -> dict[str, list[int]]:
        """Ranks that operations wait for, by name."""
        return {
            name: [r for r in range(self.size) if r not in asked and r not in self.joined]
            for name, asked in self._waiting.items()
        }


def agree(asked: Mapping[int, Request], size: int, joined: list[int]) -> Order:
    """The order that follows from the ranks' requests of one name."""
    ranks = sorted(asked)
    first = asked[ranks[0]]
    fault = _fault(asked, ranks, first, size, joined)
    rows: tuple[int, ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    if first.kind in ROWS:
        rows = tuple(asked[r].shape[0] if r in asked and asked[r].shape else 0 for r in range(size))
    if first.kind == "alltoall":
        splits = tuple(asked[r].splits if r in asked else (0,) * size for r in range(size))
    return Order(first, rows, splits, tuple(joined), fault)


def _fault(
    asked: Mapping[int, Request], ranks: list[int], first: Request, size: int, joined: list[int]
) -> str:
    where = f"{first.name}: the ranks' calls differ"
    kinds = [asked[r].kind for r in ranks]
    if len(set(kinds)) > 1:
        return f"{where}: {odd_one_out(kinds)}"
    for word in ALIKE[first.kind]:
        values = [getattr(asked[r], word) for r in ranks]
        if any(value != values[0] for value in values):
            return f"{where} in {word}: {odd_one_out(values)}"
    if first.kind in ROWS:
        rest = [asked[r].shape[1:] for r in ranks]
        if any(shape != rest[0] for shape in rest):
            return f"{where} in shape, beyond dimension 0: {odd_one_out([asked[r].shape for r in ranks])}"
    if first.kind == "broadcast" and not 0 <= first.root < size:
        return f"{first.name}: root rank {first.root} is none of 0 … {size - 1}"
    if joined and first.kind not in ("allreduce", "allgather", "barrier"):
        return f"{first.name}: {first.kind} needs every rank, and rank {', '.join(map(str, joined))} joined: it has no more data"
    return ""


def written(items: list[Any]) -> str:
    return json.dumps([dataclasses.asdict(item) for item in items])


def read_requests(text: str | bytes) -> list[Request]:
    return [_request(entry) for entry in json.loads(text)]


def read_orders(text: str | bytes) -> list[Order]:
    return [
        Order(
            _request(entry["request"]),
            tuple(entry["rows"]),
            tuple(map(tuple, entry["splits"])),
            tuple(entry["joined"]),
            entry["error"],
        )
        for entry in json.loads(text)
    ]


def _request(entry: dict[str, Any]) -> Request:
    return Request(**{**entry, "shape": tuple(entry["shape"]), "splits": tuple(entry["splits"])})


def fusable(orders: Sequence[Order]) -> Iterator[list[Order]]:
    """`orders` in their order; neighbours that one reduction can do are together, up to 64 MiB."""

    def alike(order: Order) -> object:
        request = order.request
        fuses = request.kind == "allreduce" and request.op != "adasum" and not order.error
        how = (request.op, request.dtype, request.device, request.prescale, request.postscale)
        return how if fuses else id(order)

    for _, several in groupby(orders, alike):
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
        """Outputs, of `orders` that `fusable` put together; a tensor that is None is that of a rank that joined."""
        first = orders[0].request
        if first.kind == "allreduce":
            given = [t if t is not None else self._zeros(o) for o, t in zip(orders, tensors)]
            return list(self._reduce(orders, given))
        (order,), (tensor,) = orders, tensors
        if first.kind == "barrier":
            if self._group is not None:
                dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
            return [None]
        if tensor is None:
            tensor = self._zeros(order)
        does = {
            "allgather": self._gather,
            "broadcast": self._broadcast,
            "alltoall": self._exchange,
            "reducescatter": self._scatter,
        }
        return [does[first.kind](order, tensor)]

    def _zeros(self, order: Order) -> Tensor:
        request = order.request
        shape = (0, *request.shape[1:]) if request.kind == "allgather" else request.shape
        device = self._device if request.device == self._device.type else torch.device(request.device)
        return torch.zeros(shape, dtype=getattr(torch, request.dtype), device=device)

    # -- reductions ---------------------------------------------------------------------------------------------------

    def _reduce(self, orders: Sequence[Order], tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        request = orders[0].request
        how = request.op, request.prescale, request.postscale
        if len(tensors) == 1:
            yield self._reduced(_copy(tensors[0]), *how)
            return
        flat = self._reduced(torch.cat([t.detach().reshape(-1) for t in tensors]), *how)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            yield part.view(tensor.shape)

    def _reduced(self, flat: Tensor, op: str, prescale: float, postscale: float) -> Tensor:
        """A new tensor of the same dtype; averages of integers are rounded toward zero."""
        dtype = flat.dtype
        if dtype not in MOVABLE:
            flat = flat.to(torch.float32 if dtype.is_floating_point else torch.int64)
        if prescale != 1.0:
            flat = (flat * prescale).to(flat.dtype)
        if op == "adasum":
            flat = adasum(self._all(flat))
        elif self._group is not None:
            dist.all_reduce(flat, OPS["sum" if op == "average" else op], group=self._group)
        if op == "average":
            whole = not flat.is_floating_point() and not flat.is_complex()
            flat = flat.div(self._size, rounding_mode="trunc") if whole else flat.div_(self._size)
        if postscale != 1.0:
            flat = flat * postscale
        return flat.to(dtype)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """The ranks' tensors of one shape."""
        if self._group is None:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        dist.all_gather(parts, tensor, group=self._group)
        return parts

    def _scatter(self, order: Order, tensor: Tensor) -> Tensor:
        request = order.request
        whole = self._reduced(_copy(tensor), request.op, request.prescale, request.postscale)
        # Earlier ranks get one row more, where the size does not divide.
        return _copy(whole.tensor_split(self._size)[self._rank])

    # -- what moves as it is, as bytes --------------------------------------------------------------------------------

    def _gather(self, order: Order, tensor: Tensor) -> Tensor:
        if self._group is None:
            return tensor.detach().clone()
        longest, rest = max(order.rows), tensor.shape[1:]
        padded = torch.zeros((longest, *rest), dtype=tensor.dtype, device=tensor.device)
        padded[: tensor.shape[0]] = tensor.detach()
        flat = padded.reshape(-1).view(torch.uint8)
        parts = zip(self._all(flat), order.rows)
        return torch.cat([part.view(tensor.dtype).view(longest, *rest)[:rows] for part, rows in parts])

    def _broadcast(self, order: Order, tensor: Tensor) -> Tensor:
        done = _copy(tensor)
        if self._group is not None and done.numel():
            dist.broadcast(done.reshape(-1).view(torch.uint8), order.request.root, group=self._group)
        return done

    def _exchange(self, order: Order, tensor: Tensor) -> Tensor:
        mine = tensor.detach().contiguous()
        if self._group is None:
            return mine.clone()
        received = [splits[self._rank] for splits in order.splits]
        row = torch.Size(mine.shape[1:]).numel() * mine.element_size()  # bytes
        out = torch.empty((sum(received), *mine.shape[1:]), dtype=mine.dtype, device=mine.device)
        sent = order.splits[self._rank]
        dist.all_to_all_single(
            out.reshape(-1).view(torch.uint8),
            mine.reshape(-1).view(torch.uint8),
            [rows * row for rows in received],
            [rows * row for rows in sent],
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
