"""Functions for models that torch does not have, or not in this form."""

from .losses import linear_cross_entropy as linear_cross_entropy

__all__ = ["linear_cross_entropy"]
