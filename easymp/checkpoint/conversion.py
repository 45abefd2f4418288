"""Files of weights and checkpoints in another form: `convert` and `merge`.

No process group and no model are needed. Memory holds the largest tensor and the bytes being read, not the model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, SettingError, nearest
from ..settings import read_bytes
from .accelerate import read_state_dict
from .codec import loads
from .commit import begin
from .folders import Opened, copied, inside, open_checkpoint, open_storage, parted, write_manifest
from .huggingface import Item, cut, write_model
from .load import one_by_one, room
from .manifest import INDEX, FileRecord, whole
from .snapshot import Brought, divide, group, index_of
from .storage import Part, Tick, as_bytes, expect, no_tick
from .weights import open_source, without_wrappers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
OF_TORCH_SAVE = (".bin", ".pt", ".pth", ".ckpt")
WHOLE, SHARDS = "pytorch_model.bin", "pytorch_model.bin.index.json"
SHARD_SIZE = "5GB"
MODEL = "model"
Place = str | os.PathLike[str]


@dataclass(frozen=True)
class Weights:
    """Weights to be written: tensors by name, other names of them, and a function that reads them in an order."""

    items: list[Item]
    aliases: Mapping[str, str]
    read: Callable[[list[str]], Iterator[Tensor]]


def convert(
    place: Place,
    out: Place,
    dtype: str | None = None,
    max_shard_size: int | str = SHARD_SIZE,
    model: str = MODEL,
    trust: bool = False,
    tick: Tick = no_tick,
) -> None:
    """Write the weights at `place` to `out` as ``model.safetensors``, or as shards with an index; each is a path or a URL.

    Names lose the prefixes of wrappers (``module.``, ``_orig_mod.``). Files of torch.save are mapped into memory if their format allows it.

    Args:
        place: a ``.safetensors`` file, an ``.index.json``, a Hugging Face folder, a checkpoint of easymp, or with `trust` a file of
            torch.save (``.bin``, ``.pt``, ``.pth``, ``.ckpt``) or a folder with ``pytorch_model.bin``, in one file or in shards.
        dtype: "fp32", "bf16", "fp16" or "fp64", to which floating-point tensors of at least 16 bits are rounded; None: as they are.
        max_shard_size: of a file, in bytes or as "5GB"; a larger tensor gets a file of its own.
        model: the model's name in a checkpoint of easymp: "model", or "model_1" and so on.
        trust: read files of torch.save by torch's reader for plain data. It runs none of their code, but is not made to withstand every
            attack.
        tick: called with the number of bytes read since the last call.

    Raises:
        CheckpointError: no weights are there, they are damaged, two of them have one name without wrappers, or a value is too large for
            `dtype`; or `out` is a checkpoint, or `place` itself. An earlier model at `out` stays whole.
        SettingError: an unknown dtype, or a size that is not one.
        OSError: `out` cannot be written.
    """
    most = read_bytes(max_shard_size, "max_shard_size=")
    if dtype is not None and dtype not in DTYPES:
        raise SettingError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}{nearest(str(dtype), DTYPES)}")
    one, other = os.fspath(place).rstrip("/"), os.fspath(out).rstrip("/")
    if one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)):
        raise CheckpointError(f"{os.fspath(place)} would be replaced while it is read: pass another folder")
    if _is_of_torch_save(Path(place)):
        weights = _of_torch_save(Path(place), trust, tick)
    else:
        weights = _of_source(place, model, without_wrappers, tick)
    _write(weights, out, DTYPES.get(dtype or ""), most)


def _write(weights: Weights, out: Place, to: torch.dtype | None, most: int) -> None:
    def rounded(dtype: torch.dtype) -> torch.dtype:
        # 8-bit floats stay: they come with scales of their own, which rounding would not know.
        return to if to is not None and dtype.is_floating_point and dtype.itemsize > 1 else dtype

    root, name = parted(out)
    shards = cut([item._replace(dtype=rounded(item.dtype)) for item in weights.items], most)
    tensors = weights.read([item.name for shard in shards for item in shard])

    def bring(name: str) -> Tensor:
        tensor = next(tensors)
        done = tensor.to(rounded(tensor.dtype))
        if done.dtype != tensor.dtype and torch.isfinite(done).sum() != torch.isfinite(tensor).sum():
            most = f"{float(tensor.abs().max()):.3g}"
            raise CheckpointError(
                f"{name} has values up to {most}, too large for {to}: convert to bf16 or fp32"
            )
        return done.contiguous()

    write_model(open_storage(root), name, shards, bring, weights.aliases)


def _of_source(place: Place, model: str, plain: Callable[[str], str], tick: Tick) -> Weights:
    source = open_source(place, model)
    named = _renamed(source.tensors, source.place, plain)
    stored = {name: source.tensors[old] for name, old in named.items()}

    def read(names: list[str]) -> Iterator[Tensor]:
        expect(tick, sum(one.bytes for one in stored.values()))
        parts = ((stored[name], whole(stored[name].shape)) for name in names)
        return one_by_one(source.files, parts, room(len(source.files)), tick)

    aliases = {plain(name): plain(of) for name, of in source.aliases.items()}
    return Weights([Item(name, one.dtype, one.shape) for name, one in stored.items()], aliases, read)


def read_weights(place: Place, model: str = MODEL) -> dict[str, Tensor]:
    """All weights at `place`, whole and in host memory, by name; tied ones share memory. See `convert`."""
    weights = _of_source(place, model, without_wrappers, no_tick)
    names = [item.name for item in weights.items]
    state = {name: tensor.clone() for name, tensor in zip(names, weights.read(names))}
    return state | {name: state[of] for name, of in weights.aliases.items()}


def _renamed(names: Iterable[str], place: str, plain: Callable[[str], str]) -> dict[str, str]:
    """Name to write → name in the file."""
    found: dict[str, str] = {}
    for name in names:
        if (other := found.setdefault(plain(name), name)) != name:
            raise CheckpointError(f"{place}: {other} and {name} are both {plain(name)!r} without wrappers")
    return found


# -- files of torch.save -----------------------------------------------------------------------------------------------


def _is_of_torch_save(path: Path) -> bool:
    if path.is_file():
        return path.suffix in OF_TORCH_SAVE or path.name == SHARDS
    return any((path / name).is_file() for name in (WHOLE, SHARDS)) and not list(path.glob("*.safetensors"))


def _of_torch_save(path: Path, trust: bool, tick: Tick) -> Weights:
    if not trust:
        raise CheckpointError(
            f"{path} is of torch.save, a format that can hold code: if you trust its writer, say so (trust=True, or --trust); it is then "
            "read by torch's reader for plain data, which runs none"
        )
    tensors: dict[str, Tensor] = {}
    for file in _files(path):
        tensors.update(read_state_dict(file))
    first: dict[tuple[object, ...], str] = {}
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, old in _renamed(tensors, str(path), without_wrappers).items():
        t = tensors[old]
        spot = (t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride(), t.dtype)
        if t.numel() and first.setdefault(spot, name) != name:
            aliases[name] = first[spot]  # tied
        else:
            stored[name] = t

    def read(names: list[str]) -> Iterator[Tensor]:
        expect(tick, sum(t.nbytes for t in stored.values()))
        for name in names:
            yield stored[name]
            tick(stored[name].nbytes)

    return Weights([Item(name, t.dtype, tuple(t.shape)) for name, t in stored.items()], aliases, read)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        path = path / (WHOLE if (path / WHOLE).is_file() else SHARDS)
    if path.name != SHARDS:
        return [path]
    said = loads(path.read_bytes(), str(path))
    table = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(table, dict) or not all(
        isinstance(f, str) and Path(f).name == f for f in table.values()
    ):
        raise CheckpointError(f"{path}: not an index of weights: no weight_map from names to files")
    return [path.parent / file for file in dict.fromkeys(table.values())]


# -- from shards to whole tensors ---------------------------------------------------------------------------------------


def merge(
    folder: Place,
    out: Place,
    max_shard_size: int | str = SHARD_SIZE,
    all: bool = False,
    model: str = MODEL,
    tick: Tick = no_tick,
) -> None:
    """Write the checkpoint in `folder` to `out` with whole tensors; each is a path or a URL.

    Args:
        max_shard_size: of a file, in bytes or as "5GB"; a larger tensor gets a file of its own.
        all: write a complete checkpoint, for `load_state`, with the files of hooks; False: the weights alone, as `convert` does.
        model: the model's name: "model", or "model_1" and so on if several were prepared. Not with `all`.
        tick: called with the number of bytes read since the last call.

    Raises:
        CheckpointError: `folder` is not a committed checkpoint, has bytes that are not what was written, or `out` holds something else.
        SettingError: a size that is not one, or `model` with `all`.
        OSError: `out` cannot be written.
    """
    most = read_bytes(max_shard_size, "max_shard_size=")
    if all and model != MODEL:
        raise SettingError(f"model={model!r} is one model, and all=True asks for everything: leave one out")
    source = open_checkpoint(folder)
    if all:
        _merge_all(source, out, most, tick)
    else:
        _write(_of_source(folder, model, str, tick), out, None, most)


def _merge_all(source: Opened, out: Place, most: int, tick: Tick) -> None:
    root, name = parted(out)
    storage = open_storage(root)
    if (storage.place, name) == (source.storage.place, source.folder):
        raise CheckpointError(f"{source.place} would be replaced by itself: pass another folder")
    tensors = source.manifest.tensors
    shares = []  # whole tensors; in the plan each file is the share of one more rank
    for word in dict.fromkeys(map(group, tensors)):
        items = [Item(name, t.dtype, t.shape) for name, t in tensors.items() if group(name) == word]
        shares += [[Brought(*item, whole(item.shape)) for item in shard] for shard in cut(items, most)]
    division = divide(shares)
    wanted = [tensors[name] for plan in division.files for name, _ in plan.contents]
    expect(tick, sum(stored.bytes for stored in wanted))
    boxes = ((stored, whole(stored.shape)) for stored in wanted)
    parts = one_by_one(source.files, boxes, room(len(source.files)), tick)
    commit = begin(storage, name)

    def put(name: str, size: int, content: Iterable[Part]) -> FileRecord:
        return FileRecord(size, storage.put(inside(commit.folder, name), content, size))

    def content(header: bytes, count: int) -> Iterator[Part]:
        yield header
        for _ in range(count):
            yield as_bytes(next(parts))

    try:
        files = {
            plan.name: put(plan.name, plan.size, content(plan.header, len(plan.contents)))
            for plan in division.files
        }
        if (index := index_of(division.tensors)) is not None:
            files[INDEX] = put(INDEX, len(index), [index])
        extra = copied(source.extra, storage, commit.folder)
        changed = {"tensors": division.tensors, "files": files, "extra": extra}
        write_manifest(storage, commit.folder, dataclasses.replace(source.manifest, **changed))
        commit.finish()
    finally:
        commit.close()
