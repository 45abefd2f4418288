"""uint8 images to normalised floats, channels last: one byte read and one number written a value, 16 bytes a load.

y = (x - 255 mean) × 1 / (255 std), in this order of fp32 operations, which no compiler contracts: torch's operations give the same bits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .kernel import THREADS, Kernel
from .ready import launcher_with
from .streams import SHORT, TYPES

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
