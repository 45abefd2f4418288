"""hsdp: being built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..protocols import Facts, Refusal
from .single import Single


@dataclass(frozen=True)
class HSDPOptions:
    """Options of strategy "hsdp"."""


class HSDP(Single):
    """Being built."""

    name: ClassVar[str] = "hsdp"
    Options: ClassVar[type] = HSDPOptions

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return Refusal("strategy 'hsdp' is being built", "use 'auto'")
