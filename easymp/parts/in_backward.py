"""Steps in backward: each parameter is stepped as its gradient is done, and the gradient is freed.

So few gradients exist at once. What needs all gradients before a step is refused: accumulation, clips, a loss scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from ..base.parts import Part
from ..base.units import size
from ..errors import PrepareError, StepError
from ..optim import Muon, OwnOptimizer, PreparedOptimizer
from ..optim.torch_step import Snapshot, has_user_pre_hooks, parameters_of, step_without_hooks
from ..protocols import UNROUNDED, Conflict
from ..strategies.single import hook_gradient

NAME = "optimizer_in_backward"
EARLY = "each parameter is stepped as soon as its gradient is done, and"
LEAVE_OUT, IN_BF16 = "Leave one of them out", "Use bf16, or leave it out"
LOOKS = "looks at all gradients before the step"
OF_ALL = "its step needs the gradients of all parameters"
TOGETHER = "fp32 masters of low-precision parameters are stepped together"
CLIP_BY_TORCH = Conflict(
    NAME, "a clip by torch", "backward has stepped on the gradients and freed them", f"Leave the clip out, or {NAME}"
)
CHANGED = f"gradients were changed after backward, as torch's clips do: {CLIP_BY_TORCH}"


class FreedGradient(Tensor):
    """Zeros in place of a gradient that was freed. A write to its ``.data`` would leave no trace, and is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.data.__get__, Tensor.data.__set__):  # type: ignore[attr-defined]  # a descriptor
            raise StepError(CHANGED)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})  # results are plain tensors


class StepInBackward(Part):
    """Steps parameters in backward, of all prepared optimizers."""

    name = NAME
    steps_in_backward = True
    conflicts = (
        Conflict(
            NAME, "gradient_accumulation_steps", f"{EARLY} accumulation adds gradients up before the step", LEAVE_OUT
        ),
        Conflict(NAME, "clip_grad_norm_()", f"{EARLY} a clip needs all gradients before the step", LEAVE_OUT),
        Conflict(NAME, "clip_grad_value_()", f"{EARLY} a clip comes before the step", LEAVE_OUT),
        CLIP_BY_TORCH,
        Conflict(NAME, "LAMB", OF_ALL, LEAVE_OUT),
        Conflict(NAME, UNROUNDED, TOGETHER, "Use bf16, which keeps weights in fp32, or leave it out"),
        Conflict(NAME, "stochastic_rounding", f"{EARLY} the draws are for all parameters in their order", LEAVE_OUT),
        Conflict(NAME, "no_sync()", f"{EARLY} no_sync keeps gradients for a later step", LEAVE_OUT),
        Conflict(NAME, "step(closure)", "the backward in the closure steps already", LEAVE_OUT),
        Conflict(NAME, "guard", f"{EARLY} the guard judges all gradients before the step", LEAVE_OUT),
        *(
            Conflict(NAME, f"nonfinite={answer}", f"{EARLY} nonfinite={answer!r} {LOOKS}", LEAVE_OUT)
            for answer in ("skip", "raise")
        ),
        *(
            Conflict(NAME, precision, f"{EARLY} the loss scale {LOOKS}", IN_BF16)
            for precision in ("fp16", "fp16-true", "O1", "O2")
        ),
    )

    def __init__(self) -> None:
        self._stepped: dict[int, PreparedOptimizer] = {}  # id of a parameter that backward has stepped → its optimizer
        self._zeros: list[Snapshot] = []  # of one parameter an optimizer, until its step
        self._group_of: dict[int, tuple[PreparedOptimizer, int]] = {}  # id of a parameter → its optimizer and group
        self._hooks = ExitStack()

    def prepared(self, objects: Sequence[Any]) -> None:
        for optimizer in objects:
            if isinstance(optimizer, PreparedOptimizer):
                check_steps_alone(optimizer, self.run.world.size)
                models = [route.original for route in self.run.prepared.models]
                need = self.run.prepared.memory_need
                whole, largest = (need(models, optimizer_in_backward=early).gradients for early in (False, True))
                gradients = f"{size(largest)} of gradients at once instead of {size(whole)}"
                reason = f"{self.run.plan.optimizer.reason}; each parameter is stepped in backward: {gradients}"
                self.run.refine("optimizer", reason)
        for model in self.run.prepared.routes_of(objects):
            for parameter in model.original.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    self._hooks.callback(hook_gradient(parameter, self._gradient_done).remove)

    # -- in backward

    def _gradient_done(self, parameter: Tensor) -> None:
        optimizer = self.run.prepared.stepped_by.get(id(parameter))
        if optimizer is not None and parameter.grad is not None:
            for see in self.run.parts.gradients:
                see([(parameter, parameter.grad)])
            self._step(optimizer, [parameter])

    @torch.no_grad()
    def _step(self, prepared: PreparedOptimizer, parameters: Sequence[Tensor]) -> None:
        """Step `parameters` alone, and free their gradients. Hooks of steps are left to `step`, which counts."""
        optimizer = prepared.optimizer
        if any(id(p) in self._stepped for p in parameters):
            self._zeros.clear()
            raise StepError(
                f"a second gradient of a parameter before optimizer.step(), under {NAME}=True, which has stepped on "
                "the first: call accelerator.backward() once for each step(), and checkpoint with use_reentrant=False"
            )
        if any(p.grad is not None and p.grad.requires_grad for p in parameters):
            raise StepError(
                f"backward(create_graph=True) under {NAME}=True keeps a graph of gradients that are freed: leave one "
                "of them out"
            )
        groups = optimizer.param_groups
        if not all(id(p) in self._group_of for p in parameters):  # groups may have been added
            for number, group in enumerate(groups):
                self._group_of.update((id(p), (prepared, number)) for p in group["params"])
        by_group: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            by_group.setdefault(self._group_of[id(parameter)][1], []).append(parameter)
        parameters_before = {number: groups[number]["params"] for number in by_group}
        counters_before = None if prepared.updates else counters(optimizer)
        step = step_without_hooks(type(optimizer))
        try:
            for number, chosen in by_group.items():
                groups[number]["params"] = chosen
            optimizer.param_groups = [groups[number] for number in by_group]
            prepared.engine.averages.follow_step(parameters, lambda: step(optimizer))
        finally:
            optimizer.param_groups = groups
            for number, all_parameters in parameters_before.items():
                groups[number]["params"] = all_parameters
        for parameter in parameters:
            parameter.grad = None
            self._stepped[id(parameter)] = prepared
        if counters_before is None:
            return
        after = sorted(counters(optimizer).items())
        changed = [key[1] for key, value in after if value != counters_before.get(key)]
        if changed:
            raise StepError(
                f"{NAME}=True steps each parameter alone, and a step of this {type(prepared.given).__name__} has "
                f"changed {changed[0]!r}, which counts for all of them: leave {NAME} out, or use another optimizer"
            )

    def after_backward(self) -> None:
        """Give each optimizer's smallest parameter a gradient of zeros, by which `step` sees changes by the script."""
        for optimizer in self.run.prepared.optimizers:
            freed = [p for p in parameters_of(optimizer) if id(p) in self._stepped and p.grad is None]
            if freed:
                smallest = min(freed, key=Tensor.numel)
                zeros = torch.zeros_like(smallest)
                smallest.grad = zeros.as_subclass(FreedGradient) if type(zeros) is Tensor else zeros
                self._zeros.append(Snapshot(smallest))

    # -- the script's calls

    def loss(self, loss: Tensor, num_items: Any = None) -> None:
        if self._stepped:
            raise StepError(
                f"a second backward() before optimizer.step(), under {NAME}=True, where the first has stepped already: "
                "call step() after each backward(), or leave it out"
            )

    def step(self, optimizer: PreparedOptimizer) -> None:
        zeros, self._zeros = self._zeros, []
        unchanged = all(gradient.unchanged for gradient in zeros)
        for gradient in zeros:
            gradient.parameter.grad = None
        if not unchanged:
            raise StepError(CHANGED)
        self._stepped = {key: other for key, other in self._stepped.items() if other is not optimizer}

    def zero_grad(self, optimizer: PreparedOptimizer) -> None:
        if any(other is optimizer for other in self._stepped.values()):
            raise StepError(
                f"zero_grad() between backward() and step(), under {NAME}=True: backward has stepped already. Call "
                "optimizer.step() first, or freeze parameters (requires_grad_(False)) through which a loss passes"
            )

    def released(self) -> None:
        self._hooks.close()
        for table in (self._stepped, self._zeros, self._group_of):
            table.clear()


def check_steps_alone(prepared: PreparedOptimizer, ranks: int) -> None:
    """PrepareError if the optimizer needs the gradients of all parameters at once."""
    optimizer, reason = prepared.optimizer, ""
    if prepared.has_masters:
        reason = TOGETHER
    elif has_user_pre_hooks(optimizer):
        reason = "a hook looks at all gradients before the step"
    elif "step" in vars(optimizer) and not hasattr(vars(optimizer)["step"], "_wrapped_by_lr_sched"):
        reason = "a step was set on the optimizer"
    elif signature(optimizer.step).parameters["closure"].default is Parameter.empty:
        reason = "its step needs a closure"
    elif isinstance(optimizer, Muon) and ranks > 1:
        reason = "the ranks share its step, matrix by matrix"
    elif isinstance(optimizer, OwnOptimizer) and (optimizer.rule is None or optimizer.rule.norm):
        reason = OF_ALL
    if reason:
        raise PrepareError(
            f"{NAME}=True and this {type(prepared.given).__name__} do not go together: {EARLY} {reason}. Leave it out, "
            "or use another optimizer or precision"
        )


def counters(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], float]:
    """The numbers that an optimizer keeps beside the states of parameters, by param group (-1: on itself) and name."""
    tables: list[tuple[int, Mapping[str, Any]]] = [(-1, vars(optimizer)), *enumerate(optimizer.param_groups)]
    rows = ((number, name, value) for number, table in tables for name, value in table.items())
    return {(number, name): value for number, name, value in rows if type(value) in (int, float)}
