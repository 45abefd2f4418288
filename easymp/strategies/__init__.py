"""Strategies: how parameters and gradients are spread over the ranks."""

from ..protocols import Strategy
from ..registry import STRATEGIES

__all__ = ["STRATEGIES", "Strategy"]
