"""Two checkpoints side by side: which tensors, which values, which states differ."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .boxes import slices, whole
from .inspecting import dtype_name
from .manifest import BLOCK, Manifest, Stored
from .opening import Opened, open_checkpoint
from .passing import one_by_one, room
from .progress import expect
from .storage import Tick, nothing
from .trees import TAG

LONG = 60  # characters of a value that is shown
TRACKING = "state/tracking"  # names and positions of logs, which differ between equal runs


@dataclass(frozen=True)
class Values:
    """A tensor that both have, and whose values differ.

    Attributes:
        count: elements that are not equal bit for bit, of `of`.
        largest: absolute difference; None where it is no number (an infinity, or NaN on one side).
    """

    name: str
    count: int
    of: int
    largest: float | None


@dataclass(frozen=True)
class Unequal:
    """Something else that differs: the dtype and shape of a tensor, or a value in a state, by its path."""

    path: str
    one: str
    other: str


@dataclass(frozen=True)
class Difference:
    """What differs between two checkpoints.

    Attributes:
        missing: tensors of the first that the second lacks.
        added: tensors of the second that the first lacks.
        kinds: tensors of another dtype or shape.
        values: tensors of the same kind with other values.
        states: what is no tensor, how the runs were made (step, ranks, plan), and files of hooks by size and checksums. Trackers'
            run ids and positions are left out.
        equal: how many tensors are equal, bit for bit.
    """

    missing: tuple[str, ...]
    added: tuple[str, ...]
    kinds: tuple[Unequal, ...]
    values: tuple[Values, ...]
    states: tuple[Unequal, ...]
    equal: int

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.added or self.kinds or self.values or self.states)


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str], tick: Tick = nothing) -> Difference:
    """What differs between the committed checkpoints `one` and `other`, folders or URLs, however their tensors are cut.

    Memory does not grow with the tensors: 64 MiB of each is held at a time, more where there are more than four files.

    Raises:
        CheckpointError: one of them is none, or has bytes that are not what was written.
        OSError: one of them cannot be read.
    """
    a, b = open_checkpoint(one), open_checkpoint(other)
    names = [_names(a.manifest), _names(b.manifest)]
    common = [name for name in names[0] if name in names[1]]
    kinds = [Unequal(n, x, y) for n in common if (x := _kind(names[0][n])) != (y := _kind(names[1][n]))]
    tied = a.manifest.aliases.items() & b.manifest.aliases.items()  # compared under their other name
    alike = [
        n
        for n in common
        if _kind(names[0][n]) == _kind(names[1][n]) and (n, a.manifest.aliases.get(n)) not in tied
    ]
    expect(tick, 2 * sum(names[0][n].bytes for n in alike))
    values = list(_compare(a, b, [(n, names[0][n], names[1][n]) for n in alike], tick))
    return Difference(
        missing=tuple(n for n in names[0] if n not in names[1]),
        added=tuple(n for n in names[1] if n not in names[0]),
        kinds=tuple(kinds),
        values=tuple(v for v in values if v.count),
        states=tuple(_unequal(_said(a.manifest), _said(b.manifest), "")),
        equal=sum(not v.count for v in values),
    )


def _names(manifest: Manifest) -> dict[str, Stored]:
    """Every name of a tensor."""
    return {
        **manifest.tensors,
        **{name: manifest.tensors[of] for name, of in manifest.aliases.items() if of in manifest.tensors},
    }


def _kind(stored: Stored) -> str:
    return f"{dtype_name(stored.dtype)} {list(stored.shape)}"


# -- values ------------------------------------------------------------------------------------------------------------


def _compare(a: Opened, b: Opened, both: list[tuple[str, Stored, Stored]], tick: Tick) -> Iterator[Values]:
    parts = [
        (i, x, y, box)
        for i, (_, x, y) in enumerate(both)
        for box in slices(whole(x.shape), BLOCK // x.dtype.itemsize)
    ]
    together = room(max(len(a.files), len(b.files)))
    here = one_by_one(a.files, ((x, box) for _, x, _, box in parts), together, tick)
    there = one_by_one(b.files, ((y, box) for _, _, y, box in parts), together, tick)
    count, largest = [0] * len(both), [0.0] * len(both)
    for (i, *_), x, y in zip(parts, here, there, strict=True):
        wrong = _bits(x) != _bits(y)
        if wrong.any():
            count[i] += int(wrong.view(-1, x.itemsize).any(1).sum())
            largest[i] = max(largest[i], _apart(x, y))
    for (name, x, _), n, far in zip(both, count, largest):
        yield Values(name, n, whole(x.shape).count, far if math.isfinite(far) else None)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _apart(x: Tensor, y: Tensor) -> float:
    """The largest absolute difference; infinite where one is no number and the other is."""
    if x.dtype is torch.float4_e2m1fn_x2:
        return math.inf  # two numbers a byte, which torch does not compute with
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    x, y = x.to(wide), y.to(wide)
    far = (x - y).abs()
    far[(x == y) | (x.isnan() & y.isnan())] = 0.0  # the same infinity, and NaN with other bits
    return float(far.nan_to_num(nan=math.inf, posinf=math.inf).max())


# -- states ------------------------------------------------------------------------------------------------------------


def _said(manifest: Manifest) -> dict[str, Any]:
    run = {"step": manifest.step, "world_size": manifest.world_size, "plan": manifest.plan}
    extra = {
        name: {"bytes": file.size, "crc32": list(file.checksums)} for name, file in manifest.extra.items()
    }
    states = {name: state for name, state in manifest.states.items() if name != TRACKING}
    return {**run, "tied": manifest.aliases, "extra": extra, **states}


def _unequal(one: Any, other: Any, path: str) -> Iterator[Unequal]:
    """Where two trees, as `trees.pack` leaves them, differ."""
    here, there = _inside(one), _inside(other)
    if here is None or there is None or _form(one) != _form(other):
        if type(one) is not type(other) or one != other:
            yield Unequal(path, _shown(one), _shown(other))
        return
    for key in dict.fromkeys([*here, *there]):
        below = f"{path}/{key}" if path else str(key)
        if key in here and key in there:
            yield from _unequal(here[key], there[key], below)
        else:
            yield Unequal(below, *(_shown(tree[key]) if key in tree else "nothing" for tree in (here, there)))


def _inside(value: Any) -> dict[Any, Any] | None:
    """What a list or mapping holds; None for what holds nothing."""
    if isinstance(value, dict):
        if TAG not in value:
            return value
        value = value.get("items")
    return dict(enumerate(value)) if isinstance(value, list) else None


def _form(value: Any) -> Any:
    return value.get(TAG, dict) if isinstance(value, dict) else type(value)


def _shown(value: Any) -> str:
    if isinstance(value, dict) and TAG in value:
        value = value.get("value", value.get("name", value.get("items")))
    text = repr(value)
    return text if len(text) <= LONG else f"{text[:LONG]}…"
