"""Option records a caller may pass: plain frozen data, checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from .errors import SettingError


def _yes_or_no(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise SettingError(f"{name}={value!r} is neither True nor False")


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """How prepared loaders read.

    Attributes:
        split_batches: the loader's batch size is the global one, divided among the ranks.
        dispatch_batches: rank 0 reads and sends; None and False let every rank read its own share.
        even_batches: complete the last round with samples from the start of the epoch's order, so that every rank has as
            many batches of one size; `gather_for_metrics` drops them again.
        use_seedable_sampler: shuffle by f(seed, epoch), the same order at any world size. False keeps the loader's own
            random sampler, drawn on rank 0.
        data_seed: seed of the data order; None takes the run's.
        non_blocking: copies to the device do not wait (with pinned memory; the identity on CPU).
        use_stateful_dataloader: honoured always: every prepared loader has a position that can be saved and resumed.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    data_seed: int | None = None
    non_blocking: bool = True
    use_stateful_dataloader: bool = True

    def __post_init__(self) -> None:
        for name in ("split_batches", "even_batches", "use_seedable_sampler", "non_blocking", "use_stateful_dataloader"):
            _yes_or_no(name, getattr(self, name))
        if self.dispatch_batches is not None:
            _yes_or_no("dispatch_batches", self.dispatch_batches)
        if self.data_seed is not None and (isinstance(self.data_seed, bool) or not isinstance(self.data_seed, int)):
            raise SettingError(f"data_seed={self.data_seed!r} is not a whole number")


@dataclass(frozen=True)
class GradientAccumulationPlugin:
    """When gradients are reduced and optimizers step.

    Attributes:
        num_steps: micro-steps in a window.
        adjust_scheduler: accepted as True only: prepared schedulers always count optimizer updates, not micro-steps.
        sync_with_dataloader: the last batch of a loader ends the window early.
        sync_each_batch: reduce gradients at every micro-step: more communication, less memory under sharding.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise SettingError(f"num_steps={self.num_steps!r} is not a whole number of at least 1")
        if not self.adjust_scheduler:
            raise SettingError(
                "adjust_scheduler=False cannot be honoured: a prepared scheduler counts optimizer updates. Leave the scheduler "
                "out of prepare() to step it yourself"
            )


@dataclass(frozen=True)
class AutocastKwargs:
    """Options of autocast.

    Attributes:
        enabled: False runs everything in the parameters' own type.
        cache_enabled: keep cast weights for the length of the region.
        output_dtype: type of a prepared model's floating-point outputs; None leaves them as computed.
    """

    enabled: bool = True
    cache_enabled: bool = True
    output_dtype: torch.dtype | None = torch.float32

    def __post_init__(self) -> None:
        _yes_or_no("enabled", self.enabled)
        _yes_or_no("cache_enabled", self.cache_enabled)
        if self.output_dtype is not None and not (
            isinstance(self.output_dtype, torch.dtype) and self.output_dtype.is_floating_point
        ):
            raise SettingError(f"output_dtype={self.output_dtype!r} is no floating-point type: pass torch.float32, or None")


@dataclass(frozen=True)
class GradScalerKwargs:
    """Options of the loss scale under fp16.

    Attributes:
        init_scale, growth_factor, backoff_factor, growth_interval: as in torch.amp.GradScaler.
        enabled: False trains fp16 without a loss scale.
        hysteresis: overflows, one after the other, before the scale falls.
        min_scale, max_scale: bounds.
        dynamic: False keeps the scale at `init_scale`.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    hysteresis: int = 1
    min_scale: float = 0.0
    max_scale: float = float("inf")
    dynamic: bool = True


@dataclass(frozen=True)
class DistributedDataParallelKwargs:
    """Options of DistributedDataParallel, by torch's names and with torch's defaults (sizes in MB).

    `gradient_as_bucket_view` is True here: gradients live in the buckets, which saves one copy of them.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False


@dataclass(frozen=True)
class FSDPOptions:
    """Options of strategy "fsdp".

    Attributes:
        reshard_after_forward: free a block's gathered parameters after its forward and gather them again for its backward
            (ZeRO-3); False keeps them until backward is done: more memory, less communication (ZeRO-2).
        wrap: what is gathered at a time, beside the model's rest: "blocks", the repeated ones found in the model; names of
            module classes; or a number: modules with at least so many parameters.
        cpu_offload: shards, their gradients and optimizer states lie in the host's memory (the identity on CPU).
    """

    reshard_after_forward: bool = True
    wrap: str | tuple[str, ...] | int = "blocks"
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        for name in ("reshard_after_forward", "cpu_offload"):
            _yes_or_no(name, getattr(self, name))
        wrap = self.wrap
        if isinstance(wrap, list):
            wrap = tuple(wrap)
            object.__setattr__(self, "wrap", wrap)
        size = isinstance(wrap, int) and not isinstance(wrap, bool) and wrap >= 1
        names = isinstance(wrap, tuple) and wrap and all(isinstance(name, str) for name in wrap)
        if not (size or names or (isinstance(wrap, str) and wrap == "blocks")):
            raise SettingError(
                f"wrap={wrap!r} is neither 'blocks', nor a tuple of class names such as ('Block',), nor a number of parameters of at "
                "least 1"
            )


@dataclass(frozen=True)
class InitProcessGroupKwargs:
    """Options of the process group.

    Attributes:
        timeout: how long a collective may wait for the other ranks (a timedelta or seconds); 2 minutes.
    """

    timeout: timedelta | float = 120.0

    @property
    def seconds(self) -> float:
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout)


HANDLERS: tuple[type[Any], ...] = (AutocastKwargs, GradScalerKwargs, DistributedDataParallelKwargs, InitProcessGroupKwargs)
