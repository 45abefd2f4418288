"""zero1: as ddp, with optimizer states sharded (ZeRO-1), and with `shard_gradients` gradients as well (ZeRO-2).

Parameters are whole on every rank. Each rank keeps optimizer states for its rows of each parameter only, updates these
rows, and gathers the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.dtensor import local
from ..distributed import World
from ..errors import SettingError, StepError
from ..optim.sharded import ShardedOptimizer, cut, packed_at_once
from ..options import DistributedDataParallelKwargs, option
from ..precision.policies import LOW
from ..protocols import Conflict, Layout, WrapContext, chunk_elements
from .blocks import refuse_sparse
from .ddp import DDP, buckets_of
from .single import Reducing, Remedy, Single, broadcast_model, device_mesh, hook_gradient

# The older name warns from torch 2.13 on.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ZeRO1Options(DistributedDataParallelKwargs):
    """Options of strategy "zero1": those of "ddp", and one more.

    With `shard_gradients`, ``.grad`` is a DTensor between backward and step, which ``.grad.full_tensor()`` gathers.
    Parameters without a gradient take part with zeros, several backward passes may come before a step, and any part of
    the model may be called.

    Raises:
        SettingError: as for ddp; or `shard_gradients` with `comm_hook` or `gradient_predivide_factor`.

    Example:
        >>> settings = Settings(strategy="zero1", strategy_options={"shard_gradients": True})
    """

    shard_gradients: bool = option(
        False,
        "each backward averages gradients, low-precision ones in fp32, and a rank keeps those of its rows (ZeRO-2)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_gradients and (self.comm_hook != "no" or self.gradient_predivide_factor is not None):
            raise SettingError("shard_gradients=True: leave comm_hook and gradient_predivide_factor out")


class ZeRO1(DDP):
    """DistributedDataParallel, and optimizers that keep a part of their state.

    In place, beside what ddp does: the state of the user's optimizer moves into shards, and a hook refuses steps of its
    own. `step` and `state_dict` of the prepared optimizer are collectives. Optimizers that are not torch's, Muon and
    Adafactor run on DTensors (easymp's Muon on their parts).
    """

    name: ClassVar[str] = "zero1"
    spreads_states: ClassVar[bool] = True
    several: ClassVar[str] = "shards optimizer states over processes"
    conflicts: ClassVar[Sequence[Conflict]] = (
        *DDP.conflicts,
        Conflict("zero1", "join_uneven_inputs()", "every rank's step needs the other ranks' shards", Remedy.JOIN),
        Conflict(
            "zero1", "optimizer_in_backward", "it steps the shards of all parameters together", Remedy.IN_BACKWARD
        ),
        Conflict("shard_gradients=True", "create_graph=True", "gradients are cut without a graph", Remedy.GRAPH),
    )
    Options: ClassVar[type] = ZeRO1Options
    join = Single.join  # type: ignore[assignment]  # a context manager that is made in another way

    def __init__(self, world: World, options: DistributedDataParallelKwargs) -> None:
        super().__init__(world, options)
        self._cap = int(options.bucket_cap_mb * 2**20)
        self._frozen: set[int] = set()  # ids of parameters whose gradients are not averaged
        self._shards_gradients = getattr(options, "shard_gradients", False)  # "auto" has ddp's options
        if self._shards_gradients:
            self.sums, self.reduces_each = False, True
            self._copies = lambda parameter: 1 if parameter.ndim else world.size

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        cap = int(options.bucket_cap_mb * 2**20)
        trained = [p for p in model.parameters() if p.requires_grad]
        replica = DDP.layout(model, options, size, local_size)
        sharded = replica._replace(states=chunk_elements(size), gathered=packed_at_once(trained, cap))
        if not getattr(options, "shard_gradients", False):
            return sharded
        return sharded._replace(gradients=chunk_elements(size), unreduced=replica.early, reducing=replica.early)

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        refuse_sparse(model, "zero1 cuts dense ones only")
        if self._shards_gradients:
            broadcast_model(model, self._world, context.place)
            module = Single.wrap(self, model, optimizers, context)
            module = GradientShards(module, model, self._world, self._cap, self.options.broadcast_buffers)
        else:
            module = super().wrap(model, optimizers, context)
        self._frozen.update(id(p) for p in model.parameters() if not p.requires_grad)
        return module

    def spread(self, optimizer: Optimizer) -> Optimizer:
        self._check_steps(optimizer)
        return ShardedOptimizer(optimizer, self._world, self._cap, self._frozen)

    @staticmethod
    def option_words(options: Any) -> Collection[str]:
        words = set(DDP.option_words(options))
        return words | {"shard_gradients=True"} if getattr(options, "shard_gradients", False) else words

    def release(self, model: nn.Module, module: nn.Module) -> nn.Module:
        self._frozen.difference_update(id(p) for p in model.parameters())
        return super().release(model, module)


class GradientShards(Reducing):
    """Calls the model; in backward, averages gradients over the ranks bucket by bucket, and keeps this rank's rows."""

    def __init__(self, module: nn.Module, root: nn.Module, world: World, cap: int, broadcasts_buffers: bool) -> None:
        super().__init__(module, root, world, broadcasts_buffers)
        trained = [p for p in root.parameters() if p.requires_grad]
        self._queue = BucketQueue(trained, cap)
        self._rows: dict[Tensor, Tensor] = {}  # sums of this rank's rows, fp32 for low precision
        self._in_backward = False
        self.hooks = [p.register_hook(partial(self._before_gradient, p)) for p in trained]
        self.hooks += [hook_gradient(p, self._after_gradient) for p in trained]

    @cached_property
    def _mesh(self) -> Any:
        return device_mesh(self.world, (self.world.size,), ("shard",))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.begin_forward()
        return self.module(*args, **kwargs)

    def _move_rows(self, parameter: Tensor) -> None:
        """Move the rows that an earlier backward has put into ``.grad`` back to the sums, unless they were cleared."""
        grad: Any = parameter.grad
        if hasattr(grad, "to_local"):
            rows = local(grad)
            self._rows[parameter] = rows.float() if rows.dtype in LOW else rows
            parameter.grad = None

    def _before_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Clear ``.grad``, to which a whole gradient is about to be added, of rows."""
        if not self._in_backward:
            self._in_backward = True
            self._queue.restart()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._move_rows(parameter)

    def _after_gradient(self, parameter: Tensor) -> None:
        if id(parameter) in self._queue.arrived:
            raise StepError(
                "shard_gradients=True: a second gradient in one backward; checkpoint with use_reentrant=False"
            )
        for bucket in self._queue.arrive(parameter):
            self._reduce(bucket)

    def _end_backward(self) -> None:
        self._in_backward = False
        for bucket in self._queue.remaining():
            self._reduce(bucket)
        if self.reduces:
            for parameter, rows in self._rows.items():
                if parameter.requires_grad:  # else it was frozen since
                    parameter.grad = self._as_gradient(parameter, rows)
            self._rows.clear()

    @torch.no_grad()
    def _reduce(self, bucket: Sequence[Tensor]) -> None:
        with self.world.explained("the averaging of gradients"):
            for parameter in bucket:
                self._move_rows(parameter)
            for parameter, rows in zip(bucket, self._average(bucket)):
                total = self._rows.get(parameter)
                self._rows[parameter] = rows if total is None else total.add_(rows)
                parameter.grad = None

    def _average(self, bucket: Sequence[Tensor]) -> list[Tensor]:
        rank, size, first = self.world.rank, self.world.size, bucket[0]
        dtype = torch.float32 if first.dtype in LOW else first.dtype
        if not first.ndim:
            scalars = [torch.zeros_like(p, dtype=dtype) if p.grad is None else p.grad.to(dtype) for p in bucket]
            self.world.average_(scalars)
            return scalars
        widths = [-(-p.shape[0] // size) * (p.numel() // max(1, p.shape[0])) for p in bucket]
        packed = torch.zeros(size, sum(widths), dtype=dtype, device=first.device)
        for parameter, columns in zip(bucket, packed.split(widths, dim=1)):
            if parameter.grad is not None:
                for target in range(size):
                    rows = cut(parameter.grad, target, size)
                    columns[target, : rows.numel()].copy_(rows.reshape(-1))
        reduced = torch.empty_like(packed[0])
        _reduce_scatter(*(torch.view_as_real(t) if t.is_complex() else t for t in (reduced, packed.view(-1))))
        shapes = [cut(p, rank, size).shape for p in bucket]
        return [part[: shape.numel()].view(shape) for part, shape in zip(reduced.div_(size).split(widths), shapes)]

    def _as_gradient(self, parameter: Tensor, rows: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard  # here: it takes half a second

        placement = Shard(0) if parameter.ndim else Replicate()
        shape, stride = parameter.shape, parameter.stride()
        rows = rows.to(parameter.dtype)
        return DTensor.from_local(rows, self._mesh, [placement], run_check=False, shape=shape, stride=stride)


class BucketQueue:
    """Buckets of parameters, which leave in one order on all ranks, whatever the order in which gradients come."""

    def __init__(self, parameters: Sequence[Tensor], cap: float) -> None:
        self._buckets = buckets_of(parameters, cap)
        self._bucket_of = {id(p): i for i, bucket in enumerate(self._buckets) for p in bucket}
        self.restart()

    def restart(self) -> None:
        self.arrived: set[int] = set()  # ids of parameters with a gradient
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0

    def arrive(self, parameter: Tensor) -> Iterator[list[Tensor]]:
        """Buckets whose gradients are complete, now that `parameter` has its own."""
        if id(parameter) in self._bucket_of and id(parameter) not in self.arrived:
            self._missing[self._bucket_of[id(parameter)]] -= 1
        self.arrived.add(id(parameter))
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._next += 1
            yield self._buckets[self._next - 1]

    def remaining(self) -> list[list[Tensor]]:
        """Buckets that have not left: gradients of these are missing."""
        return self._buckets[self._next :]
