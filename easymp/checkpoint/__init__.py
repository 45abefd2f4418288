"""Checkpoints: sharded safetensors and JSON, committed at once, verified, read by any number of ranks. Reading runs no code.

Names are loaded at first use, so that the command line can list its commands without waiting for torch, and an Accelerator that saves
nothing does not wait for what saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .accelerate_folder import AccelerateStates as AccelerateStates
    from .accelerate_folder import read_accelerate as read_accelerate
    from .catalog import Entry as Entry
    from .catalog import list_checkpoints as list_checkpoints
    from .comparing import Difference as Difference
    from .comparing import diff as diff
    from .converting import convert as convert
    from .inspecting import Contents as Contents
    from .inspecting import inspect as inspect
    from .merging import merge as merge
    from .progress import Progress as Progress
    from .pruning import Pruned as Pruned
    from .pruning import prune as prune
    from .verifying import Damage as Damage
    from .verifying import verify as verify

_HOMES = {
    "accelerate_folder": ("AccelerateStates", "read_accelerate"),
    "comparing": ("Difference", "diff"),
    "converting": ("convert",),
    "catalog": ("Entry", "list_checkpoints"),
    "inspecting": ("Contents", "inspect"),
    "merging": ("merge",),
    "progress": ("Progress",),
    "pruning": ("Pruned", "prune"),
    "verifying": ("Damage", "verify"),
}
# What an Accelerator takes from here; for no one else.
_INNER = {
    "accelerate_folder": ("is_accelerate_folder",),
    "accelerated": ("LOADERS", "Translated"),
    "agreeing": ("first", "trouble"),
    "claims": ("hold",),
    "extra": ("NONE",),
    "finding": ("below", "damage", "is_checkpoint", "newest"),
    "fitting": ("check_like",),
    "folders": ("step_folder", "step_of"),
    "gathering": ("Gathering", "on_host"),
    "handover": ("hand_over",),
    "hook_folders": ("HookFolder", "folder_to_read"),
    "huggingface": ("write_model",),
    "loading": ("load", "put_in_place"),
    "names": ("canonical",),
    "objects": ("ObjectState",),
    "opening": ("parted",),
    "optimizers": ("OptimizerState",),
    "progress": ("of_ranks",),
    "randomness": ("RandomState",),
    "saves": ("Saves",),
    "saving": ("Target",),
    "sharding": ("Item", "cut"),
    "single": ("save_tree",),
    "sources": ("open_source",),
    "storages": ("open_storage",),
    "training": ("kept_of", "numbered"),
}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES, _INNER)
