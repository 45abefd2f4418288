"""Which optimizers step element by element, so that parts of their parameters are as good to them as the whole.

Any other may look at whole matrices (Muon does), and steps on DTensors, in which norms and products mean those of the whole matrix.
"""

from __future__ import annotations

import torch

from ..base.torch_flags import TORCH
from ..errors import SettingError
from .fusing import FusedOptimizer

ELEMENTWISE = (
    *(
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
    ),
    *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop),
)
# Before this torch, a DTensor that is a sum still to be made takes a number on each rank: `p.norm() + eps`, `p.sum() + 1` are wrong.
SUMS_ARE_RIGHT = (2, 11)


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether plain tensors with parts of its parameters are all that `optimizer` needs."""
    if isinstance(optimizer, FusedOptimizer):
        return optimizer.rule.survey is None
    return type(optimizer) in ELEMENTWISE


def check_sums(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Whether this torch's DTensors can be trusted with what `optimizer` may compute of whole parameters.

    Raises:
        SettingError: they cannot: the numbers would be wrong, and nothing would say so.
    """
    if TORCH >= SUMS_ARE_RIGHT:
        return
    if not isinstance(optimizer, (*ELEMENTWISE, FusedOptimizer)):
        raise SettingError(
            f"strategy {strategy!r} cannot take {type(optimizer).__name__} with torch {torch.__version__}, whose sharded tensors add "
            f"wrongly to a sum or norm of themselves: update torch to {'.'.join(map(str, SUMS_ARE_RIGHT))} or newer, use strategy='ddp', "
            "or an optimizer that steps element by element, such as AdamW"
        )
