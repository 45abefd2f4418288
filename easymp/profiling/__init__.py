"""Profiles of training steps: torch.profiler around a run, and a table in words of the time and memory of each phase.

Loaded at first use, so that a run without a profile loads none of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .profile import Profile as Profile

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), {"profile": ("Profile",)})
