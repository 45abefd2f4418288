"""Kernels as text, kernels that stream over tensors, and the table of addresses that a launch reads.

Threads of a block exchange sums only: a body adds to named doubles, the launcher totals them over the block in a fixed
order, and one thread continues with the totals. So the same body runs on a CPU, one thread after another.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import dense as dense
from ..base.rng import TORCH
from ..errors import SettingError, StepError

THREADS = 256  # of a block


@dataclass(frozen=True)
class Kernel:
    """Source of a CUDA kernel: its name, its arguments, and its body in C++."""

    name: str  # a C identifier
    arguments: tuple[str, ...]  # "uint64 name" (an address), "int64 name" or "float64 name", each
    # C++17 that a thread runs; sees the arguments, `PREAMBLE`, ``i64 block`` and ``int thread`` (below `THREADS`)
    body: str
    sums: tuple[str, ...] = ()  # doubles, zero at first, that `body` adds to
    after: str = ""  # C++17 that one thread of each block runs when `sums` are totals over the block; sees `block`


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

# Functions of kernels, which need no header of a CUDA toolkit. A launcher puts its own definitions in front: ``DEVICE``
# (the mark of a function of the device), ``half_to_float``, ``float_to_half`` and the streaming loads and stores
# ``__ldcs`` and ``__stcs`` of 4-, 8- and 16-byte words.
PREAMBLE = (
    r"""
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

struct bf16 { u16 bits; };
struct fp16 { u16 bits; };

template <class T> DEVICE T* at(u64 address) { return reinterpret_cast<T*>(address); }

union word32 { float number; u32 bits; };
DEVICE u32 bits_of(float x) { word32 w; w.number = x; return w.bits; }
DEVICE float float_of(u32 bits) { word32 w; w.bits = bits; return w.number; }

DEVICE bool finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

DEVICE float up(float x) { return x; }
DEVICE float up(bf16 x) { return float_of((u32)x.bits << 16); }
DEVICE float up(fp16 x) { return half_to_float(x.bits); }

// To the nearest, ties to even, as torch rounds.
DEVICE void down(float x, float& y) { y = x; }
DEVICE void down(float x, bf16& y) {
  const u32 b = bits_of(x);
  y.bits = x != x ? 0x7fc0u : (u16)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
DEVICE void down(float x, fp16& y) { y.bits = float_to_half(x); }

template <class T, class S> DEVICE auto where(bool condition, T x, S y) { return condition ? x : y; }
DEVICE float maximum(float x, float y) { return x > y ? x : y; }
DEVICE float sign(float x) { return x > 0.f ? 1.f : x < 0.f ? -1.f : 0.f * x; }

// N numbers in words of up to 16 bytes: `from` is aligned to them.
template <int BYTES> struct words;
template <> struct words<8> { typedef uint2 type; };
template <> struct words<16> { typedef uint4 type; };
template <> struct words<32> { typedef uint4 type; };

template <class T, int N> union pack {
  typedef typename words<N * sizeof(T)>::type word;
  word raw[N * sizeof(T) / sizeof(word)];
  T x[N];
};

template <int N, class T> DEVICE void get(const T* from, float (&to)[N]) {
  pack<T, N> p;
#pragma unroll
  for (int k = 0; k < (int)(sizeof(p.raw) / sizeof(p.raw[0])); ++k)
    p.raw[k] = __ldcs(reinterpret_cast<const typename pack<T, N>::word*>(from) + k);
#pragma unroll
  for (int k = 0; k < N; ++k) to[k] = up(p.x[k]);
}

template <int N, class T> DEVICE void put(T* to, const float (&from)[N]) {
  pack<T, N> p;
#pragma unroll
  for (int k = 0; k < N; ++k) down(from[k], p.x[k]);
#pragma unroll
  for (int k = 0; k < (int)(sizeof(p.raw) / sizeof(p.raw[0])); ++k)
    __stcs(reinterpret_cast<typename pack<T, N>::word*>(to) + k, p.raw[k]);
}
"""
    + ROUNDING
)


# -- kernels that stream over tensors, element by element --------------------------------------------------------------

# Each block processes one chunk of one tensor, by the chunk map of a `Table`. A tensor that is not aligned runs the
# same text one number at a time.

TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class Role:
    """One tensor of each row, in the text a float of this name: loaded before (`reads`), stored after (`writes`)."""

    name: str
    reads: bool = True
    writes: bool = False


def stream(
    name: str,
    roles: Sequence[Role],
    dtypes: Mapping[str, torch.dtype],
    element: str,
    *,
    arguments: Sequence[str] = (),
    setup: str = "",
    condition: str = "true",
    sums: Mapping[str, str] | None = None,
) -> Kernel:
    """A kernel over chunks, with the arguments ``uint64 table, uint64 chunks, uint64 partials`` and `arguments`.

    `roles` are in the order of the table's addresses. `element` is C++ for one element: it reads and sets floats with
    the names of the roles and of `sums`; ``i64 e`` is the index of the element in memory. `setup` runs before the loop
    and sees ``i64 tensor`` (the row) and the arguments. `sums` maps a name to a C++ expression of the sum and
    ``copies`` (the number of ranks that hold the tensor). Each block stores one double for each sum at ``partials``.
    """
    sums = sums or {}
    pointers = "\n".join(
        f"{'' if role.writes else 'const '}{TYPES[dtypes[role.name]]}* const {role.name}_at = "
        f"at<{'' if role.writes else 'const '}{TYPES[dtypes[role.name]]}>(row[{HEAD + i}]) + begin;"
        for i, role in enumerate(roles)
    )
    body = f"""
const u64 chunk = at<const u64>(chunks)[block];
const i64 tensor = (i64)(chunk >> 32);
const u64* const row = at<const u64>(table) + tensor * {WORDS};
const i64 begin = (i64)(chunk & 0xffffffffull) * {CHUNK};
const i64 left = (i64)row[0] - begin;
const i64 count = left < {CHUNK} ? left : {CHUNK};
{setup}
if ({condition}) {{
{pointers}
{"".join(f"float {s} = 0.f;" for s in sums)}
const bool aligned = row[1];
{_loop(roles, dtypes, element)}
{" ".join(f"{s}_sum += {s};" for s in sums)}
}}
"""
    after = ""
    if sums:
        stores = (f"at<double>(partials)[block * {len(sums)} + {i}] = {text};" for i, text in enumerate(sums.values()))
        after = f"""
const u64* const row = at<const u64>(table) + (at<const u64>(chunks)[block] >> 32) * {WORDS};
const double copies = (double)row[2]; (void)copies;
{" ".join(f"const double {s} = {s}_sum;" for s in sums)}
{" ".join(stores)}
"""
    full_name = "_".join([name, *(SHORT[dtypes[role.name]] for role in roles)])
    all_arguments = ("uint64 table", "uint64 chunks", "uint64 partials", *arguments)
    return Kernel(full_name, all_arguments, body, tuple(f"{s}_sum" for s in sums), after)


def _loop(roles: Sequence[Role], dtypes: Mapping[str, torch.dtype], element: str) -> str:
    """C++ over `count` elements from number `begin` on, in 16-byte words where `aligned`."""
    lanes = 4 if all(dtypes[role.name] == torch.float32 for role in roles) else 8
    parameters = ", ".join(f"{'float&' if role.writes else 'const float'} {role.name}" for role in roles)
    return f"""
auto element = [&](const i64 e, {parameters}) {{
(void)e;
{element}
}};
const i64 whole = aligned ? count / {lanes} * {lanes} : 0;
for (i64 j = (i64)thread * {lanes}; j < whole; j += {THREADS * lanes}) {{
  {" ".join(f"float {role.name}[{lanes}];" for role in roles)}
  {" ".join(f"get<{lanes}>({role.name}_at + j, {role.name});" for role in roles if role.reads)}
#pragma unroll
  for (int k = 0; k < {lanes}; ++k) element(begin + j + k, {", ".join(f"{role.name}[k]" for role in roles)});
  {" ".join(f"put<{lanes}>({role.name}_at + j, {role.name});" for role in roles if role.writes)}
}}
for (i64 j = whole + thread; j < count; j += {THREADS}) {{
  {" ".join(f"float {role.name}{f' = up({role.name}_at[j])' if role.reads else ''};" for role in roles)}
  element(begin + j, {", ".join(role.name for role in roles)});
  {" ".join(f"down({role.name}, {role.name}_at[j]);" for role in roles if role.writes)}
}}
"""


# -- the table ---------------------------------------------------------------------------------------------------------

# Nothing is copied or moved, so gradients in DDP's buckets, shards of FSDP and torch's own state stay where they are.
# The table owns nothing: its maker keeps the tensors.

# From this torch on, pinned memory that a capture has used belongs to its graph (CachingHostAllocator.h).
GRAPHS_KEEP_PINNED = TORCH >= (2, 11)
CHUNK = 16384  # elements of a block
# Words of a row before its addresses: elements, whether all addresses are multiples of 16, `copies`, `number`,
# `offset`.
HEAD = 5
ROLES = 9  # most addresses of a row
WORDS = HEAD + ROLES


@dataclass(eq=False, slots=True)  # frozen ones take longer to make
class Row:
    """The tensors of one parameter."""

    tensors: tuple[Tensor, ...]  # one for each role; dense, with equal sizes and strides
    copies: int = 1  # ranks that hold the same elements, over which a sum counts them once; 0: other ranks count them
    number: int = 0  # of the parameter among all of its optimizer
    offset: int = 0  # number of the first element here in the whole tensor


@dataclass(frozen=True, eq=False)
class Table:
    """Tables on the device, in int64."""

    rows: Tensor  # rows × `WORDS`
    chunks: Tensor  # row << 32 | chunk of the row; rows without elements have none
    starts: tuple[int, ...]  # the first chunk of each list of rows, and the number of all chunks; on the host


def lay_out(row_lists: Sequence[Sequence[Row]], device: torch.device) -> Table:
    """Build the table of `row_lists` on `device`, one list for each kernel. Does not wait for the device."""
    row_words, chunks = array("q"), array("q")
    starts = [0]
    number = 0
    for rows in row_lists:
        for row in rows:
            count = row.tensors[0].numel()  # below 2^46, for the bits of a chunk's number
            pointers = [t.data_ptr() for t in row.tensors]
            aligned = not any(pointer & 15 for pointer in pointers)
            head = [count, aligned, row.copies, row.number, row.offset]
            row_words.extend([*head, *pointers, *[0] * (ROLES - len(pointers))])
            chunks.extend(range(number << 32, (number << 32) + -(-count // CHUNK)))
            number += 1
        starts.append(len(chunks))
    return Table(
        rows=upload(row_words, torch.int64, device).view(number, WORDS),
        chunks=upload(chunks, torch.int64, device),
        starts=tuple(starts),
    )


def upload(numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`numbers` as a tensor on `device`, without a wait for it. Quickest for an array of that type."""
    if not GRAPHS_KEEP_PINNED and capturing(device):
        raise StepError(
            f"tensors have moved since the step before, and torch {torch.__version__} reuses memory that replays of "
            "this graph copy: leave gradients where they are (zero_grad(set_to_none=False)), or use torch 2.11"
        )
    packed = isinstance(numbers, array) and bool(numbers)
    on_host = torch.frombuffer(numbers, dtype=dtype) if packed else torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        on_host = on_host.pin_memory()  # torch keeps it until the copy is done
    return on_host.to(device, non_blocking=True)


def capturing(device: torch.device) -> bool:
    """Whether launches on `device` go into a CUDA graph now. Its replays read the same tables."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def facts_of(tensors: Sequence[Tensor]) -> list[list[Any]] | None:
    """A key of `tensors`: tensors with the same key can use the same table. None where they have no addresses."""
    # Shapes cost more than all other facts; of dense tensors, strides and numbers of elements will do.
    pointers = addresses(tensors)
    if pointers is None:
        return None
    facts: Any = (type, Tensor.dtype.__get__, Tensor.stride, Tensor.numel, Tensor.is_neg)  # type: ignore[attr-defined]
    return [pointers, *(list(map(fact, tensors)) for fact in facts)]


def addresses(tensors: Sequence[Tensor]) -> list[int] | None:
    """None where some have no memory of their own: sparse ones, and classes that wrap others."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:
        return None


def supports(tensor: Tensor, device: torch.device) -> bool:
    """Whether kernels on `device` read `tensor`: strided, of a dtype of TYPES, without a ``__torch_dispatch__``."""
    return (
        tensor.device == device
        and tensor.dtype in TYPES
        and tensor.layout is torch.strided
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def same_layout(x: Tensor, y: Tensor) -> bool:
    """Whether the same index is at the same distance from the beginning in both."""
    if x.shape != y.shape:
        return False
    return x.stride() == y.stride() or all(
        a == b for a, b, count in zip(x.stride(), y.stride(), x.shape) if count > 1 and x.numel()
    )


# -- stochastic rounding to bf16: up with the probability of what is cut off -------------------------------------------

# Rounded to the nearest, a bf16 weight w takes no update below 2^-9 w; here the mean of many roundings is the number
# itself ("Deep Learning with Limited Numerical Precision", Gupta et al., arXiv:1502.02551; for bf16 training,
# arXiv:2010.06192).
#
# Random bits are a hash of seed, step, parameter, role and the number of the element. No generator's state is kept: the
# bits are the same for any launch and on every rank that holds the same element, and a resumed run draws those that it
# would have drawn. torch's operations give the same integers as the kernel's.


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
