"""zero1: being built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..protocols import Facts, Refusal
from .single import Single


@dataclass(frozen=True)
class ZeRO1Options:
    """Options of strategy "zero1"."""


class ZeRO1(Single):
    """Being built."""

    name: ClassVar[str] = "zero1"
    Options: ClassVar[type] = ZeRO1Options

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return Refusal("strategy 'zero1' is being built", "use 'auto'")
