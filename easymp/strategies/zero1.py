"""zero1: as ddp, with optimizer states sharded (ZeRO-1), and gradients as well if asked for (ZeRO-2).

Parameters are whole on every rank. Each rank keeps optimizer states for its rows of each parameter only, updates these rows, and gathers
the others. Compared with ddp, a step sends the parameters once more, and Adam's state takes 8 / ranks bytes a parameter instead of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.dtensor import local
from ..distributed import World
from ..errors import SettingError, StepError
from ..optim.sharded import ShardedOptimizer, cut, packed_at_once
from ..options import DistributedDataParallelKwargs
from ..precision.policies import LOW
from ..protocols import Counting, Layout, WrapContext, chunk_elements
from .blocks import refuse_sparse
from .ddp import DDP, buckets_of
from .single import Reducing, Single, clip_to_norm, counting_over, hook_gradient, share_buffers, take_rank_0s

# The older name warns from torch 2.13 on.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ZeRO1Options(DistributedDataParallelKwargs):
    """Options of strategy "zero1": those of "ddp", and one more.

    Attributes:
        shard_gradients: each backward averages gradients, low-precision ones in fp32, and a rank keeps those of its rows (ZeRO-2). Between
            backward and step ``.grad`` is a DTensor, which ``.grad.full_tensor()`` completes. Parameters without a gradient take part with
            zeros, several backward passes may come before a step, and any part of the model may be called.

    Raises:
        SettingError: as for ddp; or `shard_gradients` with an option that changes how DistributedDataParallel sends gradients.

    Example:
        >>> settings = Settings(strategy="zero1", strategy_options={"shard_gradients": True})
    """

    shard_gradients: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_gradients and (self.comm_hook != "no" or self.gradient_predivide_factor is not None):
            raise SettingError("shard_gradients=True: leave comm_hook and gradient_predivide_factor out")


class ZeRO1(DDP):
    """DistributedDataParallel, and optimizers that keep a part of their state.

    `bucket_cap_mb` is also the most that is packed into one gathering of small parameters.
    In place, beside what ddp does: the state of the user's optimizer moves into shards, and the optimizer takes a hook that
    refuses to step by itself. `step` and `state_dict` of the prepared optimizer are collectives: all ranks call them. Optimizers
    that keep parameters beside their param groups (LBFGS) are refused. Optimizers that are not torch's, Muon and Adafactor run on
    DTensors (easymp's Muon on their parts); one that DTensor has no rules for (Adafactor) is refused at its first step.
    """

    name: ClassVar[str] = "zero1"
    traffic: ClassVar = {"backward": ("all_reduce",), "step": ("all_gather",)}
    several: ClassVar[str] = "shards optimizer states over processes"
    no_join: ClassVar[str] = "every rank's step needs the other ranks' shards"
    Options: ClassVar[type] = ZeRO1Options

    no_step_in_backward = "steps the shards of all parameters together, and gathers them"
    join = Single.join

    def __init__(self, world: World, options: DistributedDataParallelKwargs) -> None:
        super().__init__(world, options)
        self._cap = int(options.bucket_cap_mb * 2**20)
        self._frozen: set[int] = set()  # ids of parameters whose gradients are not averaged
        self._cuts = getattr(options, "shard_gradients", False)  # "auto" has ddp's options
        if self._cuts:
            self.sums, self.reduces_each = False, True

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        cap = int(options.bucket_cap_mb * 2**20)
        trained = [p for p in model.parameters() if p.requires_grad]
        found = DDP.layout(model, options, size, local_size)
        found = found._replace(states=chunk_elements(size), gathered=packed_at_once(trained, cap))
        if not getattr(options, "shard_gradients", False):
            return found
        return found._replace(gradients=chunk_elements(size), unreduced=found.early, reducing=found.early)

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        refuse_sparse(model, "zero1 cuts dense ones only")
        if self._cuts:
            take_rank_0s(model, self._world, context.place)
            module = Single.wrap(self, model, optimizers, context)
            module = GradientShards(module, model, self._world, self._cap, self.options.broadcast_buffers)
        else:
            module = super().wrap(model, optimizers, context)
        self._frozen.update(id(p) for p in model.parameters() if not p.requires_grad)
        return module

    def spread(self, optimizer: Optimizer) -> Optimizer:
        return ShardedOptimizer(optimizer, self._world, self._cap, self._frozen)

    def after_backward(self, models: Sequence[nn.Module], create_graph: bool) -> Callable[[], None] | None:
        if create_graph and self._cuts:
            raise StepError(
                "backward(create_graph=True) with shard_gradients=True: use torch.autograd.grad for the inner gradient"
            )
        return super().after_backward(models, create_graph)

    @property
    def counting(self) -> Counting:
        return counting_over(self._world, self._copies()) if self._cuts else super().counting

    def _copies(self) -> Callable[[Tensor], int]:
        size = self._world.size  # the function must not hold the strategy
        return lambda parameter: 1 if parameter.ndim else size

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        if not self._cuts:
            return super().clip(parameters, max_norm, norm_type)
        return clip_to_norm(parameters, max_norm, norm_type, self._world, self._copies())

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        self._frozen.difference_update(id(p) for p in model.parameters())
        for hook in model.hooks if isinstance(model, GradientShards) else ():
            hook.remove()
        return super().release(model, alone)


class GradientShards(Reducing):
    """Calls the model; while backward runs, averages gradients over the ranks, keeps this rank's rows, and frees the rest.

    All ranks reduce the same buckets of `cap` bytes in the same order, whatever the order in which their gradients come. While `reduces`,
    backward ends an accumulation window, and rows become gradients. If it `shares` them, buffers then take rank 0's values.
    """

    def __init__(self, module: nn.Module, root: nn.Module, world: World, cap: int, shares: bool) -> None:
        super().__init__()
        self.module, self.root, self.world = module, root, world
        self._shares = self._stale = shares
        trained = [p for p in root.parameters() if p.requires_grad]
        self._buckets = buckets_of(trained, cap)
        self._bucket_of = {id(p): i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._rows: dict[Tensor, Tensor] = {}  # sums of this rank's rows, fp32 for low precision
        self._running = False
        self._mesh: Any = None
        self.hooks = [p.register_hook(partial(self._begin, p)) for p in trained]
        self.hooks += [hook_gradient(p, self._arrived) for p in trained]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._stale:
            share_buffers(self.root, self.world)
        self._stale = self._shares and torch.is_grad_enabled() and self.reduces
        self.world.forwards += 1
        return self.module(*args, **kwargs)

    def _take_up(self, parameter: Tensor) -> None:
        """Add to the rows that an earlier backward has handed over, unless they were cleared since."""
        grad: Any = parameter.grad
        if hasattr(grad, "to_local"):
            rows = local(grad)
            self._rows[parameter] = rows.float() if rows.dtype in LOW else rows
            parameter.grad = None

    def _begin(self, parameter: Tensor, gradient: Tensor) -> None:
        """A gradient is about to be added to ``.grad``, where rows cannot be."""
        if not self._running:
            self._running, self._next = True, 0
            self._missing = [len(bucket) for bucket in self._buckets]
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._take_up(parameter)

    def _arrived(self, parameter: Tensor) -> None:
        at = self._bucket_of[id(parameter)]
        if at < self._next:
            raise StepError(
                "shard_gradients=True: a second gradient in one backward; checkpoint with use_reentrant=False"
            )
        self._missing[at] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] <= 0:
            self._reduce_next()

    def _finish(self) -> None:
        self._running = False
        while self._next < len(self._buckets):
            self._reduce_next()
        for parameter, rows in self._rows.items() if self.reduces else ():
            if parameter.requires_grad:  # else it was frozen since
                parameter.grad = self._as_gradient(parameter, rows)
        if self.reduces:
            self._rows.clear()

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        with torch.no_grad(), self.world.explained("the averaging of gradients"):
            for parameter in bucket:
                self._take_up(parameter)
            for parameter, rows in zip(bucket, self._average(bucket)):
                before = self._rows.get(parameter)
                self._rows[parameter] = rows if before is None else before.add_(rows)
                parameter.grad = None

    def _average(self, bucket: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of the averages of the bucket's gradients."""
        rank, size, first = self.world.rank, self.world.size, bucket[0]
        dtype = torch.float32 if first.dtype in LOW else first.dtype
        if not first.ndim:
            wholes = [
                torch.zeros_like(p, dtype=dtype) if p.grad is None else p.grad.to(dtype) for p in bucket
            ]
            self.world.average_(wholes)
            return wholes
        room = [-(-p.shape[0] // size) * (p.numel() // max(1, p.shape[0])) for p in bucket]
        packed = torch.zeros(size, sum(room), dtype=dtype, device=first.device)
        for parameter, columns in zip(bucket, packed.split(room, dim=1)):
            for there in range(size) if parameter.grad is not None else ():
                part = cut(parameter.grad, there, size)  # type: ignore[arg-type]
                columns[there, : part.numel()].copy_(part.reshape(-1))
        mine = torch.empty_like(packed[0])
        _reduce_scatter(*(torch.view_as_real(t) if t.is_complex() else t for t in (mine, packed.view(-1))))
        parts = mine.div_(size).split(room)
        shapes = [cut(p, rank, size).shape for p in bucket]
        return [part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes)]

    def _as_gradient(self, parameter: Tensor, rows: Tensor) -> Tensor:
        # Half a second, which other options need not pay.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self._mesh is None:
            self._mesh = init_device_mesh(self.world.device.type, (self.world.size,))
        how: Any = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
        placement = Shard(0) if parameter.ndim else Replicate()
        return DTensor.from_local(rows.to(parameter.dtype), self._mesh, [placement], **how)
