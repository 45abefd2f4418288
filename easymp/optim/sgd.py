"""SGD with momentum, as torch has it: torch.optim.SGD's docstring gives the formula.

Nesterov's variant is that of Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013. torch keeps no
``step``; a momentum that starts at zero, and the first gradient not dampened, are the same as its momentum that starts as the first
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cuda.rule import Group, Rule
from .fused import Options, TorchOptimizer


def _uses(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _hyper(group: Group) -> tuple[float, ...]:
    return (
        float(group["momentum"]),
        float(group["dampening"]),
        float(group["weight_decay"]),
        float(bool(group["nesterov"])),
        -1.0 if group["maximize"] else 1.0,
    )


def _element(states: tuple[str, ...]) -> str:
    if not states:
        return "p -= size * (g * sign + l2 * p);"
    return """
const float d = g * sign + l2 * p;
momentum_buffer = keep * momentum_buffer + take * d;
p -= size * (ahead != 0.f ? d + keep * momentum_buffer : momentum_buffer);
"""


def reference(p: Tensor, g: Tensor, states: dict[str, Any], group: Group, step: int) -> None:
    d = (-g if group["maximize"] else g) + group["weight_decay"] * p
    if group["momentum"]:
        buffer = states["momentum_buffer"]
        buffer.mul_(group["momentum"]).add_(d, alpha=1.0 if step == 1 else 1 - group["dampening"])
        d = d + group["momentum"] * buffer if group["nesterov"] else buffer
    p.sub_(group["lr"] * d)


SGD_RULE = Rule(
    name="sgd",
    states=("momentum_buffer",),
    uses=_uses,
    hyper=_hyper,
    numbers=("momentum", "dampening", "decay", "nesterov", "direction"),
    prepare="""
sign = direction; l2 = decay; size = lr; keep = momentum; ahead = nesterov;
take = step == 1.0 ? 1.0 : 1.0 - dampening;
""",
    constants=("sign", "l2", "size", "keep", "take", "ahead"),
    element=_element,
    reference=reference,
    counts=False,
)


class SGD(TorchOptimizer, torch.optim.SGD):
    """torch.optim.SGD.

    Args:
        ema_decay, state_dtype, stochastic_rounding: see `Options`. The other arguments are torch's.
    """

    rule = SGD_RULE
    torchs = torch.optim.SGD

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | bool = False,
    ) -> None:
        self.options = Options(ema_decay, state_dtype, stochastic_rounding)
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, fused=fused
        )
