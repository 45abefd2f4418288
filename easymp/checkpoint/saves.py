"""The saves of a run: one at a time, here or in the background."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence

from ..distributed import World
from ..errors import CheckpointError, failing
from ..logging import get_logger
from .agreeing import Agreement, Parts, agree, trouble
from .commits import check_name
from .contents import contents
from .hooks import NONE, Extra
from .lineage import Line
from .meeting import Meeting, Store
from .planning import FilePlan
from .saving import Save, Target
from .snapshot import Kept
from .sources import INDEX
from .staging import Image
from .storage import Part, Tick, nothing
from .wellformed import check_extra

logger = get_logger(__name__)
NICE = 10  # by how much the thread that writes stands back behind those that train


class Saves:
    """One a run; every call is made by all ranks together.

    Attributes:
        line: that the saves continue; rank 0's counts.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.line = Line()
        self._store: Store | None = None
        self._agreed: Agreement | None = None
        self._image = Image()
        self._number = 0
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def save(
        self,
        target: Target,
        kept: Sequence[Kept],
        asynchronous: bool = False,
        limit: int | None = None,
        tick: Tick = nothing,
        extra: Extra = NONE,
    ) -> None:
        """Write a checkpoint of what is `kept`.

        Args:
            asynchronous: return as soon as the state is copied; a thread writes. The next save waits for it.
            limit: committed checkpoints of the same line, named by steps, that stay beside `target`'s; the last ones. None for all.
            tick: told how many more bytes this rank has written, now and then; by that thread, where there is one.
            extra: files that go with it, and are let go when it is over, unless this raises before it has begun.

        Raises:
            CheckpointError: on every rank; also what an asynchronous save before this one met with.
        """
        check_name(target.name)
        self.wait()
        if self._store is None:
            self._store = Store(self._world)
        parts, self._agreed = agree(self._world, kept, self._agreed)
        check_extra(extra.names, [INDEX, *(plan.name for plan in self._agreed.division.files)])
        Meeting(self._store, self._number).forget()
        self._number += 1
        files = (
            self._copied(parts, self._agreed) if asynchronous else lambda plan: contents(plan, parts.tensors)
        )
        save = Save(
            self._store,
            self._number,
            self.line,
            target,
            limit,
            self._agreed,
            parts.states,
            files,
            extra.files,
        )
        if not asynchronous:
            try:
                save.run(tick)
            finally:
                extra.close()
            return
        # No daemon: the interpreter waits for it at its end, while threads (each file is written by some) can still be started.
        self._thread = threading.Thread(
            target=self._run, args=(save, tick, extra), name="easymp-save", daemon=False
        )
        self._thread.start()

    def _copied(self, parts: Parts, agreed: Agreement) -> Callable[[FilePlan], Iterable[Part]]:
        """The bytes of this rank's files, from a copy that is made now."""
        files: dict[str, memoryview] = {}
        mine = [plan for plan in agreed.division.files if plan.rank == self._world.rank]
        said = trouble(lambda: files.update(self._image.take(mine, parts.tensors)))

        def copied(plan: FilePlan) -> Iterable[Part]:
            if said:  # where the other ranks hear of it
                raise CheckpointError(f"no copy of the state could be made: {said}")
            self._image.wait()
            return [files[plan.name]]

        return copied

    def _run(self, save: Save, tick: Tick, extra: Extra) -> None:
        if sys.platform == "linux":  # where a priority can be one thread's; those that it starts inherit it
            os.setpriority(
                os.PRIO_PROCESS, threading.get_native_id(), min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
            )
        try:
            said = trouble(lambda: save.run(tick))
        finally:
            extra.close()
        if said:
            self._error = CheckpointError(said)
            logger.error("asynchronous checkpoint: %s", said)

    def wait(self) -> None:
        """Until what is being written is committed; raises what it met with."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """As `wait`; the run is over. One that ends by an error ends by that one, and waits only for ranks that show life."""
        fails = failing()
        if fails and self._store is not None:
            self._store.hurried = True
        try:
            self.wait()
        except CheckpointError:
            if not fails:
                raise
        finally:
            self._image = Image()
