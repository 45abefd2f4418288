"""Where the time and memory of training steps went: torch.profiler around a run, and a table in words of what it recorded.

Names are loaded at first use, so that an Accelerator that profiles nothing does not wait for what profiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .marking import marked as marked
    from .profile import Profile as Profile
    from .profile import Subject as Subject

_HOMES = {"marking": ("marked",), "profile": ("Profile", "Subject")}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES)
