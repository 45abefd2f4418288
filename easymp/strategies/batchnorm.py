"""Batch-norm over the samples of all ranks, on any device; torch's nn.SyncBatchNorm refuses CPUs.

One all-reduce exchanges each rank's mean, sum of squared distances from it, and number of samples, which are combined
as in Chan, Golub, LeVeque 1979: sums of x² would lose digits of the variance under a large mean.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from ..errors import PrepareError

Model = TypeVar("Model", bound=nn.Module)
HALF = (torch.float16, torch.bfloat16)
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Attributes of a subclass that change nothing.
HARMLESS = {f"__{name}__" for name in "module doc init annotations qualname firstlineno static_attributes".split()}


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d or 3d with statistics over the samples of all ranks in training; elsewhere plain batch-norm.

    Under autocast and in half precision statistics are fp32. In training every rank of `process_group` must call it as
    often as the others, with a batch of any size, also an empty one. On CUDA the forward is torch's nn.SyncBatchNorm's.

    Args:
        num_features: channels, dimension 1 of the input.
        args: as torch.nn.BatchNorm2d's.
        process_group: the ranks that share statistics; None for all.
        kwargs: as torch.nn.BatchNorm2d's.

    Example:
        >>> SyncBatchNorm(3).forward(torch.zeros(4, 3, 5)).shape
        torch.Size([4, 3, 5])
        >>> SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))
        SyncBatchNorm(3, eps=1e-05, ...)
    """

    process_group: dist.ProcessGroup | None = None

    def __init__(
        self, num_features: int, *args: Any, process_group: dist.ProcessGroup | None = None, **kwargs: Any
    ) -> None:
        super().__init__(num_features, *args, **kwargs)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch.

        Args:
            input: of shape (samples, channels, ...).

        Returns:
            A tensor of the same shape and dtype.

        Raises:
            ValueError: an input of fewer than two dimensions, or one value a channel over all ranks.
        """
        distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1
        return self._synchronized(input) if distributed and self.training else super().forward(input)

    # Collectives and reads of their results cannot be traced. torch.compiler.disable would import the compiler at once.
    @torch._disable_dynamo
    def _synchronized(self, input: Tensor) -> Tensor:
        if input.is_cuda:
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]  # it has what that reads
        self._check_input_dim(input)
        values = input.float() if input.dtype in HALF else input
        mean, squares, count = _statistics(values, self.process_group)
        if count == 1:
            raise ValueError(
                f"batch-norm of {tuple(input.shape)}, one value a channel over all ranks: use larger batches"
            )
        if self.track_running_stats and count:
            assert self.num_batches_tracked is not None
            assert self.running_mean is not None
            assert self.running_var is not None
            self.num_batches_tracked.add_(1)
            weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), weight)
            self.running_var.lerp_((squares / (count - 1)).detach().to(self.running_var.dtype), weight)
        scale = torch.rsqrt(squares / max(count, 1) + self.eps)
        if self.affine:
            scale = scale * self.weight
        outputs = (values - _per_channel(mean, values)) * _per_channel(scale, values)
        if self.affine:
            outputs = outputs + _per_channel(self.bias, values)
        return outputs.to(input.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch-norm of shape {tuple(input.shape)}: at least (samples, channels) is needed")

    # torch's forward calls it.
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.process_group)] = self.process_group
        memo[id(self)] = clone = type(self).__new__(type(self))
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}  # another process does not have it

    @classmethod
    def convert_sync_batchnorm(cls, module: Model, process_group: dist.ProcessGroup | None = None) -> Model:
        """As `easymp.convert_sync_batchnorm`.

        Args:
            module: changed in place.
            process_group: the ranks that share statistics; None for all.

        Returns:
            `module`.
        """
        return convert_sync_batchnorm(module, process_group)


def convert_sync_batchnorm(model: Model, process_group: dist.ProcessGroup | None = None) -> Model:
    """Make a `SyncBatchNorm` of every BatchNorm1d, 2d and 3d in a model, itself included.

    In place, and only the class changes: parameters, buffers, names, hooks and the modules themselves stay. torch's own
    nn.SyncBatchNorm becomes ours too, which runs on CPUs.

    Args:
        model: changed in place.
        process_group: the ranks that share statistics; None for all.

    Returns:
        `model`.

    Raises:
        PrepareError: a batch-norm of a class of its own, which would lose what it adds, or a lazy one. Nothing has
            changed then.

    Example:
        >>> convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))[0]
        SyncBatchNorm(3, eps=1e-05, ...)
    """
    for module in batchnorms(model):
        module.__class__ = SyncBatchNorm
        module.process_group = process_group
    return model


def batchnorms(model: nn.Module) -> list[Any]:
    """The batch-norms in `model` that `convert_sync_batchnorm` converts; PrepareError for one that cannot be."""
    convertible = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm):
            continue
        kind, label = type(module).__name__, f"module {name!r}" if name else "the model"
        if isinstance(module, _LazyNormBase):
            raise PrepareError(
                f"{label} is a {kind} without a shape yet: call the model once on a batch before converting it"
            )
        bases = type(module).__mro__
        depth = next((i for i, base in enumerate(bases) if base in PLAIN), len(bases))
        if added := sorted({name for base in bases[:depth] for name in vars(base)} - HARMLESS):
            raise PrepareError(
                f"{label} is a {kind}, a batch-norm that adds {', '.join(added)}, which a SyncBatchNorm would lose: "
                "build the model with easymp.SyncBatchNorm there, or leave out convert_sync_batchnorm"
            )
        convertible.append(module)
    return convertible


class _SumOverRanks(Function):
    """The sum of a tensor over the ranks of `group`, whose gradient is summed likewise."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _SumOverRanks.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]  # untyped in torch


def _statistics(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, int]:
    """Mean (channels), sum of squared distances from it (channels), and number of values a channel, of all ranks."""
    channels = values.shape[1]
    dims = [0, *range(2, values.ndim)]
    count = values.numel() // channels
    mean = values.sum(dims) / max(count, 1)
    squares = (values - _per_channel(mean, values)).square().sum(dims)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    row = torch.cat([mean, squares, mean.new_tensor([count])])
    rows = nn.functional.pad(row[None], (0, 0, rank, size - rank - 1))  # zeros in the rows of the other ranks
    rows = _SumOverRanks.apply(rows, group)  # type: ignore[no-untyped-call]  # untyped in torch
    means, squares, counts = rows.split([channels, channels, 1], 1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total.clamp(min=1)
    return mean, (squares + counts * (means - mean).square()).sum(0), int(total)


def _per_channel(statistic: Tensor, values: Tensor) -> Tensor:
    """View a tensor of shape (channels) so that it broadcasts over `values`."""
    return statistic.view(1, -1, *(1,) * (values.ndim - 2))
