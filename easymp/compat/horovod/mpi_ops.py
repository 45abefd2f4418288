"""Collectives by Horovod's names: out of place and differentiable, in place, asynchronous, and of several tensors.

Gradients are Horovod's: those of a gather and a broadcast are means over the ranks, that of a reducescatter is the
ranks' gradients one after the other, times their number for a sum.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .basics import *  # noqa: F403 (the names of horovod.torch.mpi_ops)
from .basics import ProcessSet, global_process_set, rank, running, size
from .basics import __all__ as basics
from .engine import Op, Order, Pending, Request

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
    """Floating-point tensors travel as fp16, which holds 6e-8 to 65,504, and come back in their own dtype."""

    compress = staticmethod(lambda tensor: (tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype))
    decompress = staticmethod(lambda tensor, ctx: tensor.to(ctx))


class Compression:
    """The choices: ``Compression.none``, ``Compression.fp16``; or a class with the same two functions."""

    none, fp16 = NoneCompressor, FP16Compressor


# -- handles


def synchronize(handle: int) -> Any:
    """Wait for the result of a handle: a tensor, or a tuple of them for a group; None the second time."""
    run = running()
    if handle not in run.handles:
        return None
    operations, grouped = run.handles.pop(handle)
    results = tuple(run.engine.wait(pending) for pending in operations)
    return results if grouped else results[0]


def poll(handle: int) -> bool:
    """Whether the operation has ended. Raises ValueError for a handle that was synchronized."""
    if handle not in running().handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return all(pending.ended.is_set() for pending in running().handles[handle][0])


class _InPlace(NamedTuple):
    """One tensor or several that the results go into."""

    tensors: Any


def _tensor_list(inputs: Any) -> list[Tensor]:
    """One tensor, or several, as a list."""
    tensors = list(inputs) if isinstance(inputs, Iterable) and not isinstance(inputs, Tensor) else [inputs]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{tensor!r} is a {type(tensor).__name__}: pass a tensor, as torch.tensor({tensor!r})")
    return tensors


def _request(
    kind: str, inputs: Any, name: str | None, process_set: ProcessSet, finish: Any = None, **fields: Any
) -> int:
    """Request operations on a tensor, an iterable of them or either as `_InPlace`; returns their handle."""
    in_place = isinstance(inputs, _InPlace)
    inputs = inputs.tensors if in_place else inputs
    run, grouped, tensors = running(), not isinstance(inputs, Tensor), _tensor_list(inputs)
    ranks, full_name = run.members(process_set), f"{kind}.{name or run.next_name(kind, process_set)}"
    operations = []
    for i, tensor in enumerate(tensors):
        if tensor.is_sparse or tensor.is_complex():
            remedy = "view_as_real(tensor)" if tensor.is_complex() else "tensor.to_dense()"
            raise ValueError(f"{kind}: Tensor type {tensor.type()} is not supported: pass {remedy}")
        if kind == "reducescatter" and not tensor.ndim:
            raise ValueError("Reducescatter does not support scalar inputs: pass tensor[None]")
        member_name = f"{full_name}_{i + 1}of{len(tensors)}" if grouped else full_name
        dtype = str(tensor.dtype).removeprefix("torch.")
        request = Request(member_name, kind, ranks, tuple(tensor.shape), dtype, tensor.device.type, **fields)
        operations.append(Pending(request, tensor.detach(), tensor if in_place else None, finish))
    return run.submit(operations, grouped)


# -- operations, in their public forms below


class _Operation(NamedTuple):
    """A call of an operation. Both functions take one tensor or several; `backward` has lists."""

    request: Callable[[Any], int]  # to a handle
    backward: Callable[[list[Tensor]], Any]  # from the gradients of the results to those of the inputs


class _Flow(torch.autograd.Function):
    """Tensors by `forward`, and their gradients by `backward`; both map a list of tensors to as many."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: Tensor) -> Any:
        ctx.flow_back = backward
        return tuple(forward(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.flow_back(list(grads))


def _differentiable(inputs: Any, forward: Any, backward: Any, compression: Any) -> Any:
    """`forward` of one tensor or several, inside of a compression; `backward` maps the list of their gradients."""
    single, tensors = isinstance(inputs, Tensor), _tensor_list(inputs)
    if not tensors:
        return []
    compressed, contexts = zip(*map(compression.compress, tensors))
    forward_list = (lambda tensors: [forward(tensors[0])]) if single else forward
    results = _Flow.apply(forward_list, backward, *compressed)  # type: ignore[no-untyped-call]  # torch has no types
    outputs = list(map(compression.decompress, results, contexts))
    return outputs[0] if single else outputs


def _public(operation: Callable[..., _Operation], name: str) -> Callable[..., Any]:
    """The form of `operation` with this public name, which says what it does.

    ``_async`` returns a handle in place of the result, a final ``_`` writes into the tensors themselves, ``grouped_``
    takes several tensors. The others are differentiable, and those of a reduction have the parameter `compression`.
    """
    grouped, in_place = name.startswith("grouped_"), name.endswith("_")
    flows = not in_place and not name.endswith("_async")
    signature = inspect.signature(operation)
    first, *parameters = signature.parameters.values()
    if flows and "prescale_factor" in signature.parameters:
        place = [parameter.name for parameter in parameters].index("name") + 1
        parameters.insert(place, Parameter("compression", Parameter.POSITIONAL_OR_KEYWORD, default=Compression.none))
    signature = signature.replace(parameters=[first.replace(name="tensors") if grouped else first, *parameters])

    def form(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        compression = bound.arguments.pop("compression", Compression.none)
        inputs = bound.arguments.pop(next(iter(bound.arguments)))
        request, backward = operation(inputs, **bound.arguments)
        if flows:
            return _differentiable(inputs, lambda tensors: synchronize(request(tensors)), backward, compression)
        handle = request(_InPlace(inputs) if in_place else inputs)
        return handle if "_async" in name else synchronize(handle)

    form.__name__ = form.__qualname__ = name
    form.__doc__ = operation.__doc__
    vars(form)["__signature__"] = signature
    return form


def _reduction(
    kind: str, name: str | None, op: Op, prescale: float, postscale: float, process_set: ProcessSet
) -> Callable[[Any], int]:
    """The request of a reduction, with checked options."""
    if op not in tuple(Op) or (kind == "reducescatter" and op not in (Average, Sum)):
        ops = "Average, Sum, Adasum, Min, Max, Product" if kind == "allreduce" else "Average, Sum"
        raise ValueError(f"{kind}: op={op!r} is not one of {ops} of hvd")
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if op == Adasum and size().bit_count() != 1:
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    scales = {"prescale": float(prescale), "postscale": float(postscale)}
    return lambda inputs: _request(kind, inputs, name, process_set, op=Op(op).name, **scales)


def _allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: Op | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> _Operation:  # fmt: skip
    """Reduce over the ranks, to the average by default. Gradients are reduced alike."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    options = Average if op is None else op, prescale_factor, postscale_factor, process_set
    return _Operation(
        _reduction("allreduce", name, *options),
        lambda grads: grouped_allreduce(grads, None, None, Compression.none, *options),
    )


def _allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> _Operation:
    """Join the ranks' tensors along dimension 0, where lengths may differ. A gradient is the mean over the ranks."""

    def backward(grads: list[Tensor]) -> list[Tensor]:
        lengths = torch.tensor([[len(tensor) for tensor in _tensor_list(tensor)]])
        rows_by_tensor = allgather(lengths, process_set=process_set).T.tolist()
        means = grouped_allreduce(grads, process_set=process_set)
        return [mean.split(rows)[process_set.rank()] for mean, rows in zip(means, rows_by_tensor)]

    return _Operation(lambda inputs: _request("allgather", inputs, name, process_set), backward)


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> _Operation:
    """Give all ranks the values of `root_rank`, a rank of the world. The mean of their gradients flows to it."""
    running().members(process_set)
    if root_rank not in process_set.ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank} for {process_set}")
    return _Operation(
        lambda inputs: _request("broadcast", inputs, name, process_set, root=int(root_rank)),
        lambda grads: [grad * (rank() == root_rank) for grad in grouped_allreduce(grads, process_set=process_set)],
    )


def _reducescatter(
    tensor: Tensor, name: str | None = None, op: Op = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> _Operation:  # fmt: skip
    """This rank's part of a reduction along dimension 0; earlier ranks may have one row more."""

    def backward(grads: list[Tensor]) -> Any:
        factor = prescale_factor * postscale_factor * (len(process_set.ranks) if op == Sum else 1)
        return grouped_allgather([grad * factor for grad in grads], None, process_set)

    return _Operation(_reduction("reducescatter", name, op, prescale_factor, postscale_factor, process_set), backward)


def _forms(operation: Callable[..., _Operation], name: str, in_place: bool = False) -> list[Callable[..., Any]]:
    """`operation` as `name` and as a handle, ``name_async``; with `in_place` also ``name_`` and ``name_async_``."""
    endings = ("", "_", "_async", "_async_") if in_place else ("", "_async")
    return [_public(operation, name + ending) for ending in endings]


allreduce, allreduce_, allreduce_async, allreduce_async_ = _forms(_allreduce, "allreduce", in_place=True)
grouped_allreduce, grouped_allreduce_, grouped_allreduce_async, grouped_allreduce_async_ = _forms(
    _allreduce, "grouped_allreduce", in_place=True
)
broadcast, broadcast_, broadcast_async, broadcast_async_ = _forms(_broadcast, "broadcast", in_place=True)
allgather, allgather_async = _forms(_allgather, "allgather")
grouped_allgather, grouped_allgather_async = _forms(_allgather, "grouped_allgather")
reducescatter, reducescatter_async = _forms(_reducescatter, "reducescatter")
grouped_reducescatter, grouped_reducescatter_async = _forms(_reducescatter, "grouped_reducescatter")


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: Op, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Request the reduction of a sparse tensor; returns a function that waits for the ranks' entries, gathered."""
    entries = grouped_allgather_async([tensor._indices().T, tensor._values()], name, process_set)

    def handle() -> Tensor:
        indices, values = synchronize(entries)
        values = values / process_set.size() if op == Average else values
        return torch.sparse_coo_tensor(indices.T, values, tensor.shape, check_invariants=False)

    return handle


def alltoall_async(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Request an exchange of the parts into which `splits` divides dimension 0, and of the rows that ranks send."""
    running().members(process_set)
    length, ranks, device = tensor.shape[:1].numel(), len(process_set.ranks), torch.device("cpu")
    if isinstance(splits, Tensor):
        device = splits.device
        if splits.dtype != torch.int32 or splits.ndim != 1:
            raise ValueError(f"alltoall expects 1D splits of int32, got {splits.dtype} {splits.shape}")
    rows = [length // ranks] * ranks if splits is None else [index(split) for split in splits]
    if len(rows) != ranks or min(rows) < 0 or sum(rows) > length or (splits is None and length % ranks):
        raise ValueError(f"alltoall: splits {rows} do not divide {length} rows among {ranks} ranks")

    def finish(output: Tensor, order: Order) -> tuple[Tensor, Tensor]:
        received_rows = [splits[process_set.ranks.index(rank())] for splits in order.rows]
        return output, torch.tensor(received_rows, dtype=torch.int32, device=device)

    return _request("alltoall", tensor, name, process_set, finish=finish, splits=rows)


def alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """As `alltoall_async`, waited for; without `splits` the tensor alone. Each gradient goes back to the row's rank."""
    received_rows: Any = None

    def forward(inputs: Tensor) -> Tensor:
        nonlocal received_rows
        output, received_rows = synchronize(alltoall_async(inputs, splits, name, process_set))
        return output  # type: ignore[no-any-return]

    def backward(grads: list[Tensor]) -> Any:
        return alltoall(grads[0], received_rows, None, process_set)[:1]

    output = _differentiable(tensor, forward, backward, Compression.none)
    return output if splits is None else (output, received_rows)


# -- all ranks together


def join(device: int = -1) -> int:
    """Say that this rank has no more data: it reduces zeros until all say so. Returns the rank that joined last."""
    operation = Pending(Request("join", "join"), finish=lambda _, order: order.request.root)
    last_rank: int = synchronize(running().submit([operation]))
    running().name_counts.clear()  # the ranks have requested different numbers of operations without a name
    return last_rank


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank is here."""
    run = running()
    name = f"barrier.{run.next_name('barrier', process_set)}"
    synchronize(run.submit([Pending(Request(name, "barrier", run.members(process_set), (1,)))]))
