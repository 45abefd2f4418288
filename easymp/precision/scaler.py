"""The loss scale: one scaler for fp16 runs, with the rule of a `GradScalerKwargs`.

Gradients below 6e-8 are zero in fp16, so the loss is multiplied by a scale before backward and gradients are divided by it
before the step. An overflow skips the step and lowers the scale; a run of good steps raises it. Rules differ only in numbers:

- torch and Apex: ×2 after `growth_interval` good steps, ÷2 at each overflow;
- DeepSpeed: growth one good step later (`growth_delay=1`), and the first `hysteresis - 1` overflows lower nothing.

Scale and counters are on the device, and only the step of an optimizer that is not fused waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import cuda
from ..base.accumulation import Phase, UpdateWindow
from ..base.dtensor import local
from ..base.pytree import map_leaves
from ..distributed import World
from ..errors import SettingError, StepError
from ..options import GradScalerKwargs

if TYPE_CHECKING:
    from ..cuda.rule import Scale

NO_GRADIENTS = "unscale_ or step() before any backward(): this optimizer has no gradients yet"
GUARD = GradScalerKwargs(init_scale=1.0, dynamic=False)


class Held(NamedTuple):
    """The scale and its counters on a device."""

    state: Tensor  # int32 [3], as `cuda.Scale` has it; the others are views of it
    scale: Tensor  # float32, 0-dim
    good: Tensor
    patience: Tensor


class Scaler:
    """Scales losses, unscales gradients, skips overflowed steps, and moves the scale.

    ``scale(loss).backward()``, ``unscale_(optimizer)`` (at most once, before clipping), ``step(optimizer)``, ``update()``.
    With ``enabled=False`` they are the loss, nothing, ``optimizer.step()`` and nothing.

    Args:
        world: an overflow on one of its ranks counts on all.
        guard: only skip steps with gradients that are not finite: the scale is 1, and checkpoints leave it out.
        window: of a run: its next backward calls `update`; until then `get_scale` and `state_dict` foresee that.

    Attributes:
        found: told at each step of a run whether it is skipped.
        unscaled: told the same where gradients are divided in memory, before a clip changes them.
        agree: False where not every rank takes part in the step (uneven inputs).
        sharers: optimizers that divide by this scale; only a single one may move it as it steps.
    """

    def __init__(
        self,
        rule: GradScalerKwargs | None = None,
        world: World | None = None,
        enabled: bool = True,
        guard: bool = False,
        window: UpdateWindow | None = None,
    ) -> None:
        self.rule = GUARD if guard else rule or GradScalerKwargs()
        self.enabled = enabled or guard
        self.scales = enabled and not guard
        self.found: Callable[[Tensor], None] | None = None
        self.unscaled: Callable[[Tensor], None] | None = None
        self.agree = True
        self.sharers = 0
        self._world = world
        self._runs = window is not None
        self._window = window or UpdateWindow()
        self._seen = False  # whether a loss has been scaled since `update`
        self._held: Held | None = None  # on the device of the first loss
        self._law: Tensor | None = None
        self._pending: tuple[float, int, int] = (self.rule.init_scale, 0, self.rule.hysteresis)

    def scale(self, outputs: Any) -> Any:
        """`outputs`, a tensor or a tree of tensors, times the scale."""
        if not self.enabled:
            return outputs
        return self._scaled(outputs) if isinstance(outputs, Tensor) else map_leaves(self._scaled, outputs)

    def _scaled(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise StepError(
                f"scale() takes tensors, not {type(loss).__name__}: pass the loss before .item() or float()"
            )
        self._seen = True
        held = self._on(loss.device)
        return loss * to_device(held.scale, loss.device) if self.scales else loss

    @property
    def current(self) -> Tensor:
        """The scale, on its device, while a step is under way."""
        assert self._held is not None
        return self._held.scale

    def _on(self, device: torch.device) -> Held:
        if self._held is None:
            scale, good, patience = self._pending
            state = torch.empty(3, dtype=torch.int32, device=device)
            number = state[:1].view(torch.float32)[0].fill_(scale)
            self._held = Held(state, number, state[1].fill_(good), state[2].fill_(patience))
        return self._held

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide `optimizer`'s gradients by the scale, and note whether all are finite. StepError if done before."""
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
        if not gradients and not (shared and self._held is not None):
            raise StepError(NO_GRADIENTS)
        home = gradients[0].device if gradients else self._world.device  # type: ignore[union-attr]
        found = self.agreed(self.divide(gradients, home), bool(gradients))
        if self.unscaled is not None:
            self.unscaled(found)
        # Where the step reads it: for shards in host memory, the host.
        turn.found_inf = to_device(found, home)
        turn.enter(Phase.UNSCALED)

    def _check_scaled(self, here: bool) -> None:
        if here and not self._seen and self.found is not None:  # in a run; a scaler alone takes any gradients
            missed = "leaves the loss scale out" if self.scales else "nonfinite='skip' and 'raise' do not see"
            raise StepError(
                f"the gradients do not come from accelerator.backward(loss): loss.backward() was called by itself, which {missed}. "
                "Replace it by accelerator.backward(loss)"
            )

    def divide(self, gradients: Sequence[Tensor], home: torch.device) -> Tensor:
        """Divide `gradients`, in memory, by the scale; enters no phase. Returns above 0 (fp32, 0-dim) if one here is not finite."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in gradients:
            grad = local(grad._values() if grad.is_sparse else grad)
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        scale = self._on(home).scale
        factor = inverse(scale)
        found = torch.zeros_like(scale)
        for (device, _), grads in by_kind.items():
            here = found if device == found.device else torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, here, to_device(factor, device))
            if here is not found:
                found = torch.maximum(found, to_device(here, found.device))
        return found

    def agreed(self, found: Tensor, here: bool) -> Tensor:
        """The maximum of `found` over the ranks; StepError if no rank holds gradients (`here`: this one does)."""
        together = self._world is not None and self.agree
        if together:
            found = self._world.reduce(found if here else found - 1, "max")  # type: ignore[union-attr]
        if not here and (not together or found.item() < 0):  # below zero: no other rank has any
            raise StepError(NO_GRADIENTS)
        return found

    def scale_of(self, optimizers: Sequence[Optimizer], here: bool) -> Tensor | None:
        """The scale that the gradients of all these still have; None if they are not scaled. StepError if no loss has been scaled."""
        if not self.enabled or any(self._window.turn(o).phase is not Phase.ACCUMULATING for o in optimizers):
            return None
        self._check_scaled(here)
        if self._held is None:
            raise StepError(NO_GRADIENTS)
        self._check_still()
        return self._held.scale

    def _moved(self) -> bool:
        return any(turn.moved for turn in self._window.turns.values())

    def _check_still(self) -> None:
        if self._moved():
            raise StepError(
                "the loss scale has moved with the step of the only prepared optimizer, and gradients of another one are still multiplied "
                "by its old value: prepare() all optimizers before the first step, or step this one before that one"
            )

    def take(self, optimizers: Sequence[Optimizer], found: Tensor | None) -> None:
        """Let the steps of `optimizers` divide by the scale; `found` is above 0 if one of the measured gradients is not finite."""
        for optimizer in optimizers:
            turn = self._window.turn(optimizer)
            turn.enter(Phase.CLIPPED)
            if found is not None:
                turn.found_inf = found

    def ensure_unscaled(self, optimizer: Optimizer) -> None:
        """`unscale_`, unless it was done since the last update: clipping part by part asks more than once."""
        if self._window.turn(optimizer).phase is Phase.ACCUMULATING:
            self.unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step()``, unless one of its gradients overflowed on any rank. StepError for a second one before update().

        A fused optimizer reads that on the device; any other one costs a wait for the flag, as in torch.
        """
        if not self.enabled:
            return optimizer.step(*args, **kwargs)
        if (args and args[0] is not None) or kwargs.get("closure") is not None:
            raise StepError(
                "closures cannot be used with a loss scale, nor with nonfinite='skip' or 'raise', which could not skip them"
            )
        found = self.begin_step(optimizer)
        if takes_found_inf(optimizer):
            return step_told(optimizer, found, None, *args, **kwargs)
        return None if found.item() else optimizer.step(*args, **kwargs)

    def begin_step(self, optimizer: Optimizer) -> Tensor:
        """Divide `optimizer`'s gradients if that was not done; above 0 if its step must do nothing. StepError before update()."""
        turn = self._window.turn(optimizer)
        turn.check(Phase.STEPPED)
        self.ensure_unscaled(optimizer)
        turn.enter(Phase.STEPPED)
        found = turn.found_inf
        assert found is not None
        turn.skipped = found
        if self.found is not None:
            self.found(found)
        return found

    def lend(self, optimizer: Optimizer) -> Scale | None:
        """The scale, for `optimizer`'s step to move as `update` would; None if another optimizer needs it, too, or the rule may raise."""
        turn, rule = self._window.turn(optimizer), self.rule
        if self._held is None or self.sharers != 1 or self._window.begun != 1:
            return None
        state = self._held.state
        if not rule.dynamic or rule.raise_at_minimum or state.device.type not in ("cpu", "cuda"):
            return None
        if self._law is None or self._law.device != state.device:
            numbers = (rule.growth_factor, rule.backoff_factor, rule.growth_interval, rule.growth_delay)
            numbers = (*numbers, rule.hysteresis, rule.refill_each_step, rule.min_scale, rule.max_scale)
            self._law = cuda.upload(tuple(map(float, numbers)), torch.float64, state.device)
        turn.lent = cuda.Scale(state, self._law)
        return turn.lent

    def skipped(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer`'s last step was skipped. Waits for the device."""
        found = self._window.turn(optimizer).skipped
        return found is not None and bool(found.item())

    def recall(self, optimizer: Optimizer, skipped: bool) -> None:
        """Set whether `optimizer`'s last step, in an earlier run, was skipped."""
        self._window.turn(optimizer).skipped = torch.tensor(float(skipped))

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale after the optimizers' steps, and make them ready for the next round; or set it to `new_scale`.

        The counters stay then, except where a step has moved them (`lend`).
        """
        if not self.enabled:
            return
        if new_scale is not None and self._runs:
            self.settle()
        found, moved = self._found(), self._moved()
        self._seen = False
        self._window.begin()
        if moved and self._held is not None:
            torch.autograd.graph.increment_version(self._held.state)  # written to past autograd
        if new_scale is not None:
            if self._held is None:
                self._pending = (float(new_scale), *self._pending[1:])
            else:
                self._held.scale.copy_(torch.as_tensor(new_scale).detach())
        elif found is None:
            raise StepError("update() before any step(): no gradients have been looked at")
        elif not moved:
            self.advance(found)

    def _found(self) -> Tensor | None:
        """Above 0 if a gradient of any optimizer was not finite in this update; None if none has unscaled or stepped."""
        found = [turn.found_inf for turn in self._window.turns.values() if turn.found_inf is not None]
        if len(found) < 2:
            return found[0] if found else None
        return torch.stack([f.to(found[0].device) for f in found]).max()

    def _stepped(self) -> bool:
        return any(turn.phase is Phase.STEPPED for turn in self._window.turns.values())

    def settle(self) -> None:
        """`update()`, if an optimizer has stepped since the last one."""
        if self._stepped():
            self.update()

    @contextmanager
    def _ahead(self) -> Iterator[None]:
        """Inside, scale and counters are as the next backward of a run will make them; afterwards as before."""
        found = self._found() if self._runs and self._stepped() and not self._moved() else None
        if found is None or self._held is None:
            yield
            return
        before = self._held.state.clone()
        try:
            self.advance(found)
            yield
        finally:
            self._held.state.copy_(before)

    def advance(self, found_inf: Tensor) -> None:
        """One step of the rule: `found_inf` is 0 after a good step and above 0 after an overflow."""
        rule, (_, scale, good, patience) = self.rule, self._on(found_inf.device)
        found_inf = to_device(found_inf, scale.device)
        if not rule.dynamic:
            return
        if (rule.growth_delay, rule.hysteresis, rule.min_scale, rule.max_scale) == (0, 1, 0.0, float("inf")):
            # torch's kernel has this rule in one launch.
            torch._amp_update_scale_(
                scale, good, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
            )
            return
        bad = found_inf > 0
        falls = bad & (patience <= 1)
        if rule.raise_at_minimum and bool(falls & (scale <= rule.min_scale)):
            raise StepError(
                f"the gradients overflowed at the smallest loss scale, {rule.min_scale:g}: it cannot be decreased anymore. "
                "The loss itself is likely not finite: look at the data and the learning rate"
            )
        count = torch.where(bad, 0, good + 1)
        grows = count >= rule.growth_interval + rule.growth_delay
        lower = _times(scale, rule.backoff_factor).clamp(min=rule.min_scale)
        higher = _times(scale, rule.growth_factor).clamp(max=rule.max_scale)
        # An infinite scale would never come down again.
        higher = torch.where(higher.isfinite(), higher, scale)
        refill = (~bad) if rule.refill_each_step else grows
        left = torch.where(bad & ~falls, patience - 1, patience)
        patience.copy_(torch.where(refill, rule.hysteresis, left))
        scale.copy_(torch.where(falls, lower, torch.where(grows, higher, scale)))
        good.copy_(torch.where(grows, rule.growth_delay, count))

    @property
    def as_it_is(self) -> float | Tensor:
        """The scale of the gradients at this moment, on its device."""
        return self._pending[0] if self._held is None else self._held.scale

    @property
    def in_use(self) -> float:
        """The same as a number. Waits for the device."""
        return float(self.as_it_is)

    def get_scale(self) -> float:
        """The scale as a number. Waits for the device."""
        if not self.enabled:
            return 1.0
        with self._ahead():
            return self.in_use

    def state_dict(self) -> dict[str, Any]:
        """torch.amp.GradScaler's keys and, for rules that torch lacks, the remaining `hysteresis`."""
        if not self.scales:
            return {}
        with self._ahead():
            _, good, patience = self._pending
            if self._held is not None:
                _, good, patience = self._held.state.tolist()
            scale = self.in_use
        rule = {n: getattr(self.rule, n) for n in ("growth_factor", "backoff_factor", "growth_interval")}
        return {"scale": scale, **rule, "_growth_tracker": good, "hysteresis": patience}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take scale and counters from `state_dict`'s result, ours or torch.amp.GradScaler's; the rule stays this scaler's."""
        if not self.scales:
            return
        if not state:
            raise SettingError("this state comes from a scaler that was off: there is no scale in it")
        rule = self.rule
        self._pending = (
            float(state["scale"]),
            # A counter of a longer interval could pass this rule's: torch's kernel waits for equality, and would never grow.
            min(int(state["_growth_tracker"]), rule.growth_interval + rule.growth_delay - 1),
            min(int(state.get("hysteresis", rule.hysteresis)), rule.hysteresis),
        )
        before, self._held = self._held, None
        self._window.begin()
        if before is not None:
            self._on(before.state.device)


def to_device(number: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`; without a wait unless it is the host, which would read before the copy has arrived."""
    return number.to(device, non_blocking=device.type != "cpu")


def _times(scale: Tensor, factor: float) -> Tensor:
    """The product rounded once, as in torch's kernel and ours: ranks may run either."""
    return (scale.to(widest(scale.device)) * factor).float()


def inverse(scale: Tensor) -> Tensor:
    """1 / scale in float32, rounded once."""
    return scale.to(widest(scale.device)).reciprocal().float()


def widest(device: torch.device) -> torch.dtype:
    """The widest float of a device: mps has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def step_told(
    optimizer: Optimizer, found: Tensor | None, grad_scale: Tensor | None, *args: Any, **kwargs: Any
) -> Any:
    """Step by torch's protocol: gradients are divided by `grad_scale` as they are read; nothing changes where `found` is above 0."""
    it: Any = optimizer
    it.found_inf, it.grad_scale = found, grad_scale
    try:
        return it.step(*args, **kwargs)
    finally:
        del it.found_inf, it.grad_scale


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether the step reads `found_inf` on the device: a torch optimizer with fused groups only, or a class that says so itself.

    Not SGD with momentum before its first step: torch leaves the momentum of a skipped first step uninitialised.
    """
    kind = type(optimizer)  # an instance of a subclass of torch's says so, too, although its step may do more
    if hasattr(kind, "_step_supports_amp_scaling"):
        return bool(getattr(optimizer, "_step_supports_amp_scaling"))  # noqa: B009
    fused = all(g.get("fused") for g in optimizer.param_groups)
    if not kind.__module__.startswith("torch.optim") or not fused:
        return False
    return not any(g.get("momentum") for g in optimizer.param_groups) or bool(optimizer.state)
