"""Stochastic rounding to bf16: up with the probability of what is cut off, so that many small addends are not lost.

Rounded to the nearest, a bf16 weight w takes no update below 2^-9 w; here the mean of many roundings is the number
itself ("Deep Learning with Limited Numerical Precision", Gupta et al., arXiv:1502.02551; for bf16 training,
arXiv:2010.06192).

Random bits are a hash of seed, step, parameter, role and the number of the element. No generator's state is kept: the
bits are the same for any launch and on every rank that holds the same element, and a resumed run draws those that it
would have drawn. torch's operations give the same integers as the kernel's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SettingError


def offset_of(parameter: Any) -> int:
    """The number in the whole tensor of this rank's first element: where a DTensor's shard begins; 0 of any other."""
    if not hasattr(parameter, "placements"):
        return 0
    # Heavy, and loaded already where there are DTensors.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, mesh = parameter.shape, parameter.device_mesh
    _, offsets = compute_local_shape_and_global_offset(shape, mesh, parameter.placements)
    return sum(int(offset) * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


@dataclass(frozen=True)
class Rounding:
    """How bf16 parameters and states are rounded when a step has moved them."""

    seed: int = 0  # 0 to 2^63 - 1
    # As `offset_of`; shards that are not DTensors need another. Of shards that are rows each element is rounded alike
    # on any ranks.
    offset_of: Callable[[Tensor], int] = offset_of

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise SettingError(f"seed={self.seed!r} of stochastic rounding must be from 0 to 2^63 - 1")


# 32 bits to 32 bits, one to one; constants found by search for the least bias (C. Wellons, "hash-prospector", 2018:
# lowbias32).
_SHIFTS, _FACTORS = (16, 15, 16), (0x7FEB352D, 0x846CA68B)
_HIGH = 0x9E3779B9  # stands for 2^32 elements

# For kernels: `key_of` once a block, the rest once an element.
ROUNDING = f"""
DEVICE u32 mixed(u32 x) {{
  x = (x ^ (x >> {_SHIFTS[0]})) * {_FACTORS[0]}u;
  x = (x ^ (x >> {_SHIFTS[1]})) * {_FACTORS[1]}u;
  return x ^ (x >> {_SHIFTS[2]});
}}
DEVICE u32 key_of(u64 seed, u32 step, u32 number) {{
  return mixed((u32)(seed >> 32) ^ mixed((u32)seed ^ mixed(step ^ mixed(number))));
}}
DEVICE float rounded(float x, u32 key, u32 role, i64 e) {{
  const u32 random = mixed(((u32)e ^ mixed(key + role)) + (u32)((u64)e >> 32) * {_HIGH}u) >> 16;
  return finite(x) ? float_of((bits_of(x) + random) & 0xffff0000u) : x;
}}
"""


def stochastic(x: Tensor, key: Tensor, role: int = 0, offset: int = 0) -> Tensor:
    """bf16 of fp32 `x`, dense, in its own layout: the bits that a kernel gives it.

    `key` is of `key_of`, on the device of `x`; `role` 0 for the parameter, 1 and on for its states; `offset` counts to
    the first element.
    """
    result = torch.empty_like(x, dtype=torch.bfloat16)
    source, target = (t.as_strided((t.numel(),), (1,)) for t in (x, result))
    salt = _mixed(key + role)
    for begin in range(0, x.numel(), AT_ONCE):
        numbers = source[begin : begin + AT_ONCE]
        e = torch.arange(offset + begin, offset + begin + len(numbers), device=x.device)
        random = _mixed(((e ^ salt) & MASK) + (e >> 32) * _HIGH) >> 16
        bits = numbers.view(torch.int32)
        rounded = torch.where(numbers.isfinite(), bits + random.to(torch.int32), bits) >> 16
        rounded = torch.where(numbers.isnan(), _NAN, rounded)  # torch's own NaN depends on its vector unit
        target[begin : begin + AT_ONCE] = rounded.to(torch.int16).view(torch.bfloat16)
    return result


AT_ONCE = 1 << 20  # elements, each with a few words of scratch
MASK = 0xFFFFFFFF
_NAN = 0x7FC0


def key_of(seed: int, step: int | Tensor, number: int, device: torch.device | None = None) -> Tensor:
    """int64, 0-dim: of the step (from 1; a tensor is not waited for) and the number of a parameter in its optimizer."""
    counter = step.detach().to(device, torch.int64) if isinstance(step, Tensor) else torch.tensor(step, device=device)
    key = _mixed(counter ^ _mixed(torch.tensor(number, device=device)))
    return _mixed(_mixed(key ^ (seed & MASK)) ^ (seed >> 32))


def _mixed(x: Tensor) -> Tensor:
    """Hash 32 bits, in int64: a product's lower 32 bits are right."""
    x = x & MASK
    x = ((x ^ (x >> _SHIFTS[0])) * _FACTORS[0]) & MASK
    x = ((x ^ (x >> _SHIFTS[1])) * _FACTORS[1]) & MASK
    return x ^ (x >> _SHIFTS[2])
