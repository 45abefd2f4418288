"""The step by our own kernels: norm, unscale, clip, update, average and low-precision copy in two readings of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cuda.elementwise import TYPES
from ..cuda.kernel import Launcher
from ..cuda.rule import Rule, Scale
from ..cuda.step import FusedStep
from ..errors import KernelError
from ..precision.scaler import takes_found_inf
from ..protocols import Counting
from .averages import Averages
from .masters import Masters
from .sharded import ShardedOptimizer
from .torch_engine import Measured, OverRanks, TorchEngine, multiply
from .torch_step import watched


class CupyEngine:
    """Steps dense floats on one GPU by `FusedStep`, and what else there is by torch's step of the same class.

    Where there is neither a factor nor an overflow to look at, nor an average or a low-precision copy, torch's fused step moves
    no byte more, and runs. A kernel that fails gives way to torch for good, before anything has changed.

    Args:
        other: torch's engine of the same optimizer.
        masters: what the optimizer holds in place of low-precision parameters, whose gradients and values the kernels read and write.
        failed: hears why the kernels gave way.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        launcher: Launcher,
        other: TorchEngine,
        masters: Masters | None = None,
        ema_decay: float | None = None,
        failed: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.optimizer, self.counting = optimizer, other.counting
        self._launcher, self._rule, self._other, self._failed = launcher, rule, other, failed
        self._lost = ""
        self._times = 1  # ranks over which `counting` adds up parts of what torch would measure whole
        inner, gradient = optimizer, self._gradient
        if isinstance(optimizer, ShardedOptimizer):
            world, self._times = optimizer.world, optimizer.world.size
            inner, gradient, masters = optimizer.twin, optimizer.gradient, None
            self.counting = Counting(
                lambda p: 1 if p.ndim else world.size, lambda totals: totals.copy_(world.reduce(totals))
            )
        self._inner, self._masters = inner, masters
        self._low = {} if masters is None else masters.low
        self.averages = other.averages
        self._averages = Averages(
            lambda parameter: (parameter, inner.state), ema_decay
        )  # of what the kernels do not take
        self._step = FusedStep(
            inner,
            rule,
            launcher,
            gradient=gradient,
            copy=self._low,
            ema_decay=ema_decay,
            copies=self.counting.copies,
        )

    @property
    def name(self) -> str:
        return self._other.name if self._lost else "CuPy"

    @property
    def reason(self) -> str:
        return self._lost or f"norm, unscale, clip and {type(self._inner).__name__} in one pass"

    @property
    def reads_low(self) -> bool:
        return self._masters is not None and not self._lost

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None and id(parameter) in self._low:
            return self._low[id(parameter)].grad
        return gradient

    def worth(self) -> bool:
        return not self._lost or self._other.worth()

    def takes_factor(self) -> bool:
        if self._lost:
            return self._other.takes_factor()
        step = vars(self.optimizer).get("step")
        if watched(self.optimizer) or (step is not None and not hasattr(step, "_wrapped_by_lr_sched")):
            return False
        if any(self._rule.refuse(group) for group in self.optimizer.param_groups):
            return False
        low = self._low.values()
        fp16 = (
            {id(p) for p in low} if low else ()
        )  # gradients in fp16 without a master are refused under a loss scale
        device = self._launcher.device
        return all(
            g.layout is torch.strided
            and g.device == device
            and g.dtype in TYPES
            and (g.dtype != torch.float16 or id(p) in fp16)
            for p, g in self.gradients()
        )

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        self._settle()
        found = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                holder = parameter
                if holder.grad is None:
                    holder = self._low.get(id(parameter), parameter)
                if holder.grad is not None:
                    found.append((holder, holder.grad))
        return found

    def _settle(self) -> None:
        """No parameter has a gradient beside its master's."""
        if self.reads_low and any(master.grad is not None for _, master in self._masters.pairs()):  # type: ignore[union-attr]
            self._masters.gather()  # type: ignore[union-attr]

    def measure(
        self, max_norm: float = float("inf"), scale: Tensor | None = None, over_ranks: OverRanks | None = None
    ) -> Measured:
        if not self._lost:
            try:
                return Measured(*self._step.measure(max_norm, self._here(scale), over_ranks).unbind()[:3])
            except KernelError as error:
                add, times = over_ranks, self._times
                self.give_way(str(error))
                if add is not None and times > 1:  # it adds up parts, and torch measures whole gradients
                    return self._other.measure(max_norm, scale, lambda totals: add(totals.div_(times)))
        return self._other.measure(max_norm, scale, over_ranks)

    def step(
        self, factor: Tensor | None = None, found_inf: Tensor | None = None, scale: Scale | None = None
    ) -> Any:
        nothing = (
            factor is None and found_inf is None and self._averages.decay is None and self._masters is None
        )
        if not self._lost and not (nothing and takes_found_inf(self.optimizer)):
            self._settle()
            try:
                return self._hooked(lambda: self._move(self._here(factor), self._here(found_inf), scale))
            except KernelError as error:
                self.give_way(str(error))
        return self._other.step(factor, found_inf, scale)

    def give_way(self, reason: str) -> None:
        """torch steps from here on."""
        self._lost, self.counting = reason, self._other.counting
        if self._masters is not None:
            self._masters.gather()
        self._failed(reason)

    def _here(self, number: Tensor | None) -> Tensor | None:
        """On the kernels' device: a loss, and so its scale, may be elsewhere."""
        return None if number is None else number.to(self._launcher.device, non_blocking=True)

    def _hooked(self, step: Callable[[], None]) -> None:
        """`step` with all that torch does around an optimizer's own."""
        there: Any = self.optimizer
        if isinstance(there, ShardedOptimizer):
            torch.optim.Optimizer.profile_hook_step(lambda optimizer: optimizer.step_by(step))(there)
            return
        torch.optim.Optimizer.profile_hook_step(lambda optimizer: step())(there)
        if hasattr(vars(there).get("step"), "_wrapped_by_lr_sched"):
            there._opt_called = True  # torch's schedulers look there for the order of calls

    def _move(self, factor: Tensor | None, found_inf: Tensor | None, scale: Scale | None) -> None:
        self._step.step(factor, found_inf, scale=scale)
        if self._step.rest and (found_inf is None or not found_inf.item()):
            self._averages.around(self._step.rest, lambda: self._move_rest(factor))

    @torch.no_grad()
    def _move_rest(self, factor: Tensor | None) -> None:
        """torch's step on what the kernels do not take; it sees no other gradients."""
        rest = {id(p): p for p in self._step.rest}
        for key, parameter in rest.items():
            if parameter.grad is None and key in self._low:
                parameter.grad = self._low[key].grad.to(parameter.dtype)  # type: ignore[union-attr]
        hidden = [
            (p, p.grad) for group in self._inner.param_groups for p in group["params"] if id(p) not in rest
        ]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            if factor is not None:
                multiply([p.grad for p in rest.values() if p.grad is not None], factor)
            step: Any = type(self._inner).step
            getattr(step, "__wrapped__", step)(self._inner)  # its hooks have been called
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient
        for key, parameter in rest.items():
            if key in self._low:
                self._low[key].data.copy_(parameter)
