"""The averaging of strategy "local_sgd": after an optimizer's updates, and where all ranks are at one place."""

from __future__ import annotations

from typing import Any

from ..base.parts import Part


class LocalAveraging(Part):
    """Averages the models of strategy "local_sgd"."""

    name = "local_sgd"

    def begin(self) -> None:
        if not self.run.prepared.strategy.local_updates:
            self.run.parts.remove(self)

    def stepped(self, optimizer: Any) -> None:
        skipped = optimizer.turn.skipped
        if skipped is None or not skipped.item():
            self.run.prepared.strategy.count(optimizer.optimizer)

    def settle(self) -> None:
        self.run.prepared.strategy.settle()
