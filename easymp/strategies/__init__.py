"""Strategies: how parameters and gradients are spread over the ranks."""

from ..protocols import Strategy
from ..registry import STRATEGIES
from .options import read_options

__all__ = ["STRATEGIES", "Strategy", "read_options"]
