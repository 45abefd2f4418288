"""What `initialize` does to models: parameters, inputs, outputs, and state dicts that stay fp32.

In place, by hooks, so that the model keeps its class and attributes. They are called where the model is: ``model(x)``, not
``model.forward(x)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....optim.masters import LOW
from ....precision.levels import cast, cast_model
from ..saying import ApexError
from .properties import Properties


def check(models: list[nn.Module]) -> None:
    """What cannot be initialised, before anything has changed.

    Raises:
        ApexError: a model that is wrapped already, or is not fp32.
    """
    for model in models:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ApexError(
                f"Incoming model is an instance of {type(model).__name__}. Parallel wrappers should only be applied to the model(s) AFTER "
                "the model(s) have been returned from amp.initialize"
            )
        for what, named in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                if (
                    tensor.is_floating_point()
                    and tensor.dtype != torch.float32
                    and (what == "param" or tensor.dtype in LOW)
                ):
                    raise ApexError(
                        f"Found {what} {name} with type {tensor.dtype}, expected torch.float32. When using amp.initialize, you do not "
                        "need to call .half() on your model before passing it, no matter what optimization level you choose"
                    )


def prepare(model: nn.Module, level: Properties, outputs: torch.dtype | None) -> None:
    """Cast `model`'s parameters, and what goes in and comes out of it.

    Args:
        outputs: their type; None: fp32 where inputs are cast, and else what the last function made of them.
    """
    dtype = level.cast_model_type
    if dtype is not None:
        if dtype in LOW:
            cast_model(model, dtype, bool(level.keep_batchnorm_fp32))
            for module in model.modules():
                module.register_state_dict_post_hook(InFP32(dtype))
        model.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
        outputs = outputs or torch.float32
    if outputs is not None:
        model.register_forward_hook(CastOutputs(outputs), prepend=True)


@dataclass
class CastInputs:
    """A hook before forward: floating-point inputs become `dtype`."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast(args, self.dtype), cast(kwargs, self.dtype)


@dataclass
class CastOutputs:
    """A hook after forward: floating-point outputs become `dtype`."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        return cast(outputs, self.dtype)


@dataclass
class InFP32:
    """A hook after state_dict: what is `dtype` in the model is fp32 in there, so that checkpoints are alike at every level."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, found: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, tensor in found.items():
            if name.startswith(prefix) and isinstance(tensor, Tensor) and tensor.dtype == self.dtype:
                found[name] = tensor.float()
