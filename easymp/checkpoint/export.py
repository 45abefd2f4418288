"""Weights and objects for other programs: streams of whole weights, folders of models in Hugging Face's form, files.

Whole weights of a live model are gathered bucket by bucket. All ranks meet in the store before each bucket travels. So
they wait for a rank whose disk or server is slow as long as it lives, which a collective would not, and learn that a
rank has left.

An earlier model in a folder is replaced at once: one file by a rename; shards get names that no file has, and count
when the index that names them is in place; what they replace is removed after that. If a folder holds both a single
file and an index, the single file counts, as for transformers and Accelerate. So a crash at any moment leaves one whole
model.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import chain, count, islice, starmap
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from ..base.units import read_bytes
from ..distributed import World
from ..errors import CheckpointError, RefusedError, SettingError, nearest
from ..strategies.meta_init import left_to_others
from ..training.wrapper import unwrap as unwrapped
from . import torch_files
from .buffers import as_bytes, on_host
from .codec import TensorSpec, dumps, encode_header, encode_index, loads, pack, split_into_shards, unpack
from .folders import is_checkpoint, join, open_parent, open_storage, source_file
from .manifest import BLOCK, INDEX, Box, LocalChunks, canonical, full_box, local_chunks, view_of
from .progress import Progress, Tick, expect, ignore
from .ranks import Meeting, error_text, run_on_all
from .storage import Bytes, LocalStorage, read_small
from .weights import SINGLE, open_file, open_source, tied_names

LEFTOVER = re.compile(r"\.(new-)?model.*\.safetensors.*")  # of a save that did not end
SHARD = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
TREE = "easymp"  # key of an object's structure in the metadata
LARGEST = 2**28  # bytes of JSON
OF_TORCH_SAVE = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
BUCKET = 2**28  # bytes of tensors that are gathered together
AT_ONCE = 2**30  # bytes of tensors that `convert` reads together, at most
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
Path = str | os.PathLike[str]
Shards = Sequence[Sequence[TensorSpec]]
Pair = tuple[str, Tensor]
Bucket = deque[Pair]  # each tensor can go when it has been read


class WeightStream(Iterable[Pair]):
    """The whole weights of a model; see `Accelerator.weights`. Each pass over it reads the weights anew."""

    def __init__(self, world: World, model: nn.Module, dtype: torch.dtype | None, size: int) -> None:
        self._world, self._dtype, self._size = world, dtype, size
        self._module = unwrapped(model, keep_torch_compile=False)
        tensors_of(self._module)  # raises what every pass would

    def __iter__(self) -> Iterator[Pair]:
        with closing(self._buckets(None, lockstep=False)) as buckets:
            for bucket in buckets:
                yield from drain(bucket)

    def each_bucket(self, function: Callable[[list[Pair]], object], rank: int | None = None) -> None:
        """Call a function with each bucket, a list of (name, tensor), on all ranks or on one. All ranks call this.

        Args:
            function: called once a bucket; the other ranks wait for it. Its error is raised here, and ends the stream
                on all ranks.
            rank: the one rank that gets the tensors and calls `function`; None: every rank does.

        Raises:
            CheckpointError: as a loop over the stream, or `function` failed on another rank.
            SettingError: no such rank.

        Example:
            >>> server = {}
            >>> acc.weights(model, dtype=torch.bfloat16).each_bucket(server.update, rank=0)
            >>> server["weight"].dtype
            torch.bfloat16
        """
        if rank is not None and rank not in range(self._world.size):
            raise SettingError(f"rank={rank!r} is not one of the {self._world.size} ranks of this run")
        with closing(self._buckets(rank, lockstep=True)) as buckets:
            for bucket in buckets:
                if rank in (None, self._world.rank):
                    try:
                        function(list(bucket))
                    except Exception as error:
                        buckets.throw(error)

    def _buckets(self, target: int | None, lockstep: bool) -> Generator[Bucket]:
        """With `lockstep`, ranks that hold the whole model meet before each bucket, too."""
        self._world.settle()
        tensors, aliases = tensors_of(self._module)
        aliases_of: dict[str, list[str]] = {}
        for name, stored_name in aliases.items():
            aliases_of.setdefault(stored_name, []).append(name)
        if is_sharded(self._module, tensors):
            buckets = gather(self._world, tensors, self._size, self._dtype, target)
        else:
            buckets = self._local_buckets(tensors, target in (None, self._world.rank), lockstep)
        for bucket in buckets:
            pairs = Bucket((alias, t) for name, t in drain(bucket) for alias in (name, *aliases_of.get(name, ())))
            try:
                yield pairs
            except Exception as error:
                buckets.throw(error)
            pairs.clear()

    def _local_buckets(self, tensors: Mapping[str, Tensor], is_target: bool, lockstep: bool) -> Generator[Bucket]:
        if meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise CheckpointError(f"{meta[0]} is on the meta device: prepare the model, or load_weights into it")
        specs = specs_of(tensors, self._dtype)
        groups = group_names(specs.values(), self._size)

        def bucket_of(names: list[str]) -> Bucket:
            return Bucket((name, tensors[name].detach().to(specs[name].dtype)) for name in names if is_target)

        return in_lockstep(self._world, groups, bucket_of) if lockstep else (bucket_of(names) for names in groups)


def drain(bucket: Bucket) -> Iterator[Pair]:
    while bucket:
        yield bucket.popleft()


def tensors_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The distinct tensors of a `state_dict` by their first canonical names, and further names of these.

    Raises:
        CheckpointError: it holds something else.
    """
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} in the state_dict of this {type(module).__name__} is a {type(value).__name__}, and files "
                "and streams of weights hold tensors: save_state keeps it, or let get_extra_state return a tensor"
            )
    by_name = {canonical(name): tensor for name, tensor in state.items()}
    aliases = tied_names(by_name)
    return {name: tensor for name, tensor in by_name.items() if name not in aliases}, aliases


def is_sharded(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether ranks hold different parts of the model; all ranks get the same answer."""
    return left_to_others(module) or any(map(_is_dtensor, state.values()))


def specs_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, TensorSpec]:
    """The dtype in which each tensor travels, and its shape."""
    return {
        name: TensorSpec(name, dtype if dtype is not None and t.is_floating_point() else t.dtype, tuple(t.shape))
        for name, t in tensors.items()
    }


def group_names(specs: Iterable[TensorSpec], max_bytes: int) -> Iterator[list[str]]:
    """Names in order, in groups of at most `max_bytes`, or of one larger tensor."""
    names: list[str] = []
    total = 0
    for spec in specs:
        if names and total + spec.bytes > max_bytes:
            yield names
            names, total = [], 0
        names.append(spec.name)
        total += spec.bytes
    if names:
        yield names


def gather(
    world: World,
    tensors: Mapping[str, Tensor],
    size: int,
    dtype: torch.dtype | None = None,
    target: int | None = None,
    device: torch.device | None = None,
) -> Generator[Bucket]:
    """Gather whole tensors in buckets of `size` bytes. All ranks run it, with the same names in the same order.

    Args:
        dtype: floating-point tensors travel and arrive in it.
        target: the rank that gets the tensors; others get empty buckets. None: all ranks.
        device: where the tensors arrive; None: the run's.

    Raises:
        CheckpointError: the ranks' models differ, no rank has a tensor, or a rank has left. The reason of a rank that
            left is the error that was thrown into its generator.
    """
    specs = specs_of(tensors, dtype)
    shards: dict[str, LocalChunks] = {}  # that this rank sends to `target`

    def describe() -> tuple[int, dict[str, bool], dict[str, list[Box]]]:
        """A checksum of `specs`; the tensors on this rank, and whether each is a DTensor; the boxes of `shards`."""
        is_dtensor = {name: _is_dtensor(tensor) for name, tensor in tensors.items() if _is_held(tensor)}
        names = [name for name in is_dtensor if is_dtensor[name] and target is not None and _sends(tensors[name])]
        for name, chunks in zip(names, local_chunks(tensors[name] for name in names)):
            shards[name] = chunks or ()
        return crc32(repr(specs).encode()), is_dtensor, {n: [box for box, _ in chunks] for n, chunks in shards.items()}

    checksums, tensors_by_rank, boxes = zip(*run_on_all(world, describe))
    if mismatched := [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]:
        raise CheckpointError(f"rank {mismatched[0]} has other tensors than rank 0: all ranks pass one model")
    holders = {name: [rank for rank, names in enumerate(tensors_by_rank) if name in names] for name in tensors}
    if missing := [name for name, ranks in holders.items() if not ranks]:
        raise CheckpointError(f"{missing[0]}: the ranks do not have the whole of it: it is on the meta device")
    arrival = device or world.device

    def join_shards(names: list[str], target: int) -> dict[str, Tensor]:
        """Whole DTensors on the rank `target`, to which each rank sends its shards as one message."""
        is_target = world.rank == target
        wholes = {n: torch.empty(specs[n].shape, dtype=specs[n].dtype, device=arrival) for n in names if is_target}
        for rank, boxes_of_rank in enumerate(boxes):
            contents = [(name, box) for name in names for box in boxes_of_rank.get(name, ())]
            sizes = [box.numel * specs[name].dtype.itemsize for name, box in contents]
            if not sum(sizes) or world.rank not in (rank, target):
                continue
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=world.device)
            if world.rank == rank:
                views = [view.to(specs[name].dtype) for name in dict(contents) for _, view in shards[name]]
                flat = torch.cat([view.resolve_conj().resolve_neg().flatten().view(torch.uint8) for view in views])
            flat = world.transfer(flat.to(world.device), rank, target)
            if is_target:
                for (name, box), chunk in zip(contents, flat.split(sizes)):
                    region = view_of(wholes[name], full_box(specs[name].shape), box)
                    region.copy_(chunk.clone().view(region.dtype).view(region.shape))  # a copy is aligned for its dtype
        return wholes

    def bucket_of(names: list[str]) -> Bucket:
        bucket, sent = Bucket(), [name for name in names if any(name in boxes_of_rank for boxes_of_rank in boxes)]
        joined = {} if target is None else join_shards(sent, target)
        for name in names:
            if name not in sent:
                is_dtensor = tensors_by_rank[holders[name][0]][name]
                tensor = _gather_tensor(world, tensors[name], specs[name], holders[name], is_dtensor, target)
                joined[name] = tensor.to(arrival) if target in (None, world.rank) else tensor
            if target in (None, world.rank):
                bucket.append((name, joined.pop(name)))
        return bucket

    yield from in_lockstep(world, group_names(specs.values(), size), bucket_of)


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # without the import of DTensor, which takes long


def _is_held(tensor: Any) -> bool:
    return not tensor.is_meta and (not _is_dtensor(tensor) or tensor.device_mesh.get_coordinate() is not None)


def _sends(tensor: Any) -> bool:
    """Whether this rank sends its shard: no rank before it has the same one, and none has summands of it."""
    coordinates = zip(tensor.device_mesh.get_coordinate(), tensor.placements)
    return not any(placement.is_partial() or (i and placement.is_replicate()) for i, placement in coordinates)


def _gather_tensor(
    world: World, tensor: Any, spec: TensorSpec, holders: list[int], is_dtensor: bool, target: int | None
) -> Tensor:
    """The whole tensor; the first holder's if values may differ. With `target`, other ranks get undefined values."""
    if world.rank in holders:
        tensor = tensor.detach().to(spec.dtype)
        if is_dtensor:
            tensor = tensor.to(world.device).full_tensor()
    complete = holders if is_dtensor else holders[:1]
    if target in complete or len(complete) == world.size:
        return tensor  # type: ignore[no-any-return]
    if world.rank != holders[0]:
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
    return world.broadcast(tensor.resolve_conj().resolve_neg().to(world.device), holders[0])


def in_lockstep(
    world: World, groups: Iterable[list[str]], bucket_of: Callable[[list[str]], Bucket]
) -> Generator[Bucket]:
    """Yield a bucket of weights for each group of names. All ranks meet after each; if one leaves, all raise."""
    with Meeting(world) as meeting:
        for number, names in enumerate(groups):
            if number:
                meeting.run(lambda: None)
            try:
                bucket = bucket_of(names)
                yield bucket
                bucket.clear()
            except BaseException as error:
                reason = "left the loop over the weights early, which all ranks run to its end"
                if not isinstance(error, GeneratorExit):
                    reason = error_text(error) if isinstance(error, Exception) else type(error).__name__
                meeting.leave(reason)
                raise
        meeting.run(lambda: None)


def get_state_dict(world: World, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
    world.settle()
    module = unwrapped(model, keep_torch_compile=not unwrap)
    state = module.state_dict(keep_vars=True)
    names = {name: canonical(name) if unwrap else name for name in state}
    if not is_sharded(module, state):
        return {names[n]: v.detach() if isinstance(v, Tensor) else v for n, v in state.items()}
    aliases = tied_names(state)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in aliases}
    gathered: dict[str, Any] = gather_on_host(world, tensors)
    if world.rank:
        return {}
    gathered |= {name: gathered[target] for name, target in aliases.items()}
    return {names[name]: gathered.get(name, value) for name, value in state.items()}


def gather_on_host(world: World, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors in rank 0's memory; {} on other ranks. All ranks call it."""
    gathered: dict[str, Tensor] = {}
    for bucket in gather(world, tensors, BUCKET, target=0, device=torch.device("cpu")):
        gathered |= {name: on_host(tensor, name) for name, tensor in bucket}
    return gathered


def save_model(world: World, model: nn.Module, path: str, max_shard_size: int | str) -> None:
    max_bytes = read_bytes(max_shard_size, "max_shard_size=")
    world.settle()
    module = unwrapped(model, keep_torch_compile=False)
    tensors, aliases = tensors_of(module)
    shards = split_into_shards([*specs_of(tensors).values()], max_bytes)
    ordered = {spec.name: tensors[spec.name] for shard in shards for spec in shard}
    total = sum(spec.bytes for shard in shards for spec in shard)

    def write(pairs: Iterable[tuple[str, Tensor]]) -> None:
        with Progress(f"saving {path}", f"saved {path}") as tick:
            tick.total = total
            write_model(path, shards, starmap(lambda name, tensor: on_host(tensor, name), pairs), aliases, tick)

    try:
        if is_sharded(module, tensors):
            buckets = gather(world, ordered, BUCKET, target=0, device=torch.device("cpu"))
            first = next(buckets, Bucket())  # all ranks begin, also where the write fails at once
            try:
                if world.rank == 0:
                    write(chain.from_iterable(map(drain, chain([first], buckets))))
            except (OSError, CheckpointError) as error:
                buckets.throw(error)  # the other ranks learn of it
            for _ in buckets:  # the ranks meet until all is written
                pass
        elif world.rank == 0:
            write(ordered.items())
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{path}: the model was not saved: {error}") from error


def write_model(
    path: str, shards: Shards, tensors: Iterator[Tensor], aliases: Mapping[str, str], tick: Tick = ignore
) -> None:
    """Write whole tensors on the CPU, in the order of the shards, in the place of an earlier model in the folder."""
    storage, name = open_storage(path), ""
    if isinstance(storage, LocalStorage):
        storage, name = open_parent(path)  # where the folder can be made
    existing = set(storage.list(name))
    folder = join(storage.root, name)
    if is_checkpoint(existing):
        raise CheckpointError(f"{folder} is a checkpoint of save_state, which must stay: pass another folder")
    if not existing and storage.size(name) is not None:
        raise CheckpointError(f"{folder} is a file: pass a folder")
    if not existing:
        with suppress(FileExistsError):  # an empty one
            storage.make(name)
    in_one_file = len(shards) == 1 and (storage.renames or SINGLE not in existing)
    files = [SINGLE]
    if not in_one_file:  # under names that no file has
        stems = ("model" if number == 1 else f"model-{number}" for number in count(1))
        numbers = [f"{i:05d}-of-{len(shards):05d}" for i in range(1, len(shards) + 1)]
        candidates = ([f"{stem}-{number}.safetensors" for number in numbers] for stem in stems)
        files = next(names for names in candidates if not existing & {*names})
    for file, shard in zip(files, shards):
        names = {spec.name for spec in shard}
        own_aliases = {alias: target for alias, target in aliases.items() if target in names}
        header, slots = encode_header(shard, {"format": "pt", **own_aliases})
        parts: Iterable[Bytes] = chain([header], map(as_bytes, islice(tensors, len(shard))))
        write = storage.replace if in_one_file else storage.put
        write(join(name, file), parts, slots[-1].end if slots else len(header), tick)
    storage.sync(name)
    outdated = {file for file in existing if SHARD.fullmatch(file) or LEFTOVER.fullmatch(file)} - {*files}
    if in_one_file:
        outdated |= {INDEX} & existing
    else:
        file_of = {spec.name: file for file, shard in zip(files, shards) for spec in shard}
        index = encode_index(file_of, sum(spec.bytes for shard in shards for spec in shard))
        storage.replace(join(name, INDEX), [index], len(index))
        outdated |= {SINGLE} & existing
    for file in sorted(outdated):
        storage.remove(join(name, file))
    storage.sync(name)


def save_tree(tree: Any, f: Path) -> None:
    path = os.fspath(f)
    if path.lower().endswith(OF_TORCH_SAVE):
        raise RefusedError(
            f"{path}: files of that name are read by torch.load, which can run code from them, and safetensors are "
            f"written: call it {os.path.splitext(path)[0]}.safetensors"
        )
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    if isinstance(tree, Mapping) and tree and all(type(k) is str and isinstance(v, Tensor) for k, v in tree.items()):
        aliases = tied_names(tree)
        tensors = {name: tensor for name, tensor in tree.items() if name not in aliases}
        metadata |= aliases
    else:
        packed = dumps(pack(tree, "object", tensors))
        if path.endswith(".json"):
            if tensors:
                raise CheckpointError(
                    f"{path}: {next(iter(tensors))} is a tensor, which JSON has no form for: call it .safetensors"
                )
            _replace(path, [packed], len(packed))
            return
        metadata[TREE] = packed.decode()
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            raise CheckpointError(f"{name} is spread over ranks: save dict(acc.weights(model)), or its full_tensor()")
    header, slots = encode_header([(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], metadata)
    contents = (as_bytes(on_host(tensor, name)) for name, tensor in tensors.items() if tensor.numel())
    _replace(path, chain([header], contents), slots[-1].end if slots else len(header))


def _replace(path: str, parts: Iterable[Bytes], size: int) -> None:
    storage, name = open_parent(path)
    try:
        storage.replace(name, parts, size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error


def load(f: Path) -> Any:
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
    path = os.fspath(f)
    try:
        if path.endswith(".json"):
            file = source_file(*open_parent(path))
            return unpack(loads(read_small(file.storage, file.name, LARGEST), path), _no_tensor)
        source = open_file(path, *open_parent(path))
        tensors = source.read_whole()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if TREE in source.metadata:
        return unpack(loads(source.metadata[TREE].encode(), path), tensors.__getitem__)
    return tensors


def _no_tensor(name: str) -> Any:
    raise CheckpointError(f"{name} is a tensor, and a file of JSON holds none: it was changed")


def write_object(obj: Any, f: Path) -> None:
    """Write safetensors or JSON if the name ends so, else a file that ``torch.load(weights_only=True)`` reads."""
    write = save_tree if os.fspath(f).endswith((".safetensors", ".json")) else torch_files.write
    write(obj, f)


def read_object(f: Path) -> Any:
    """Read a file of `write_object`; no code in it can run."""
    if os.fspath(f).endswith((".safetensors", ".json")):
        return load(f)
    try:
        return torch_files.read(f)
    except Exception as error:
        raise torch_files.unreadable(f, error) from error


# No process group and no model are needed. Memory holds the largest tensor and the bytes being read, not the model.


def convert(
    place: Path,
    out: Path,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    model: str = "model",
    trust: bool = False,
    tick: Tick = ignore,
) -> None:
    """Write the weights at `place` to `out`, both paths or URLs, as ``model.safetensors`` or as shards with an index.

    Names lose the prefixes of wrappers (``module.``, ``_orig_mod.``). Files of torch.save are mapped into memory if
    their format allows it.

    Args:
        place: a ``.safetensors`` file, an ``.index.json``, a Hugging Face folder, a checkpoint of easymp, or with
            `trust` a file of torch.save (``.bin``, ``.pt``, ``.pth``, ``.ckpt``) or a folder with
            ``pytorch_model.bin``, in one file or in shards.
        dtype: "fp32", "bf16", "fp16" or "fp64", to which floating-point tensors of at least 16 bits are rounded; None:
            as they are.
        max_shard_size: of a file, in bytes or as "5GB"; a larger tensor gets a file of its own.
        model: the model's name in a checkpoint of easymp: "model", or "model_1" and so on.
        trust: read files of torch.save by torch's reader for plain data. It runs none of their code, but is not made to
            withstand every attack.
        tick: called with the number of bytes read since the last call.

    Raises:
        CheckpointError: no weights are there, they are damaged, two of them have one name without wrappers, or a value
            is too large for `dtype`; or `out` is a checkpoint, or `place` itself. An earlier model at `out` stays
            whole.
        SettingError: an unknown dtype, or a size that is not one.
        OSError: `out` cannot be written.
    """
    max_bytes = read_bytes(max_shard_size, "max_shard_size=")
    if dtype is not None and dtype not in DTYPES:
        raise SettingError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}{nearest(str(dtype), DTYPES)}")
    source_path, target_path = os.fspath(place).rstrip("/"), os.fspath(out).rstrip("/")
    if source_path == target_path or (
        os.path.exists(source_path) and os.path.exists(target_path) and os.path.samefile(source_path, target_path)
    ):
        raise CheckpointError(f"{os.fspath(place)} would be replaced while it is read: pass another folder")
    if torch_files.is_torch_save(source_path) and not trust:
        raise CheckpointError(
            f"{source_path} is of torch.save, a format that can hold code: if you trust its writer, say so "
            "(trust=True, or --trust); it is then read by torch's reader for plain data, which runs none"
        )
    source = open_source(source_path, model, trust).without_wrappers()
    new_dtype = DTYPES.get(dtype or "")

    def rounded(dtype: torch.dtype) -> torch.dtype:
        # 8-bit floats stay: they come with scales of their own, which rounding would not know.
        return new_dtype if new_dtype is not None and dtype.is_floating_point and dtype.itemsize > 1 else dtype

    def convert_tensor(name: str, tensor: Tensor) -> Tensor:
        tick(tensor.nbytes)
        converted = tensor.to(rounded(tensor.dtype))
        if converted.dtype != tensor.dtype and torch.isfinite(converted).sum() != torch.isfinite(tensor).sum():
            largest = f"{float(tensor.abs().max()):.3g}"
            raise CheckpointError(
                f"{name} has values up to {largest}, too large for {new_dtype}: convert to bf16 or fp32"
            )
        return converted.contiguous()

    specs = [TensorSpec(name, rounded(stored.dtype), stored.shape) for name, stored in source.tensors.items()]
    shards = split_into_shards(specs, max_bytes)
    expect(tick, sum(stored.bytes for stored in source.tensors.values()))
    stored_specs = (spec._replace(dtype=source.tensors[spec.name].dtype) for shard in shards for spec in shard)
    max_bytes_read = min(max(len(source.files), 4) * BLOCK, AT_ONCE)  # about a block of each file, verified whole
    groups = group_names(stored_specs, max_bytes_read)
    pairs = (pair for names in groups for pair in drain(Bucket(source.read(names).items())))
    write_model(target_path, shards, starmap(convert_tensor, pairs), source.aliases)


def read_weights(place: Path, model: str = "model") -> dict[str, Tensor]:
    """All weights at `place`, whole and in host memory, by name; tied ones share memory. See `convert`."""
    return open_source(place, model).without_wrappers().read_whole()
