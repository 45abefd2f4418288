"""``accelerate.local_sgd``."""

from __future__ import annotations

from ...strategies.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
