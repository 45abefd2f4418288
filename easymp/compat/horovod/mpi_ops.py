"""Collectives by Horovod's names: out of place and differentiable, in place, asynchronous, and of several tensors at once.

Gradients are Horovod's: those of a gather and a broadcast are means over the ranks, that of a reducescatter is the ranks' gradients one
after the other, times their number for a sum.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .basics import *  # noqa: F403 (the names of horovod.torch.mpi_ops)
from .basics import ProcessSet, global_process_set, rank, running, size
from .basics import __all__ as basics
from .engine import Op, Pending, Request

__all__ = [
    *basics,
    *"Adasum Average Compression Max Min Product Sum allgather allgather_async allreduce allreduce_".split(),
    *"allreduce_async allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async".split(),
    *"broadcast_async_ grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_".split(),
    *"grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async".split(),
    *"join poll reducescatter reducescatter_async sparse_allreduce_async synchronize".split(),
]
Average, Sum, Adasum, Min, Max, Product = Op


class NoneCompressor:
    """Tensors travel as they are. `compress` returns the tensor that travels, and the context of `decompress`."""

    compress = staticmethod(lambda tensor: (tensor, None))
    decompress = staticmethod(lambda tensor, ctx: tensor)


class FP16Compressor:
    """Floating-point tensors travel as fp16, which holds 6e-8 to 65,504, and come back in their own type."""

    compress = staticmethod(
        lambda tensor: (tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype)
    )
    decompress = staticmethod(lambda tensor, ctx: tensor.to(ctx))


class Compression:
    """The choices: ``Compression.none``, ``Compression.fp16``; or a class with the same two functions."""

    none = NoneCompressor
    fp16 = FP16Compressor


def synchronize(handle: int) -> Any:
    """Wait for the result of an asynchronous operation: a tensor, or a tuple of them for a group. The second time it is None."""
    run = running()
    if handle not in run.handles:
        return None
    pending, several = run.handles.pop(handle)
    results = tuple(run.engine.wait(each) for each in pending)
    return results if several else results[0]


def poll(handle: int) -> bool:
    """Whether it has ended, so that `synchronize` will not wait. Raises ValueError once it was synchronized."""
    if handle not in running().handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return all(pending.done.is_set() for pending in running().handles[handle][0])


class _InPlace(NamedTuple):
    """Tensors that the results go into."""

    tensors: Any


def _enqueue(
    kind: str, given: Any, name: str | None, among: ProcessSet, finish: Any = None, **fields: Any
) -> int:
    """A handle of operations on one tensor, on several (then `synchronize` returns a tuple), or on either as `_InPlace`.

    `finish` makes a result of the output and the order; `fields` are those of `Request`.
    """
    into = isinstance(given, _InPlace)
    given = given.tensors if into else given
    run, several, tensors = running(), not isinstance(given, Tensor), _listed(given)
    ranks, whole, made = run.members(among), f"{kind}.{name or run.unnamed(kind, among)}", []
    for i, tensor in enumerate(tensors):
        if tensor.is_sparse or tensor.is_complex():
            instead = "view_as_real(tensor)" if tensor.is_complex() else "tensor.to_dense()"
            raise ValueError(f"{kind}: Tensor type {tensor.type()} is not supported: pass {instead}")
        if kind == "reducescatter" and not tensor.ndim:
            raise ValueError("Reducescatter does not support scalar inputs: pass tensor[None]")
        each = f"{whole}_{i + 1}of{len(tensors)}" if several else whole
        dtype = str(tensor.dtype).removeprefix("torch.")
        request = Request(each, kind, ranks, tuple(tensor.shape), dtype, tensor.device.type, **fields)
        made.append(Pending(request, tensor.detach(), tensor if into else None, finish))
    return _submit(made, several)


def _listed(given: Any) -> list[Tensor]:
    """One tensor, or several, as a list."""
    tensors = list(given) if isinstance(given, Iterable) and not isinstance(given, Tensor) else [given]
    for each in tensors:
        if not isinstance(each, Tensor):
            raise ValueError(f"{each!r} is a {type(each).__name__}: pass a tensor, as torch.tensor({each!r})")
    return tensors


def _submit(made: list[Pending], several: bool = False) -> int:
    run = running()
    for pending in made:
        run.engine.submit(pending)
    handle = next(run.numbers)
    run.handles[handle] = made, several
    return handle


def _variant(
    function: Any, name: str, how: str, into: bool = False, wait: bool = False
) -> Callable[..., Any]:
    """`function` by another name: of several tensors, into its tensors, or waited for."""
    signature = inspect.signature(function)
    first, *others = signature.parameters.values()
    if name.startswith("grouped"):
        signature = signature.replace(parameters=[first.replace(name="tensors"), *others])

    @functools.wraps(function)
    def variant(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        tensor, *rest = bound.args
        result = function(_InPlace(tensor) if into else tensor, *rest, **bound.kwargs)
        return synchronize(result) if wait else result

    variant.__name__ = variant.__qualname__ = name
    variant.__doc__ = f"As `{function.__name__}`, {how}."
    vars(variant)["__signature__"] = signature
    return variant


def _reduce(kind: str, tensors: Any, name: Any, op: Any, pre: float, post: float, among: Any) -> int:
    if op not in tuple(Op) or (kind == "reducescatter" and op not in (Average, Sum)):
        known = "Average, Sum, Adasum, Min, Max, Product" if kind == "allreduce" else "Average, Sum"
        raise ValueError(f"{kind}: op={op!r} is not one of {known} of hvd")
    if op == Adasum and among is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if op == Adasum and size().bit_count() != 1:
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    fields = {"op": Op(op).name, "prescale": float(pre), "postscale": float(post)}
    return _enqueue(kind, tensors, name, among, **fields)


def _op(op: Op | None, average: bool | None) -> Op:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: Op | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """A handle of a reduction into a new tensor."""
    how = _op(op, average), prescale_factor, postscale_factor, process_set
    return _reduce("allreduce", tensor, name, *how)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: Op, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """A function that waits for the reduction of a sparse tensor, and returns it: the ranks' entries, gathered."""
    parts = _enqueue("allgather", [tensor._indices().T, tensor._values()], name, process_set)

    def handle() -> Tensor:
        indices, values = synchronize(parts)
        values = values / process_set.size() if op == Average else values
        return torch.sparse_coo_tensor(indices.T, values, tensor.shape, check_invariants=False)

    return handle


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """A handle; the result has the ranks' tensors one after the other along dimension 0, where they may differ in length."""
    return _enqueue("allgather", tensor, name, process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """A handle; the result is a new tensor with the values of `root_rank`, a rank of the world."""
    running().members(process_set)
    if root_rank not in process_set.ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank} for {process_set}")
    return _enqueue("broadcast", tensor, name, process_set, root=int(root_rank))


def alltoall_async(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:  # fmt: skip
    """A handle; rank i gets the i-th of the parts into which `splits` (rows; equal ones by default) divides dimension 0.

    The result is a pair: a tensor, and the rows that came from each rank, as int32.
    """
    running().members(process_set)
    length, ranks, place = tensor.shape[:1].numel(), len(process_set.ranks), "cpu"
    if isinstance(splits, Tensor):
        place = splits.device
        if splits.dtype != torch.int32 or splits.ndim != 1:
            raise ValueError(f"alltoall expects 1D splits of int32, got {splits.dtype} {splits.shape}")
    if splits is None and length % ranks:
        raise ValueError(f"alltoall without splits: {length} rows do not divide among {ranks} ranks")
    rows = [length // ranks] * ranks if splits is None else [index(split) for split in splits]
    if len(rows) != ranks or min(rows) < 0 or sum(rows) > length:
        raise ValueError(f"alltoall: splits {rows} do not divide {length} rows among {ranks} ranks")

    def finish(output: Tensor, order: Any) -> tuple[Tensor, Tensor]:
        came = [each[process_set.ranks.index(rank())] for each in order.rows]
        return output, torch.tensor(came, dtype=torch.int32, device=place)

    return _enqueue("alltoall", tensor, name, process_set, finish=finish, splits=rows)


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: Op = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """A handle; the result is this rank's part of the reduction along dimension 0; earlier ranks may have one row more."""
    return _reduce("reducescatter", tensor, name, op, prescale_factor, postscale_factor, process_set)


INTO, WAITED, SEVERAL = "into `tensor` itself", "waited for", "of several tensors, with one handle or list"
allreduce_async_ = _variant(allreduce_async, "allreduce_async_", INTO, into=True)
allreduce_ = _variant(allreduce_async_, "allreduce_", WAITED, wait=True)
broadcast_async_ = _variant(broadcast_async, "broadcast_async_", INTO, into=True)
broadcast_ = _variant(broadcast_async_, "broadcast_", WAITED, wait=True)
grouped_allreduce_async = _variant(allreduce_async, "grouped_allreduce_async", SEVERAL)
grouped_allreduce_async_ = _variant(allreduce_async_, "grouped_allreduce_async_", SEVERAL)
grouped_allreduce_ = _variant(grouped_allreduce_async_, "grouped_allreduce_", WAITED, wait=True)
grouped_allgather_async = _variant(allgather_async, "grouped_allgather_async", SEVERAL)
grouped_reducescatter_async = _variant(reducescatter_async, "grouped_reducescatter_async", SEVERAL)


class _Flow(torch.autograd.Function):
    """Tensors by `forward`, and their gradients by `backward`; both map a list of tensors to as many."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: Tensor) -> Any:
        ctx.back = backward
        return tuple(forward(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.back(list(grads))


def _through(given: Any, forward: Any, backward: Any, compression: Any = Compression.none) -> Any:
    """`forward` of a tensor or of several, `backward` of the list of their gradients, and a compression around `forward`."""
    one, tensors = isinstance(given, Tensor), _listed(given)
    if not tensors:
        return []
    small, contexts = zip(*map(compression.compress, tensors))
    run = (lambda tensors: [forward(tensors[0])]) if one else forward
    outputs = list(map(compression.decompress, _Flow.apply(run, backward, *small), contexts))
    return outputs[0] if one else outputs


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none, op: Op | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """A new tensor of the same shape and type: `op` over the ranks, the average by default. Gradients are reduced alike."""
    how = _op(op, average), prescale_factor, postscale_factor, process_set
    return _through(
        tensor,
        lambda given: synchronize(_reduce("allreduce", given, name, *how)),
        lambda grads: allreduce(grads, None, None, Compression.none, *how),
        compression,
    )


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As `allgather_async`, waited for. Its gradient is this rank's rows of the mean over the ranks."""

    def backward(grads: list[Tensor]) -> list[Tensor]:
        lengths = torch.tensor([[each.shape[0] for each in _listed(tensor)]])
        rows = allgather(lengths, process_set=process_set).T.tolist()
        means = allreduce(grads, process_set=process_set)
        return [mean.split(row)[process_set.rank()] for mean, row in zip(means, rows)]

    return _through(tensor, lambda given: synchronize(allgather_async(given, name, process_set)), backward)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """A new tensor with root's values. The mean of the ranks' gradients flows through it, to root."""
    return _through(
        tensor,
        lambda given: synchronize(broadcast_async(given, root_rank, name, process_set)),
        lambda grads: [grad * (rank() == root_rank) for grad in allreduce(grads, process_set=process_set)],
    )


def alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:  # fmt: skip
    """As `alltoall_async`, waited for; without `splits` the tensor alone. Each gradient goes back to the row's rank."""
    received: list[Tensor] = []

    def forward(given: Tensor) -> Tensor:
        output, rows = synchronize(alltoall_async(given, splits, name, process_set))
        received.append(rows)
        return output

    output = _through(tensor, forward, lambda grads: alltoall(grads[0], received[0], None, process_set)[:1])
    return output if splits is None else (output, received[0])


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: Op = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """As `reducescatter_async`, waited for. The gradient is the ranks' gradients one after the other, times their number for a sum."""
    how, factor = (op, process_set, prescale_factor, postscale_factor), prescale_factor * postscale_factor
    return _through(
        tensor,
        lambda given: synchronize(reducescatter_async(given, name, *how)),
        lambda grads: allgather(
            [grad * factor * (process_set.size() if op == Sum else 1) for grad in grads], None, process_set
        ),
        compression,
    )


grouped_allreduce = _variant(allreduce, "grouped_allreduce", SEVERAL)
grouped_allgather = _variant(allgather, "grouped_allgather", SEVERAL)
grouped_reducescatter = _variant(reducescatter, "grouped_reducescatter", SEVERAL)


def join(device: int = -1) -> int:
    """Say that this rank has no more data. Until all ranks say so, it takes part in reductions of all ranks with zeros.

    Averages are still over all ranks; other operations of all ranks fail meanwhile. Zeros are made where the other ranks' tensors are, so
    that `device` decides nothing. Returns the rank that was the last to join.
    """
    last = synchronize(_submit([Pending(Request("join", "join"), finish=lambda _, o: o.request.root)]))
    running().asked.clear()  # the ranks have asked for different numbers of operations without a name
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank is here."""
    run = running()
    name = f"barrier.{run.unnamed('barrier', process_set)}"
    synchronize(_submit([Pending(Request(name, "barrier", run.members(process_set), (1,)))]))
