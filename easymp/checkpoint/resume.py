"""Epochs that continue where a checkpoint was taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import StepError

if TYPE_CHECKING:
    from ..base.accumulation import UpdateWindow
    from ..data import PreparedLoader
    from ..distributed import World


class EpochRange:
    """What is left of ``range(count)``: iterating it is the loop, and its length the number of epochs to come."""

    def __init__(self, epochs: Epochs, count: int) -> None:
        self._epochs, self._count = epochs, count

    def __len__(self) -> int:
        return self._epochs.count_left(self._count)

    def __iter__(self) -> Iterator[int]:
        return self._epochs.run(self._count)


class Epochs:
    """The epochs of ``accelerator.epochs()`` loops, told apart by their order."""

    def __init__(self, loaders: Sequence[PreparedLoader], window: UpdateWindow, world: World) -> None:
        self._loaders, self._window, self._world = loaders, window, world
        self._loop = -1  # number of the loop that is running, or was the last one
        self._running: object | None = None  # identifies the call whose loop is running
        self._epoch = 0  # the epoch that is running in it, or the next one
        self._loaded: dict[str, Any] | None = None  # a state that no loop has continued yet

    def count_left(self, count: int) -> int:
        """How many epochs the next loop of `count` runs."""
        if self._loaded is None:
            return count
        loop, saved_loop = self._next_loop(), self._loaded["loop"]
        return 0 if loop < saved_loop else max(0, count - int(self._loaded["epoch"]))

    def _next_loop(self) -> int:
        """Number of the loop that begins next: at most that of the loop which the loaded state was saved in."""
        if self._loaded is None:
            return self._loop + 1
        return min(self._loop + 1, max(int(self._loaded["loop"]), 0))

    def run(self, count: int) -> Iterator[int]:
        self._loop = self._next_loop()
        self._epoch = 0
        call = self._running = object()
        try:
            while True:
                finished = self._continue(count)
                if self._epoch >= count or self._running is not call:
                    return
                if finished is not None and self._epoch and not any(finished) and self._ends_training():
                    return
                for loader, passes in zip(self._loaders, finished or [0] * len(self._loaders)):
                    loader.replay(passes)
                self._window.begin_epoch(self._epoch, count)
                yield self._epoch
                self._epoch += 1
                for loader in self._loaders:
                    loader.replay(0)
                if self._ends_training():
                    return
        finally:
            if self._running is call:
                self._running = None

    def _ends_training(self) -> bool:
        """Whether a part of any rank ends the training after the epoch that has ended."""
        ends = [call(self._epoch - 1) for call in self._window.parts.epoch_ends]
        return bool(ends) and self._world.any(any(ends))

    def _continue(self, count: int) -> list[int] | None:
        """Continue in the epoch of a loaded checkpoint; returns each loader's finished passes in it, or None."""
        loaded = self._loaded
        if loaded is None:
            return None
        if self._loop < loaded["loop"]:
            self._epoch = count  # this loop was over
            return []
        if self._loop > max(loaded["loop"], 0):
            raise StepError(
                "the checkpoint was loaded inside an accelerator.epochs() loop, and was saved in an earlier one of the "
                "script: leave the loop before load_state(), and call epochs() again"
            )
        self._loaded = None
        self._epoch = loaded["epoch"]
        if loaded["loop"] >= 0:
            return list(loaded["finished"])
        if any(loader.epoch or loader.position for loader in self._loaders):
            raise StepError(
                "the checkpoint was saved outside of accelerator.epochs(), so it does not say which epochs are left: "
                "use the loop that the script had then, such as range(first, n)"
            )
        return []

    def forget(self) -> None:
        """Drop a loaded state that no loop has continued: its objects were released."""
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """The loop, the epoch that the next process begins with, and each loader's finished passes in it."""
        if self._loaded is not None:
            return dict(self._loaded)  # nothing has run since
        epoch, finished = self._epoch, [0] * len(self._loaders)
        if self._running is not None:
            if any(loader.position for loader in self._loaders):
                finished = [loader.finished for loader in self._loaders]
            elif any(loader.finished for loader in self._loaders) or not self._loaders:
                epoch += 1
        return {"loop": self._loop, "epoch": epoch, "finished": finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect in the next round of the running loop, or in the next loop."""
        finished = [int(n) for n in state["finished"]]
        self._loaded = {"loop": int(state["loop"]), "epoch": int(state["epoch"]), "finished": finished}
