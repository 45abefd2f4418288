"""pipeline: being built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..protocols import Facts, Refusal
from .single import Single


@dataclass(frozen=True)
class PipelineOptions:
    """Options of strategy "pipeline"."""


class Pipeline(Single):
    """Being built."""

    name: ClassVar[str] = "pipeline"
    Options: ClassVar[type] = PipelineOptions

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return Refusal("strategy 'pipeline' is being built", "use 'auto'")
