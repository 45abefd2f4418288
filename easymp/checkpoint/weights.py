"""Weights from files into a live model.

`load_weights` changes nothing before names, shapes and dtypes are known to fit. Each rank reads only the bytes of its
shards. Every rank decides by the same headers, so loading is not a collective: one rank may load alone, before
`prepare` sends its values to the others.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtensor import local
from ..distributed import read_ranks
from ..errors import CheckpointError, NoCheckpointError, SettingError, join_some, nearest
from ..logging import get_logger
from ..strategies.meta_init import left_to_others, swap_in
from . import folders, manifest, torch_files
from .codec import REAL_DTYPES, decode_header, decode_index, header_length, in_file
from .load import ReadRequest, plan_reads, read_all
from .manifest import Chunk, StoredTensor, canonical, full_box, local_chunks
from .progress import Progress, Tick, ignore
from .storage import Files, MemoryFile, Storage, read_small

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
    """Load the weights at `place` into `model`, in place.

    The model may be prepared or not, wrapped, compiled, or on the meta device. Each rank reads its shards; layers that
    a pipeline gave to other ranks are skipped. Tied parameters are one tensor, found under any of their names. Names in
    the files may carry prefixes of wrappers (``module.``, ``_orig_mod.``). No hooks of `load_state_dict` run.
    Optimizers keep their state; fp32 masters follow the weights.

    Args:
        model: changed in place.
        place: a ``.safetensors`` file, an ``.index.json``, a Hugging Face folder, or the folder of a checkpoint of
            easymp (its bytes are verified); a path or URL.
        strict: every tensor of the model must be found with its shape, and nothing else be there; False loads what
            fits.
        dtype: None: the files must have the model's dtypes. "live": floating-point values are converted to the model's.
            A dtype: they are converted to it; the model's floating-point tensors must have it, and those on the meta
            device are made in it. Integers and booleans are never converted.
        device_map: the device for tensors on the meta device: a device, "rank" for this rank's own accelerator (the CPU
            if there is none), None for the CPU. Other tensors stay where they are.
        which: the model's name in a checkpoint of easymp: "model", or "model_1" and so on if several were prepared.

    Returns:
        The names that were skipped; false if nothing was.

    Raises:
        CheckpointError: no weights are there, or they do not fit; nothing has changed. Or reading failed half-way, and
            the message says that the model has to be loaded again.
        SettingError: a `dtype` or `device_map` of another kind.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> Accelerator(cpu=True).save(model.state_dict(), "model.safetensors")
        >>> bool(load_weights(model, "model.safetensors"))
        False
    """
    return load_source(model, open_source(place, which), strict=strict, dtype=dtype, device_map=device_map)


def load_source(
    model: nn.Module,
    source: Source,
    *,
    strict: bool = True,
    dtype: torch.dtype | str | None = None,
    device_map: torch.device | str | None = None,
) -> Skipped:
    """Load weights from an opened source; see `load_weights`."""
    if dtype not in (None, "live") and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SettingError(f"dtype={dtype!r} is neither None, nor 'live', nor a floating-point dtype")
    device = _read_device(device_map)
    live = live_tensors(model)
    skipped = match(source, live)
    matched = [tensor for tensor in dict.fromkeys(live.values()) if tensor.stored is not None]
    faults = [f"{tensor.names[0]}: {fault}" for tensor in matched if (fault := dtype_fault(tensor, dtype))]
    if faults:
        raise CheckpointError(f"{source.path}: {'; '.join(faults[:SHOWN])}. Nothing was loaded")
    if skipped and strict:
        similar = ((name, nearest(name, skipped.unexpected[:1000])) for name in skipped.missing[:SHOWN])
        hint = next((f" (for {name!r}{suggestion})" for name, suggestion in similar if suggestion), "")
        raise CheckpointError(
            f"{source.path} does not fit this {_name_of(model)}: {skipped}{hint}. Nothing was loaded; "
            "strict=False loads what fits"
        )
    if left_to_others(model):
        matched = [tensor for tensor in matched if not tensor.tensor.is_meta]
    chunks = local_chunks(tensor.tensor for tensor in matched)  # raises for a layout that cannot be written to
    _check_twins(source, matched)
    if meta := {id(tensor.tensor) for tensor in matched if tensor.tensor.is_meta}:
        _allocate(model, meta, device, dtype if isinstance(dtype, torch.dtype) else None)
        chunks = local_chunks(tensor.tensor for tensor in matched)
    requests = [
        ReadRequest(tensor.stored, box, view)  # type: ignore[arg-type]  # matched, and with memory by now
        for tensor, tensor_chunks in zip(matched, chunks)
        for box, view in tensor_chunks or ()
    ]
    try:
        with Progress(f"loading {source.path}", f"loaded {source.path}", shown=read_ranks().rank == 0) as tick:
            tick.total = sum(request.box.numel * request.stored.dtype.itemsize for request in requests)
            source.fill(requests, tick)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{source.path} is partly loaded; load it again ({error})") from error
    finally:
        for tensor in matched:  # autograd did not see the writes; fp32 masters look at this counter
            torch.autograd.graph.increment_version(tensor.tensor)
    if skipped:
        logger.warning("%s: skipped: %s", source.path, skipped)
    return skipped


def _read_device(device_map: Any) -> torch.device:
    if device_map is None:
        return torch.device("cpu")
    if isinstance(device_map, str) and device_map == "rank":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return torch.device("cpu")
        return torch.device(accelerator.type, read_ranks().local_rank % max(torch.accelerator.device_count(), 1))
    try:
        if not isinstance(device_map, Mapping):
            return torch.device(device_map)
    except (RuntimeError, TypeError):
        pass
    raise SettingError(
        f"device_map={device_map!r} is neither a device, nor 'rank', nor None: the strategy spreads a model over "
        "devices; prepare the model, then load"
    )


def _check_twins(source: Source, matched: Sequence[LiveTensor]) -> None:
    """Check that stored tensors have equal values, if the model has one parameter for them (tied weights)."""
    for tensor in matched:
        for name, twin in tensor.twins.items():
            pair = [
                (stored, torch.empty(stored.shape, dtype=stored.dtype)) for stored in (tensor.stored, twin) if stored
            ]
            source.fill([ReadRequest(stored, full_box(stored.shape), values) for stored, values in pair])
            a, b = (values for _, values in pair)
            same_form = (a.shape, a.dtype) == (b.shape, b.dtype)
            if not same_form or not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
                raise CheckpointError(
                    f"{source.path}: {tensor.names[0]} and {name} are one tensor in the model, and differ in the "
                    "files: untie them in the model, or take one out of the files"
                )


def _allocate(model: nn.Module, ids: Collection[int], device: torch.device, dtype: torch.dtype | None) -> None:
    """Allocate the meta tensors with these ids on `device`, in place; floating-point ones in `dtype`."""
    in_state = {id(t) for t in model.state_dict(keep_vars=True).values()}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and id(buffer) not in in_state:
            raise CheckpointError(
                f"buffer {name!r} is on the meta device, and no file holds it (persistent=False): build its module off "
                "meta, or prepare the model first, which gives it values, and then load"
            )

    def materialise(tensor: Tensor) -> Tensor:
        if id(tensor) not in ids or not tensor.is_meta:
            return tensor
        new_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        new: Tensor = torch.empty_like(tensor, device=device, dtype=new_dtype, requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        vars(new).update(vars(tensor))  # attributes that the user set
        return new

    for module in model.modules():
        if any(id(t) in ids for table in (module._parameters, module._buffers) for t in table.values()):
            swap_in(module, materialise)


HEAD = 2**16  # bytes of a file in which its header usually ends
SINGLE = "model.safetensors"
LARGEST_INDEX = 2**28  # bytes
SHOWN = 8  # names in a message
WRAPPERS = (*manifest.WRAPPERS, "_fsdp_wrapped_module.")  # also torch's first FSDP
OUTER = "module."  # DistributedDataParallel, DataParallel


@dataclass(frozen=True)
class Source:
    """Stored weights at `path`: tensors by name in `files`, and aliases of these."""

    path: str
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    files: Files
    metadata: Mapping[str, str] = field(default_factory=dict)  # of a single safetensors file

    def without_wrappers(self) -> Source:
        """The same weights, under names without prefixes of wrappers. CheckpointError where two get one name."""
        old_names: dict[str, str] = {}
        for name in self.tensors:
            plain = without_wrappers(name)
            if (twin := old_names.setdefault(plain, name)) != name:
                raise CheckpointError(f"{self.path}: {twin} and {name} are both {plain!r} without wrappers")
        tensors = {name: self.tensors[old] for name, old in old_names.items()}
        aliases = {without_wrappers(name): without_wrappers(target) for name, target in self.aliases.items()}
        return replace(self, tensors=tensors, aliases=aliases)

    def fill(self, requests: Sequence[ReadRequest], tick: Tick = ignore) -> None:
        read_all(self.files, plan_reads(requests), tick)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read the tensors `names`, whole, into new host memory."""
        stored = {name: self.tensors[name] for name in names}
        tensors = {name: torch.empty(s.shape, dtype=s.dtype) for name, s in stored.items()}
        self.fill([ReadRequest(stored[name], full_box(t.shape), t) for name, t in tensors.items()])
        return tensors

    def read_whole(self) -> dict[str, Tensor]:
        """All tensors, whole and in new host memory; aliases share it."""
        tensors = self.read(self.tensors)
        return tensors | {name: tensors[target] for name, target in self.aliases.items()}


def stored_in_memory(name: str, tensor: Tensor) -> StoredTensor:
    shape = tuple(tensor.shape)
    return StoredTensor(tensor.dtype, shape, (Chunk(full_box(shape), name, 0),))


def tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Map further names of a tensor to its first one."""
    names: dict[Any, str] = {}
    first = {n: names.setdefault(memory_key(value), n) for n, value in state.items() if isinstance(value, Tensor)}
    return {name: target for name, target in first.items() if target != name}


def in_memory(path: str, tensors: Mapping[str, Tensor]) -> Source:
    """A source of tensors in host memory. Names of one tensor become aliases."""
    aliases = tied_names(tensors)
    stored = {name: stored_in_memory(name, tensor) for name, tensor in tensors.items() if name not in aliases}
    return Source(path, stored, aliases, {name: MemoryFile(tensors[name], name) for name in stored})


def open_source(place: str | os.PathLike[str], which: str = "model", trust: bool = False) -> Source:
    """Describe the weights at `place`; with `trust`, also a file of torch.save, read with ``weights_only=True``."""
    path = os.fspath(place)
    if trust and "://" not in path and torch_files.is_torch_save(path):
        return in_memory(path, torch_files.read_model(path))
    try:
        if path.endswith(".json"):
            return _open_index(path, *folders.open_parent(path))
        if path.endswith(".safetensors") or ("://" not in path and os.path.isfile(path)):
            return open_file(path, *folders.open_parent(path))
        folder = folders.open_storage(path)
        names = set(folder.list())
        parent, name = folders.open_parent(path)  # the newest save of a checkpoint may have a name of its own
        if folders.is_checkpoint(names) or (not names and folders.newest_save(parent, name) != name):
            return _open_committed(path, which)
        if SINGLE in names:
            return open_file(path, folder, SINGLE)
        if manifest.INDEX in names:
            return _open_index(path, folder, manifest.INDEX)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    raise NoCheckpointError(f"{path}: {_no_weights(names)}")


def _no_weights(names: set[str]) -> str:
    """Why a folder of these files holds no weights, and what to pass instead."""
    steps = sorted(name for name in names if name.startswith("step-"))
    if steps:
        return f"a folder of checkpoints: pass that of one of them, such as {steps[-1]}"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return (
            "no safetensors, but files of torch.save, which can run code when they are read: convert them with "
            "safetensors.torch; load_state(folder, allow_pickle=True) reads folders of Accelerate's save_state"
        )
    files = [name for name in sorted(names) if name.endswith(".safetensors")]
    if files:
        return f"neither {SINGLE} nor {manifest.INDEX} is there: pass a file, such as {files[0]}"
    content = f"it holds {', '.join(sorted(names)[:5])}" if names else "it is empty or missing"
    return f"no weights: neither {SINGLE}, nor {manifest.INDEX}, nor a checkpoint ({manifest.MANIFEST}), {content}"


def open_file(path: str, folder: Storage, name: str) -> Source:
    """Describe one safetensors file. Its metadata map further names of a tensor to the name in the file."""
    file = folders.source_file(folder, name)
    text = file.storage.head(file.name, HEAD)
    if (length := header_length(text, file.size, str(file))) > len(text):
        text = file.storage.head(file.name, length)
    slots, metadata = decode_header(text, file.size, str(file))
    tensors = {n: StoredTensor(s.dtype, s.shape, (Chunk(full_box(s.shape), name, s.begin),)) for n, s in slots.items()}
    aliases = {n: target for n, target in metadata.items() if n != "format" and target in tensors and n not in tensors}
    return Source(path, tensors, aliases, {name: file}, metadata=metadata)


def _open_index(path: str, folder: Storage, name: str) -> Source:
    index = folders.source_file(folder, name)
    index_path = f"{folder.root.rstrip('/')}/{name}"
    table = decode_index(read_small(index.storage, index.name, LARGEST_INDEX), index_path)
    shards: dict[str, Source] = {}
    for name, file in table.items():
        shard = shards.get(file) or shards.setdefault(file, open_file(path, folder, file))
        if name not in shard.tensors and name not in shard.aliases:
            raise CheckpointError(f"{index_path}: {file} has no tensor {name}, which shall be there: damaged")
    tensors = {n: s.tensors[n] for file, s in shards.items() for n in s.tensors if table.get(n) == file}
    aliases = {n: target for s in shards.values() for n, target in s.aliases.items()}
    aliases = {n: target for n, target in aliases.items() if target in tensors and n not in tensors}
    files = {name: file for s in shards.values() for name, file in s.files.items()}
    return Source(path, tensors, aliases, files)


def _open_committed(path: str, which: str) -> Source:
    """The weights of one model in a checkpoint, by the names that the model gives them."""
    opened = folders.open_checkpoint(path)
    stored, aliases, prefix = opened.manifest.tensors, opened.manifest.aliases, f"{which}/"
    models = dict.fromkeys(name.partition("/")[0] for name in stored if name.startswith("model"))
    if which not in models:
        names = f"It has: {', '.join(models) or 'no model'}"
        raise CheckpointError(f"{opened.path}: no weights of {which!r}{nearest(which, models) or '.'} {names}")
    tensors = {n.removeprefix(prefix): tensor for n, tensor in stored.items() if n.startswith(prefix)}
    own_aliases = {
        n.removeprefix(prefix): target.removeprefix(prefix)
        for n, target in aliases.items()
        if n.startswith(prefix) and target.startswith(prefix)
    }
    used_files = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
    return Source(path, tensors, own_aliases, {name: file for name, file in opened.files.items() if name in used_files})


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
        groups = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": self.misshapen}
        return "; ".join(f"{label}: {join_some(names, ', ', SHOWN)}" for label, names in groups.items() if names)


@dataclass(eq=False)
class LiveTensor:
    """A tensor of the model with all its names; `twins` are further tensors in the files that the model ties to it."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    stored: StoredTensor | None = None
    twins: dict[str, StoredTensor] = field(default_factory=dict)


def _name_of(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("Prepared")


def live_tensors(model: nn.Module) -> dict[str, LiveTensor]:
    """The model's tensors by canonical name; names of one tensor share an entry."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    own_ids = {id(t) for t in [*model.parameters(), *model.buffers()]}
    by_memory: dict[Any, LiveTensor] = {}
    by_name: dict[str, LiveTensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) not in own_ids:
            raise CheckpointError(
                f"{name!r} in the state_dict of this {_name_of(model)} is not a parameter or buffer (a "
                f"{type(value).__name__}, which get_extra_state or a hook makes): load it with load_state_dict, which "
                "goes through the module's own code"
            )
        if nn.parameter.is_lazy(value):
            raise CheckpointError(f"{name!r} of this {_name_of(model)} has no shape yet: call it once first")
        entry = by_memory.setdefault(memory_key(value), LiveTensor(value))
        entry.names.append(canonical(name))
        by_name[canonical(name)] = entry
    return by_name


def memory_key(tensor: Tensor) -> Any:
    """A key of a tensor's memory, shape and strides."""
    values = None if tensor.is_meta else local(tensor.detach())
    if values is None or not values.numel() or values.layout != torch.strided:
        return id(tensor)
    return values.device, values.data_ptr(), values.dtype, tuple(values.shape), values.stride()


def match(source: Source, live: Mapping[str, LiveTensor]) -> Skipped:
    """Set `stored` of each live tensor, by its name with or without wrappers; returns what does not fit."""
    names: dict[str, str] = {}  # the model's name → the files'
    for name in source.tensors:
        plain = name if name in live else without_wrappers(name)
        plain = plain if plain in live else name
        if plain in names:
            pair = f"{names[plain]!r} and {name!r}"
            raise CheckpointError(f"{source.path} has both {pair}, which are one name: take one of them out")
        names[plain] = name
    if changed := [(name, plain) for plain, name in names.items() if name != plain]:
        logger.info("%s: names of wrappers are left out: %r is %r", source.path, *changed[0])
    stored = {plain: source.tensors[name] for plain, name in names.items()}
    for name, target in source.aliases.items():
        stored.setdefault(name if name in live else without_wrappers(name), source.tensors[target])
    missing, misshapen = [], []
    for tensor in dict.fromkeys(live.values()):
        first, *other_names = [name for name in tensor.names if name in stored] or [""]
        if not first:
            missing.append(tensor.names[0])
            continue
        candidate = as_complex(stored[first], tensor.tensor)
        if candidate.shape != tuple(tensor.tensor.shape):
            shapes = f"{list(candidate.shape)} in the files, {list(tensor.tensor.shape)} in the model"
            misshapen.append(f"{first} ({shapes})")
        else:
            tensor.stored = candidate
            twins = {name: stored[name] for name in other_names if stored[name] is not stored[first]}
            tensor.twins = {name: as_complex(twin, tensor.tensor) for name, twin in twins.items()}
    return Skipped(tuple(missing), tuple(name for plain, name in names.items() if plain not in live), tuple(misshapen))


def as_complex(stored: StoredTensor, live: Tensor) -> StoredTensor:
    """View a stored pair of real and imaginary parts as complex numbers, if the model's tensor is complex."""
    if live.dtype in REAL_DTYPES and (stored.dtype, stored.shape) == in_file(live.dtype, live.shape):
        (chunk,) = stored.chunks
        return StoredTensor(live.dtype, tuple(live.shape), (chunk._replace(box=full_box(live.shape)),))
    return stored


def dtype_fault(tensor: LiveTensor, requested: torch.dtype | str | None) -> str | None:
    assert tensor.stored is not None
    live, stored = tensor.tensor.dtype, tensor.stored.dtype
    converts = stored.is_floating_point and live.is_floating_point
    if isinstance(requested, torch.dtype) and converts:
        if live == requested or tensor.tensor.is_meta:
            return None
        remedy = "convert the model first, or pass dtype='live'"
        return f"it is {live} in the model, and dtype={requested} was asked for: {remedy}"
    if live == stored or (requested == "live" and converts):
        return None
    remedy = "pass dtype='live' to convert the values, or " if converts else ""
    return f"{stored} in the files, and {live} in the model: {remedy}convert the model first"


def without_wrappers(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    while name.startswith(OUTER):
        name = name.removeprefix(OUTER)
    return name
