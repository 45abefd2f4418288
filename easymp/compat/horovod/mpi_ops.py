"""Ranks, subsets of them, and collectives: differentiable, in place, asynchronous, and of several tensors.

Gradients are Horovod's: those of a gather and a broadcast are means over the ranks, that of a reducescatter is the
ranks' gradients one after the other, times their number for a sum.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import index
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed import World, locate, read_ranks
from ...distributed.process_group import odd_one_out
from ...errors import EasympError, RefusedError
from ...settings import resolve
from ..layer import Layer, device_of
from .engine import JOIN, Engine, HorovodInternalError, Op, Order, Pending, Request

__all__ = [
    *"Adasum Average Compression HorovodInternalError Max Min NotInitializedError ProcessSet Product Sum".split(),
    *"add_process_set allgather allgather_async allreduce allreduce_ allreduce_async allreduce_async_".split(),
    *"alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ ccl_built".split(),
    *"cross_rank cross_size cuda_built ddl_built global_process_set gloo_built gloo_enabled".split(),
    *"grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_".split(),
    *"grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async".split(),
    *"init is_homogeneous is_initialized join local_rank local_size mpi_built mpi_enabled".split(),
    *"mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async rocm_built shutdown".split(),
    *"size sparse_allreduce_async synchronize".split(),
]
T = TypeVar("T")
Average, Sum, Adasum, Min, Max, Product = Op
layer = Layer("Horovod", "horovod", "horovod.torch")
__getattr__ = layer.absent(__name__)
PATIENCE = 5.0  # seconds that rank 0 waits for the others before it leaves
NO_MPI = "Horovod has not been built with MPI support"


class NotInitializedError(EasympError, ValueError):
    """A call that needs `init` first."""


class ProcessSet:
    """Subset of the ranks: pass it to `init` or `add_process_set`, then to operations."""

    mpi_comm = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        self.process_set_id: int | None = None  # while it is not added; 0 of all ranks
        ranks: list[Any] = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet({ranks_or_comm!r}): pass a list of ranks. {NO_MPI}")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"ProcessSet names a rank twice: {sorted(ranks)}; pass each rank once")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Number of its ranks; None before it is added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Rank of this process in the set; None before the set is added. ValueError if the process is not in it."""
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"Process is not part of provided process set: rank {rank()} of {self}")
        return self.ranks.index(rank())

    def included(self) -> bool:
        """Whether this process is one of its ranks."""
        return rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


@dataclass
class Run:
    """The world and engine that `init` made."""

    world: World
    engine: Engine
    process: int  # id of the process that called `init`; a forked child has no part in the run
    process_sets: list[ProcessSet]  # by their numbers
    handle_numbers: count[int] = field(default_factory=lambda: count(1))
    handles: dict[int, Operation] = field(default_factory=dict)
    name_counts: Counter[Any] = field(default_factory=Counter)  # operations without a name, by kind and process set

    def next_name(self, kind: str, process_set: ProcessSet) -> str:
        """Name of an operation without one; the same on all ranks that request in the same order."""
        self.name_counts[kind, process_set.process_set_id] += 1
        return f"noname.{self.name_counts[kind, process_set.process_set_id]}"

    def members(self, process_set: ProcessSet) -> tuple[int, ...]:
        """Ranks of a process set that was added and that this process is part of; ``()`` for all."""
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"process_set={process_set!r}: pass an hvd.ProcessSet that hvd.init was given")
        if process_set not in self.process_sets:
            raise ValueError(f"{process_set} does not exist, or has not been registered: pass it to hvd.init")
        if not process_set.included():
            raise ValueError(f"Rank {self.world.rank} is not a member of the provided process set: {process_set}")
        return tuple(process_set.ranks) if process_set.process_set_id else ()


_run: Run | None = None


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other processes, which a launcher started; a second call only adds process sets that are new."""
    global _run
    timeout = resolve().timeout
    ranks = locate(read_ranks(), timeout) if _run is None else _run.world.ranks
    if comm and sorted(comm if isinstance(comm, Iterable) else ()) != list(range(ranks.size)):
        reason = f"the launcher started {ranks.size} processes, and all of them take part; {NO_MPI}"
        raise RefusedError(f"hvd.init(comm={comm}): {reason}. Pass subsets of the ranks as process_sets")
    if _run is None:
        world = World(ranks, device_of(ranks), timeout)
        global_process_set.ranks = list(range(world.size))
        _run = Run(world, Engine(world), os.getpid(), [global_process_set])
        atexit.register(shutdown)
    # "dynamic" has no effect: `add_process_set` always works.
    for process_set in process_sets if process_sets and not isinstance(process_sets, str) else ():
        if process_set not in _run.process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Leave the other ranks, whose operations raise HorovodInternalError from then on; also called at exit."""
    global _run
    if _run is None or _run.process != os.getpid():
        return
    run, _run = _run, None
    atexit.unregister(shutdown)
    for process_set in run.process_sets[1:]:
        process_set.process_set_id = None
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    reason = f"{type(error).__name__}: {error}" if error else "hvd.shutdown(), or the end of its script"
    run.engine.close(reason.splitlines()[0], PATIENCE if error is None else 0.0)
    run.world.close()


def running() -> Run:
    """The run that `init` made."""
    if _run is None:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    return _run


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add and return a new process set, or one of these ranks; every rank of the world calls it alike."""
    run = running()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks_by_rank = run.world.gather_objects(added.ranks)
    if any(ranks != added.ranks for ranks in ranks_by_rank):
        difference = odd_one_out(ranks_by_rank)
        raise HorovodInternalError(f"add_process_set: the ranks pass different sets: {difference}")
    if not added.ranks or not set(added.ranks) <= set(range(run.world.size)):
        raise ValueError(f"{added} holds ranks that are not among 0 … {run.world.size - 1}, or none")
    if any(added.ranks == process_set.ranks for process_set in run.process_sets):
        raise ValueError(f"Attempted to add a duplicate process set: {added}")
    run.engine.open(added.ranks)
    added.process_set_id = len(run.process_sets)
    run.process_sets.append(added)
    return added


# -- facts about the run and this installation


def _query(name: str, summary: str, answer: Callable[[], T]) -> Callable[[], T]:
    """Return the function `answer`, after giving it a name and a docstring."""
    answer.__name__, answer.__qualname__, answer.__doc__ = name, name, summary
    return answer


def nccl_built() -> int:
    """NCCL's version as its own number (22703 for 2.27.3); 0 where this torch has no NCCL."""
    major, minor, patch = torch.cuda.nccl.version()[:3] if dist.is_nccl_available() and cuda_built() else (0, 0, 0)
    return int(major * 10000 + minor * 100 + patch)


def mpi_threads_supported() -> bool:
    """Raise Horovod's ValueError for a run without MPI."""
    raise ValueError("Horovod MPI is not enabled; operations go over torch.distributed's own backends")


rank = _query("rank", "Rank of this process.", lambda: running().world.rank)
size = _query("size", "Number of processes.", lambda: running().world.size)
local_rank = _query("local_rank", "Rank on this node.", lambda: running().world.local_rank)
local_size = _query("local_size", "Processes of this node.", lambda: running().world.local_size)
cross_rank = _query("cross_rank", "This node's number.", lambda: rank() // max(1, local_size()))
cross_size = _query("cross_size", "Nodes.", lambda: running().world.ranks.nodes)
is_homogeneous = _query("is_homogeneous", "True: all nodes have as many processes.", lambda: bool(running()))
is_initialized = _query("is_initialized", "Whether `init` has been called.", lambda: _run is not None)
cuda_built = _query("cuda_built", "Whether this torch has CUDA.", lambda: torch.version.cuda is not None)
rocm_built = _query("rocm_built", "Whether this torch has ROCm.", lambda: torch.version.hip is not None)
mpi_built = _query("mpi_built", "False: data goes over torch's backends; mpirun may start processes.", lambda: False)
gloo_built = gloo_enabled = dist.is_gloo_available  # gloo carries CPU tensors
mpi_enabled = ddl_built = ccl_built = mpi_built


# -- operations


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


# -- operations


@dataclass
class Operation:
    """A call of an operation on one tensor or several."""

    kind: str
    arguments: Mapping[str, Any]
    fields: Mapping[str, Any]  # of its requests
    grouped: bool
    pendings: list[Pending] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)

    def submit(self, tensors: list[Tensor], in_place: bool = False) -> None:
        """Request it for each tensor."""
        run, kind, process_set = running(), self.kind, self.arguments["process_set"]
        ranks, name = run.members(process_set), self.arguments["name"] or run.next_name(kind, process_set)
        for i, tensor in enumerate(tensors):
            if tensor.is_sparse or tensor.is_complex():
                remedy = "view_as_real(tensor)" if tensor.is_complex() else "tensor.to_dense()"
                raise ValueError(f"{kind}: Tensor type {tensor.type()} is not supported: pass {remedy}")
            if kind == "reducescatter" and not tensor.ndim:
                raise ValueError("Reducescatter does not support scalar inputs: pass tensor[None]")
            full_name = f"{kind}.{name}_{i + 1}of{len(tensors)}" if self.grouped else f"{kind}.{name}"
            dtype, device = str(tensor.dtype).removeprefix("torch."), tensor.device.type
            request = Request(full_name, kind, ranks, tuple(tensor.shape), dtype, device, **self.fields)
            self.pendings.append(Pending(request, tensor.detach(), tensor if in_place else None))
        for pending in self.pendings:
            run.engine.submit(pending)

    def wait(self) -> list[Tensor]:
        """The outputs. Afterwards `orders` are those by which they were made."""
        results = [running().engine.wait(pending) for pending in self.pendings]
        self.pendings, self.orders = [], [order for _, order in results]  # without the inputs' memory
        return [output for output, _ in results]

    def rows(self, i: int) -> list[int]:
        """The rows that came from each rank for tensor `i` of an allgather or alltoall."""
        place = self.arguments["process_set"].ranks.index(rank()) if self.kind == "alltoall" else 0
        return [rank_rows[place] for rank_rows in self.orders[i].rows]

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """What the call returns."""
        if self.kind == "alltoall":
            device = getattr(self.arguments["splits"], "device", "cpu")
            return outputs[0], torch.tensor(self.rows(0), dtype=torch.int32, device=device)
        return outputs if self.grouped else outputs[0]

    def backward(self, grads: list[Tensor]) -> list[Tensor]:
        """Gradients of the inputs, from those of the outputs."""
        arguments, process_set = self.arguments, self.arguments["process_set"]
        if self.kind == "alltoall":
            return list(alltoall(grads[0], self.rows(0), None, process_set)[:1])
        if self.kind == "reducescatter":
            factor = arguments["prescale_factor"] * arguments["postscale_factor"]
            factor *= len(process_set.ranks) if arguments["op"] == Sum else 1
            return list(grouped_allgather([grad * factor for grad in grads], None, process_set))
        scales = {name: value for name, value in arguments.items() if name.endswith("scale_factor")}
        op = Op[self.fields["op"]] if self.kind == "allreduce" else Average
        reduced: list[Tensor] = grouped_allreduce(grads, op=op, process_set=process_set, **scales)
        if self.kind == "broadcast":
            return [mean * (rank() == arguments["root_rank"]) for mean in reduced]
        if self.kind == "allgather":
            return [mean.split(self.rows(i))[process_set.rank()] for i, mean in enumerate(reduced)]
        return reduced


class _Flow(torch.autograd.Function):
    """The outputs of an operation on tensors, with gradients."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *tensors: Tensor) -> Any:
        ctx.operation = operation
        operation.submit(list(tensors))
        return tuple(operation.wait())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.operation.backward(list(grads))


def synchronize(handle: int) -> Any:
    """Wait for the result of a handle: a tensor, or a tuple of them for a group; None the second time."""
    operation = running().handles.pop(handle, None)
    return None if operation is None else operation.result(tuple(operation.wait()))


def poll(handle: int) -> bool:
    """Whether the operation has ended. Raises ValueError for a handle that was synchronized."""
    if handle not in running().handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return all(pending.result.done() for pending in running().handles[handle].pendings)


def _form(fields_of: Callable[..., dict[str, Any]], public_name: str) -> Callable[..., Any]:
    """The form, with this public name, of the operation whose requests have the fields that `fields_of` returns.

    ``_async`` returns a handle in place of the result, a final ``_`` writes into the tensors themselves, ``grouped_``
    takes several tensors. The others are differentiable, and those of a reduction have the parameter `compression`.
    """
    in_place, flows = public_name.endswith("_"), not public_name.endswith(("_", "_async"))
    kind, parameters = fields_of.__name__.removeprefix("_"), inspect.signature(fields_of).parameters
    tensor_parameter, *options = (p for p in parameters.values() if flows or p.name != "compression")
    if public_name.startswith("grouped_"):
        tensor_parameter = tensor_parameter.replace(name="tensors")
    signature = inspect.Signature([tensor_parameter, *options])

    def form(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        inputs, compression = arguments.pop(tensor_parameter.name), arguments.get("compression", Compression.none)
        grouped = isinstance(inputs, Iterable) and not isinstance(inputs, Tensor)
        tensors = list(inputs) if grouped else [inputs]
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                tensor_type = type(tensor).__name__
                raise ValueError(f"{tensor!r} is a {tensor_type}: pass a tensor, as torch.tensor({tensor!r})")
        operation = Operation(kind, arguments, fields_of(inputs, **arguments), grouped)
        if not flows:
            operation.submit(tensors, in_place)
            handle = next(running().handle_numbers)
            running().handles[handle] = operation
            return handle if "_async" in public_name else synchronize(handle)
        if not tensors:
            return []
        compressed, contexts = zip(*map(compression.compress, tensors))
        outputs = _Flow.apply(operation, *compressed)  # type: ignore[no-untyped-call]  # torch has no types
        result = operation.result(list(map(compression.decompress, outputs, contexts)))
        return result[0] if kind == "alltoall" and arguments["splits"] is None else result

    form.__name__ = form.__qualname__ = public_name
    form.__doc__ = fields_of.__doc__
    vars(form)["__signature__"] = signature
    return form


def _reduction(kind: str, op: Op, prescale: float, postscale: float, process_set: ProcessSet) -> dict[str, Any]:
    if op not in tuple(Op) or (kind == "reducescatter" and op not in (Average, Sum)):
        ops = "Average, Sum, Adasum, Min, Max, Product" if kind == "allreduce" else "Average, Sum"
        raise ValueError(f"{kind}: op={op!r} is not one of {ops} of hvd")
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if op == Adasum and size().bit_count() != 1:
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    return {"op": Op(op).name, "prescale": float(prescale), "postscale": float(postscale)}


def _allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: Op | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> dict[str, Any]:  # fmt: skip
    """Reduce over the ranks, to the average by default. Gradients are reduced alike."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    return _reduction("allreduce", Average if op is None else op, prescale_factor, postscale_factor, process_set)


def _allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> dict[str, Any]:
    """Join the ranks' tensors along dimension 0, where lengths may differ. A gradient is the mean over the ranks."""
    return {}


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> dict[str, Any]:
    """Give all ranks the values of `root_rank`, a rank of the world. Its gradient is the mean over the ranks."""
    running().members(process_set)
    if root_rank not in process_set.ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank} for {process_set}")
    return {"root": int(root_rank)}


def _reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: Op = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """This rank's part of a reduction along dimension 0; earlier ranks may have one row more."""
    return _reduction("reducescatter", op, prescale_factor, postscale_factor, process_set)


def _alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> dict[str, Any]:  # fmt: skip
    """Exchange the parts into which `splits` divides dimension 0. Each gradient goes back to the row's rank.

    Returns the rows, and their number by rank; `alltoall` without `splits` the rows alone.
    """
    running().members(process_set)
    length, ranks = tensor.shape[:1].numel(), len(process_set.ranks)
    if isinstance(splits, Tensor) and (splits.dtype != torch.int32 or splits.ndim != 1):
        raise ValueError(f"alltoall expects 1D splits of int32, got {splits.dtype} {splits.shape}")
    rows = [length // ranks] * ranks if splits is None else [index(split) for split in splits]
    if len(rows) != ranks or min(rows) < 0 or sum(rows) > length or (splits is None and length % ranks):
        raise ValueError(f"alltoall: splits {rows} do not divide {length} rows among {ranks} ranks")
    return {"splits": rows}


def _forms(fields_of: Callable[..., dict[str, Any]], name: str, *endings: str) -> list[Callable[..., Any]]:
    """An operation as `name` and as a handle, ``name_async``, both also with other `endings`."""
    return [_form(fields_of, name + form + ending) for form in ("", "_async") for ending in ("", *endings)]


allreduce, allreduce_, allreduce_async, allreduce_async_ = _forms(_allreduce, "allreduce", "_")
grouped_allreduce, grouped_allreduce_, grouped_allreduce_async, grouped_allreduce_async_ = _forms(
    _allreduce, "grouped_allreduce", "_"
)
broadcast, broadcast_, broadcast_async, broadcast_async_ = _forms(_broadcast, "broadcast", "_")
allgather, allgather_async = _forms(_allgather, "allgather")
grouped_allgather, grouped_allgather_async = _forms(_allgather, "grouped_allgather")
reducescatter, reducescatter_async = _forms(_reducescatter, "reducescatter")
grouped_reducescatter, grouped_reducescatter_async = _forms(_reducescatter, "grouped_reducescatter")
alltoall, alltoall_async = _forms(_alltoall, "alltoall")


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


# -- all ranks together


def join(device: int = -1) -> int:
    """Say that this rank has no more data: it reduces zeros until all say so. Returns the rank that joined last."""
    run, pending = running(), Pending(JOIN)
    run.engine.submit(pending)
    _, order = run.engine.wait(pending)
    run.name_counts.clear()  # the ranks have requested different numbers of operations without a name
    return order.request.root


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank is here."""
    name = running().next_name("barrier", process_set)
    allreduce(torch.zeros(1), None, f"barrier.{name}", process_set=process_set)
