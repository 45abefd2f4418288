"""``torch.cuda``, as far as mixed precision goes: ``from easymp.compat.torch_cuda import amp``."""

from __future__ import annotations

import torch

from . import amp
from .amp import layer

__all__ = ["amp"]

__getattr__ = layer.absent(
    "torch.cuda",
    {
        name: "all but amp is torch's own: import it from torch.cuda"
        for name in dir(torch.cuda)
        if name != "amp"
    },
    lambda: __all__,
)
