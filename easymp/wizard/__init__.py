"""The wizard of `easymp config`: it looks at the machine, asks what is open, and writes ``easymp.toml``.

Nothing here knows a terminal: it speaks to a `Screen`, so that a test can be one.
"""

from .ahead import UnansweredError, read_ahead
from .configuring import Wish, configure
from .looking import Machine, look
from .screen import QuitError, Screen

__all__ = ["Machine", "QuitError", "Screen", "UnansweredError", "Wish", "configure", "look", "read_ahead"]
