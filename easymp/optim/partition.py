"""ZeRO partition: rows of tensors that the ranks share among them, and which optimizers can step on them.

Tensors are cut along dimension 0 as torch.chunk does (and FSDP2): ceil(length / ranks) rows each, the last ranks fewer or none. A tensor
without dimensions is not cut: every rank has it whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.torch_flags import TORCH
from ..distributed import World
from ..errors import SettingError
from .fused import FusedOptimizer

ALONE = 2**20  # bytes from which a tensor is gathered in place; smaller ones are packed into one collective
AT_A_TIME = 2  # collectives under way while the next is packed

# The older name warns from torch 2.13 on.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def cut(tensor: Tensor, rank: int, size: int) -> Tensor:
    """Rows of rank `rank` of `size`, a view."""
    if not tensor.ndim:
        return tensor
    length = tensor.shape[0]
    each = -(-length // size)
    start = min(rank * each, length)
    return tensor.narrow(0, start, min(each, length - start))


def packed_at_once(tensors: Sequence[Tensor], cap: int) -> int:
    """Elements in the buffers of a `RowGather` of `tensors`, at its peak."""
    small = [t for t in tensors if not _alone(t)]
    width = max((t.element_size() for t in small), default=1)
    return min(sum(t.numel() for t in small), (AT_A_TIME + 1) * cap // width)


def _alone(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= ALONE and tensor.is_contiguous()


class RowGather:
    """Completes tensors in place, each rank giving its own rows. Calling it is a collective.

    Args:
        tensors: shapes and dtypes are the same on all ranks.
        cap: bytes of whole tensors that are packed into one collective.
    """

    def __init__(self, tensors: Sequence[Tensor], world: World, cap: int) -> None:
        self._world = world
        self._transfers: list[tuple[Callable[..., Iterator[None]], Any]] = []
        small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.ndim == 0 or tensor.numel() == 0:
                continue
            if tensor.is_complex():
                tensor = torch.view_as_real(tensor)
            if _alone(tensor):
                even = tensor.shape[0] % world.size == 0
                self._transfers.append((self._even if even else self._ragged, tensor))
            else:
                small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for alike in small.values():
            bucket: list[Tensor] = []
            held = 0
            for tensor in alike:
                size = tensor.numel() * tensor.element_size()
                if bucket and held + size > cap:
                    self._transfers.append((self._packed, bucket))
                    bucket, held = [], 0
                bucket.append(tensor)
                held += size
            self._transfers.append((self._packed, bucket))

    def __call__(self) -> None:
        under_way: deque[Iterator[None]] = deque()
        with torch.no_grad(), self._world.explained("the gathering of parameters"):
            for transfer, tensors in self._transfers:
                running = transfer(tensors)
                next(running)
                under_way.append(running)
                if len(under_way) > AT_A_TIME:
                    next(under_way.popleft(), None)
            for running in under_way:
                next(running, None)

    # Each starts its collective, and waits for its end when it is asked again. It sends bytes, so any dtype will do.

    def _even(self, tensor: Tensor) -> Iterator[None]:
        flat = tensor.view(-1).view(torch.uint8)
        work = _gather(flat, flat.chunk(self._world.size)[self._world.rank], async_op=True)
        yield
        work.wait()

    def _ragged(self, tensor: Tensor) -> Iterator[None]:
        parts = [cut(tensor, rank, self._world.size) for rank in range(self._world.size)]
        works = [
            dist.broadcast(part.view(-1).view(torch.uint8), rank, async_op=True)
            for rank, part in enumerate(parts)
            if part.numel()
        ]
        yield
        for work in works:
            work.wait()

    def _packed(self, tensors: list[Tensor]) -> Iterator[None]:
        size, rank = self._world.size, self._world.rank
        room = [-(-t.shape[0] // size) * t[0].numel() for t in tensors]  # elements of the largest part
        whole = tensors[0].new_empty(size, sum(room))
        parts = [cut(t, rank, size).reshape(-1) for t in tensors]
        mine = [here[: part.numel()] for here, part in zip(whole[rank].split(room), parts)]
        torch._foreach_copy_(mine, parts)
        work = _gather(whole.view(-1).view(torch.uint8), whole[rank].view(torch.uint8), async_op=True)
        yield
        work.wait()
        # Only the last parts are shorter, so the parts in a row begin with the whole tensor.
        columns = zip(tensors, whole.split(room, dim=1))
        torch._foreach_copy_(tensors, [c.reshape(-1)[: t.numel()].view(t.shape) for t, c in columns])


# torch's optimizers that step element by element: parts of their parameters do as well as whole ones. Others may read whole matrices
# (Muon does), and step on DTensors, whose norms and products are those of the whole matrix.
ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in "Adam AdamW SGD Adagrad RMSprop Adadelta Adamax NAdam RAdam ASGD Rprop".split()
)
# Before this torch, a DTensor that is a pending sum adds a number on each rank: `p.norm() + eps`, `p.sum() + 1` are wrong.
SUMS_ARE_RIGHT = (2, 11)


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` can step on plain tensors that are parts of its parameters."""
    if isinstance(optimizer, FusedOptimizer):
        return optimizer.rule.survey is None
    return type(optimizer) in ELEMENTWISE


def check_sums(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Refuse optimizers that this torch's DTensors may step wrongly.

    Raises:
        SettingError: the numbers could be wrong, without an error.
    """
    if TORCH < SUMS_ARE_RIGHT and not isinstance(optimizer, (*ELEMENTWISE, FusedOptimizer)):
        raise SettingError(
            f"strategy {strategy!r} cannot take {type(optimizer).__name__} with torch {torch.__version__}, whose sharded tensors add "
            f"wrongly to a sum or norm of themselves: update torch to {'.'.join(map(str, SUMS_ARE_RIGHT))} or newer, use strategy='ddp', "
            "or an optimizer that steps element by element, such as AdamW"
        )
