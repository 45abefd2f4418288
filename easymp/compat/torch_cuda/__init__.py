"""``torch.cuda``, as far as mixed precision goes: ``from easymp.compat.torch_cuda import amp``."""

from __future__ import annotations

from . import amp
from .amp import layer

__all__ = ["amp"]

__getattr__ = layer.absent(
    "torch.cuda",
    {},
    lambda: ["amp; all else of torch.cuda needs no change of the import line"],
)
