"""2-norms of lists of tensors, wide enough for half precision, and of the whole tensors that shards are of; and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.dtensor import add_up, local


def wide_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each, in float32, or in its own dtype where that is wider."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(i)
    if len(by_kind) == 1 and tensors[0].dtype == torch.float32:
        return list(torch._foreach_norm(tensors))
    norms = list(tensors)
    for (_, dtype), places in by_kind.items():
        to = {"dtype": torch.float32} if dtype.itemsize < 4 else {}
        for i, norm in zip(places, torch._foreach_norm([tensors[i] for i in places], 2, **to)):
            norms[i] = norm
    return norms


def whole_squares(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Σ x² of each whole tensor, [tensors] on the first one's device; float64 where that has it. `tensors` are spread as `parameters`.

    A collective where any is sharded.
    """
    norms = wide_norms([values(local(t)) for t in tensors])
    device = norms[0].device
    squares = torch.stack(
        [n.to(device) if device.type == "mps" else n.to(device, torch.float64) for n in norms]
    ).square()
    add_up(parameters, squares)
    return squares


@torch.no_grad()
def multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """In memory, in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        part = local(gradient._values() if gradient.is_sparse else gradient)
        if part.numel():
            by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))


def values(tensor: Tensor) -> Tensor:
    """What a sparse tensor has of numbers, each place once; any other tensor itself."""
    return tensor.coalesce()._values() if tensor.is_sparse else tensor


def wide(tensor: Tensor) -> Tensor:
    """Outside of autograd, and in fp32 if it has half precision."""
    return tensor.detach().float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.detach()
