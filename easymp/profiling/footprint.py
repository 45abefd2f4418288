"""What a training holds between two steps on this rank, in bytes: counted, not reckoned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import local


def footprint(prepared: Any) -> dict[str, int]:
    """Bytes of the weights (buffers too), of gradients that are there, and of the optimizers' states; what is 0 is left out."""
    models = [model.route.original for model in prepared.models]
    weights = [t for model in models for t in (*model.parameters(), *model.buffers())]
    gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
    states = [
        value
        for optimizer in prepared.optimizers
        for state in optimizer.state.values()
        for value in (state.values() if isinstance(state, dict) else ())
        if isinstance(value, Tensor)
    ]
    # fp32 masters are what the optimizer steps, and no model's parameters.
    held = [
        p for optimizer in prepared.optimizers for group in optimizer.param_groups for p in group["params"]
    ]
    known = {id(t) for t in weights}
    masters = [p for p in held if id(p) not in known]
    sizes = {"weights": weights, "masters": masters, "gradients": gradients, "optimizer": states}
    return {name: total for name, tensors in sizes.items() if (total := _bytes(tensors))}


@torch.no_grad()
def _bytes(tensors: list[Tensor]) -> int:
    """Of what lies on this rank, each memory once."""
    here = [part for tensor in tensors if not (part := local(tensor)).is_meta]
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for part in here
        if part.layout is torch.strided
    }
    return sum(storages.values())
