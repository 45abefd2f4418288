"""What easymp's own optimizers have in common: a step by our kernels where they run, and else by torch, with equal results.

Either way the factor of a loss scale and of clipping, and the flag of an overflow, come by torch's protocol for fused optimizers
(attributes ``grad_scale`` and ``found_inf`` during a step), so torch's GradScaler drives them without a wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .. import cuda
from ..base.dtensor import local
from ..errors import SettingError
from .torch_step import fill_momentum, fuse, multiply, wide

if TYPE_CHECKING:
    from ..cuda.rounding import Rounding
    from ..cuda.rule import Group, Rule

import math
from collections.abc import Callable
from dataclasses import field, replace
from typing import TYPE_CHECKING

from ..base.dtensor import meshes
from ..cuda import EMA
from ..errors import KernelError, StepError
from ..protocols import Counting
from .masters import Averages
from .torch_step import keep_implementation, values, wide_norms

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


# -- A step by torch where states have another dtype than their parameter, or bf16 is rounded stochastically, which no step of torch does.


def fill(
    rule: Rule, group: Group, parameter: Tensor, state: dict[str, Any], dtype: torch.dtype | None
) -> tuple[dict[str, Any], bool]:
    """`state` with all that `rule` has there, in `dtype`; and whether some of it was missing."""
    fresh = False
    for key in rule.uses(group):
        value = state.get(key)
        fresh |= value is None
        if value is None:
            state[key] = torch.full_like(parameter, rule.starts(group), dtype=dtype, requires_grad=False)
        elif dtype is not None and value.dtype != dtype:
            state[key] = value.to(dtype)
    for key in ("step",) * rule.counts + (rule.scalar,) * bool(rule.scalar):
        value = state.get(key, 0.0)
        if not isinstance(value, Tensor) or value.device != parameter.device or value.dtype != torch.float32:
            state[key] = torch.as_tensor(value).to(parameter.device, torch.float32)
    return state, fresh


class Widened:
    """Steps of one optimizer.

    Args:
        rule: without a survey.
        dtype: of states; None: their parameter's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        dtype: torch.dtype | None,
        rounding: Rounding | None,
    ) -> None:
        self._optimizer, self._rule, self._dtype, self._rounding = optimizer, rule, dtype, rounding
        self._steps: dict[Tensor, Tensor] = {}  # where the state has none

    def step(self, parameters: Iterable[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        """Waits for the flag, where there is one."""
        if found_inf is not None and found_inf.item():
            return
        mine = {id(p) for p in parameters}
        number = 0
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in mine:
                    self._move(parameter, group, number, factor)
                number += 1

    def _move(self, parameter: Any, group: Group, number: int, factor: Tensor | None) -> None:
        state, fresh = fill(self._rule, group, parameter, self._optimizer.state[parameter], self._dtype)
        if not self._rule.counts and (fresh or parameter not in self._steps):
            self._steps[parameter] = torch.tensor(0.0 if fresh else 1.0)
        counter = state["step"] if self._rule.counts else self._steps[parameter]
        counter += 1
        keys = self._rule.uses(group)
        held = [local(parameter), *(local(state[key]) for key in keys)]
        moved = [wide(t) for t in held]
        gradient = wide(local(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad))
        if factor is not None:
            gradient = gradient * factor.to(gradient.device)
        self._rule.reference(moved[0], gradient, dict(zip(keys, moved[1:])), group, int(counter.item()))
        round_back([held], [moved], [counter], [number], self._rounding, [parameter])


def round_back(
    held: Sequence[Sequence[Tensor]],
    moved: Sequence[Sequence[Tensor]],
    counters: Sequence[Tensor],
    numbers: Sequence[int],
    rounding: Rounding | None,
    parameters: Sequence[Any],
) -> None:
    """Write what was widened back: for each of `parameters`, itself and its states, in their order.

    Args:
        counters: steps, this one counted.
        numbers: of the parameters in their optimizer.
    """
    nearest: tuple[list[Tensor], list[Tensor]] = ([], [])
    for mine, wides, counter, number, parameter in zip(held, moved, counters, numbers, parameters):
        for role, (to, value) in enumerate(zip(mine, wides)):
            if rounding is not None and to.dtype == torch.bfloat16:
                key = cuda.key_of(rounding.seed, counter, number, to.device)
                to.copy_(cuda.stochastic(value, key, role, rounding.first(parameter)))
            elif to.dtype != value.dtype:
                nearest[0].append(to)
                nearest[1].append(value)
    if nearest[0]:
        torch._foreach_copy_(*nearest)


# -- Optimizers that torch has, too, stepped by our kernels where they run. Elsewhere by torch's own step, fused if it can.


class TorchsOptimizer(FusedOptimizer):
    """An optimizer that torch has, too.

    Attributes:
        torchs: its class there.
    """

    torchs: ClassVar[type[torch.optim.Optimizer]]
    _fused_here: bool = False  # whether the fused step was our choice

    def _otherwise(self, reason: str) -> Way:
        if self.options.state_dtype is not None or self.options.rounding is not None:
            return Way(
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
                return Way("torch", f"{reason}; {why_not}")
        fused = all(group.get("fused") for group in self.param_groups)
        return Way("torch fused" if fused else "torch", reason)

    def advance_by_torch(
        self, parameters: Sequence[Any], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        if self.options.state_dtype is not None or self.options.rounding is not None:
            return self.widened.step(parameters, factor, found_inf)
        step = self.torchs.step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]  # the hooks have been called with our own step
        hidden = self._hide_all_but(parameters)
        try:
            if all(group.get("fused") for group in self.param_groups) and not any(
                p.grad.is_sparse for p in parameters
            ):
                fill_momentum(self, self.torchs)
                self._told(step, None if factor is None else factor.reciprocal(), found_inf)
            elif found_inf is None or not found_inf.item():
                if factor is not None:
                    multiply([p.grad for p in parameters], factor)
                with self._plain():
                    self._told(step, None, None)
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """torch's step that is not fused, which takes sparse gradients."""
        asked = [group["fused"] for group in self.param_groups]
        for group in self.param_groups:
            group["fused"] = False
        try:
            yield
        finally:
            for group, fused in zip(self.param_groups, asked):
                group["fused"] = fused

    def _hide_all_but(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        mine = {id(p) for p in parameters}
        hidden = [(p, p.grad) for p in self._parameters() if p.grad is not None and id(p) not in mine]
        for parameter, _ in hidden:
            parameter.grad = None
        return hidden

    def _told(self, step: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """torch's step, which reads these where it is fused."""
        given = {name: vars(self)[name] for name in ("grad_scale", "found_inf") if name in vars(self)}
        vars(self).update(grad_scale=grad_scale, found_inf=found_inf)
        try:
            step(self)
        finally:
            for name in ("grad_scale", "found_inf"):
                del vars(self)[name]
            vars(self).update(given)


# -- Our optimizers that torch does not have: where kernels do not run, by operations on lists of tensors (foreach), without a wait.


@dataclass(frozen=True, eq=False)
class Lists:
    """Parameters of one group, on one device.

    Attributes:
        parameters: as the group holds them.
        p, g: what of them lies here, and their gradients; in fp32 or wider.
        states: likewise, by their keys.
        steps: number of this step, from 1, [parameters]; float64 where the device has it. None where the state has none.
        go: 1, or 0 if nothing is to change.
    """

    parameters: list[Tensor]
    p: list[Tensor]
    g: list[Tensor]
    states: dict[str, list[Tensor]]
    steps: Tensor | None
    go: Any


class ListedOptimizer(FusedOptimizer):
    """Base of optimizers that move lists of tensors."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                kind = type(self).__name__
                del self.param_groups[-1]
                raise SettingError(
                    f"{kind} moves real floating-point parameters, not {parameter.dtype}: give it to another optimizer"
                )

    def advance_by_torch(
        self, parameters: Sequence[Tensor], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        if self.options.rounding is not None and not self.rule.counts:
            return self.widened.step(parameters, factor, found_inf)
        mine = {id(p) for p in parameters}
        lists: list[tuple[dict[str, Any], Lists]] = []
        for group in self.param_groups:
            by_device: dict[torch.device, list[Tensor]] = {}
            for parameter in group["params"]:
                if id(parameter) in mine:
                    by_device.setdefault(parameter.device, []).append(parameter)
            lists += [(group, self._listed(group, of, factor, found_inf)) for of in by_device.values()]
        self.advance_lists(lists)
        order = {id(p): number for number, p in enumerate(self._parameters())}
        for group, of in lists:
            keys = self.rule.uses(group)
            held = [[local(p), *(local(self.state[p][key]) for key in keys)] for p in of.parameters]
            moved = [list(row) for row in zip(of.p, *(of.states[key] for key in keys))]
            numbers = [order[id(p)] for p in of.parameters]
            counters = [self.state[p].get("step", of.p[0]) for p in of.parameters]
            round_back(held, moved, counters, numbers, self.rounding, of.parameters)

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
        uses = self.rule.uses(group)
        for parameter in parameters:
            fill(self.rule, group, parameter, self.state[parameter], self.options.state_dtype)
        steps = None
        if self.rule.counts:
            torch._foreach_add_([self.state[p]["step"] for p in parameters], go)
            steps = torch.stack([self.state[p]["step"] for p in parameters]).clamp(min=1.0)
            steps = steps if device.type == "mps" else steps.double()
        states = {key: [wide(local(self.state[p][key])) for p in parameters] for key in uses}
        return Lists(parameters, [wide(local(p)) for p in parameters], grads, states, steps, go)

    def advance_lists(self, lists: Sequence[tuple[dict[str, Any], Lists]]) -> None:
        """Move them, in place, and what states of one number a tensor there are."""
        raise NotImplementedError


def signed(group: dict[str, Any], lists: Lists) -> list[Tensor]:
    """The gradients to go down along."""
    return list(torch._foreach_neg(lists.g)) if group["maximize"] else lists.g


def check(**numbers: Any) -> None:
    """Raises SettingError where an optimizer's number is below 0, or one of its betas is not below 1."""
    for name, value in numbers.items():
        if name == "betas":
            if len(value) != 2 or not all(0.0 <= b < 1.0 for b in value):
                raise SettingError(
                    f"betas={value} must be two numbers, at least 0 and below 1; (0.9, 0.999) is usual"
                )
        elif not value >= 0.0:
            raise SettingError(f"{name}={value} must be a number of at least 0")
