"""The first two stages of a save: collect the state of all ranks, and plan which rank writes which bytes.

Every rank collects its state: tensors by name and chunk, and JSON. All ranks compute the same plan from the lists of all ranks: the
files, with the place of every chunk in them. So ranks only have to exchange checksums afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..distributed import World
from ..errors import CheckpointError, EasympError, WorldError
from ..logging import get_logger
from .codec import PAGE, encode_header, pack
from .manifest import Box, Piece, Shape, Stored, fault, places_of, whole
from .storage import Part, aligned, as_bytes, copy, is_plain, spread

T = TypeVar("T")
logger = get_logger(__name__)
STOPPED = "stopped, as another rank failed"
CHUNK = 2**22  # bytes copied at a time of a tensor on a device, or with gaps
LARGE = 2**25  # bytes that one thread copies at a time
SMALL = 2**18  # bytes of a tensor that is not worth handing to another thread

# -- collect ----------------------------------------------------------------------------------------------------------


class Kept(Protocol):
    """A live object whose state checkpoints keep."""

    def collect(self, into: Snapshot) -> None:
        """Add its state to a snapshot."""
        ...

    def restore(self, source: Any) -> Callable[[], None]:
        """Request the state from a `load.Reading` and check it; the returned function loads it. Nothing live changes before that."""
        ...


class Brought(NamedTuple):
    """A chunk of a tensor that a rank has; `differs`: ranks may have other values (buffers), and the first rank's are saved."""

    name: str
    dtype: torch.dtype
    shape: Shape
    box: Box
    differs: bool = False


class Snapshot:
    """This rank's state: live tensors by full name and box (`parts`, `brought`), Python state by name, aliases of tensors."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.parts: dict[tuple[str, Box], Tensor] = {}
        self.brought: list[Brought] = []
        self.states: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self._alike: dict[str, Collection[int] | None] = {}

    def add(self, name: str, value: Any, own: bool = False, alike: Collection[int] | None = None) -> None:
        """Keep the nested `value` under `name`; with `own`, for this rank alone. `alike`: ids of tensors equal on all ranks; None: all."""
        name = f"ranks/{self.rank:05d}/{name}" if own else name
        self.states[name], self._alike[name] = value, alike

    def close(self) -> None:
        """Pack everything that was added into JSON's types and chunks of tensors."""
        found: list[tuple[str, Tensor, bool]] = []
        for name, alike in self._alike.items():
            tensors: dict[str, Tensor] = {}
            self.states[name] = pack(self.states[name], name, tensors)
            found += [(path, t, alike is not None and id(t) not in alike) for path, t in tensors.items()]
        for (path, tensor, differs), place in zip(found, places_of(tensor for _, tensor, _ in found)):
            if place is None:
                continue
            parts = place.parts
            if not prod(place.shape):  # an empty tensor is stored, though no rank has a box with elements
                box = Box((0,) * len(place.shape), place.shape)
                parts = ((box, tensor.new_empty(place.shape, device="cpu")),)
            for box, part in parts:
                self.parts[path, box] = part
                self.brought.append(Brought(path, tensor.dtype, place.shape, box, differs))


# -- plan -------------------------------------------------------------------------------------------------------------


class FilePlan(NamedTuple):
    """A file that one rank writes: `header`, then the bytes of `contents` in their order."""

    name: str
    rank: int
    header: bytes
    contents: tuple[tuple[str, Box], ...]
    size: int


class Division(NamedTuple):
    """All files, and the place of each tensor in them."""

    files: tuple[FilePlan, ...]
    tensors: dict[str, Stored]


class Agreement(NamedTuple):
    """The plan of all ranks: this rank's chunks and aliases, all ranks' aliases, and who writes what."""

    brought: Sequence[Brought]
    given: Mapping[str, str]
    aliases: Mapping[str, str]
    division: Division


def agree(world: World, kept: Sequence[Kept], last: Agreement | None) -> tuple[Snapshot, Agreement]:
    """Collect the state of `kept` on all ranks, and make the plan, or take the `last` one if every rank has the same tensors."""
    snapshot = Snapshot(world.rank)

    def collect() -> None:
        for part in kept:
            part.collect(snapshot)
        snapshot.close()

    said = trouble(collect)
    same = last is not None and last.brought == snapshot.brought and last.given == snapshot.aliases
    try:
        together = world.gather_objects((said, same))
        if wrong := first([said for said, _ in together]):
            raise CheckpointError(f"the checkpoint was not begun: {wrong}")
        if last is None or not all(same for _, same in together):
            everyones = world.gather_objects((snapshot.brought, snapshot.aliases))
            aliases = {name: of for _, given in everyones for name, of in given.items()}
            division = divide([brought for brought, _ in everyones])
            last = Agreement(snapshot.brought, snapshot.aliases, aliases, division)
    except WorldError as error:
        raise CheckpointError(f"the ranks could not agree on a checkpoint: {error}") from error
    return snapshot, last


def group(name: str) -> str:
    """The first word of a tensor's full name, which names its file."""
    return name.partition("/")[0]


def key(name: str, box: Box, shape: Shape) -> str:
    """A tensor's name inside its file; the name of a chunk includes its box."""
    inside = name.partition("/")[2]
    return inside if box.shape == shape else f"{inside}{box}"


def divide(brought: Sequence[Sequence[Brought]]) -> Division:
    """The plan: a chunk of several ranks is written by the one with the least to write, or by the first if values may differ."""
    kinds: dict[str, tuple[torch.dtype, Shape]] = {}
    boxes: dict[str, list[Box]] = {}
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
            if (name, box) not in holders:
                boxes.setdefault(name, []).append(box)
            holders.setdefault((name, box), []).append(rank)
    for name, (_, shape) in kinds.items():
        if boxes[name] != [((0,) * len(shape), shape)] and (wrong := fault(shape, boxes[name])):
            raise CheckpointError(f"{name}: the ranks do not have the whole of it: {wrong}")
    contents: dict[tuple[str, int], list[tuple[str, Box]]] = {}
    for (name, box), rank in _writers(holders, kinds, led, len(brought)).items():
        # An empty box of a tensor with elements needs no place.
        if prod(box.shape) or not prod(kinds[name][1]):
            contents.setdefault((group(name), rank), []).append((name, box))
    files: list[FilePlan] = []
    pieces: dict[str, list[Piece]] = {name: [] for name in kinds}
    for word in dict.fromkeys(word for word, _ in contents):
        ranks = sorted(rank for one, rank in contents if one == word)
        for number, rank in enumerate(ranks, 1):
            # Wide types first, so that each tensor is aligned for its type.
            inside = sorted(contents[word, rank], key=lambda at: -kinds[at[0]][0].itemsize)
            name = f"{word}-{number:05d}-of-{len(ranks):05d}.safetensors"
            entries = [(key(n, box, kinds[n][1]), kinds[n][0], box.shape) for n, box in inside]
            header, slots = encode_header(entries, {"format": "pt"})
            for (n, box), slot in zip(inside, slots):
                pieces[n].append(Piece(box, name, slot.begin))
            files.append(FilePlan(name, rank, header, tuple(inside), slots[-1].end))
    tensors = {name: Stored(dtype, shape, tuple(pieces[name])) for name, (dtype, shape) in kinds.items()}
    return Division(tuple(files), tensors)


def _writers(
    holders: Mapping[tuple[str, Box], Sequence[int]],
    kinds: Mapping[str, tuple[torch.dtype, Shape]],
    led: Collection[str],
    ranks: int,
) -> dict[tuple[str, Box], int]:
    """The rank that writes each chunk."""
    sizes = {at: prod(at[1].shape) * kinds[at[0]][0].itemsize for at in holders}
    load, writer = [0] * ranks, dict.fromkeys(holders, 0)
    for at in sorted(holders, key=sizes.__getitem__, reverse=True):
        writer[at] = holders[at][0] if at[0] in led else min(holders[at], key=load.__getitem__)
        load[writer[at]] += sizes[at]
    return writer


def merged(one: Any, other: Any, name: str) -> Any:
    """Merge two ranks' states of one object: mappings are united, other values must be equal."""
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        both = dict(one)
        for word, value in other.items():
            both[word] = merged(one[word], value, f"{name}/{word}") if word in one else value
        return both
    raise CheckpointError(f"{name}: the ranks have different values, {one!r} and {other!r}, of one thing")


def index_of(tensors: Mapping[str, Stored]) -> bytes | None:
    """Hugging Face's index of the first model in a checkpoint's folder; None unless all its tensors are whole."""
    prefix = "model/"
    weights = {name.removeprefix(prefix): s for name, s in tensors.items() if name.startswith(prefix)}
    if not weights or any([piece.box for piece in s.pieces] != [whole(s.shape)] for s in weights.values()):
        return None
    files = {name: s.pieces[0].file for name, s in weights.items()}
    return encode_index(files, sum(s.bytes for s in weights.values()))


def encode_index(files: Mapping[str, str], total: int) -> bytes:
    """Hugging Face's index of shards: name of a tensor → its file; `total` is in bytes."""
    index = {"metadata": {"total_size": total}, "weight_map": files}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


# -- errors of ranks --------------------------------------------------------------------------------------------------


def trouble(act: Callable[[], Any]) -> str:
    """Run `act`; return its error in words, or "". This catches every error, since the other ranks must learn of it."""
    try:
        act()
    except Exception as error:
        return words_of(error)
    return ""


def words_of(error: Exception) -> str:
    said = str(error) or type(error).__name__
    return said if isinstance(error, (OSError, EasympError)) else f"{type(error).__name__}: {error}"


def first(said: Sequence[str]) -> str:
    """The errors of all ranks, each once, with the first rank that has it; "" if there are none."""
    causes = [words for words in said if words and words != STOPPED] or said
    ranks = {words: rank for rank, words in reversed(list(enumerate(said))) if words and words in causes}
    named = sorted((rank, words) for words, rank in ranks.items())
    return "; ".join(f"rank {rank}: {words}" if len(said) > 1 else words for rank, words in named)


def on_rank_0(world: World, act: Callable[[], T], begin: str = "") -> T:
    """Run `act` on rank 0, and return its result, or raise its error after the words `begin`, on all ranks."""
    found: list[Any] = [None]
    said = trouble(lambda: found.append(act())) if world.rank == 0 else ""
    said, result = world.broadcast_objects([said, found[-1]])
    if said:
        raise CheckpointError(f"{begin}{said}")
    return result  # type: ignore[no-any-return]


def on_all(world: World, act: Callable[[], T], begin: str = "") -> list[T]:
    """Run `act` on every rank; return all results, or raise all errors after the words `begin`, on all ranks."""
    found: list[Any] = [None]
    said = trouble(lambda: found.append(act()))
    everyones = world.gather_objects((said, found[-1]))
    if wrong := first([words for words, _ in everyones]):
        raise CheckpointError(f"{begin}{wrong}")
    return [result for _, result in everyones]


# -- bytes of files ---------------------------------------------------------------------------------------------------


def contents(plan: FilePlan, parts: Mapping[tuple[str, Box], Tensor]) -> Iterable[Part]:
    """Yield the bytes of a file. Plain tensors on the CPU are not copied; others are copied piece by piece."""
    tensors = [parts[name].detach() for name in plan.contents]
    if all(map(is_plain, tensors)):
        return [plan.header, *map(as_bytes, tensors)]
    pieces = (piece for tensor in tensors for piece in _pieces(tensor))
    return chain([plan.header], (as_bytes(p.cpu().resolve_conj().resolve_neg().contiguous()) for p in pieces))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Divide `tensor` into consecutive row-major parts: itself if its bytes are plain, else parts of at most CHUNK bytes."""
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


class Image:
    """Memory for a copy of a rank's files, which a thread writes while training continues. Saves reuse it."""

    def __init__(self) -> None:
        self.memory = aligned(0)
        self._pending: list[tuple[torch.cuda.Event, Sequence[Tensor]]] = []

    def take(
        self, plans: Sequence[FilePlan], parts: Mapping[tuple[str, Box], Tensor]
    ) -> dict[str, memoryview]:
        """Start to copy the files of `plans`. Returns their bytes, which are valid after `wait`.

        Plain threads copy large tensors on the CPU, as torch's own wait for each other at every tensor. Copies from a GPU run in the
        order of its current stream, so later work on it may change the tensors, and this process does not wait.
        """
        self._reserve(sum(-(-plan.size // PAGE) * PAGE for plan in plans))
        files, at = {}, 0
        large: list[tuple[memoryview, memoryview]] = []
        for plan in plans:
            image = self.memory[at : at + plan.size]
            bytes_ = files[plan.name] = as_bytes(image)
            begin = len(plan.header)
            bytes_[:begin] = plan.header
            for name in plan.contents:
                tensor = parts[name].detach()
                end = begin + tensor.nbytes
                if end - begin > SMALL and is_plain(tensor):
                    source = as_bytes(tensor)
                    steps = range(0, len(source), LARGE)
                    large += [(bytes_[begin + i : end][:LARGE], source[i : i + LARGE]) for i in steps]
                else:
                    _copy(image[begin:end], tensor)
                begin = end
            at += -(-plan.size // PAGE) * PAGE
        for _ in spread(lambda task: copy(*task), large, "copy"):
            pass
        there = [parts[name] for plan in plans for name in plan.contents if parts[name].is_cuda]
        for device in {tensor.device for tensor in there}:
            # Referenced until they are copied: some were made for this save only.
            self._pending.append((torch.cuda.current_stream(device).record_event(), there))
        return files

    def wait(self) -> None:
        """Until the copy is complete."""
        for event, _ in self._pending:
            event.synchronize()
        self._pending.clear()

    def _reserve(self, size: int) -> None:
        pinned = torch.cuda.is_available() and torch.cuda.is_initialized()
        if len(self.memory) < size or (size and pinned and not self.memory.is_pinned()):
            self.memory = aligned(0)  # the old one goes first
            logger.info("asynchronous checkpoints: %.2f GB on this rank for a copy of the state", size / 1e9)
            self.memory = aligned(size)


def _copy(into: Tensor, tensor: Tensor) -> None:
    """Copy the bytes of `tensor`, row-major. A copy from CUDA completes when its stream reaches it."""
    if not tensor.numel():
        return
    later = tensor.is_cuda  # other devices have no event to wait for
    if into.storage_offset() % tensor.itemsize == 0:
        into.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=later)
    else:
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        into.copy_(plain.view(-1).view(torch.uint8), non_blocking=later)
