"""LAMB: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", You et al., arXiv:1904.00962, as in Apex.

Apex's choices: the gradients are clipped to a norm over all of them first; a tensor without weight decay has the ratio 1, unless
`use_nvlamb`; so has one whose norm, or whose update's norm, is 0. Without `adam_w_mode` the decay is a part of the gradient (L2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from ..cuda.rule import BETAS, Rule, Survey, direction
from .foreach import ListOptimizer, Lists
from .fused import OptionWords
from .torch_step import whole_squares

_UPDATE = "(exp_avg * unbias / (sqrtf(exp_avg_sq) * root + eps) + plain * p)"


LAMB_RULE = Rule(
    name="lamb",
    states=("exp_avg", "exp_avg_sq"),
    numbers={
        **BETAS,
        "epsilon": "eps",
        "decay": lambda group: 0.0 if group["adam_w_mode"] else group["weight_decay"],
        "decoupled": lambda group: group["weight_decay"] if group["adam_w_mode"] else 0.0,
        "average": lambda group: 1.0 - group["betas"][0] if group["grad_averaging"] else 1.0,
        "correct": "bias_correction",
        "most": lambda group: group["max_grad_norm"] or 0.0,
        "trusted": lambda group: bool(group["use_nvlamb"] or group["weight_decay"]),
        "direction": direction,
    },
    prepare="""
sign = direction * (most > 0.0 && norm > most ? most / norm : 1.0);
l2 = decay; plain = decoupled; eps = epsilon; size = lr;
keep1 = beta1; rest1 = average; keep2 = beta2; rest2 = 1.0 - beta2;
unbias = correct != 0.0 ? 1.0 / (1.0 - pow(beta1, step)) : 1.0;
root = correct != 0.0 ? 1.0 / sqrt(1.0 - pow(beta2, step)) : 1.0;
""",
    constants=("sign", "l2", "plain", "eps", "size", "keep1", "rest1", "keep2", "rest2", "unbias", "root"),
    survey=Survey(
        sums=("weights", "updates"),
        element=f"""
const float d = g * sign + l2 * p;
exp_avg = keep1 * exp_avg + rest1 * d;
exp_avg_sq = keep2 * exp_avg_sq + rest2 * d * d;
const float u = {_UPDATE};
weights += p * p;
updates += u * u;
""",
        weigh="if (trusted != 0.0 && weights > 0.0 && updates > 0.0) size = lr * sqrt(weights / updates);",
        moves=True,
    ),
    element=f"p -= size * {_UPDATE};",
    norm=True,
)


class LAMB(ListOptimizer):
    """AdamW's direction, and a length of lr × |p| for each tensor, with Apex FusedLAMB's options and defaults.

    You et al., arXiv:1904.00962. State: ``step``, ``exp_avg``, ``exp_avg_sq``. Of sharded parameters (DTensors) the norms are those of the
    whole tensors.

    Args:
        params: as in torch.
        lr: length of a step, relative to the norm of the tensor.
        bias_correction: of both averages.
        betas: decay of the averages of gradients and of their squares.
        eps: added to the root of the second average.
        weight_decay: factor of the decay.
        adam_w_mode: decay beside the gradient; else as a part of it (L2).
        grad_averaging: False adds the gradient to the first average whole.
        max_grad_norm: gradients are clipped first, by the norm of those of all groups; None: not.
        use_nvlamb: let tensors without weight decay have a ratio, too.
        options: maximize, fused, ema_decay, state_dtype and stochastic_rounding, see `ListOptimizer`.

    Raises:
        SettingError: a number is out of range, or a parameter is not a real float.

    Example:
        >>> from easymp.optim import LAMB
        >>> parameter = nn.Parameter(torch.full((2,), 10.0))
        >>> optimizer = LAMB([parameter], lr=0.1)
        >>> parameter.sum().backward()
        >>> optimizer.step()  # by 0.1 × |p|
        >>> parameter.data
        tensor([9., 9.])
    """

    rule = LAMB_RULE

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        **options: Unpack[OptionWords],
    ) -> None:
        group = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        group |= {"weight_decay": weight_decay, "adam_w_mode": adam_w_mode, "grad_averaging": grad_averaging}
        group |= {"max_grad_norm": max_grad_norm, "use_nvlamb": use_nvlamb}
        super().__init__(params, group, **options)

    def advance_lists(self, lists: Sequence[tuple[dict[str, Any], Lists]]) -> None:
        norm = self.gradient_norm(
            [p for _, of in lists for p in of.parameters], [g for _, of in lists for g in of.g]
        )
        for group, of in lists:
            (beta1, beta2), decay, p = group["betas"], group["weight_decay"], of.p
            m, v = of.states["exp_avg"], of.states["exp_avg_sq"]
            g = of.g
            if group["max_grad_norm"]:
                here = norm.to(p[0].device)
                g = torch._foreach_mul(
                    g, torch.where(here > group["max_grad_norm"], group["max_grad_norm"] / here, 1.0).float()
                )
            if not group["adam_w_mode"] and decay:
                # Nothing of the weights either, where the step is skipped.
                g = torch._foreach_add(g, torch._foreach_mul(p, decay * of.go))
            torch._foreach_mul_(m, 1 - (1 - beta1) * of.go)
            torch._foreach_add_(m, g, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
            torch._foreach_mul_(v, 1 - (1 - beta2) * of.go)
            torch._foreach_addcmul_(v, g, g, value=1 - beta2)
            update = self._direction(group, of)
            if group["adam_w_mode"] and decay:
                torch._foreach_add_(update, p, alpha=decay)
            rate = torch.as_tensor(group["lr"] * of.go, device=p[0].device).expand(len(p))
            if group["use_nvlamb"] or decay:
                weights, moves = whole_squares(of.parameters, p), whole_squares(of.parameters, update)
                rate = rate * torch.where((weights > 0) & (moves > 0), (weights / moves).sqrt(), 1.0)
            torch._foreach_mul_(update, list(rate.to(torch.float32).unbind()))
            torch._foreach_sub_(p, update)

    def _direction(self, group: dict[str, Any], of: Lists) -> list[Tensor]:
        update = torch._foreach_sqrt(of.states["exp_avg_sq"])
        beta1, beta2 = group["betas"]
        if group["bias_correction"]:
            torch._foreach_div_(update, list((1 - beta2**of.steps).sqrt().float().unbind()))
        torch._foreach_add_(update, group["eps"])
        update = list(torch._foreach_div(of.states["exp_avg"], update))
        if group["bias_correction"]:
            torch._foreach_div_(update, list((1 - beta1**of.steps).float().unbind()))
        return update
