"""How gradients travel under ddp: cast for the journey, or as products of two thin matrices (PowerSGD).

A hook is what DistributedDataParallel calls with each bucket of gradients in place of its own all-reduce; it returns a future of
the average. The casting ones are written here: torch's bf16 hook refuses gloo, and none of torch's divides in two parts. PowerSGD
is torch's (Vogels et al., 2019, arXiv:1905.13727), fed with buckets of another type or shape; torch's own batched hook stops
with an assertion at its first compressed step.
"""

# No annotations from __future__ here: torch compares those of a hook with its own types.

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..cuda.casts import divided
from ..options import DistributedDataParallelKwargs

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# PowerSGD divides columns by their length. Those of a gradient of zeros (a parameter not in use yet) would be NaN, and stay so, since
# it goes on from what it sent before. fp16 has nothing between 0 and 6e-8.
EPSILON = {"fp16": 1e-6, "bf16": 1e-8, "no": 1e-8}

# By the words of a checkpoint, what PowerSGDState keeps of each bucket.
REMEMBERED = {"errors": "error_dict", "p": "p_memory_dict", "q": "q_memory_dict"}

Future = torch.futures.Future[Tensor]


def make_hook(
    options: DistributedDataParallelKwargs, size: int
) -> tuple[Any, Callable[[Any, Any], Future]] | None:
    """State and hook for ``register_comm_hook``, or None where torch's own all-reduce is what was asked for.

    Args:
        size: ranks.
    """
    if options.low_rank:
        return _power_sgd(options)
    if options.comm_hook == "no" and options.gradient_predivide_factor is None:
        return None
    before = options.gradient_predivide_factor or float(size)
    return Journey(DTYPES.get(options.comm_hook), before, size / before), all_reduce


@dataclass(frozen=True)
class Journey:
    """What a gradient is summed as, and divided by before and afterwards; `dtype` None leaves it as it is."""

    dtype: torch.dtype | None
    before: float
    after: float


def all_reduce(journey: Journey, bucket: dist.GradBucket) -> Future:
    """The average over the ranks, summed in the journey's type. Complex gradients keep theirs; fp32 never narrows one."""
    gradient = bucket.buffer()
    dtype = gradient.dtype
    if journey.dtype is not None and dtype.is_floating_point:
        dtype = torch.promote_types(dtype, torch.float32) if journey.dtype == torch.float32 else journey.dtype
    wider = torch.promote_types(dtype, gradient.dtype) == dtype  # divided where there is more room
    moved = (
        divided(gradient, torch.empty_like(gradient, dtype=dtype), journey.before)
        if dtype != gradient.dtype
        else None
    )
    if moved is None:
        moved = gradient.to(dtype).div_(journey.before) if wider else gradient.div_(journey.before).to(dtype)

    def arrived(future: Any) -> Tensor:
        (total,) = future.value()
        if total is not gradient and divided(total, gradient, journey.after) is not None:
            return gradient
        if wider:
            return gradient.copy_(total if journey.after == 1 else total.div_(journey.after))
        gradient.copy_(total)
        return gradient if journey.after == 1 else gradient.div_(journey.after)

    return dist.all_reduce(moved, async_op=True).get_future().then(arrived)


class Load:
    """A bucket as PowerSGD reads it, over another buffer than DistributedDataParallel's."""

    def __init__(
        self, bucket: dist.GradBucket, buffer: Tensor, shapes: Sequence[torch.Size | tuple[int, ...]]
    ) -> None:
        self._bucket, self._buffer = bucket, buffer
        parts = buffer.split([math.prod(shape) for shape in shapes])
        self._gradients = [part.view(shape) for part, shape in zip(parts, shapes)]

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def index(self) -> int:
        return self._bucket.index()

    def is_last(self) -> bool:
        return self._bucket.is_last()


class Carried:
    """What PowerSGD carries over from one step to the next on this rank: what the last journey left out, the matrices, and the count.

    Args:
        state: torch's, which the hook has.
        module: the DistributedDataParallel that it belongs to.
    """

    def __init__(self, state: Any, module: Any) -> None:
        self._state, self._module = state, weakref.ref(module)

    @property
    def alive(self) -> bool:
        return self._module() is not None

    def state_dict(self) -> dict[str, Any]:
        dicts = {name: dict(getattr(self._state, own)) for name, own in REMEMBERED.items()}
        return {"step": self._state.iter, "drawn": self._state.rng.get_state(), **dicts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        module = self._module()
        device = next(module.parameters()).device if module is not None else None
        self._state.iter = state["step"]
        self._state.rng.set_state(state["drawn"])
        for name, own in REMEMBERED.items():
            setattr(
                self._state, own, {int(bucket): tensor.to(device) for bucket, tensor in state[name].items()}
            )


def _power_sgd(options: DistributedDataParallelKwargs) -> tuple[Any, Callable[[Any, Any], Future]]:
    # Imported here: only runs that compress so need it, and NumPy, which it draws from.
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    given = {"orthogonalization_epsilon": EPSILON[options.comm_wrapper], **options.comm_state_option}
    dtype = DTYPES.get(options.comm_wrapper)
    square = options.comm_hook == "batched_power_sgd"

    def low_rank(state: Any, bucket: dist.GradBucket) -> Future:
        gradient = bucket.buffer()
        # torch's hook cannot make matrices of scalars and of empty tensors.
        shapes: Sequence[Any] = [
            g.shape if g.ndim and g.numel() else (1, g.numel()) for g in bucket.gradients()
        ]
        moved = gradient if dtype is None else gradient.to(dtype)
        if square:
            side = math.isqrt(gradient.numel() - 1) + 1  # of the smallest square that holds all
            moved = torch.cat([moved, moved.new_zeros(side * side - gradient.numel())])
            shapes = [(side, side)]

        def arrived(future: Any) -> Tensor:
            total = future.value()
            return gradient if total is gradient else gradient.copy_(total[: gradient.numel()])

        load: Any = Load(bucket, moved, shapes)
        future = powerSGD_hook(state, load).then(arrived)
        if gradient.device.type == "cpu":
            # PowerSGD's second and third all-reduce begin when the one before has arrived, on gloo in a thread of its own: between
            # other buckets' in another order on each rank. On NCCL they are queued here and now.
            future.wait()
        return future

    return PowerSGDState(None, **given), low_rank
