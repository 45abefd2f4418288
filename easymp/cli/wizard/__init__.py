"""The wizard of `easymp config`: it looks at the machine, asks what is open, and writes ``easymp.toml``.

Nothing here knows a terminal: it speaks to a `Screen`, so that a test can be one. Names are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.lazy import at_first_use

if TYPE_CHECKING:
    from .ahead import UnansweredError as UnansweredError
    from .ahead import read_ahead as read_ahead
    from .configuring import Wish as Wish
    from .configuring import configure as configure
    from .document import read_document as read_document
    from .looking import Machine as Machine
    from .looking import look as look
    from .screen import QuitError as QuitError
    from .screen import Screen as Screen

_HOMES = {
    "ahead": ("UnansweredError", "read_ahead"),
    "configuring": ("Wish", "configure"),
    "document": ("read_document",),
    "looking": ("Machine", "look"),
    "screen": ("QuitError", "Screen"),
}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES)
