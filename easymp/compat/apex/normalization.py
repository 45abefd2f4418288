"""``apex.normalization``: layer-norm and RMS-norm, which torch has itself.

``memory_efficient`` has no effect: torch keeps the input for backward, not the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layer import layer

__all__ = [
    *("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm", "fused_layer_norm"),
    *("fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine", "manual_rms_norm"),
    *("mixed_dtype_fused_layer_norm_affine", "mixed_dtype_fused_rms_norm_affine"),
]

__getattr__ = layer.absent("apex.normalization", {}, lambda: __all__)

Shape = int | Sequence[int]


def _told(memory_efficient: bool) -> None:
    if memory_efficient:
        layer.ignore({"memory_efficient": "torch keeps what layer-norm needs for backward"})


class _Norm:
    """The constructor of Apex's norms, before torch's class."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        _told(memory_efficient)
        super().__init__(normalized_shape, eps, elementwise_affine)  # type: ignore[call-arg]


class FusedLayerNorm(_Norm, nn.LayerNorm):
    """torch.nn.LayerNorm."""


class FusedRMSNorm(_Norm, nn.RMSNorm):
    """torch.nn.RMSNorm."""


class _Mixed:
    """Casts inputs to the type of the weights, before Apex's norms."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, *, memory_efficient: bool = False) -> None:
        super().__init__(normalized_shape, eps, True, memory_efficient)  # type: ignore[call-arg]

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))  # type: ignore[misc, attr-defined]


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """LayerNorm whose output has the type of its weights."""


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """RMSNorm whose output has the type of its weights."""


def _sizes(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer-norm without weights."""
    _told(memory_efficient)
    return F.layer_norm(input, _sizes(normalized_shape), None, None, eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer-norm times `weight` plus `bias`."""
    _told(memory_efficient)
    return F.layer_norm(input, _sizes(normalized_shape), weight, bias, eps)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS-norm without weights."""
    _told(memory_efficient)
    return F.rms_norm(input, _sizes(normalized_shape), None, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS-norm times `weight`."""
    _told(memory_efficient)
    return F.rms_norm(input, _sizes(normalized_shape), weight, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`fused_layer_norm_affine` in the type of `weight`."""
    return fused_layer_norm_affine(
        input.to(weight.dtype), weight, bias, normalized_shape, eps, memory_efficient
    )


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`fused_rms_norm_affine` in the type of `weight`."""
    return fused_rms_norm_affine(input.to(weight.dtype), weight, normalized_shape, eps, memory_efficient)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """RMS-norm as a formula: input / sqrt(mean(input²) + eps), the mean in fp32, times `weight` where there is one."""
    dims = tuple(range(-len(_sizes(normalized_shape)), 0))
    normal = input * torch.rsqrt(input.float().square().mean(dims, keepdim=True) + eps)
    return normal if weight is None else weight * normal.to(weight.dtype)
