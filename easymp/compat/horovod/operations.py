"""Collectives by Horovod's names: out of place and differentiable, in place, asynchronous, and in groups.

gloo has no 16-bit integers and averages floats only: other types go through int32, and an average is a sum, divided.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import Enum
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ...errors import SettingError
from .engine import Order, Pending, Request, running

__all__ = [
    *"Adasum Average Compression Max Min Op Product Sum allgather allgather_async allreduce allreduce_".split(),
    *"allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async".split(),
    *"broadcast_async_ grouped_allgather grouped_allreduce grouped_allreduce_ grouped_allreduce_async".split(),
    *"grouped_allreduce_async_ grouped_reducescatter join poll reducescatter reducescatter_async synchronize".split(),
]


class Op(Enum):
    """Kind of a reduction. Averages of integers are rounded toward zero."""

    Average = "average"
    Sum = "sum"
    Adasum = "adasum"
    Min = "min"
    Max = "max"
    Product = "product"


Average, Sum, Adasum, Min, Max, Product = Op


class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor that travels, and the context of `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(NoneCompressor):
    """Floating-point tensors travel as fp16, which holds 6e-8 to 65,504, and come back in their own type."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16), tensor.dtype) if tensor.dtype.is_floating_point else (tensor, None)


class Compression:
    """The choices: ``Compression.none``, ``Compression.fp16``; or a class with the same two functions."""

    none = NoneCompressor
    fp16 = FP16Compressor


_handles: dict[int, Pending] = {}
_numbers = count(1)


# -- asynchronous -----------------------------------------------------------------------------------------------------------


def synchronize(handle: int) -> Any:
    """Wait for the result of an asynchronous operation; once a handle.

    Raises:
        ValueError: no such handle, or one that was synchronized.
        HorovodInternalError: the operation failed on all ranks.
    """
    pending = _pending(handle)
    del _handles[handle]
    return running().engine.wait(pending)


def _pending(handle: int) -> Pending:
    if handle not in _handles:
        raise ValueError(f"handle {handle} was not created or has been cleared")
    return _handles[handle]


def forget(handle: int) -> None:
    """Drop a result that is of no use any more."""
    _handles.pop(handle, None)


def poll(handle: int) -> bool:
    """Whether it has ended, so that `synchronize` will not wait."""
    return _pending(handle).done.is_set()


def _submit(pending: Pending) -> int:
    running().engine.submit(pending)
    handle = next(_numbers)
    _handles[handle] = pending
    return handle


def _ask(
    kind: str, tensor: Tensor, name: str | None, into: Tensor | None = None, finish: Any = None, **more: Any
) -> int:
    if tensor.is_sparse:
        raise SettingError(
            f"{kind} of a sparse tensor: pass tensor.to_dense(), or sparse_as_dense=True to DistributedOptimizer"
        )
    if tensor.is_complex():
        raise SettingError(f"{kind} of {tensor.dtype}: pass torch.view_as_real(tensor)")
    name = name or running().unnamed(kind)
    dtype = str(tensor.dtype).removeprefix("torch.")
    request = Request(name, kind, tuple(tensor.shape), dtype, tensor.device.type, **more)
    pending = Pending(request, tensor.detach(), into)
    if finish is not None:
        pending.finish = finish
    return _submit(pending)


def _op(average: bool | None, op: Op | None) -> Op:
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        return Average if average else Sum
    if op is not None and not isinstance(op, Op):
        raise ValueError(f"op={op!r} is none of hvd.Average, Sum, Adasum, Min, Max, Product")
    return op if op is not None else Average


def _reduce(
    tensor: Tensor,
    into: Tensor | None,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    factors = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return _ask("allreduce", tensor, name, into, op=_op(average, op).value, **factors)


def allreduce_async(tensor: Tensor, *args: Any, **kwargs: Any) -> int:
    """A handle of a reduction into a new tensor; arguments as of `allreduce`, without compression."""
    return _reduce(tensor, None, *args, **kwargs)


def allreduce_async_(tensor: Tensor, *args: Any, **kwargs: Any) -> int:
    """As `allreduce_async`, into `tensor` itself."""
    return _reduce(tensor, tensor, *args, **kwargs)


def allgather_async(tensor: Tensor, name: str | None = None) -> int:
    """A handle; the result has the ranks' tensors one after the other along dimension 0, where they may differ in length."""
    if not tensor.ndim:
        raise ValueError(
            "allgather of a scalar: there is no dimension 0 to put them one after the other; pass tensor[None]"
        )
    return _ask("allgather", tensor, name)


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> int:
    """A handle; the result is a new tensor with root's values."""
    return _ask("broadcast", tensor, name, root=root_rank)


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> int:
    """A handle; `tensor` itself gets root's values."""
    return _ask("broadcast", tensor, name, tensor, root=root_rank)


def alltoall_async(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None
) -> int:
    """A handle; rank i gets the i-th of the parts into which `splits` (rows; equal ones by default) divides dimension 0.

    The result is a tensor, or with `splits` a pair of it and of the rows that came from each rank.
    """
    size = running().world.size
    if splits is None:
        if not tensor.ndim or tensor.shape[0] % size:
            raise ValueError(
                f"alltoall of shape {tuple(tensor.shape)} among {size} ranks without splits: dimension 0 does not divide"
            )
        rows = [tensor.shape[0] // size] * size
    else:
        rows = [int(s) for s in splits]
        if len(rows) != size or min(rows) < 0 or sum(rows) != tensor.shape[0]:
            raise ValueError(f"splits {rows} do not divide the {tensor.shape[0]} rows among {size} ranks")
    me = running().world.rank

    def finish(output: Tensor | None, order: Order) -> Any:
        received = torch.tensor([each[me] for each in order.splits], dtype=torch.int32)
        return output if splits is None else (output, received)

    return _ask("alltoall", tensor, name, finish=finish, splits=tuple(rows))


def reducescatter_async(tensor: Tensor, name: str | None = None, op: Op = Average) -> int:
    """A handle; the result is this rank's part of the reduction along dimension 0; earlier ranks have one row more where it must be."""
    if op not in (Average, Sum):
        raise ValueError(f"reducescatter knows hvd.Average and hvd.Sum, not {op}")
    if not tensor.ndim:
        raise ValueError("reducescatter of a scalar: there is no dimension 0 to share out; pass tensor[None]")
    return _ask("reducescatter", tensor, name, op=op.value)


# -- synchronous, and differentiable -----------------------------------------------------------------------------------------


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, names: Sequence[str | None], op: Op, pre: float, post: float, *tensors: Tensor
    ) -> Any:
        ctx.how = (op, pre, post)
        handles = [allreduce_async(tensor, None, name, *ctx.how) for tensor, name in zip(tensors, names)]
        return tuple(synchronize(handle) for handle in handles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        names = _names(grads, None, "allreduce")
        return (None, None, None, None, *_AllReduce.apply(names, *ctx.how, *grads))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, names: Sequence[str | None], *tensors: Tensor) -> Any:
        handles = [allgather_async(tensor, name) for tensor, name in zip(tensors, names)]
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        return tuple(synchronize(handle) for handle in handles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        means = grouped_allreduce(grads, op=Average)
        rows = synchronize(allgather_async(torch.tensor([ctx.rows], device=grads[0].device))).T.tolist()
        return None, *(mean.split(counts)[running().world.rank] for mean, counts in zip(means, rows))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, name: str | None) -> Tensor:
        ctx.root = root
        return synchronize(broadcast_async(tensor, root, name))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        mean = allreduce(grad, op=Average)
        return (mean if running().world.rank == ctx.root else torch.zeros_like(mean)), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None) -> Any:
        given = [tensor.shape[0] // running().world.size] * running().world.size if splits is None else splits
        if splits is None and tensor.shape[0] % running().world.size:
            given = None  # which says why not
        output, received = synchronize(alltoall_async(tensor, given, name))
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return synchronize(alltoall_async(grad, ctx.received.tolist()))[0], None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, names: Sequence[str | None], op: Op, *tensors: Tensor) -> Any:
        ctx.op = op
        handles = [reducescatter_async(tensor, name, op) for tensor, name in zip(tensors, names)]
        return tuple(synchronize(handle) for handle in handles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scale = running().world.size if ctx.op is Sum else 1
        return None, None, *(whole * scale for whole in grouped_allgather(grads))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """A new tensor of the same shape and type: `op` over the ranks, the average by default. Gradients flow through it.

    Raises:
        NotInitializedError: a ValueError, before `init`.
        HorovodInternalError: shapes or types differ between the ranks; on all of them.
    """
    small, ctx = compression.compress(tensor)
    done = _AllReduce.apply([name], _op(average, op), prescale_factor, postscale_factor, small)
    return compression.decompress(done[0], ctx)


def allreduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As `allreduce_async_`, waited for."""
    return synchronize(allreduce_async_(tensor, *args, **kwargs))


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """The ranks' tensors, one after the other along dimension 0, where they may differ in length.

    The gradient is this rank's rows of the mean over the ranks, as Horovod's.
    """
    return _AllGather.apply([name], tensor)[0]


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """A new tensor with root's values. The mean of the ranks' gradients flows through it, to root."""
    return _Broadcast.apply(tensor, root_rank, name)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """`tensor` with root's values."""
    return synchronize(broadcast_async_(tensor, root_rank, name))


def alltoall(tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None) -> Any:
    """As `alltoall_async`, waited for. Gradients flow through it."""
    output, received = _AllToAll.apply(tensor, splits, name)
    return output if splits is None else (output, received)


def reducescatter(
    tensor: Tensor, compression: Any = Compression.none, op: Op = Average, name: str | None = None
) -> Tensor:
    """This rank's part of the reduction along dimension 0.

    The gradient is the ranks' gradients one after the other, times their number for a sum, as Horovod's.
    """
    small, ctx = compression.compress(tensor)
    return compression.decompress(_ReduceScatter.apply([name], op, small)[0], ctx)


# -- groups -------------------------------------------------------------------------------------------------------------------


def _names(tensors: Sequence[Tensor], name: str | None, kind: str) -> list[str]:
    name = name or running().unnamed(f"grouped_{kind}")
    return [f"{name}_{i + 1}of{len(tensors)}" for i in range(len(tensors))]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Several at once, which travel together; as `allreduce`. Gradients flow through them."""
    if not tensors:
        return []
    small, contexts = zip(*map(compression.compress, tensors))
    names = _names(tensors, name, "allreduce")
    done = _AllReduce.apply(names, _op(average, op), prescale_factor, postscale_factor, *small)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(done, contexts)]


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Several at once, in place."""
    return [synchronize(handle) for handle in grouped_allreduce_async_(tensors, *args, **kwargs)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, **how: Any
) -> list[int]:
    """Handles, one a tensor."""
    names = _names(tensors, name, "allreduce")
    return [allreduce_async(tensor, average, each, **how) for tensor, each in zip(tensors, names)]


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, **how: Any
) -> list[int]:
    """Handles, one a tensor, in place."""
    names = _names(tensors, name, "allreduce")
    return [allreduce_async_(tensor, average, each, **how) for tensor, each in zip(tensors, names)]


def grouped_allgather(tensors: Sequence[Tensor], name: str | None = None) -> list[Tensor]:
    """Several at once; as `allgather`. Gradients flow through them."""
    return list(_AllGather.apply(_names(tensors, name, "allgather"), *tensors)) if tensors else []


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, op: Op = Average
) -> list[Tensor]:
    """Several at once; as `reducescatter`. Gradients flow through them."""
    return list(_ReduceScatter.apply(_names(tensors, name, "reducescatter"), op, *tensors)) if tensors else []


# -- ranks without more data ---------------------------------------------------------------------------------------------------


def join(device: int = -1) -> int:
    """This rank has no more data: until all ranks say so, it takes part in the others' reductions with zeros, and in gathers with nothing.

    Averages are still over all ranks. Returns the rank that was the last to join.
    """
    if device != -1 and not torch.cuda.is_available():
        warnings.warn(f"hvd.join(device={device}): there is no GPU here", stacklevel=2)
    pending = Pending(Request("join", "join"), None, finish=lambda output, order: order.request.root)
    return synchronize(_submit(pending))


def barrier() -> None:
    """Wait until every rank is here."""
    synchronize(_submit(Pending(Request(running().unnamed("barrier"), "barrier"), None)))
