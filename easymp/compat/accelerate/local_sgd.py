"""``accelerate.local_sgd``."""

from __future__ import annotations

from ...local_sgd import LocalSGD

__all__ = ["LocalSGD"]
