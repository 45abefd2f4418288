"""`easymp estimate`: which strategy, precision and number of processes a model has memory for, before anything is allocated."""

from .rows import DEFAULT_STRATEGIES, Estimates, Row, estimates
from .sized import Sized, read_count, read_model, read_sample

__all__ = ["DEFAULT_STRATEGIES", "Estimates", "Row", "Sized", "estimates", "read_count", "read_model", "read_sample"]
