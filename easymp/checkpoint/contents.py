"""The bytes of a rank's file, from where its tensors are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from .boxes import Box
from .buffers import as_bytes
from .planning import FilePlan
from .storage import Part

CHUNK = 2**22  # bytes copied at a time of what has no plain bytes here: on a device, or with gaps


def contents(plan: FilePlan, parts: Mapping[tuple[str, Box], Tensor]) -> Iterator[Part]:
    """Header and tensors; no copy of those that lie in memory as they will in the file, and others are copied as their turn comes."""
    yield plan.header
    for at in plan.contents:
        for tensor in _pieces(parts[at].detach()):
            yield as_bytes(tensor.cpu().resolve_conj().resolve_neg().contiguous())


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory is its value, row-major, on the CPU."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor` in parts that follow one another row-major: itself if it has plain bytes, else none of more than CHUNK bytes."""
    if not tensor.numel():
        return
    if is_plain(tensor) or tensor.numel() * tensor.itemsize <= CHUNK:
        yield tensor
        return
    row = tensor[0].numel() * tensor.itemsize
    if row > CHUNK:
        for part in tensor:
            yield from _pieces(part)
    else:
        yield from tensor.split(CHUNK // row)
