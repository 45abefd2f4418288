"""Apex's optimization levels O0 to O3, and "bf16-true" and "fp16-true", Lightning Fabric's names for low-precision weights.

|           | parameters            | products | step                                  | loss scale |
|-----------|-----------------------|----------|---------------------------------------|------------|
| O0        | fp32                  | fp32     | plain                                 | –          |
| O1        | fp32                  | fp16 by Apex's lists | plain                     | dynamic    |
| O2        | fp16, batch-norm fp32 | fp16     | fp32 masters                          | dynamic    |
| O3        | fp16                  | fp16     | plain                                 | –          |
| fp16-true | fp16, batch-norm fp32 | fp16     | fp32 masters                          | dynamic    |
| bf16-true | bf16, batch-norm fp32 | bf16     | fp32 masters, or stochastic rounding  | –          |

Source of the levels: https://nvidia.github.io/apex/amp.html#opt-levels. Outputs are fp32 unless
``AutocastKwargs.output_dtype`` is set.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from ..base.pytree import map_leaves
from ..options import AutocastKwargs
from ..protocols import Facts, Refusal
from .cast_lists import Listed, ListedCasts
from .policies import BF16, FP16, FP32, cast_leaf, cast_outputs


class O0(FP32):
    """fp32 under Apex's name."""

    name: ClassVar[str] = "O0"


class O1(FP16):
    """fp16 by Apex's lists: torch's autocast on accelerators, which has the same lists, and a function mode on CPUs."""

    name: ClassVar[str] = "O1"

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        if device.type == "cpu" and self.options.enabled:
            return Listed(model, self.options)
        return super().forward(model, device)

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        if device.type == "cpu" and options.enabled:
            return ListedCasts()
        return super().casting(device, options)


class O2(FP32):
    """An fp16 model with fp32 masters, which the optimizer steps.

    Parameters and buffers become fp16 in place, except in batch-norm layers with parameters.
    """

    name: ClassVar[str] = "O2"
    param: ClassVar[torch.dtype] = torch.float16
    compute: ClassVar[torch.dtype] = torch.float16
    reduce: ClassVar[torch.dtype] = torch.float16
    scaled: ClassVar[bool] = True
    masters: ClassVar[bool] = True
    tf32: ClassVar[bool] = True
    keeps_batch_norm: ClassVar[bool] = True

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return FP16.refuse(facts)

    @property
    def output(self) -> torch.dtype | None:
        return self.options.output_dtype

    def convert(self, model: nn.Module) -> nn.Module:
        return cast_model(model, self.param, self.keeps_batch_norm)

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return HalfModel(model, self.options, self.compute)


class FP16True(O2):
    """O2 under Fabric's name: fp16 weights, fp32 masters and a loss scale."""

    name: ClassVar[str] = "fp16-true"


class BF16True(O2):
    """A bf16 model. Gradients are bf16 and are reduced in bf16.

    Adam, AdamW, Adagrad, LAMB and NovoGrad of `easymp.optim` step with stochastic rounding and keep bf16 states: 8 bytes per parameter.
    Other optimizers step fp32 masters: 20 bytes per parameter with Adam. No update is rounded to nearest.
    """

    name: ClassVar[str] = "bf16-true"
    param: ClassVar[torch.dtype] = torch.bfloat16
    compute: ClassVar[torch.dtype] = torch.bfloat16
    reduce: ClassVar[torch.dtype] = torch.bfloat16
    scaled: ClassVar[bool] = False
    masters: ClassVar[bool] = False

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return BF16.refuse(facts)


class O3(O2):
    """An fp16 model without masters or loss scale. Gradients below 6e-8 are lost."""

    name: ClassVar[str] = "O3"
    scaled: ClassVar[bool] = False
    masters: ClassVar[bool] = False
    keeps_updates: ClassVar[bool] = False
    keeps_batch_norm: ClassVar[bool] = False


class HalfModel(nn.Module):
    """Calls `module` with floating-point inputs in `dtype` and casts outputs to ``options.output_dtype``."""

    def __init__(self, module: nn.Module, options: AutocastKwargs, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.options, self.dtype = module, options, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.module(*cast(args, self.dtype), **cast(kwargs, self.dtype))
        return cast_outputs(outputs, self.options.output_dtype)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating-point tensors in `dtype`."""
    return map_leaves(lambda leaf: cast_leaf(leaf, dtype, double=True), tree)


def cast_model(model: nn.Module, dtype: torch.dtype, keep_batch_norm: bool) -> nn.Module:
    """Cast floating-point parameters and buffers of `model` to `dtype` in place, or all but batch-norm layers with parameters."""
    for module in model.modules():
        if not (keep_batch_norm and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine):
            module._apply(lambda t: cast(t, dtype), recurse=False)
    return model
