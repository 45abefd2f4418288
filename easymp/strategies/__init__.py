"""Strategies: how parameters and gradients are spread over the ranks."""

from ..protocols import Strategy
from .options import read_options
from .registry import STRATEGIES

__all__ = ["STRATEGIES", "Strategy", "read_options"]
