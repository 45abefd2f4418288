"""Base of our optimizers that torch does not have: operations on lists of tensors (foreach) where kernels do not run; and Lion.

Lion: "Symbolic Discovery of Optimization Algorithms", Chen et al., arXiv:2302.06675, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from ..base.dtensor import local
from ..cuda.rule import BETAS, Rule, direction
from ..errors import SettingError
from ..precision.scaler import widest
from .fused import FusedOptimizer, OptionWords
from .torch_step import wide


@dataclass(frozen=True, eq=False)
class Lists:
    """Parameters of one group, on one device, with their gradients and states: local parts, in fp32 or wider."""

    parameters: list[Tensor]  # as the group holds them
    p: list[Tensor]
    g: list[Tensor]  # negated where the group maximizes
    states: dict[str, list[Tensor]]
    counters: list[Tensor] | None  # of steps, with this one; None: neither rule nor rounding needs them
    steps: Any  # the same in one tensor [parameters], at least 1; float64 where the device has it
    go: Any  # 1, or 0 if nothing is to change


class ListOptimizer(FusedOptimizer):
    """Base of optimizers that torch does not have: without kernels, operations on lists of tensors (foreach), without a wait.

    A skipped step is a step by nothing: gradients become 0, and `go` (0 or 1, on the device) is a factor where that is not enough. Half
    precision is widened to fp32 for the step and rounded after it, as the kernels do it.

    Args:
        defaults: of the param groups. Numbers below 0, and betas of 1 or more, are refused.
        options: maximize; fused (False keeps to torch's operations); ema_decay, state_dtype and stochastic_rounding, see `Options`.

    Raises:
        SettingError: a wrong number; in `add_param_group`, a parameter that is not a real float.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        maximize: bool = False,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        for name in ("lr", "eps", "weight_decay", "max_grad_norm"):
            value = defaults.get(name)
            if value is not None and not value >= 0.0:
                raise SettingError(f"{name}={value} must be a number of at least 0")
        betas = defaults.get("betas", (0.0, 0.0))
        if len(betas) != 2 or not all(0.0 <= b < 1.0 for b in betas):
            raise SettingError(f"betas={betas} must be two numbers from 0 to below 1; (0.9, 0.999) is usual")
        self.options = self.options_of(options)
        super().__init__(params, {**defaults, "maximize": maximize, "fused": fused})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                del self.param_groups[-1]
                what = f"moves real floating-point parameters, not {parameter.dtype}"
                raise SettingError(f"{type(self).__name__} {what}: give it to another optimizer")

    def advance_by_torch(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        lists: list[tuple[dict[str, Any], Lists]] = []
        for group in self.param_groups:
            by_device: dict[torch.device, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_device.setdefault(parameter.device, []).append(parameter)
            lists += [(group, self._listed(group, of, factor, found_inf)) for of in by_device.values()]
        self.advance_lists(lists)
        order = {id(p): number for number, p in enumerate(self._parameters())}
        for group, of in lists:
            keys = self.rule.states_of(group)
            counters = of.counters or of.p
            for p, counter, *moved in zip(of.parameters, counters, of.p, *(of.states[k] for k in keys)):
                self._round_back(p, order[id(p)], keys, moved, counter)

    def _listed(
        self, group: dict[str, Any], parameters: list[Tensor], factor: Tensor | None, found_inf: Tensor | None
    ) -> Lists:
        device = parameters[0].device
        grads: list[Any] = [p.grad for p in parameters]
        grads = [wide(local(g.to_dense() if g.is_sparse else g)) for g in grads]
        if factor is not None:
            grads = torch._foreach_mul(grads, factor.to(device))
        go: Any = 1.0
        if found_inf is not None:
            bad = found_inf.to(device) > 0
            go = 1.0 - bad.float()
            grads = [g.masked_fill(bad, 0.0) for g in grads]
        if group["maximize"]:
            grads = torch._foreach_neg(grads)
        counters: Any = [self._complete(group, p) for p in parameters]
        steps = None
        if self.rule.counts or self.rounding is not None:
            torch._foreach_add_(counters, go)
            steps = torch.stack(counters).clamp(min=1.0).to(widest(device))
        keys = self.rule.states_of(group)
        states = {key: [wide(local(self.state[p][key])) for p in parameters] for key in keys}
        p = [wide(local(p)) for p in parameters]
        return Lists(parameters, p, grads, states, None if steps is None else counters, steps, go)

    def advance_lists(self, lists: Sequence[tuple[dict[str, Any], Lists]]) -> None:
        """Move them, in place, and the states that have one number a tensor."""
        raise NotImplementedError


# -- Lion -----------------------------------------------------------------------------------------------------------------

LION = Rule(
    name="lion",
    states=("exp_avg",),
    numbers={**BETAS, "decay": "weight_decay", "direction": direction},
    prepare="""
sign = direction; shrink = 1.0 - lr * decay; size = lr;
keep1 = beta1; rest1 = 1.0 - beta1; keep2 = beta2; rest2 = 1.0 - beta2;
""",
    constants=("sign", "shrink", "size", "keep1", "rest1", "keep2", "rest2"),
    element="""
const float d = g * sign;
const float towards = keep1 * exp_avg + rest1 * d;
p = p * shrink - (towards > 0.f ? size : towards < 0.f ? -size : 0.f * towards);
exp_avg = keep2 * exp_avg + rest2 * d;
""",
    counts=False,
)


class Lion(ListOptimizer):
    """p -= lr × (sign(β1 m + (1 - β1) g) + weight_decay × p), then m = β2 m + (1 - β2) g (Chen et al., arXiv:2302.06675).

    The paper's advice: a third to a tenth of AdamW's lr, and as much more weight decay. State: ``exp_avg``.

    Args:
        params: as in torch.
        lr: length of a step of each weight.
        betas: β1 and β2.
        weight_decay: factor of the decoupled decay.
        options: maximize, fused, ema_decay, state_dtype and stochastic_rounding, as in `Adam`.

    Raises:
        SettingError: a number is out of range, or a parameter is not a real float.

    Example:
        >>> from easymp.optim import Lion
        >>> parameter = nn.Parameter(torch.ones(1))
        >>> optimizer = Lion([parameter], lr=0.1)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([0.9000])
    """

    rule = LION

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[OptionWords],
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **options)

    def advance_lists(self, lists: Sequence[tuple[dict[str, Any], Lists]]) -> None:
        for group, of in lists:
            (beta1, beta2), size, m = group["betas"], group["lr"] * of.go, of.states["exp_avg"]
            towards = torch._foreach_mul(m, beta1)
            torch._foreach_add_(towards, of.g, alpha=1 - beta1)
            torch._foreach_sign_(towards)
            torch._foreach_mul_(towards, size)
            torch._foreach_mul_(of.p, 1 - size * group["weight_decay"])
            torch._foreach_sub_(of.p, towards)
            torch._foreach_mul_(m, 1 - (1 - beta2) * of.go)
            torch._foreach_add_(m, of.g, alpha=1 - beta2)
