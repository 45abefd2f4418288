"""How an agreed operation is carried out, by torch.distributed, on every rank at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.process_group import MOVABLE, OPS
from .adasum import adasum
from .requests import Order

FUSED = 64 << 20  # bytes that are reduced at a time


def dtype_of(word: str) -> torch.dtype:
    found = getattr(torch, word)
    assert isinstance(found, torch.dtype)
    return found


def fusable(orders: Sequence[Order]) -> Iterator[list[Order]]:
    """`orders` in their order; neighbours that one reduction can do are together, up to 64 MiB."""

    def alike(order: Order) -> object:
        request = order.request
        fuses = request.kind == "allreduce" and request.op != "adasum" and not order.error
        return (
            (request.op, request.dtype, request.device, request.prescale, request.postscale)
            if fuses
            else id(order)
        )

    for _, several in groupby(orders, alike):
        batch: list[Order] = []
        held = 0
        for order in several:
            size = (
                dtype_of(order.request.dtype).itemsize * torch.Size(order.request.shape).numel()
                if order.request.dtype
                else 0
            )
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
            return list(
                self._reduce(
                    orders, [t if t is not None else self._zeros(o) for o, t in zip(orders, tensors)]
                )
            )
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
        return torch.zeros(shape, dtype=dtype_of(request.dtype), device=device)

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
        return _copy(
            whole.tensor_split(self._size)[self._rank]
        )  # earlier ranks have one row more, where it does not divide

    # -- what moves as it is, as bytes --------------------------------------------------------------------------------

    def _gather(self, order: Order, tensor: Tensor) -> Tensor:
        if self._group is None:
            return tensor.detach().clone()
        longest, rest = max(order.rows), tensor.shape[1:]
        padded = torch.zeros((longest, *rest), dtype=tensor.dtype, device=tensor.device)
        padded[: tensor.shape[0]] = tensor.detach()
        flat = padded.reshape(-1).view(torch.uint8)
        parts = [
            part.view(tensor.dtype).view(longest, *rest)[:rows]
            for part, rows in zip(self._all(flat), order.rows)
        ]
        return torch.cat(parts)

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
        row = (
            mine[:1].numel() * mine.element_size()
            if mine.shape[0]
            else torch.Size(mine.shape[1:]).numel() * mine.element_size()
        )
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
    """Contiguous, and no view: what is returned may be changed in place, under autograd too."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
