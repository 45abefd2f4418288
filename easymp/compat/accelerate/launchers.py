"""``accelerate.launchers``."""

from __future__ import annotations

from ...launcher.functions import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
