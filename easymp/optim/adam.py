"""Adam and AdamW, as torch has them.

"Adam: A Method for Stochastic Optimization", Kingma and Ba, arXiv:1412.6980; decoupled decay: Loshchilov and Hutter, arXiv:1711.05101;
amsgrad: Reddi, Kale and Kumar, arXiv:1904.09237. Without the correction of the averages' start where a group says so
(`bias_correction`, Apex's option; torch has none).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cuda.rule import Group, Rule
from .fused import Options, TorchOptimizer


def _uses(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _refuse(group: Group) -> str | None:
    if any(isinstance(b, Tensor) for b in group["betas"]):
        return "betas are tensors"
    return None


def _hyper(group: Group) -> tuple[float, ...]:
    decay = float(group["weight_decay"])
    decoupled = bool(group.get("decoupled_weight_decay"))
    return (
        *(float(b) for b in group["betas"]),
        float(group["eps"]),
        0.0 if decoupled else decay,
        decay if decoupled else 0.0,
        -1.0 if group["maximize"] else 1.0,
        float(bool(group.get("bias_correction", True))),
    )


def _element(states: tuple[str, ...]) -> str:
    second = "exp_avg_sq"
    most = ""
    if "max_exp_avg_sq" in states:
        most = "max_exp_avg_sq = exp_avg_sq > max_exp_avg_sq ? exp_avg_sq : max_exp_avg_sq;"
        second = "max_exp_avg_sq"
    return f"""
const float d = g * sign + l2 * p;
exp_avg += (d - exp_avg) * rest1;
exp_avg_sq = keep2 * exp_avg_sq + rest2 * d * d;
{most}
p = p * shrink - size * (exp_avg / (sqrtf({second}) * root + eps));
"""


def reference(p: Tensor, g: Tensor, states: dict[str, Any], group: Group, step: int) -> None:
    beta1, beta2 = group["betas"]
    d = -g if group["maximize"] else g
    if group.get("decoupled_weight_decay"):
        p.mul_(1 - group["lr"] * group["weight_decay"])
    else:
        d = d + group["weight_decay"] * p
    states["exp_avg"].lerp_(d, 1 - beta1)
    states["exp_avg_sq"].mul_(beta2).addcmul_(d, d, value=1 - beta2)
    second = states["exp_avg_sq"]
    if group["amsgrad"]:
        second = torch.maximum(states["max_exp_avg_sq"], second, out=states["max_exp_avg_sq"])
    first, root = (1 - beta1**step, 1 - beta2**step) if group.get("bias_correction", True) else (1.0, 1.0)
    p.sub_(group["lr"] / first * states["exp_avg"] / ((second / root).sqrt() + group["eps"]))


ADAM = Rule(
    name="adam",
    states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    uses=_uses,
    refuse=_refuse,
    hyper=_hyper,
    numbers=("beta1", "beta2", "epsilon", "decay", "decoupled", "direction", "correct"),
    prepare="""
sign = direction; l2 = decay; shrink = 1.0 - lr * decoupled; eps = epsilon;
keep2 = beta2; rest2 = 1.0 - beta2; rest1 = 1.0 - beta1;
size = lr / (correct != 0.0 ? 1.0 - pow(beta1, step) : 1.0);
root = correct != 0.0 ? 1.0 / sqrt(1.0 - pow(beta2, step)) : 1.0;
""",
    constants=("sign", "l2", "shrink", "eps", "rest1", "keep2", "rest2", "size", "root"),
    element=_element,
    reference=reference,
)


class Adam(TorchOptimizer, torch.optim.Adam):
    """torch.optim.Adam.

    Args:
        ema_decay, state_dtype, stochastic_rounding: see `Options`. The other arguments are torch's.
    """

    rule = ADAM
    torchs = torch.optim.Adam

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | bool = False,
    ) -> None:
        self.options = Options(ema_decay, state_dtype, stochastic_rounding)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=fused)


class AdamW(TorchOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW.

    Args:
        ema_decay, state_dtype, stochastic_rounding: see `Options`. The other arguments are torch's.
    """

    rule = ADAM
    torchs = torch.optim.AdamW

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | bool = False,
    ) -> None:
        self.options = Options(ema_decay, state_dtype, stochastic_rounding)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=fused)
