"""``apex.normalization``: torch's layer-norm and RMS-norm by Apex's names and arguments; ``memory_efficient`` has no effect."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .amp.state import layer

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]

_FUNCTIONS = "layer_norm layer_norm_affine rms_norm rms_norm_affine".split()
__getattr__ = layer.absent(
    "apex.normalization",
    {f"fused_{name}": f"use torch.nn.functional.{name.removesuffix('_affine')}" for name in _FUNCTIONS},
    lambda: __all__,
)


class _Norm:
    """The constructor of Apex's norms, before torch's class."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        if memory_efficient:
            layer.ignore({"memory_efficient": "torch keeps what layer-norm needs for backward"})
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
