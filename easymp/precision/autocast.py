"""A model under autocast, with the type of its outputs settled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import BatchError
from ..records import AutocastKwargs
from ..tree import map_leaves


class Autocast(nn.Module):
    """Calls `module` under ``torch.autocast`` and casts floating-point outputs to ``options.output_dtype``.

    Outputs in float64, which autocast leaves alone, are left alone here, too. Autocast lies inside this module's forward, so that
    whatever wraps it (DDP, torch.compile) sees one function.
    """

    def __init__(self, module: nn.Module, device: torch.device, compute: torch.dtype, options: AutocastKwargs) -> None:
        super().__init__()
        self.module = module
        self.device_type = device.type
        self.compute = compute
        self.options = options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.compute, True, self.options.cache_enabled):
            outputs = self.module(*args, **kwargs)
        return as_asked(outputs, self.options.output_dtype)


def as_asked(outputs: Any, dtype: torch.dtype | None) -> Any:
    """A model's outputs with their floating-point tensors in `dtype`; None leaves them as computed.

    Raises:
        BatchError: a container that cannot be rebuilt.
    """
    if dtype is None:
        return outputs
    if type(outputs) is Tensor:
        return _cast(outputs, dtype)
    try:
        return map_leaves(lambda leaf: _cast(leaf, dtype), outputs)
    except BatchError as error:
        raise BatchError(
            f"the model's output cannot be given back in {dtype}: {error.__cause__}. Return plain tensors, tuples, lists or dicts from "
            "forward(), or leave outputs as computed with AutocastKwargs(output_dtype=None)"
        ) from error


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() and leaf.dtype != torch.float64 else leaf
    return leaf._replace(data=_cast(leaf.data, dtype)) if isinstance(leaf, PackedSequence) else leaf


def autocast(device: torch.device, compute: torch.dtype, options: AutocastKwargs) -> AbstractContextManager[Any]:
    """torch's autocast, or nothing where the caller turned it off."""
    return torch.autocast(device.type, compute, True, options.cache_enabled) if options.enabled else nullcontext()


def under_autocast(module: nn.Module, device: torch.device, compute: torch.dtype, options: AutocastKwargs) -> nn.Module:
    """`module` under autocast, or `module` itself where the caller turned autocast off."""
    return Autocast(module, device, compute, options) if options.enabled else module
