"""``apex.normalization``: torch's layer-norm and RMS-norm by Apex's names and arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .amp import layer

__all__ = [
    "FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm", "fused_layer_norm",
    "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine", "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]  # fmt: skip
__getattr__ = layer.absent(__name__)

Shape = int | Sequence[int]


def _sizes(shape: Shape, memory_efficient: bool = False) -> list[int]:
    if memory_efficient:
        layer.ignore({"memory_efficient": "torch keeps what layer-norm needs for backward"})
    return [shape] if isinstance(shape, int) else list(shape)


class _ApexNorm(nn.Module):
    """Base before torch's class, for Apex's arguments."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(_sizes(normalized_shape, memory_efficient), eps, elementwise_affine)


class FusedLayerNorm(_ApexNorm, nn.LayerNorm):
    """torch.nn.LayerNorm."""


class FusedRMSNorm(_ApexNorm, nn.RMSNorm):
    """torch.nn.RMSNorm."""


class _MixedNorm(_ApexNorm):
    """Base before one of these, with outputs of the type of the weights."""

    weight: nn.Parameter

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False) -> None:
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Any:
        return super().forward(input.to(self.weight.dtype))


class MixedFusedLayerNorm(_MixedNorm, FusedLayerNorm):
    """LayerNorm with outputs of the type of its weights."""


class MixedFusedRMSNorm(_MixedNorm, FusedRMSNorm):
    """RMSNorm with outputs of the type of its weights."""


def fused_layer_norm_affine(
    input: Tensor, weight: Any, bias: Any, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:  # fmt: skip
    """Layer-norm times `weight` plus `bias`."""
    return F.layer_norm(input, _sizes(normalized_shape, memory_efficient), weight, bias, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Any, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS-norm times `weight`."""
    return F.rms_norm(input, _sizes(normalized_shape, memory_efficient), weight, eps)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer-norm without weights."""
    return fused_layer_norm_affine(input, None, None, normalized_shape, eps, memory_efficient)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """RMS-norm without weights."""
    return fused_rms_norm_affine(input, None, normalized_shape, eps, memory_efficient)


def _in_type_of_weight(affine: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(affine)
    def norm(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return affine(input.to(weight.dtype), weight, *args, **kwargs)

    return norm


mixed_dtype_fused_layer_norm_affine = _in_type_of_weight(fused_layer_norm_affine)
mixed_dtype_fused_rms_norm_affine = _in_type_of_weight(fused_rms_norm_affine)
