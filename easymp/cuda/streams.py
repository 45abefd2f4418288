"""Kernels that stream over tensors: element by element, all tensors of one launch, 16 bytes a load.

What is written by hand is what happens to one element; loads, stores, conversions and the loop are made around it. Each block takes
one chunk of one tensor, as the chunk map says (`table`). A tensor that is not aligned goes through the same text one number at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernel import THREADS, Kernel, Launcher
from .table import CHUNK, HEAD, WORDS

TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class Role:
    """One tensor of each row: what `element` sees as a float of this name.

    Attributes:
        reads, writes: whether the number is loaded before, and stored after.
    """

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
    body = f"""
const u64 word = at<const u64>(chunks)[block];
const i64 tensor = (i64)(word >> 32);
const u64* const row = at<const u64>(table) + tensor * {WORDS};
const i64 begin = (i64)(word & 0xffffffffull) * {CHUNK};
const i64 left = (i64)row[0] - begin;
const i64 count = left < {CHUNK} ? left : {CHUNK};
{setup}
if ({when}) {{
{_pointers(roles, dtypes, [f"row[{HEAD + i}]" for i in range(len(roles))])}
{floats}
const bool aligned = row[1];
{_loop(roles, dtypes, element)}
{" ".join(f"{s}_sum += {s};" for s in sums)}
}}
"""
    after = ""
    if sums:
        stores = "\n".join(
            f"at<double>(partials)[block * {len(sums)} + {i}] = {text};"
            for i, text in enumerate(sums.values())
        )
        after = (
            f"const u64* const row = at<const u64>(table) + (at<const u64>(chunks)[block] >> 32) * {WORDS};\n"
        )
        seen = " ".join(f"const double {s} = {s}_sum;" for s in sums)
        after += f"const double copies = (double)row[2]; (void)copies;\n{seen}\n{stores}"
    words = "_".join([name, *(SHORT[dtypes[r.name]] for r in roles)])
    return Kernel(
        words,
        ("uint64 table", "uint64 chunks", "uint64 partials", *arguments),
        body,
        tuple(f"{s}_sum" for s in sums),
        after,
    )


def flat(
    name: str,
    roles: Sequence[Role],
    dtypes: Mapping[str, torch.dtype],
    element: str,
    *,
    arguments: Sequence[str] = (),
) -> Kernel:
    """The same over one run of memory a role: its arguments are the addresses as ``uint64 NAME_is``, ``int64 size`` and `arguments`.

    Run it by `start_flat`.
    """
    body = f"""
const i64 begin = block * {CHUNK};
const i64 left = size - begin;
const i64 count = left < {CHUNK} ? left : {CHUNK};
{_pointers(roles, dtypes, [f"{r.name}_is" for r in roles])}
const bool aligned = !(({" | ".join(f"{r.name}_is" for r in roles)}) & 15);
{_loop(roles, dtypes, element)}
"""
    words = "_".join([name, *(SHORT[dtypes[r.name]] for r in roles)])
    return Kernel(words, (*(f"uint64 {r.name}_is" for r in roles), "int64 size", *arguments), body)


def start_flat(
    launcher: Launcher, kernel: Kernel, tensors: Sequence[Tensor], *arguments: int | float
) -> None:
    """Run a `flat` kernel over `tensors`, one a role: dense, and equal in their number of elements and their order."""
    size = tensors[0].numel()
    if size:
        launcher.launch(kernel, -(-size // CHUNK), [*(t.data_ptr() for t in tensors), size, *arguments])


def _pointers(roles: Sequence[Role], dtypes: Mapping[str, torch.dtype], addresses: Sequence[str]) -> str:
    kinds = [f"{'' if r.writes else 'const '}{TYPES[dtypes[r.name]]}" for r in roles]
    return "\n".join(
        f"{kind}* const {r.name}_at = at<{kind}>({address}) + begin;"
        for r, kind, address in zip(roles, kinds, addresses)
    )


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
