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
from .ready import launcher_with
from .streams import TYPES, Role, flat, start_flat, stream
from .table import Row, Table, alike, capturing, dense, lay_out, place, plain


@cache
def divide(source: torch.dtype, target: torch.dtype) -> Kernel:
    """to = from / by, rounded once."""
    roles = [Role("source"), Role("target", reads=False, writes=True)]
    return flat(
        "divide",
        roles,
        {"source": source, "target": target},
        "target = source / (float)by;",
        arguments=("float64 by",),
    )


def divided(source: Tensor, target: Tensor, by: float) -> Tensor | None:
    """`target`, filled with `source` / `by`, rounded once, in one pass; None, with nothing done, where no kernel can.

    It is then ``target.copy_(source / by)``.
    """
    if not all(
        t.dtype in TYPES and t.device == source.device and dense(t) and not t.is_neg()
        for t in (source, target)
    ):
        return None
    kernel = divide(source.dtype, target.dtype)
    launcher = launcher_with(source.device, [kernel]) if alike(source, target) else None
    if launcher is None:
        return None
    start_flat(launcher, kernel, [source, target], by)
    return target


@cache
def add(source: torch.dtype) -> Kernel:
    """``total.add_(source)``, for fp32 totals."""
    return stream(
        "add",
        [Role("source"), Role("total", writes=True)],
        {"source": source, "total": torch.float32},
        "total += source;",
    )


@cache
def widen(source: torch.dtype) -> Kernel:
    """``total.copy_(source)``, for fp32 totals."""
    roles = [Role("source"), Role("total", reads=False, writes=True)]
    return stream("widen", roles, {"source": source, "total": torch.float32}, "total = source;")


class Adder:
    """Adds lists of tensors to lists of fp32 totals; keeps the tables, for as long as all lie where they lay."""

    def __init__(self) -> None:
        self._laid: dict[torch.device, tuple[list[Any], list[Kernel], Table]] = {}
        self._captured: list[Table] = []  # what graphs point at

    def __call__(self, sources: Sequence[Tensor], totals: Sequence[Tensor], fresh: Sequence[bool]) -> None:
        """Each total += its source, or = where `fresh`; by kernels in one launch a dtype and kind.

        The two tensors of a pair have equal shapes.
        """
        mine: dict[torch.device, list[tuple[Tensor, Tensor, Kernel]]] = {}
        others: tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]] = ([], [])
        for source, total, new in zip(sources, totals, fresh):
            if _fits(source, total):
                mine.setdefault(source.device, []).append(
                    (source, total, (widen if new else add)(source.dtype))
                )
            else:
                others[new].append((source, total))
        for device, pairs in mine.items():
            launcher = launcher_with(device, list({kernel: None for *_, kernel in pairs}))
            if launcher is not None:
                self._launch(launcher, pairs)
            else:
                for source, total, kernel in pairs:
                    others[kernel is widen(source.dtype)].append((source, total))
        for pairs, do in zip(others, (torch._foreach_add_, torch._foreach_copy_)):
            if pairs:
                do([total for _, total in pairs], [source for source, _ in pairs])

    def _launch(self, launcher: Launcher, pairs: Sequence[tuple[Tensor, Tensor, Kernel]]) -> None:
        places = [(*place(source), *place(total), kernel.name) for source, total, kernel in pairs]
        laid = self._laid.get(launcher.device)
        if laid is None or laid[0] != places:
            kinds: dict[Kernel, list[Row]] = {}
            for source, total, kernel in pairs:
                kinds.setdefault(kernel, []).append(Row((source, total)))
            laid = self._laid[launcher.device] = (
                places,
                list(kinds),
                lay_out(list(kinds.values()), launcher.device),
            )
        _, kernels, table = laid
        if capturing(launcher.device):
            self._captured.append(table)
        rows, chunks = table.rows.data_ptr(), table.chunks.data_ptr()
        for kernel, begin, end in zip(kernels, table.starts, table.starts[1:]):
            if end > begin:
                launcher.launch(kernel, end - begin, [rows, chunks + 8 * begin, 0])


def _fits(source: Tensor, total: Tensor) -> bool:
    if (
        source.dtype not in TYPES
        or total.dtype != torch.float32
        or source.device != total.device
        or source.is_neg()
    ):
        return False
    return plain(source) and plain(total) and dense(source) and alike(source, total)
