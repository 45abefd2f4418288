"""Processes: a script or a function on several ranks, on torchrun's own engine.

`scripts` run in processes of their own; `functions`, which few programs need, is imported where it is used.

Names are loaded at first use: a rank that somebody has launched does not wait for what launches. Nothing here imports torch until
something is launched: the worker's entry comes through this package too, and the user's script is to be the first to import torch,
as under plain python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .scripts import launch as launch
    from .scripts import launch_script as launch_script

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), {"scripts": ("launch", "launch_script")})
