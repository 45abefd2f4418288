"""Messages of the Apex layer, and its error."""

from __future__ import annotations

from ...errors import EasympError
from ..layer import Layer

layer = Layer("Apex")


class ApexError(EasympError, RuntimeError):
    """An error that Apex raises as RuntimeError, or a case that Apex would compute wrongly without an error."""
