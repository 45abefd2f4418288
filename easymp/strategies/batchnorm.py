"""Batch-norm over the samples of all ranks, on any device; torch's nn.SyncBatchNorm refuses CPUs.

One all-gather has the mean of each rank's samples, the sum of squared distances from it, and their number; all ranks combine
them in the same way (Chan, Golub, LeVeque 1979). Sums of x² would lose digits of the variance under a large mean. Batches may differ in
size, and be empty. Backward sums two numbers a channel in one all-reduce.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from ..errors import PrepareError

Model = TypeVar("Model", bound=nn.Module)
HALF = (torch.float16, torch.bfloat16)
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Attributes of a subclass that change nothing.
HARMLESS = {
    f"__{word}__" for word in "module doc init annotations qualname firstlineno static_attributes".split()
}


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d or 3d with statistics over the samples of all ranks in training; elsewhere plain batch-norm.

    Output, gradients and running statistics are those of batch-norm on the batches of all ranks in one. Under autocast and in half
    precision statistics are fp32. In training every rank of `process_group` must call it as often as the others, with a batch
    of any size. On CUDA the forward is that of torch's nn.SyncBatchNorm. In evaluation, and without a process group of two or more
    ranks, nothing is sent.

    Args:
        num_features: channels, dimension 1 of the input.
        others: as torch.nn.BatchNorm2d's.
        process_group: the ranks that share statistics; None for all.
        named: as torch.nn.BatchNorm2d's.

    Example:
        >>> SyncBatchNorm(3).forward(torch.zeros(4, 3, 5)).shape
        torch.Size([4, 3, 5])
        >>> SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))
        SyncBatchNorm(3, eps=1e-05, ...)
    """

    process_group: dist.ProcessGroup | None = None

    def __init__(
        self, num_features: int, *others: Any, process_group: dist.ProcessGroup | None = None, **named: Any
    ) -> None:
        super().__init__(num_features, *others, **named)
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
        several = (
            dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1
        )
        return self._synchronised(input) if several and self.training else super().forward(input)

    # Collectives and reads of their results cannot be traced. torch.compiler.disable would import the compiler at once.
    @torch._disable_dynamo
    def _synchronised(self, input: Tensor) -> Tensor:
        if input.is_cuda:
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        self._check_input_dim(input)
        with torch.no_grad():
            mean, squares, count = _statistics(input, self.process_group)
            if count == 1:
                raise ValueError(
                    f"batch-norm of one value a channel over all ranks (here {tuple(input.shape)}): use larger batches"
                )
            if self.track_running_stats and count:
                self._remember(mean, squares / (count - 1))
            scale = torch.rsqrt(squares / max(count, 1) + self.eps)
        return _Normalise.apply(input, self.weight, self.bias, mean, scale, count, self.process_group)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.mul_(1 - part).add_(new.to(running.dtype), alpha=part)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"batch-norm of shape {tuple(input.shape)}: at least (samples, channels) is needed"
            )

    # torch's forward calls it.
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.process_group)] = self.process_group  # the ranks are the same ones
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}  # another process does not have it

    @classmethod
    def convert_sync_batchnorm(cls, module: Model, process_group: dist.ProcessGroup | None = None) -> Model:
        """Convert a model as `easymp.convert_sync_batchnorm` does.

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
        PrepareError: a batch-norm of a class of its own, which would lose what it adds, or a lazy one. Nothing has changed then.

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
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm):
            continue
        kind, where = type(module).__name__, f"module {name!r}" if name else "the model"
        if isinstance(module, _LazyNormBase):
            raise PrepareError(
                f"{where} is a {kind} without a shape yet: call the model once on a batch before converting it"
            )
        if added := sorted(_added(type(module))):
            raise PrepareError(
                f"{where} is a {kind}, a batch-norm that adds {', '.join(added)}, which a SyncBatchNorm would lose: build the model "
                "with easymp.SyncBatchNorm there, or leave out convert_sync_batchnorm"
            )
        found.append(module)
    return found


def _added(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if base in PLAIN:
            return
        yield from vars(base).keys() - HARMLESS


def _statistics(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, int]:
    """Mean (channels), sum of squared distances from it (channels), and number of values a channel, of all ranks."""
    count, channels = x.numel() // max(1, x.shape[1]), x.shape[1]
    values = _wide(x)
    if count:
        variance, mean = torch.var_mean(values, _dims(x), correction=0)
        here = torch.cat([mean, variance * count, mean.new_full((1,), count)])
    else:
        here = values.new_zeros(2 * channels + 1)
    parts = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, here, group)
    means, squares, counts = torch.stack(parts).split([channels, channels, 1], 1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total.clamp(min=1)
    return mean, squares.sum(0) + (counts * (means - mean).square()).sum(0), int(total)


class _Normalise(Function):
    """``(x - mean) * scale * weight + bias``, with the gradients of batch-norm on all ranks' samples."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, mean: Tensor, scale: Tensor, count: int, group: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.count, ctx.group = count, group
        ctx.bias_type = None if bias is None else bias.dtype
        y = (_wide(x) - _along(mean, x)).mul_(_along(scale if weight is None else scale * weight, x))
        if bias is not None:
            y.add_(_along(bias, x))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        dy = _wide(gradient)
        normal = (_wide(x) - _along(mean, x)).mul_(_along(scale, x))
        of_bias, of_weight = dy.sum(_dims(x)), (dy * normal).sum(_dims(x))
        of_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_bias, of_weight])
            dist.all_reduce(sums, group=ctx.group)
            per_value = sums / max(ctx.count, 1)
            of_x = normal.mul_(-_along(per_value[1], x)).add_(dy).sub_(_along(per_value[0], x))
            of_x = of_x.mul_(_along(scale if weight is None else scale * weight, x)).to(x.dtype)
        return (
            of_x,
            of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            of_bias.to(ctx.bias_type) if ctx.needs_input_grad[2] else None,
            *(None,) * 4,
        )


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """A tensor of shape (channels), to be multiplied with `x`."""
    return channels.view(1, -1, *(1,) * (x.ndim - 2))
