"""Whether training works on this machine: small trainings and their parts, on real processes, each against an answer known otherwise."""

from __future__ import annotations

from .trying import Row, Tried, try_out

__all__ = ["Row", "Tried", "try_out"]
