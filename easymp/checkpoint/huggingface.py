"""Files that other tools read: a live model as a folder in Hugging Face's form, and one object in one safetensors file.

A model's folder holds ``model.safetensors``, or shards beside ``model.safetensors.index.json``. An earlier model is replaced at once: one
file takes the place of another by a rename. Shards get names that no file has, and count when the index that names them is in place; what
they replace is removed after that. If a folder holds both a single file and an index, the single file counts, for us as for transformers
and Accelerate. So a crash at any moment leaves one whole model, the old one or the new one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed import World
from ..errors import CheckpointError, RefusedError
from ..settings import read_bytes
from ..strategies.meta_init import left_to_others
from ..training.wrapper import unwrap as unwrapped
from . import manifest
from .codec import dumps, encode_header, loads, nbytes, pack, unpack
from .folders import file_in, found_at, inside, open_storage, read_header
from .load import Want, plan, stream
from .manifest import Box, Piece, Shape, Stored, whole
from .save import Barrier
from .snapshot import encode_index, on_all
from .storage import Part, Progress, Storage, Tick, as_bytes, no_tick
from .weights import SINGLE, memory

SHARD = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
TEMPORARY = re.compile(r"\.model.*\.safetensors\.tmp")
TREE = "easymp"  # key of an object's structure in the metadata
LARGEST = 2**28  # bytes of JSON
OF_TORCH_SAVE = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

EACH = 2**28  # bytes of tensors from one word of rank 0 to the next

Bring = Callable[[str], Tensor | None]


class Item(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def bytes(self) -> int:
        return nbytes(self.dtype, self.shape) or 0


def cut(items: Sequence[Item], most: int) -> list[list[Item]]:
    """`items` in shards of at most `most` bytes, or of one larger tensor, as huggingface_hub's `split_torch_state_dict_into_shards`."""
    shards: list[list[Item]] = []
    current: list[Item] = []
    held = 0
    for item in items:
        if item.bytes > most:
            shards.append([item])
            continue
        if held + item.bytes > most:
            shards.append(current)
            current, held = [], 0
        current.append(item)
        held += item.bytes
    if current or not shards:
        shards.append(current)
    # Larger elements first, so that each tensor begins at a multiple of its element.
    return [sorted(shard, key=lambda item: -item.dtype.itemsize) for shard in shards]


def write_model(
    storage: Storage,
    folder: str,
    shards: Sequence[Sequence[Item]],
    bring: Bring,
    aliases: Mapping[str, str],
    tick: Tick = no_tick,
) -> None:
    """Write `shards` into `folder` of `storage`, made if it is missing, in place of an earlier model.

    `bring` gives the whole tensor of a name on the CPU, for each name in order. `aliases`, other names of tensors, go into the metadata.
    """
    there, place = set(storage.list(folder)), inside(storage.place, folder)
    if there & {manifest.MANIFEST, manifest.COMMIT}:
        raise CheckpointError(f"{place} is a checkpoint of save_state, which must stay: pass another folder")
    if not there:
        if storage.size(folder) is not None:
            raise CheckpointError(f"{place} is a file: pass a folder")
        try:
            storage.make(folder)
        except FileExistsError:
            pass  # an empty one
    for name in filter(TEMPORARY.fullmatch, there):  # of a save that did not end
        storage.remove(inside(folder, name))
    alone = len(shards) == 1 and (storage.renames or SINGLE not in there)
    names = [SINGLE] if alone else _free(len(shards), there)
    for name, shard in zip(names, shards):
        mine = [item.name for item in shard]
        noted = {other: of for other, of in aliases.items() if of in mine}
        header, slots = encode_header(shard, {"format": "pt", **noted})
        path = inside(folder, f".{name}.tmp" if storage.renames else name)
        storage.put(path, _parts(header, mine, bring), slots[-1].end if slots else len(header), tick)
    if storage.renames:
        storage.sync(folder)
        for name in names:
            storage.supplant(inside(folder, f".{name}.tmp"), inside(folder, name))
        storage.sync(folder)
    if not alone:
        files = {item.name: name for name, shard in zip(names, shards) for item in shard}
        total = sum(item.bytes for shard in shards for item in shard)
        storage.replace(inside(folder, manifest.INDEX), encode_index(files, total))
    outdated = [name for name in there if SHARD.fullmatch(name) and name not in names]
    for name in [*({manifest.INDEX} if alone else {SINGLE}) & there, *outdated]:
        storage.remove(inside(folder, name))
    storage.sync(folder)


def _free(size: int, taken: set[str]) -> list[str]:
    """The usual names of shards, with a number if files of these names are there."""
    stems = ("model" if number == 1 else f"model-{number}" for number in count(1))
    named = ([f"{stem}-{i:05d}-of-{size:05d}.safetensors" for i in range(1, size + 1)] for stem in stems)
    return next(names for names in named if not taken & set(names))


def _parts(header: bytes, names: Sequence[str], bring: Bring) -> Iterator[Part]:
    """The bytes of a file. No name is bound to a tensor, so that each can go when it is written."""
    yield header
    for name in names:
        yield as_bytes(bring(name))  # type: ignore[arg-type]  # rank 0 gets tensors


# -- whole tensors of a live model, one after the other on rank 0 -------------------------------------------------------


def get_state_dict(world: World, model: nn.Module, unwrap: bool) -> dict[str, Any]:
    """See `Accelerator.get_state_dict`."""
    world.settle()
    module = unwrapped(model, keep_torch_compile=not unwrap)
    state = module.state_dict(keep_vars=True)
    names = {name: manifest.canonical(name) if unwrap else name for name in state}
    if not _is_sharded(module, state):
        return {names[n]: v.detach() if isinstance(v, Tensor) else v for n, v in state.items()}
    first, aliases = _distinct(state)
    gathering = Gathering(world, first)
    gathered = {name: gathering.bring(name) for name in first}
    if world.rank:
        return {}
    gathered |= {name: gathered[of] for name, of in aliases.items()}
    return {names[name]: gathered.get(name, value) for name, value in state.items()}


def save_model(world: World, model: nn.Module, place: str, max_shard_size: int | str) -> None:
    """See `Accelerator.save_model`."""
    most = read_bytes(max_shard_size, "max_shard_size=")
    world.settle()
    module = unwrapped(model, keep_torch_compile=False)
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} in the state_dict of this {type(module).__name__} is a {type(value).__name__}, and files of weights hold "
                "tensors: save_state keeps it, or let get_extra_state return a tensor"
            )
    first, aliases = _distinct(state)
    tensors = {manifest.canonical(name): tensor for name, tensor in first.items()}
    others = {manifest.canonical(name): manifest.canonical(of) for name, of in aliases.items()}
    shards = cut([Item(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], most)

    def write(bring: Bring) -> str:
        try:
            with Progress(f"saving {place}", f"saved {place}") as tick:
                tick.expect(sum(item.bytes for shard in shards for item in shard))
                storage, name = open_storage(place), ""
                if storage.renames:  # the folder is made below the one above it
                    above, name = os.path.split(os.path.realpath(storage.place))
                    storage = open_storage(above)
                write_model(storage, name, shards, bring, others, tick)
        except (OSError, CheckpointError) as error:
            return f"{place}: the model was not saved ({error})"
        return ""

    if _is_sharded(module, state):
        said = hand_over(world, Gathering(world, tensors), shards, write)
    else:
        said = "" if world.rank else write(lambda name: manifest.on_host(tensors[name], name))
    if said:
        raise CheckpointError(said)


def _is_sharded(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether ranks hold different parts of the model; all ranks get the same answer."""
    return left_to_others(module) or any(hasattr(t, "to_local") for t in state.values())


def _distinct(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the distinct tensors by their first names, and map further names to these."""
    seen: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and seen.setdefault(id(value), name) != name:
            aliases[name] = seen[id(value)]
    return {name: state[name] for name in seen.values()}, aliases


class Spread(NamedTuple):
    """A tensor, and the first rank that holds each of its boxes."""

    dtype: torch.dtype
    shape: Shape
    holders: tuple[tuple[Box, int], ...]


class Gathering:
    """Gathers whole tensors on rank 0. All ranks make it together with the same names in the same order; `bring` is a collective."""

    def __init__(self, world: World, tensors: Mapping[str, Tensor]) -> None:
        self._world = world
        self._parts: dict[str, dict[Box, Tensor]] = {}
        kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}

        def boxes() -> Any:
            for name, place in zip(tensors, manifest.places_of(tensors.values())):
                self._parts[name] = {} if place is None else dict(place.parts)
            return kinds, {name: list(parts) for name, parts in self._parts.items()}

        everyones = on_all(world, boxes)
        if apart := [rank for rank, (theirs, _) in enumerate(everyones) if theirs != everyones[0][0]]:
            raise CheckpointError(f"rank {apart[0]} has other tensors than rank 0: all ranks pass one model")
        self._tensors: dict[str, Spread] = {}
        for name, (dtype, shape) in kinds.items():
            holders: dict[Box, int] = {}
            for rank, (_, held) in enumerate(everyones):
                for box in held[name]:
                    holders.setdefault(box, rank)
            if wrong := manifest.fault(shape, list(holders)):
                raise CheckpointError(f"{name}: the ranks do not have the whole of it: {wrong}")
            self._tensors[name] = Spread(dtype, shape, tuple(holders.items()))

    def bring(self, name: str) -> Tensor | None:
        """The whole tensor on rank 0, contiguous on the CPU (the live tensor itself if it is that already); None on other ranks."""
        spread, rank, parts = self._tensors[name], self._world.rank, self._parts[name]
        if rank == 0 and spread.holders == ((whole(spread.shape), 0),):
            return manifest.on_host(next(iter(parts.values())), name)
        complete = torch.empty(spread.shape, dtype=spread.dtype) if rank == 0 else None
        for box, holder in spread.holders:
            if rank == holder and complete is None:
                self._world.send(parts[box], 0)
            elif complete is not None:
                part = parts[box] if holder == 0 else self._world.receive(box.shape, spread.dtype, holder)
                complete[tuple(slice(o, o + n) for o, n in zip(*box))] = part
        return complete


def hand_over(
    world: World, gathering: Gathering, shards: Sequence[Sequence[Item]], write: Callable[[Bring], str]
) -> str:
    """Call `write` on rank 0 with a function that gathers the tensors of `shards` in order. All ranks call this, and get its result.

    Rank 0 may write for longer than a collective's timeout, so the others wait for its message in the store before they send. If `write`
    fails, the remaining tensors are still sent, and dropped.
    """
    turns: dict[str, str] = {}  # the first tensor of each file, and of each EACH bytes of it
    for shard in shards:
        held = EACH
        for item in shard:
            if held >= EACH:
                turns[item.name], held = f"turn/{len(turns)}", 0
            held += item.bytes
    waiting = iter([item.name for shard in shards for item in shard])
    with Barrier(world).start() as barrier:

        def bring(name: str) -> Tensor | None:
            if name in turns and world.rank == 0:
                barrier.put(turns[name], b"")
            elif name in turns:
                barrier.take(turns[name])
            return gathering.bring(name)

        if world.rank == 0:
            said = write(lambda name: bring(next(waiting)))
        for name in waiting:
            bring(name)
        if world.rank:
            said = barrier.take("end").decode()
            barrier.put(f"done/{world.rank}", b"")
        else:
            barrier.put("end", said.encode())
            barrier.gather("done", b"")
            barrier.forget(turns.values())
    return said


# -- one object in one file ---------------------------------------------------------------------------------------------


def save_tree(tree: Any, f: str | os.PathLike[str]) -> None:
    """See `Accelerator.save`."""
    place = os.fspath(f)
    if place.lower().endswith(OF_TORCH_SAVE):
        raise RefusedError(
            f"{place}: files of that name are read by torch.load, which can run code from them, and safetensors are written: call it "
            f"{os.path.splitext(place)[0]}.safetensors"
        )
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    named = isinstance(tree, Mapping) and bool(tree)
    if named and all(type(k) is str and isinstance(v, Tensor) for k, v in tree.items()):
        seen: dict[Any, str] = {}
        for name, tensor in tree.items():
            first = seen.setdefault(memory(tensor), name)
            if first == name:
                tensors[name] = tensor
            else:
                metadata[name] = first
    else:
        packed = dumps(pack(tree, "object", tensors))
        if place.endswith(".json"):
            if tensors:
                raise CheckpointError(
                    f"{place}: {next(iter(tensors))} is a tensor, which JSON has no form for: call it .safetensors"
                )
            _replace(place, [packed], len(packed))
            return
        metadata[TREE] = packed.decode()
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            raise CheckpointError(f"{name} is spread over ranks: save get_state_dict() or its full_tensor()")
    header, slots = encode_header([(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], metadata)
    held = [name for name, t in tensors.items() if t.numel()]
    parts = _parts(header, held, lambda name: manifest.on_host(tensors[name], name))
    _replace(place, parts, slots[-1].end if slots else len(header))


def load(f: str | os.PathLike[str]) -> Any:
    """Read a file of `Accelerator.save`, or the tensors of any safetensors file. No code in the file can run.

    Args:
        f: a path or URL.

    Returns:
        The saved object with its tensors on the CPU; of another safetensors file, the tensors by name.

    Raises:
        CheckpointError: it is neither, or cannot be read.

    Example:
        >>> Accelerator(cpu=True).save({"step": 3, "mean": torch.zeros(2)}, "run.safetensors")
        >>> load("run.safetensors")
        {'step': 3, 'mean': tensor([0., 0.])}
    """
    place = os.fspath(f)
    try:
        file = file_in(*found_at(place))
        if place.endswith(".json"):
            return unpack(loads(file.storage.get(file.name, LARGEST), place), _no_tensor)
        slots, metadata = read_header(file)
        tensors = {name: torch.empty(slot.shape, dtype=slot.dtype) for name, slot in slots.items()}
        wants = []
        for name, t in tensors.items():
            box = whole(t.shape)
            wants.append(Want(Stored(t.dtype, tuple(t.shape), (Piece(box, "", slots[name].begin),)), box, t))
        stream({"": file}, plan(wants))
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read ({error})") from error
    if TREE in metadata:
        return unpack(loads(metadata[TREE].encode(), place), tensors.__getitem__)
    aliases = {name: of for name, of in metadata.items() if name != "format" and of in tensors}
    return tensors | {name: tensors[of] for name, of in aliases.items()}


def _no_tensor(name: str) -> Any:
    raise CheckpointError(f"{name} is a tensor, and a file of JSON holds none: it was changed")


def _replace(place: str, parts: Any, size: int) -> None:
    storage, name = found_at(place)
    try:
        if not storage.renames:
            storage.replace(name, b"".join(parts))
            return
        fresh = f".{name}.tmp"
        storage.remove(fresh)
        storage.put(fresh, parts, size)
        storage.supplant(fresh, name)
        storage.sync()
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be written ({error})") from error
