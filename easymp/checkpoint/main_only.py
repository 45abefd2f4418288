"""A save that the main process alone may call, as in ``if accelerator.is_main_process: accelerator.save_state(...)``.

The main process cannot see from its own call whether the other ranks will make it, too. So it asks their listeners (threads that wait at
the store) until each rank either makes the call, or has begun a collective that the main process has not begun. All ranks begin
collectives in one order, so that rank has passed the call. It waits in that collective, and its state does not change meanwhile.
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


class SaveCalls:
    """Finds out which ranks call a save. All ranks make one.

    Args:
        help: called with a world in a thread of a rank that has passed a save, if the main process needs that rank's part of the state.

    Attributes:
        ended: ranks that do not answer, because they have ended.
    """

    def __init__(self, world: World, help: Callable[[StoreWorld], None]) -> None:
        self._world, self._help = world, help
        self.ended: list[int] = []
        self._waits = False  # whether this rank has made the call, and waits for the main process's answer
        self._words: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._number = 0  # saves in which helper threads took part
        if world.watch is not None:
            answers = {
                "save": lambda: HERE if self._waits else json.dumps(world.position()),
                "together": lambda: self._hear(True),
                "alone": lambda: self._hear(False),
                "help": self._start_helper,
            }
            world.watch.told.update(answers)

    def _hear(self, together: bool) -> str:
        self._waits = False
        self._words.put(together)
        return HERE

    def all_called(self) -> bool:
        """Whether all ranks make the call. The other ranks wait for the main process's answer.

        Raises:
            WorldError: a rank neither makes the call nor begins a collective within the world's timeout.
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

    def with_helpers(self) -> StoreWorld:
        """On rank 0, make a world for a save in which helper threads of the other ranks take part."""
        for rank in range(1, self._world.size):
            self._ask(rank, "help")
        return self._store_world()

    def _start_helper(self) -> str:
        def act() -> None:
            try:
                self._help(there)
            except Exception as error:  # rank 0 hears of it by the store
                logger.error("save_state() of the main process: %s", error)

        there = self._store_world()
        threading.Thread(target=act, name="easymp-save", daemon=True).start()
        return HERE

    def _store_world(self) -> StoreWorld:
        self._number += 1
        return StoreWorld(self._world, self._number)


def one_rank(world: World) -> World:
    """A copy of `world` with one rank."""
    one = copy.copy(world)
    one.size = 1
    return one


class StoreWorld(World):
    """A world whose ranks exchange objects through the store, beside collectives of its process group. Use it in a ``with`` block."""

    def __init__(self, world: World, number: int) -> None:
        vars(self).update(vars(world))
        self._prefix, self._objects = f"apart/{number}", 0
        self._meeting = Barrier(self).start()

    def store(self) -> dist.Store:
        return dist.PrefixStore(self._prefix, super().store())

    def __enter__(self) -> StoreWorld:
        self._meeting.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._meeting.__exit__(*error)

    def gather_objects(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order, on every rank."""
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
    """Serialise an object as torch's collectives of objects do."""
    tensor, _ = dist.distributed_c10d._object_to_tensor(item, torch.device("cpu"), None)
    return bytes(tensor.numpy())


def _unpacked(data: bytes) -> Any:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return dist.distributed_c10d._tensor_to_object(tensor, len(data), None)
