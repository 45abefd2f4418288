"""Collectives by Horovod's names: out of place and differentiable, in place, asynchronous, in groups, and of states and objects.

gloo has no 16-bit integers and averages floats only: other types go through int32, and an average is a sum, divided.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ...errors import RefusedError, SettingError
from .engine import Order, Pending, Request, running

__all__ = [
    *"Adasum Average Compression Max Min Op Product Sum allgather allgather_async allgather_object allreduce".split(),
    *"allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_".split(),
    *"broadcast_async broadcast_async_ broadcast_object broadcast_optimizer_state broadcast_parameters".split(),
    *"grouped_allgather grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_".split(),
    *"grouped_reducescatter join poll reducescatter reducescatter_async synchronize".split(),
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


# -- asynchronous -----------------------------------------------------------------------------------------------------------

_handles: dict[int, Pending] = {}
_numbers = count(1)


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
    """Drop a result that is not needed."""
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
    if not tensor.ndim and kind in ("allgather", "reducescatter"):
        raise ValueError(f"{kind} of a scalar: it has no dimension 0; pass tensor[None]")
    name = name or running().unnamed(kind)
    dtype = str(tensor.dtype).removeprefix("torch.")
    pending = Pending(
        Request(name, kind, tuple(tensor.shape), dtype, tensor.device.type, **more), tensor.detach(), into
    )
    pending.finish = finish or pending.finish
    return _submit(pending)


def _op(average: bool | None, op: Op | None) -> Op:
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op is not None and not isinstance(op, Op):
        raise ValueError(f"op={op!r} is not one of hvd.Average, Sum, Adasum, Min, Max, Product")
    return op or (Sum if average is False else Average)


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
    me, size = running().world.rank, running().world.size
    rows = _equal_rows(tensor, size) if splits is None else [int(s) for s in splits]
    if len(rows) != size or min(rows) < 0 or sum(rows) != tensor.shape[0]:
        raise ValueError(f"splits {rows} do not divide the {tensor.shape[0]} rows among {size} ranks")

    def finish(output: Tensor | None, order: Order) -> Any:
        received = torch.tensor([each[me] for each in order.splits], dtype=torch.int32)
        return output if splits is None else (output, received)

    return _ask("alltoall", tensor, name, finish=finish, splits=tuple(rows))


def _equal_rows(tensor: Tensor, size: int) -> list[int]:
    if not tensor.ndim or tensor.shape[0] % size:
        raise ValueError(
            f"alltoall of shape {tuple(tensor.shape)} among {size} ranks without splits: dimension 0 does not divide"
        )
    return [tensor.shape[0] // size] * size


def reducescatter_async(tensor: Tensor, name: str | None = None, op: Op = Average) -> int:
    """A handle; the result is this rank's part of the reduction along dimension 0; earlier ranks may have one row more."""
    if op not in (Average, Sum):
        raise ValueError(f"reducescatter knows hvd.Average and hvd.Sum, not {op}")
    return _ask("reducescatter", tensor, name, op=op.value)


# -- synchronous, and differentiable -----------------------------------------------------------------------------------------


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, names: Sequence[str | None], how: tuple[Op, float, float], *tensors: Tensor) -> Any:
        ctx.how = how
        handles = [allreduce_async(tensor, None, name, *how) for tensor, name in zip(tensors, names)]
        return tuple(map(synchronize, handles))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_AllReduce.apply(_names(grads, None, "allreduce"), ctx.how, *grads)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, names: Sequence[str | None], *tensors: Tensor) -> Any:
        handles = [allgather_async(tensor, name) for tensor, name in zip(tensors, names)]
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        return tuple(map(synchronize, handles))

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
        given = _equal_rows(tensor, running().world.size) if splits is None else splits
        output, ctx.received = synchronize(alltoall_async(tensor, given, name))
        ctx.mark_non_differentiable(ctx.received)
        return output, ctx.received

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return synchronize(alltoall_async(grad, ctx.received.tolist()))[0], None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, names: Sequence[str | None], op: Op, *tensors: Tensor) -> Any:
        ctx.op = op
        handles = [reducescatter_async(tensor, name, op) for tensor, name in zip(tensors, names)]
        return tuple(map(synchronize, handles))

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
    how = (_op(average, op), prescale_factor, postscale_factor)
    return _allreduce([tensor], [name], compression, how)[0]


def _allreduce(
    tensors: Sequence[Tensor], names: Sequence[str | None], compression: Any, how: tuple[Op, float, float]
) -> list[Tensor]:
    small, contexts = zip(*map(compression.compress, tensors))
    done = _AllReduce.apply(names, how, *small)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(done, contexts)]


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


# -- groups: several tensors that travel together ---------------------------------------------------------------------------


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
    """As `allreduce`, of several tensors. Gradients flow through them."""
    if not tensors:
        return []
    how = (_op(average, op), prescale_factor, postscale_factor)
    return _allreduce(tensors, _names(tensors, name, "allreduce"), compression, how)


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """As `allreduce_`, of several tensors."""
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
    """As `allgather`, of several tensors. Gradients flow through them."""
    return list(_AllGather.apply(_names(tensors, name, "allgather"), *tensors)) if tensors else []


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, op: Op = Average
) -> list[Tensor]:
    """As `reducescatter`, of several tensors. Gradients flow through them."""
    return list(_ReduceScatter.apply(_names(tensors, name, "reducescatter"), op, *tensors)) if tensors else []


# -- ranks without more data ---------------------------------------------------------------------------------------------------


def join(device: int = -1) -> int:
    """Say that this rank has no more data. Until all ranks say so, it takes part in reductions with zeros, and in gathers with no rows.

    Averages are still over all ranks. Returns the rank that was the last to join.
    """
    if device != -1 and not torch.cuda.is_available():
        warnings.warn(f"hvd.join(device={device}): there is no GPU here", stacklevel=2)
    pending = Pending(Request("join", "join"), None, finish=lambda output, order: order.request.root)
    return synchronize(_submit(pending))


def barrier() -> None:
    """Wait until every rank is here."""
    synchronize(_submit(Pending(Request(running().unnamed("barrier"), "barrier"), None)))


# -- parameters, optimizer states and objects ----------------------------------------------------------------------------------


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root_rank: int) -> None:
    """Root's values in the tensors of `model.state_dict()` or `model.named_parameters()`, on every rank, in place.

    Raises:
        ValueError: `params` is neither of these.
    """
    if isinstance(params, torch.nn.Module) or not isinstance(params, Iterable):
        raise ValueError(
            f"invalid params of type: {type(params)}: pass model.state_dict() or model.named_parameters()"
        )
    entries: Iterable[Any] = sorted(params.items()) if isinstance(params, Mapping) else params
    named = [e if isinstance(e, tuple) else (f"parameter.{i}", e) for i, e in enumerate(entries)]
    tensors = [(name, tensor) for name, tensor in named if isinstance(tensor, Tensor) and tensor.numel()]
    handles = [broadcast_async_(tensor.detach(), root_rank, f"broadcast.{name}") for name, tensor in tensors]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Root's state and param groups (learning rates, …), on every rank. No step is made, so no weight moves.

    Raises:
        RefusedError: LBFGS: its state is not a list of tensors by parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RefusedError("cannot broadcast torch.optim.LBFGS state: start it anew on every rank")
    world = running().world
    root = world.rank == root_rank
    tensors: list[Tensor] = []

    def described(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return ("tensor", tuple(leaf.shape), leaf.dtype, leaf.device.type)

    def made(leaf: Any) -> Any:
        if not (isinstance(leaf, tuple) and len(leaf) == 4 and leaf[0] == "tensor"):
            return leaf
        _, shape, dtype, kind = leaf
        place = world.device if kind == world.device.type else kind
        tensors.append(torch.empty(shape, dtype=dtype, device=place))
        return tensors[-1]

    mine = _mapped(optimizer.state_dict(), described) if root else None
    said = broadcast_object(mine, root_rank)
    state = None if root else _mapped(said, made)
    handles = [broadcast_async_(tensor, root_rank, f"state.{i}") for i, tensor in enumerate(tensors)]
    for handle in handles:
        synchronize(handle)
    if state is not None:
        load_in_place(optimizer, state, optimizer.load_state_dict)


def load_in_place(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """`load` the state, and keep the objects of param groups and state.

    torch replaces them by new ones; a schedule or wrapper made before would keep the old ones, and rates would differ between ranks.
    """
    groups, values = optimizer.param_groups, optimizer.state
    load(state)
    for group, new in zip(groups, optimizer.param_groups):
        if group is not new:
            group.clear()
            group.update(new)
    if optimizer.state is not values:
        values.clear()
        values.update(optimizer.state)
    optimizer.param_groups, optimizer.state = groups, values


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """`tree` of dicts and lists with its leaves changed; tuples count as leaves."""
    if isinstance(tree, dict):
        return {key: _mapped(value, change) for key, value in tree.items()}
    return [_mapped(value, change) for value in tree] if isinstance(tree, list) else change(tree)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Root's object, on every rank; the others' objects are ignored."""
    return running().world.broadcast_objects([obj], root_rank)[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The ranks' objects, in rank order, on every rank."""
    return running().world.gather_objects(obj)
