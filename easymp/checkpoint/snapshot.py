"""What a rank brings to a checkpoint, and what it takes from one: the two ends between live objects and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError
from .boxes import Box, overlap, runs, whole
from .buffers import as_bytes
from .manifest import Manifest, Stored
from .places import place_of
from .planning import Brought
from .storage import Storage, Tick
from .trees import pack, unpack


class Snapshot:
    """This rank's part of a checkpoint in the making. Tensors are the live ones: nothing is copied.

    Attributes:
        rank: this process's, under whose number it brings what is its own.
        parts: by full name and box.
        brought: the same, for the plan.
        states: packed Python state by name; the same on all ranks, or mappings whose keys add up.
        aliases: other names of tensors.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.parts: dict[tuple[str, Box], Tensor] = {}
        self.brought: list[Brought] = []
        self.states: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}

    def add(self, name: str, value: Any, own: bool = False) -> None:
        """Keep the tree `value` under `name`; `own` of this rank, whatever the others bring."""
        tensors: dict[str, Tensor] = {}
        name = f"ranks/{self.rank:05d}/{name}" if own else name
        self.states[name] = pack(value, name, tensors)
        for path, tensor in tensors.items():
            place = place_of(tensor)
            for box, part in place.parts if place is not None else ():
                self.parts[path, box] = part
                self.brought.append(Brought(path, tensor.dtype, place.shape, box))


class Reading:
    """A committed checkpoint, as one rank reads it. Tensors asked for are empty until `run`, which reads and verifies them all.

    Attributes:
        rank: this process's.
        strict: whether what is missing or left over is an error.
        skipped: what was passed over, in words, where `strict` is off.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest, rank: int = 0, strict: bool = True) -> None:
        self.manifest, self.rank, self.strict = manifest, rank, strict
        self.skipped: list[str] = []
        self._storage, self._folder = storage, folder
        self._wanted: list[tuple[str, Box, Tensor]] = []

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.states

    def state(self, name: str, own: bool = False, tensor: Callable[[str], Any] | None = None) -> Any:
        """The tree kept under `name`, its tensors as `tensor` makes them of their full names (whole ones, on the CPU)."""
        name = f"ranks/{self.rank:05d}/{name}" if own else name
        if name not in self.manifest.states:
            raise CheckpointError(f"the checkpoint has no {name}")
        return unpack(self.manifest.states[name], tensor or self.whole)

    def stored(self, name: str) -> Stored:
        """What there is of a tensor, by its full name or another one that it has."""
        return self.manifest.tensors[self.manifest.aliases.get(name, name)]

    def whole(self, name: str) -> Tensor:
        return self.part(name, whole(self.stored(name).shape))

    def part(self, name: str, box: Box) -> Tensor:
        """A new CPU tensor of the shape of `box`, filled by `run`."""
        name = self.manifest.aliases.get(name, name)
        tensor = torch.empty(box.shape, dtype=self.manifest.tensors[name].dtype)
        self._wanted.append((name, box, tensor))
        return tensor

    def complain(self, words: str) -> None:
        """Something does not fit: an error, or noted where that is allowed."""
        if self.strict:
            raise CheckpointError(f"{words}; strict=False loads what fits")
        self.skipped.append(words)

    def run(self, tick: Tick = lambda n: None) -> None:
        """Fill all that was asked for.

        Raises:
            CheckpointError: bytes that are missing, or not what was written.
        """
        by_file: dict[str, list[tuple[int, memoryview]]] = {}
        for name, box, tensor in self._wanted:
            stored = self.manifest.tensors[name]
            size, memory = stored.dtype.itemsize, as_bytes(tensor)
            for piece in stored.pieces:
                common = overlap(piece.box, box)
                if common is None:
                    continue
                there, here = _joined(common, piece.box, box)
                for (a, count), (b, _) in zip(there, here):
                    view = memory[b * size : (b + count) * size]
                    by_file.setdefault(piece.file, []).append((piece.begin + a * size, view))
        for file, wanted in by_file.items():
            record = self.manifest.files[file]
            wanted.sort(key=lambda at: at[0])
            self._storage.fetch(f"{self._folder}/{file}", record.size, record.checksums, wanted, tick)
        self._wanted.clear()


def _joined(part: Box, there: Box, here: Box) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Runs of `part` in the memories of two boxes, cut so that they match one to one."""
    a, b = list(runs(part, there)), list(runs(part, here))
    length = min(a[0][1], b[0][1])  # one is a multiple of the other: both end with a dimension
    return _cut(a, length), _cut(b, length)


def _cut(found: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    return [(start + i, length) for start, count in found for i in range(0, count, length)]


class Kept(Protocol):
    """One live thing that a checkpoint keeps."""

    def bring(self, into: Snapshot) -> None:
        """Add its state to a checkpoint in the making."""
        ...

    def take(self, source: Reading) -> Callable[[], None]:
        """Ask for its state, and check it as far as it is known; what is returned puts it in place, once all is read.

        Nothing live changes before that is called, and it does not fail.

        Raises:
            CheckpointError: the state does not fit.
        """
        ...
