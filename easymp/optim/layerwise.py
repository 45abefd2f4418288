"""LAMB, NovoGrad and LARC: the length of a step is scaled tensor by tensor, by norms. As in Apex.

LAMB (You et al., arXiv:1904.00962): gradients are clipped to a norm over all of them first. A tensor without weight decay has the ratio 1,
unless `use_nvlamb`, and so has one whose norm, or whose update's norm, is 0. NovoGrad (Ginsburg et al., arXiv:1905.11286): the second
moment is one number a tensor; as in Apex, ``exp_avg_sq`` holds its root, here of each parameter, there of a param group.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from ..base.dtensor import local, meshes
from ..cuda.rule import BETAS, Group, Rule, Survey, average, direction
from ..errors import RefusedError, SettingError, StepError
from .foreach import ListOptimizer, Lists
from .fused import FusedOptimizer, Options, OptionWords, StepChoice
from .torch_optimizers import swapped
from .torch_step import HOOKS, whole_squares, wide

# -- LAMB -----------------------------------------------------------------------------------------------------------------

_UPDATE = "(exp_avg * unbias / (sqrtf(exp_avg_sq) * root + eps) + plain * p)"


LAMB_RULE = Rule(
    name="lamb",
    states=("exp_avg", "exp_avg_sq"),
    numbers={
        **BETAS,
        "epsilon": "eps",
        "decay": lambda group: 0.0 if group["adam_w_mode"] else group["weight_decay"],
        "decoupled": lambda group: group["weight_decay"] if group["adam_w_mode"] else 0.0,
        "average": average,
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
    """AdamW's direction, and a length of lr × |p| for each tensor, with Apex FusedLAMB's options and defaults (arXiv:1904.00962).

    State: ``step``, ``exp_avg``, ``exp_avg_sq``. Of sharded parameters (DTensors) the norms are those of the whole tensors.

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
        options: maximize, fused, ema_decay, state_dtype and stochastic_rounding, as in `Adam`.

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
            m, v, g, most = of.states["exp_avg"], of.states["exp_avg_sq"], of.g, group["max_grad_norm"]
            if most:
                here = norm.to(p[0].device)
                g = torch._foreach_mul(g, torch.where(here > most, most / here, 1.0).float())
            if not group["adam_w_mode"] and decay:
                # Nothing of the weights either, where the step is skipped.
                g = torch._foreach_add(g, torch._foreach_mul(p, decay * of.go))
            torch._foreach_mul_(m, 1 - (1 - beta1) * of.go)
            torch._foreach_add_(m, g, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
            torch._foreach_mul_(v, 1 - (1 - beta2) * of.go)
            torch._foreach_addcmul_(v, g, g, value=1 - beta2)
            update = torch._foreach_sqrt(v)
            if group["bias_correction"]:
                torch._foreach_div_(update, list((1 - beta2**of.steps).sqrt().float().unbind()))
            torch._foreach_add_(update, group["eps"])
            update = list(torch._foreach_div(m, update))
            if group["bias_correction"]:
                torch._foreach_div_(update, list((1 - beta1**of.steps).float().unbind()))
            if group["adam_w_mode"] and decay:
                torch._foreach_add_(update, p, alpha=decay)
            rate = torch.as_tensor(group["lr"] * of.go, device=p[0].device).expand(len(p))
            if group["use_nvlamb"] or decay:
                weights, moves = whole_squares(of.parameters, p), whole_squares(of.parameters, update)
                rate = rate * torch.where((weights > 0) & (moves > 0), (weights / moves).sqrt(), 1.0)
            torch._foreach_mul_(update, list(rate.to(torch.float32).unbind()))
            torch._foreach_sub_(p, update)


# -- NovoGrad -------------------------------------------------------------------------------------------------------------


def _refuse(group: Group) -> str | None:
    kind = group["norm_type"]
    return None if kind == 2 else f"norm_type={kind}, and the kernels add up squares only"


NOVOGRAD = Rule(
    name="novograd",
    states=("exp_avg",),
    refuse=_refuse,
    numbers={
        **BETAS,
        "epsilon": "eps",
        "decay": "weight_decay",
        "average": average,
        "correct": "bias_correction",
        "from_zero": "init_zero",
        "inside": "reg_inside_moment",
        "direction": direction,
    },
    prepare="""
first = step == 1.0 ? 1.0 : 0.0; sign = direction; keep1 = beta1; rest1 = average;
size = correct != 0.0 ? lr / (1.0 - pow(beta1, step)) : lr;
root = correct != 0.0 ? 1.0 / sqrt(1.0 - pow(beta2, step)) : 1.0;
l2 = inside != 0.0 ? decay : 0.0; fade = inside != 0.0 ? 0.0 : lr * decay;
""",
    constants=("first", "sign", "keep1", "rest1", "size", "root", "l2", "fade", "before", "after"),
    survey=Survey(
        sums=("squares",),
        reads=("g",),
        element="squares += g * g;",
        weigh="""
const double held = first != 0.0 && from_zero == 0.0 ? squares : exp_avg_sq * exp_avg_sq;
exp_avg_sq = sqrt(beta2 * held + (1.0 - beta2) * squares);
const double share = 1.0 / (exp_avg_sq * root + epsilon);
before = inside != 0.0 ? share : 1.0; after = inside != 0.0 ? 1.0 : share;
""",
    ),
    element="""
const float d = g * sign * before + l2 * p;
exp_avg = keep1 * exp_avg + rest1 * d;
p -= size * after * exp_avg + fade * p;
""",
    scalar="exp_avg_sq",
)


class NovoGrad(ListOptimizer):
    """Momentum of gradients divided by an average of their norm, one a tensor, with Apex FusedNovoGrad's options and defaults.

    From arXiv:1905.11286. State: ``step``, ``exp_avg``, and ``exp_avg_sq``, the average norm (0-dim). Of sharded parameters (DTensors) the
    norms are those of the whole tensors.

    Args:
        params: as in torch.
        lr: factor of the momentum.
        bias_correction: of both averages.
        betas: decay of the momentum and of the average norm.
        eps: added to the average norm.
        weight_decay: factor of the decay.
        reg_inside_moment: divide, and decay, before the momentum; else after it.
        grad_averaging: False adds the gradient to the momentum whole.
        norm_type: 2, or 0 or inf for the largest magnitude, which torch's operations compute.
        init_zero: start the average norm at 0; else at the first norm.
        options: maximize, fused, ema_decay, state_dtype and stochastic_rounding, as in `Adam`.

    Raises:
        SettingError: a number is out of range, or a parameter is not a real float.

    Example:
        >>> from easymp.optim import NovoGrad
        >>> parameter = nn.Parameter(torch.ones(1))
        >>> optimizer = NovoGrad([parameter], lr=0.1)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([0.9968])
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
        **options: Unpack[OptionWords],
    ) -> None:
        if norm_type not in (2, 0, math.inf):
            raise SettingError(f"norm_type={norm_type} must be 2, or inf (Apex writes 0)")
        group = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        group |= {"weight_decay": weight_decay, "reg_inside_moment": reg_inside_moment}
        group |= {"grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero}
        super().__init__(params, group, **options)

    def advance_lists(self, lists: Sequence[tuple[dict[str, Any], Lists]]) -> None:
        for group, of in lists:
            (beta1, beta2), p, m = group["betas"], of.p, of.states["exp_avg"]
            steps, g = of.steps, of.g
            below = self._norms(group, of)
            correction = 1.0
            if group["bias_correction"]:
                correction = 1 - beta1**steps
                below = below / (1 - beta2**steps).sqrt()
            shares = list((1 / (below + group["eps"])).float().unbind())
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

    def _norms(self, group: dict[str, Any], of: Lists) -> Tensor:
        """The average norms after this step, [parameters], which the states have then."""
        held, beta2 = [self.state[p]["exp_avg_sq"] for p in of.parameters], group["betas"][1]
        kept = torch.stack(held)
        before, squares = kept.to(of.steps.dtype), group["norm_type"] == 2
        if squares:
            now = whole_squares(of.parameters, of.g).sqrt()
        elif any(local(p) is not p for p in of.parameters):
            raise StepError(
                "the largest magnitude of a sharded gradient is not computed: use norm_type=2, or strategy='ddp'"
            )
        else:
            now = torch.stack([g.abs().amax() if g.numel() else g.new_zeros(()) for g in of.g]).to(before)
        if not group["init_zero"]:
            before = torch.where(of.steps == 1, now, before)
        power = 2 if squares else 1
        after = (beta2 * before**power + (1 - beta2) * now**power) ** (1 / power)
        kept = torch.where(torch.as_tensor(of.go, device=after.device) > 0, after, kept)
        torch._foreach_copy_(held, list(kept.unbind()))
        return after


# -- LARC -----------------------------------------------------------------------------------------------------------------


class LARC(FusedOptimizer):
    """Another optimizer, with a learning rate for each parameter that its norm and its gradient's allow (arXiv:1708.03888).

    A gradient is multiplied, decay in it, by min(1, trust_coefficient × |p| / (|g| + weight_decay × |p| + eps) / lr). A tensor whose norm
    is 0, or its gradient's, has neither factor nor decay. Param groups, state and checkpoints are those of the optimizer inside, which
    steps by kernels where it can. Of sharded parameters (DTensors) the norms are those of the whole tensors.

    Args:
        optimizer: one of torch's classes or of ours; its weight decay is left to LARC.
        trust_coefficient: of the ratio of norms.
        clip: False leaves out the min and / lr: lr is multiplied by the ratio.
        eps: added to the norms.

    Raises:
        RefusedError: an optimizer that scales by norms of tensors itself.

    Example:
        >>> from easymp.optim import LARC
        >>> parameter = nn.Parameter(torch.ones(1))
        >>> optimizer = LARC(torch.optim.SGD([parameter], lr=1.0), trust_coefficient=0.02)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([0.9800])
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        # torch's own __init__ would build param groups and state a second time.
        self.optim = optimizer
        self.trust = trust_coefficient, clip, eps
        ours = isinstance(optimizer, FusedOptimizer)
        if isinstance(optimizer, LARC) or (ours and optimizer.rule.survey is not None):
            why = "scales by the norms of tensors already: LARC is for optimizers that do not"
            raise RefusedError(f"{type(optimizer).__name__} {why}")
        self.options = optimizer.options if ours else Options()
        for name in HOOKS:
            setattr(self, name, OrderedDict())
        self._patch_step_function()

    def _choose(self, wanted: bool) -> StepChoice:
        return StepChoice(
            "torch", "LARC's norms are torch's, and the optimizer inside steps as its engine says"
        )

    def round_from(self, seed: int) -> bool:
        return self.options.rounding is not None

    def advance(self, factor: Tensor | None, found_inf: Tensor | None, result: Tensor | None = None) -> None:
        self._meshes = meshes(self._parameters())
        parameters = [p for p in self._parameters() if p.grad is not None]
        if not parameters:
            return
        held: list[Any] = [p.grad for p in parameters]
        gradients = [g.to_dense() if g.is_sparse else g for g in held]
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        weights = whole_squares(parameters, parameters).sqrt()
        slopes = whole_squares(parameters, gradients).sqrt()
        if factor is not None:
            gradients = list(torch._foreach_mul(gradients, factor))
            slopes = slopes * factor.to(slopes.device)
        try:
            for p, g, weight, slope in zip(
                parameters, gradients, weights.float().unbind(), slopes.float().unbind()
            ):
                new = self._adapted(
                    local(p), local(g), weight.to(p.device), slope.to(p.device), groups[id(p)]
                )
                p.grad = torch.empty_like(g, dtype=p.dtype)
                local(p.grad).copy_(new)
            with swapped(self.param_groups, "weight_decay", 0.0):
                if isinstance(self.optim, FusedOptimizer):
                    self.optim.advance(None, found_inf)
                elif found_inf is None or not found_inf.item():
                    self.optim.step()
        finally:
            for parameter, gradient in zip(parameters, held):
                parameter.grad = gradient

    def _adapted(self, p: Tensor, g: Tensor, weight: Tensor, slope: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient for the optimizer inside, of a tensor with the norm `weight` and a gradient with the norm `slope`."""
        coefficient, clip, eps = self.trust
        decay = group.get("weight_decay", 0.0)
        factor = coefficient * weight / (slope + weight * decay + eps)
        if clip:
            factor = (factor / group["lr"]).clamp(max=1.0)
        moves = (weight > 0) & (slope > 0)
        pull = torch.where(moves, -decay if group.get("maximize") else decay, 0.0)
        return (wide(g) + pull * wide(p)) * torch.where(moves, factor, 1.0)

    # Attributes and state are those of the optimizer inside.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optim", "trust", "options", *HOOKS)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._patch_step_function()
