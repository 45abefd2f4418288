"""A run that can be stopped and started again: resume, the epochs that are left, and the end by a signal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from .. import checkpoint
from ..base.lazy import modules_at_first_use
from ..errors import CheckpointError, RefusedError, SettingError
from ..logging import get_logger
from .preemption import Epochs
from .run import Checkpointing, Path

if TYPE_CHECKING:
    from . import preemption

modules_at_first_use(globals(), "preemption")

logger = get_logger(__name__)


class Resuming(Checkpointing):
    """resume, epochs, and save_on_signal."""

    _epochs: Epochs
    close: Callable[[], None]

    def _listen(self, save_on_signal: bool | None) -> None:
        self._preemption = preemption.Preemption(self._run.world, self._run.clock, self._leave)
        self._save_on_signal = save_on_signal
        if save_on_signal and not self._preemption.start():
            raise RefusedError(
                "save_on_signal=True in a thread: Python takes signals in the main thread only. Make the Accelerator there"
            )

    def resume(self, path: Path | None = None, strict: bool = True) -> str | None:
        """Go on from the complete checkpoint that was saved last, if there is one; returns its folder, or None.

        Call it once, on all ranks, when everything is prepared and registered. Checkpoints that are not complete or were damaged since
        are left out, with a line in the log; so is what was saved after an older one that a later run went on from. Without `path`, the
        project's folder is this run's until `close`: another process that resumes or saves there is refused. `load_state` never is.

        From now on SIGTERM and SIGUSR1 save the run and end it, unless the Accelerator was made with ``save_on_signal=False``: see there.

        Args:
            path: the folder that holds folders named by steps; None takes the project's.
            strict: as in `load_state`.

        Raises:
            CheckpointError: the last complete checkpoint does not fit this run, or all there are were damaged, or another process saves
                in the project's folder.
        """
        if path is None or checkpoint.below(*checkpoint.parted(path)) == self._project_root:
            self._claim_project(reading=True)
        if self._save_on_signal is None:
            self._preemption.start()
        self._settle_saves()  # what is being written may be the newest
        passed: list[str] = []
        while True:
            root, name = self._together(lambda: self._newest(path, passed))
            if name is None:
                logger.info("nothing to resume in %s", root)
                return None
            place = checkpoint.below(root, name)
            try:
                self._load(root, name, strict)
            except CheckpointError as error:
                found: str = self._together(partial(checkpoint.damage, checkpoint.open_storage(root), name))
                if not found:
                    raise
                logger.warning("left out: %s (%s)", found, error)
                passed.append(name)
                continue
            logger.info("resumed from %s", place)
            return place

    def _newest(self, path: Path | None, passed: list[str]) -> tuple[str, str | None]:
        root = checkpoint.below(*checkpoint.parted(self._root if path is None else path))
        folder, said, damaged = checkpoint.newest(checkpoint.open_storage(root), passed)
        for words in said:
            logger.warning("left out: %s", words)
        if folder is None and (passed or damaged):
            raise CheckpointError(
                f"{root}: no checkpoint is whole any more: {'; '.join([*passed, *said])}. Move the folder away to begin anew, or "
                "load_state() one that `easymp checkpoint list` says is not on the current line"
            )
        return root, folder

    def epochs(self, count: int) -> Iterator[int]:
        """``range(count)``, or after `resume` or `load_state` the epochs of it that are still to run.

        Where it goes on depends on where the checkpoint was taken:

        - While a prepared loader was being read: in the same epoch. That loader gives the rest of its pass, and loaders that had come to
          the end of theirs give nothing, once each, so that a body that trains and then validates goes on in the validation. A
          checkpoint taken at a loader's last batch goes on with an empty rest.
        - While none was being read: with the next epoch, if any loader had come to its end in this one (an epoch in which no loader has
          been read begins again; with no loader prepared, the next one begins).

        So what is done once an epoch belongs before `save_state`: ``scheduler.step()``, above all. Several loops in a script are told
        apart by their order.

        Raises:
            SettingError: `count` is no number of epochs.
            StepError: the checkpoint was saved in another kind of loop.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise SettingError(f"epochs({count!r}) is no number of epochs")
        return self._epochs.run(count)

    def _leave(self, number: int | None) -> None:
        """A signal has come, here or to another rank: save, end, exit."""
        try:
            self._settle_saves()
        except CheckpointError as error:  # what an earlier save met with is no reason not to try again
            logger.error("%s", error)
        place = self.save_state()
        self._settle_saves()
        logger.warning(
            "preempted%s: saved %s, and exiting with %d",
            f" by signal {number}" if number else "",
            place,
            preemption.RESTART,
        )
        self.close()
        raise SystemExit(preemption.RESTART)
