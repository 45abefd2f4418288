"""``apex.parallel``: DistributedDataParallel by Apex's options, Reducer, batch-norm over the ranks, LARC. On CPUs (gloo) and GPUs.

The script itself calls torch.distributed.init_process_group, and `easymp launch` or torchrun starts its processes, in place of
``python -m apex.parallel.multiproc``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import RefusedError
from ...optim import layerwise
from ...strategies import batchnorm
from ...strategies.ddp import UNFINISHED, CommHookState, all_reduce
from .amp import ApexError, Stepping, layer

__all__ = [
    *("LARC", "DistributedDataParallel", "ReduceOp", "Reducer", "SyncBatchNorm"),
    *("convert_syncbn_model", "create_syncbn_process_group"),
]
__getattr__ = layer.absent("apex.parallel", {}, lambda: __all__)
ReduceOp = dist.ReduceOp


class LARC(layerwise.LARC):
    """`easymp.optim.LARC`, with Apex's arguments; made before `amp.initialize` or after it."""

    def _step_inside(self, found_inf: Tensor | None) -> None:
        if isinstance(self.optim, Stepping):
            self.optim.step()  # handles overflows and masters
        else:
            super()._step_inside(found_inf)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        if isinstance(self.optim, Stepping):
            self.optim._amp.masters.clear()  # gradients that were put back behind the step inside
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        if isinstance(self.optim, Stepping):
            self.optim.zero_grad(set_to_none)
        super().zero_grad(set_to_none)


class SyncBatchNorm(batchnorm.SyncBatchNorm):
    """easymp's batch-norm over the ranks, with Apex's arguments."""

    channel_last = fuse_relu = False

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: dist.ProcessGroup | None = None, channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:  # fmt: skip
        how = (eps, momentum, affine, track_running_stats)
        super().__init__(num_features, *how, process_group=process_group)
        self.channel_last, self.fuse_relu = channel_last, fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Batch-norm of `input`, plus `z`, where given, before the ReLU."""
        x = input.movedim(-1, 1) if self.channel_last else input
        y = super().forward(x)
        y = y.movedim(1, -1) if self.channel_last else y
        y = y if z is None else y + z
        return y.relu() if self.fuse_relu else y


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """`module`, in place, with every BatchNorm1d, 2d and 3d replaced by a `SyncBatchNorm` with its weights and statistics."""
    batchnorm.convert_sync_batchnorm(module, process_group)
    for one in module.modules():
        if isinstance(one, batchnorm.SyncBatchNorm):
            norm: Any = one
            norm.__class__ = SyncBatchNorm
            norm.channel_last = channel_last
    return module


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """This rank's group, of `group_size` consecutive ranks; None (all ranks) for 0. All ranks must call it."""
    if group_size == 0:
        return None
    size = dist.get_world_size()
    if group_size < 0 or size % group_size:
        raise ApexError(f"group_size={group_size} does not divide the {size} ranks: pass a divisor, or 0")
    return dist.new_subgroups(group_size)[0]


NATIVE = """
acc = Accelerator(strategy="ddp")  # DistributedDataParallelKwargs(comm_hook="fp32") is allreduce_always_fp32
model, optimizer, loader = acc.prepare(model, optimizer, loader)
with acc.no_sync(model): ...  # disable_allreduce
"""
WITHOUT_EFFECT = {
    "allreduce_trigger_params": "buckets are filled in the order in which gradients come",
    "num_allreduce_streams": "torch chooses the streams",
    "prof": "torch.profiler shows each collective",
}


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel, with Apex's options. Parameters take rank 0's values when it is made; buffers stay each rank's own.

    `device_ids`, `output_device` and `find_unused_parameters` are torch's, `device_ids` also where torch has it, as the second argument.
    """

    def __init__(
        self, module: nn.Module, message_size: int | Sequence[Any] = 10_000_000, delay_allreduce: bool = False,
        shared_param: bool | None = None, allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False, allreduce_always_fp32: bool = False, num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None, gradient_average: bool = True, gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None, prof: bool = False, *, device_ids: Sequence[Any] | None = None,
        output_device: Any = None, find_unused_parameters: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(message_size, int):
            device_ids, message_size = message_size, 10_000_000
        if shared_param is not None or gradient_average_split_factor is not None:
            raise ApexError(
                "shared_param and gradient_average_split_factor are removed, in Apex too: pass delay_allreduce=True for shared parameters, "
                "and pass gradient_predivide_factor for the other"
            )
        if retain_allreduce_buffers or allreduce_communicators:
            raise RefusedError(
                "retain_allreduce_buffers, allreduce_communicators: both are torch's; omit them"
            )
        if not gradient_predivide_factor > 0 or message_size < 1:
            raise ApexError(f"{gradient_predivide_factor=} must be above 0, and {message_size=} at least 1")
        given = (allreduce_trigger_params, num_allreduce_streams != 1, prof)
        layer.ignore({name: why for (name, why), value in zip(WITHOUT_EFFECT.items(), given) if value})
        layer.use("parallel.DistributedDataParallel", NATIVE)
        with warnings.catch_warnings():
            # torch 2.13 has another name, which means something else: buffers would take rank 0's values here, too.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                module,
                device_ids=device_ids,
                output_device=output_device,
                broadcast_buffers=False,  # scripts may call the model twice before a backward: the graph's tensors must stay
                bucket_cap_mb=2**20
                if delay_allreduce
                else message_size * 4 / 2**20,  # one bucket, or elements of 4 bytes
                find_unused_parameters=find_unused_parameters or delay_allreduce,
            )
        before = float(gradient_predivide_factor)
        after = dist.get_world_size() / before if gradient_average else 1.0
        travels = torch.float32 if allreduce_always_fp32 else None
        # torch's reducer keeps the hook and its state for good: they must not refer to this module.
        self._hook = SimpleNamespace(state=CommHookState(travels, before, after), off=False)
        self.register_comm_hook(self._hook, _reduce)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if UNFINISHED not in str(error):
                raise
            raise ApexError(
                "in the last backward a parameter got no gradient, and gradients are reduced when all of a bucket are there: pass "
                f"delay_allreduce=True, or freeze it with requires_grad_(False). torch says: {error}"
            ) from error

    def disable_allreduce(self) -> None:
        """From the next backward on, gradients stay on this rank and accumulate."""
        self._hook.off = True

    def enable_allreduce(self) -> None:
        """From the next backward on, gradients are reduced, with those that have accumulated."""
        self._hook.off = False


# Without annotations: torch compares those of a hook with its own types.
def _reduce(hook, bucket):  # type: ignore[no-untyped-def]
    if not hook.off:
        return all_reduce(hook.state, bucket)
    stays: Any = torch.futures.Future()
    stays.set_result(bucket.buffer())
    return stays


class Reducer:
    """Averages gradients over the ranks when `reduce` is called. Parameters of a module take rank 0's values now."""

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        module = isinstance(module_or_grads_list, nn.Module)
        self.module: Any = module_or_grads_list if module else None
        self.grads: list[Tensor] = [] if module else list(module_or_grads_list)
        for parameter in self.module.parameters() if module else ():
            dist.broadcast(parameter.detach(), 0)

    @torch.no_grad()
    def reduce(self) -> None:
        """Gradients become their means over the ranks, in place. The ranks must have the same ones."""
        if self.module is not None:
            self.grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        for work in [dist.all_reduce(grad, async_op=True) for grad in self.grads]:
            work.wait()
        if self.grads:
            torch._foreach_div_(self.grads, dist.get_world_size())
