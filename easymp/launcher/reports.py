"""How a node's part of the run ended, as its launcher tells the others, and which of several endings is the cause."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from .failure import CAUSE, RESTART, Failure, blame, by_blame


@dataclass(frozen=True)
class Report:
    """One node's end.

    Attributes:
        node: ``"node 1 (host)"``.
        failures: of its ranks, likeliest cause first.
        signal: that stopped its launcher.
        saved: its ranks say that they can be started again.
        main: the node that the others meet at.
    """

    node: str
    failures: tuple[Failure, ...] = ()
    signal: int | None = None
    saved: bool = False
    main: bool = False

    def to_json(self) -> str:
        """Without the tracebacks: those are shown where they were raised."""
        return json.dumps({**asdict(self), "failures": [{**f._asdict(), "text": ""} for f in self.failures]})

    @classmethod
    def from_json(cls, text: str) -> Report:
        found = json.loads(text)
        return cls(**{**found, "failures": tuple(Failure(**f) for f in found["failures"])})

    @property
    def caused(self) -> bool:
        """Whether something went wrong here by itself, and not for want of another rank."""
        return any(blame(failure)[0] == CAUSE and failure.code != RESTART for failure in self.failures)


def first(own: Report, others: Iterable[Report]) -> tuple[Failure | None, str]:
    """The likeliest cause of all, and the node where it lies (``""`` for this one). Machines' clocks are taken as they are."""
    where = {id(failure): report.node for report in others for failure in report.failures}
    listed = [*own.failures, *(failure for report in others for failure in report.failures)]
    if not listed:
        return None, ""
    chosen = by_blame(listed)[0]
    return chosen, where.get(id(chosen), "")
