"""Files that other tools read: a live model as a folder in Hugging Face's form, and one object in one safetensors file.

A model's folder holds ``model.safetensors``, or shards beside ``model.safetensors.index.json``. An earlier model is replaced at once: one
file takes the place of another by a rename. Shards get names that no file has, and count when the index that names them is in place; what
they replace is removed after that. If a folder holds both a single file and an index, the single file counts, for us as for transformers
and Accelerate. So a crash at any moment leaves one whole model, the old one or the new one.
"""

from __future__ import annotations

import os
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed import World
from ..errors import CheckpointError, RefusedError
from ..settings import read_bytes
from ..training.wrapper import unwrap as unwrapped
from . import manifest
from .codec import dumps, encode_header, loads, nbytes, pack, unpack
from .folders import file_in, found_at, inside, open_storage, read_header
from .load import Want, plan, stream
from .manifest import Piece, Shape, Stored, whole
from .save import StoreWorld
from .snapshot import encode_index, on_all
from .storage import Part, Progress, Storage, Tick, as_bytes, no_tick
from .weight_stream import Bucket, distinct, drained, gather, is_sharded, tensors_of
from .weights import SINGLE, memory

SHARD = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
TEMPORARY = re.compile(r"\.model.*\.safetensors\.tmp")
TREE = "easymp"  # key of an object's structure in the metadata
LARGEST = 2**28  # bytes of JSON
OF_TORCH_SAVE = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

EACH = 2**28  # bytes of tensors that are gathered together

Bring = Callable[[str], Tensor]


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


class ModelFolder:
    """The folder `name` of `storage`, made if it is missing, in which shards take the place of an earlier model.

    `files`: the shards' names, in order. Where files can be renamed, `write` gives them temporary names.
    """

    def __init__(self, storage: Storage, name: str, count: int) -> None:
        self._storage, self._name = storage, name
        self._there, place = set(storage.list(name)), inside(storage.place, name)
        if self._there & {manifest.MANIFEST, manifest.COMMIT}:
            raise CheckpointError(
                f"{place} is a checkpoint of save_state, which must stay: pass another folder"
            )
        if not self._there:
            if storage.size(name) is not None:
                raise CheckpointError(f"{place} is a file: pass a folder")
            try:
                storage.make(name)
            except FileExistsError:
                pass  # an empty one
        for left in filter(TEMPORARY.fullmatch, self._there):  # of a save that did not end
            storage.remove(inside(name, left))
        self._alone = count == 1 and (storage.renames or SINGLE not in self._there)
        self.files = [SINGLE] if self._alone else _free(count, self._there)

    def supplant(self, shards: Sequence[Sequence[Item]]) -> None:
        """Put the written shards in the place of the earlier model."""
        storage, name = self._storage, self._name
        if storage.renames:
            storage.sync(name)
            for file in self.files:
                storage.supplant(inside(name, f".{file}.tmp"), inside(name, file))
            storage.sync(name)
        if not self._alone:
            files = {item.name: file for file, shard in zip(self.files, shards) for item in shard}
            total = sum(item.bytes for shard in shards for item in shard)
            storage.replace(inside(name, manifest.INDEX), encode_index(files, total))
        outdated = [file for file in self._there if SHARD.fullmatch(file) and file not in self.files]
        for file in [*({manifest.INDEX} if self._alone else {SINGLE}) & self._there, *outdated]:
            storage.remove(inside(name, file))
        storage.sync(name)


def write(
    storage: Storage,
    folder: str,
    file: str,
    shard: Sequence[Item],
    bring: Bring,
    aliases: Mapping[str, str],
    tick: Tick = no_tick,
) -> None:
    """Write one shard.

    `bring` gives the whole tensor of a name on the CPU, for each name in order. `aliases`, other names of tensors, go into the metadata.
    """
    names = [item.name for item in shard]
    noted = {other: of for other, of in aliases.items() if of in names}
    header, slots = encode_header(shard, {"format": "pt", **noted})
    path = inside(folder, f".{file}.tmp" if storage.renames else file)
    storage.put(path, _parts(header, names, bring), slots[-1].end if slots else len(header), tick)


def write_model(
    storage: Storage,
    folder: str,
    shards: Sequence[Sequence[Item]],
    bring: Bring,
    aliases: Mapping[str, str],
    tick: Tick = no_tick,
) -> None:
    """Write `shards` into `folder` of `storage` in place of an earlier model; see `write`."""
    made = ModelFolder(storage, folder, len(shards))
    for file, shard in zip(made.files, shards):
        write(storage, folder, file, shard, bring, aliases, tick)
    made.supplant(shards)


def _free(size: int, taken: set[str]) -> list[str]:
    """The usual names of shards, with a number if files of these names are there."""
    stems = ("model" if number == 1 else f"model-{number}" for number in count(1))
    named = ([f"{stem}-{i:05d}-of-{size:05d}.safetensors" for i in range(1, size + 1)] for stem in stems)
    return next(names for names in named if not taken & set(names))


def _parts(header: bytes, names: Sequence[str], bring: Bring) -> Iterator[Part]:
    """The bytes of a file. No name is bound to a tensor, so that each can go when it is written."""
    yield header
    for name in names:
        yield as_bytes(bring(name))


# -- whole tensors of a live model -------------------------------------------------------------------------------------


def get_state_dict(world: World, model: nn.Module, unwrap: bool) -> dict[str, Any]:
    """See `Accelerator.get_state_dict`."""
    world.settle()
    module = unwrapped(model, keep_torch_compile=not unwrap)
    state = module.state_dict(keep_vars=True)
    names = {name: manifest.canonical(name) if unwrap else name for name in state}
    if not is_sharded(module, state):
        return {names[n]: v.detach() if isinstance(v, Tensor) else v for n, v in state.items()}
    first, aliases = distinct(state)
    gathered: dict[str, Any] = gather_on_host(world, first)
    if world.rank:
        return {}
    gathered |= {name: gathered[of] for name, of in aliases.items()}
    return {names[name]: gathered.get(name, value) for name, value in state.items()}


def gather_on_host(world: World, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors in rank 0's memory; {} on other ranks. All ranks call it."""
    found: dict[str, Tensor] = {}
    for bucket in gather(world, tensors, EACH, target=0, device=torch.device("cpu")):
        found |= {name: manifest.on_host(tensor, name) for name, tensor in bucket}
    return found


def save_model(world: World, model: nn.Module, place: str, max_shard_size: int | str) -> None:
    """See `Accelerator.save_model`."""
    most = read_bytes(max_shard_size, "max_shard_size=")
    world.settle()
    module = unwrapped(model, keep_torch_compile=False)
    tensors, aliases = tensors_of(module)
    shards = cut([Item(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], most)

    def opened() -> tuple[Storage, str]:
        storage = open_storage(place)
        if not storage.renames:
            return storage, ""
        # The folder is made below the one above it.
        above, name = os.path.split(os.path.realpath(storage.place))
        return open_storage(above), name

    if is_sharded(module, tensors):
        with StoreWorld(world, 0) as there:
            _write_together(there, tensors, aliases, shards, opened, place)
    elif world.rank == 0:
        try:
            with Progress(f"saving {place}", f"saved {place}") as tick:
                tick.expect(sum(item.bytes for shard in shards for item in shard))
                write_model(
                    *opened(), shards, lambda name: manifest.on_host(tensors[name], name), aliases, tick
                )
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"{place}: the model was not saved ({error})") from error


def _write_together(
    there: StoreWorld,
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    shards: Sequence[Sequence[Item]],
    opened: Callable[[], tuple[Storage, str]],
    place: str,
) -> None:
    """Write a model that is spread over ranks: they take turns at the shards, and rank 0 puts all in place.

    They meet in the store, since a disk may take longer than a collective may. A rank that does not see rank 0's folder, on another
    machine's disk or in another process's memory, writes nothing.
    """
    not_saved = f"{place}: the model was not saved: "
    made: list[ModelFolder] = []

    def begin() -> tuple[list[str], str]:
        if there.rank:
            return [], ""
        storage, name = opened()
        made.append(ModelFolder(storage, name, len(shards)))
        token = f".model-{uuid.uuid4().hex}.safetensors.tmp"
        storage.put(inside(name, token), [b""], 0)
        return made[0].files, token

    files, token = on_all(there, begin, not_saved)[0]

    def sees() -> bool:
        storage, name = opened()
        return there.rank == 0 or token in storage.list(name)

    writers = [rank for rank, sees_it in enumerate(on_all(there, sees, not_saved)) if sees_it]
    mine: list[int] = []  # numbers of the shards that this rank writes
    order: list[tuple[int, int, str]] = []  # a rank's tensors by the bytes before them: all ranks have work
    targets: dict[str, int] = {}
    before = Counter[int]()
    for number, shard in enumerate(shards):
        rank = writers[number % len(writers)]
        if rank == there.rank:
            mine.append(number)
        for item in shard:
            order.append((before[rank], rank, item.name))
            before[rank] += item.bytes
            targets[item.name] = rank
    ordered = {name: tensors[name] for _, _, name in sorted(order, key=lambda entry: entry[:2])}
    buckets = gather(
        there, ordered, EACH * len(writers), target=targets.__getitem__, device=torch.device("cpu")
    )

    def write_mine() -> None:
        first = next(buckets, Bucket())  # all ranks begin, also where a write fails at once
        pairs = chain.from_iterable(map(drained, chain([first], buckets)))
        try:
            with Progress(f"saving {place}", f"saved {place}", shown=there.rank == 0) as tick:
                tick.expect(before[there.rank])
                for number in mine:
                    at = (*opened(), files[number], shards[number])
                    write(*at, lambda each: manifest.on_host(next(pairs)[1], each), aliases, tick)
        except (OSError, CheckpointError) as error:
            buckets.throw(error)
        for _ in pairs:  # of which this rank gets none, but the ranks meet until all have written
            pass

    try:
        write_mine()
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{not_saved}{error}") from error

    def end() -> None:
        if made:
            storage, name = opened()
            storage.remove(inside(name, token))
            made[0].supplant(shards)

    on_all(there, end, not_saved)


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
