"""What a rank brings to a checkpoint, and what it takes from one: the two ends between live objects and files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError
from .boxes import Box, overlap, whole
from .fitting import once
from .manifest import Manifest, Stored
from .places import place_of
from .planning import Brought
from .preflight import preflight
from .progress import expect
from .sources import SourceFile
from .storage import Storage, Tick, nothing
from .streaming import Want, blocks_of, stream
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

    def add(self, name: str, value: Any, own: bool = False, alike: Collection[int] | None = None) -> None:
        """Keep the tree `value` under `name`; `own` of this rank, whatever the others bring.

        Args:
            alike: ids of tensors that have the same values on all ranks that have them; None for all. Of others the first rank's are kept.
        """
        tensors: dict[str, Tensor] = {}
        name = f"ranks/{self.rank:05d}/{name}" if own else name
        self.states[name] = pack(value, name, tensors)
        for path, tensor in tensors.items():
            place = place_of(tensor)
            if place is None:
                continue
            # An empty tensor has no box with elements on any rank, and is something all the same.
            parts = (
                place.parts
                if prod(place.shape)
                else [(whole(place.shape), tensor.new_empty(place.shape, device="cpu"))]
            )
            for box, part in parts:
                self.parts[path, box] = part
                self.brought.append(
                    Brought(
                        path, tensor.dtype, place.shape, box, alike is not None and id(tensor) not in alike
                    )
                )


class FullName(str):
    """A tensor's full name, in place of its values."""

    __slots__ = ()


@dataclass(frozen=True)
class Trial:
    """A change that may fail, as it runs a user's code, and how to undo it.

    Attributes:
        what: is changed, in words.
    """

    what: str
    change: Callable[[], None]
    undo: Callable[[], None]


class Reading:
    """A committed checkpoint, as one rank reads it. Tensors asked for are empty until `run`, which reads and verifies them all.

    What shall be in live tensors is verified by `run`, too. Where files may be read again, it is read again then, into the live tensors
    themselves, and verified again: the state lies in memory once, and no new memory has to be cleared for it. Elsewhere a copy waits.

    Args:
        again: whether files may be read twice; see `Storage.held`.

    Attributes:
        rank: this process's.
        strict: whether what is missing or left over is an error.
        skipped: what was passed over, in words, where `strict` is off.
        trials: made before anything that cannot fail, and undone on all ranks where one of them fails on one.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        manifest: Manifest,
        rank: int = 0,
        strict: bool = True,
        again: bool = False,
    ) -> None:
        self.manifest, self.rank, self.strict = manifest, rank, strict
        self.skipped: list[str] = []
        self.trials: list[Trial] = []
        self._storage, self._folder, self._again = storage, folder, again
        self._files: dict[str, SourceFile] = {}
        self._tick: Tick = nothing
        self._wanted: list[Want] = []
        self._live: list[Want] = []
        self._asked: set[str] = set()
        self._masters: dict[str, str] | None = None

    def __contains__(self, name: str) -> bool:
        self._asked.add(name)
        return name in self.manifest.states

    def named(self, name: str, own: bool = False) -> str:
        """What `name` is kept under; with `own`, by the rank of the same number, counted round where fewer ranks wrote."""
        return f"ranks/{self.rank % self.manifest.world_size:05d}/{name}" if own else name

    def state(
        self,
        name: str,
        own: bool = False,
        tensor: Callable[[str], Any] | None = None,
        within: Sequence[str] = (),
    ) -> Any:
        """The tree kept under `name`, its tensors as `tensor` makes them of their full names (whole ones, on the CPU).

        Args:
            own: what this rank alone keeps.
            within: keys that lead to a part of the tree, which is made instead.
        """
        name = f"ranks/{self.rank:05d}/{name}" if own else name
        if name not in self:
            raise CheckpointError(f"the checkpoint has no {name}")
        tree = self.manifest.states[name]
        for key in within:
            tree = tree[key]
        return unpack(tree, tensor or self.whole)

    def left(self) -> list[str]:
        """Names of what is in the checkpoint and nobody asked for, beside what is a rank's own; without the parts of each."""

        def known(name: str) -> bool:
            words = name.split("/")
            above = ["/".join(words[:n]) for n in range(1, len(words))]
            return name in self._asked or any(n in self._asked or n in self.manifest.states for n in above)

        return sorted(
            name for name in self.manifest.states if not name.startswith("ranks/") and not known(name)
        )

    def stored(self, name: str) -> Stored:
        """What there is of a tensor, by its full name or another one that it has."""
        return self.manifest.tensors[self.manifest.aliases.get(name, name)]

    def master(self, name: str) -> str | None:
        """The fp32 master that an optimizer kept of a parameter: both by their full names."""
        if self._masters is None:
            kept = [state for state in self.manifest.states if state.endswith("/masters")]
            self._masters = {
                k: v for state in kept for k, v in unpack(self.manifest.states[state], str).items()
            }
        return self._masters.get(self.manifest.aliases.get(name, name))

    def whole(self, name: str) -> Tensor:
        return self.part(name, whole(self.stored(name).shape))

    def part(self, name: str, box: Box) -> Tensor:
        """A new CPU tensor of the shape of `box`, filled by `run`."""
        tensor = torch.empty(box.shape, dtype=self.stored(name).dtype)
        self.fill(name, box, tensor)
        return tensor

    def fill(self, name: str, box: Box, tensor: Tensor) -> None:
        """Have `run` fill `tensor`, which has the shape of `box` and is nothing live."""
        self._wanted.append(Want(self.stored(name), box, tensor))

    def overwriting(self, parts: Iterable[tuple[str, Box, Tensor]]) -> Callable[[], None]:
        """What fills these live tensors, of the shapes of their boxes, after `run`. It fails where a file can no longer be read."""
        wants = [Want(self.stored(name), *once(box, live)) for name, box, live in parts]
        if self._again:
            self._live += wants
            return lambda: self._refill(wants)
        copies = [replace(w, into=torch.empty(w.box.shape, dtype=w.stored.dtype)) for w in wants]
        self._wanted += copies

        def put() -> None:
            with torch.no_grad():
                for want, copy in zip(wants, copies):
                    want.into.copy_(copy.into)

        return put

    def complain(self, words: str) -> None:
        """Something does not fit: an error, or noted where that is allowed."""
        if self.strict:
            raise CheckpointError(f"{words}; strict=False loads what fits")
        self.skipped.append(words)

    def run(self, tick: Tick = nothing) -> None:
        """Fill all that was asked for, and verify what live tensors shall take.

        Raises:
            CheckpointError: bytes that are missing, or not what was written.
        """
        needed = {
            p.file for w in [*self._wanted, *self._live] for p in w.stored.pieces if overlap(p.box, w.box)
        }
        preflight(self._storage, self._folder, self.manifest, sorted(needed))
        self._tick = tick
        self._files = {
            name: SourceFile(self._storage, f"{self._folder}/{name}", record.size, record.checksums)
            for name, record in self.manifest.files.items()
        }
        expect(tick, sum(want.into.nbytes for want in [*self._wanted, *self._live, *self._live]))
        stream(self._files, self._wanted, tick)
        known = blocks_of(self._wanted)
        for name, numbers in blocks_of(self._live).items():
            if left := sorted(numbers - known.get(name, set())):
                file = self._files[name]
                self._storage.verify(file.name, file.size, file.checksums or (), tick, left)
        self._wanted.clear()
        self._live.clear()

    def _refill(self, wants: Sequence[Want]) -> None:
        try:
            stream(self._files, wants, self._tick)
        finally:
            for want in wants:
                torch.autograd.graph.increment_version(
                    want.into
                )  # memory was written to past autograd; fp32 masters look here


class Kept(Protocol):
    """One live thing that a checkpoint keeps."""

    def bring(self, into: Snapshot) -> None:
        """Add its state to a checkpoint in the making."""
        ...

    def take(self, source: Reading) -> Callable[[], None]:
        """Ask for its state, and check it as far as it is known; what is returned puts it in place, once all is read.

        Nothing live changes before that is called, and it fails only where `Reading.overwriting` does.

        Raises:
            CheckpointError: the state does not fit.
        """
        ...
