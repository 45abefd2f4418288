"""Activations of a forward, counted on fake tensors, which have shapes and no memory; and how many blocks are to be recomputed.

A block that is recomputed keeps its inputs (with "attention" also its products), and is whole again for a while in backward. Blocks are
recomputed from the first on: when backward comes to them, those that were kept have been freed.
"""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.pytree import leaves, map_leaves
from ..base.units import size
from ..errors import BatchError, SettingError
from ..logging import get_logger
from ..protocols import Precision
from ..strategies.transforms import Recompute, find_recomputed, recompute
from .state import Run

logger = get_logger(__name__)


class Activations(NamedTuple):
    """Bytes of activations on the device at the peak, and how they came about."""

    bytes: int
    copies: int  # how much higher the peak is with autocast's copies of weights
    plain: int  # bytes, if nothing were recomputed
    blocks: int  # parts that are recomputed
    of: int  # parts that may be
    flops: tuple[int, int]  # of products and attention, in forward and in backward with recomputation

    def __str__(self) -> str:
        return f"{self.blocks} of {self.of} blocks are recomputed: {size(self.bytes)} of activations instead of {size(self.plain)}"


def count_activations(
    model: nn.Module,
    policy: Precision,
    sample: Any,
    which: Recompute | None,
    available: int = 0,
    offload: bool = False,
) -> Activations:
    """Count what forward keeps; with all parts recomputed, the average one is whole beside what the others keep.

    Args:
        sample: positional arguments in a tuple, keyword arguments in a dict, both in a pair of these, or one tensor.
        available: bytes that activations may take, where `which` leaves the number of blocks open.
        offload: what forward keeps is in the host's memory.
    """
    autocast = policy.param == torch.float32
    compute = policy.compute if autocast and policy.compute != torch.float32 else None
    how = (*_arguments(sample), compute, None if autocast else policy.param)
    parts = len(find_recomputed([model], which)) if which else 0

    @cache
    def follow(blocks: int) -> Alive:
        def change(twin: nn.Module) -> None:
            if blocks:
                recompute(find_recomputed([twin], which)[:blocks], which.selective)  # type: ignore[arg-type, union-attr]

        found = _follow(model, *how, change, backward=True)
        return found._replace(peak=found.peak - found.kept) if offload else found

    blocks = parts
    if which and which.below is not None:
        blocks = min(
            parts, bisect_left(range(parts), True, key=lambda number: follow(number).peak <= available)
        )
    found = follow(blocks)
    return Activations(found.peak, found.copies, follow(0).peak, blocks, parts, found.flops)


def _arguments(sample: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, Tensor):
        return (sample,), {}
    if not isinstance(sample, (tuple, list)):
        words = "pass the model's arguments as a tuple, a dict, or one tensor"
        raise SettingError(f"sample is a {type(sample).__name__}: {words}")
    both = len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict)
    return (sample[0], sample[1]) if both else (tuple(sample), {})


def bytes_saved(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    compute: torch.dtype | None = None,
    stored: torch.dtype | None = None,
) -> int:
    """Count what is alive for backward after ``model(*args, **kwargs)``, without running it.

    What a CPU's kernels save counts; a GPU's may save something else (fused attention, recurrent layers). `model` and the random streams
    are left alone.

    Args:
        model: any module.
        args: its arguments; only shapes and dtypes of tensors count.
        kwargs: its keyword arguments.
        compute: autocast's type, or None for no autocast. Its copies of weights are not counted.
        stored: what floating-point tensors are converted to before; None leaves them as they are.

    Returns:
        Bytes of the distinct storages, parameters and buffers not counted.

    Raises:
        BatchError: the model's forward cannot be followed on these arguments.

    Example:
        >>> easymp.memory.bytes_saved(nn.Linear(2, 1), (torch.ones(4, 2),), {})  # its input
        32
    """
    return _follow(model, args, kwargs, compute, stored).kept


class Alive(NamedTuple):
    """Bytes that a training step holds beside parameters, their gradients and buffers, without autocast's copies of weights."""

    kept: int  # after forward
    peak: int  # in forward or backward
    copies: int  # how much higher the peak is with these copies
    flops: tuple[int, int]  # in forward and in backward


def _follow(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    compute: torch.dtype | None,
    stored: torch.dtype | None,
    change: Callable[[nn.Module], object] | None = None,
    backward: bool = False,
) -> Alive:
    """Follow a forward, and a backward from the sum of its outputs; see `bytes_saved`.

    `change` is called with the copy of `model` that runs.
    """
    # Imported here: few runs need it.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    counts = dict(flop_registry)
    for direction in ("", "_backward"):
        gpu = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{direction}")
        cpu = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{direction}")
        counts.setdefault(cpu, flop_registry[gpu])
    flops = 0
    now = {True: 0, False: 0}  # bytes of copies of weights, and of all else
    alive, both = [0], [0]  # bytes of all else, and with copies, after each new storage
    born = weakref.WeakKeyDictionary[Any, int]()  # storage → its place in these
    weights = weakref.WeakSet[Any]()

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = stored if stored is not None and leaf.is_floating_point() else leaf.dtype
        fake = torch.empty_strided(leaf.size(), leaf.stride(), dtype=dtype, device="cpu")
        if isinstance(leaf, nn.Parameter):
            return nn.Parameter(fake, leaf.requires_grad)
        return fake.requires_grad_().clone() if leaf.requires_grad else fake  # a leaf would stay in the graph

    def freed(copied: bool, number: int) -> None:
        now[copied] -= number

    def note(leaf: Any, copied: bool = False) -> None:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            if storage not in born and storage not in weights:
                born[storage] = len(alive)
                weakref.finalize(storage, freed, copied, storage.nbytes())
                now[copied] += storage.nbytes()
                alive.append(now[False])
                both.append(sum(now.values()))

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal flops
            out = func(*args, **(kwargs or {}))
            if count := counts.get(func._overloadpacket):
                flops += count(*args, **(kwargs or {}), out_val=out)
            copied = func is torch.ops.aten._to_copy.default and args[0].untyped_storage() in weights
            for leaf in leaves(out):
                note(leaf, copied)
            return out

    def leave_out(parameter: Tensor) -> None:
        storage = parameter.grad.untyped_storage()  # type: ignore[union-attr]
        for i in range(born.get(storage, len(alive)), len(alive)):
            alive[i] -= storage.nbytes()
            both[i] -= storage.nbytes()
        parameter.grad = None

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            memo = {id(t): twin(t) for t in [*model.parameters(), *model.buffers()]}
            for tensor in memo.values():
                weights.add(tensor.untyped_storage())
                if tensor.requires_grad and tensor.is_leaf:
                    tensor.register_post_accumulate_grad_hook(leave_out)
            shapes = copy.deepcopy(model, dict(memo))
            if change:
                change(shapes)
            args, kwargs = map_leaves(twin, tuple(args)), map_leaves(twin, dict(kwargs))
            for leaf in leaves((args, kwargs)):
                note(leaf)
            leaf = None
            with torch.enable_grad():
                with Seen(), torch.autocast("cpu", compute or torch.bfloat16, compute is not None):
                    outputs = shapes(*args, **kwargs)
                ends = [t.sum().real for t in leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
                del args, kwargs, outputs, shapes  # from here on only the graph holds activations
                kept, forward = now[False], flops
                if backward and ends:
                    end = sum(ends[1:], ends[0])
                    one = torch.ones_like(end)
                    weights.add(one.untyped_storage())  # which is not counted
                    with Seen():
                        end.backward(one)
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        raise BatchError(
            f"the forward of {type(model).__name__} cannot be followed by shapes alone ({type(error).__name__}: {why}): check the "
            "sample, or leave the sample out"
        ) from error
    return Alive(kept, max(alive), max(both) - max(alive), (forward, flops - forward))


class Budget:
    """Decides in a model's first training forward how many of its blocks are recomputed, so that a rank stays below `below` bytes."""

    def __init__(self, run: Run, which: Recompute) -> None:
        self._run, self._which = run, which
        self.taken = 0  # by models that are prepared, and their activations as far as these are known

    def watch(
        self, model: nn.Module, policy: Precision, need: int, undo: list[Callable[[], None]]
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
        """Called before `model` is wrapped; the result takes the arguments of its first forward.

        Everything but activations needs `need` bytes; `undo` gets the function that ends recomputation.
        """
        which, parts = self._which, find_recomputed([model], self._which)
        tensors = [*model.parameters(), *model.buffers()]
        shapes = copy.deepcopy(model, {id(t): _on_meta(t) for t in tensors})
        self.taken += need

        def decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            below: int = which.below  # type: ignore[assignment]
            try:
                found = count_activations(shapes, policy, (args, kwargs), which, below - self.taken)
            except BatchError as error:
                why = str(error).split(": check the sample")[0]
                raise BatchError(
                    f"{why}, so activation_checkpointing cannot count blocks for {size(below)}: use activation_checkpointing='blocks'"
                ) from error
            self.taken += found.bytes
            undo.append(recompute(parts[: found.blocks]))
            reason = f"{found}, {size(self.taken)} a rank of {size(below)}"
            if self.taken > below:
                reason += ": too much, so use a smaller batch, or a strategy that shards the model"
            (logger.warning if self.taken > below else logger.info)("activations: %s", reason)
            plan = self._run.plan
            assert plan.activations is not None
            self._run.plan = replace(plan, activations=replace(plan.activations, reason=reason))

        return decide


def _on_meta(tensor: Tensor) -> Tensor:
    there = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there
