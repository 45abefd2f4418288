"""``apex.parallel``: DistributedDataParallel by Apex's options, Reducer, batch-norm over the ranks, LARC.

The script itself calls torch.distributed.init_process_group.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import compress
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import nn as own_nn
from ... import optim
from ...errors import RefusedError
from ...strategies.ddp import UNFINISHED, CommHookState, all_reduce
from .amp import AmpOptimizer, ApexError, layer

__all__ = [
    "LARC", "DistributedDataParallel", "ReduceOp", "Reducer", "SyncBatchNorm", "convert_syncbn_model",
    "create_syncbn_process_group",
]  # fmt: skip
__getattr__ = layer.absent(__name__)
ReduceOp = dist.ReduceOp
LAYOUT = "channels are dimension 1, and model.to(memory_format=torch.channels_last) has torch's layout for it"


class LARC(optim.LARC):
    """`easymp.optim.LARC`, with Apex's arguments; made before `amp.initialize` or after it."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        if isinstance(self.optim, AmpOptimizer):
            self.optim._amp.masters.clear()  # gradients that were put back behind the step inside
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)


class SyncBatchNorm(own_nn.SyncBatchNorm):
    """easymp's batch-norm over the ranks, with Apex's arguments."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: dist.ProcessGroup | None = None, channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:  # fmt: skip
        if channel_last or fuse_relu:
            raise RefusedError(f"{channel_last=}, {fuse_relu=}: {LAYOUT}; nn.ReLU follows in the model")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group=process_group)


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """`module`, in place: every BatchNorm1d, 2d and 3d becomes a `SyncBatchNorm` with its weights and statistics."""
    if channel_last:
        raise RefusedError(f"{channel_last=}: {LAYOUT}")
    own_nn.convert_sync_batchnorm(module, process_group)
    for part in module.modules():
        if type(part) is own_nn.SyncBatchNorm:
            part.__class__ = SyncBatchNorm
    return module


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """This rank's group, of `group_size` consecutive ranks; None (all ranks) for 0. All ranks must call it."""
    if group_size == 0:
        return None
    size = dist.get_world_size()
    if group_size < 0 or size % group_size:
        raise ApexError(f"group_size={group_size} does not divide the {size} ranks: pass a divisor, or 0")
    group: dist.ProcessGroup = dist.new_subgroups(group_size)[0]
    return group


WITHOUT_EFFECT = {
    "allreduce_trigger_params": "buckets are filled in the order in which gradients come",
    "num_allreduce_streams": "torch chooses the streams",
    "prof": "torch.profiler shows each collective",
}


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel, with Apex's options; buffers stay each rank's own."""

    def __init__(
        self, module: nn.Module, message_size: int | Sequence[Any] = 10_000_000, delay_allreduce: bool = False,
        shared_param: bool | None = None, allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False, allreduce_always_fp32: bool = False, num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None, gradient_average: bool = True, gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None, prof: bool = False, *,
        device_ids: Sequence[Any] | None = None, output_device: Any = None, find_unused_parameters: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(message_size, int):  # torch's second argument
            device_ids, message_size = message_size, 10_000_000
        if shared_param is not None or gradient_average_split_factor is not None:
            removed = "shared_param and gradient_average_split_factor are removed, in Apex too"
            raise ApexError(f"{removed}: pass delay_allreduce=True, or pass gradient_predivide_factor")
        if retain_allreduce_buffers or allreduce_communicators:
            raise RefusedError("retain_allreduce_buffers, allreduce_communicators: both are torch's; omit them")
        if not gradient_predivide_factor > 0 or message_size < 1:
            raise ApexError(f"{gradient_predivide_factor=} must be above 0, and {message_size=} at least 1")
        selectors = (allreduce_trigger_params, num_allreduce_streams != 1, prof)
        layer.ignore(dict(compress(WITHOUT_EFFECT.items(), selectors)))
        bucket = 2**20 if delay_allreduce else message_size * 4 / 2**20  # MB: one bucket, or elements of 4 bytes
        with warnings.catch_warnings():
            # torch 2.13 has another name, which means something else: buffers would take rank 0's values here, too.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            # Without buffers: scripts may call the model twice before a backward, and the graph's tensors must stay.
            super().__init__(
                module, device_ids, output_device, broadcast_buffers=False, bucket_cap_mb=bucket,
                find_unused_parameters=find_unused_parameters or delay_allreduce,
            )  # fmt: skip
        before = float(gradient_predivide_factor)
        after = dist.get_world_size() / before if gradient_average else 1.0
        dtype = torch.float32 if allreduce_always_fp32 else None
        # torch's reducer keeps the hook and its state for good: they must not refer to this module.
        self._hook = SimpleNamespace(state=CommHookState(dtype, before, after), off=False)
        self.register_comm_hook(self._hook, _reduce)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's has no types
        except RuntimeError as error:
            if UNFINISHED not in str(error):
                raise
            remedy = "pass delay_allreduce=True, or freeze it with requires_grad_(False)"
            reason = "in the last backward a parameter got no gradient"
            raise ApexError(f"{reason}: {remedy}. torch says: {error}") from error

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
    unreduced: Any = torch.futures.Future()
    unreduced.set_result(bucket.buffer())
    return unreduced


class Reducer:
    """Averages gradients over the ranks when `reduce` is called. Parameters of a module take rank 0's values now."""

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            for parameter in self.module.parameters():
                dist.broadcast(parameter.detach(), 0)
        else:
            self.grads = list(module_or_grads_list)

    @torch.no_grad()
    def reduce(self) -> None:
        """Gradients become their means over the ranks, in place. The ranks must have the same ones."""
        if self.module is not None:
            self.grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        for work in [dist.all_reduce(grad, async_op=True) for grad in self.grads]:
            work.wait()
        if self.grads:
            torch._foreach_div_(self.grads, dist.get_world_size())
