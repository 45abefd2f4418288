"""Scripts and functions on several processes, of this machine and of others, by torch's elastic agent.

Nothing here imports torch before something is launched: the worker imports this package too, and the user's script is
to be the first to import torch, as under plain python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .entrypoints import launch as launch
    from .entrypoints import launch_script as launch_script

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), {"entrypoints": ("launch", "launch_script")})
