"""Base of easymp's own optimizers: a step by our kernels where they run, else by torch, with equal results.

Both read the factor of the loss scale and of clipping, and the flag of an overflow, by torch's protocol for fused optimizers (attributes
``grad_scale`` and ``found_inf`` during a step). So torch's GradScaler drives them without a wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor

from .. import cuda
from ..base.dtensor import local, meshes
from ..cuda import EMA
from ..errors import KernelError, SettingError, StepError
from ..precision.scaler import inverse
from ..protocols import Counting
from .masters import Averages
from .torch_step import Clip, evaluated, keep_implementation, launcher_of, totals_of, values

if TYPE_CHECKING:
    from ..cuda.rounding import Rounding
    from ..cuda.rule import Group, Rule, Scale
    from ..cuda.step import FusedStep


class StepChoice(NamedTuple):
    """How the step of an own optimizer runs, and why."""

    name: str  # "CuPy", "torch fused" or "torch"
    reason: str
    kernels: FusedStep | None = None  # the step by our kernels; None where torch steps


class OptionWords(TypedDict, total=False):
    """Keywords of all our optimizers, for type checkers: a param group's, and those of `Options`."""

    maximize: bool
    fused: bool | None
    ema_decay: float | None
    state_dtype: torch.dtype | None
    stochastic_rounding: int | bool


@dataclass(frozen=True)
class Options:
    """Options that all our optimizers take beside those of their rule.

    Attributes:
        ema_decay: keep an average of the weights, ema += (p - ema) × (1 - ema_decay) after each step, in fp32, as "ema" in the state.
        state_dtype: of states that have a number for each element; None: the parameter's, as in torch. bfloat16 halves them and needs
            `stochastic_rounding`: rounded to the nearest, a second moment that falls by a thousandth a step stays where it is.
        stochastic_rounding: seed of the rounding of bf16 parameters and states, up with the probability of the part that is cut off;
            True is 0. See `easymp.cuda.rounding`. SGD's and Lion's states have no step: in a resumed run their bits begin anew.
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
            right = "must be torch.float32 or torch.bfloat16; leave it out for the parameters' own"
            raise SettingError(f"state_dtype={self.state_dtype} {right}")
        if self.state_dtype == torch.bfloat16 and self.stochastic_rounding is False:
            why = "rounded to the nearest, a second moment that falls slowly stays where it is. Pass both, or neither"
            raise SettingError(f"state_dtype=torch.bfloat16 needs stochastic_rounding=True: {why}")
        self.rounding  # noqa: B018  # refuses a wrong seed
        if self.ema_decay is not None and not 0.0 <= self.ema_decay < 1.0:
            raise SettingError(f"ema_decay={self.ema_decay} must be at least 0 and below 1; 0.999 is usual")


class FusedOptimizer(torch.optim.Optimizer):
    """Base of easymp's optimizers.

    Attributes:
        rule: the source of its kernels.
        options: given to the constructor.

    Example:
        >>> from easymp.optim import AdamW
        >>> parameter = nn.Parameter(torch.ones(2))
        >>> optimizer = AdamW([parameter], lr=0.1, weight_decay=0.0, ema_decay=0.5)
        >>> optimizer.engine.name  # "CuPy" where our kernels run
        'torch fused'
        >>> parameter.sum().backward()
        >>> optimizer.clip_grad_norm_(1.0)
        tensor(1.4142)
        >>> optimizer.step()
        >>> with optimizer.averaged():
        ...     parameter.data
        tensor([0.9500, 0.9500])
    """

    rule: Rule
    options: Options = Options()
    _step_supports_amp_scaling: ClassVar[bool] = True  # torch's flag: reads `grad_scale` and `found_inf`
    _chosen: tuple[tuple[Any, ...], StepChoice] | None = None
    _clip: Clip | None = None  # left to the next step by `clip_grad_norm_`
    _meshes: Sequence[Any] = ()  # of the parameters, now
    counting: Counting | None = None  # of gradients over the ranks; None: by the parameters' meshes
    _steps: dict[Tensor, Tensor] | None = None  # counters of a rule without a step in its state
    lent: Scale | None = None  # the loss scale, which a step by our kernels moves
    first: Callable[[Tensor], int] | None = None  # `Rounding.first` of plain parts

    def __init_subclass__(cls, **given: Any) -> None:
        """Show the words of `OptionWords` in the signature of `cls`, for help() and completion."""
        super().__init_subclass__(**given)
        shown = signature(cls.__init__)
        found = list(shown.parameters.values())[1:]
        if found and found[-1].annotation == "Unpack[OptionWords]":
            last = found.pop()
            for name, kind in OptionWords.__annotations__.items():
                default = False if name in ("maximize", "stochastic_rounding") else None
                how = {"default": default, "annotation": kind.__forward_arg__}
                found.append(last.replace(name=name, kind=last.KEYWORD_ONLY, **how))
        cls.__signature__ = shown.replace(parameters=found)  # type: ignore[attr-defined]

    @classmethod
    def options_of(cls, given: dict[str, Any]) -> Options:
        """`given` as `Options`; a TypeError for other keywords, as of a function."""
        for name in given.keys() - Options.__dataclass_fields__.keys():
            raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {name!r}")
        return Options(**given)

    @property
    def engine(self) -> StepChoice:
        """The implementation that steps the parameters where they are now: its `name` and `reason`."""
        first = next(self._parameters(), None)
        wanted = not any(group.get("fused") is False for group in self.param_groups)
        # A copy of this optimizer chooses for itself.
        facts = (id(self), None if first is None else first.device, type(first), wanted)
        if self._chosen is None or self._chosen[0] != facts:
            self._chosen = facts, self._choose(wanted)
        return self._chosen[1]

    def _choose(self, wanted: bool) -> StepChoice:
        launcher = launcher_of(self, lambda: self.rule) if wanted else "fused=False was asked for"
        if isinstance(launcher, str):
            return self._by_torch(launcher)
        how: Any = {"ema_decay": self.options.ema_decay, "state_dtype": self.options.state_dtype}
        kernels = cuda.FusedStep(
            self, self.rule, launcher, rounding=self.rounding, copies=self._copies, **how
        )
        return StepChoice("CuPy", "our kernels run on this device", kernels)

    def _by_torch(self, reason: str) -> StepChoice:
        return StepChoice("torch", reason)

    def use_plain_torch(self) -> None:
        """Neither kernels nor a fused step of torch's, in groups that leave it open."""
        for group in self.param_groups:
            if group.get("fused") is None:
                group["fused"] = False

    def do_without(self, reason: str) -> None:
        """Leave steps to torch from here on, until the parameters move elsewhere."""
        self.engine  # noqa: B018  # is chosen by now
        assert self._chosen is not None
        self._chosen = self._chosen[0], self._by_torch(reason)

    def _fail(self, error: KernelError) -> None:
        cuda.warn_once(str(error))
        self.do_without(str(error))

    def round_from(self, seed: int) -> bool:
        """Round bf16 parameters stochastically from here on; False where masters are needed instead."""
        # A rule whose state has no step (SGD, Lion) does so only if the options ask for it: a resumed run would draw other bits.
        if self.options.rounding is None and self.rule.counts:
            self.options = replace(self.options, stochastic_rounding=seed)
            self._chosen = None
        return self.options.rounding is not None

    @property
    def rounding(self) -> Rounding | None:
        """Of bf16 parameters and states."""
        rounding = self.options.rounding
        return rounding if rounding is None or self.first is None else replace(rounding, first=self.first)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients.

        Args:
            closure: evaluates the model again and returns the loss, as in torch.

        Returns:
            The result of `closure`, or None.

        Raises:
            StepError: gradients are not those that `clip_grad_norm_` has measured.
        """
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if self._clip is not None and (closure is not None or scale is not None):
            why = "are still scaled: call scaler.unscale_(optimizer) before it"
            if closure is not None:
                why = "the closure will replace: a step with a closure cannot be clipped so"
            raise StepError(f"clip_grad_norm_ measured gradients that {why}")
        loss = evaluated(closure)
        clip, self._clip = self._clip, None
        factor, measured = None if scale is None else inverse(scale), None
        if clip is not None:
            clip.gradients()  # checks that they are those that were measured
            factor, measured = clip.factor, clip.measured
        self.advance(factor, getattr(self, "found_inf", None), measured)
        return loss

    def advance(self, factor: Tensor | None, found_inf: Tensor | None, result: Tensor | None = None) -> None:
        """The update; arguments as of `FusedStep.step`, `result` the kernels' measurement of these gradients."""
        self._meshes = meshes(self._parameters())
        kernels = self.engine.kernels
        if kernels is not None:
            try:
                if self.rule.norm and result is None:  # a collective, even for a rank without gradients
                    result = kernels.measure(over_ranks=self._over_ranks)
                return kernels.step(factor, found_inf, result, self.lent)
            except KernelError as error:  # nothing has moved yet
                self._fail(error)
        moved = [p for p in self._parameters() if p.grad is not None]
        if moved or self.rule.norm:
            averages = Averages(lambda parameter: (parameter, self.state), self.options.ema_decay)
            averages.around(moved, lambda: self.advance_by_torch(factor, found_inf), found_inf)

    def advance_by_torch(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        """The update by torch's operations, of all parameters that have gradients."""
        raise NotImplementedError

    def _parameters(self) -> Iterator[Any]:
        for group in self.param_groups:
            yield from group["params"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._clip = None
        super().zero_grad(set_to_none)

    def _complete(self, group: Group, parameter: Tensor) -> Tensor:
        """Make the missing states of `parameter`, as the kernels have them; returns its counter of steps."""
        if self._steps is None:
            self._steps = {}
        state = self.state[parameter]
        cuda.complete(self.rule, group, parameter, state, self._steps, self.options.state_dtype)
        return state["step"] if self.rule.counts else self._steps[parameter]

    def _round_back(
        self, parameter: Any, number: int, keys: Sequence[str], moved: Sequence[Tensor], counter: Tensor
    ) -> None:
        """Write widened tensors back: `parameter`, which is this `number` of the optimizer's, and its states under `keys`."""
        rounding, state = self.rounding, self.state[parameter]
        held = [local(parameter), *(local(state[key]) for key in keys)]
        for role, (to, value) in enumerate(zip(held, moved)):
            if rounding is not None and to.dtype == torch.bfloat16:
                key = cuda.key_of(rounding.seed, counter, number, to.device)
                to.copy_(cuda.stochastic(value, key, role, rounding.first(parameter)))
            elif to.dtype != value.dtype:
                to.copy_(value)

    def _copies(self, parameter: Any) -> int:
        """The number of ranks that hold each element of `parameter`, of those that are added up."""
        if self.counting is not None:
            return self.counting.copies(parameter)
        ranks = math.prod(mesh.size() for mesh in self._meshes)
        for dim, placement in enumerate(getattr(parameter, "placements", ())):
            ranks //= 1 if placement.is_replicate() else parameter.device_mesh.size(dim)
        return ranks

    def _over_ranks(self, totals: Tensor) -> None:
        if self.counting is not None:
            assert self.counting.add is not None
            self.counting.add(totals)
            return
        for mesh in self._meshes:
            for dim in range(mesh.ndim):
                torch.distributed.all_reduce(totals, group=mesh.get_group(dim))

    def gradient_norm(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all gradients of these parameters, 0-dim; float64 where the device has it. Over the ranks, a collective."""
        device = next((p.device for p in self._parameters()), torch.device("cpu"))
        copies = [self._copies(parameter) for parameter in parameters]
        both = totals_of([values(local(gradient)) for gradient in gradients], copies, device).to(device)
        self._over_ranks(both)  # the kernels' measure adds up two numbers, too
        return both[0].sqrt()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Measure the gradients, and let the next step clip them as it reads them; in memory they stay as they are.

        With torch's GradScaler, call ``scaler.unscale_(optimizer)`` before. Sharded parameters count with their whole gradients, by a
        collective. Under an Accelerator, use its `clip_grad_norm_`.

        Args:
            max_norm: the largest 2-norm over all gradients.

        Returns:
            The 2-norm before (float32, 0-dim, on the device).
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
        having = [p for p in self._parameters() if EMA in self.state.get(p, {})]
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
        order = [i for group in state_dict["param_groups"] for i in group["params"]]
        named = dict(zip(order, self._parameters()))
        for i, saved in state_dict["state"].items():
            for key, value in saved.items() if i in named else ():
                now = self.state[named[i]].get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                    # torch gives states their parameter's dtype: numbers that were kept in another one would be rounded.
                    self.state[named[i]][key] = value.to(now.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self.options}
