"""The engine of a prepared optimizer: it measures gradients and runs the step, by our kernels or by torch.

Clipping and the loss scale are one factor on all gradients: (1 / scale) × min(1, max_norm / (norm + 1e-6)). An engine measures it in
one reading of the gradients, without a wait for the device, and multiplies by it as the step reads them, so that gradients are neither
divided nor clipped in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import cuda
from ..base.dtensor import local
from ..base.lazy import modules_at_first_use
from ..errors import KernelError
from ..precision.scaler import inverse, step_told, takes_found_inf, to_device
from ..protocols import Counting
from .fused import FusedOptimizer
from .masters import Averages, Masters
from .sharded import ShardedOptimizer, holder_of
from .torch_step import launcher_of, multiply, parameters_of, stacked, totals_of, watched, wide_norms

if TYPE_CHECKING:
    from ..cuda.rule import Rule, Scale
    from ..cuda.step import FusedStep
    from . import torch_optimizers

modules_at_first_use(globals(), "torch_optimizers")  # their rules are for kernels

DTYPES = (torch.float32, torch.bfloat16)  # of gradients for which a float32 factor is exact enough

# Elements from which, on a CPU, a pass over the gradients takes longer than the factor costs the fused step, which then writes them.
WORTH = 2**21
SCALED = 32  # under a loss scale another pass is saved, so WORTH is divided by this; benchmarks/fused_step.py shows both

OverRanks = Callable[[Tensor], None]


class Measured(NamedTuple):
    """Norm and factor of all gradients, 0-dim, float32, on their device."""

    norm: Tensor  # of the gradients divided by the loss scale
    factor: Tensor  # (1 / scale) × min(1, max_norm / (norm + 1e-6)), by which the step multiplies them
    found_inf: Tensor | None  # above 0 where one is not finite; None without a scale


class Engine:
    """Runs the step of one prepared optimizer: by our kernels where they run and gain, else by torch's step.

    Without a factor, a look for overflows, an average or a low-precision copy, torch's fused step moves no byte more than our kernels,
    and runs. Kernels that fail, or meet a gradient that they do not take, give way to torch for good, before anything has changed.
    easymp's own optimizers choose kernels inside their `step`.

    Args:
        free: False leaves gradients to be changed in memory, always.
        masters: of low-precision parameters, in the optimizer's groups; kernels read and write the parameters themselves.
        failed: called with the reason when the kernels give way.
        scaled: whether there is a loss scale.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        counting: Counting | None = None,
        free: bool = True,
        ema_decay: float | None = None,
        masters: Masters | None = None,
        failed: Callable[[str], None] = lambda reason: None,
        scaled: bool = False,
    ) -> None:
        sharded = isinstance(optimizer, ShardedOptimizer)
        inner: Any = optimizer.twin if sharded else optimizer
        self.optimizer, self.reason = optimizer, ""  # why it is this engine, in words
        self.counting = self._whole = counting or Counting()
        self.averages = Averages(lambda parameter: holder_of(optimizer, parameter), ema_decay)
        self._own = inner if isinstance(inner, FusedOptimizer) else None
        self._free, self._scaled, self._failed = free, scaled, failed
        self._masters = None if sharded else masters
        self._low = {} if self._masters is None else self._masters.low
        self._groups, self._enough = -1, False
        self.kernels: FusedStep | None = None
        launcher = launcher_of(inner, lambda: _rule_for(inner)) if free and self._own is None else ""
        if isinstance(launcher, str):
            self.reason = launcher
            return
        self._device, self._rule, gradient = launcher.device, cast("Rule", _rule_for(inner)), self._gradient
        self.reason = f"norm, unscale, clip and {type(inner).__name__} in one pass"
        if sharded:
            world, gradient = optimizer.world, optimizer.gradient
            copies: Any = lambda p: 1 if p.ndim else world.size  # noqa: E731
            self.counting = Counting(copies, lambda totals: totals.copy_(world.reduce(totals)))
        more: Any = {"gradient": gradient, "copy": self._low, "copies": self.counting.copies}
        self.kernels = cuda.FusedStep(inner, self._rule, launcher, ema_decay=ema_decay, **more)

    @property
    def name(self) -> str:
        """Name of the engine: "CuPy", "torch fused" or "torch"."""
        return "CuPy" if self.kernels else "torch fused" if takes_found_inf(self.optimizer) else "torch"

    @property
    def reads_low(self) -> bool:
        """Whether the step itself reads gradients of low-precision parameters and writes these, past the masters."""
        return self.kernels is not None and self._masters is not None

    def give_way(self, reason: str) -> None:
        """Leave the steps from here on to torch."""
        self.kernels, self.reason, self.counting = None, reason, self._whole
        if self._masters is not None:
            self._masters.gather()
        self._failed(reason)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for parameter in parameters_of(self.optimizer):
            if parameter.grad is not None:
                yield parameter, parameter.grad
            elif self.kernels is not None:
                low = self._low.get(id(parameter))
                if low is not None and low.grad is not None:
                    yield low, low.grad

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters that a step would move now, each with its gradient."""
        self._settle()
        return list(self._pairs())

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        if parameter.grad is None and id(parameter) in self._low:
            return self._low[id(parameter)].grad
        return parameter.grad

    def _settle(self) -> None:
        """Gather gradients to the masters where some have arrived there: no parameter has one beside its master's."""
        if self.reads_low and any(master.grad is not None for _, master in self._masters.pairs()):  # type: ignore[union-attr]
            self._masters.gather()  # type: ignore[union-attr]

    def worth(self) -> bool:
        """Whether leaving a factor to the step can take less time than a pass over the gradients; the same on all ranks."""
        if self.kernels is not None:
            return True
        groups = self.optimizer.param_groups
        if len(groups) != self._groups:
            held = parameters_of(self.optimizer)  # those of other stages too
            self._groups = len(groups)
            least = WORTH / SCALED if self._scaled else WORTH
            self._enough = any(p.is_cuda for p in held) or sum(p.numel() for p in held) >= least
        return self._enough

    def takes_factor(self) -> bool:
        """Whether `step` multiplies by a factor as it reads, for the gradients of this moment; the same on all ranks."""
        if not self._free or not self.worth() or watched(self.optimizer):
            return False
        if self.kernels is None:
            return takes_found_inf(self.optimizer) and all(
                g.dtype in DTYPES
                and p.dtype == g.dtype
                and g.layout is torch.strided
                and (g.is_cpu or g.is_cuda)  # where torch's fused steps are known to read `grad_scale`
                for p, g in self._pairs()
            )
        step = vars(self.optimizer).get("step")
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            return False
        if any(self._rule.refuse(group) for group in self.optimizer.param_groups):
            return False
        fp16 = {id(p) for p in self._low.values()}  # other gradients in fp16 are refused under a loss scale
        return all(
            g.layout is torch.strided
            and g.device == self._device
            and g.dtype in cuda.TYPES
            and (g.dtype != torch.float16 or id(p) in fp16)
            for p, g in self.gradients()
        )

    def measure(
        self, max_norm: float = float("inf"), scale: Tensor | None = None, over_ranks: OverRanks | None = None
    ) -> Measured:
        """Norm and factor, of gradients that are only read; nothing waits for the device.

        Args:
            scale: float32, 0-dim: the loss scale.
            over_ranks: adds up a float64 tensor [2] over the ranks, in place: Σ (g / scale)², and the number of gradients that are not
                finite.
        """
        if self.kernels is not None:
            try:
                return Measured(*self.kernels.measure(max_norm, self._here(scale), over_ranks).unbind()[:3])
            except KernelError as error:
                self.give_way(str(error))
                add, sharded = over_ranks, self.optimizer
                if add is not None and isinstance(sharded, ShardedOptimizer):
                    # It adds up parts, and torch measures whole gradients.
                    return self._measure(max_norm, scale, lambda totals: add(totals.div_(sharded.world.size)))
        return self._measure(max_norm, scale, over_ranks)

    def _measure(self, max_norm: float, scale: Tensor | None, over_ranks: OverRanks | None) -> Measured:
        """`measure` by torch."""
        pairs = [(parameter, local(gradient)) for parameter, gradient in self._pairs()]
        bad = None
        if over_ranks is None:
            norms = wide_norms([gradient for _, gradient in pairs])
            each = stacked(norms) if norms else torch.zeros(1, device=self._home())
            norm = torch.linalg.vector_norm(each).float()
            if scale is not None:
                bad = (norm - norm != 0).float()  # of infinity and of no number
                norm = norm * to_device(inverse(scale), norm.device)
        else:
            copies = [self.counting.copies(parameter) for parameter, _ in pairs]
            totals = totals_of([gradient for _, gradient in pairs], copies, self._home())
            if scale is not None:
                totals[0] *= to_device(inverse(scale), totals.device).to(totals.dtype).square()
            over_ranks(totals)
            norm, bad = totals[0].sqrt().float(), (totals[1] > 0).float()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return Measured(
            norm, factor if scale is None else factor * to_device(inverse(scale), norm.device), bad
        )

    def _home(self) -> torch.device:
        # Not meta, as parameters of other stages: a collective does nothing there, and the other ranks wait for this one.
        held = (p.device for p in parameters_of(self.optimizer) if not p.is_meta)
        return next(held, torch.device("cpu"))

    def step(
        self, factor: Tensor | None = None, found_inf: Tensor | None = None, scale: Scale | None = None
    ) -> Any:
        """Move the parameters; returns the result of the optimizer's own step.

        Args:
            factor: float32, 0-dim: gradients are multiplied by it.
            found_inf: float32, 0-dim: above 0, nothing changes.
            scale: moved by a step by our kernels, which notes that in it; torch's steps leave it.
        """
        nothing = factor is None and found_inf is None and self.averages.decay is None
        by_torch = self.kernels is None or (
            nothing and self._masters is None and takes_found_inf(self.optimizer)
        )
        if not by_torch:
            self._settle()
            try:
                return self._step_by_kernels(self._here(factor), self._here(found_inf), scale)
            except KernelError as error:
                self.give_way(str(error))
        if nothing:
            return self.optimizer.step()
        if self._own is None or scale is None:
            return self._step_by_torch(factor, found_inf)
        self._own.lent = scale  # it may run our kernels itself
        try:
            return self._step_by_torch(factor, found_inf)
        finally:
            self._own.lent = None

    def _step_by_torch(self, factor: Tensor | None, found_inf: Tensor | None) -> Any:
        told = takes_found_inf(self.optimizer)
        if found_inf is not None and not told:
            if found_inf.item():
                return None
            found_inf = None

        def step() -> Any:
            if told and not (factor is None and found_inf is None):
                return step_told(self.optimizer, found_inf, None if factor is None else factor.reciprocal())
            if factor is not None:
                multiply([gradient for _, gradient in self._pairs()], factor)
            return self.optimizer.step()

        if self.averages.decay is None:
            return step()
        return self.averages.around([parameter for parameter, _ in self._pairs()], step, found_inf)

    def _step_by_kernels(self, factor: Tensor | None, found_inf: Tensor | None, scale: Scale | None) -> None:
        """The kernels' step with all that torch does around an optimizer's own."""
        there, kernels = self.optimizer, self.kernels
        assert kernels is not None

        def move() -> None:
            kernels.step(factor, found_inf, scale=scale)

        run = torch.optim.Optimizer.profile_hook_step
        if isinstance(there, ShardedOptimizer):
            run(lambda optimizer: optimizer.step_by(move))(there)
            return
        run(lambda optimizer: move())(there)
        if hasattr(vars(there).get("step"), "_wrapped_by_lr_sched"):
            there._opt_called = True  # type: ignore[attr-defined]  # by which torch's schedulers know the order of calls

    def _here(self, number: Tensor | None) -> Tensor | None:
        """On the kernels' device: a loss, and so its scale, may be elsewhere."""
        return None if number is None else to_device(number, self._device)


def _rule_for(optimizer: torch.optim.Optimizer) -> Rule | str:
    """The rule of one of torch's optimizers; or why torch steps it, in words."""
    them, kind = torch_optimizers, type(optimizer)
    own = (them.Adam, them.AdamW, them.SGD, them.Adagrad)
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "a differentiable step was asked for"
        if group.get("foreach") is not None or group.get("fused") is False:
            return "fused or foreach was chosen by the caller"
    rules = (mine.rule for mine in own if mine.torchs is kind)
    return next(rules, f"there is no kernel for {kind.__name__}")
