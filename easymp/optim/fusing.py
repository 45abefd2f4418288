"""What easymp's own optimizers have in common: a step by our kernels where they run, and else by torch, with equal results.

Either way the factor of a loss scale and of clipping, and the flag of an overflow, come by torch's protocol for fused optimizers
(attributes ``grad_scale`` and ``found_inf`` during a step), so torch's GradScaler drives them without a wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .. import cuda
from ..base.dtensor import local, meshes
from ..cuda import EMA
from ..errors import KernelError, SettingError, StepError
from ..protocols import Counting
from .averages import Averages
from .torch_step import keep_implementation, values, wide_norms
from .widening import Widened

if TYPE_CHECKING:
    from ..cuda.rounding import Rounding
    from ..cuda.rule import Scale
    from ..cuda.rules import Rule
    from ..cuda.step import FusedStep


@dataclass(frozen=True)
class Way:
    """What runs a step, and why.

    Attributes:
        name: "CuPy", "torch fused" or "torch".
        kernels: the step by our kernels; None where torch runs it.
    """

    name: str
    reason: str
    kernels: FusedStep | None = None


@dataclass(frozen=True)
class Options:
    """What our optimizers do beside their rule.

    Attributes:
        ema_decay: keep an average of the weights, ema += (p - ema) × (1 - ema_decay) after each step, in fp32, as "ema" in the state.
        state_dtype: of states that there is a number of for each element; None: the parameter's, as torch has it. bfloat16 halves
            them, and wants `stochastic_rounding`: to the nearest, a second moment that falls by a thousandth a step stays where it is.
        stochastic_rounding: round bf16 parameters and states up with the probability of what is cut off, from this seed; True is 0.
            See `easymp.cuda.rounding`. SGD's and Lion's states have no step: of a resumed run their bits begin anew.
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
                "state_dtype=torch.bfloat16 without stochastic_rounding=True would leave a second moment where it is, which falls by less "
                "than half of bf16's spacing a step: pass both, or neither"
            )
        self.rounding  # noqa: B018  # refuses a wrong seed
        if self.ema_decay is not None and not 0.0 <= self.ema_decay < 1.0:
            raise SettingError(f"ema_decay={self.ema_decay} must be at least 0 and below 1; 0.999 is usual")


@dataclass
class _Left:
    """What `clip_grad_norm_` has left to the next step."""

    factor: Tensor
    result: Tensor | None  # of the kernels' measure
    seen: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)


class FusedOptimizer(torch.optim.Optimizer):
    """Base of our optimizers.

    Attributes:
        rule: what the kernels are made from.
        options: given to the constructor.
    """

    rule: Rule
    options: Options = Options()
    _step_supports_amp_scaling: ClassVar[bool] = True  # torch's word for: reads `grad_scale` and `found_inf`
    _chosen: tuple[tuple[Any, ...], Way] | None = None
    _left: _Left | None = None
    _meshes: Sequence[Any] = ()  # that parameters lie on now
    _counting: Counting | None = None
    _wide: tuple[int, Widened] | None = None
    _lent: Scale | None = None
    _first: Callable[[Tensor], int] | None = None

    # -- which way ------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Way:
        """What steps the parameters as they lie now."""
        first = next(self._parameters(), None)
        device = None if first is None else first.device
        wanted = not any(group.get("fused") is False for group in self.param_groups)
        facts = (id(self), device, type(first), wanted)  # a copy of this optimizer chooses for itself
        if self._chosen is None or self._chosen[0] != facts:
            self._chosen = facts, self._choose(device, wanted)
        return self._chosen[1]

    def _choose(self, device: torch.device | None, wanted: bool) -> Way:
        reason = self._refuse(device, wanted)
        if reason is None:
            assert device is not None
            launcher = cuda.launcher_for(device)
            if not isinstance(launcher, cuda.Unavailable):
                return Way("CuPy", "our kernels run on this device", self.kernels(self.rule, launcher))
            reason = launcher.reason
        return self._otherwise(reason)

    def _refuse(self, device: torch.device | None, wanted: bool) -> str | None:
        if device is None:
            return "there are no parameters"
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

    def use_plain_torch(self) -> None:
        """Neither kernels nor a fused step of torch's, in groups that leave it open."""
        for group in self.param_groups:
            if group.get("fused") is None:
                group["fused"] = False

    @property
    def _stepped(self) -> torch.optim.Optimizer:
        return self

    def round_from(self, seed: int) -> bool:
        """Round bf16 parameters stochastically from here on; False where that cannot be, for masters must do then.

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

    def _otherwise(self, reason: str) -> Way:
        return Way("torch", reason)

    # -- the step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have gradients; returns what `closure` does.

        Raises:
            StepError: gradients are not those that `clip_grad_norm_` has measured.
        """
        if closure is not None and self._left is not None:
            raise StepError(
                "clip_grad_norm_ measured gradients that the closure will replace: a step with a closure cannot be clipped so"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, result = self._take_left(getattr(self, "grad_scale", None))
        self.advance(factor, getattr(self, "found_inf", None), result)
        return loss

    def advance(self, factor: Tensor | None, found_inf: Tensor | None, result: Tensor | None = None) -> None:
        """The update.

        Args:
            factor: float32, 0-dim: what gradients are multiplied by.
            found_inf: float32, 0-dim: above 0, nothing changes.
            result: what the kernels have measured of these gradients.
        """
        self._meshes = meshes(self._parameters())
        moved = [p for p in self._parameters() if p.grad is not None]
        kernels = self.engine.kernels
        if kernels is not None:
            try:
                if self.rule.norm and result is None:
                    result = kernels.measure(
                        over_ranks=self._over_ranks
                    )  # a collective, even for a rank without gradients
                kernels.step(factor, found_inf, result, self._lent)
                moved = kernels.rest
            except KernelError as error:  # nothing has moved yet
                kernels = self._do_without(error)
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

    def do_without(self, reason: str) -> None:
        """torch steps from here on, as long as the parameters lie where they do."""
        self.engine  # noqa: B018  # is chosen by now
        assert self._chosen is not None
        self._chosen = self._chosen[0], self._otherwise(reason)

    def _do_without(self, error: KernelError) -> None:
        cuda.warn_once(str(error))
        self.do_without(str(error))

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
        self._left = None
        super().zero_grad(set_to_none)

    # -- norms over the ranks -------------------------------------------------------------------------------------------

    def count_by(self, counting: Counting) -> None:
        """How the norm of all gradients comes about on the ranks; by the meshes that the parameters lie on, if nobody says it."""
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
        counted = [(local(g), self._copies(p)) for p, g in zip(parameters, gradients)]
        squares = [
            n.to(device, torch.float32 if device.type == "mps" else torch.float64).square() / copies
            for n, copies in zip(
                wide_norms([values(g) for g, c in counted if c]), [c for _, c in counted if c]
            )
        ]
        wide_type = torch.float32 if device.type == "mps" else torch.float64
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=wide_type, device=device)
        both = torch.stack([total, torch.zeros_like(total)])
        self._over_ranks(both)
        return both[0].sqrt()

    # -- clipping -------------------------------------------------------------------------------------------------------

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
                self._do_without(error)
        if result is not None:
            norm, factor = result[0], result[1]
        else:
            norm = self.gradient_norm([p for p, _ in found], [g for _, g in found]).float()
            clip = max_norm / (norm + 1e-6)
            factor = torch.where(clip < 1.0, clip, torch.where(norm.isnan(), norm, 1.0))
        self._left = _Left(factor, result, [(p, g, local(g)._version) for p, g in found])
        return norm

    def _take_left(self, grad_scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        left, self._left = self._left, None
        if left is None:
            return None if grad_scale is None else inverse(grad_scale), None
        if grad_scale is not None:
            raise StepError(
                "clip_grad_norm_ measured gradients that are still scaled: call scaler.unscale_(optimizer) before it"
            )
        for parameter, gradient, version in left.seen:
            if parameter.grad is not gradient or local(gradient)._version != version:
                raise StepError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} has changed since clip_grad_norm_, which left the "
                    "clipping to this step: clip last, and use this optimizer's zero_grad() where a step is left out"
                )
        return left.factor, left.result

    # -- the average of the weights ---------------------------------------------------------------------------------------

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
        held = [
            (local(p), local(self.state[p][EMA]))
            for p in self._parameters()
            if p in self.state and EMA in self.state[p]
        ]
        with torch.no_grad():
            own = [p.clone() for p, _ in held]
            torch._foreach_copy_([p for p, _ in held], [a for _, a in held])
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in held], own)

    # -- state ----------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state from here or from torch's optimizer of the same rule; how the step runs (fused, foreach) stays as it is."""
        super().load_state_dict(keep_implementation(self, state_dict))
        order = [p for group in self.param_groups for p in group["params"]]
        named = dict(zip((i for group in state_dict["param_groups"] for i in group["params"]), order))
        for i, saved in state_dict["state"].items():
            for key, value in saved.items() if i in named else ():
                now = self.state[named[i]].get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                    # torch gives states their parameter's dtype: numbers that were kept in another one would be rounded.
                    self.state[named[i]][key] = value.to(now.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self.options}


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, rounded once."""
    return (
        scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
    )  # no float64 on mps
