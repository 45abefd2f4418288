"""Cross-entropy of a linear layer's outputs, chunk by chunk; and batch-norm over the samples of all ranks.

A chunk's logits become their gradient in place, are multiplied into the gradients of hidden states and weight, and are
dropped: three matrix products, as of the plain pair, all in forward. Backward multiplies these gradients by the number
that arrives; for a number a token (reduction="none"), or a second backward, it makes the logits again.

torch 2.13's own function is not called: its loss of bf16 inputs is bf16; label smoothing makes it hold the logits; a
second backward is an error; under create_graph=True it returns gradients without a graph, in silence; torch.compile
breaks at it; and it knows no split vocabulary. `benchmarks/linear_cross_entropy.py` compares time, memory and error.

Batch-norm runs on any device; torch's refuses CPUs. One all-reduce exchanges each rank's mean, sum of squared distances
from it, and number of samples, combined as in Chan, Golub, LeVeque 1979: sums of x² would lose digits under a large
mean.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from ..errors import BatchError, PrepareError, SettingError, StepError

__all__ = ["linear_cross_entropy"]
MIN_CHUNK = 512  # tokens, below which matrix products are slow
REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), targets)`` without the logits of all tokens in memory.

    Call it inside the model's forward, where autocast holds and fsdp has gathered the weight. Under tensor_parallel, a
    weight that is split by rows (a head that the plan calls "colwise" or "colwise_rep") stays split: each rank computes
    the logits of its part of the vocabulary, and the ranks exchange two numbers a token and the gradient of `hidden`.

    Args:
        hidden: (..., features), in a floating-point dtype.
        weight: (vocabulary, features), as of `nn.Linear`.
        targets: (...), int64, indices of the vocabulary.
        bias: (vocabulary,).
        ignore_index: targets of this value are left out.
        reduction: "mean" over the other targets, "sum", or "none".
        label_smoothing: the part of each target, 0 to 1, that is spread over the vocabulary.
        chunk_tokens: tokens whose logits are in memory at once. None: so many that they take no more memory than
            `hidden`, at least 512.

    Returns:
        The loss, in fp32 or wider: 0-dim, or the shape of `targets` with reduction="none".

    Raises:
        BatchError: shapes that do not fit, targets that are not int64, or different dtypes outside of autocast.
        StepError: in backward, with create_graph=True.
        SettingError: a wrong option, or a weight in shards that no rank can use as they are.

    Example:
        >>> from easymp.nn import linear_cross_entropy
        >>> hidden, head = torch.randn(2, 5, 8), nn.Linear(8, 100, bias=False)
        >>> targets = torch.randint(100, (2, 5))
        >>> loss = linear_cross_entropy(hidden, head.weight, targets)
        >>> plain = nn.functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
        >>> torch.testing.assert_close(loss, plain)
    """
    if hidden.shape[:-1] != targets.shape or weight.ndim != 2 or hidden.shape[-1:] != weight.shape[1:]:
        shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)}"
        raise BatchError(f"linear_cross_entropy got {shapes}: pass (..., features), (vocabulary, features) and (...)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BatchError(f"bias has shape {tuple(bias.shape)}, not ({weight.shape[0]},): one number a word")
    if targets.dtype != torch.int64:
        raise BatchError(f"targets are {targets.dtype}, not int64: pass indices of the vocabulary")
    if reduction not in REDUCTIONS:
        raise SettingError(f"reduction={reduction!r} is not one of {', '.join(REDUCTIONS)}")
    if not isinstance(label_smoothing, (int, float)) or not 0.0 <= label_smoothing <= 1.0:
        raise SettingError(f"label_smoothing={label_smoothing!r} must be a number from 0 to 1")
    if chunk_tokens is not None and (type(chunk_tokens) is not int or chunk_tokens < 1):
        raise SettingError(f"chunk_tokens={chunk_tokens!r} must be an integer of at least 1, or left out")
    vocabulary, group, start = weight.shape[0], None, 0
    largest_part = vocabulary  # of the weight on the rank that has most
    if hasattr(weight, "to_local"):
        group, start, largest_part = _split(weight)
        if bias is not None:
            whole = bias.redistribute(weight.device_mesh, weight.placements)  # type: ignore[attr-defined]  # a DTensor
            bias = whole.to_local()
        weight = weight.to_local()
    hidden, targets = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (hidden, targets))
    device_type = hidden.device.type
    autocast = torch.is_autocast_enabled(device_type)
    if not autocast and hidden.dtype != weight.dtype:
        dtypes = f"hidden in {hidden.dtype} and a weight in {weight.dtype}"
        raise BatchError(f"linear_cross_entropy got {dtypes}, outside of autocast: convert one of them")
    flat_hidden, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    options = _Options(
        vocabulary=vocabulary,
        start=start,
        group=group,
        dtype=torch.get_autocast_dtype(device_type) if autocast else hidden.dtype,
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        chunk=chunk_tokens or max(MIN_CHUNK, flat_hidden.numel() // max(1, largest_part)),  # the same on all ranks
        summed=reduction != "none",
        grad_enabled=torch.is_grad_enabled(),
    )
    with torch.autocast(device_type, enabled=False):
        loss: Tensor = _Chunks.apply(  # type: ignore[no-untyped-call]  # torch's
            flat_hidden, weight, bias, flat_targets, options
        )
    if reduction == "mean":
        count = (flat_targets != ignore_index).sum()
        # Without targets: NaN, and gradients of 0, as in torch.
        return torch.where(count > 0, loss / count.clamp(min=1), torch.nan)
    return loss if reduction == "sum" else loss.view(targets.shape)


def _split(weight: Any) -> tuple[dist.ProcessGroup, int, int]:
    """The ranks that hold parts of a weight, the first row of this rank's part, and the rows of the largest part."""
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 or "tensor" not in (mesh.mesh_dim_names or ()) or not placements[0].is_shard(0):
        raise SettingError(
            f"linear_cross_entropy got a weight in shards ({placements} on {mesh}), which it can use only where "
            "strategy 'tensor_parallel' has split it by rows. Under fsdp, call it inside the forward of the module "
            "that holds the weight; under tensor_parallel, say 'colwise_rep' for the head in the plan"
        )
    rows = -(-weight.shape[0] // mesh.size())  # of each rank, as torch.chunk cuts
    return mesh.get_group(0), min(mesh.get_local_rank() * rows, weight.shape[0]), rows


class _Options(NamedTuple):
    vocabulary: int
    start: int  # the first row of this rank's part of the weight
    group: dist.ProcessGroup | None  # the ranks that hold the parts; None where the weight is whole
    dtype: torch.dtype  # of the matrix products
    ignore_index: int
    smoothing: float
    chunk: int  # tokens
    summed: bool  # the result is the sum of the losses, so that one number arrives in backward
    grad_enabled: bool


class _Chunks(torch.autograd.Function):
    """The sum of the losses, or the loss of each token."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, targets)
        needs_grad = ctx.needs_input_grad[:3] if options.grad_enabled and options.summed else (False,) * 3
        losses, ctx.gradients = _run(hidden, weight, bias, targets, options, needs_grad)
        return losses.sum() if options.summed else losses

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise StepError(
                "linear_cross_entropy has no gradient of a gradient, for which create_graph=True asks: use "
                "F.cross_entropy(F.linear(hidden, weight, bias), targets)"
            )
        hidden, weight, bias, targets = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if ctx.options.summed and gradients is not None:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(grad_output)
        else:
            per_token = grad_output.expand(len(hidden))
            _, gradients = _run(hidden, weight, bias, targets, ctx.options, ctx.needs_input_grad[:3], per_token)
        # A sum over many tokens can be too large for fp16 before it is divided by their number, which is in
        # `grad_output`.
        narrow = (None if g is None else g.to(t.dtype) for g, t in zip(gradients, (hidden, weight, bias)))
        return (*narrow, None, None)


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    options: _Options,
    needs_grad: tuple[bool, ...],
    grad_output: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss of each token, and gradients of hidden, weight and bias (both fp32 or wider), times `grad_output`."""
    vocabulary, start, group, dtype, ignore_index, smoothing, chunk, *_ = options
    wide, narrow_weight = torch.promote_types(dtype, torch.float32), weight.to(dtype)
    narrow_bias = None if bias is None else bias.to(dtype)
    losses = hidden.new_empty(len(hidden), dtype=wide)
    grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    grad_weight, grad_bias = (
        torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) if t is not None and needs else None
        for t, needs in ((weight, needs_grad[1]), (bias, needs_grad[2]))
    )
    for first in range(0, len(hidden), chunk):
        tokens = slice(first, first + chunk)
        h, labels, counted = hidden[tokens].to(dtype), targets[tokens] - start, targets[tokens] != ignore_index
        logs = F.linear(h, narrow_weight, narrow_bias)
        if group is None:
            logs, on_this_rank = logs.log_softmax(1, dtype=wide), counted
        else:
            logs, on_this_rank = logs.to(wide), (labels >= 0) & (labels < len(weight))
            logsumexp = logs.logsumexp(1)
            of_ranks = [torch.empty_like(logsumexp) for _ in range(dist.get_world_size(group))]
            dist.all_gather(of_ranks, logsumexp, group=group)
            logs -= torch.stack(of_ranks).logsumexp(0)[:, None]
        index = torch.where(on_this_rank, labels, 0)[:, None]
        loss = (smoothing - 1) * logs.gather(1, index)[:, 0] * on_this_rank
        if smoothing:
            loss -= smoothing / vocabulary * logs.sum(1)
        losses[tokens] = torch.where(counted, loss, 0)
        if not any(needs_grad):
            continue
        # Of each logit: softmax - label. `grad_output` is multiplied to the narrow factors, and not to all words.
        logs.exp_().scatter_add_(1, index, ((smoothing - 1) * on_this_rank.to(wide))[:, None])
        if smoothing:
            logs -= smoothing / vocabulary
        factor = counted.to(wide) if grad_output is None else counted * grad_output[tokens]
        grad_logits = logs.to(dtype)
        if grad_hidden is not None:
            grad_hidden[tokens] = (grad_logits @ narrow_weight) * factor[:, None]
        if grad_weight is not None:
            h = (h * factor[:, None]).to(dtype)
            if grad_weight.dtype == dtype:
                grad_weight.addmm_(grad_logits.t(), h)
            else:
                grad_weight += grad_logits.t() @ h
        if grad_bias is not None:
            grad_bias += factor @ logs
    if group is not None:
        dist.all_reduce(losses, group=group)
        out_of_range = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
        losses.masked_fill_(out_of_range, torch.nan)  # of a whole weight, torch refuses to gather such a one
        if grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=group)
    return losses, (grad_hidden, grad_weight, grad_bias)


# -- batch-norm over the samples of all ranks --------------------------------------------------------------------------

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


class _SumOverRanks(torch.autograd.Function):
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
