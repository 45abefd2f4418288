"""``apex.normalization``: torch's layer-norm and RMS-norm by Apex's names and arguments; ``memory_efficient`` has no effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .amp.state import layer

__all__ = [
    *("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm", "fused_layer_norm"),
    *("fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine", "manual_rms_norm"),
    *("mixed_dtype_fused_layer_norm_affine", "mixed_dtype_fused_rms_norm_affine"),
]

__getattr__ = layer.absent("apex.normalization", {}, lambda: __all__)

Shape = int | Sequence[int]


def _ignore(memory_efficient: bool) -> None:
    if memory_efficient:
        layer.ignore({"memory_efficient": "torch keeps what layer-norm needs for backward"})


def _sizes(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


class _Norm:
    """The constructor of Apex's norms, before torch's class."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        _ignore(memory_efficient)
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
    """LayerNorm with outputs of the type of its weights."""


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """RMSNorm with outputs of the type of its weights."""


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer-norm times `weight` plus `bias`."""
    _ignore(memory_efficient)
    return F.layer_norm(input, _sizes(normalized_shape), weight, bias, eps)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS-norm times `weight`."""
    _ignore(memory_efficient)
    return F.rms_norm(input, _sizes(normalized_shape), weight, eps)


def fused_layer_norm(input: Tensor, normalized_shape: Shape, *how: Any, **named: Any) -> Tensor:
    """Layer-norm without weights; eps and memory_efficient as in `fused_layer_norm_affine`."""
    return fused_layer_norm_affine(input, None, None, normalized_shape, *how, **named)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, *how: Any, **named: Any) -> Tensor:
    """RMS-norm without weights; eps and memory_efficient as in `fused_rms_norm_affine`."""
    return fused_rms_norm_affine(input, None, normalized_shape, *how, **named)


def mixed_dtype_fused_layer_norm_affine(input: Tensor, weight: Tensor, *how: Any, **named: Any) -> Tensor:
    """`fused_layer_norm_affine` in the type of `weight`."""
    return fused_layer_norm_affine(input.to(weight.dtype), weight, *how, **named)


def mixed_dtype_fused_rms_norm_affine(input: Tensor, weight: Tensor, *how: Any, **named: Any) -> Tensor:
    """`fused_rms_norm_affine` in the type of `weight`."""
    return fused_rms_norm_affine(input.to(weight.dtype), weight, *how, **named)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """RMS-norm as a formula: input / sqrt(mean(input²) + eps), the mean in fp32, times `weight` where it is given."""
    dims = tuple(range(-len(_sizes(normalized_shape)), 0))
    normal = input * torch.rsqrt(input.float().square().mean(dims, keepdim=True) + eps)
    return normal if weight is None else weight * normal.to(weight.dtype)
