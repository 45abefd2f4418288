"""tensor_parallel: being built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..protocols import Facts, Refusal
from .single import Single


@dataclass(frozen=True)
class TensorParallelOptions:
    """Options of strategy "tensor_parallel"."""


class TensorParallel(Single):
    """Being built."""

    name: ClassVar[str] = "tensor_parallel"
    Options: ClassVar[type] = TensorParallelOptions

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return Refusal("strategy 'tensor_parallel' is being built", "use 'auto'")
