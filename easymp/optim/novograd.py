"""NovoGrad: "Stochastic Gradient Methods with Layer-wise Adaptive Moments …", Ginsburg et al., arXiv:1905.11286, as in Apex."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import local
from ..cuda.rules import NOVOGRAD
from ..errors import SettingError, StepError
from .fused import ListedOptimizer, Lists, Options, check, signed
from .torch_step import whole_squares


class NovoGrad(ListedOptimizer):
    """Momentum of gradients divided by an average of their norm, one a tensor, with Apex FusedNovoGrad's options and defaults.

    State: ``step``, ``exp_avg``, and ``exp_avg_sq``, the average norm (0-dim). Of sharded parameters (DTensors) the norms are those of
    the whole tensors.

    Args:
        bias_correction: of both averages.
        reg_inside_moment: divide, and decay, before the momentum; else after it.
        grad_averaging: False adds the gradient to the momentum whole.
        norm_type: 2, or 0 or inf for the largest magnitude, which torch's operations compute.
        init_zero: start the average norm at 0; else at the first norm.
        maximize: go up.
        fused: False keeps to torch's operations.
        ema_decay, state_dtype, stochastic_rounding: see `Options`.
    """

    rule = NOVOGRAD

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | bool = False,
    ) -> None:
        check(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        if norm_type not in (2, 0, math.inf):
            raise SettingError(f"norm_type={norm_type} must be 2, or inf (Apex writes 0)")
        self.options = Options(ema_decay, state_dtype, stochastic_rounding)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        defaults |= {
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
        }
        super().__init__(params, {**defaults, "init_zero": init_zero, "maximize": maximize, "fused": fused})

    def advance_lists(self, lists: Sequence[tuple[dict[str, Any], Lists]]) -> None:
        for group, of in lists:
            (beta1, beta2), p, m = group["betas"], of.p, of.states["exp_avg"]
            steps = of.steps
            assert steps is not None
            below = self._norms(group, of, steps)
            correction = 1.0
            if group["bias_correction"]:
                correction = 1 - beta1**steps
                below = below / (1 - beta2**steps).sqrt()
            shares = list((1 / (below + group["eps"])).float().unbind())
            g = signed(group, of)
            decay = group["weight_decay"]
            if group["reg_inside_moment"]:
                g = torch._foreach_mul(g, shares)
                torch._foreach_add_(g, torch._foreach_mul(p, decay * of.go))
            torch._foreach_mul_(m, 1 - (1 - beta1) * of.go)
            torch._foreach_add_(m, g, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
            size = group["lr"] * of.go
            rates = torch.as_tensor(size / correction, device=p[0].device).expand(len(p)).float().unbind()
            update = torch._foreach_mul(m, list(rates))
            if not group["reg_inside_moment"]:
                torch._foreach_mul_(update, shares)
                torch._foreach_mul_(p, 1 - size * decay)
            torch._foreach_sub_(p, update)

    def _norms(self, group: dict[str, Any], of: Lists, steps: Tensor) -> Tensor:
        """The average norms after this step, [parameters], which the states have then."""
        beta2 = group["betas"][1]
        held = [self.state[p]["exp_avg_sq"] for p in of.parameters]
        before = torch.stack(held).to(steps.dtype)
        euclidean = group["norm_type"] == 2
        if euclidean:
            now = whole_squares(of.parameters, of.g).sqrt()
        else:
            if any(local(p) is not p for p in of.parameters):
                raise StepError(
                    "the largest magnitude of a sharded gradient is not computed: use norm_type=2, or strategy='ddp'"
                )
            now = torch.stack([g.abs().amax() if g.numel() else g.new_zeros(()) for g in of.g]).to(
                steps.dtype
            )
        if not group["init_zero"]:
            before = torch.where(steps == 1, now, before)
        after = (
            beta2 * before.square() + (1 - beta2) * now.square()
            if euclidean
            else beta2 * before + (1 - beta2) * now
        )
        after = after.sqrt() if euclidean else after
        torch._foreach_copy_(
            held,
            list(
                torch.where(
                    torch.as_tensor(of.go, device=after.device) > 0, after, torch.stack(held)
                ).unbind()
            ),
        )
        return after
