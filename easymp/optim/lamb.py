"""LAMB: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", You et al., arXiv:1904.00962, as in Apex."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cuda.rules import LAMB as RULE
from .fused import ListedOptimizer, Lists, Options, check, signed
from .torch_step import whole_squares


class LAMB(ListedOptimizer):
    """AdamW's direction, and a length of lr × |p| for each tensor, with Apex FusedLAMB's options and defaults.

    State: ``step``, ``exp_avg``, ``exp_avg_sq``. Of sharded parameters (DTensors) the norms are those of the whole tensors.

    Args:
        bias_correction: of both averages.
        adam_w_mode: decay beside the gradient; else as a part of it (L2).
        grad_averaging: False adds the gradient to the first average whole.
        max_grad_norm: gradients are clipped first, by the norm of those of all groups; None: not.
        use_nvlamb: let tensors without weight decay have a ratio, too.
        maximize: go up.
        fused: False keeps to torch's operations.
        ema_decay, state_dtype, stochastic_rounding: see `Options`.
    """

    rule = RULE

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
        maximize: bool = False,
        fused: bool | None = None,
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | bool = False,
    ) -> None:
        check(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm or 0.0)
        self.options = Options(ema_decay, state_dtype, stochastic_rounding)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        defaults |= {
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, {**defaults, "use_nvlamb": use_nvlamb, "maximize": maximize, "fused": fused})

    def advance_lists(self, lists: Sequence[tuple[dict[str, Any], Lists]]) -> None:
        norm = self.gradient_norm(
            [p for _, of in lists for p in of.parameters], [g for _, of in lists for g in of.g]
        )
        for group, of in lists:
            (beta1, beta2), decay, p = group["betas"], group["weight_decay"], of.p
            m, v = of.states["exp_avg"], of.states["exp_avg_sq"]
            g = signed(group, of)
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
        steps = of.steps
        assert steps is not None
        if group["bias_correction"]:
            torch._foreach_div_(update, list((1 - beta2**steps).sqrt().float().unbind()))
        torch._foreach_add_(update, group["eps"])
        update = list(torch._foreach_div(of.states["exp_avg"], update))
        if group["bias_correction"]:
            torch._foreach_div_(update, list((1 - beta1**steps).float().unbind()))
        return update
