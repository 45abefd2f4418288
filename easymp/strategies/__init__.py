"""Strategies: how parameters and gradients are spread over the ranks. Adding one is a file and a line here."""

from ..protocols import Strategy, Wrapped
from .ddp import DDP
from .single import Single

STRATEGIES: dict[str, type[Strategy]] = {"single": Single, "ddp": DDP}

__all__ = ["DDP", "STRATEGIES", "Single", "Strategy", "Wrapped"]
