"""What a forward keeps for its backward, in bytes, without running it: on fake tensors, which have shapes and no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base.pytree import map_leaves
from ..errors import BatchError


def bytes_saved(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    compute: torch.dtype | None = None,
    stored: torch.dtype | None = None,
    change: Callable[[nn.Module], object] = lambda model: None,
) -> int:
    """Bytes of the distinct storages that autograd saves in ``model(*args, **kwargs)``, parameters and buffers not counted.

    What the kernels of a CPU save counts; a GPU's may save something else (fused attention, recurrent layers). Parts under
    activation checkpointing count with the inputs that they save. `model` and its random streams are left alone, and it may be on the meta
    device.

    Args:
        compute: autocast's type, or None for no autocast. Its copies of weights are not counted.
        stored: what floating-point parameters, buffers and inputs are converted to before; None leaves them as they are.
        change: called with the copy of `model` whose forward is followed.

    Raises:
        BatchError: the forward cannot be followed by shapes alone.
    """
    # Imported here: few runs need it.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = stored if stored is not None and leaf.is_floating_point() else leaf.dtype
        fake = torch.empty_strided(leaf.size(), leaf.stride(), dtype=dtype, device="cpu")
        if isinstance(leaf, nn.Parameter):
            return nn.Parameter(fake, leaf.requires_grad)
        return fake.requires_grad_(leaf.requires_grad)

    held: list[Tensor] = []  # kept alive, so that no two storages have one address
    weights: set[int] = set()
    saved: dict[int, int] = {}

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and _place(args[0]) in weights:
                held.append(out)
                weights.add(_place(out))
            return out

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        saved[_place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            memo = {id(t): twin(t) for t in [*model.parameters(), *model.buffers()]}
            weights.update(_place(t) for t in memo.values())
            shapes = copy.deepcopy(model, dict(memo))
            change(shapes)
            args, kwargs = map_leaves(twin, tuple(args)), map_leaves(twin, dict(kwargs))
            with (
                torch.enable_grad(),
                Casts(),
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                torch.autocast("cpu", compute or torch.bfloat16, compute is not None),
            ):
                shapes(*args, **kwargs)
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        raise BatchError(
            f"the forward of {type(model).__name__} cannot be followed by shapes alone ({type(error).__name__}: {why}): check that the "
            "sample is what it takes, or leave the sample out"
        ) from error
    return sum(size for place, size in saved.items() if place not in weights)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
