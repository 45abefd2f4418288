"""Messages of the Apex layer, and its error."""

from __future__ import annotations

from ...errors import EasympError
from ..layer import Layer

layer = Layer("Apex")


class ApexError(EasympError, RuntimeError):
    """What Apex would refuse, too, with a RuntimeError; and what it would let pass and compute wrongly."""
