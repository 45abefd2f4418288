"""Precisions: dtypes as data, autocast, and the loss scale."""

from ..protocols import Precision
from ..registry import ALIASES, PRECISIONS
from .measured import Measured
from .scaler import LossScale, Scaler, rule_from

__all__ = ["ALIASES", "PRECISIONS", "LossScale", "Measured", "Precision", "Scaler", "rule_from"]
