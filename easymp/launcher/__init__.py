"""Processes: a script or a function on several ranks, on torchrun's own engine.

Nothing here imports torch until something is launched: the worker's entry comes through this package too, and the user's
script is to be the first to import torch, as under plain python.
"""

from .functions import debug_launcher, notebook_launcher
from .scripts import launch, launch_script

__all__ = ["debug_launcher", "launch", "launch_script", "notebook_launcher"]
