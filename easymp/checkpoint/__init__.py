"""Checkpoints: sharded safetensors and JSON, committed at once, verified, read by any number of ranks.

Reading runs no code.

Names are loaded at first use, so that the command line and an Accelerator that saves nothing do not wait for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .catalog import Contents as Contents
    from .catalog import Damage as Damage
    from .catalog import Entry as Entry
    from .catalog import Pruned as Pruned
    from .catalog import inspect as inspect
    from .catalog import list_checkpoints as list_checkpoints
    from .catalog import prune as prune
    from .catalog import verify as verify
    from .export import WeightStream as WeightStream
    from .export import convert as convert
    from .progress import Progress as Progress

_HOMES = {
    "catalog": ("Contents", "Damage", "Entry", "Pruned", "inspect", "list_checkpoints", "prune", "verify"),
    "export": ("WeightStream", "convert"),
    "progress": ("Progress",),
}

_FORMER = {
    "merge": "use convert(), which takes checkpoints, too",
    **dict.fromkeys(("diff", "Difference"), "`easymp prove --against` compares two runs"),
    **dict.fromkeys(("read_accelerate", "AccelerateStates"), "use Accelerator.load_state(folder, allow_pickle=True)"),
}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES, elsewhere=_FORMER)
