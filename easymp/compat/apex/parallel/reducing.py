"""Gradients over the ranks: DistributedDataParallel, while backward runs, and Reducer, when it is told to."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....errors import RefusedError
from ....strategies.ddp import UNFINISHED, Journey, all_reduce
from ..saying import ApexError, layer

NATIVE = """
acc = Accelerator(strategy="ddp")  # DistributedDataParallelKwargs(comm_hook="fp32") is allreduce_always_fp32
model, optimizer, loader = acc.prepare(model, optimizer, loader)
with acc.no_sync(model): ...  # disable_allreduce
"""
BYTES = 4  # of an element, as buckets are counted
ALL = 2**20  # MB: one bucket


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel, with Apex's options. Parameters take rank 0's values when it is made; buffers stay each rank's own.

    Args:
        module: on this rank's device.
        message_size: elements that are reduced at a time, at least.
        delay_allreduce: reduce everything at once after backward; parameters may then be without a gradient.
        allreduce_always_fp32: half gradients travel in fp32.
        gradient_average: False: gradients are sums over the ranks.
        gradient_predivide_factor: f divides before the sum over n ranks, n / f after it.
        device_ids, output_device, find_unused_parameters: as torch's, also where torch has device_ids, as the second argument.
        allreduce_trigger_params, num_allreduce_streams, prof: without effect.

    Raises:
        RefusedError: options by which Apex hands out its buffers and communicators.
        ApexError: options that Apex has given up.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int | Sequence[Any] = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        *,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        find_unused_parameters: bool = False,
    ) -> None:
        if not isinstance(message_size, int):
            device_ids, message_size = message_size, 10_000_000
        _refuse(
            shared_param, gradient_average_split_factor, retain_allreduce_buffers, allreduce_communicators
        )
        if not gradient_predivide_factor > 0:
            raise ApexError(
                f"gradient_predivide_factor={gradient_predivide_factor!r} must be a number above 0"
            )
        if message_size < 1:
            raise ApexError(f"message_size={message_size!r} must be at least 1 element")
        told = {
            "allreduce_trigger_params": (
                allreduce_trigger_params,
                "buckets are filled in the order in which gradients come",
            ),
            "num_allreduce_streams": (num_allreduce_streams != 1, "torch chooses the streams"),
            "prof": (prof, "torch.profiler sees each collective"),
        }
        layer.ignore({name: why for name, (given, why) in told.items() if given})
        layer.use("parallel.DistributedDataParallel", NATIVE)
        with warnings.catch_warnings():
            # torch 2.13 has another name, which means something else: buffers would take rank 0's values here, too.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                module,
                device_ids=device_ids,
                output_device=output_device,
                # Of Apex's programs some call the model twice before a backward: what is in the graph must stay as it is.
                broadcast_buffers=False,
                bucket_cap_mb=ALL if delay_allreduce else message_size * BYTES / 2**20,
                find_unused_parameters=find_unused_parameters or delay_allreduce,
            )
        before = float(gradient_predivide_factor)
        after = dist.get_world_size() / before if gradient_average else 1.0
        # torch's reducer keeps it for good: it must not lead back to this module.
        self._way = Way(Journey(torch.float32 if allreduce_always_fp32 else None, before, after))
        self.register_comm_hook(self._way, _travel)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As the module's.

        Raises:
            ApexError: the last backward left a parameter without a gradient.
        """
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
        """From the next backward on, gradients stay this rank's, where they add up."""
        self._way.alone = True

    def enable_allreduce(self) -> None:
        """From the next backward on, gradients are reduced, with what has added up."""
        self._way.alone = False


@dataclass
class Way:
    """How gradients travel, and whether they stay."""

    journey: Journey
    alone: bool = False


def _refuse(shared: Any, split: Any, retain: Any, communicators: Any) -> None:
    if shared is not None:
        raise ApexError(
            "shared_param is no longer an option, in Apex neither: if parameters are shared, pass delay_allreduce=True"
        )
    if split is not None:
        raise ApexError(
            "gradient_average_split_factor is no longer an option, in Apex neither: pass gradient_predivide_factor"
        )
    if retain or communicators:
        raise RefusedError(
            "retain_allreduce_buffers and allreduce_communicators are not here: buckets and communicators are torch's. Leave them out"
        )


# No annotations of torch's own: it compares those of a hook with its types.
def _travel(way, bucket):  # type: ignore[no-untyped-def]
    if not way.alone:
        return all_reduce(way.journey, bucket)
    stays: Any = torch.futures.Future()
    stays.set_result(bucket.buffer())
    return stays


class Reducer:
    """Averages gradients over the ranks when `reduce` is called; nothing happens by itself.

    Args:
        module_or_grads_list: a module, whose parameters take rank 0's values now, or gradients.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads = [] if isinstance(module_or_grads_list, nn.Module) else list(module_or_grads_list)
        if self.module is not None:
            for parameter in self.module.parameters():
                dist.broadcast(parameter.detach(), 0)

    @torch.no_grad()
    def reduce(self) -> None:
        """Gradients become their means over the ranks, in place. The ranks must have the same ones."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in grads:
            alike.setdefault((grad.device, grad.dtype), []).append(grad)
        for some in alike.values():
            flat = torch.cat([g.reshape(-1) for g in some])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            torch._foreach_copy_(
                some, [part.view_as(g) for part, g in zip(flat.split([g.numel() for g in some]), some)]
            )
