"""Kernels as text: what a launcher compiles, kernels that stream over tensors, and the table of addresses that a launch reads.

CuPy's ElementwiseKernel compiles a kernel for a GPU, g++ for a test. Threads of a block talk to one another only by sums: a body adds to
named doubles, the launcher totals them over the block, in a fixed order, and one thread goes on with the totals. So the same body runs one
thread after another on a CPU.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import dense as dense
from ..base.rng import TORCH
from ..errors import StepError
from .rounding import ROUNDING

THREADS = 256  # of a block


@dataclass(frozen=True)
class Kernel:
    """One kernel."""

    name: str  # a C identifier
    arguments: tuple[str, ...]  # "uint64 name" (an address), "int64 name" or "float64 name", each
    body: str  # C++17 that a thread runs; sees the arguments, `PREAMBLE`, ``i64 block`` and ``int thread`` (below `THREADS`)
    sums: tuple[str, ...] = ()  # doubles, zero at first, that `body` adds to
    after: str = (
        ""  # C++17 that one thread of each block runs when `sums` are totals over the block; sees `block`
    )


# Words that kernels are written in: numbers of half precision, and loads and stores of 16 bytes. A launcher puts its own part in front:
# ``DEVICE`` (the mark of a function of the device), ``half_to_float``, ``float_to_half`` and the streaming loads and stores ``__ldcs`` and
# ``__stcs`` of 4-, 8- and 16-byte words. No header is needed, so any CUDA toolkit will do.
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


# -- kernels that stream over tensors, element by element -----------------------------------------------------------------

# A rule writes the text for one element; loads, stores, conversions and the loop are generated around it. Each block takes one chunk of one
# tensor, by the chunk map of a `Table`. A tensor that is not aligned goes through the same text one number at a time.

TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class Role:
    """One tensor of each row: a float of this name in `element`, which is loaded before (`reads`) and stored after (`writes`)."""

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
    when: str = "true",
    sums: Mapping[str, str] | None = None,
) -> Kernel:
    """A kernel over chunks, with the arguments ``uint64 table, uint64 chunks, uint64 partials`` and `arguments`.

    Args:
        roles: in the order of the table's addresses.
        dtypes: of each role; fp32, bf16 or fp16.
        element: C++ on floats named as the roles, and on `sums`; ``i64 e`` is the element's number in its tensor, in memory's order.
        setup: C++ before the loop; sees ``i64 tensor`` (the row) and the arguments.
        when: C++; whether there is anything to do.
        sums: name → C++ of the total that is stored, a double a block and sum at ``partials``, which sees the sum by its name and
            ``copies`` (on how many ranks the tensor lies).
    """
    sums = sums or {}
    floats = "".join(f"float {s} = 0.f;\n" for s in sums)
    kinds = [f"{'' if r.writes else 'const '}{TYPES[dtypes[r.name]]}" for r in roles]
    pointer = "{0}* const {1}_at = at<{0}>(row[{2}]) + begin;"
    pointers = "\n".join(pointer.format(k, r.name, HEAD + i) for i, (k, r) in enumerate(zip(kinds, roles)))
    body = f"""
const u64 word = at<const u64>(chunks)[block];
const i64 tensor = (i64)(word >> 32);
const u64* const row = at<const u64>(table) + tensor * {WORDS};
const i64 begin = (i64)(word & 0xffffffffull) * {CHUNK};
const i64 left = (i64)row[0] - begin;
const i64 count = left < {CHUNK} ? left : {CHUNK};
{setup}
if ({when}) {{
{pointers}
{floats}
const bool aligned = row[1];
{_loop(roles, dtypes, element)}
{" ".join(f"{s}_sum += {s};" for s in sums)}
}}
"""
    after = ""
    if sums:
        into = f"at<double>(partials)[block * {len(sums)} + "
        stores = "\n".join(f"{into}{i}] = {text};" for i, text in enumerate(sums.values()))
        seen = " ".join(f"const double {s} = {s}_sum;" for s in sums)
        after = f"""const u64* const row = at<const u64>(table) + (at<const u64>(chunks)[block] >> 32) * {WORDS};
const double copies = (double)row[2]; (void)copies;
{seen}
{stores}"""
    words = "_".join([name, *(SHORT[dtypes[r.name]] for r in roles)])
    given = ("uint64 table", "uint64 chunks", "uint64 partials", *arguments)
    return Kernel(words, given, body, tuple(f"{s}_sum" for s in sums), after)


def _loop(roles: Sequence[Role], dtypes: Mapping[str, torch.dtype], element: str) -> str:
    """Over `count` elements from number `begin` on, whole words of them where `aligned`."""
    lanes = 4 if all(dtypes[r.name] == torch.float32 for r in roles) else 8
    parameters = ", ".join(f"{'float&' if r.writes else 'const float'} {r.name}" for r in roles)
    return f"""
auto element = [&](const i64 e, {parameters}) {{
(void)e;
{element}
}};
const i64 whole = aligned ? count / {lanes} * {lanes} : 0;
for (i64 j = (i64)thread * {lanes}; j < whole; j += {THREADS * lanes}) {{
  {" ".join(f"float {r.name}[{lanes}];" for r in roles)}
  {" ".join(f"get<{lanes}>({r.name}_at + j, {r.name});" for r in roles if r.reads)}
#pragma unroll
  for (int k = 0; k < {lanes}; ++k) element(begin + j + k, {", ".join(f"{r.name}[k]" for r in roles)});
  {" ".join(f"put<{lanes}>({r.name}_at + j, {r.name});" for r in roles if r.writes)}
}}
for (i64 j = whole + thread; j < count; j += {THREADS}) {{
  {" ".join(f"float {r.name}{f' = up({r.name}_at[j])' if r.reads else ''};" for r in roles)}
  element(begin + j, {", ".join(r.name for r in roles)});
  {" ".join(f"down({r.name}, {r.name}_at[j]);" for r in roles if r.writes)}
}}
"""


# -- the table ----------------------------------------------------------------------------------------------------------

# Nothing is copied or moved, so gradients in DDP's buckets, shards of FSDP and torch's own state stay where they are. The table owns
# nothing: its maker keeps the tensors.

# From this torch on, pinned memory that a capture has taken belongs to its graph (CachingHostAllocator.h).
GRAPHS_KEEP_PINNED = TORCH >= (2, 11)
CHUNK = 16384  # elements that one block takes
HEAD = 5  # words of a row before its addresses: elements, whether all addresses are multiples of 16, `copies`, `number` and `first`
ROLES = 9  # most addresses of a row
WORDS = HEAD + ROLES


@dataclass(eq=False, slots=True)  # frozen ones take longer to make
class Row:
    """The tensors of one parameter."""

    tensors: tuple[Tensor, ...]  # one a role; dense, with equal sizes and strides
    copies: int = 1  # ranks that hold the same elements, over which a sum counts them once
    number: int = 0  # of the parameter among all of its optimizer
    first: int = 0  # number of the first element here in the whole tensor


@dataclass(frozen=True, eq=False)
class Table:
    """Tensors on the device, in int64."""

    rows: Tensor  # rows × `WORDS`
    chunks: Tensor  # row << 32 | chunk of the row; rows without elements have none
    # The first chunk of each list of rows that was laid out; and the number of all chunks.
    starts: tuple[int, ...]
    firsts: Tensor  # the first chunk of each row; and the number of all chunks


def lay_out(kinds: Sequence[Sequence[Row]], device: torch.device) -> Table:
    """A table of the rows of all `kinds`, one list a kernel that will run over it; copied without a wait for the device."""
    words, chunks = array("q"), array("q")
    starts, firsts = [0], [0]
    number = 0
    for rows in kinds:
        for row in rows:
            count = row.tensors[0].numel()  # below 2^46, for the part of a chunk's word
            addresses = [t.data_ptr() for t in row.tensors]
            aligned = not any(a & 15 for a in addresses)
            head = [count, aligned, row.copies, row.number, row.first]
            words.extend([*head, *addresses, *[0] * (ROLES - len(addresses))])
            chunks.extend(range(number << 32, (number << 32) + -(-count // CHUNK)))
            firsts.append(len(chunks))
            number += 1
        starts.append(len(chunks))
    rows, pieces, begins = (upload(numbers, torch.int64, device) for numbers in (words, chunks, firsts))
    return Table(rows.view(number, WORDS), pieces, tuple(starts), begins)


def upload(numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`numbers` as a tensor on `device`, without a wait for it. Quickest for an array of that type."""
    if not GRAPHS_KEEP_PINNED and capturing(device):
        why = f"tensors have moved since the step before, and torch {torch.__version__} reuses what replays of this graph copy"
        raise StepError(
            f"{why}: leave gradients where they are (zero_grad(set_to_none=False)), or use torch 2.11"
        )
    packed = isinstance(numbers, array) and bool(numbers)
    here = torch.frombuffer(numbers, dtype=dtype) if packed else torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        here = here.pin_memory()  # torch keeps it until the copy is done
    return here.to(device, non_blocking=True)


def capturing(device: torch.device) -> bool:
    """Whether launches on `device` go into a CUDA graph now. Its replays read the same tables."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def places(tensors: Sequence[Tensor]) -> list[list[Any]] | None:
    """Facts that are equal for other tensors only if a table of `tensors` serves these, too; None where some have no own memory."""
    # Shapes cost more than all the rest: of dense tensors that are `alike`, numbers of elements will do.
    where = addresses(tensors)
    if where is None:
        return None
    how: Any = (type, Tensor.stride, Tensor.numel, Tensor.is_neg)
    return [where, [t.dtype for t in tensors], *(list(map(fact, tensors)) for fact in how)]


def addresses(tensors: Sequence[Tensor]) -> list[int] | None:
    """None where some have no memory of their own: sparse ones, and classes that wrap others."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:
        return None


def plain(tensor: Tensor) -> bool:
    """Whether `tensor` is strided memory, and not of a class with operations of its own (quantised, fake)."""
    return tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether the same index is at the same distance from the beginning in both."""
    if one.shape != other.shape:
        return False
    return one.stride() == other.stride() or all(
        a == b for a, b, count in zip(one.stride(), other.stride(), one.shape) if count > 1 and one.numel()
    )
