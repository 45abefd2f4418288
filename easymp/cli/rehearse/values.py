"""Values of the small tensors of a rehearsal, which are computed beside the fake ones: counts, scales, flags, losses.

A number that depends on a tensor without values is taken to be 2; a flag says that all is well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

UNKNOWN_NUMBER = 2
SMALL = 64  # elements up to which a tensor has values
FALSE_FLAGS = ("any", "isnan", "isinf", "ne")  # operations whose flag of unknown values is False
# These leave a flag or a number of theirs as it is: no gradient is infinite.
KEPT = (torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default,)


class SmallValues:
    """By fake tensor of few elements its values, as a tensor on the host."""

    def __init__(self) -> None:
        self._by_tensor: Any = WeakTensorKeyDictionary()

    def read(self, tensor: Tensor) -> Any:
        """The number that the host reads of a tensor of one element."""
        value = self._by_tensor.get(tensor)
        return (default(tensor, "") if value is None else value).item()

    def copy_from_host(self, fake: Tensor, real: Tensor) -> None:
        if real.numel() <= SMALL and real.layout == torch.strided:
            self._by_tensor[fake] = real.detach().clone()

    def compute(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Compute the values of an operation's small results, after it has run on the fake tensors."""
        if func in KEPT or func.namespace not in ("aten", "prims"):
            return
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, FakeTensor)]
        if not outputs:
            return
        results = self._results(func, args, kwargs, outputs)
        for index, tensor in enumerate(outputs):
            if results is not None:
                self._by_tensor[tensor] = results[index]
            elif tensor.numel() == 1:
                self._by_tensor[tensor] = default(tensor, func.__name__)
            else:
                self._by_tensor.pop(tensor, None)

    def _results(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> list[Tensor] | None:
        """The results of the same operation on the values of its arguments; None where one of them is not known."""
        is_small = all(t.numel() <= SMALL and t.layout == torch.strided and not t.is_meta for t in outputs)
        if not is_small or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        unknown = []

        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if not isinstance(leaf, FakeTensor):
                return leaf
            value = self._by_tensor.get(leaf)
            if value is None:
                unknown.append(leaf)
            return value

        args, kwargs = tree_map(value_of, (args, kwargs))
        if unknown:
            return None
        results = tree_leaves(func(*args, **kwargs))
        if func.__name__.startswith(("empty", "new_empty")):
            for result in results:
                result.zero_()
        return results


def default(tensor: Tensor, operation: str) -> Tensor:
    """One number of a type, or a flag, that depends on what is not known."""
    number: float = UNKNOWN_NUMBER
    if tensor.dtype == torch.bool:
        number = operation.split(".")[0] not in FALSE_FLAGS
    return torch.full(tensor.shape, number, dtype=tensor.dtype)
