"""What a rank brings to a checkpoint, and what it takes from one: the two ends between live objects and files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..distributed import World
from ..errors import CheckpointError, EasympError, WorldError
from .barrier import STOPPED
from .blocks import Part, as_bytes
from .codec import pack
from .header import encode
from .layout import Box, Shape, fault, place_of, whole
from .manifest import Piece, Stored


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


class Kept(Protocol):
    """One live thing that a checkpoint keeps."""

    def bring(self, into: Snapshot) -> None:
        """Add its state to a checkpoint in the making."""
        ...

    def take(self, source: Any) -> Callable[[], None]:
        """Ask for its state, and check it as far as it is known; what is returned puts it in place, once all is read.

        Nothing live changes before that is called, and it fails only where `Reading.overwriting` does.

        Raises:
            CheckpointError: the state does not fit.
        """
        ...


# -- Who writes what: every rank's boxes, each written once, in files whose every byte is known before the first is written.


class Brought(NamedTuple):
    """A box of a tensor that a rank has.

    `differs`: other ranks' values of it may be others, and the first rank's count: buffers, such as the statistics of a BatchNorm.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    box: Box
    differs: bool = False

    @property
    def bytes(self) -> int:
        return self.box.count * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """A file that one rank writes: `header`, then the bytes of `contents` in their order."""

    name: str
    rank: int
    header: bytes
    contents: tuple[tuple[str, Box], ...]
    size: int


@dataclass(frozen=True)
class Division:
    """All files, and where each tensor lies in them."""

    files: tuple[FilePlan, ...]
    tensors: dict[str, Stored]


def group(name: str) -> str:
    """Which file a tensor goes to: the first word of its full name."""
    return name.partition("/")[0]


def key(name: str, box: Box, shape: Shape) -> str:
    """A tensor's name inside of its file: pieces carry their box."""
    inside = name.partition("/")[2]
    return inside if box == whole(shape) else f"{inside}{box}"


def divide(brought: Sequence[Sequence[Brought]]) -> Division:
    """The plan for what each rank brought.

    What several ranks have is written by the one with the least to write, largest first; or by the first of them, where they may differ.

    Raises:
        CheckpointError: ranks that disagree on a tensor, or have only parts of it.
    """
    kinds: dict[str, tuple[torch.dtype, Shape]] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    led: set[str] = set()
    for rank, items in enumerate(brought):
        for name, dtype, shape, box, differs in items:
            if differs:
                led.add(name)
            known = kinds.setdefault(name, (dtype, shape))
            if known != (dtype, shape):
                raise CheckpointError(
                    f"{name}: {known[0]} of shape {known[1]} on one rank, {dtype} of shape {shape} on rank {rank}: all ranks must save the "
                    "same run"
                )
            holders.setdefault((name, box), []).append(rank)
    boxes: dict[str, list[Box]] = {}
    for name, box in holders:
        boxes.setdefault(name, []).append(box)
    for name, (_, shape) in kinds.items():
        if wrong := fault(shape, boxes[name]):
            raise CheckpointError(f"{name}: what the ranks have of it is not the whole: {wrong}")
    load = [0] * len(brought)
    writer: dict[tuple[str, Box], int] = {}
    order = sorted(holders, key=lambda at: -at[1].count * kinds[at[0]][0].itemsize)
    for at in order:
        rank = holders[at][0] if at[0] in led else min(holders[at], key=lambda r: load[r])
        writer[at] = rank
        load[rank] += at[1].count * kinds[at[0]][0].itemsize
    contents: dict[tuple[str, int], list[tuple[str, Box]]] = {}
    for at in holders:
        if (
            prod(kinds[at[0]][1]) == 0 or at[1].count
        ):  # an empty box of a tensor that is not empty needs no place
            contents.setdefault((group(at[0]), writer[at]), []).append(at)
    files: list[FilePlan] = []
    pieces: dict[str, list[Piece]] = {name: [] for name in kinds}
    for word in dict.fromkeys(g for g, _ in contents):
        ranks = sorted(rank for g, rank in contents if g == word)
        for number, rank in enumerate(ranks, 1):
            # Wide types first: each tensor then begins where its type may, and can be copied there as what it is.
            inside = tuple(sorted(contents[word, rank], key=lambda at: -kinds[at[0]][0].itemsize))
            name = f"{word}-{number:05d}-of-{len(ranks):05d}.safetensors"
            header, slots = encode(
                [(key(n, box, kinds[n][1]), kinds[n][0], box.shape) for n, box in inside], {"format": "pt"}
            )
            for (n, box), slot in zip(inside, slots):
                pieces[n].append(Piece(box, name, slot.begin))
            files.append(FilePlan(name, rank, header, inside, slots[-1].end))
    tensors = {name: Stored(dtype, shape, tuple(pieces[name])) for name, (dtype, shape) in kinds.items()}
    return Division(tuple(files), tensors)


# -- What all ranks bring to a save, and who of them writes what: agreed on while all of them are at one place.


@dataclass(frozen=True)
class Agreement:
    """
    Attributes:
        brought, given: this rank's part of the plan, and its other names of tensors.
        aliases: all ranks'.
        division: who writes what.
    """

    brought: Sequence[Brought]
    given: Mapping[str, str]
    aliases: Mapping[str, str]
    division: Division


@dataclass(frozen=True)
class Parts:
    """What this rank has to write of: live tensors, and Python state that is a copy."""

    tensors: Mapping[tuple[str, Box], Tensor]
    states: Mapping[str, Any]


def agree(world: World, kept: Sequence[Kept], last: Agreement | None) -> tuple[Parts, Agreement]:
    """Ask `kept` on each rank for its state, and divide the work, all ranks together.

    Where every rank brings the same tensors as the `last` time, what was agreed then is used again: the lists of all ranks can be long.

    Raises:
        CheckpointError: on every rank: one could not say its state, or the parts do not make a whole.
    """
    snapshot = Snapshot(world.rank)
    said = trouble(lambda: [k.bring(snapshot) for k in kept])
    same = last is not None and last.brought == snapshot.brought and last.given == snapshot.aliases
    try:
        together = world.gather_objects((said, same))
        if wrong := first([said for said, _ in together]):
            raise CheckpointError(f"the checkpoint was not begun: {wrong}")
        if last is None or not all(same for _, same in together):
            everyones = world.gather_objects((snapshot.brought, snapshot.aliases))
            aliases = {name: of for _, given in everyones for name, of in given.items()}
            last = Agreement(
                snapshot.brought, snapshot.aliases, aliases, divide([brought for brought, _ in everyones])
            )
    except WorldError as error:
        raise CheckpointError(f"the ranks could not agree on a checkpoint: {error}") from error
    return Parts(snapshot.parts, snapshot.states), last


def merged(one: Any, other: Any, name: str) -> Any:
    """Two ranks' states of one thing: mappings add up, all else must agree.

    Raises:
        CheckpointError: it does not.
    """
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        both = dict(one)
        for word, value in other.items():
            both[word] = merged(one[word], value, f"{name}/{word}") if word in one else value
        return both
    raise CheckpointError(
        f"{name}: the ranks have different values, {one!r} and {other!r}, of what should be one"
    )


def trouble(act: Callable[[], Any]) -> str:
    """What went wrong in `act`, in words; "" where nothing did. All errors, also those of a user's own objects: the others must hear."""
    try:
        act()
    except (OSError, EasympError) as error:
        return str(error) or type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def first(said: Sequence[str]) -> str:
    """What the ranks `said` went wrong, each thing once, with the rank that said it; "" where all is well."""
    causes = [words for words in said if words and words != STOPPED] or said
    ranks = {words: rank for rank, words in reversed(list(enumerate(said))) if words and words in causes}
    named = sorted((rank, words) for words, rank in ranks.items())
    return "; ".join(f"rank {rank}: {words}" if len(said) > 1 else words for rank, words in named)


# -- The bytes of a rank's file, from where its tensors are.


CHUNK = 2**22  # bytes copied at a time of what has no plain bytes here: on a device, or with gaps


def contents(plan: FilePlan, parts: Mapping[tuple[str, Box], Tensor]) -> Iterator[Part]:
    """Header and tensors; no copy of those that lie in memory as they will in the file, and others are copied as their turn comes."""
    yield plan.header
    for at in plan.contents:
        for tensor in _pieces(parts[at].detach()):
            yield as_bytes(tensor.cpu().resolve_conj().resolve_neg().contiguous())


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory is its value, row-major, on the CPU."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor` in parts that follow one another row-major: itself if it has plain bytes, else none of more than CHUNK bytes."""
    if not tensor.numel():
        return
    if is_plain(tensor) or tensor.numel() * tensor.itemsize <= CHUNK:
        yield tensor
        return
    row = tensor[0].numel() * tensor.itemsize
    if row > CHUNK:
        for part in tensor:
            yield from _pieces(part)
    else:
        yield from tensor.split(CHUNK // row)
