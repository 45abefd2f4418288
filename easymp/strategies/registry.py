"""The strategies by name, each imported when it is first asked for: a run pays for the one it uses."""

from __future__ import annotations

from collections.abc import Mapping

from ..first_use import Registry
from ..protocols import Strategy

STRATEGIES: Mapping[str, type[Strategy]] = Registry(
    "easymp.strategies",
    {
        "single": ("single", "Single"),
        "data_parallel": ("data_parallel", "DataParallel"),
        "ddp": ("ddp", "DDP"),
        "zero1": ("zero1", "ZeRO1"),
        "fsdp": ("fsdp", "FSDP"),
        "hsdp": ("hsdp", "HSDP"),
        "tensor_parallel": ("tensor_parallel", "TensorParallel"),
        "pipeline": ("pipeline", "Pipeline"),
        "local_sgd": ("local_sgd", "LocalTraining"),
    },
)
