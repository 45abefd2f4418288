"""Cross-entropy of a linear layer's outputs, chunk by chunk, so that the outputs of all tokens are never in memory at once.

A chunk's logits are made, turned into their gradient in place, multiplied into the gradients of hidden states and weight, and dropped:
three matrix products of each chunk, as of the plain pair, all in forward. Backward multiplies these gradients by the one number that
arrives; for a number a token (reduction="none"), or a second backward, it makes the logits again. torch 2.13's own function is not called:
of bf16 inputs it returns a bf16 loss and sums the weight's gradient in bf16, it holds the logits under label smoothing, and it knows no
split vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..errors import BatchError, SettingError, StepError

__all__ = ["linear_cross_entropy"]
LEAST = 512  # tokens of a chunk, below which matrix products are slow
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

    Call it inside the model's forward, where autocast holds and fsdp has gathered the weight. Under tensor_parallel, a weight that is
    split by rows (a head that the plan calls "colwise" or "colwise_rep") stays split: each rank computes the logits of its part of the
    vocabulary, and the ranks exchange two numbers a token and the gradient of `hidden`.

    Args:
        hidden: (..., features), in a floating-point dtype.
        weight: (vocabulary, features), as of `nn.Linear`.
        targets: (...), int64, indices of the vocabulary.
        bias: (vocabulary,).
        ignore_index: targets of this value are left out.
        reduction: "mean" over the other targets, "sum", or "none".
        label_smoothing: the part of each target, 0 to 1, that is spread over the vocabulary.
        chunk_tokens: tokens whose logits are in memory at once. None: so many that they take no more memory than `hidden`, at least 512.

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
        got = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)}"
        raise BatchError(
            f"linear_cross_entropy got {got}: pass (..., features), (vocabulary, features) and (...)"
        )
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
    words, group, start = weight.shape[0], None, 0
    most = words  # of a rank
    if hasattr(weight, "to_local"):
        group, start, most = _split(weight)
        if bias is not None:
            bias = bias.redistribute(weight.device_mesh, weight.placements).to_local()  # type: ignore[attr-defined]
        weight = weight.to_local()
    hidden, targets = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (hidden, targets))
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind)
    if not autocast and hidden.dtype != weight.dtype:
        got = f"hidden in {hidden.dtype} and a weight in {weight.dtype}"
        raise BatchError(f"linear_cross_entropy got {got}, outside of autocast: convert one of them")
    dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    tokens = chunk_tokens or max(LEAST, rows.numel() // max(1, most))  # the same on all ranks
    summed, graph = reduction != "none", torch.is_grad_enabled()
    how = _How(words, start, group, dtype, ignore_index, label_smoothing, tokens, summed, graph)
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _Chunks.apply(rows, weight, bias, flat, how)  # type: ignore[no-untyped-call]
    if reduction == "mean":
        count = (flat != ignore_index).sum()
        # Without targets: no number, and gradients of 0, as torch has it.
        return torch.where(count > 0, loss / count.clamp(min=1), torch.nan)
    return loss if summed else loss.view(targets.shape)


def _split(weight: Any) -> tuple[dist.ProcessGroup, int, int]:
    """The ranks that hold the parts of a weight, the first word of this rank's part, and the number of words in the largest part."""
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 or "tensor" not in (mesh.mesh_dim_names or ()) or not placements[0].is_shard(0):
        raise SettingError(
            f"linear_cross_entropy got a weight in shards ({placements} on {mesh}), which it can use only where strategy "
            "'tensor_parallel' has split it by rows. Under fsdp, call it inside the forward of the module that holds the weight; under "
            "tensor_parallel, say 'colwise_rep' for the head in the plan"
        )
    each = -(-weight.shape[0] // mesh.size())  # rows of each rank, as torch.chunk cuts
    return mesh.get_group(0), min(mesh.get_local_rank() * each, weight.shape[0]), each


class _How(NamedTuple):
    """Everything but the tensors."""

    words: int  # of the whole vocabulary
    start: int  # the first word of this rank's part of it
    group: dist.ProcessGroup | None  # the ranks that hold the parts; None where the weight is whole
    dtype: torch.dtype  # of the matrix products
    ignore_index: int
    smoothing: float
    tokens: int  # of a chunk
    summed: bool  # the result is the sum of the losses, so that one number arrives in backward
    graph: bool  # there will be a backward


class _Chunks(torch.autograd.Function):
    """The sum of the losses, or the loss of each token."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How
    ) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(hidden, weight, bias, targets)
        needed = ctx.needs_input_grad[:3] if how.graph and how.summed else (False,) * 3
        losses, ctx.gradients = _run(hidden, weight, bias, targets, how, needed)
        return losses.sum() if how.summed else losses

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            why = "linear_cross_entropy has no gradient of a gradient, for which create_graph=True asks"
            raise StepError(f"{why}: use F.cross_entropy(F.linear(hidden, weight, bias), targets)")
        gradients = ctx.gradients
        if ctx.how.summed and gradients is not None:
            ctx.gradients = None
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(arrived)
        else:
            each = arrived.expand(len(ctx.saved_tensors[0]))
            gradients = _run(*ctx.saved_tensors, ctx.how, ctx.needs_input_grad[:3], each)[1]
        # A sum over many tokens can be too large for fp16 before it is divided by their number, which is in `arrived`.
        narrow = (None if g is None else g.to(t.dtype) for g, t in zip(gradients, ctx.saved_tensors))
        return (*narrow, None, None)


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    how: _How,
    needed: tuple[bool, ...],
    arrived: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss of each token, and the `needed` gradients of hidden, weight and bias (both fp32 or wider), times what has `arrived`."""
    words, start, group, dtype, ignore_index, smoothing, tokens, *_ = how
    wide, held = torch.promote_types(dtype, torch.float32), weight.to(dtype)
    added = None if bias is None else bias.to(dtype)
    losses = hidden.new_empty(len(hidden), dtype=wide)
    of_hidden = torch.empty_like(hidden) if needed[0] else None
    of_weight, of_bias = (
        torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) if need else None
        for t, need in ((weight, needed[1]), (bias, needed[2]))
    )
    for first in range(0, len(hidden), tokens):
        here = slice(first, first + tokens)
        h, mine, counts = hidden[here].to(dtype), targets[here] - start, targets[here] != ignore_index
        logs = F.linear(h, held, added)
        if group is None:
            logs = logs.log_softmax(1, dtype=wide)
        else:
            logs = logs.to(wide)
            mine_only = logs.logsumexp(1)
            every = [torch.empty_like(mine_only) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, mine_only, group=group)
            logs -= torch.stack(every).logsumexp(0)[:, None]
        found = counts if group is None else (mine >= 0) & (mine < len(weight))
        index = torch.where(found, mine, 0)[:, None]
        loss = (smoothing - 1) * logs.gather(1, index)[:, 0] * found
        if smoothing:
            loss -= smoothing / words * logs.sum(1)
        losses[here] = torch.where(counts, loss, 0)
        if not any(needed):
            continue
        # Of each logit: softmax - label. What has arrived is multiplied to the narrow factors, and not to all words.
        logs.exp_().scatter_add_(1, index, ((smoothing - 1) * found.to(wide))[:, None])
        if smoothing:
            logs -= smoothing / words
        factor = counts.to(wide) if arrived is None else counts * arrived[here]
        back = logs.to(dtype)
        if of_hidden is not None:
            of_hidden[here] = (back @ held) * factor[:, None]
        if of_weight is not None:
            h = (h * factor[:, None]).to(dtype)
            if of_weight.dtype == dtype:
                of_weight.addmm_(back.t(), h)
            else:
                of_weight += back.t() @ h
        if of_bias is not None:
            of_bias += factor @ logs
    if group is not None:
        dist.all_reduce(losses, group=group)
        outside = ((targets < 0) | (targets >= words)) & (targets != ignore_index)
        losses.masked_fill_(outside, torch.nan)  # of a whole weight, torch refuses to gather such a one
        if of_hidden is not None:
            dist.all_reduce(of_hidden, group=group)
    return losses, (of_hidden, of_weight, of_bias)
