"""The norm of all gradients, whether all are finite, and the factor that they are multiplied by: the first two launches of a step.

Under a loss scale s gradients are s times too large: they are measured as g / s. The factor is (1 / s) × min(1, max_norm / (norm + 1e-6)),
as `torch.nn.utils.clip_grad_norm_` has it; the step multiplies by it as it reads, so gradients are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.dtensor import parts
from .kernel import THREADS, TYPES, Kernel, Role, Row, Table, capturing, dense, lay_out, places, plain, stream

if TYPE_CHECKING:
    from .cupy_launcher import CupyLauncher

RESULT = ("norm", "factor", "found_inf", "inverse_scale")  # float32, the output of `CONCLUDE`

_INVERSE = "const float inverse = scale ? (float)(1.0 / (double)*at<const float>(scale)) : 1.f;"


@cache
def squares(dtype: torch.dtype) -> Kernel:
    """Σ (g / scale)² and the number of elements that are not finite, of each chunk, at ``partials``."""
    return stream(
        "squares",
        [Role("g")],
        {"g": dtype},
        "const float x = g * inverse; squares += x * x; bad += finite(g) ? 0.f : 1.f;",
        arguments=("uint64 scale",),
        setup=_INVERSE,
        sums={"squares": "squares / copies", "bad": "bad"},
    )


_CONCLUDE = """
const double norm = sqrt(at<const double>(totals)[0]);
const double inverse = scale ? (double)(float)(1.0 / (double)*at<const float>(scale)) : 1.0;
const double clip = max_norm / (norm + 1e-6);
float* const out = at<float>(result);
out[0] = (float)norm;
out[1] = (float)(inverse * (clip < 1.0 ? clip : norm == norm ? 1.0 : norm));
out[2] = at<const double>(totals)[1] > 0.0 ? 1.f : 0.f;
out[3] = (float)inverse;
"""

# One block adds up the sums of the blocks of `squares`, always in the same order: a step gives the same bits each time.
_END = ("uint64 scale", "float64 max_norm", "uint64 result")
TOTAL = Kernel(
    "total",
    ("uint64 partials", "int64 count", "uint64 totals", "int64 alone", *_END),
    f"""
for (i64 j = thread; j < count; j += {THREADS}) {{
  squares += at<const double>(partials)[2 * j];
  bad += at<const double>(partials)[2 * j + 1];
}}
""",
    ("squares", "bad"),
    f"""
at<double>(totals)[0] = squares;
at<double>(totals)[1] = bad;
if (alone) {{
{_CONCLUDE}
}}
""",
)

# After the ranks have added their totals up.
CONCLUDE = Kernel("conclude", ("uint64 totals", *_END), f"if (thread == 0) {{ {_CONCLUDE} }}")


@cache
def totals(count: int) -> Kernel:
    """Of each row, `count` sums over its chunks, in their order; a block a row.

    Arguments: ``partials`` float64 [chunks, count]; ``firsts`` of the table; ``totals`` float64 [rows, count].
    """
    names = tuple(f"sum{i}" for i in range(count))
    adds = " ".join(f"{n} += at<const double>(partials)[{count} * j + {i}];" for i, n in enumerate(names))
    stores = " ".join(f"at<double>(totals)[{count} * block + {i}] = {n};" for i, n in enumerate(names))
    return Kernel(
        f"totals_{count}",
        ("uint64 partials", "uint64 firsts", "uint64 totals"),
        f"""
const i64* const first = at<const i64>(firsts) + block;
for (i64 j = first[0] + thread; j < first[1]; j += {THREADS}) {{ {adds} }}
""",
        names,
        stores,
    )


OverRanks = Callable[[Tensor], None]  # adds up a float64 tensor [2] over the ranks, in place; a collective


@dataclass
class _Laid:
    """Gradients where they lay when the table was made; it owns none of them, so that they can be freed."""

    owners: Sequence[Any] = ()  # their parameters
    seen: Any = (
        None  # owners and `places`; while it stays, so does the table. None where some had to be copied
    )
    dtypes: tuple[torch.dtype, ...] = ()
    table: Table | None = None
    partials: Tensor | None = None


class Gradients:
    """Measures all gradients on the launcher's device at once; `copies` is as in `protocols.Counting`."""

    def __init__(self, launcher: CupyLauncher, copies: Callable[[Any], int] = lambda owner: 1) -> None:
        self._launcher, self._copies = launcher, copies
        self._laid = _Laid()
        self._captured: list[_Laid] = []  # read by CUDA graphs

    def measure(
        self,
        gradients: Sequence[Tensor],
        owners: Sequence[Tensor],
        max_norm: float = float("inf"),
        scale: Tensor | None = None,
        over_ranks: OverRanks | None = None,
    ) -> Tensor:
        """float32 [4], as `RESULT` names them, of the strided gradients on this device in dtypes that kernels know."""
        laid, held = self._lay_out(parts(list(gradients)), owners)
        device, launch = self._launcher.device, self._launcher.launch
        self._launcher.ready([*map(squares, laid.dtypes), TOTAL, *([] if over_ranks is None else [CONCLUDE])])
        result = torch.empty(len(RESULT), dtype=torch.float32, device=device)
        totals = torch.empty(2, dtype=torch.float64, device=device)
        at, count, partials = (0 if scale is None else scale.data_ptr()), 0, 0
        if laid.table is not None and laid.partials is not None:
            count, partials = laid.table.starts[-1], laid.partials.data_ptr()
            rows, chunks = laid.table.rows.data_ptr(), laid.table.chunks.data_ptr()
            if capturing(device):
                self._captured.append(laid)
            for dtype, first, last in zip(laid.dtypes, laid.table.starts, laid.table.starts[1:]):
                if last > first:
                    given = [rows, chunks + 8 * first, partials + 16 * first, at]
                    launch(squares(dtype), last - first, given)
        end = [at, max_norm, result.data_ptr()]
        launch(TOTAL, 1, [partials, count, totals.data_ptr(), over_ranks is None, *end])
        if over_ranks is not None:
            over_ranks(totals)
            launch(CONCLUDE, 1, [totals.data_ptr(), *end])
        del held  # kept until all launches that read them are in the stream
        return result

    def _lay_out(self, gradients: list[Tensor], owners: Sequence[Any]) -> tuple[_Laid, list[Tensor]]:
        """The table of `gradients`, the last one if all is where it was; and the tensors that it points at."""
        found = places(gradients)
        seen = None if found is None else [list(map(id, owners)), *found]
        if seen is not None and seen == self._laid.seen:
            return self._laid, gradients
        kinds: dict[torch.dtype, list[Row]] = {}
        held: list[Tensor] = []
        for gradient, owner in zip(gradients, owners):
            mine = gradient.device == self._launcher.device and gradient.dtype in TYPES and plain(gradient)
            if mine and (copies := self._copies(owner)):
                here = gradient
                if not dense(gradient) or gradient.is_neg():
                    here = gradient.contiguous().resolve_neg()
                held.append(here)
                kinds.setdefault(gradient.dtype, []).append(Row((here,), copies))
                if here is not gradient:
                    seen = None
        table = lay_out(list(kinds.values()), self._launcher.device)
        partials = torch.empty((table.starts[-1], 2), dtype=torch.float64, device=self._launcher.device)
        self._laid = _Laid(owners, seen, tuple(kinds), table, partials)
        return self._laid, held
