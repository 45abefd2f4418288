"""The ranks of a run: this process's place among them, and their collectives. Names are loaded at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from ..base.ranks import Ranks as Ranks
    from ..base.ranks import read_ranks as read_ranks
    from .process_group import World as World
    from .process_group import check_backend as check_backend
    from .process_group import first_difference as first_difference
    from .process_group import locate as locate
    from .process_group import odd_one_out as odd_one_out

_HOMES = {
    ".base.ranks": ("Ranks", "read_ranks"),
    "process_group": ("World", "check_backend", "first_difference", "locate", "odd_one_out"),
}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES)
