"""Whether what ends now ends by an error: services show a run that failed as one."""

from __future__ import annotations

import sys


def failing() -> bool:
    """Inside of an ``except`` or ``finally`` of an error, or at the exit of an interpreter that ends by one."""
    return sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None
