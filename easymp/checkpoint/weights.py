"""Weights from files into a live model: streamed, in place, each rank reading only the bytes of what it holds.

Nothing live is touched before names, shapes and dtypes are known to fit. Every rank finds that out by itself, from the same headers
and with the same answer, so loading is no collective: one rank alone may load, before `prepare` sends its values to the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.units import read_bytes
from ..distributed import read_ranks
from ..errors import CheckpointError, SettingError, nearest
from ..logging import get_logger
from ..strategies.meta_init import left_to_others, swap_in
from .accelerate_import import read_state_dict
from .blocks import Tick, no_tick
from .codec import loads
from .folders import open_storage, parted
from .huggingface import Item, cut, order, write_model
from .layout import place_of, whole
from .manifest import Stored
from .merging import MODEL, SHARD_SIZE
from .progress import Progress, expect
from .read_plan import Want, one_by_one, room, stream
from .source import (
    SHOWN,
    Live,
    Skipped,
    Source,
    dtype_fault,
    hint,
    live_tensors,
    match,
    name_of,
    open_source,
    renamed_in,
    without_wrappers,
)

logger = get_logger(__name__)


def load_weights(
    model: nn.Module,
    place: str | os.PathLike[str],
    *,
    strict: bool = True,
    dtype: torch.dtype | str | None = None,
    device_map: torch.device | str | None = None,
    which: str = "model",
) -> Skipped:
    """Put the weights at `place` into `model`, in place.

    The model may be prepared or not, wrapped, compiled, on the meta device. Of sharded parameters each rank reads its shard; what a
    pipeline gave to other ranks is passed by. Tied parameters are one tensor, for which any of their names will do. Names in the files
    may carry ``module.``, ``_orig_mod.`` and the like from wrappers. No hooks of `load_state_dict` run. Optimizers are not told, and what
    they remember stays; fp32 masters follow.

    Args:
        place: a ``.safetensors`` file, an ``.index.json``, a Hugging Face folder, or the folder of a checkpoint of ours (whose bytes are
            verified); a path or URL.
        strict: every tensor of the model must be found with its shape, and nothing else be there; False loads what fits.
        dtype: None: every tensor has the model's dtype in the files, too. "live": floating-point values are converted to it. A dtype:
            they are converted to that, which the model's floating-point tensors must have; those on the meta device are made in it.
            Integers and booleans are never converted.
        device_map: where tensors that are on the meta device get memory: a device, "rank" for this rank's own accelerator (the CPU
            where there is none), None for the CPU. Others stay where they are, which on each rank is its own device.
        which: whose weights, of a checkpoint of ours: "model", or "model_1" and so on where several were prepared.

    Returns:
        What was skipped; it is false where nothing was.

    Raises:
        CheckpointError: no weights are there, or they do not fit; nothing has changed. Or reading failed half-way, and the message says
            that the model has to be loaded again.
        SettingError: a `dtype` or `device_map` of another kind.
    """
    wanted = _read_dtype(dtype)
    device = _read_device(device_map)
    source = open_source(place, which)
    live = live_tensors(model)
    renamed = renamed_in(source, live.keys())
    skipped = match(source, renamed, live)
    found = list({id(one): one for one in live.values() if one.stored is not None}.values())
    faults = [f"{one.names[0]}: {wrong}" for one in found if (wrong := dtype_fault(one, wanted))]
    if faults:
        raise CheckpointError(f"{source.place}: {'; '.join(faults[:SHOWN])}. Nothing was loaded")
    if skipped and strict:
        raise CheckpointError(
            f"{source.place} does not fit this {name_of(model)}: {skipped}{hint(skipped)}. Nothing was loaded; strict=False loads what "
            "fits"
        )
    if left_to_others(model):
        found = [one for one in found if not one.tensor.is_meta]
    for one in found:
        place_of(one.tensor)  # raises for a layout that cannot be written to
    _check_twins(source, renamed, found)
    bare = {id(one.tensor) for one in found if one.tensor.is_meta}
    if bare:
        check_buffers(model)
        allocate(model, bare, device, wanted if isinstance(wanted, torch.dtype) else None)
    wants = _wants(found)
    try:
        with Progress(
            f"loading {source.place}", f"loaded {source.place}", shown=read_ranks().rank == 0
        ) as tick:
            tick.expect(sum(want.box.count * want.stored.dtype.itemsize for want in wants))
            stream(source.files, wants, tick)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
            f"{source.place}: reading failed when the model was partly loaded; load it again ({error})"
        ) from error
    finally:
        for one in found:
            torch.autograd.graph.increment_version(
                one.tensor
            )  # memory was written to past autograd; fp32 masters look here
    if skipped:
        logger.warning("%s: skipped: %s", source.place, skipped)
    return skipped


def _wants(found: Sequence[Live]) -> list[Want]:
    wants = []
    for one in found:
        place = place_of(one.tensor)
        assert place is not None, "it has memory by now"
        assert one.stored is not None, "it was found"
        wants += [Want(one.stored, box, part) for box, part in place.parts]
    return wants


# -- what was asked for ------------------------------------------------------------------------------------------------


def _read_dtype(dtype: Any) -> torch.dtype | str | None:
    if dtype in (None, "live") or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype  # type: ignore[no-any-return]
    raise SettingError(
        f"dtype={dtype!r} is neither None, nor 'live', nor a floating-point dtype such as torch.float32"
    )


def _read_device(device_map: Any) -> torch.device:
    if device_map is None:
        return torch.device("cpu")
    if isinstance(device_map, str) and device_map == "rank":
        if not torch.accelerator.is_available():
            return torch.device("cpu")
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        index = read_ranks().local_rank % max(torch.accelerator.device_count(), 1)
        return torch.device(kind.type, index)
    try:
        if not isinstance(device_map, Mapping):
            return torch.device(device_map)
    except (RuntimeError, TypeError):
        pass
    raise SettingError(
        f"device_map={device_map!r} is neither a device, nor 'rank', nor None: how a model is spread over devices is the strategy's to "
        "say; prepare the model, then load"
    )


# -- several names of one tensor ----------------------------------------------------------------------------------------


def _check_twins(source: Source, renamed: Mapping[str, str], chosen: Sequence[Live]) -> None:
    """Names that are one tensor in the model, and several in the files, must have one value there, as far as it goes here."""
    back = {plain: name for name, plain in renamed.items()}
    for one in chosen:
        for twin in one.twins:
            stored = source.tensors[back[twin]]
            assert one.stored is not None
            same = (stored.shape, stored.dtype) == (one.stored.shape, one.stored.dtype)
            if not (same and _equal(source, one.stored, stored)):
                raise CheckpointError(
                    f"{source.place}: {one.names[0]} and {twin} are one tensor in the model, and differ in the files: untie them in the "
                    "model, or take one out of the files"
                )


def _equal(source: Source, one: Stored, other: Stored) -> bool:
    both = [torch.empty(one.shape, dtype=one.dtype) for _ in range(2)]
    stream(source.files, [Want(stored, whole(one.shape), into) for stored, into in zip((one, other), both)])
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in both))


# -- Weights in another form: from whatever is read here to Hugging Face's safetensors, in another precision if asked.


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
    tick: Tick = no_tick,
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


# -- Memory for what a model has on the meta device and files have values for.


def check_buffers(model: nn.Module) -> None:
    """No buffer is on the meta device that no file can hold.

    Raises:
        CheckpointError: one is.
    """
    stored = {id(t) for t in model.state_dict(keep_vars=True).values()}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and id(buffer) not in stored:
            raise CheckpointError(
                f"buffer {name!r} is on the meta device, and no file holds it (persistent=False): build its module off meta, or prepare "
                "the model first, which gives it values, and then load"
            )


def allocate(
    model: nn.Module, chosen: Collection[int], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Give the tensors with ids in `chosen`, which are on the meta device, memory on `device`. They stay the objects they are.

    Args:
        dtype: of floating-point ones, in place of their own.
    """

    def fresh(tensor: Tensor) -> Tensor:
        if id(tensor) not in chosen or not tensor.is_meta:
            return tensor
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        made: Tensor = torch.empty_like(tensor, device=device, dtype=kind, requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        vars(made).update(vars(tensor))  # what the user said of it
        return made

    for module in model.modules():
        own = [t for table in (module._parameters, module._buffers) for t in table.values() if t is not None]
        if any(id(t) in chosen for t in own):
            swap_in(module, fresh)
