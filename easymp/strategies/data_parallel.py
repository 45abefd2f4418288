"""data_parallel: being built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..protocols import Facts, Refusal
from .single import Single


@dataclass(frozen=True)
class DataParallelOptions:
    """Options of strategy "data_parallel"."""


class DataParallel(Single):
    """Being built."""

    name: ClassVar[str] = "data_parallel"
    Options: ClassVar[type] = DataParallelOptions

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return Refusal("strategy 'data_parallel' is being built", "use 'auto'")
