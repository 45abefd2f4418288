"""``accelerate.utils.operations``: collectives and nested batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ....base.pytree import (
    concatenate,
    find_batch_size,
    leaves,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from ....training.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from ..layer import layer

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]
__getattr__ = layer.absent("accelerate.utils.operations", {}, lambda: __all__)


def is_torch_tensor(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor)


def convert_to_fp32(tensor: Any) -> Any:
    """Half-precision tensors of the tree in fp32."""
    return recursively_apply(lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t, tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """`model_forward` with outputs in fp32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def listify(data: Any) -> Any:
    """Tensors of the tree as lists of numbers."""
    return recursively_apply(lambda t: t.detach().cpu().tolist(), data)


def find_device(data: Any) -> torch.device | None:
    """Of the tree's first tensor."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, torch.Tensor)), None)
