"""Weights from files into a live model, and whole weights out of one.

`load_weights` changes nothing before names, shapes and dtypes are known to fit. Each rank reads only the bytes of its shards. Every rank
decides by the same headers, so loading is not a collective: one rank may load alone, before `prepare` sends its values to the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed import World, read_ranks
from ..errors import CheckpointError, SettingError
from ..logging import get_logger
from ..settings import read_bytes
from ..strategies.meta_init import left_to_others, swap_in
from ..training.wrapper import unwrap as unwrapped
from .folders import open_storage
from .huggingface import Bring, Item, cut, write_model
from .layout import Box, Shape, fault, on_host, places_of, whole
from .manifest import canonical
from .progress import Progress
from .read_plan import Want, plan, stream
from .save import Barrier
from .snapshot import on_all
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
)

logger = get_logger(__name__)
EACH = 2**28  # bytes of tensors from one word of rank 0 to the next

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
    places = places_of(one.tensor for one in found)  # raises for a layout that cannot be written to
    _check_twins(source, found)
    if bare := {id(one.tensor) for one in found if one.tensor.is_meta}:
        _check_buffers(model)
        _allocate(model, bare, device, wanted if isinstance(wanted, torch.dtype) else None)
        places = places_of(one.tensor for one in found)
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
        raise CheckpointError(
            f"{source.place}: reading failed when the model was partly loaded; load it again ({error})"
        ) from error
    finally:
        for one in found:  # autograd did not see the writes; fp32 masters look at this counter
            torch.autograd.graph.increment_version(one.tensor)
    if skipped:
        logger.warning("%s: skipped: %s", source.place, skipped)
    return skipped


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
            pair = [
                (each, torch.empty(each.shape, dtype=each.dtype)) for each in (one.stored, stored) if each
            ]
            stream(source.files, plan([Want(each, whole(each.shape), into) for each, into in pair]))
            a, b = (into for _, into in pair)
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


# -- out of a model ----------------------------------------------------------------------------------------------------


def get_state_dict(world: World, model: nn.Module, unwrap: bool) -> dict[str, Any]:
    """See `Accelerator.get_state_dict`."""
    world.settle()
    module = unwrapped(model, keep_torch_compile=not unwrap)
    state = module.state_dict(keep_vars=True)
    names = {name: canonical(name) if unwrap else name for name in state}
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
    tensors = {canonical(name): tensor for name, tensor in first.items()}
    others = {canonical(name): canonical(of) for name, of in aliases.items()}
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
        said = "" if world.rank else write(lambda name: on_host(tensors[name], name))
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


# -- whole tensors of a model that is spread over the ranks, one after the other on rank 0 -------------------------------


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
            for name, place in zip(tensors, places_of(tensors.values())):
                self._parts[name] = {} if place is None else dict(place.parts)
            return kinds, {name: list(parts) for name, parts in self._parts.items()}

        everyones = on_all(world, boxes)
        if apart := [rank for rank, (theirs, _) in enumerate(everyones) if theirs != everyones[0][0]]:
            raise CheckpointError(
                f"rank {apart[0]} has other tensors than rank 0: pass the same model on all ranks"
            )
        self._tensors: dict[str, Spread] = {}
        for name, (dtype, shape) in kinds.items():
            holders: dict[Box, int] = {}
            for rank, (_, held) in enumerate(everyones):
                for box in held[name]:
                    holders.setdefault(box, rank)
            if wrong := fault(shape, list(holders)):
                raise CheckpointError(f"{name}: the ranks do not have the whole of it: {wrong}")
            self._tensors[name] = Spread(dtype, shape, tuple(holders.items()))

    def bring(self, name: str) -> Tensor | None:
        """The whole tensor on rank 0, contiguous on the CPU (the live tensor itself if it is that already); None on other ranks."""
        spread, rank, parts = self._tensors[name], self._world.rank, self._parts[name]
        if rank == 0 and spread.holders == ((whole(spread.shape), 0),):
            return on_host(next(iter(parts.values())), name)
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

    Rank 0 may write to disk for longer than a collective's timeout. So the other ranks wait for its message in the store before they send
    each tensor. If `write` fails, the remaining tensors are still sent, and dropped.
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
