"""local_sgd: being built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..protocols import Facts, Refusal
from .single import Single


@dataclass(frozen=True)
class LocalSGDOptions:
    """Options of strategy "local_sgd"."""


class LocalSGD(Single):
    """Being built."""

    name: ClassVar[str] = "local_sgd"
    Options: ClassVar[type] = LocalSGDOptions

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return Refusal("strategy 'local_sgd' is being built", "use 'auto'")
