"""Whole tensors of a model that is spread over the ranks, one after the other on rank 0, which may free each before the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..distributed import World
from ..errors import CheckpointError
from .barrier import Barrier, Store
from .huggingface import Item
from .layout import Box, Shape, fault, on_host, place_of, whole

EACH = 2**28  # bytes of tensors from one word of rank 0 to the next


class Spread(NamedTuple):
    """A tensor, and for each box of it the first rank that has it."""

    dtype: torch.dtype
    shape: Shape
    holders: tuple[tuple[Box, int], ...]


class Gathering:
    """Made on all ranks together, of the same names in the same order; `bring` is a collective, too.

    Attributes:
        tensors: by name; the same on all ranks.

    Raises:
        CheckpointError: on every rank: a tensor that the ranks do not have all of, or have in layouts that cannot be put together.
    """

    def __init__(self, world: World, tensors: Mapping[str, Tensor]) -> None:
        self._world = world
        self._parts: dict[str, dict[Box, Tensor]] = {}
        said = ""
        for name, tensor in tensors.items():
            try:
                place = place_of(tensor)
                self._parts[name] = dict(place.parts) if place is not None else {}
            except CheckpointError as error:
                said = said or f"{name}: {error}"
        kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        boxes = {name: list(parts) for name, parts in self._parts.items()}
        everyones = world.gather_objects((said, kinds, boxes))
        for rank, (words, theirs, _) in enumerate(everyones):
            if words:
                raise CheckpointError(words)
            if theirs != everyones[0][1]:
                raise CheckpointError(
                    f"rank {rank} has other tensors than rank 0: all ranks must pass the same model"
                )
        self.tensors: dict[str, Spread] = {}
        for name, (dtype, shape) in kinds.items():
            holders: dict[Box, int] = {}
            for rank, (_, _, boxes) in enumerate(everyones):
                for box in boxes[name]:
                    holders.setdefault(box, rank)
            if wrong := fault(shape, list(holders)):
                raise CheckpointError(f"{name}: the ranks do not have the whole of it: {wrong}")
            self.tensors[name] = Spread(dtype, shape, tuple(holders.items()))

    def bring(self, name: str) -> Tensor | None:
        """The whole tensor on rank 0, on the CPU and contiguous (the live one itself, where it is that already); None elsewhere."""
        spread, rank, parts = self.tensors[name], self._world.rank, self._parts[name]
        if rank == 0 and spread.holders == ((whole(spread.shape), 0),):
            return on_host(next(iter(parts.values())), name)
        complete = torch.empty(spread.shape, dtype=spread.dtype) if rank == 0 else None
        for box, holder in spread.holders:
            if rank == holder and complete is None:
                self._world.send(parts[box], 0)
            elif complete is not None:
                part = parts[box] if holder == 0 else self._world.receive(box.shape, spread.dtype, holder)
                complete[tuple(slice(o, o + n) for o, n in zip(*box))] = part
        return complete


def hand_over(
    world: World,
    gathering: Gathering,
    shards: Sequence[Sequence[Item]],
    write: Callable[[Callable[[str], Tensor | None]], str],
) -> str:
    """Rank 0 calls `write` with what brings it the tensors of `shards`, in their order; all ranks go along, and return its result.

    Between two tensors rank 0 may be at its disk for longer than a collective waits. So the others wait for its word in the store, and send
    when it is there to receive. Where `write` gives up half-way, the other tensors are handed over all the same, and dropped.

    Raises:
        CheckpointError: rank 0 shows no life any more.
        WorldError: another rank is gone.
    """
    turns = {name: f"turn/{number}" for number, name in enumerate(_first_of_each(shards))}
    waiting = iter([item.name for shard in shards for item in shard])
    with Barrier(Store(world), 0) as barrier:

        def bring(name: str) -> Tensor | None:
            if name in turns and world.rank == 0:
                barrier.announce(turns[name], b"")
            elif name in turns:
                barrier.announced(turns[name])
            return gathering.bring(name)

        if world.rank == 0:
            said = write(lambda name: bring(next(waiting)))
        for name in waiting:
            bring(name)
        if world.rank:
            said = barrier.announced("end").decode()
            barrier.give("done", b"")
        else:
            barrier.announce("end", said.encode())
            barrier.gather("done", b"")
            barrier.forget(turns.values())
    return said


def _first_of_each(shards: Sequence[Sequence[Item]]) -> list[str]:
    """The first tensor of each file, and of each `EACH` bytes of it."""
    names = []
    for shard in shards:
        held = EACH
        for item in shard:
            if held >= EACH:
                names.append(item.name)
                held = 0
            held += item.bytes
    return names
