"""Stochastic rounding to bf16: up with the probability of the part that is cut off, so that many small addends are not lost.

Rounded to the nearest, a bf16 weight w takes no update below 2^-9 w; here the mean of many roundings is the number itself ("Deep Learning
with Limited Numerical Precision", Gupta et al., arXiv:1502.02551; for bf16 training, arXiv:2010.06192).

Random bits are a hash of seed, step, parameter, role and the number of the element. No generator's state is kept: the bits are the same
for any launch and on every rank that holds the same element, and a resumed run draws those that it would have drawn. torch's operations
give the same integers as the kernel's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import SettingError

_firsts: Any = WeakIdKeyDictionary()  # DTensor → its placements, and the result of `first_of`


def first_of(parameter: Any) -> int:
    """The number in the whole tensor of the first element on this rank: where a DTensor's shard begins; 0 of any other."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return 0
    known = _firsts.get(parameter)
    if known is None or known[0] != placements:
        # Heavy, and loaded already where there are DTensors.
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
        sizes = [*parameter.shape[1:], 1]
        known = placements, sum(offset * math.prod(sizes[dim:]) for dim, offset in enumerate(offsets))
        _firsts[parameter] = known
    return known[1]


@dataclass(frozen=True)
class Rounding:
    """How bf16 parameters and states are rounded when a step has moved them.

    Attributes:
        seed: 0 to 2^63 - 1.
        first: as `first_of`; shards that are not DTensors need another. Of shards that are rows each element is rounded alike on any ranks.
    """

    seed: int = 0
    first: Callable[[Tensor], int] = first_of

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise SettingError(f"seed={self.seed!r} of stochastic rounding must be from 0 to 2^63 - 1")


# 32 bits to 32 bits, one to one; constants found by search for the least bias (C. Wellons, "hash-prospector", 2018: lowbias32).
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


def stochastic(x: Tensor, key: Tensor, role: int = 0, first: int = 0) -> Tensor:
    """bf16 of fp32 `x`, dense, in its own layout: the bits that a kernel gives it.

    `key` is of `key_of`, on the device of `x`; `role` 0 for the parameter, 1 and on for its states; `first` counts to the first element.
    """
    out = torch.empty_like(x, dtype=torch.bfloat16)
    flat, into = (t.as_strided((t.numel(),), (1,)) for t in (x, out))
    salt = _mixed(key + role)
    for begin in range(0, x.numel(), _PIECE):  # a few words of scratch an element
        piece = flat[begin : begin + _PIECE]
        e = torch.arange(first + begin, first + begin + len(piece), device=x.device)
        random = _mixed(_low(e ^ salt) + (e >> 32) * _HIGH) >> 16
        bits = piece.view(torch.int32)
        moved = torch.where(piece.isfinite(), bits + random.to(torch.int32), bits) >> 16
        moved = torch.where(piece.isnan(), _NAN, moved)  # torch's own NaN depends on its vector unit
        into[begin : begin + _PIECE] = moved.to(torch.int16).view(torch.bfloat16)
    return out


_PIECE = 1 << 20
_NAN = 0x7FC0


def key_of(seed: int, step: int | Tensor, number: int, device: torch.device | None = None) -> Tensor:
    """int64, 0-dim: of the step (from 1; a tensor is not waited for) and the number of a parameter in its optimizer."""
    known = isinstance(step, Tensor)
    step = step.detach().to(device, torch.int64) if known else torch.tensor(step, device=device)  # type: ignore[union-attr]
    key = _mixed(step ^ _mixed(torch.tensor(number, device=device)))
    return _mixed(_mixed(key ^ (seed & 0xFFFFFFFF)) ^ (seed >> 32))


def _low(x: Tensor) -> Tensor:
    return x & 0xFFFFFFFF


def _mixed(x: Tensor) -> Tensor:
    """Hash 32 bits, in int64: a product's lower 32 bits are right."""
    x = _low(x)
    x = _low((x ^ (x >> _SHIFTS[0])) * _FACTORS[0])
    x = _low((x ^ (x >> _SHIFTS[1])) * _FACTORS[1])
    return x ^ (x >> _SHIFTS[2])
