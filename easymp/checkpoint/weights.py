"""Weights from files into a live model.

`load_weights` changes nothing before names, shapes and dtypes are known to fit. Each rank reads only the bytes of its shards. Every rank
decides by the same headers, so loading is not a collective: one rank may load alone, before `prepare` sends its values to the others.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtensor import local
from ..distributed import read_ranks
from ..errors import CheckpointError, SettingError, nearest
from ..logging import get_logger
from ..strategies.meta_init import left_to_others, swap_in
from . import folders, manifest
from .codec import PARTS, filed, loads
from .load import Want, plan, stream
from .manifest import Piece, Stored
from .storage import Progress, SourceFile, Storage, shown

logger = get_logger(__name__)

# -- into a model ------------------------------------------------------------------------------------------------------


def load_weights(
    model: nn.Module,
    place: str | os.PathLike[str],
    *,
    strict: bool = True,
    dtype: torch.dtype | str | None = None,
    device_map: torch.device | str | None = None,
    which: str = "model",
) -> Skipped:
    """Load the weights at `place` into `model`, in place.

    The model may be prepared or not, wrapped, compiled, or on the meta device. Each rank reads its shards; layers that a pipeline gave to
    other ranks are skipped. Tied parameters are one tensor, found under any of their names. Names in the files may carry prefixes of
    wrappers (``module.``, ``_orig_mod.``). No hooks of `load_state_dict` run. Optimizers keep their state; fp32 masters follow the weights.

    Args:
        model: changed in place.
        place: a ``.safetensors`` file, an ``.index.json``, a Hugging Face folder, or the folder of a checkpoint of easymp (its bytes are
            verified); a path or URL.
        strict: every tensor of the model must be found with its shape, and nothing else be there; False loads what fits.
        dtype: None: the files must have the model's dtypes. "live": floating-point values are converted to the model's. A dtype: they are
            converted to it; the model's floating-point tensors must have it, and those on the meta device are made in it. Integers and
            booleans are never converted.
        device_map: the device for tensors on the meta device: a device, "rank" for this rank's own accelerator (the CPU if there is
            none), None for the CPU. Other tensors stay where they are.
        which: the model's name in a checkpoint of easymp: "model", or "model_1" and so on if several were prepared.

    Returns:
        The names that were skipped; false if nothing was.

    Raises:
        CheckpointError: no weights are there, or they do not fit; nothing has changed. Or reading failed half-way, and the message says
            that the model has to be loaded again.
        SettingError: a `dtype` or `device_map` of another kind.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> Accelerator(cpu=True).save(model.state_dict(), "model.safetensors")
        >>> bool(load_weights(model, "model.safetensors"))
        False
    """
    wanted, device = _read_dtype(dtype), _read_device(device_map)
    source = open_source(place, which)
    live = live_tensors(model)
    skipped = match(source, renamed_in(source, live.keys()), live)
    found = [one for one in dict.fromkeys(live.values()) if one.stored is not None]
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
    places = manifest.places_of(one.tensor for one in found)  # raises for a layout that cannot be written to
    _check_twins(source, found)
    if bare := {id(one.tensor) for one in found if one.tensor.is_meta}:
        _check_buffers(model)
        _allocate(model, bare, device, wanted if isinstance(wanted, torch.dtype) else None)
        places = manifest.places_of(one.tensor for one in found)
    wants = [
        Want(one.stored, box, part)  # type: ignore[arg-type]  # found, and with memory by now
        for one, at in zip(found, places)
        for box, part in at.parts  # type: ignore[union-attr]
    ]
    try:
        shown = read_ranks().rank == 0
        with Progress(f"loading {source.place}", f"loaded {source.place}", shown=shown) as tick:
            tick.expect(sum(want.box.count * want.stored.dtype.itemsize for want in wants))
            stream(source.files, plan(wants), tick)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{source.place} is partly loaded; load it again ({error})") from error
    finally:
        for one in found:  # autograd did not see the writes; fp32 masters look at this counter
            torch.autograd.graph.increment_version(one.tensor)
    if skipped:
        logger.warning("%s: skipped: %s", source.place, skipped)
    return skipped


def _read_dtype(dtype: Any) -> torch.dtype | str | None:
    if dtype in (None, "live") or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype  # type: ignore[no-any-return]
    raise SettingError(f"dtype={dtype!r} is neither None, nor 'live', nor a floating-point dtype")


def _read_device(device_map: Any) -> torch.device:
    if device_map is None:
        return torch.device("cpu")
    if isinstance(device_map, str) and device_map == "rank":
        kind = torch.accelerator.current_accelerator(check_available=True)
        if kind is None:
            return torch.device("cpu")
        return torch.device(kind.type, read_ranks().local_rank % max(torch.accelerator.device_count(), 1))
    try:
        if not isinstance(device_map, Mapping):
            return torch.device(device_map)
    except (RuntimeError, TypeError):
        pass
    raise SettingError(
        f"device_map={device_map!r} is neither a device, nor 'rank', nor None: the strategy spreads a model over devices; prepare the "
        "model, then load"
    )


def _check_twins(source: Source, chosen: Sequence[Live]) -> None:
    """Check that tensors in the files that the model ties have equal values."""
    for one in chosen:
        for twin, stored in one.twins.items():
            two = [(each, torch.empty(each.shape, dtype=each.dtype)) for each in (one.stored, stored) if each]
            stream(source.files, plan([Want(each, manifest.whole(each.shape), into) for each, into in two]))
            a, b = (into for _, into in two)
            same = (a.shape, a.dtype) == (b.shape, b.dtype)
            if not same or not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
                raise CheckpointError(
                    f"{source.place}: {one.names[0]} and {twin} are one tensor in the model, and differ in the files: untie them in the "
                    "model, or take one out of the files"
                )


def _check_buffers(model: nn.Module) -> None:
    """Raises CheckpointError for a buffer on the meta device that no file can hold."""
    stored = {id(t) for t in model.state_dict(keep_vars=True).values()}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and id(buffer) not in stored:
            raise CheckpointError(
                f"buffer {name!r} is on the meta device, and no file holds it (persistent=False): build its module off meta, or prepare "
                "the model first, which gives it values, and then load"
            )


def _allocate(
    model: nn.Module, chosen: Collection[int], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Allocate the meta tensors with ids in `chosen` on `device`, in place; floating-point ones in `dtype`."""

    def fresh(tensor: Tensor) -> Tensor:
        if id(tensor) not in chosen or not tensor.is_meta:
            return tensor
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        made: Tensor = torch.empty_like(tensor, device=device, dtype=kind, requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        vars(made).update(vars(tensor))  # attributes that the user set
        return made

    for module in model.modules():
        if any(id(t) in chosen for table in (module._parameters, module._buffers) for t in table.values()):
            swap_in(module, fresh)


# -- files of weights ---------------------------------------------------------------------------------------------------


SINGLE = "model.safetensors"
LARGEST_INDEX = 2**28  # bytes
SHOWN = 8  # names in a message
WRAPPERS = (*manifest.INSIDE, "_fsdp_wrapped_module.")  # also torch's first FSDP
OUTER = "module."  # DistributedDataParallel, DataParallel


@dataclass(frozen=True)
class Source:
    """Stored weights at `place`, as the user wrote it: tensors by their names in `files`, and aliases of these."""

    place: str
    tensors: Mapping[str, Stored]
    aliases: Mapping[str, str]
    files: Mapping[str, SourceFile]


def open_source(place: str | os.PathLike[str], which: str = "model") -> Source:
    """Describe the weights at `place`: a ``.safetensors`` file, an ``.index.json``, a folder with either of them, or a checkpoint.

    If a folder holds both, the single file is read, as by Hugging Face's libraries. `which`: see `load_weights`.
    """
    said = os.fspath(place)
    try:
        if said.endswith(".json"):
            return _indexed(said, *folders.found_at(said))
        if said.endswith(".safetensors") or ("://" not in said and os.path.isfile(said)):
            return _single(said, *folders.found_at(said))
        folder = folders.open_storage(said)
        there = set(folder.list())
        beside, name = folders.found_at(said)  # the newest save of a checkpoint may have a name of its own
        if there & {manifest.MANIFEST, manifest.COMMIT} or (
            not there and folders.current(beside, name) != name
        ):
            return _committed(said, which)
        if SINGLE in there:
            return _single(said, folder, SINGLE)
        if manifest.INDEX in there:
            return _indexed(said, folder, manifest.INDEX)
    except OSError as error:
        raise CheckpointError(f"{shown(said)}: cannot be read ({error})") from error
    raise CheckpointError(f"{shown(said)}: {_what_else(there)}")


def _what_else(there: set[str]) -> str:
    steps = sorted(name for name in there if name.startswith("step-"))
    if steps:
        return f"a folder of checkpoints: pass that of one of them, such as {steps[-1]}"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in there):
        return (
            "no safetensors, but files of torch.save, which can run code when they are read: convert them with safetensors.torch; folders "
            "of Accelerate's save_state are read by easymp.checkpoint.read_accelerate"
        )
    single = [name for name in sorted(there) if name.endswith(".safetensors")]
    if single:
        return f"neither {SINGLE} nor {manifest.INDEX} is there: pass a file, such as {single[0]}"
    found = f"it holds {', '.join(sorted(there)[:5])}" if there else "it is empty or missing"
    return (
        f"no weights: neither {SINGLE}, nor {manifest.INDEX}, nor a checkpoint ({manifest.MANIFEST}), {found}"
    )


def _single(place: str, folder: Storage, name: str) -> Source:
    """Describe one safetensors file. Its metadata map further names of a tensor to the name in the file."""
    file = folders.file_in(folder, name)
    slots, metadata = folders.read_header(file)
    tensors = {
        n: Stored(s.dtype, s.shape, (Piece(manifest.whole(s.shape), name, s.begin),))
        for n, s in slots.items()
    }
    tied = {n: of for n, of in metadata.items() if n != "format" and of in tensors and n not in tensors}
    return Source(place, tensors, tied, {name: file})


def _indexed(place: str, folder: Storage, name: str) -> Source:
    index = folders.file_in(folder, name)
    where = f"{folder.place.rstrip('/')}/{name}"
    said = loads(index.storage.get(index.name, LARGEST_INDEX), where)
    table = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise CheckpointError(f"{where}: not an index of weights: it has no weight_map from names to files")
    shards: dict[str, Source] = {}
    for name, file in table.items():
        if "/" in file or "\\" in file or file in ("", ".", ".."):
            raise CheckpointError(f"{where}: weights in {file!r}, which is not a file beside the index")
        shard = shards.get(file) or shards.setdefault(file, _single(place, folder, file))
        if name not in shard.tensors and name not in shard.aliases:
            raise CheckpointError(f"{where}: {file} has no tensor {name}, which shall be there: damaged")
    tensors = {n: s.tensors[n] for file, s in shards.items() for n in s.tensors if table.get(n) == file}
    aliases = {n: of for s in shards.values() for n, of in s.aliases.items()}
    aliases = {n: of for n, of in aliases.items() if of in tensors and n not in tensors}
    files = {name: file for s in shards.values() for name, file in s.files.items()}
    return Source(place, tensors, aliases, files)


def _committed(place: str, which: str) -> Source:
    found = folders.open_checkpoint(place)
    tensors, aliases = weights_of(found, which)
    used = {piece.file for stored in tensors.values() for piece in stored.pieces}
    return Source(place, tensors, aliases, {name: file for name, file in found.files.items() if name in used})


def weights_of(found: folders.Opened, which: str) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors and aliases of one model in a checkpoint, by the names that the model gives them."""
    prefix = f"{which}/"
    tensors, aliases = found.manifest.tensors, found.manifest.aliases
    known = dict.fromkeys(name.partition("/")[0] for name in tensors if name.startswith("model"))
    if which not in known:
        has = f"It has: {', '.join(known) or 'no model'}"
        raise CheckpointError(f"{found.place}: no weights of {which!r}{nearest(which, known) or '.'} {has}")
    tied = {n: of.removeprefix(prefix) for n, of in aliases.items() if n.startswith(prefix)}
    mine = {n.removeprefix(prefix): stored for n, stored in tensors.items() if n.startswith(prefix)}
    return mine, {n.removeprefix(prefix): of for n, of in tied.items()}


# -- match ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Skipped:
    """Names that `load_weights` skipped; only ``strict=False`` skips any.

    Attributes:
        missing: the model's names for which nothing was found; they keep what they had.
        unexpected: the files' names that the model does not have.
        misshapen: names with another shape, and both shapes; they keep their values.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)

    def __str__(self) -> str:
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": self.misshapen}
        more = {word: len(names) - SHOWN for word, names in kinds.items()}
        return "; ".join(
            f"{word}: {', '.join(names[:SHOWN])}" + (f" and {more[word]} more" if more[word] > 0 else "")
            for word, names in kinds.items()
            if names
        )


@dataclass(eq=False)
class Live:
    """A tensor of the model with all its names; `twins` are further tensors in the files that the model ties to it."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    stored: Stored | None = None
    twins: dict[str, Stored] = field(default_factory=dict)


def name_of(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("Prepared")


def live_tensors(model: nn.Module) -> dict[str, Live]:
    """The model's tensors by canonical name; names of one tensor share an entry."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    own = {id(t) for t in [*model.parameters(), *model.buffers()]}
    by_memory: dict[Any, Live] = {}
    live: dict[str, Live] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) not in own:
            raise CheckpointError(
                f"{name!r} in the state_dict of this {name_of(model)} is not a parameter or buffer (a {type(value).__name__}, which "
                "get_extra_state or a hook makes): load it with load_state_dict, which goes through the module's own code"
            )
        if nn.parameter.is_lazy(value):
            raise CheckpointError(f"{name!r} of this {name_of(model)} has no shape yet: call it once first")
        one = by_memory.setdefault(memory(value), Live(value))
        one.names.append(manifest.canonical(name))
        live[manifest.canonical(name)] = one
    return live


def memory(tensor: Tensor) -> Any:
    """A key of a tensor's memory, shape and strides."""
    here = None if tensor.is_meta else local(tensor.detach())
    if here is None or not here.numel() or here.layout != torch.strided:
        return id(tensor)
    return here.device, here.data_ptr(), here.dtype, tuple(here.shape), here.stride()


def renamed_in(source: Source, live: Collection[str]) -> dict[str, str]:
    """Rename the files' tensors to the model's names; names without a match stay."""
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in source.tensors:
        plain = name if name in live else without_wrappers(name)
        names[name] = plain = plain if plain in live else name
        if plain in taken:
            both = f"{taken[plain]!r} and {name!r}"
            raise CheckpointError(f"{source.place} has both {both}, which are one name: take one of them out")
        taken[plain] = name
    changed = [name for name, plain in names.items() if name != plain]
    if changed:
        said = "%s: names of wrappers are left out: %r is %r"
        logger.info(said, source.place, changed[0], names[changed[0]])
    return names


def match(source: Source, renamed: Mapping[str, str], live: Mapping[str, Live]) -> Skipped:
    """Set `stored` of each live tensor; returns what does not fit."""
    found = {plain: source.tensors[name] for name, plain in renamed.items()}
    for name, of in source.aliases.items():
        found.setdefault(name if name in live else without_wrappers(name), source.tensors[of])
    missing, misshapen = [], []
    for one in {id(one): one for one in live.values()}.values():
        there = [name for name in one.names if name in found]
        if not there:
            missing.append(one.names[0])
            continue
        stored = as_complex(found[there[0]], one.tensor)
        if stored.shape != tuple(one.tensor.shape):
            shapes = f"{list(stored.shape)} in the files, {list(one.tensor.shape)} in the model"
            misshapen.append(f"{there[0]} ({shapes})")
        else:
            one.stored = stored
            others = {name: found[name] for name in there[1:] if found[name] is not found[there[0]]}
            one.twins = {name: as_complex(twin, one.tensor) for name, twin in others.items()}
    unexpected = [name for name, plain in renamed.items() if plain not in live]
    return Skipped(tuple(missing), tuple(unexpected), tuple(misshapen))


def as_complex(stored: Stored, live: Tensor) -> Stored:
    """View a stored pair of real and imaginary parts as complex numbers, if the model's tensor is complex."""
    parts = filed(live.dtype, live.shape)
    if live.dtype in PARTS and (stored.dtype, stored.shape) == parts:
        (piece,) = stored.pieces
        return Stored(
            live.dtype, tuple(live.shape), (Piece(manifest.whole(live.shape), piece.file, piece.begin),)
        )
    return stored


def hint(skipped: Skipped) -> str:
    for name in skipped.missing[:SHOWN]:
        if near := nearest(name, skipped.unexpected[:1000]):
            return f" (for {name!r}{near})"
    return ""


def dtype_fault(one: Live, wanted: torch.dtype | str | None) -> str | None:
    assert one.stored is not None
    live, there = one.tensor.dtype, one.stored.dtype
    converts = there.is_floating_point and live.is_floating_point
    if isinstance(wanted, torch.dtype) and converts:
        if live == wanted or one.tensor.is_meta:
            return None
        return f"it is {live} in the model, and dtype={wanted} was asked for: convert the model first, or pass dtype='live'"
    if live == there or (wanted == "live" and converts):
        return None
    remedy = "pass dtype='live' to convert the values, or " if converts else ""
    return f"{there} in the files, and {live} in the model: {remedy}convert the model first"


def without_wrappers(name: str) -> str:
    """Strip the prefixes of wrappers from a name in a file."""
    for word in WRAPPERS:
        name = name.replace(word, "")
    while name.startswith(OUTER):
        name = name.removeprefix(OUTER)
    return name
