"""Weights from files into a live model: streamed, in place, each rank reading only the bytes of what it holds.

Nothing live is touched before names, shapes and dtypes are known to fit. Every rank finds that out by itself, from the same headers
and with the same answer, so loading is no collective: one rank alone may load, before `prepare` sends its values to the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..distributed import read_ranks
from ..errors import CheckpointError, SettingError
from ..logging import get_logger
from ..strategies.materialising import left_to_others
from .allocating import allocate, check_buffers
from .boxes import whole
from .manifest import Stored
from .matching import SHOWN, Live, Skipped, dtype_fault, hint, live_tensors, match, name_of, renamed_in
from .places import place_of
from .progress import Progress
from .slabs import Want
from .sources import Source, open_source
from .streaming import stream

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
