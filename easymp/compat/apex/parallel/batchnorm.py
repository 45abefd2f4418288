"""Batch-norm by the samples of all ranks: the library's own, with Apex's options."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ....strategies import batchnorm
from ..saying import ApexError


class SyncBatchNorm(batchnorm.SyncBatchNorm):
    """The library's SyncBatchNorm, with Apex's arguments.

    Args:
        process_group: whose samples count; None for all ranks.
        channel_last: channels are the last dimension of inputs, not the second.
        fuse_relu: ReLU of the output.
        others: as torch.nn.BatchNorm2d's.
    """

    channel_last: bool = False
    fuse_relu: bool = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, process_group=process_group
        )
        self.channel_last, self.fuse_relu = channel_last, fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Batch-norm of `input`, plus `z`, where given, before the ReLU."""
        x = input.movedim(-1, 1) if self.channel_last else input
        y = super().forward(x)
        y = y.movedim(1, -1) if self.channel_last else y
        y = y if z is None else y + z
        return y.relu() if self.fuse_relu else y


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """`module`, in place, in which every BatchNorm1d, 2d and 3d, itself included, is a `SyncBatchNorm` with its weights and statistics.

    Raises:
        PrepareError: a batch-norm that cannot be one (`easymp.convert_sync_batchnorm` says which).
    """
    batchnorm.convert_sync_batchnorm(module, process_group)
    for one in module.modules():
        if isinstance(one, batchnorm.SyncBatchNorm):
            norm: Any = one
            norm.__class__ = SyncBatchNorm
            norm.channel_last = channel_last
    return module


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """The group of this rank, of groups of `group_size` ranks that follow one another; None for 0: all ranks. All ranks must call it.

    Raises:
        ApexError: the number of ranks is no multiple.
    """
    if group_size == 0:
        return None
    size, rank = dist.get_world_size(), dist.get_rank()
    if group_size < 0 or size % group_size:
        raise ApexError(
            f"group_size={group_size} does not divide the {size} ranks: pass one of their divisors, or 0"
        )
    groups = [dist.new_group(list(range(first, first + group_size))) for first in range(0, size, group_size)]
    return groups[rank // group_size]
