"""``apex.fp16_utils``: half-precision models and fp32 masters by hand, for scripts from before `amp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import RefusedError
from ...precision.levels import cast, cast_model
from .amp import layer

__all__ = [
    "BN_convert_float", "FP16Model", "clip_grad_norm", "convert_module", "convert_network",
    "master_params_to_model_params", "model_grads_to_master_grads", "network_to_half", "prep_param_lists",
    "to_python_float", "tofp16",
]  # fmt: skip

__getattr__ = layer.absent(__name__)
clip_grad_norm = nn.utils.clip_grad_norm_


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
