"""What gradients travel as."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NoneCompressor:
    """As they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor:
    """Floating-point tensors as fp16, which holds 6e-8 to 65,504; back in their own type."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16), tensor.dtype) if tensor.dtype.is_floating_point else (tensor, None)

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The choices: ``Compression.none``, ``Compression.fp16``; or a class with the same two functions."""

    none = NoneCompressor
    fp16 = FP16Compressor
