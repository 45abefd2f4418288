"""Rules by which kernels, or torch's operations, step optimizers of torch and easymp; and the step by the latter.

Adam: Kingma and Ba, arXiv:1412.6980; decoupled decay: Loshchilov and Hutter, arXiv:1711.05101; amsgrad: Reddi, Kale and
Kumar, arXiv:1904.09237. Adagrad: Duchi, Hazan and Singer, JMLR 12, 2011. Nesterov's momentum: Sutskever et al., "On the
importance of initialization and momentum in deep learning", 2013. Lion: Chen et al., arXiv:2302.06675, algorithm 2.
LAMB: You et al., arXiv:1904.00962. NovoGrad: Ginsburg et al., arXiv:1905.11286.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import cuda
from ..base.dtensor import local
from ..cuda.kernel import Rounding
from ..cuda.rule import BETAS, PARAMETER, Group, Rule, Survey, direction
from ..errors import OPTIMIZER_REMEDY, SettingError, StepError
from ..precision.scaler import widest
from .torch_step import (
    OwnOptimizer,
    counting_by_meshes,
    parameters_of,
    stacked,
    sums_of_squares,
    totals_of,
    values,
    wide,
)


def average_share(group: Group) -> float:
    """The share of a gradient in the first average, of optimizers that have the option `grad_averaging`."""
    return 1.0 - group["betas"][0] if group["grad_averaging"] else 1.0


_MOMENTS = """
d = direction * g + l2 * p
exp_avg = exp_avg + (d - exp_avg) * rest1
exp_avg_sq = beta2 * exp_avg_sq + rest2 * d * d
"""

ADAM = Rule(
    name="adam",
    states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    uses=lambda group: ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())),
    refuse=lambda group: "betas are tensors" if any(isinstance(b, Tensor) for b in group["betas"]) else None,
    numbers={
        **BETAS,
        "eps": "eps",
        "l2": lambda group: 0.0 if group.get("decoupled_weight_decay") else group["weight_decay"],
        "decoupled": lambda group: group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0,
        "direction": direction,
    },
    prepare="""
shrink = 1 - lr * decoupled
rest1 = 1 - beta1
rest2 = 1 - beta2
size = lr / (1 - pow(bias1, step))
root = 1 / sqrt(1 - pow(bias2, step))
""",
    element=f"{_MOMENTS}p = p * shrink - size * (exp_avg / (sqrt(exp_avg_sq) * root + eps))",
    variants={
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"): f"""{_MOMENTS}
max_exp_avg_sq = maximum(exp_avg_sq, max_exp_avg_sq)
p = p * shrink - size * (exp_avg / (sqrt(max_exp_avg_sq) * root + eps))
"""
    },
)

# torch's momentum starts as the first gradient. One that starts at zero, and adds the first gradient without dampening,
# is the same.
SGD = Rule(
    name="sgd",
    states=("momentum_buffer",),
    uses=lambda group: ("momentum_buffer",) if group["momentum"] else (),
    numbers={
        "momentum": "momentum",
        "dampening": "dampening",
        "nesterov": "nesterov",
        "decay": "weight_decay",
        "direction": direction,
    },
    prepare="""
share = where(step == 1, 1, 1 - dampening)
carried = where(nesterov > 0, momentum, 1)
""",
    element="""
d = direction * g + decay * p
momentum_buffer = momentum * momentum_buffer + share * d
p = p - lr * (nesterov * d + carried * momentum_buffer)
""",
    variants={(): "p = p - lr * (direction * g + decay * p)"},
    counts=False,
)

ADAGRAD = Rule(
    name="adagrad",
    states=("sum",),
    numbers={"lr_decay": "lr_decay", "eps": "eps", "decay": "weight_decay", "direction": direction},
    prepare="size = lr / (1 + (step - 1) * lr_decay)",
    element="""
d = direction * g + decay * p
sum = sum + d * d
p = p - size * (d / (sqrt(sum) + eps))
""",
    start=lambda group: float(group["initial_accumulator_value"]),
)

LION = Rule(
    name="lion",
    states=("exp_avg",),
    numbers={**BETAS, "decay": "weight_decay", "direction": direction},
    prepare="""
shrink = 1 - lr * decay
rest1 = 1 - beta1
rest2 = 1 - beta2
""",
    element="""
d = direction * g
p = p * shrink - lr * sign(beta1 * exp_avg + rest1 * d)
exp_avg = beta2 * exp_avg + rest2 * d
""",
    counts=False,
)

# As in Apex, gradients are clipped to a norm over all of them first. A tensor without weight decay has the ratio 1
# unless `use_nvlamb`, and so has one whose norm, or whose update's norm, is 0.
LAMB = Rule(
    name="lamb",
    states=("exp_avg", "exp_avg_sq"),
    numbers={
        **BETAS,
        "eps": "eps",
        "l2": lambda group: 0.0 if group["adam_w_mode"] else group["weight_decay"],
        "decoupled": lambda group: group["weight_decay"] if group["adam_w_mode"] else 0.0,
        "share": average_share,
        "max_norm": lambda group: group["max_grad_norm"] or math.inf,
        "trusted": lambda group: bool(group["use_nvlamb"] or group["weight_decay"]),
        "direction": direction,
    },
    prepare="""
clip = direction * where(norm > max_norm, max_norm / norm, 1)
rest2 = 1 - beta2
unbias = 1 / (1 - pow(bias1, step))
root = 1 / sqrt(1 - pow(bias2, step))
size = lr
""",
    survey=Survey(
        states="""
d = clip * g + l2 * p
exp_avg = beta1 * exp_avg + share * d
exp_avg_sq = beta2 * exp_avg_sq + rest2 * d * d
""",
        terms="update = exp_avg * unbias / (sqrt(exp_avg_sq) * root + eps) + decoupled * p\n",
        squares={"weights": "p", "updates": "update"},
        weigh="size = where(trusted * weights * updates > 0, lr * sqrt(weights / updates), lr)",
    ),
    element="p = p - size * update",
    norm=True,
)

# The second moment is one number a tensor. As in Apex, ``exp_avg_sq`` holds its root, here of each parameter, there of
# a param group; and with norm_type=inf the average of the norms themselves.
NOVOGRAD = Rule(
    name="novograd",
    states=("exp_avg",),
    numbers={
        **BETAS,
        "eps": "eps",
        "decay": "weight_decay",
        "share": average_share,
        "from_zero": "init_zero",
        "within": "reg_inside_moment",
        "power": lambda group: 2.0 if group["norm_type"] == 2 else 1.0,
        "direction": direction,
    },
    prepare="""
first = where(step == 1, 1 - from_zero, 0)
size = lr / (1 - pow(bias1, step))
root = 1 / sqrt(1 - pow(bias2, step))
l2 = within * decay
fade = (1 - within) * lr * decay
""",
    survey=Survey(
        squares={"norms": "g"},
        weigh="""
average = where(first > 0, norms, pow(exp_avg_sq, power))
exp_avg_sq = pow(beta2 * average + (1 - beta2) * norms, 1 / power)
scaled = 1 / (exp_avg_sq * root + eps)
before = direction * where(within > 0, scaled, 1)
after = size * where(within > 0, 1, scaled)
""",
        maximum=lambda group: group["norm_type"] != 2,
    ),
    element="""
d = before * g + l2 * p
exp_avg = beta1 * exp_avg + share * d
p = p - (after * exp_avg + fade * p)
""",
    scalar="exp_avg_sq",
)

RULES: dict[type, Rule] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: ADAGRAD,
}


# -- the step by torch's operations on lists of tensors (foreach), where no kernels run --------------------------------

AT_ONCE = 2**22  # elements that are stepped, and have fp32 copies, at a time


class Lists:
    """Tensors times one factor, with arithmetic by torch's foreach functions, element by element.

    The other operand is another list, a number, or a tensor with a number for each tensor or for all. Numbers are
    multiplied into the factor, and terms that are 0 left out, as in torch's steps.
    """

    def __init__(self, bare: Iterable[Tensor], factor: float = 1.0) -> None:
        self.bare, self.factor = list(bare), factor

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, multiplied by the factor."""
        return self.bare if self.factor == 1.0 else list(torch._foreach_mul(self.bare, self.factor))

    def _operand(self, operand: Tensor) -> list[Tensor]:
        return list(operand.float().expand(len(self.bare)).unbind())

    def __add__(self, operand: Any) -> Lists:
        if isinstance(operand, Lists):
            return Lists(torch._foreach_add(self.tensors, operand.bare, alpha=operand.factor))
        if isinstance(operand, Tensor):
            return Lists(torch._foreach_add(self.tensors, self._operand(operand)))
        return Lists(torch._foreach_add(self.tensors, operand)) if operand else self

    def __mul__(self, operand: Any) -> Any:
        if isinstance(operand, Lists):
            return Lists(torch._foreach_mul(self.bare, operand.bare), self.factor * operand.factor)
        if isinstance(operand, Tensor):
            return Lists(torch._foreach_mul(self.bare, self._operand(operand)), self.factor)
        return Lists(self.bare, self.factor * operand) if operand else 0.0

    def __truediv__(self, operand: Lists) -> Lists:
        return Lists(torch._foreach_div(self.bare, operand.bare), self.factor / operand.factor)

    def __sub__(self, operand: Any) -> Any:
        return self + operand * -1.0

    def __rsub__(self, operand: float) -> Any:
        return self * -1.0 + operand

    __radd__, __rmul__ = __add__, __mul__


def _sqrt(x: Any) -> Any:
    if isinstance(x, Lists):
        return Lists(torch._foreach_sqrt(x.tensors))
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


FUNCTIONS: dict[str, Callable[..., Any]] = {  # that the text of a rule calls
    "pow": pow,
    "sqrt": _sqrt,
    "where": lambda condition, x, y: (
        torch.where(condition, x, y) if isinstance(condition, Tensor) else x if condition else y
    ),
    "maximum": lambda x, y: Lists(torch._foreach_maximum(x.tensors, y.tensors)),
    "sign": lambda x: Lists(torch._foreach_sign(x.tensors)),
}


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, "<rule>", "exec")


class RuleStep:
    """Steps `optimizer` by `rule`, in fp32, without a wait for the device. Options are those of `cuda.FusedStep`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        state_dtype: torch.dtype | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        self._optimizer, self._rule, self._state_dtype, self._rounding = optimizer, rule, state_dtype, rounding
        self._counters: dict[Tensor, Tensor] = {}  # of steps, where the rule's states have none

    @torch.no_grad()
    def __call__(self, factor: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Move the parameters by gradients times `factor` (float32, 0-dim), unless `found_inf` is above 0."""
        norm = self._gradient_norm(factor) if self._rule.norm else None
        numbers = {id(p): number for number, p in enumerate(parameters_of(self._optimizer))}
        for group in self._optimizer.param_groups:
            for batch in _batches(group["params"]):
                self._move(group, batch, [numbers[id(p)] for p in batch], factor, found_inf, norm)

    def _move(
        self,
        group: dict[str, Any],
        batch: list[Tensor],
        numbers: list[int],
        factor: Tensor | None,
        found_inf: Tensor | None,
        norm: Tensor | None,
    ) -> None:
        rule, device, states = self._rule, batch[0].device, [self._optimizer.state[p] for p in batch]
        skip = None if found_inf is None else found_inf.to(device) > 0
        counting = self._counters if self._rounding is not None or "step" in rule.prepare else None
        for parameter, state in zip(batch, states):
            cuda.complete(rule, group, parameter, state, counting, self._state_dtype)
        targets = {PARAMETER: [local(p) for p in batch]}
        targets |= {key: [local(state[key]) for state in states] for key in rule.states_of(group)}
        old = {name: [wide(tensor) for tensor in tensors] for name, tensors in targets.items()}
        names: dict[str, Any] = {**rule.numbers_of(group), **{name: Lists(tensors) for name, tensors in old.items()}}
        grads: list[Any] = [p.grad for p in batch]
        g = Lists([wide(local(grad.to_dense() if grad.is_sparse else grad)) for grad in grads])
        names |= {"lr": group["lr"], "g": g if factor is None else g * factor.to(device)}
        if norm is not None:
            names["norm"] = norm.to(device)
        if isinstance(group["lr"], Tensor):
            names["lr"] = group["lr"].to(device)
        counters: list[Any] = [None] * len(batch)
        if rule.counts or counting is not None:
            counters = [state["step"] if rule.counts else self._counters[p] for p, state in zip(batch, states)]
            if skip is None:
                torch._foreach_add_(counters, 1.0)
            else:  # without `alpha` torch would read the tensor as a number, and wait for the device
                torch._foreach_add_(counters, (~skip).float(), alpha=1)
            names["step"] = torch.stack(counters).to(widest(device))
        if rule.scalar:
            names[rule.scalar] = torch.stack([state[rule.scalar] for state in states]).to(widest(device))

        def run(text: str) -> None:
            exec(_compiled(text), FUNCTIONS, names)

        run(rule.prepare)
        if rule.survey is not None:
            run(rule.survey.states + rule.survey.terms)
            for name, squared in rule.survey.squares.items():
                measure = largest_of if rule.survey.maximum(group) else sums_of_squares
                names[name] = measure(batch, names[squared].tensors)
            run(rule.survey.weigh)
        run(rule.variants.get(rule.states_of(group), rule.element))

        if rule.scalar:
            targets[rule.scalar] = [state[rule.scalar] for state in states]
            old[rule.scalar], names[rule.scalar] = targets[rule.scalar], Lists(names[rule.scalar].float().unbind())
        if self._rounding is not None:
            offsets = [self._rounding.offset_of(p) for p in batch]
            keys = [cuda.key_of(self._rounding.seed, c, number, device) for c, number in zip(counters, numbers)]
        for role, (name, tensors) in enumerate(targets.items()):
            results = names[name].tensors
            if skip is not None:
                results = [torch.where(skip, before, result) for before, result in zip(old[name], results)]
            for i, tensor in enumerate(tensors if self._rounding is not None else ()):
                if tensor.dtype == torch.bfloat16:
                    results[i] = cuda.stochastic(results[i], keys[i], role, offsets[i])
            torch._foreach_copy_(tensors, results)

    def _gradient_norm(self, factor: Tensor | None) -> Tensor:
        """The 2-norm of all gradients, as the rule sees them. Over the ranks, a collective."""
        parameters = parameters_of(self._optimizer)
        counting = getattr(self._optimizer, "counting", None) or counting_by_meshes(parameters)
        devices = (p.device for p in parameters if not p.is_meta)  # of a pipeline's other stages they are meta
        device = next(devices, torch.device("cpu"))
        moved = [p for p in parameters if p.grad is not None]
        gradients = [values(local(p.grad)) for p in moved if p.grad is not None]
        totals = totals_of(gradients, [counting.copies(p) for p in moved], device).to(device)
        if counting.add is not None:
            counting.add(totals)  # the kernels' measure adds up two numbers, too
        norm = totals[0].sqrt()
        return norm if factor is None else norm * factor.to(device)


def _batches(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters with gradients, by device, about `AT_ONCE` elements at a time."""
    batch: list[Tensor] = []
    elements = 0
    for parameter in (p for p in parameters if p.grad is not None):
        elements += parameter.numel()
        if batch and (parameter.device != batch[0].device or elements > AT_ONCE):
            yield batch
            batch, elements = [], parameter.numel()
        batch.append(parameter)
    if batch:
        yield batch


def largest_of(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each tensor, [tensors]; StepError where any is sharded."""
    if any(local(parameter) is not parameter for parameter in parameters):
        raise StepError(
            "the largest magnitude of a sharded gradient is not computed: use norm_type=2, or strategy='ddp'"
        )
    return stacked([x.abs().amax() if x.numel() else x.new_zeros(()) for x in tensors]).to(widest(tensors[0].device))


# -- optimizers that are a rule ----------------------------------------------------------------------------------------


class RuleOptimizer(OwnOptimizer):
    """Base of optimizers that are a rule, which kernels or torch's operations run."""

    rule: ClassVar[Rule]

    def __init__(self, params: Any, defaults: dict[str, Any], removed: Mapping[str, Any]) -> None:
        for name in removed:
            if name in ("ema_decay", "state_dtype", "stochastic_rounding"):
                raise SettingError(f"{type(self).__name__}({name}=…) was removed. Instead: {OPTIMIZER_REMEDY}")
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
        for name in ("lr", "eps", "weight_decay", "max_grad_norm"):
            value = defaults.get(name)
            if value is not None and not value >= 0.0:
                raise SettingError(f"{name}={value} must be a number of at least 0")
        betas = defaults.get("betas")
        if betas is not None and (len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas)):
            raise SettingError(f"betas={betas} must be two numbers from 0 to below 1; (0.9, 0.999) is usual")
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                del self.param_groups[-1]
                raise SettingError(
                    f"{type(self).__name__} moves real floating-point parameters, not {parameter.dtype}: "
                    "give it to another optimizer"
                )

    def advance(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        RuleStep(self, self.rule)(factor, found_inf)


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | None:
    """The rule that does what the step of `optimizer` does; None where there is none."""
    kind = type(optimizer)
    if issubclass(kind, RuleOptimizer) and kind.advance is RuleOptimizer.advance:
        return kind.rule
    return RULES.get(kind)
