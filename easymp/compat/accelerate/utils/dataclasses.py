"""``accelerate.utils.dataclasses``: records and words, and what stands for plugins of other engines."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from ....distributed.processes import DistributedType, PrecisionType
from ....options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    LoggerType,
    ProfileKwargs,
    ProjectConfiguration,
)
from ..layer import DEEPSPEED, FP8, MEGATRON, QUANTIZED, layer, stand_in
from ..plugins import DynamoBackend, FullyShardedDataParallelPlugin, TorchDynamoPlugin

# Annotations: `list[KwargsHandler]`, and plugins that a script makes where its arguments ask for one.
KwargsHandler = Any
DeepSpeedPlugin = stand_in("DeepSpeedPlugin", DEEPSPEED)
MegatronLMPlugin = stand_in("MegatronLMPlugin", MEGATRON)
ParallelismConfig = stand_in(
    "ParallelismConfig", "use Accelerator(strategy='hsdp') or 'tensor_parallel', and strategy_options"
)
TorchTensorParallelPlugin = stand_in(
    "TorchTensorParallelPlugin", "use Accelerator(strategy='tensor_parallel')"
)
FP8RecipeKwargs = stand_in("FP8RecipeKwargs", FP8)
TERecipeKwargs = stand_in("TERecipeKwargs", FP8)
AORecipeKwargs = stand_in("AORecipeKwargs", FP8)
MSAMPRecipeKwargs = stand_in("MSAMPRecipeKwargs", FP8)
BnbQuantizationConfig = stand_in("BnbQuantizationConfig", QUANTIZED)


class RNGType(StrEnum):
    """Words for `rng_types`, which has no effect: the order of data is the same on all ranks by itself."""

    TORCH = "torch"
    CUDA = "cuda"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    GENERATOR = "generator"


__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "BnbQuantizationConfig",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
]
__getattr__ = layer.absent("accelerate.utils.dataclasses", {}, lambda: __all__)
