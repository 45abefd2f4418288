"""The strategies by name, each imported when it is first asked for: a run pays for the one it uses."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import ClassVar

from ..protocols import Strategy


class Registry(Mapping[str, type[Strategy]]):
    """Name → class. Adding a strategy is a file and a line."""

    HOMES: ClassVar[dict[str, tuple[str, str]]] = {
        "single": ("single", "Single"),
        "data_parallel": ("data_parallel", "DataParallel"),
        "ddp": ("ddp", "DDP"),
        "zero1": ("zero1", "ZeRO1"),
        "fsdp": ("fsdp", "FSDP"),
        "hsdp": ("hsdp", "HSDP"),
        "tensor_parallel": ("tensor_parallel", "TensorParallel"),
        "pipeline": ("pipeline", "Pipeline"),
        "local_sgd": ("local_sgd", "LocalTraining"),
    }

    def __getitem__(self, name: str) -> type[Strategy]:
        file, kind = self.HOMES[name]
        found: type[Strategy] = getattr(importlib.import_module(f".{file}", __package__), kind)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.HOMES)

    def __len__(self) -> int:
        return len(self.HOMES)


STRATEGIES: Mapping[str, type[Strategy]] = Registry()
