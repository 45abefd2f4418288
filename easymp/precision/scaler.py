"""The loss scale: one scaler for fp16 runs, whatever rule moves the scale.

Gradients below 6e-8 are zero in fp16, so the loss is multiplied by a scale before backward and gradients are divided by it
before the step. An overflow skips the step and lowers the scale; a run of good steps raises it. Rules differ only in numbers:

- torch and Apex: ×2 after `growth_interval` good steps, ÷2 at each overflow;
- DeepSpeed: growth one good step later (`growth_delay=1`), and the first `hysteresis - 1` overflows lower nothing.

Scale and counters live on the device; nothing here waits for it, but for the step of an optimizer that is not fused. They move in a launch
of `update`'s own, or with the step, where kernels of ours run it and no other optimizer divides by this scale (`lend`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import cuda
from ..base.accumulation import Phase, UpdateWindow
from ..base.dtensor import local
from ..base.pytree import map_leaves
from ..distributed import World
from ..errors import SettingError, StepError
from ..options import GradScalerKwargs

if TYPE_CHECKING:
    from ..cuda.measure import Gradients
    from ..cuda.rule import Scale

NO_GRADIENTS = "unscale_ or step() before any backward(): this optimizer has no gradients yet"
PAST = (
    "the gradients do not come from accelerator.backward(loss): loss.backward() was called by itself, which {}. Replace it by "
    "accelerator.backward(loss)"
)


@dataclass(frozen=True)
class LossScale:
    """The rule by which the scale moves.

    Attributes:
        initial: first scale.
        growth_factor, backoff_factor: what it is multiplied by.
        growth_interval: good steps in a row before it grows.
        growth_delay: further good steps before the first growth after an overflow (DeepSpeed: 1).
        hysteresis: overflows before it falls; refilled by growth, or by each good step where `refill_each_step`.
        minimum, maximum: bounds.
        raise_at_minimum: an overflow at the minimum is an error.
        dynamic: False never moves it.
    """

    initial: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_delay: int = 0
    hysteresis: int = 1
    refill_each_step: bool = False
    minimum: float = 0.0
    maximum: float = float("inf")
    raise_at_minimum: bool = False
    dynamic: bool = True

    def __post_init__(self) -> None:
        for name, good, rule in (
            ("initial", 0 < self.initial < float("inf"), "a positive finite number"),
            ("growth_factor", self.growth_factor > 1 or not self.dynamic, "above 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1 or not self.dynamic, "between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "at least 1"),
            ("hysteresis", self.hysteresis >= 1, "at least 1"),
            ("minimum", 0 <= self.minimum <= self.maximum, "at least 0 and at most the maximum"),
        ):
            if not good:
                raise SettingError(f"{name}={getattr(self, name)!r} of the loss scale must be {rule}")


def rule_from(options: GradScalerKwargs) -> LossScale:
    """The rule that a caller's options ask for."""
    return LossScale(
        initial=options.init_scale,
        growth_factor=options.growth_factor,
        backoff_factor=options.backoff_factor,
        growth_interval=options.growth_interval,
        hysteresis=options.hysteresis,
        minimum=options.min_scale,
        maximum=options.max_scale,
        dynamic=options.dynamic,
        growth_delay=options.growth_delay,
        refill_each_step=options.refill_each_step,
        raise_at_minimum=options.raise_at_minimum,
    )


class Scaler:
    """Scales losses, unscales gradients, skips overflowed steps, and moves the scale.

    ``scale(loss).backward()``, ``unscale_(optimizer)`` (at most once, before clipping), ``step(optimizer)``, ``update()``.
    With ``enabled=False`` each is the plain thing: the loss, nothing, ``optimizer.step()``, nothing.

    Args:
        rule: how the scale moves.
        world: an overflow on one of its ranks counts on all.
        enabled: False scales by one.
        guard: only skip steps whose gradients are not finite: the scale is 1, and is in no checkpoint.
        window: of a run, whose next backward calls `update`; until then `get_scale` and `state_dict` say what it will make of the scale.

    Attributes:
        found: told at each step of a run whether it is skipped.
        agree: False where not every rank takes part in the step (uneven inputs).
        sharers: optimizers that divide by this scale, as far as known: only one that is alone may move it as it steps.
    """

    def __init__(
        self,
        rule: LossScale | None = None,
        world: World | None = None,
        enabled: bool = True,
        guard: bool = False,
        window: UpdateWindow | None = None,
    ) -> None:
        self.rule = LossScale(initial=1.0, dynamic=False) if guard else rule or LossScale()
        self.enabled = enabled or guard
        self.scales = enabled and not guard
        self.found: Callable[[Tensor], None] | None = None
        self.agree = True
        self.sharers = 0
        self._world = world
        self._runs = window is not None
        self._window = window or UpdateWindow()
        self._seen = False  # whether a loss has been scaled since `update`
        # int32 [3] on the device of the first loss, as `Scale` has it; the next three are views of it.
        self._state: Tensor | None = None
        self._scale: Tensor | None = None  # float32, 0-dim
        self._good: Tensor | None = None
        self._patience: Tensor | None = None
        self._law: Tensor | None = None
        self._unscalers: dict[tuple[torch.device, torch.dtype], Gradients] = {}
        self._pending: dict[str, Any] = {
            "scale": self.rule.initial,
            "good": 0,
            "patience": self.rule.hysteresis,
        }

    # -- the loss -----------------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """`outputs` times the scale: a tensor, or nested lists, tuples and dicts of them.

        Raises:
            StepError: something else than a tensor is in them.
        """
        if not self.enabled:
            return outputs
        return self._scaled(outputs) if isinstance(outputs, Tensor) else map_leaves(self._scaled, outputs)

    def _scaled(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise StepError(
                f"scale() takes tensors, not {type(loss).__name__}: pass the loss before .item() or float()"
            )
        self._seen = True
        scale = self._on(loss.device)
        return loss * _to(scale, loss.device) if self.scales else loss

    @property
    def current(self) -> Tensor:
        """The scale, on its device."""
        assert self._scale is not None, "a step is under way"
        return self._scale

    def _on(self, device: torch.device) -> Tensor:
        if self._scale is None:
            start = self._pending
            self._state = torch.empty(3, dtype=torch.int32, device=device)
            _, self._good, self._patience = self._state.unbind()
            self._scale = self._state[:1].view(torch.float32)[0].fill_(start["scale"])
            self._good.fill_(start["good"])
            self._patience.fill_(start["patience"])
        return self._scale

    # -- the gradients ------------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide `optimizer`'s gradients by the scale, and note whether all are finite.

        Raises:
            StepError: called twice, or after the step.
        """
        if not self.enabled:
            return
        turn = self._window.turn(optimizer)
        turn.check(Phase.UNSCALED)
        self._check_still()
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        self._check_scaled(bool(gradients))
        if self.scales and any(g.dtype == torch.float16 for g in gradients):
            raise StepError(
                "a gradient is float16: dividing it by the scale would lose it. Keep fp32 parameters under fp16 (no .half())"
            )
        shared = self._world is not None and self._world.size > 1 and self.agree
        if not gradients and not (shared and self._scale is not None):
            raise StepError(NO_GRADIENTS)
        home = gradients[0].device if gradients else self._world.device  # type: ignore[union-attr]
        found = self.divide(gradients, home)
        found = self.agreed(found, bool(gradients))
        turn.found_inf = _to(found, home)  # where the step reads it: of shards in the host's memory, the host
        turn.enter(Phase.UNSCALED)

    def _check_scaled(self, here: bool) -> None:
        if (
            here and not self._seen and self.found is not None
        ):  # in a run: a scaler alone may be given any gradients
            raise StepError(
                PAST.format(
                    "leaves the loss scale out" if self.scales else "nonfinite='skip' and 'raise' do not see"
                )
            )

    def divide(self, gradients: Sequence[Tensor], home: torch.device) -> Tensor:
        """Divide `gradients`, in memory, by the scale; above 0 (fp32, 0-dim) where one of this rank is not finite.

        Without a part in the rounds of optimizers, for who accounts for them by another rule. fp16 ones lose what is below 6e-8.

        Args:
            home: device of the scale, if no loss has been scaled yet.
        """
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in gradients:
            grad = local(grad._values() if grad.is_sparse else grad)
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        scale = self._on(home)
        inverse = scale.to(_widest(scale)).reciprocal().float()
        found = torch.zeros_like(scale)
        for (device, dtype), grads in by_kind.items():
            here = found if device == found.device else torch.zeros((), device=device)
            launcher = None
            if dtype in cuda.UNSCALE:
                launcher = cuda.launcher_with(device, [cuda.UNSCALE[dtype], cuda.TOTAL])
            if launcher is not None:
                unscaler = self._unscalers.setdefault((device, dtype), cuda.Gradients(launcher))
                bad, grads = unscaler.unscale(grads, _to(scale, device))
                torch.maximum(here, bad, out=here)
            if grads:
                torch._amp_foreach_non_finite_check_and_unscale_(grads, here, _to(inverse, device))
            if here is not found:
                found = torch.maximum(found, _to(here, found.device))
        return found

    def agreed(self, found: Tensor, here: bool) -> Tensor:
        """`found` on any rank.

        Args:
            here: whether this rank holds gradients; it may hold none of the parameters that got some (a stage, a shard).

        Raises:
            StepError: no rank does.
        """
        if self._world is not None and self.agree:
            found = self._world.reduce(found if here else found - 1, "max")  # below zero: nor does any other
        if not here and (self._world is None or not self.agree or found.item() < 0):
            raise StepError(NO_GRADIENTS)
        return found

    def scale_of(self, optimizers: Sequence[torch.optim.Optimizer], here: bool) -> Tensor | None:
        """The scale that the gradients of all these still have, for who measures them; None: they are not scaled.

        Args:
            here: whether this rank holds gradients.

        Raises:
            StepError: no loss has been scaled.
        """
        if not self.enabled or any(self._window.turn(o).phase is not Phase.ACCUMULATING for o in optimizers):
            return None
        self._check_scaled(here)
        if self._scale is None:
            raise StepError(NO_GRADIENTS)
        self._check_still()
        return self._scale

    def _check_still(self) -> None:
        if any(turn.moved for turn in self._window.turns.values()):
            raise StepError(
                "the loss scale has moved with the step of the only prepared optimizer, and gradients of another one are still multiplied "
                "by what it was: prepare() all optimizers before the first step, or step this one before that one"
            )

    def take(self, optimizers: Sequence[torch.optim.Optimizer], found: Tensor | None) -> None:
        """The steps of `optimizers` will divide by the scale; their gradients have been measured.

        Args:
            found: above 0 where one is not finite, on any rank; None: it is known already.
        """
        for optimizer in optimizers:
            turn = self._window.turn(optimizer)
            turn.enter(Phase.CLIPPED)
            if found is not None:
                turn.found_inf = found

    def ensure_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """`unscale_`, unless that was done since the last update: clipping part by part asks more than once."""
        if self._window.turn(optimizer).phase is Phase.ACCUMULATING:
            self.unscale_(optimizer)

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step()``, unless one of its gradients overflowed on any rank.

        A fused optimizer is told on the device; any other one costs a wait for the flag, as in torch.

        Raises:
            StepError: a second step before update().
        """
        if not self.enabled:
            return optimizer.step(*args, **kwargs)
        if (args and args[0] is not None) or kwargs.get("closure") is not None:
            raise StepError(
                "closures cannot be used with a loss scale, nor with nonfinite='skip' or 'raise': an overflow inside them could not be "
                "skipped"
            )
        found = self.begin_step(optimizer)
        if takes_found_inf(optimizer):
            return step_told(optimizer, found, None, *args, **kwargs)
        return None if found.item() else optimizer.step(*args, **kwargs)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """`optimizer` steps now; returns whether it is to do nothing: above 0. Its gradients are divided, if nobody has done it.

        Raises:
            StepError: a second step before update().
        """
        turn = self._window.turn(optimizer)
        turn.check(Phase.STEPPED)
        if turn.phase is Phase.ACCUMULATING:
            self.unscale_(optimizer)
        turn.enter(Phase.STEPPED)
        found = turn.found_inf
        assert found is not None
        turn.skipped = found
        if self.found is not None:
            self.found(found)
        return found

    def lend(self, optimizer: torch.optim.Optimizer) -> Scale | None:
        """The scale, for `optimizer`'s step to move it as `update` would, if it can; after `begin_step`.

        None where another optimizer divides by it, too, or the rule does not move it, or waits for the device to say that it cannot.
        """
        turn, rule, state = self._window.turn(optimizer), self.rule, self._state
        if state is None or self.sharers != 1 or self._window.begun != 1:
            return None
        if not rule.dynamic or rule.raise_at_minimum or state.device.type not in ("cpu", "cuda"):
            return None
        if self._law is None or self._law.device != state.device:
            numbers = (rule.growth_factor, rule.backoff_factor, rule.growth_interval, rule.growth_delay)
            numbers = (*numbers, rule.hysteresis, rule.refill_each_step, rule.minimum, rule.maximum)
            self._law = cuda.upload(tuple(map(float, numbers)), torch.float64, state.device)
        turn.lent = cuda.Scale(state, self._law)
        return turn.lent

    def skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer`'s last step was skipped. Waits for the device."""
        found = self._window.turn(optimizer).skipped
        return found is not None and bool(found.item())

    def recall(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        """`optimizer`'s last step, in a run before this one, was skipped or not."""
        if self.enabled:
            self._window.turn(optimizer).skipped = torch.tensor(float(skipped))

    # -- the scale ----------------------------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale after the optimizers' steps, and make them ready for the next round.

        Args:
            new_scale: set it to this instead. The counters stay, or are what a step has made of them that moved the scale (`lend`).

        Raises:
            StepError: no optimizer has unscaled or stepped.
        """
        if not self.enabled:
            return
        if new_scale is not None and self._runs:
            self.settle()
        found, moved = self._found(), any(turn.moved for turn in self._window.turns.values())
        self._seen = False
        self._window.begin()
        if moved:
            torch.autograd.graph.increment_version(self._state)  # type: ignore[arg-type]  # written to past autograd
        if new_scale is not None:
            if self._scale is None:
                self._pending["scale"] = float(new_scale)
            elif isinstance(new_scale, Tensor):
                self._scale.copy_(new_scale.detach())
            else:
                self._scale.fill_(new_scale)
            return
        if found is None:
            raise StepError("update() before any step(): there is nothing to learn from")
        if not moved:
            self.advance(found)

    def _found(self) -> Tensor | None:
        """Above 0 where a gradient of any optimizer was not finite in this update; None where none has unscaled or stepped."""
        found = [turn.found_inf for turn in self._window.turns.values() if turn.found_inf is not None]
        if len(found) < 2:
            return found[0] if found else None
        return torch.stack([f.to(found[0].device) for f in found]).max()

    def settle(self) -> None:
        """`update()`, if an optimizer has stepped since the last one."""
        if any(turn.phase is Phase.STEPPED for turn in self._window.turns.values()):
            self.update()

    @contextmanager
    def _ahead(self) -> Iterator[None]:
        """Inside, scale and counters are as the next backward of a run will make them; afterwards as before."""
        turns, state = list(self._window.turns.values()), self._state
        stepped = any(turn.phase is Phase.STEPPED for turn in turns)
        found = self._found() if self._runs and stepped and not any(turn.moved for turn in turns) else None
        if found is None or state is None:
            yield
            return
        before = state.clone()
        try:
            self.advance(found)
            yield
        finally:
            state.copy_(before)

    def advance(self, found_inf: Tensor) -> None:
        """One step of the rule: `found_inf` is 0 after a good step, anything above after an overflow."""
        rule, scale = self.rule, self._on(found_inf.device)
        found_inf = _to(found_inf, scale.device)
        good, patience = self._good, self._patience
        assert good is not None
        assert patience is not None
        if not rule.dynamic:
            return
        if (rule.growth_delay, rule.hysteresis, rule.minimum, rule.maximum) == (0, 1, 0.0, float("inf")):
            # torch's kernel is this very rule in one launch; found_inf == 0 means good there, too.
            torch._amp_update_scale_(
                scale, good, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
            )
            return
        bad = found_inf > 0
        falls = bad & (patience <= 1)
        if rule.raise_at_minimum and bool(falls & (scale <= rule.minimum)):
            raise StepError(
                f"the gradients overflowed at the smallest loss scale, {rule.minimum:g}: it cannot be decreased anymore. "
                "The loss itself is likely not finite: look at the data and the learning rate"
            )
        count = torch.where(bad, 0, good + 1)
        grows = count >= rule.growth_interval + rule.growth_delay
        lower = _times(scale, rule.backoff_factor).clamp(min=rule.minimum)
        higher = _times(scale, rule.growth_factor).clamp(max=rule.maximum)
        higher = torch.where(
            higher.isfinite(), higher, scale
        )  # an infinite scale would never come down again
        refill = (~bad) if rule.refill_each_step else grows
        patience.copy_(
            torch.where(refill, rule.hysteresis, torch.where(bad & ~falls, patience - 1, patience))
        )
        scale.copy_(torch.where(falls, lower, torch.where(grows, higher, scale)))
        good.copy_(torch.where(grows, rule.growth_delay, count))

    @property
    def in_use(self) -> float:
        """The scale of the gradients that there are. Waits for the device."""
        return float(self._pending["scale"] if self._scale is None else self._scale)

    def get_scale(self) -> float:
        """The scale as a number. Waits for the device."""
        if not self.enabled:
            return 1.0
        with self._ahead():
            return self.in_use

    # -- the state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch.amp.GradScaler's keys and, for rules that torch lacks, `hysteresis` still left."""
        if not self.scales:
            return {}
        with self._ahead():
            good, patience = self._pending["good"], self._pending["patience"]
            if self._good is not None and self._patience is not None:
                good, patience = int(self._good), int(self._patience)
            scale = self.in_use
        return {
            "scale": scale,
            "growth_factor": self.rule.growth_factor,
            "backoff_factor": self.rule.backoff_factor,
            "growth_interval": self.rule.growth_interval,
            "_growth_tracker": good,
            "hysteresis": patience,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take scale and counters from `state_dict`'s result, ours or torch.amp.GradScaler's; the rule stays this scaler's."""
        if not self.scales:
            return
        if not state:
            raise SettingError("this state comes from a scaler that was off: there is no scale in it")
        self._pending = {
            "scale": float(state["scale"]),
            # Counters of a longer rule would lie beyond this one's: torch's kernel waits for equality, and would never grow.
            "good": min(
                int(state["_growth_tracker"]), self.rule.growth_interval + self.rule.growth_delay - 1
            ),
            "patience": min(int(state.get("hysteresis", self.rule.hysteresis)), self.rule.hysteresis),
        }
        device = None if self._scale is None else self._scale.device
        self._state = self._scale = self._good = self._patience = None
        self._window.begin()
        if device is not None:
            self._on(device)


def _to(number: Tensor, device: torch.device) -> Tensor:
    """There, without a wait where a device reads it: the host would read before it has come."""
    return number.to(device, non_blocking=device.type != "cpu")


def _times(scale: Tensor, factor: float) -> Tensor:
    """Rounded once, as torch's kernel and ours have it: ranks may run either."""
    return (scale.to(_widest(scale)) * factor).float()


def _widest(tensor: Tensor) -> torch.dtype:
    """The widest float of its device: mps has no float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def step_told(
    optimizer: torch.optim.Optimizer,
    found: Tensor | None,
    grad_scale: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A step by torch's own protocol for fused optimizers, GradScaler's too: gradients are divided by `grad_scale` as they are read, and
    nothing changes where `found` is above 0."""
    it: Any = optimizer
    it.found_inf, it.grad_scale = found, grad_scale
    try:
        return it.step(*args, **kwargs)
    finally:
        del it.found_inf, it.grad_scale


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step reads `found_inf` on the device: that of a torch optimizer of which every group runs fused, or of one whose class
    says so itself.

    Not so SGD with momentum before its first step: torch leaves the momentum of a skipped first step uninitialised.
    """
    kind = type(
        optimizer
    )  # of a subclass of torch's, the instance says so, too, although its step may do more than torch's
    if hasattr(kind, "_step_supports_amp_scaling"):
        return bool(getattr(optimizer, "_step_supports_amp_scaling"))  # noqa: B009
    if not kind.__module__.startswith("torch.optim") or not all(
        g.get("fused") for g in optimizer.param_groups
    ):
        return False
    return not any(g.get("momentum") for g in optimizer.param_groups) or bool(optimizer.state)
