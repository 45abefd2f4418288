"""``torch.cuda``, as far as mixed precision goes: ``from easymp.compat.torch_cuda import amp``."""

from __future__ import annotations

import torch

from . import amp
from .amp import layer

__all__ = ["amp"]

ELSEWHERE = dict.fromkeys(dir(torch.cuda), "all but amp is torch's own: import it from torch.cuda")
__getattr__ = layer.absent("torch.cuda", ELSEWHERE, lambda: __all__)
