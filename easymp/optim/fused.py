"""Bases of easymp's own optimizers: a step by our kernels where they run, and else by torch, with equal results.

Either way the factor of a loss scale and of clipping, and the flag of an overflow, come by torch's protocol for fused optimizers
(attributes ``grad_scale`` and ``found_inf`` during a step), so torch's GradScaler drives them without a wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import cuda
from ..base.dtensor import local, meshes
from ..cuda import EMA
from ..errors import KernelError, SettingError, StepError
from ..protocols import Counting
from .masters import Averages
from .torch_step import (
    Clip,
    Widened,
    fill_momentum,
    fuse,
    inverse,
    keep_implementation,
    multiply,
    values,
    wide_norms,
    widest,
)

if TYPE_CHECKING:
    from ..cuda.rounding import Rounding
    from ..cuda.rule import Rule, Scale
    from ..cuda.step import FusedStep


class StepChoice(NamedTuple):
    """How the step of an own optimizer runs, and why.

    Attributes:
        name: "CuPy", "torch fused" or "torch".
        kernels: the step by our kernels; None where torch runs it.
    """

    name: str
    reason: str
    kernels: FusedStep | None = None


@dataclass(frozen=True)
class Options:
    """Options that all our optimizers take beside those of their rule.

    Attributes:
        ema_decay: keep an average of the weights, ema += (p - ema) × (1 - ema_decay) after each step, in fp32, as "ema" in the state.
        state_dtype: of states that have a number for each element; None: the parameter's, as in torch. bfloat16 halves them, and needs
            `stochastic_rounding`: rounded to the nearest, a second moment that falls by a thousandth a step stays where it is.
        stochastic_rounding: round bf16 parameters and states up with the probability of the part that is cut off, from this seed; True
            is 0. See `easymp.cuda.rounding`. SGD's and Lion's states have no step: in a resumed run their bits begin anew.
    """

    ema_decay: float | None = None
    state_dtype: torch.dtype | None = None
    stochastic_rounding: int | bool = False

    @property
    def rounding(self) -> Rounding | None:
        """How bf16 is rounded, where parameters are whole or DTensors."""
        if self.stochastic_rounding is False:
            return None
        return cuda.Rounding(0 if self.stochastic_rounding is True else self.stochastic_rounding)

    def __post_init__(self) -> None:
        if self.state_dtype not in (None, torch.float32, torch.bfloat16):
            raise SettingError(
                f"state_dtype={self.state_dtype} must be torch.float32 or torch.bfloat16; leave it out for the parameters' own"
            )
        if self.state_dtype == torch.bfloat16 and self.stochastic_rounding is False:
            raise SettingError(
                "state_dtype=torch.bfloat16 needs stochastic_rounding=True: rounded to the nearest, a second moment that falls by less "
                "than half of bf16's spacing a step stays where it is. Pass both, or neither"
            )
        self.rounding  # noqa: B018  # refuses a wrong seed
        if self.ema_decay is not None and not 0.0 <= self.ema_decay < 1.0:
            raise SettingError(f"ema_decay={self.ema_decay} must be at least 0 and below 1; 0.999 is usual")


class FusedOptimizer(torch.optim.Optimizer):
    """Base of our optimizers.

    Attributes:
        rule: what the kernels are made from.
        options: given to the constructor.
    """

    rule: Rule
    options: Options = Options()
    _step_supports_amp_scaling: ClassVar[bool] = True  # torch's word for: reads `grad_scale` and `found_inf`
    _chosen: tuple[tuple[Any, ...], StepChoice] | None = None
    _clip: Clip | None = None  # left to the next step by `clip_grad_norm_`
    _meshes: Sequence[Any] = ()  # that parameters lie on now
    _counting: Counting | None = None
    _wide: tuple[int, Widened] | None = None
    _lent: Scale | None = None
    _first: Callable[[Tensor], int] | None = None

    # -- kernels or torch -----------------------------------------------------------------------------------------------

    @property
    def engine(self) -> StepChoice:
        """What steps the parameters as they lie now."""
        first = next(self._parameters(), None)
        device = None if first is None else first.device
        wanted = not any(group.get("fused") is False for group in self.param_groups)
        facts = (id(self), device, type(first), wanted)  # a copy of this optimizer chooses for itself
        if self._chosen is None or self._chosen[0] != facts:
            self._chosen = facts, self._choose(device, wanted)
        return self._chosen[1]

    def _choose(self, device: torch.device | None, wanted: bool) -> StepChoice:
        reason = self._refuse(device, wanted)
        if device is not None and reason is None:
            launcher = cuda.launcher_for(device)
            if not isinstance(launcher, cuda.Unavailable):
                return StepChoice("CuPy", "our kernels run on this device", self.kernels(self.rule, launcher))
            reason = launcher.reason
        return self._by_torch(reason or "there are no parameters")

    def _refuse(self, device: torch.device | None, wanted: bool) -> str | None:
        if not wanted:
            return "fused=False was asked for"
        for group in self.param_groups:
            refusal = self.rule.refuse(group)
            if refusal is not None:
                return refusal
            if self.rule.norm and any(
                p.dtype not in cuda.TYPES or p.device != device for p in group["params"]
            ):
                return "it needs the norm of all gradients, and some are not for our kernels"
        return None

    def _by_torch(self, reason: str) -> StepChoice:
        return StepChoice("torch", reason)

    def use_plain_torch(self) -> None:
        """Neither kernels nor a fused step of torch's, in groups that leave it open."""
        for group in self.param_groups:
            if group.get("fused") is None:
                group["fused"] = False

    def do_without(self, reason: str) -> None:
        """Leave steps to torch from here on, as long as the parameters lie where they do."""
        self.engine  # noqa: B018  # is chosen by now
        assert self._chosen is not None
        self._chosen = self._chosen[0], self._by_torch(reason)

    def _fail(self, error: KernelError) -> None:
        cuda.warn_once(str(error))
        self.do_without(str(error))

    def kernels(self, rule: Rule, launcher: Any) -> FusedStep:
        """A step of this optimizer's parameters by `rule`."""
        own = self.options
        return cuda.FusedStep(
            *(self._stepped, rule, launcher),
            ema_decay=own.ema_decay,
            state_dtype=own.state_dtype,
            rounding=self.rounding,
            copies=self._copies,
        )

    @property
    def _stepped(self) -> torch.optim.Optimizer:
        return self

    # -- rounding -------------------------------------------------------------------------------------------------------

    def round_from(self, seed: int) -> bool:
        """Round bf16 parameters stochastically from here on; False where that cannot be, so that masters are needed.

        Not with a rule whose state has no step (SGD, Lion): a resumed run would draw other bits. Unless the options ask for it.
        """
        if self.options.rounding is None and self._stepped is self and self.rule.counts:
            self.options = replace(self.options, stochastic_rounding=seed)
            self._chosen = self._wide = None
        return self.options.rounding is not None

    def begin_at(self, first: Callable[[Tensor], int]) -> None:
        """Parameters are parts of others, and no DTensors: `first` says where in the whole one they begin, as `Rounding` has it."""
        self._first = first

    @property
    def rounding(self) -> Rounding | None:
        """Of bf16 parameters and states."""
        rounding = self.options.rounding
        return rounding if rounding is None or self._first is None else replace(rounding, first=self._first)

    @property
    def widened(self) -> Widened:
        """A step by torch with states and rounding as `options` have them."""
        if self._wide is None or self._wide[0] != id(self):
            self._wide = id(self), Widened(self, self.rule, self.options.state_dtype, self.rounding)
        return self._wide[1]

    # -- the step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have gradients; returns what `closure` does.

        Raises:
            StepError: gradients are not those that `clip_grad_norm_` has measured.
        """
        if closure is not None and self._clip is not None:
            raise StepError(
                "clip_grad_norm_ measured gradients that the closure will replace: a step with a closure cannot be clipped so"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale: Tensor | None = getattr(self, "grad_scale", None)
        clip, self._clip = self._clip, None
        if clip is None:
            factor, measured = None if scale is None else inverse(scale), None
        else:
            if scale is not None:
                raise StepError(
                    "clip_grad_norm_ measured gradients that are still scaled: call scaler.unscale_(optimizer) before it"
                )
            clip.gradients()
            factor, measured = clip.factor, clip.measured
        self.advance(factor, getattr(self, "found_inf", None), measured)
        return loss

    def advance(self, factor: Tensor | None, found_inf: Tensor | None, result: Tensor | None = None) -> None:
        """The update.

        Args:
            factor: float32, 0-dim: gradients are multiplied by it.
            found_inf: float32, 0-dim: above 0, nothing changes.
            result: what the kernels have measured of these gradients.
        """
        self._meshes = meshes(self._parameters())
        moved = [p for p in self._parameters() if p.grad is not None]
        kernels = self.engine.kernels
        if kernels is not None:
            try:
                if self.rule.norm and result is None:  # a collective, even for a rank without gradients
                    result = kernels.measure(over_ranks=self._over_ranks)
                kernels.step(factor, found_inf, result, self._lent)
                moved = kernels.rest
            except KernelError as error:  # nothing has moved yet
                kernels = self._fail(error)
        if moved or (kernels is None and self.rule.norm):
            self._advance_rest(moved, factor, found_inf)

    @contextmanager
    def borrowing(self, scale: Scale) -> Iterator[None]:
        """Inside, a step by our kernels moves `scale`."""
        self._lent = scale
        try:
            yield
        finally:
            self._lent = None

    def _advance_rest(self, moved: Sequence[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        averages = Averages(lambda parameter: (parameter, self.state), self.options.ema_decay)
        averages.around(moved, lambda: self.advance_by_torch(moved, factor, found_inf), found_inf)

    def advance_by_torch(
        self, parameters: Sequence[Any], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """The update of `parameters`, which have gradients, by torch's operations."""
        raise NotImplementedError

    def _parameters(self) -> Iterator[Any]:
        for group in self.param_groups:
            yield from group["params"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._clip = None
        super().zero_grad(set_to_none)

    # -- norms over the ranks, and clipping -----------------------------------------------------------------------------

    def count_by(self, counting: Counting) -> None:
        """Count gradients over the ranks so; by default, by the meshes that the parameters lie on."""
        self._counting = counting

    def _copies(self, parameter: Any) -> int:
        """On how many ranks, of those that are added up, each element of `parameter` lies."""
        if self._counting is not None:
            return self._counting.copies(parameter)
        ranks = math.prod(mesh.size() for mesh in self._meshes)
        for dim, placement in enumerate(getattr(parameter, "placements", ())):
            ranks //= 1 if placement.is_replicate() else parameter.device_mesh.size(dim)
        return ranks

    def _over_ranks(self, totals: Tensor) -> None:
        if self._counting is not None:
            assert self._counting.add is not None
            self._counting.add(totals)
            return
        for mesh in self._meshes:
            for dim in range(mesh.ndim):
                torch.distributed.all_reduce(totals, group=mesh.get_group(dim))

    def gradient_norm(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all gradients of these parameters, 0-dim; float64 where the device has it. Over the ranks, a collective."""
        device = next((p.device for p in self._parameters()), torch.device("cpu"))
        dtype = widest(device)
        counted = [(values(local(g)), c) for p, g in zip(parameters, gradients) if (c := self._copies(p))]
        norms = wide_norms([g for g, _ in counted])
        squares = [n.to(device, dtype).square() / copies for n, (_, copies) in zip(norms, counted)]
        both = torch.zeros(2, dtype=dtype, device=device)  # the kernels' measure adds up two
        if squares:
            both[0] = torch.stack(squares).sum()
        self._over_ranks(both)
        return both[0].sqrt()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The 2-norm of all gradients (float32, 0-dim, on the device); the next step takes them clipped to `max_norm`.

        They are clipped as the step reads them, not here. With torch's GradScaler, call ``scaler.unscale_(optimizer)`` before. Of sharded
        parameters it is the norm of the whole gradients; a collective. Under an Accelerator, use its `clip_grad_norm_`.
        """
        self._meshes = meshes(self._parameters())
        found = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        kernels, result = self.engine.kernels, None
        if kernels is not None and all(g.layout is torch.strided and g.dtype in cuda.TYPES for _, g in found):
            try:
                result = kernels.measure(max_norm, None, self._over_ranks)
            except KernelError as error:
                self._fail(error)
        if result is not None:
            norm, factor = result[0], result[1]
        else:
            norm = self.gradient_norm([p for p, _ in found], [g for _, g in found]).float()
            clip = max_norm / (norm + 1e-6)
            factor = torch.where(clip < 1.0, clip, torch.where(norm.isnan(), norm, 1.0))
        self._clip = Clip(factor, found, result)
        return norm

    # -- the average of the weights, and the state ----------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are their averages (`ema_decay`); afterwards they are themselves again.

        Raises:
            StepError: no average is kept.
        """
        if self.options.ema_decay is None:
            raise StepError(
                f"no average of the weights is kept: {type(self).__name__}(…, ema_decay=0.999) does"
            )
        having = [p for p in self._parameters() if p in self.state and EMA in self.state[p]]
        held = [local(p) for p in having]
        with torch.no_grad():
            own = [p.clone() for p in held]
            torch._foreach_copy_(held, [local(self.state[p][EMA]) for p in having])
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(held, own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state from here or from torch's optimizer of the same rule; how the step runs (fused, foreach) stays as it is."""
        super().load_state_dict(keep_implementation(self, state_dict))
        named = dict(
            zip((i for group in state_dict["param_groups"] for i in group["params"]), self._parameters())
        )
        for i, saved in state_dict["state"].items():
            for key, value in saved.items() if i in named else ():
                now = self.state[named[i]].get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                    # torch gives states their parameter's dtype: numbers that were kept in another one would be rounded.
                    self.state[named[i]][key] = value.to(now.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self.options}


# -- optimizers that torch has, too -------------------------------------------------------------------------------------


class TorchOptimizer(FusedOptimizer):
    """Base of optimizers that torch has, too: of torch's class, with its options, its state and its checkpoints.

    Attributes:
        torchs: its class there, whose step runs where kernels do not, fused if it can.
    """

    torchs: ClassVar[type[torch.optim.Optimizer]]
    _fused_here: bool = False  # whether the fused step was our choice

    @property
    def _widens(self) -> bool:
        return self.options.state_dtype is not None or self.options.rounding is not None

    def _by_torch(self, reason: str) -> StepChoice:
        if self._widens:
            return StepChoice(
                "torch",
                f"{reason}; torch has no step for states of their own dtype, nor for stochastic rounding",
            )
        for group in self.param_groups if self._fused_here else ():
            group["fused"] = None  # by us, when the parameters lay elsewhere
        self._fused_here = False
        if all(group.get("fused") is None and group.get("foreach") is None for group in self.param_groups):
            why_not = fuse(self, kind=self.torchs)
            self._fused_here = why_not is None
            if why_not is not None:
                return StepChoice("torch", f"{reason}; {why_not}")
        fused = all(group.get("fused") for group in self.param_groups)
        return StepChoice("torch fused" if fused else "torch", reason)

    def advance_by_torch(
        self, parameters: Sequence[Any], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        if self._widens:
            return self.widened.step(parameters, factor, found_inf)
        mine = {id(p) for p in parameters}
        hidden = [(p, p.grad) for p in self._parameters() if p.grad is not None and id(p) not in mine]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            if all(group.get("fused") for group in self.param_groups) and not any(
                p.grad.is_sparse for p in parameters
            ):
                fill_momentum(self, self.torchs)
                self._step_told(None if factor is None else factor.reciprocal(), found_inf)
            elif found_inf is None or not found_inf.item():
                if factor is not None:
                    multiply([p.grad for p in parameters], factor)
                with swapped(self.param_groups, "fused", False):  # the plain step takes sparse gradients
                    self._step_told(None, None)
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    def _step_told(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """torch's step, which reads these where it is fused."""
        step: Any = self.torchs.step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # the hooks have been called with our own step
        given = {name: vars(self)[name] for name in ("grad_scale", "found_inf") if name in vars(self)}
        vars(self).update(grad_scale=grad_scale, found_inf=found_inf)
        try:
            step(self)
        finally:
            del self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            vars(self).update(given)


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
