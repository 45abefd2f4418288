"""The table of addresses and the map of chunks, from which one launch finds all its tensors where they lie.

Nothing is copied together or moved, so gradients in DDP's buckets, shards of FSDP and torch's own state stay what they are. The table
owns nothing: who fills it keeps the tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import dense as dense
from ..base.torch_flags import TORCH
from ..errors import StepError

# Pinned memory that a capture has taken is its graph's, and not handed on (its CachingHostAllocator.h).
GRAPHS_KEEP_PINNED = TORCH >= (2, 11)
CHUNK = 16384  # elements that one block takes
HEAD = 5  # words of a row before its addresses: elements, whether all addresses are multiples of 16, `copies`, `number` and `first`
ROLES = 9  # most addresses of a row
WORDS = HEAD + ROLES


@dataclass(eq=False, slots=True)  # not frozen, for it is made at each step
class Row:
    """The tensors of one parameter.

    Attributes:
        tensors: one a role; dense, with equal sizes and strides.
        copies: ranks that hold the same elements, over which a sum counts them once.
        number: of the parameter among all of its optimizer.
        first: number of the first element here in the whole tensor.
    """

    tensors: tuple[Tensor, ...]
    copies: int = 1
    number: int = 0
    first: int = 0


@dataclass(frozen=True, eq=False)
class Table:
    """On the device.

    Attributes:
        rows: int64, rows × `WORDS`.
        chunks: int64: row << 32 | chunk of the row; rows without elements have none.
        starts: of each list of rows that was laid out, its first chunk; and the number of all chunks.
        firsts: int64: of each row, its first chunk; and the number of all chunks.
    """

    rows: Tensor
    chunks: Tensor
    starts: tuple[int, ...]
    firsts: Tensor


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
    rows = upload(words, torch.int64, device).view(number, WORDS)
    return Table(
        rows, upload(chunks, torch.int64, device), tuple(starts), upload(firsts, torch.int64, device)
    )


def upload(numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`numbers` as a tensor on `device`, without a wait for it. Quickest for an array of that type.

    Raises:
        StepError: in a capture, of a torch that gives what a replay will read to others.
    """
    if not GRAPHS_KEEP_PINNED and capturing(device):
        raise StepError(
            f"tensors lie elsewhere in this capture of a CUDA graph than in the step before, and torch {torch.__version__} does not keep "
            "what its replays would copy: leave gradients where they are (zero_grad(set_to_none=False)), or use torch 2.11 or newer"
        )
    here = (
        torch.frombuffer(numbers, dtype=dtype)
        if isinstance(numbers, array) and numbers
        else torch.tensor(numbers, dtype=dtype)
    )
    if device.type == "cuda":
        here = here.pin_memory()  # torch keeps it until the copy is done
    return here.to(device, non_blocking=True)


def capturing(device: torch.device) -> bool:
    """Whether what is launched on `device` now goes into a CUDA graph, whose replays find tables where they were."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Where `tensor` lies and how: what a table took of it. The same memory may later be another tensor's, of another kind."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def places(tensors: Sequence[Tensor]) -> list[list[Any]] | None:
    """What tells whether a table of `tensors` is one of these others too, which may lie in the same memory; None where some have none.

    Shapes are not in it, for they cost more than all the rest: of dense tensors that are `alike`, numbers of elements will do.
    """
    where = addresses(tensors)
    if where is None:
        return None
    how = (
        list(map(Tensor.stride, tensors)),
        list(map(Tensor.numel, tensors)),
        list(map(Tensor.is_neg, tensors)),
    )
    return [list(map(type, tensors)), where, [t.dtype for t in tensors], *how]


def addresses(tensors: Sequence[Tensor]) -> list[int] | None:
    """None where some have no memory of their own: sparse ones, and classes that wrap others."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:
        return None


def plain(tensor: Tensor) -> bool:
    """Whether `tensor` is strided memory, and no class of its own that computes otherwise and may have none (quantised, fake)."""
    return (
        tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether the same index is at the same distance from the beginning in both."""
    if one.shape != other.shape:
        return False
    return one.stride() == other.stride() or all(
        a == b for a, b, count in zip(one.stride(), other.stride(), one.shape) if count > 1 and one.numel()
    )
