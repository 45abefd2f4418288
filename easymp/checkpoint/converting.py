"""Weights in another form: from whatever is read here to Hugging Face's safetensors, in another precision if asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, SettingError, nearest
from ..settings import read_bytes
from .accelerate_folder import read_state_dict
from .boxes import whole
from .huggingface import write_model
from .merging import MODEL, SHARD_SIZE
from .names import without_wrappers
from .passing import one_by_one, room
from .progress import expect
from .sharding import Item, cut, order
from .sources import open_source
from .storage import Tick, nothing
from .storages import open_storage, parted
from .strict import loads

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
OF_TORCH_SAVE = (".bin", ".pt", ".pth", ".ckpt")
WHOLE, SHARDS = "pytorch_model.bin", "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class Weights:
    """What is to be written: tensors by name, described, other names of them, and the way to bring them in an order."""

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
    tick: Tick = nothing,
) -> None:
    """Write the weights at `place` to `out` as ``model.safetensors``, or as shards with an index; each is a path or a URL.

    Names lose what wrappers put before them (``module.``, ``_orig_mod.``). Memory holds what is read at once, not the model; files of
    torch.save are mapped where their format allows it.

    Args:
        place: a ``.safetensors`` file, an ``.index.json``, a Hugging Face folder, a checkpoint of ours, or with `trust` a file of
            torch.save (``.bin``, ``.pt``, ``.pth``, ``.ckpt``) or a folder with ``pytorch_model.bin``, in one file or in shards.
        dtype: "fp32", "bf16", "fp16" or "fp64", to which floating-point tensors of at least 16 bits are rounded; None: as they are.
        max_shard_size: of a file, in bytes or as "5GB"; a larger tensor gets a file of its own.
        model: whose weights, of a checkpoint of ours.
        trust: read files of torch.save, by torch's reader for plain data, which runs nothing of what they say but is not made to
            withstand every attack.
        tick: told how many more bytes were read, now and then.

    Raises:
        CheckpointError: no weights are there, they are damaged, two of them have one name without wrappers, or a value is too large for
            `dtype`; or `out` is a checkpoint, or `place` itself. What was at `out` before is whole.
        SettingError: no such dtype, or no size.
        OSError: `out` cannot be written.
    """
    most = read_bytes(max_shard_size, "max_shard_size=")
    if dtype is not None and dtype not in DTYPES:
        raise SettingError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}{nearest(str(dtype), DTYPES)}")
    to = DTYPES.get(dtype or "")
    root, name = parted(out)
    storage = open_storage(root)
    if os.fspath(place).rstrip("/") == os.fspath(out).rstrip("/") or _is_same_folder(place, out):
        raise CheckpointError(f"{os.fspath(place)} would be replaced while it is read: pass another folder")
    weights = _of_torch_save(Path(place), trust) if _needs_trust(place) else _of_safetensors(place, model)
    items = [Item(i.name, _wanted(i.dtype, to), i.shape) for i in weights.items.values()]
    shards = cut(items, most)
    tensors = weights.bring(order(shards), tick)
    write_model(storage, name, shards, lambda name: _rounded(name, next(tensors), to), weights.aliases)


def _wanted(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    """8-bit floats come with scales of their own, which rounding would not know."""
    return to if to is not None and dtype.is_floating_point and dtype.itemsize > 1 else dtype


def _rounded(name: str, tensor: Tensor, to: torch.dtype | None) -> Tensor:
    done = tensor.to(_wanted(tensor.dtype, to))
    if done.dtype != tensor.dtype and torch.isfinite(done).sum() != torch.isfinite(tensor).sum():
        raise CheckpointError(
            f"{name} has values up to {float(tensor.abs().max()):.3g}, too large for {to}: convert to bf16 or fp32"
        )
    return done.contiguous()


def _is_same_folder(place: str | os.PathLike[str], out: str | os.PathLike[str]) -> bool:
    return os.path.exists(place) and os.path.exists(out) and os.path.samefile(place, out)


# -- safetensors, and checkpoints of ours ---------------------------------------------------------------------------------


def _of_safetensors(place: str | os.PathLike[str], model: str) -> Weights:
    source = open_source(place, model)
    named = _without_wrappers(source.tensors, source.place)
    aliases = {without_wrappers(name): without_wrappers(of) for name, of in source.aliases.items()}

    def bring(names: list[str], tick: Tick) -> Iterator[Tensor]:
        wanted = [source.tensors[named[name]] for name in names]
        expect(tick, sum(stored.bytes for stored in wanted))
        return one_by_one(
            source.files, ((stored, whole(stored.shape)) for stored in wanted), room(len(source.files)), tick
        )

    items = {
        name: Item(name, source.tensors[old].dtype, source.tensors[old].shape) for name, old in named.items()
    }
    return Weights(items, aliases, bring)


def _without_wrappers(names: Mapping[str, object], place: str) -> dict[str, str]:
    """The name in the file by the name to write."""
    found: dict[str, str] = {}
    for name in names:
        plain = without_wrappers(name)
        if plain in found:
            raise CheckpointError(
                f"{place}: {found[plain]} and {name} are both {plain!r} without their wrappers: they are not one model's"
            )
        found[plain] = name
    return found


# -- files of torch.save --------------------------------------------------------------------------------------------------


def _needs_trust(place: str | os.PathLike[str]) -> bool:
    path = Path(place)
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
    named = _without_wrappers(tensors, str(path))
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for plain, name in named.items():
        t = tensors[name]
        spot = (t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride(), t.dtype)
        if t.numel() and spot in first:
            aliases[plain] = first[spot]  # tied
        else:
            first[spot] = plain
    items = {
        n: Item(n, tensors[old].dtype, tuple(tensors[old].shape))
        for n, old in named.items()
        if n not in aliases
    }

    def bring(names: list[str], tick: Tick) -> Iterator[Tensor]:
        expect(tick, sum(item.bytes for item in items.values()))
        for name in names:
            yield tensors[named[name]]
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
    if not isinstance(table, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in table.values()
    ):
        raise CheckpointError(
            f"{index}: no index of weights: it has no weight_map from names to files beside it"
        )
    return [index.parent / file for file in dict.fromkeys(table.values())]
