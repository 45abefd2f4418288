"""Checkpoints: sharded safetensors and JSON, committed at once, verified, read by any number of ranks. Reading runs no code.

Names are loaded at first use, so that the command line can list its commands without waiting for torch, and an Accelerator that saves
nothing does not wait for what saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .accelerate_import import AccelerateStates as AccelerateStates
    from .accelerate_import import read_accelerate as read_accelerate
    from .catalog import Contents as Contents
    from .catalog import Damage as Damage
    from .catalog import Difference as Difference
    from .catalog import Entry as Entry
    from .catalog import Pruned as Pruned
    from .catalog import diff as diff
    from .catalog import inspect as inspect
    from .catalog import list_checkpoints as list_checkpoints
    from .catalog import prune as prune
    from .catalog import verify as verify
    from .merging import merge as merge
    from .progress import Progress as Progress
    from .weights import convert as convert

_HOMES = {
    "accelerate_import": ("AccelerateStates", "read_accelerate"),
    "catalog": (
        *("Contents", "Damage", "Difference", "Entry", "Pruned"),
        *("diff", "inspect", "list_checkpoints", "prune", "verify"),
    ),
    "merging": ("merge",),
    "progress": ("Progress",),
    "weights": ("convert",),
}
# What an Accelerator takes from here; for no one else.
_INNER = {
    "accelerate_import": ("LOADERS", "Translated", "is_accelerate_folder"),
    "folders": ("step_folder", "step_of", "parted", "open_storage"),
    "gather": ("Gathering", "hand_over"),
    "hooks": ("HookFolder", "NONE", "folder_to_read"),
    "huggingface": ("Item", "cut", "save_tree", "write_model"),
    "layout": ("on_host",),
    "lineage": ("below", "damage", "is_checkpoint", "newest"),
    "load": ("check_like", "load_checkpoint", "put_in_place"),
    "lock": ("hold",),
    "model_state": ("OptimizerState",),
    "objects": ("ObjectState",),
    "progress": ("of_ranks",),
    "run_state": ("RandomState", "kept_of", "numbered"),
    "save": ("Saves", "Target"),
    "snapshot": ("first", "trouble"),
    "source": ("canonical", "open_source"),
}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES, _INNER)
