"""``deepspeed.checkpointing``: activations that are computed again in backward, by torch.utils.checkpoint.

Random numbers are drawn again as they were. What `configure` asks for beside the host's memory makes no difference here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as recompute

from .layer import layer

_cpu: bool | None = None  # None before `configure`


def configure(
    mpu_: Any = None, deepspeed_config: Any = None, checkpoint_in_cpu: bool | None = None, **others: Any
) -> None:
    """Set where inputs of checkpointed parts are kept.

    Args:
        checkpoint_in_cpu: in the host's memory.
        others: known to DeepSpeed (partition_activations …), without effect.
    """
    global _cpu
    config = deepspeed_config if isinstance(deepspeed_config, dict) else {}
    section = config.get("activation_checkpointing", {})
    _cpu = bool(section.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu)
    ignored = [f"checkpointing.configure({name}=…)" for name, value in others.items() if value]
    layer.ignore(dict.fromkeys(ignored, "torch keeps inputs whole"))


def is_configured() -> bool:
    return _cpu is not None


def reset() -> None:
    """Nothing is kept between iterations."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``; only the arguments are kept for backward."""
    with torch.autograd.graph.save_on_cpu() if _cpu else nullcontext():
        return recompute(function, *args, use_reentrant=False)


class CheckpointFunction:
    """For scripts that call ``CheckpointFunction.apply``."""

    @staticmethod
    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(function, *args)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed all random streams of this rank."""
    torch.manual_seed(seed)
