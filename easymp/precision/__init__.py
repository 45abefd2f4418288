"""Precisions: dtypes as data, autocast, and the loss scale."""

from ..protocols import Precision
from ..registry import ALIASES, PRECISIONS
from .scaler import Scaler

__all__ = ["ALIASES", "PRECISIONS", "Precision", "Scaler"]
