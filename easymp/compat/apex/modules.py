"""``apex.normalization``, torch's layer-norm and RMS-norm by Apex's names, and ``apex.fp16_utils``.

The latter makes half-precision models and fp32 masters by hand, for scripts from before `amp`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import RefusedError
from ...precision.levels import cast, cast_model
from ..layer import by_name
from .amp import layer

# -- fp16_utils


class tofp16(nn.Module):
    """Casts its input to fp16."""

    def forward(self, input: Any) -> Any:
        return cast(input, torch.float16)


def BN_convert_float(module: nn.Module) -> nn.Module:
    """`module`, in place, with batch-norm layers that have parameters in fp32."""
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.affine:
            norm.float()
    return module


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast `module`'s own floating-point parameters and buffers, not those of its children."""
    module._apply(lambda t: cast(t, dtype), recurse=False)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`network`, in place, in `dtype`, except batch-norm layers with parameters."""
    return cast_model(network, dtype, keep_batch_norm=True)


def network_to_half(network: nn.Module) -> nn.Sequential:
    """`network`, in fp16 with fp32 batch-norm, behind a cast of its input."""
    return nn.Sequential(tofp16(), convert_network(network, torch.float16))


class FP16Model(nn.Module):
    """`network` in fp16 with fp32 batch-norm; inputs are cast to fp16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any) -> Any:
        return self.network(*cast(inputs, torch.float16))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """The trainable parameters, and fp32 masters of them."""
    if flat_master:
        raise RefusedError("flat_master=True: leave it out; torch's optimizers step many tensors at once by foreach")
    params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    return params, [p.detach().clone().float().requires_grad_() for p in params]


def model_grads_to_master_grads(model_params: Any, master_params: Any, flat_master: bool = False) -> None:
    """Copy the model's gradients to the masters, in fp32."""
    for parameter, master in zip(model_params, master_params):
        master.grad = None if parameter.grad is None else parameter.grad.detach().clone().float()


@torch.no_grad()
def master_params_to_model_params(model_params: Any, master_params: Any, flat_master: bool = False) -> None:
    """Copy the masters to the model's parameters, rounded."""
    for parameter, master in zip(model_params, master_params):
        parameter.copy_(master)


def to_python_float(t: Any) -> float:
    """The number in a tensor with one element, or in a sequence."""
    return t.item() if isinstance(t, Tensor) else t[0]


# -- normalization

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
    return functional.layer_norm(input, _sizes(normalized_shape, memory_efficient), weight, bias, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Any, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS-norm times `weight`."""
    return functional.rms_norm(input, _sizes(normalized_shape, memory_efficient), weight, eps)


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


FP16_UTILS = by_name(
    BN_convert_float, FP16Model, convert_module, convert_network, master_params_to_model_params,
    model_grads_to_master_grads, network_to_half, prep_param_lists, to_python_float, tofp16,
    clip_grad_norm=nn.utils.clip_grad_norm_,
)  # fmt: skip
NORMALIZATION = by_name(
    FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm, fused_layer_norm, fused_layer_norm_affine,
    fused_rms_norm, fused_rms_norm_affine,
    mixed_dtype_fused_layer_norm_affine=_in_type_of_weight(fused_layer_norm_affine),
    mixed_dtype_fused_rms_norm_affine=_in_type_of_weight(fused_rms_norm_affine),
)  # fmt: skip
