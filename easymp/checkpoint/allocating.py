"""Memory for what a model has on the meta device and files have values for."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..strategies.meta_init import swap_in


def check_buffers(model: nn.Module) -> None:
    """No buffer is on the meta device that no file can hold.

    Raises:
        CheckpointError: one is.
    """
    stored = {id(t) for t in model.state_dict(keep_vars=True).values()}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and id(buffer) not in stored:
            raise CheckpointError(
                f"buffer {name!r} is on the meta device, and no file holds it (persistent=False): build its module off meta, or prepare "
                "the model first, which gives it values, and then load"
            )


def allocate(
    model: nn.Module, chosen: Collection[int], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Give the tensors with ids in `chosen`, which are on the meta device, memory on `device`. They stay the objects they are.

    Args:
        dtype: of floating-point ones, in place of their own.
    """

    def fresh(tensor: Tensor) -> Tensor:
        if id(tensor) not in chosen or not tensor.is_meta:
            return tensor
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        made: Tensor = torch.empty_like(tensor, device=device, dtype=kind, requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        vars(made).update(vars(tensor))  # what the user said of it
        return made

    for module in model.modules():
        own = [t for table in (module._parameters, module._buffers) for t in table.values() if t is not None]
        if any(id(t) in chosen for t in own):
            swap_in(module, fresh)
