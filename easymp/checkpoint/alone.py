"""A save that the main process alone may call, as in ``if accelerator.is_main_process: accelerator.save_state(...)``.

A call does not show whether the other ranks will make it, too. So the main process asks their listeners (threads that sleep in the store)
until each rank has either come to the call, or begun a collective that the main process has not begun: all ranks begin collectives in one
order, so that rank has passed the call. It then waits for the main process, and its state stays as it is meanwhile.
"""

from __future__ import annotations

import copy
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..distributed import World
from ..errors import CheckpointError, WorldError
from ..logging import get_logger
from .save import Barrier

logger = get_logger(__name__)
HERE = "here"
PAUSE = 0.02  # seconds between two questions


class Attendance:
    """Where the ranks are when one of them comes to a save. All ranks make one.

    Args:
        help: called in a thread of a rank that has passed a save, with a world for it, when the main process needs its part.

    Attributes:
        ended: ranks that answer no more.
    """

    def __init__(self, world: World, help: Callable[[Apart], None]) -> None:
        self._world, self._help = world, help
        self.ended: list[int] = []
        self._waits = False  # whether this rank has come, and waits for the main process's word
        self._words: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._number = 0  # saves in which ranks that have passed took part
        if world.watch is not None:
            answers = {
                "save": lambda: HERE if self._waits else json.dumps(world.position()),
                "together": lambda: self._hear(True),
                "alone": lambda: self._hear(False),
                "help": self._begin_to_help,
            }
            world.watch.told.update(answers)

    def _hear(self, together: bool) -> str:
        self._waits = False
        self._words.put(together)
        return HERE

    def together(self) -> bool:
        """Whether all ranks have come. The others return when the main process has found out.

        Raises:
            WorldError: a rank neither comes nor begins a collective within the world's timeout.
        """
        world = self._world
        if world.rank:
            self._waits = True
            try:
                return self._words.get(timeout=world.timeout)
            except queue.Empty:
                raise WorldError(
                    f"rank {world.rank} came to save_state(), and rank 0 did not within {world.timeout:g} s"
                ) from None
            finally:
                self._waits = False
        here = [rank for rank in range(1, world.size) if self._comes(rank)]
        found = len(here) == world.size - 1
        for rank in here:
            self._ask(rank, "together" if found else "alone")
        return found

    def _comes(self, rank: int) -> bool:
        mine, until = self._world.position(), time.monotonic() + self._world.timeout
        while time.monotonic() < until:
            said = "" if self._world.has_left(rank) else self._ask(rank, "save")
            if said == HERE:
                return True
            if not said:
                self.ended.append(rank)
                return False
            theirs = json.loads(said)
            if any(theirs[kind] > number for kind, number in mine.items() if kind in theirs):
                return False
            time.sleep(PAUSE)
        raise WorldError(
            f"save_state(): rank {rank} neither came nor went on to a collective within {self._world.timeout:g} s"
        )

    def _ask(self, rank: int, word: str) -> str:
        assert self._world.watch is not None
        return self._world.watch.ask(rank, word)

    def helped(self) -> Apart:
        """Rank 0: a world for a save in which the other ranks' helping threads take part."""
        for rank in range(1, self._world.size):
            self._ask(rank, "help")
        return self._apart()

    def _begin_to_help(self) -> str:
        def act() -> None:
            try:
                self._help(there)
            except Exception as error:  # rank 0 hears of it by the store
                logger.error("save_state() of the main process: %s", error)

        there = self._apart()
        threading.Thread(target=act, name="easymp-save", daemon=True).start()
        return HERE

    def _apart(self) -> Apart:
        self._number += 1
        return Apart(self._world, self._number)


def solo(world: World) -> World:
    """`world` as one rank alone sees it."""
    one = copy.copy(world)
    one.size = 1
    return one


class Apart(World):
    """The ranks of a world, which exchange objects through the store, in a ``with`` block: collectives of its group go on beside it."""

    def __init__(self, world: World, number: int) -> None:
        vars(self).update(vars(world))
        self._prefix, self._objects = f"apart/{number}", 0
        self._meeting = Barrier(self).start()

    def store(self) -> dist.Store:
        return dist.PrefixStore(self._prefix, super().store())

    def __enter__(self) -> Apart:
        self._meeting.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._meeting.__exit__(*error)

    def gather_objects(self, item: Any) -> list[Any]:
        """One Python object a rank, in rank order, on every rank."""
        self._objects += 1
        given, found = f"given/{self._objects}", f"found/{self._objects}"
        if self.rank:
            self._meeting.put(f"{given}/{self.rank}", _packed(item))
            parts = _unpacked(self._meeting.take(found))
        else:
            parts = self._meeting.gather(given, _packed(item))
            for part in parts:
                if isinstance(part, CheckpointError):
                    raise part
            self._meeting.put(found, _packed(parts))
        return [_unpacked(part) for part in parts]


def _packed(item: Any) -> bytes:
    """As torch's collectives of objects send it."""
    tensor, _ = dist.distributed_c10d._object_to_tensor(item, torch.device("cpu"), None)
    return bytes(tensor.numpy())


def _unpacked(data: bytes) -> Any:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return dist.distributed_c10d._tensor_to_object(tensor, len(data), None)
