"""One pass where torch takes two or three: casts that divide, fp32 sums of low-precision tensors, normalised images.

The bits are those of torch's operations, written beside each kernel (but for a division by no power of two: on GPUs torch multiplies by
the inverse, which may differ in the last bit).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .cupy_launcher import launcher_with
from .elementwise import (
    SHORT,
    TYPES,
    Role,
    Row,
    Table,
    alike,
    capturing,
    dense,
    flat,
    lay_out,
    place,
    plain,
    start_flat,
    stream,
)
from .kernel import THREADS, Kernel, Launcher


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


# -- images -------------------------------------------------------------------------------------------------------------

# uint8 to normalised floats, channels last: one byte read and one number written a value, 16 bytes a load.
# y = (x - 255 mean) × 1 / (255 std), in this order of fp32 operations, which no compiler contracts: torch's give the same bits.


CHANNELS = (1, 3, 4)
LANES = 16  # pixels or values that a thread loads at once

_START = """
const i64 first = (block * %(threads)d + thread) * %(lanes)d;
const float* const shift = at<const float>(numbers);
const float* const times = shift + %(channels)d;
typedef unsigned char u8;
union bytes { uint4 raw; u8 x[16]; };
"""


@cache
def last(channels: int, dtype: torch.dtype) -> Kernel:
    """Of values that lie as they will: (images, rows, columns, channels). A thread takes `LANES` values."""
    start = _START % {"threads": THREADS, "lanes": LANES, "channels": channels}
    return Kernel(
        f"images_{channels}_last_{SHORT[dtype]}",
        ("uint64 source", "uint64 target", "uint64 numbers", "int64 size"),
        f"""{start}
{TYPES[dtype]}* const out = at<{TYPES[dtype]}>(target);
if (first < size) {{
  int c = (int)(first % {channels});
  if (!((source | target) & 15) && first + {LANES} <= size) {{
    bytes in;
    in.raw = __ldcs(at<const uint4>(source + first));
    float y[2][8];
#pragma unroll
    for (int k = 0; k < {LANES}; ++k) {{
      y[k / 8][k % 8] = ((float)in.x[k] - shift[c]) * times[c];
      c = c + 1 == {channels} ? 0 : c + 1;
    }}
    put<8>(out + first, y[0]);
    put<8>(out + first + 8, y[1]);
  }} else {{
    for (i64 j = first; j < first + {LANES} && j < size; ++j) {{
      down(((float)at<const u8>(source)[j] - shift[c]) * times[c], out[j]);
      c = c + 1 == {channels} ? 0 : c + 1;
    }}
  }}
}}
""",
    )


@cache
def planes(channels: int, dtype: torch.dtype) -> Kernel:
    """Of planes: (images, channels, rows × columns). A thread takes `LANES` pixels: a load a channel, and what it writes is one run."""
    start = _START % {"threads": THREADS, "lanes": LANES, "channels": channels}
    runs = LANES * channels // 8
    return Kernel(
        f"images_{channels}_planes_{SHORT[dtype]}",
        ("uint64 source", "uint64 target", "uint64 numbers", "int64 pixels", "int64 images"),
        f"""{start}
{TYPES[dtype]}* const out = at<{TYPES[dtype]}>(target);
const bool whole = !((source | target) & 15) && !(pixels % {LANES});
if (first < pixels * images) {{
  if (whole) {{
    const i64 image = first / pixels;
    const u64 from = source + image * pixels * {channels - 1} + first;
    bytes in[{channels}];
#pragma unroll
    for (int c = 0; c < {channels}; ++c) in[c].raw = __ldcs(at<const uint4>(from + c * pixels));
#pragma unroll
    for (int run = 0; run < {runs}; ++run) {{
      float y[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {{
        const int value = run * 8 + k;
        const int c = value % {channels};
        y[k] = ((float)in[c].x[value / {channels}] - shift[c]) * times[c];
      }}
      put<8>(out + first * {channels} + run * 8, y);
    }}
  }} else {{
    for (i64 j = first; j < first + {LANES} && j < pixels * images; ++j) {{
      const i64 image = j / pixels;
      for (int c = 0; c < {channels}; ++c) {{
        const u8 x = at<const u8>(source)[image * pixels * {channels - 1} + j + c * pixels];
        down(((float)x - shift[c]) * times[c], out[j * {channels} + c]);
      }}
    }}
  }}
}}
""",
    )


def normalised(images: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, C, H, W), in channels-last memory, of uint8 `images` of that shape.

    Args:
        numbers: float32 (2, C) on the images' device: 255 mean, and 1 / (255 std).
        dtype: fp32, bf16 or fp16.
    """
    out = torch.empty(images.shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    channels, size = images.shape[1], images.numel()
    lies_last = images.permute(0, 2, 3, 1).is_contiguous()
    launcher = None
    if channels in CHANNELS and (lies_last or images.is_contiguous()):
        kernel = (last if lies_last else planes)(channels, dtype)
        launcher = launcher_with(images.device, [kernel])
    if launcher is None:
        shift, times = numbers.view(2, 1, -1, 1, 1)
        return out.copy_((images.to(torch.float32) - shift).mul_(times))
    if size:
        given = [images.data_ptr(), out.data_ptr(), numbers.data_ptr()]
        threads = size if lies_last else size // channels
        rest = [size] if lies_last else [images.shape[2] * images.shape[3], images.shape[0]]
        launcher.launch(kernel, -(-threads // (THREADS * LANES)), [*given, *rest])
    return out
