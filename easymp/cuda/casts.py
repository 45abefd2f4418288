"""One pass where torch takes two or three: a cast that divides, and fp32 sums of low-precision tensors.

The bits are those of torch's operations, written beside each kernel (but for a division by no power of two: on GPUs torch multiplies by
the inverse, which may differ in the last bit).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .kernel import Kernel, Launcher
from .streams import TYPES, Role, flat, start_flat, stream
from .table import Row, Table, alike, dense, lay_out, place


@cache
def divide(source: torch.dtype, target: torch.dtype) -> Kernel:
    """to = from / by, rounded once."""
    roles = [Role("source"), Role("target", reads=False, writes=True)]
    return flat("divide", roles, {"source": source, "target": target}, "target = source / (float)by;", arguments=("float64 by",))


def divided(launcher: Launcher | None, source: Tensor, target: Tensor, by: float) -> Tensor:
    """`target`, filled with `source` / `by`, which is rounded once; both of one shape. `source` stays as it is."""
    fits = launcher is not None and all(t.dtype in TYPES and t.device == launcher.device and dense(t) for t in (source, target))
    if launcher is not None and fits and alike(source, target):
        start_flat(launcher, divide(source.dtype, target.dtype), [source, target], by)
        return target
    return target.copy_(source if by == 1 else source / by if source.dtype == torch.float32 else source.float() / by)


@cache
def add(source: torch.dtype) -> Kernel:
    """``total.add_(source)``, for fp32 totals."""
    return stream(
        "add", [Role("source"), Role("total", writes=True)], {"source": source, "total": torch.float32}, "total += source;"
    )


@cache
def widen(source: torch.dtype) -> Kernel:
    """``total.copy_(source)``, for fp32 totals."""
    roles = [Role("source"), Role("total", reads=False, writes=True)]
    return stream("widen", roles, {"source": source, "total": torch.float32}, "total = source;")


class Adder:
    """Adds lists of tensors to lists of fp32 totals; keeps the table, for as long as all lie where they lay."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._places: list[Any] = []
        self._kernels: list[Kernel] = []
        self._table: Table | None = None

    def __call__(self, sources: Sequence[Tensor], totals: Sequence[Tensor], fresh: Sequence[bool]) -> None:
        """Each total += its source, or = where `fresh`: one launch a dtype and kind. The tensors of a pair have equal shapes."""
        mine: list[tuple[Tensor, Tensor, bool]] = []
        for source, total, new in zip(sources, totals, fresh):
            if self._takes(source, total):
                mine.append((source, total, new))
            elif new:
                total.copy_(source)
            else:
                total.add_(source)
        places = [(*place(source), *place(total), new) for source, total, new in mine]
        if places != self._places or self._table is None:
            kinds: dict[Kernel, list[Row]] = {}
            for source, total, new in mine:
                kinds.setdefault((widen if new else add)(source.dtype), []).append(Row((source, total)))
            self._places, self._kernels = places, list(kinds)
            self._table = lay_out(list(kinds.values()), self._launcher.device)
        rows, chunks, starts = self._table.rows.data_ptr(), self._table.chunks.data_ptr(), self._table.starts
        for kernel, begin, end in zip(self._kernels, starts, starts[1:]):
            if end > begin:
                self._launcher.launch(kernel, end - begin, [rows, chunks + 8 * begin, 0])

    def _takes(self, source: Tensor, total: Tensor) -> bool:
        if source.device != self._launcher.device or total.device != source.device or total.dtype != torch.float32:
            return False
        return source.dtype in TYPES and not source.is_neg() and dense(source) and alike(source, total)
