"""`get_logger` where scripts for Accelerate look for it."""

from __future__ import annotations

from .log import get_logger

__all__ = ["get_logger"]
