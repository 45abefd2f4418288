"""`easymp estimate`: which strategy, precision and number of processes a model has memory for, before anything is allocated.

Names are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.lazy import at_first_use

if TYPE_CHECKING:
    from .rows import Estimates as Estimates
    from .rows import Row as Row
    from .rows import estimates as estimates
    from .sized import Sized as Sized
    from .sized import read_count as read_count
    from .sized import read_model as read_model
    from .sized import read_sample as read_sample

DEFAULT_STRATEGIES = (
    "single",
    "ddp",
    "zero1",
    "fsdp",
)  # the simplest first: the first one that fits is suggested
_HOMES = {
    "rows": ("Estimates", "Row", "estimates"),
    "sized": ("Sized", "read_count", "read_model", "read_sample"),
}
_INNER = {"rows": ("SPARE", "STATES")}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES, _INNER)
__all__ += ["DEFAULT_STRATEGIES"]
