"""What of some files goes where in a live model: by names, shapes and dtypes, before a byte of a tensor is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtensor import local
from ..errors import CheckpointError, nearest
from ..logging import get_logger
from .boxes import whole
from .header import PARTS, filed
from .manifest import Piece, Stored
from .names import canonical, without_wrappers
from .sources import Source

logger = get_logger(__name__)

SHOWN = 8  # names in a message


@dataclass(frozen=True)
class Skipped:
    """What `load_weights` passed over, which only ``strict=False`` lets it do.

    Attributes:
        missing: the model's names for which nothing was found; they keep what they had.
        unexpected: the files' names that the model does not have.
        misshapen: names whose shapes differ, with both; they keep what they had.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)

    def __str__(self) -> str:
        said = [
            f"{word}: {', '.join(names[:SHOWN])}"
            + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            for word, names in (
                ("missing", self.missing),
                ("unexpected", self.unexpected),
                ("of another shape", self.misshapen),
            )
            if names
        ]
        return "; ".join(said)


@dataclass(eq=False)
class Live:
    """A tensor of the model, under all of its names."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    stored: Stored | None = None
    twins: list[str] = field(
        default_factory=list
    )  # names in the files for what is one tensor here, beyond the first


def name_of(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("Prepared")


def live_tensors(model: nn.Module) -> dict[str, Live]:
    """The model's tensors by canonical name; names of one tensor share an entry.

    Raises:
        CheckpointError: something in its `state_dict` that cannot be written to.
    """
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    own = {id(t) for t in [*model.parameters(), *model.buffers()]}
    by_memory: dict[Any, Live] = {}
    live: dict[str, Live] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) not in own:
            raise CheckpointError(
                f"{name!r} in the state_dict of this {name_of(model)} is no parameter or buffer (a {type(value).__name__}, which "
                "get_extra_state or a hook makes): load it with load_state_dict, which goes through the module's own code"
            )
        if nn.parameter.is_lazy(value):
            raise CheckpointError(
                f"{name!r} of this {name_of(model)} has no shape yet: call the model once, and then load"
            )
        one = by_memory.setdefault(memory(value), Live(value))
        one.names.append(canonical(name))
        live[canonical(name)] = one
    return live


def memory(tensor: Tensor) -> Any:
    """Something equal for tensors that are the same memory, seen alike."""
    here = None if tensor.is_meta else local(tensor.detach())
    if here is None or not here.numel() or here.layout != torch.strided:
        return id(tensor)
    return here.device, here.data_ptr(), here.dtype, tuple(here.shape), here.stride()


def renamed_in(source: Source, live: Collection[str]) -> dict[str, str]:
    """The model's name of each name in the files that has one; the files' own of the others.

    Raises:
        CheckpointError: two names in the files are one in the model.
    """
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in source.tensors:
        plain = name if name in live else without_wrappers(name)
        names[name] = plain = plain if plain in live else name
        if plain in taken:
            raise CheckpointError(
                f"{source.place} has both {taken[plain]!r} and {name!r}, which are one name: take one of them out"
            )
        taken[plain] = name
    changed = [name for name, plain in names.items() if name != plain]
    if changed:
        logger.info(
            "%s: names of wrappers are left out: %r is %r", source.place, changed[0], names[changed[0]]
        )
    return names


def match(source: Source, renamed: Mapping[str, str], live: Mapping[str, Live]) -> Skipped:
    """Find what goes where; what does not is returned."""
    found = {plain: source.tensors[name] for name, plain in renamed.items()}
    for name, of in source.aliases.items():
        found.setdefault(name if name in live else without_wrappers(name), source.tensors[of])
    missing, misshapen = [], []
    for one in {id(one): one for one in live.values()}.values():
        there = [name for name in one.names if name in found]
        if not there:
            missing.append(one.names[0])
            continue
        found[there[0]] = as_complex(found[there[0]], one.tensor)
        if found[there[0]].shape != tuple(one.tensor.shape):
            misshapen.append(
                f"{there[0]} ({list(found[there[0]].shape)} in the files, {list(one.tensor.shape)} in the model)"
            )
        else:
            one.stored = found[there[0]]
            one.twins = [name for name in there[1:] if found[name] is not one.stored]
    unexpected = [name for name, plain in renamed.items() if plain not in live]
    return Skipped(tuple(missing), tuple(unexpected), tuple(misshapen))


def as_complex(stored: Stored, live: Tensor) -> Stored:
    """`stored`, or for complex numbers that safetensors has no type for, what it keeps as their real and imaginary parts."""
    parts = filed(live.dtype, live.shape)
    if live.dtype in PARTS and (stored.dtype, stored.shape) == parts:
        (piece,) = stored.pieces
        return Stored(live.dtype, tuple(live.shape), (Piece(whole(live.shape), piece.file, piece.begin),))
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
    remedy = (
        "pass dtype='live' to convert the values, or convert the model first"
        if converts
        else "convert the model or the file"
    )
    return f"{there} in the files, and {live} in the model: {remedy}"
