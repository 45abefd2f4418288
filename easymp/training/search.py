"""A search, by hooks, for the first module with numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..base.dtensor import local
from ..base.pytree import leaves

if TYPE_CHECKING:
    from .wrapper import Route

PLACES = {"inputs": "of the inputs", "output": "that arrives at the output"}


class ModuleSearch:
    """Hooks that find the first module with numbers that are not finite, in forward or in backward.

    Each module waits for the device, and meanwhile nothing runs compiled.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.result = ""  # where they are
        self.calls = 0  # forwards of models
        self._running: list[str] = []  # modules whose forward is under way, with the range of their inputs
        self._arrived: int | None = None  # at an output: a gradient that the next hook may trace to a module's inputs
        self._removals: list[Callable[[], object]] = []
        for route in routes:
            for module in route.module.modules():
                if module._compiled_call_impl is not None:
                    self._removals.append(partial(setattr, module, "_compiled_call_impl", module._compiled_call_impl))
                    module._compiled_call_impl = None
            for name, module in route.original.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                class_order = type(module).__mro__
                is_sharded = class_order[1].__name__ == "FSDPModule"  # fully_shard changes classes
                kind = class_order[2 if is_sharded else 0].__name__
                label = f"{name!r} ({kind})" if name else f"the model ({kind})"
                before, after = partial(self._before, label), partial(self._after, label)
                self._removals.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                self._removals.append(module.register_forward_hook(after).remove)

    def end(self) -> None:
        while self._removals:
            self._removals.pop()()

    def _before(self, label: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = float_tensors([args, kwargs])
        all_finite, range_text = range_of(tensors)
        if not self._running:
            self.calls += 1
        if not all_finite and not self.result:
            origin = f"computed in the forward of {self._running[-1]}" if self._running else "given to the model"
            self.result = f"the inputs of {label}, {origin}"
        self._running.append(f"{label}, whose inputs {range_text}")
        self._watch(tensors, "inputs", self._running[-1])

    def _after(self, label: str, module: nn.Module, args: Any, output: Any) -> None:
        description, tensors = self._running.pop(), float_tensors(output)
        if not self.result and not range_of(tensors)[0]:
            nonfinite = [name for name, p in module.named_parameters(recurse=False) if not finite(p)]
            cause = f"; its parameter {nonfinite[0]!r} is not finite" if nonfinite else ""
            self.result = f"the output of {description}{cause}"
        self._watch(tensors, "output", description)

    def _watch(self, tensors: Iterable[Tensor], direction: str, description: str) -> None:
        for tensor in tensors:
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(partial(self._gradient, tensor.data_ptr(), direction, description))

    def _gradient(self, pointer: int, direction: str, description: str, gradient: Tensor) -> None:
        # Hooks of a tensor run in the order of forward: as an output first, then as the inputs of the module that made
        # this gradient.
        if finite(gradient):
            return
        if not self.result or (direction == "inputs" and self._arrived == pointer):
            self.result = f"the gradient {PLACES[direction]} of {description}"
            self._arrived = pointer if direction == "output" else None


def float_tensors(tree: Any) -> list[Tensor]:
    """The dense floating-point tensors in a nested batch or in a model's output."""
    tensors = (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))
    return [t for t in tensors if t.is_floating_point() and t.layout is torch.strided and has_values(t)]


def has_values(tensor: Tensor) -> bool:
    """False of tensors that only have a shape, in a forward that a pipeline follows to find its stages."""
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")


def finite(tensor: Tensor) -> bool:
    """Whether this rank's part of a tensor is finite. Waits for the device."""
    shard = local(tensor.detach())
    if not has_values(shard):
        return True
    with _disable_current_modes():
        return bool((shard.coalesce()._values() if shard.is_sparse else shard).isfinite().all())


def range_of(tensors: Sequence[Tensor]) -> tuple[bool, str]:
    """Whether all numbers are finite, and their range in words."""
    with _disable_current_modes():  # selective recomputation expects the operations of a forward without hooks
        ranges = [shard.detach().float().aminmax() for tensor in tensors if (shard := local(tensor)).numel()]
        if not ranges:
            return True, "are no floating-point numbers"
        low, high = (float(torch.stack(ends).cpu().aminmax()[i]) for i, ends in enumerate(zip(*ranges)))
    return math.isfinite(low) and math.isfinite(high), f"range from {low:.4g} to {high:.4g}"


@contextmanager
def on_copies(model: nn.Module) -> Iterator[None]:
    """Inside, forward changes copies of the buffers."""
    buffers = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
