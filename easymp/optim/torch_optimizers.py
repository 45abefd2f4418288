"""Adam, AdamW, SGD and Adagrad as torch has them: torch's classes, options, states and checkpoints.

"Adam: A Method for Stochastic Optimization", Kingma and Ba, arXiv:1412.6980; decoupled decay: Loshchilov and Hutter, arXiv:1711.05101;
amsgrad: Reddi, Kale and Kumar, arXiv:1904.09237. "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", Duchi,
Hazan and Singer, JMLR 12, 2011. Nesterov's momentum: Sutskever et al., "On the importance of initialization and momentum in deep
learning", 2013.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from ..base.dtensor import local
from ..cuda.rule import BETAS, Group, Rule, direction
from .fused import FusedOptimizer, OptionWords, StepChoice
from .torch_step import fill_momentum, fuse, multiply, step_without_hooks, wide

# -- rules ----------------------------------------------------------------------------------------------------------------


def _adam(p: Tensor, g: Tensor, states: dict[str, Any], group: Group, step: int) -> None:
    beta1, beta2 = group["betas"]
    d = direction(group) * g
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


def _adam_element(states: tuple[str, ...]) -> str:
    second, most = "exp_avg_sq", ""
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


# A group without `bias_correction` (Apex's option, which torch does not have) leaves the averages as they start, at 0.
ADAM = Rule(
    name="adam",
    states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    uses=lambda group: ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())),
    refuse=lambda group: "betas are tensors" if any(isinstance(b, Tensor) for b in group["betas"]) else None,
    numbers={
        **BETAS,
        "epsilon": "eps",
        "decay": lambda group: 0.0 if group.get("decoupled_weight_decay") else group["weight_decay"],
        "decoupled": lambda group: group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0,
        "direction": direction,
        "correct": lambda group: group.get("bias_correction", True),
    },
    prepare="""
sign = direction; l2 = decay; shrink = 1.0 - lr * decoupled; eps = epsilon;
keep2 = beta2; rest2 = 1.0 - beta2; rest1 = 1.0 - beta1;
size = lr / (correct != 0.0 ? 1.0 - pow(beta1, step) : 1.0);
root = correct != 0.0 ? 1.0 / sqrt(1.0 - pow(beta2, step)) : 1.0;
""",
    constants=("sign", "l2", "shrink", "eps", "rest1", "keep2", "rest2", "size", "root"),
    element=_adam_element,
    reference=_adam,
)


def _sgd(p: Tensor, g: Tensor, states: dict[str, Any], group: Group, step: int) -> None:
    d = direction(group) * g + group["weight_decay"] * p
    if group["momentum"]:
        buffer = states["momentum_buffer"]
        buffer.mul_(group["momentum"]).add_(d, alpha=1.0 if step == 1 else 1 - group["dampening"])
        d = d + group["momentum"] * buffer if group["nesterov"] else buffer
    p.sub_(group["lr"] * d)


_MOMENTUM = """
const float d = g * sign + l2 * p;
momentum_buffer = keep * momentum_buffer + take * d;
p -= size * (ahead != 0.f ? d + keep * momentum_buffer : momentum_buffer);
"""

# torch's momentum starts as the first gradient. One that starts at zero, and takes the first gradient without dampening, is the same.
SGD_RULE = Rule(
    name="sgd",
    states=("momentum_buffer",),
    uses=lambda group: ("momentum_buffer",) if group["momentum"] else (),
    numbers={
        **{name: name for name in ("momentum", "dampening", "nesterov")},
        "decay": "weight_decay",
        "direction": direction,
    },
    prepare="""
sign = direction; l2 = decay; size = lr; keep = momentum; ahead = nesterov;
take = step == 1.0 ? 1.0 : 1.0 - dampening;
""",
    constants=("sign", "l2", "size", "keep", "take", "ahead"),
    element=lambda states: _MOMENTUM if states else "p -= size * (g * sign + l2 * p);",
    reference=_sgd,
    counts=False,
)


def _adagrad(p: Tensor, g: Tensor, states: dict[str, Any], group: Group, step: int) -> None:
    d = direction(group) * g + group["weight_decay"] * p
    states["sum"].addcmul_(d, d)
    p.sub_(group["lr"] / (1 + (step - 1) * group["lr_decay"]) * d / (states["sum"].sqrt() + group["eps"]))


ADAGRAD = Rule(
    name="adagrad",
    states=("sum",),
    numbers={"lr_decay": "lr_decay", "epsilon": "eps", "decay": "weight_decay", "direction": direction},
    prepare="sign = direction; l2 = decay; eps = epsilon; size = lr / (1.0 + (step - 1.0) * lr_decay);",
    constants=("sign", "l2", "eps", "size"),
    element="""
const float d = g * sign + l2 * p;
sum += d * d;
p -= size * (d / (sqrtf(sum) + eps));
""",
    reference=_adagrad,
    starts=lambda group: float(group["initial_accumulator_value"]),
)


# -- optimizers -----------------------------------------------------------------------------------------------------------


class TorchOptimizer(FusedOptimizer):
    """Base of optimizers that torch has, too."""

    torchs: ClassVar[type[torch.optim.Optimizer]]  # steps where kernels do not run, fused if it can
    _fused_here: bool = False  # whether the fused step was our choice

    def __init__(
        self, params: Any, *numbers: Any, maximize: bool = False, fused: bool | None = None, **options: Any
    ) -> None:
        self.options = self.options_of(options)
        super().__init__(params, *numbers, maximize=maximize, fused=fused)

    @property
    def _widens(self) -> bool:
        return self.options.state_dtype is not None or self.options.rounding is not None

    def _by_torch(self, reason: str) -> StepChoice:
        if self._widens:
            why_not = "torch has no step for states of their own dtype, nor for stochastic rounding"
            return StepChoice("torch", f"{reason}; {why_not}")
        for group in self.param_groups if self._fused_here else ():
            group["fused"] = None  # by us, when the parameters lay elsewhere
        self._fused_here = False
        if all(group.get("fused") is None for group in self.param_groups):
            why_not = fuse(self, kind=self.torchs)
            self._fused_here = why_not is None
            if why_not is not None:
                return StepChoice("torch", f"{reason}; {why_not}")
        fused = all(group.get("fused") for group in self.param_groups)
        return StepChoice("torch fused" if fused else "torch", reason)

    def advance_by_torch(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        if self._widens:
            return self.step_by_reference(factor, found_inf)
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        fused = all(group.get("fused") for group in self.param_groups)
        if fused and not any(g.is_sparse for g in gradients):
            fill_momentum(self, self.torchs)
            self._step_told(None if factor is None else factor.reciprocal(), found_inf)
        elif found_inf is None or not found_inf.item():
            if factor is not None:
                multiply(gradients, factor)
            with swapped(self.param_groups, "fused", False):  # the plain step takes sparse gradients
                self._step_told(None, None)

    def _step_told(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """torch's step, which reads these where it is fused."""
        given = {name: vars(self)[name] for name in ("grad_scale", "found_inf") if name in vars(self)}
        vars(self).update(grad_scale=grad_scale, found_inf=found_inf)
        try:
            step_without_hooks(self.torchs)(self)
        finally:
            del self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            vars(self).update(given)

    def step_by_reference(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        """The rule's reference on each tensor in fp32, slow, with states and rounding as the kernels have them; waits for the flag."""
        if found_inf is not None and found_inf.item():
            return
        every = [(group, p) for group in self.param_groups for p in group["params"]]
        for number, (group, parameter) in enumerate(every):
            if parameter.grad is None:
                continue
            counter, state = self._complete(group, parameter), self.state[parameter]
            counter += 1
            keys = self.rule.states_of(group)
            moved = [wide(local(t)) for t in (parameter, *(state[key] for key in keys))]
            gradient = wide(local(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad))
            if factor is not None:
                gradient = gradient * factor.to(gradient.device)
            assert self.rule.reference is not None
            self.rule.reference(moved[0], gradient, dict(zip(keys, moved[1:])), group, int(counter.item()))
            self._round_back(parameter, number, keys, moved, counter)


@contextmanager
def swapped(groups: Sequence[dict[str, Any]], option: str, value: Any) -> Iterator[None]:
    """Inside, `option` of param groups that have it is `value`."""
    held = [(group, group[option]) for group in groups if option in group]
    for group, _ in held:
        group[option] = value
    try:
        yield
    finally:
        for group, before in held:
            group[option] = before


class Adam(TorchOptimizer, torch.optim.Adam):
    """torch.optim.Adam, without foreach, capturable and differentiable.

    Kingma and Ba, arXiv:1412.6980. Arguments that are not listed here are torch's.

    Args:
        options: maximize and fused as in torch, and three of ours: ``ema_decay`` keeps an average of the weights in fp32,
            ema += (p - ema) × (1 - ema_decay) after each step. ``state_dtype`` of the states; torch.bfloat16 halves their memory and needs
            ``stochastic_rounding`` (True, or a seed), which rounds bf16 parameters and states up with the probability of the part that is
            cut off.

    Raises:
        SettingError: one of our options is out of range.

    Example:
        >>> from easymp.optim import Adam
        >>> parameter = nn.Parameter(torch.ones(2))
        >>> optimizer = Adam([parameter], lr=0.1)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([0.9000, 0.9000])
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
        **options: Unpack[OptionWords],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class AdamW(TorchOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW, without foreach, capturable and differentiable.

    Loshchilov and Hutter, arXiv:1711.05101. Arguments that are not listed here are torch's.

    Args:
        options: maximize, fused, ema_decay, state_dtype and stochastic_rounding, as in `Adam`, with its errors.

    Example:
        >>> from easymp.optim import AdamW
        >>> model = nn.Linear(2, 1, dtype=torch.bfloat16)
        >>> optimizer = AdamW(model.parameters(), lr=1e-3, state_dtype=torch.bfloat16, stochastic_rounding=True)
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
        **options: Unpack[OptionWords],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class SGD(TorchOptimizer, torch.optim.SGD):
    """torch.optim.SGD, without foreach, capturable and differentiable.

    Nesterov's momentum: Sutskever et al., 2013. Arguments that are not listed here are torch's.

    Args:
        options: maximize, fused, ema_decay, state_dtype and stochastic_rounding, as in `Adam`, with its errors.

    Example:
        >>> from easymp.optim import SGD
        >>> optimizer = SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9, ema_decay=0.999)
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
        **options: Unpack[OptionWords],
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)


class Adagrad(TorchOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad, without foreach, capturable and differentiable.

    Duchi, Hazan and Singer, JMLR 12, 2011. Arguments that are not listed here are torch's.

    Args:
        options: maximize, fused, ema_decay, state_dtype and stochastic_rounding, as in `Adam`, with its errors.

    Example:
        >>> from easymp.optim import Adagrad
        >>> optimizer = Adagrad(nn.Linear(2, 1).parameters(), lr=0.01)
    """

    rule = ADAGRAD
    torchs = torch.optim.Adagrad

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Unpack[OptionWords],
    ) -> None:
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, **options)
