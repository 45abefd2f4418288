"""A kernel: text that any launcher compiles, laid over blocks of threads.

CuPy's ElementwiseKernel compiles it for a GPU, g++ for a test. Threads of a block do not talk to one another but by sums: a body adds
to named doubles, the launcher totals them over the block, in a fixed order, and one thread goes on with the totals. So the same body
runs one thread after another on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from .rounding import ROUNDING

THREADS = 256  # of a block


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        name: a C identifier.
        arguments: "uint64 name" (an address), "int64 name" or "float64 name", each.
        body: C++17 that a thread runs. It sees the arguments, `PREAMBLE`, ``i64 block`` and ``int thread`` (below `THREADS`).
        sums: doubles, zero at first, that `body` adds to.
        after: C++17 that one thread of each block runs when `sums` are totals over the block; sees `block`.
    """

    name: str
    arguments: tuple[str, ...]
    body: str
    sums: tuple[str, ...] = ()
    after: str = ""


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
