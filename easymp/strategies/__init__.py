"""Strategies: how parameters and gradients are spread over the ranks. Adding one is a file and a line here."""

from ..protocols import Strategy, Wrapped
from .ddp import DDP
from .fsdp import FSDP
from .options import read_options
from .single import Single

STRATEGIES: dict[str, type[Strategy]] = {"single": Single, "ddp": DDP, "fsdp": FSDP}

__all__ = ["DDP", "FSDP", "STRATEGIES", "Single", "Strategy", "Wrapped", "read_options"]
