"""The engine of a prepared optimizer: it measures gradients and runs the step, by our kernels or by torch.

Clipping and the loss scale are one factor on all gradients, (1 / scale) × min(1, max_norm / (norm + 1e-6)). An engine
measures it in one reading of the gradients, without a wait for the device, and the step multiplies by it as it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import cuda
from ..base.dtensor import local
from ..base.lazy import modules_at_first_use
from ..cuda import EMA
from ..errors import KernelError, SettingError, StepError
from ..precision.scaler import amp_attributes, inverse, takes_found_inf, to_device
from ..protocols import Counting
from .masters import Averages, Masters
from .sharded import ShardedOptimizer, elementwise, holder_of
from .torch_step import (
    FUSED,
    Clip,
    counting_by_meshes,
    fill_momentum,
    fp32_norms,
    has_user_pre_hooks,
    launcher_of,
    multiply,
    note_step,
    parameters_of,
    stacked,
    totals_of,
)

if TYPE_CHECKING:
    from ..cuda.kernel import Rounding
    from ..cuda.rule import Rule
    from ..cuda.step import FusedStep, OverRanks
    from . import rules

modules_at_first_use(globals(), "rules")  # which most CPUs do not need

DTYPES = (torch.float32, torch.bfloat16)  # of gradients for which a float32 factor is exact enough

# Elements from which, on a CPU, a pass over the gradients takes longer than the factor costs the fused step, which then
# writes them. Under a loss scale another pass is saved, so WORTH is divided by SCALED. See benchmarks/fused_step.py.
WORTH = 2**21
SCALED = 32


@dataclass(frozen=True)
class EngineOptions:
    """Options of `Engine` beside those of the optimizer.

    Attributes:
        ema_decay: keep an average of the weights, ema += (p - ema) × (1 - ema_decay) after each step, in fp32, as "ema"
            in the state.
        state_dtype: of states that have a number for each element; None: the parameter's, as in torch. bfloat16 halves
            them and needs `stochastic_rounding`: rounded to the nearest, a second moment that falls by a thousandth a
            step stays where it is.
        stochastic_rounding: seed of the rounding of bf16 parameters and states, up with the probability of the part
            that is cut off; True is 0. SGD's and Lion's states have no step: in a resumed run their bits begin anew.

    Raises:
        SettingError: an option is out of range.

    Example:
        >>> options = easymp.optim.EngineOptions(state_dtype=torch.bfloat16, stochastic_rounding=True)
        >>> engine = easymp.optim.Engine(torch.optim.AdamW(nn.Linear(2, 1).parameters()), options)
    """

    ema_decay: float | None = None
    state_dtype: torch.dtype | None = None
    stochastic_rounding: int | bool = False

    @property
    def rounding(self) -> Rounding | None:
        """How bf16 is rounded, where parameters are whole or DTensors."""
        seed = self.stochastic_rounding
        rounding: Rounding | None = None if seed is False else cuda.Rounding(0 if seed is True else seed)
        return rounding

    def __post_init__(self) -> None:
        if self.state_dtype not in (None, torch.float32, torch.bfloat16):
            raise SettingError(
                f"state_dtype={self.state_dtype} must be torch.float32 or torch.bfloat16; leave it out for the "
                "parameters' own"
            )
        if self.state_dtype == torch.bfloat16 and self.stochastic_rounding is False:
            raise SettingError(
                "state_dtype=torch.bfloat16 needs stochastic_rounding=True: rounded to the nearest, a second moment "
                "that falls slowly stays where it is. Pass both, or neither"
            )
        self.rounding  # noqa: B018  # refuses a wrong seed
        if self.ema_decay is not None and not 0.0 <= self.ema_decay < 1.0:
            raise SettingError(f"ema_decay={self.ema_decay} must be at least 0 and below 1; 0.999 is usual")


class Measured(NamedTuple):
    """Norm and factor of all gradients, 0-dim, float32, on their device."""

    norm: Tensor  # of the gradients divided by the loss scale
    factor: Tensor  # (1 / scale) × min(1, max_norm / (norm + 1e-6)), by which the step multiplies them
    found_inf: Tensor | None  # above 0 where one is not finite; None without a scale


class Engine:
    """Runs the step of one optimizer: by our kernels where they run and gain, else by torch's step.

    `prepare` makes one for each optimizer. By itself it needs no Accelerator: call its `step` in place of the
    optimizer's. Without a factor, a look for overflows, an average, a low-precision copy or an option, torch's fused
    step moves no byte more than our kernels, and runs. Kernels that fail, or meet a gradient that they do not take,
    give way to torch for good, before anything has changed.

    Args:
        optimizer: one of torch's, or of ours; others run as they are, without `options` but ``ema_decay``.
        options: averages of the weights, the dtype of states, and stochastic rounding.
        counting: of gradients over the ranks; None: by the parameters' meshes.
        free: False leaves gradients to be changed in memory, always.
        masters: of low-precision parameters, in the optimizer's groups; kernels read and write the parameters
            themselves.
        failed: called with the reason when the kernels give way.
        scaled: whether there is a loss scale.
        rule: of the kernels; None: that of the optimizer's class.
        plain: the step by torch, where this engine runs inside of the optimizer's own step; None: the optimizer's.

    Raises:
        SettingError: `options` that this optimizer cannot have.

    Example:
        >>> parameter = nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.1)
        >>> engine = easymp.optim.Engine(optimizer, easymp.optim.EngineOptions(ema_decay=0.5))
        >>> engine.name  # "CuPy" where our kernels run
        'torch'
        >>> parameter.sum().backward()
        >>> engine.clip_grad_norm_(1.0)
        tensor(1.4142)
        >>> engine.step()
        >>> with engine.averaged():
        ...     parameter.data
        tensor([0.9646, 0.9646])
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options: EngineOptions = EngineOptions(),  # frozen
        counting: Counting | None = None,
        free: bool = True,
        masters: Masters | None = None,
        failed: Callable[[str], None] = lambda reason: None,
        scaled: bool = False,
        rule: Rule | None = None,
        plain: Callable[[], Any] | None = None,
    ) -> None:
        sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        inner = optimizer if sharded is None else sharded.twin
        self.optimizer, self.options = optimizer, options
        self.reason = ""  # why it is this engine
        self.counting = self._torch_counting = counting or counting_by_meshes(parameters_of(optimizer))
        self.averages = Averages(lambda parameter: holder_of(optimizer, parameter), options.ema_decay)
        self.kernels: FusedStep | None = None
        self._inner, self._in_step = inner, plain is not None
        self._plain: Callable[[], Any] = plain or (lambda: optimizer.step())  # a scheduler may wrap `step` later
        self._free, self._scaled, self._failed = free, scaled, failed
        self._masters = masters if sharded is None else None
        self._low = {} if self._masters is None else self._masters.low
        self._group_count, self._worth = -1, False
        self._trained: tuple[list[bool], int] | None = None  # at SGD's last step: which parameters train; their states
        self._clip: Clip | None = None  # left to the next step by `clip_grad_norm_`
        rounding = options.rounding
        if rounding is not None and sharded is not None and elementwise(inner):
            rounding = replace(rounding, offset_of=sharded.offset_of)
        self._rule_step: rules.RuleStep | None = None
        if options.state_dtype is not None or rounding is not None:  # bf16 is rounded in another way than by torch
            rule = rule or rules.rule_of(inner)
            if rule is None:
                raise SettingError(
                    f"{type(inner).__name__} got state_dtype or stochastic_rounding, which are for Adam, AdamW, SGD, "
                    "Adagrad, Lion, LAMB and NovoGrad: leave them out (fp32 masters keep small updates, too), or use "
                    "one of these"
                )
            self._rule_step = rules.RuleStep(inner, rule, options.state_dtype, rounding)

        kernels = launcher_of(inner, lambda: rule or rules.rule_of(inner)) if free else "kernels are off"
        if isinstance(kernels, str):
            self.reason = kernels
            return
        self.reason = f"norm, unscale, clip and {type(inner).__name__} in one pass"
        launcher, self._rule = kernels
        self._device = launcher.device
        if sharded is not None:
            self.counting = sharded.counting
        self.kernels = cuda.FusedStep(
            inner,
            self._rule,
            launcher,
            gradient=self._gradient if sharded is None else sharded.gradient,
            copy=self._low,
            ema_decay=options.ema_decay,
            state_dtype=options.state_dtype,
            rounding=rounding,
            copies=self.counting.copies,
        )

    @property
    def name(self) -> str:
        """Name of the engine: "CuPy", "torch fused" or "torch"."""
        if self.kernels is not None:
            return "CuPy"
        fused = isinstance(self._inner, FUSED) and all(group.get("fused") for group in self._inner.param_groups)
        return "torch fused" if fused else "torch"

    @property
    def reads_low(self) -> bool:
        """Whether the step itself reads gradients of low-precision parameters and writes these, past the masters."""
        return self.kernels is not None and self._masters is not None

    def fall_back_to_torch(self, reason: str) -> None:
        """Leave the steps from here on to torch."""
        self.kernels, self.reason, self.counting = None, reason, self._torch_counting
        if self._masters is not None:
            self._masters.gather()
        self._failed(reason)

    # -- the gradients -------------------------------------------------------------------------------------------------

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters that a step would move now, each with its gradient."""
        self._gather_if_started()
        return list(self._pairs())

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for parameter in parameters_of(self.optimizer):
            low = self._low.get(id(parameter)) if parameter.grad is None and self.kernels is not None else None
            owner = parameter if low is None else low
            if owner.grad is not None:
                yield owner, owner.grad

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        if parameter.grad is None and id(parameter) in self._low:
            return self._low[id(parameter)].grad
        return parameter.grad

    def _gather_if_started(self) -> None:
        """Move all gradients to the masters where some have moved: no parameter has one beside its master's."""
        if self.kernels is not None and self._masters is not None and self._masters.have_gradients():
            self._masters.gather()

    def worth(self) -> bool:
        """Whether leaving a factor to the step can be faster than a pass over the gradients. The same on all ranks."""
        if self.kernels is not None:
            return True
        groups = self.optimizer.param_groups
        if len(groups) != self._group_count:
            parameters = parameters_of(self.optimizer)  # those of other stages too
            self._group_count = len(groups)
            threshold = WORTH / SCALED if self._scaled else WORTH
            self._worth = any(p.is_cuda for p in parameters) or sum(p.numel() for p in parameters) >= threshold
        return self._worth

    def takes_factor(self) -> bool:
        """Whether `step` can multiply the gradients of now by a factor as it reads. The same on all ranks."""
        if not self._free or not self.worth() or has_user_pre_hooks(self.optimizer):
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
        """Norm and factor of gradients, which are only read, without a wait for the device.

        `scale` (float32, 0-dim) is the loss scale. `over_ranks` adds up a float64 tensor [2] over the ranks, in place:
        Σ (g / scale)², and the number of gradients that are not finite.
        """
        if self.kernels is not None:
            try:
                return Measured(*self.kernels.measure(max_norm, self._on_device(scale), over_ranks).unbind())
            except KernelError as error:
                self.fall_back_to_torch(str(error))
                add, sharded = over_ranks, self.optimizer
                if add is not None and isinstance(sharded, ShardedOptimizer):
                    # It adds up parts, and torch measures whole gradients.
                    return self._measure(max_norm, scale, lambda totals: add(totals.div_(sharded.world.size)))
        return self._measure(max_norm, scale, over_ranks)

    def _measure(self, max_norm: float, scale: Tensor | None, over_ranks: OverRanks | None) -> Measured:
        """`measure` by torch."""
        pairs = [(parameter, local(gradient)) for parameter, gradient in self._pairs()]
        gradients = [gradient for _, gradient in pairs]
        # Not meta, as parameters of other stages: a collective does nothing there, and the other ranks wait for this
        # one.
        devices = (p.device for p in parameters_of(self.optimizer) if not p.is_meta)
        device = next(devices, torch.device("cpu"))
        nonfinite: Tensor | None = None
        if over_ranks is None:
            norms = stacked(fp32_norms(gradients)) if gradients else torch.zeros(1, device=device)
            norm = torch.linalg.vector_norm(norms).float()
            if scale is not None:
                nonfinite = (norm - norm != 0).float()  # of infinity and of NaN
                norm = norm * to_device(inverse(scale), norm.device)
        else:
            totals = totals_of(gradients, [self.counting.copies(parameter) for parameter, _ in pairs], device)
            if scale is not None:
                totals[0] *= to_device(inverse(scale), totals.device).to(totals.dtype).square()
            over_ranks(totals)
            norm, nonfinite = totals[0].sqrt().float(), (totals[1] > 0).float()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return Measured(norm, factor if scale is None else factor * to_device(inverse(scale), norm.device), nonfinite)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, factor: Tensor | None = None, found_inf: Tensor | None = None) -> Any:
        """Move the parameters.

        Args:
            factor: float32, 0-dim: gradients are multiplied by it.
            found_inf: float32, 0-dim: above 0, nothing changes.

        Returns:
            The result of the optimizer's own step; None where kernels have stepped.
        """
        clip, self._clip = self._clip, None
        if clip is not None:
            clip.gradients()  # checks that they are those that were measured
            factor = clip.factor if factor is None else factor * clip.factor
        plain = factor is None and found_inf is None and self.averages.decay is None and self._rule_step is None
        # Without factor or flag torch's own fused step does all that is needed.
        if self.kernels is not None and not (
            plain and self._masters is None and type(self._inner) in FUSED and takes_found_inf(self.optimizer)
        ):
            self._gather_if_started()
            step, numbers = self.kernels.step, (self._on_device(factor), self._on_device(found_inf))
            try:
                return self._with_hooks(lambda: step(*numbers))
            except KernelError as error:
                self.fall_back_to_torch(str(error))
        if type(self._inner) is torch.optim.SGD and any(g["fused"] and g["momentum"] for g in self._inner.param_groups):
            trained = [p.requires_grad for p in parameters_of(self._inner)], len(self._inner.state)
            if trained != self._trained:  # a parameter has been unfrozen, or its state dropped
                fill_momentum(self._inner)
                self._trained = trained
        return self._plain() if plain else self._step_by_torch(factor, found_inf)

    def _step_by_torch(self, factor: Tensor | None, found_inf: Tensor | None) -> Any:
        by_rule, reads_flag = self._rule_step, takes_found_inf(self.optimizer)
        if found_inf is not None and by_rule is None and not reads_flag and found_inf.item():
            return None

        def step() -> Any:
            if by_rule is not None:
                return self._with_hooks(lambda: by_rule(factor, found_inf))
            if reads_flag:
                with amp_attributes(self.optimizer, None if factor is None else factor.reciprocal(), found_inf):
                    return self._plain()
            if factor is not None:
                multiply([gradient for _, gradient in self._pairs()], factor)
            return self._plain()

        return self.averages.follow_step([parameter for parameter, _ in self._pairs()], step, found_inf)

    def _with_hooks(self, move: Callable[[], Any]) -> None:
        """`move`, with all that torch does around an optimizer's own step."""
        optimizer, run = self.optimizer, torch.optim.Optimizer.profile_hook_step
        if self._in_step:
            move()
        elif isinstance(optimizer, ShardedOptimizer):
            run(lambda optimizer: optimizer.step_by(move))(optimizer)
        else:
            run(lambda optimizer: move())(optimizer)
            note_step(optimizer)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Measure the gradients, and let the next `step` clip them as it reads them; in memory they stay as they are.

        With torch's GradScaler, call ``scaler.unscale_(optimizer)`` before. Sharded parameters count with their whole
        gradients, by a collective. Under an Accelerator, use its `clip_grad_norm_`.

        Args:
            max_norm: the largest 2-norm over all gradients.

        Returns:
            The 2-norm before (float32, 0-dim, on the device).

        Raises:
            StepError: a gradient is sparse.
        """
        pairs = self.gradients()
        if any(gradient.is_sparse for _, gradient in pairs):
            raise StepError("clip_grad_norm_ got a sparse gradient: make the embedding with sparse=False")
        measured = self.measure(max_norm, over_ranks=self.counting.add)
        self._clip = Clip(measured.factor, pairs)
        return measured.norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the optimizer's gradients, and a clip that waits for the next step.

        Args:
            set_to_none: as in torch.
        """
        self._clip = None
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are their averages (`ema_decay`); afterwards they are themselves again.

        Raises:
            StepError: no average is kept.
        """
        if self.averages.decay is None:
            raise StepError("no average of the weights is kept: Engine(optimizer, EngineOptions(ema_decay=0.999)) does")
        state = self.optimizer.state
        averages = {p: local(state[p][EMA]) for p in parameters_of(self.optimizer) if EMA in state.get(p, {})}
        weights = [local(p) for p in averages]
        with torch.no_grad():
            before = [weight.clone() for weight in weights]
            torch._foreach_copy_(weights, list(averages.values()))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, before)

    def _on_device(self, number: Tensor | None) -> Tensor | None:
        # A loss, and so its scale, may be on another device than the kernels.
        return None if number is None else to_device(number, self._device)
