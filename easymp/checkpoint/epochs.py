"""The epochs of a run, as a loop that knows where a checkpoint was taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import StepError

if TYPE_CHECKING:
    from ..base.accumulation import StepClock
    from ..data import PreparedLoader


class Epochs:
    """Counts the epochs of ``accelerator.epochs()`` loops, and says where the next process goes on.

    Loops are told apart by their order: those that were over are not run again, and the one that was running begins with the epoch
    that was.

    Args:
        loaders: the prepared ones, as they come.
    """

    def __init__(self, loaders: Sequence[PreparedLoader], clock: StepClock) -> None:
        self._loaders, self._clock = loaders, clock
        self._loop = -1  # which loop is running, or was the last one
        self._epoch = 0  # the epoch that is running in it, or the next one
        self._inside = False
        self._saved: dict[str, Any] | None = None

    def run(self, count: int) -> Iterator[int]:
        self._loop += 1
        mine, self._epoch, self._inside = self._loop, 0, True
        try:
            while True:
                finished = self._resumed(mine, count)
                if self._epoch >= count or self._loop != mine:
                    return
                for loader, passes in zip(self._loaders, finished or [0] * len(self._loaders)):
                    loader.replay(passes)
                self._clock.hold()
                yield self._epoch
                self._epoch += 1
                for loader in self._loaders:
                    loader.replay(0)
                # A pass that is open here is one that the script goes on with, or leaves: its next batch tells.
                if self._clock.between is not None and not any(loader.position for loader in self._loaders):
                    self._clock.between()
        finally:
            if self._loop == mine:
                self._inside = False

    def _resumed(self, mine: int, count: int) -> list[int]:
        """Goes to the epoch of the checkpoint, if one has been loaded; returns how many passes each loader has finished in it."""
        saved = self._saved
        if saved is None or mine > saved["loop"] >= 0:
            return []
        if saved["loop"] < 0:
            self._saved = None
            if any(loader.epoch or loader.position for loader in self._loaders):
                raise StepError(
                    "the checkpoint was saved outside of accelerator.epochs(), so it does not say which epochs are left: use the loop that "
                    "the script had then, such as range(first, n)"
                )
            return []
        if mine < saved["loop"]:
            self._epoch = count  # this loop was over
            return []
        self._epoch, self._saved = saved["epoch"], None
        return list(saved["finished"])

    def state_dict(self) -> dict[str, Any]:
        """The loop, the epoch that the next process begins with, and each loader's passes that count as done in it."""
        if self._saved is not None and self._saved["loop"] >= self._loop:
            return dict(self._saved)  # loaded, and nothing has run since
        epoch, finished = self._epoch, [0] * len(self._loaders)
        if self._inside:
            if any(loader.position for loader in self._loaders):
                finished = [loader.finished for loader in self._loaders]
            elif any(loader.finished for loader in self._loaders) or not self._loaders:
                epoch += 1
        return {"loop": self._loop, "epoch": epoch, "finished": finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What comes next is what `state` says: the next round of a loop that is running, or the loops to come."""
        self._saved = {
            "loop": int(state["loop"]),
            "epoch": int(state["epoch"]),
            "finished": [int(n) for n in state["finished"]],
        }
