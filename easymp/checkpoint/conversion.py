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
from .accelerate_import import read_state_dict
from .blocks import Part, Tick, as_bytes, no_tick
from .codec import loads
from .commit import begin
from .folders import Opened, inside, open_checkpoint, open_storage, parted, write_manifest
from .hooks import copied
from .huggingface import Item, cut, index_of, order, write_model
from .layout import whole
from .manifest import INDEX, FileRecord, Stored
from .progress import expect
from .read_plan import one_by_one, room
from .snapshot import Brought, divide, group
from .source import Source, open_source, without_wrappers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
OF_TORCH_SAVE = (".bin", ".pt", ".pth", ".ckpt")
WHOLE, SHARDS = "pytorch_model.bin", "pytorch_model.bin.index.json"
SHARD_SIZE = "5GB"
MODEL = "model"


@dataclass(frozen=True)
class Weights:
    """Weights to be written: tensors by name, other names of them, and a function that brings them in an order."""

    items: dict[str, Item]
    aliases: Mapping[str, str]
    bring: Callable[[list[str], Tick], Iterator[Tensor]]


def convert(
    place: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: str | None = None,
    max_shard_size: int | str = SHARD_SIZE,
    model: str = MODEL,
    trust: bool = False,
    tick: Tick = no_tick,
) -> None:
    """Write the weights at `place` to `out` as ``model.safetensors``, or as shards with an index; each is a path or a URL.

    Names lose the prefixes of wrappers (``module.``, ``_orig_mod.``). Files of torch.save are mapped into memory if their format allows it.

    Args:
        place: a ``.safetensors`` file, an ``.index.json``, a Hugging Face folder, a checkpoint of ours, or with `trust` a file of
            torch.save (``.bin``, ``.pt``, ``.pth``, ``.ckpt``) or a folder with ``pytorch_model.bin``, in one file or in shards.
        dtype: "fp32", "bf16", "fp16" or "fp64", to which floating-point tensors of at least 16 bits are rounded; None: as they are.
        max_shard_size: of a file, in bytes or as "5GB"; a larger tensor gets a file of its own.
        model: whose weights, of a checkpoint of ours.
        trust: read files of torch.save by torch's reader for plain data. It runs none of their code, but is not made to withstand every
            attack.
        tick: called with the number of bytes read since the last call.

    Raises:
        CheckpointError: no weights are there, they are damaged, two of them have one name without wrappers, or a value is too large for
            `dtype`; or `out` is a checkpoint, or `place` itself. An earlier model at `out` stays whole.
        SettingError: no such dtype, or no size.
        OSError: `out` cannot be written.
    """
    most = read_bytes(max_shard_size, "max_shard_size=")
    if dtype is not None and dtype not in DTYPES:
        raise SettingError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}{nearest(str(dtype), DTYPES)}")
    to = DTYPES.get(dtype or "")
    one, other = os.fspath(place).rstrip("/"), os.fspath(out).rstrip("/")
    if one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)):
        raise CheckpointError(f"{os.fspath(place)} would be replaced while it is read: pass another folder")
    if _needs_trust(Path(place)):
        _write(_of_torch_save(Path(place), trust), out, to, most, tick)
    else:
        _write(_of_source(open_source(place, model), without_wrappers), out, to, most, tick)


def _write(
    weights: Weights, out: str | os.PathLike[str], to: torch.dtype | None, most: int, tick: Tick
) -> None:
    root, name = parted(out)
    shards = cut([Item(i.name, _rounded_dtype(i.dtype, to), i.shape) for i in weights.items.values()], most)
    tensors = weights.bring(order(shards), tick)

    def bring(name: str) -> Tensor:
        tensor = next(tensors)
        done = tensor.to(_rounded_dtype(tensor.dtype, to))
        if done.dtype != tensor.dtype and torch.isfinite(done).sum() != torch.isfinite(tensor).sum():
            raise CheckpointError(
                f"{name} has values up to {float(tensor.abs().max()):.3g}, too large for {to}: convert to bf16 or fp32"
            )
        return done.contiguous()

    write_model(open_storage(root), name, shards, bring, weights.aliases)


def _rounded_dtype(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    """8-bit floats stay: they come with scales of their own, which rounding would not know."""
    return to if to is not None and dtype.is_floating_point and dtype.itemsize > 1 else dtype


def _of_source(source: Source, plain: Callable[[str], str]) -> Weights:
    named = _renamed(source.tensors, source.place, plain)
    aliases = {plain(name): plain(of) for name, of in source.aliases.items()}
    items = {n: Item(n, source.tensors[old].dtype, source.tensors[old].shape) for n, old in named.items()}

    def bring(names: list[str], tick: Tick) -> Iterator[Tensor]:
        wanted = [source.tensors[named[name]] for name in names]
        expect(tick, sum(stored.bytes for stored in wanted))
        parts = ((stored, whole(stored.shape)) for stored in wanted)
        return one_by_one(source.files, parts, room(len(source.files)), tick)

    return Weights(items, aliases, bring)


def _renamed(names: Iterable[str], place: str, plain: Callable[[str], str]) -> dict[str, str]:
    """Name to write → name in the file."""
    found: dict[str, str] = {}
    for name in names:
        new = plain(name)
        if new in found:
            raise CheckpointError(
                f"{place}: {found[new]} and {name} are both {new!r} without their wrappers: they are not one model's"
            )
        found[new] = name
    return found


# -- files of torch.save -----------------------------------------------------------------------------------------------


def _needs_trust(path: Path) -> bool:
    if path.is_file():
        return path.suffix in OF_TORCH_SAVE or path.name == SHARDS
    return any((path / name).is_file() for name in (WHOLE, SHARDS)) and not list(path.glob("*.safetensors"))


def _of_torch_save(path: Path, trust: bool) -> Weights:
    if not trust:
        raise CheckpointError(
            f"{path} is of torch.save, a format that can hold code: where you trust whoever wrote it, say so (trust=True, or --trust); "
            "it is then read by torch's reader for plain data, which runs none"
        )
    tensors: dict[str, Tensor] = {}
    for file in _files(path):
        tensors.update(read_state_dict(file))
    named = _renamed(tensors, str(path), without_wrappers)
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for plain, name in named.items():
        t = tensors[name]
        spot = (t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride(), t.dtype)
        if t.numel() and first.setdefault(spot, plain) != plain:
            aliases[plain] = first[spot]  # tied
    stored = {n: tensors[old] for n, old in named.items() if n not in aliases}
    items = {n: Item(n, t.dtype, tuple(t.shape)) for n, t in stored.items()}

    def bring(names: list[str], tick: Tick) -> Iterator[Tensor]:
        expect(tick, sum(item.bytes for item in items.values()))
        for name in names:
            yield stored[name]
            tick(items[name].bytes)

    return Weights(items, aliases, bring)


def _files(path: Path) -> list[Path]:
    index = path if path.name == SHARDS else path / SHARDS
    if path.is_dir() and (path / WHOLE).is_file():
        return [path / WHOLE]
    if not index.is_file():
        return [path]
    said = loads(index.read_bytes(), str(index))
    table = said.get("weight_map") if isinstance(said, dict) else None
    plain = isinstance(table, dict) and all(isinstance(f, str) and Path(f).name == f for f in table.values())
    if not isinstance(table, dict) or not plain:
        raise CheckpointError(
            f"{index}: no index of weights: it has no weight_map from names to files beside it"
        )
    return [index.parent / file for file in dict.fromkeys(table.values())]


# -- from shards to whole tensors ---------------------------------------------------------------------------------------


def merge(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    max_shard_size: int | str = SHARD_SIZE,
    all: bool = False,
    model: str = MODEL,
    tick: Tick = no_tick,
) -> None:
    """Write the checkpoint in `folder` to `out` with whole tensors; each is a path or a URL.

    Args:
        max_shard_size: of a file, in bytes or as "5GB"; a larger tensor gets a file of its own.
        all: write a complete checkpoint, for `load_state`, with the files of hooks; False: the weights alone, as `convert` does.
        model: whose weights: "model", or "model_1" and so on if several were prepared. Not with `all`.
        tick: called with the number of bytes read since the last call.

    Raises:
        CheckpointError: `folder` is no committed checkpoint, has bytes that are not what was written, or `out` holds something else.
        SettingError: no size, or `model` with `all`.
        OSError: `out` cannot be written.
    """
    most = read_bytes(max_shard_size, "max_shard_size=")
    if all and model != MODEL:
        raise SettingError(
            f"model={model!r} is one model, and all=True asks for everything: leave one of them out"
        )
    source = open_checkpoint(folder)
    if all:
        _merge_all(source, out, most, tick)
    else:
        _write(_of_source(open_source(folder, model), str), out, None, most, tick)


def _merge_all(source: Opened, out: str | os.PathLike[str], most: int, tick: Tick) -> None:
    root, name = parted(out)
    storage = open_storage(root)
    if (storage.place, name) == (source.storage.place, source.folder):
        raise CheckpointError(f"{source.place} would be replaced by itself: pass another folder")
    tensors = source.manifest.tensors
    division = divide(list(_shares(tensors, most)))
    wanted = [tensors[name] for plan in division.files for name, _ in plan.contents]
    expect(tick, sum(stored.bytes for stored in wanted))
    boxes = ((stored, whole(stored.shape)) for stored in wanted)
    parts = one_by_one(source.files, boxes, room(len(source.files)), tick)
    files: dict[str, FileRecord] = {}
    commit = begin(storage, name)

    def put(name: str, size: int, content: Iterator[Part]) -> None:
        files[name] = FileRecord(size, storage.put(inside(commit.folder, name), content, size))

    def content(header: bytes, count: int) -> Iterator[Part]:
        yield header
        for _ in range(count):
            tensor = next(parts)
            if tensor.numel():
                yield as_bytes(tensor)

    try:
        for plan in division.files:
            put(plan.name, plan.size, content(plan.header, len(plan.contents)))
        if (index := index_of(division.tensors)) is not None:
            put(INDEX, len(index), iter([index]))
        extra = copied(source.extra, storage, commit.folder)
        whole_ones = {"tensors": division.tensors, "files": files, "extra": extra}
        write_manifest(storage, commit.folder, dataclasses.replace(source.manifest, **whole_ones))
        commit.finish()
    finally:
        commit.close()


def _shares(tensors: Mapping[str, Stored], most: int) -> Iterator[list[Brought]]:
    """Whole tensors, for files of at most `most` bytes. In the plan each file is the share of one more rank."""
    for word in dict.fromkeys(map(group, tensors)):
        items = [Item(name, t.dtype, t.shape) for name, t in tensors.items() if group(name) == word]
        for shard in cut(items, most):
            yield [Brought(i.name, i.dtype, i.shape, whole(i.shape)) for i in shard]
