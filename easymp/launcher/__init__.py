"""Processes: a script or a function on several ranks, on torchrun's own engine.

`scripts` run in processes of their own; `functions`, which few programs need, is imported where it is used.

Nothing here imports torch until something is launched: the worker's entry comes through this package too, and the user's
script is to be the first to import torch, as under plain python.
"""

from .scripts import launch, launch_script

__all__ = ["launch", "launch_script"]
