"""Context parallelism: neighbouring ranks share each sequence (Ulysses, Jacobs et al., arXiv:2309.14509).

Each rank computes on its part of the tokens. Attention needs all of them, so around it two all-to-alls exchange
sequences for heads: each rank attends with some of the heads, over whole sequences, and gets back its own tokens with
all heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..distributed import World
from ..errors import BatchError, RefusedError, SettingError, StepError

ATTENTION: Any = torch._C._nn.scaled_dot_product_attention  # the function behind all of its names
# Functions that call attention themselves, or again for what is recomputed.
AROUND = (functional.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad)
CALLED = "call torch.nn.functional.scaled_dot_product_attention in the model, and run forward and backward inside"


def check_group_size(option: str, size: int, ranks: int) -> int:
    """Return `size`; raises SettingError where the ranks cannot form groups of it."""
    if ranks % size:
        divisors = [n for n in range(2, ranks + 1) if ranks % n == 0]
        remedy = f"use one of {divisors}" if divisors else "leave it out, or start several processes"
        raise SettingError(f"{option}={size} does not divide {ranks} processes into groups: {remedy}")
    return size


class SequenceAttention(TorchFunctionMode):
    """Inside, attention sees the whole sequences of which the ranks of a group hold equal parts, in rank order."""

    def __init__(self, world: World, size: int) -> None:
        super().__init__()
        self._world, self._size = world, size
        self._group, _ = dist.new_subgroups(size)
        self._attended = False  # whether attention has been called inside
        self._exchanging = False  # whether attention runs on exchanged tensors now

    @contextmanager
    def over(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> Iterator[None]:
        """A context in which `buffers` are this rank's parts; they are whole again outside."""
        if not buffers or len(buffers) != len(dims):
            raise BatchError(f"context_parallel() got {len(buffers)} buffers and {len(dims)} dims: pass one for each")
        lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims)}
        if len(lengths) > 1 or max(lengths) % self._size:
            raise BatchError(
                f"context_parallel() got sequences of length {sorted(lengths)}: pad all to one length, a multiple of "
                f"{self._size}"
            )
        if any(buffer.requires_grad or buffer._base is not None for buffer in buffers):
            raise BatchError(
                "context_parallel() changes buffers in place: pass plain tensors of the batch, no views or results"
            )
        wholes = [buffer.data for buffer in buffers]
        self._attended = False
        try:
            for buffer, dim in zip(buffers, dims):
                parts = buffer.data.chunk(self._size, dim)
                buffer.data = parts[self._world.rank % self._size].contiguous()
            with self:
                yield
        finally:
            for buffer, sequence in zip(buffers, wholes):
                buffer.data = sequence
        if not self._attended:
            raise StepError(
                f"no attention was called inside context_parallel(), so no token saw those of other ranks: {CALLED}"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is ATTENTION and not self._exchanging:
            return self._attend(*args, **keywords)
        if func not in AROUND:
            return func(*args, **keywords)
        if func is functional.multi_head_attention_forward and keywords.get("need_weights", True):
            raise RefusedError(
                "nn.MultiheadAttention under context_parallel returns no weights: call it with need_weights=False"
            )
        # Calls of attention inside would not come back here: torch leaves the mode while such a function runs.
        with mock.patch.object(functional, "scaled_dot_product_attention", self._attend):
            return func(*args, **keywords)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **keywords: Any
    ) -> Tensor:
        if attn_mask is not None:
            raise RefusedError(
                "attention under context_parallel takes no attn_mask, which would be of this rank's tokens only: use "
                "is_causal=True, or leave context_parallel out"
            )
        heads = [tensor.shape[-3] if tensor.ndim > 2 else 1 for tensor in (query, key, value)]
        if any(count % self._size for count in heads):
            raise RefusedError(
                f"context_parallel={self._size} splits the heads of attention over the ranks of a group, and {heads} "
                "heads of queries, keys and values do not all divide by it: use a divisor of them, or leave "
                "context_parallel out"
            )
        self._attended = True
        sequences = [self._exchange(tensor, -3, -2) for tensor in (query, key, value)]
        self._exchanging = True  # where a recomputed block has entered this mode again
        try:
            attended = ATTENTION(*sequences, None, *args, **keywords)
        finally:
            self._exchanging = False
        return self._exchange(attended, -2, -3)

    def _exchange(self, tensor: Tensor, split: int, join: int) -> Tensor:
        """Split dimension `split` over the ranks of the group, and join what they send along dimension `join`."""
        from torch.distributed import _functional_collectives as collectives  # here: it takes 25 ms

        parts = torch.stack(tensor.chunk(self._size, split))
        with self._world.explained("attention over the parts of sequences"):
            received = collectives.all_to_all_single_autograd(parts, None, None, self._group)
            return torch.cat(received.unbind(), join)
