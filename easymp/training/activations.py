"""Activations of a forward, counted on fake tensors, which have shapes and no memory; and how many blocks to recompute.

A block that is recomputed keeps its inputs (with "attention" also its products), and is whole again for a while in
backward. Blocks are recomputed from the first on: when backward comes to them, those that were kept have been freed.
"""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..base.pytree import leaves, map_leaves
from ..base.units import size
from ..errors import BatchError, SettingError
from ..logging import get_logger
from ..nn import SyncBatchNorm
from ..protocols import Precision
from ..strategies.transforms import Recompute, find_recomputed, recompute
from .peak import Places, Storage, largest

logger = get_logger(__name__)


class Activations(NamedTuple):
    """Bytes of activations on the device at the peak, and how they came about."""

    bytes: int
    copies: int  # how much higher the peak is with autocast's copies of weights
    plain: int  # bytes, if nothing were recomputed
    blocks: int  # parts that are recomputed
    of: int  # parts that may be
    largest: Sequence[dict[str, Any]] = ()  # at the peak, as `peak.largest` tells them

    def __str__(self) -> str:
        less = f"{size(self.bytes)} of activations instead of {size(self.plain)}"
        return f"{self.blocks} of {self.of} blocks are recomputed: {less}"


def count_activations(
    model: nn.Module,
    policy: Precision,
    sample: Any,
    recomputed: Recompute | None,
    available: int = 0,
    offload: bool = False,
) -> Activations:
    """Count the activations of a training step at its peak.

    `available` is the limit in bytes where `recomputed` leaves the number of blocks open. With `offload`, activations
    that forward keeps for backward are in the host's memory, and do not count.
    """
    autocast = policy.param == torch.float32
    compute = policy.compute if autocast and policy.compute != torch.float32 else None
    follow_arguments = (*_arguments(sample), compute, None if autocast else policy.param)
    parts = len(find_recomputed([model], recomputed)) if recomputed else 0

    @cache
    def follow(blocks: int) -> Alive:
        def change(twin: nn.Module) -> None:
            if blocks:
                found = find_recomputed([twin], recomputed)  # type: ignore[arg-type]
                recompute(found[:blocks], recomputed.selective)  # type: ignore[union-attr]

        alive = follow_step(model, *follow_arguments, change)
        return alive._replace(peak=alive.peak - alive.kept) if offload else alive

    blocks = parts
    if recomputed and recomputed.below is not None:
        blocks = min(parts, bisect_left(range(parts), True, key=lambda number: follow(number).peak <= available))
    alive = follow(blocks)
    return Activations(alive.peak, alive.copies, follow(0).peak, blocks, parts, alive.largest)


def _arguments(sample: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, Tensor):
        return (sample,), {}
    if not isinstance(sample, (tuple, list)):
        remedy = "pass the model's arguments as a tuple, a dict, or one tensor"
        raise SettingError(f"sample is a {type(sample).__name__}: {remedy}")
    has_keywords = len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict)
    return (sample[0], sample[1]) if has_keywords else (tuple(sample), {})


class BatchNormOfOneRank(_BatchNorm):
    """Replaces a `SyncBatchNorm`, which needs the other ranks, while activations are counted."""

    def _check_input_dim(self, input: Tensor) -> None: ...


class Alive(NamedTuple):
    """Bytes that a step holds beside parameters, gradients and buffers, without autocast's copies of weights."""

    kept: int  # after forward
    peak: int  # in forward or backward
    copies: int  # how much higher the peak is with these copies
    largest: Sequence[dict[str, Any]] = ()  # tensors at the peak


def follow_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    compute: torch.dtype | None,
    stored: torch.dtype | None,
    change: Callable[[nn.Module], object] = lambda twin: None,
) -> Alive:
    """Follow a forward of a copy of `model`, which `change` may change, and a backward from the sum of its outputs.

    What a CPU's kernels save counts; a GPU's may save something else (fused attention, recurrent layers). `model` and
    the random streams are left alone. `compute` is autocast's type, or None for no autocast; floating-point tensors are
    converted to the type `stored` before, unless it is None.
    """
    # Imported here: few runs need it.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    current_bytes = {True: 0, False: 0}  # bytes of copies of weights, and of all else
    alive, with_copies = [0], [0]  # bytes of all else, and with copies, after each new storage
    born = weakref.WeakKeyDictionary[Any, int]()  # storage → its index in these
    places = Places()
    records: list[tuple[int, Storage]] = []  # with the index of each
    freed_at: dict[int, int] = {}  # index of a storage → how many had been born when it was freed
    weights = weakref.WeakSet[Any]()

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = stored if stored is not None and leaf.is_floating_point() else leaf.dtype
        fake = torch.empty_strided(leaf.size(), leaf.stride(), dtype=dtype, device="cpu")
        if isinstance(leaf, nn.Parameter):
            return nn.Parameter(fake, leaf.requires_grad)
        return fake.requires_grad_().clone() if leaf.requires_grad else fake  # a leaf would stay in the graph

    def freed(copied: bool, number: int, index: int) -> None:
        current_bytes[copied] -= number
        freed_at[index] = len(alive)

    def note(leaf: Any, copied: bool = False, operation: str = "") -> None:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            if storage not in born and storage not in weights:
                born[storage] = len(alive)
                weakref.finalize(storage, freed, copied, storage.nbytes(), len(alive))
                if not copied:
                    dtype = str(leaf.dtype).removeprefix("torch.")
                    facts = storage.nbytes(), "activations", tuple(leaf.shape), dtype, operation
                    records.append((len(alive), Storage(*facts, *places.here())))
                current_bytes[copied] += storage.nbytes()
                alive.append(current_bytes[False])
                with_copies.append(sum(current_bytes.values()))

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            copied = func is torch.ops.aten._to_copy.default and args[0].untyped_storage() in weights
            for leaf in leaves(result):
                note(leaf, copied, func.__name__)
            return result

    seen: Any = Seen  # its constructor has no types in torch

    def leave_out(parameter: Tensor) -> None:
        if parameter.grad is None or parameter.grad.layout is not torch.strided:
            parameter.grad = None
            return
        storage = parameter.grad.untyped_storage()
        for i in range(born.get(storage, len(alive)), len(alive)):
            alive[i] -= storage.nbytes()
            with_copies[i] -= storage.nbytes()
        if storage in born:
            freed_at[born[storage]] = 0  # it never counts
        parameter.grad = None

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            memo = {id(t): twin(t) for t in [*model.parameters(), *model.buffers()]}
            for tensor in memo.values():
                weights.add(tensor.untyped_storage())
                if tensor.requires_grad and tensor.is_leaf:
                    tensor.register_post_accumulate_grad_hook(leave_out)
            shapes = copy.deepcopy(model, dict(memo))
            for module in shapes.modules():
                if isinstance(module, SyncBatchNorm):
                    module.__class__ = BatchNormOfOneRank  # type: ignore[assignment]  # it has the same attributes
            change(shapes)
            args, kwargs = map_leaves(twin, tuple(args)), map_leaves(twin, dict(kwargs))
            for leaf in leaves((args, kwargs)):
                note(leaf)
            leaf = None
            with torch.enable_grad():
                places.name_modules([shapes])
                with places, seen(), torch.autocast("cpu", compute or torch.bfloat16, compute is not None):
                    outputs = shapes(*args, **kwargs)
                ends = [t.sum().real for t in leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
                del args, kwargs, outputs, shapes  # from here on only the graph holds activations
                kept_bytes = current_bytes[False]
                if ends:
                    end = sum(ends[1:], ends[0])
                    one = torch.ones_like(end)
                    weights.add(one.untyped_storage())  # which is not counted
                    with places, seen():
                        end.backward(one)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise BatchError(
            f"the forward of {type(model).__name__} cannot be followed by shapes alone ({type(error).__name__}: "
            f"{reason}): check the sample, or leave the sample out"
        ) from error
    top = alive.index(max(alive))
    at_peak = [record for index, record in records if index <= top < freed_at.get(index, len(alive))]
    return Alive(kept_bytes, max(alive), max(with_copies) - max(alive), largest(at_peak, places))
