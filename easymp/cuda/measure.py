"""The norm of all gradients, whether all are finite, and the factor that they are multiplied by: the first two launches of a step.

Under a loss scale s gradients are s times too large: they are measured as g / s. The factor is (1 / s) × min(1, max_norm / (norm + 1e-6)),
as `torch.nn.utils.clip_grad_norm_` has it; the step multiplies by it as it reads, so gradients are not written.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .kernel import THREADS, Kernel
from .streams import Role, stream

RESULT = ("norm", "factor", "found_inf", "inverse_scale")  # float32, what `conclude` writes

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


@cache
def unscaled(dtype: torch.dtype) -> Kernel:
    """`squares`, and each gradient becomes g / scale, rounded, where it lies: torch's ``_amp_foreach_non_finite_check_and_unscale_``."""
    return stream(
        "unscale",
        [Role("g", writes=True)],
        {"g": dtype},
        "bad += finite(g) ? 0.f : 1.f; g = g * inverse; squares += g * g;",
        arguments=("uint64 scale",),
        setup=_INVERSE,
        sums={"squares": "squares / copies", "bad": "bad"},
    )


UNSCALE = {
    dtype: unscaled(dtype) for dtype in (torch.float32, torch.bfloat16)
}  # fp16 would lose what is divided

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

# One block adds up what the blocks of `squares` left, always in the same order, so that a step gives the same bits each time.
TOTAL = Kernel(
    "total",
    (
        "uint64 partials",
        "int64 count",
        "uint64 totals",
        "int64 alone",
        "uint64 scale",
        "float64 max_norm",
        "uint64 result",
    ),
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
CONCLUDE = Kernel(
    "conclude",
    ("uint64 totals", "uint64 scale", "float64 max_norm", "uint64 result"),
    f"if (thread == 0) {{ {_CONCLUDE} }}",
)


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


def reference(grads: list[Tensor], scale: Tensor | None, max_norm: float) -> Tensor:
    """What the kernels compute, by torch: float32 in the order of `RESULT`."""
    inverse = (
        torch.ones((), dtype=torch.float64) if scale is None else scale.double().reciprocal().float().double()
    )
    total = (
        torch.stack([(g.double() * inverse).square().sum() for g in grads]).sum()
        if grads
        else torch.zeros(()).double()
    )
    bad = any(not bool(g.isfinite().all()) for g in grads)
    norm = total.sqrt()
    clip = max_norm / (norm + 1e-6)
    clip = torch.where(norm.isnan(), norm, torch.where(clip < 1.0, clip, 1.0))
    return torch.stack([norm, inverse * clip, torch.tensor(float(bad)).double(), inverse]).float()
