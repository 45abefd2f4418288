"""The loss scale: one scaler for fp16 runs, with the rule of a `GradScalerKwargs`.

Gradients below 6e-8 are zero in fp16, so the loss is multiplied by a scale, and gradients are divided by it before the
step. An overflow skips the step and lowers the scale; a run of good steps raises it: in torch and Apex ×2 after
`growth_interval` good steps and ÷2 at each overflow; in DeepSpeed growth comes one step later (`growth_delay=1`), and
the first `hysteresis - 1` overflows lower nothing. Only the step of an optimizer that is not fused waits for the
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.accumulation import Phase, UpdateWindow
from ..base.dtensor import local
from ..base.pytree import map_leaves
from ..distributed import World
from ..errors import SettingError, StepError
from ..options import GradScalerKwargs

NO_GRADIENTS = "unscale_ or step() before any backward(): this optimizer has no gradients yet"
GUARD = GradScalerKwargs(init_scale=1.0, dynamic=False)


class ScaleTensors(NamedTuple):
    """The scale and its counters on a device."""

    scale: Tensor  # float32, 0-dim
    growth_tracker: Tensor  # int32: good steps since the scale moved
    hysteresis: Tensor  # int32: overflows still forgiven, plus one


class Scaler:
    """Scales losses, unscales gradients, skips overflowed steps, and moves the scale.

    ``scale(loss).backward()``, ``unscale_(optimizer)`` (at most once, before clipping), ``step(optimizer)``,
    ``update()``. With ``enabled=False`` they are the loss, nothing, ``optimizer.step()`` and nothing.

    Args:
        world: an overflow on one of its ranks counts on all.
        guard: only skip steps with gradients that are not finite: the scale is 1, and checkpoints leave it out.
        window: of a run: its next backward calls `update`; until then `get_scale` and `state_dict` foresee that.
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
        self._world = world
        self._in_run = window is not None
        self._window = window or UpdateWindow()
        self._has_scaled = False  # whether a loss has been scaled since `update`
        self._tensors: ScaleTensors | None = None  # on the device of the first loss
        self._initial: tuple[float, int, int] = (self.rule.init_scale, 0, self.rule.hysteresis)

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
        self._has_scaled = True
        scale = self._on(loss.device).scale
        return loss * to_device(scale, loss.device) if self.scales else loss

    def _on(self, device: torch.device) -> ScaleTensors:
        if self._tensors is None:
            dtypes = (torch.float32, torch.int32, torch.int32)
            tensors = (torch.full((), n, dtype=dtype, device=device) for n, dtype in zip(self._initial, dtypes))
            self._tensors = ScaleTensors(*tensors)
        return self._tensors

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide `optimizer`'s gradients by the scale, and note whether all are finite. StepError if done before."""
        if not self.enabled:
            return
        turn = self._window.turn(optimizer)
        turn.check(Phase.UNSCALED)
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._check_scaled(bool(gradients))
        if self.scales and any(g.dtype == torch.float16 for g in gradients):
            raise StepError(
                "a gradient is float16: dividing it by the scale would lose it. Keep fp32 parameters under fp16 (no "
                ".half())"
            )
        other_ranks = self._world is not None and self._world.size > 1 and not self._window.joining
        if not gradients and not (other_ranks and self._tensors is not None):
            raise StepError(NO_GRADIENTS)
        device = gradients[0].device if gradients else self._world.device  # type: ignore[union-attr]
        found_inf = self.max_over_ranks(self.divide(gradients, device), bool(gradients))
        turn.found_inf = to_device(found_inf, device)  # where the step reads it: for shards in host memory, the host
        turn.enter(Phase.UNSCALED)
        self._tell_parts(optimizer, found_inf)

    def _tell_parts(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        for notify in self._window.parts.verdict:
            notify(optimizer, found_inf)

    def _check_scaled(self, has_gradients: bool) -> None:
        if has_gradients and not self._has_scaled and self._in_run:  # a scaler alone takes any gradients
            consequence = "leaves the loss scale out" if self.scales else "nonfinite='skip' and 'raise' do not see"
            raise StepError(
                "the gradients do not come from accelerator.backward(loss): loss.backward() was called by itself, "
                f"which {consequence}. Replace it by accelerator.backward(loss)"
            )

    def divide(self, gradients: Sequence[Tensor], device: torch.device) -> Tensor:
        """Divide `gradients`, in memory, by the scale; returns found_inf (fp32, 0-dim, on `device`)."""
        by_device_and_dtype: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in gradients:
            grad = local(grad._values() if grad.is_sparse else grad)
            grad = torch.view_as_real(grad) if grad.is_complex() else grad
            by_device_and_dtype.setdefault((grad.device, grad.dtype), []).append(grad)
        scale = self._on(device).scale
        factor = inverse(scale)
        found_inf = torch.zeros_like(scale)
        for (grad_device, _), grads in by_device_and_dtype.items():
            flag = found_inf if grad_device == found_inf.device else torch.zeros((), device=grad_device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, to_device(factor, grad_device))
            if flag is not found_inf:
                found_inf = torch.maximum(found_inf, to_device(flag, found_inf.device))
        return found_inf

    def max_over_ranks(self, found_inf: Tensor, has_gradients: bool) -> Tensor:
        """The maximum over the ranks. StepError if no rank has gradients."""
        world = None if self._window.joining else self._world
        if world is not None:  # a rank without gradients gives -1
            found_inf = world.reduce(found_inf if has_gradients else found_inf - 1, "max")
        if not has_gradients and (world is None or found_inf.item() < 0):
            raise StepError(NO_GRADIENTS)
        return found_inf

    def gradient_scale(self, optimizers: Sequence[Optimizer], has_gradients: bool) -> Tensor | None:
        """The scale that the gradients of all these still have; None if not scaled. StepError before any `scale`."""
        if not self.enabled or any(self._window.turn(o).phase is not Phase.ACCUMULATING for o in optimizers):
            return None
        self._check_scaled(has_gradients)
        if self._tensors is None:
            raise StepError(NO_GRADIENTS)
        return self._tensors.scale

    def leave_to_steps(self, optimizers: Sequence[Optimizer], found_inf: Tensor | None) -> None:
        """Let the steps of `optimizers` divide by the scale; `found_inf` is that of their measured gradients."""
        for optimizer in optimizers:
            turn = self._window.turn(optimizer)
            turn.enter(Phase.CLIPPED)
            if found_inf is not None:
                turn.found_inf = found_inf
                self._tell_parts(optimizer, found_inf)

    def ensure_unscaled(self, optimizer: Optimizer) -> None:
        """`unscale_`, unless it was done since the last update: clipping part by part asks more than once."""
        if self._window.turn(optimizer).phase is Phase.ACCUMULATING:
            self.unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step()``, unless a gradient overflowed on any rank. If not fused, it waits for the flag."""
        if not self.enabled:
            return optimizer.step(*args, **kwargs)
        if (args and args[0] is not None) or kwargs.get("closure") is not None:
            raise StepError(
                "closures cannot be used with a loss scale, nor with nonfinite='skip' or 'raise', which could not skip "
                "them"
            )
        found_inf = self.begin_step(optimizer)
        if takes_found_inf(optimizer):
            with amp_attributes(optimizer, None, found_inf):
                return optimizer.step(*args, **kwargs)
        return None if found_inf.item() else optimizer.step(*args, **kwargs)

    def begin_step(self, optimizer: Optimizer) -> Tensor:
        """Divide `optimizer`'s gradients by the scale, once an update. Returns found_inf. StepError after its step."""
        turn = self._window.turn(optimizer)
        turn.check(Phase.STEPPED)
        self.ensure_unscaled(optimizer)
        turn.enter(Phase.STEPPED)
        assert turn.found_inf is not None
        turn.skipped = turn.found_inf
        return turn.found_inf

    def refuse_changes(self) -> str:
        """The error where gradients were changed while they were scaled."""
        return (
            f"the gradients were changed while they were multiplied by the loss scale {float(self.current_scale):g}: "
            "call acc.unscale_gradients() before, or clip by acc.clip_grad_norm_ or acc.clip_grad_value_"
        )

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale after the optimizers' steps, or set it to `new_scale`, and begin the next update."""
        if not self.enabled:
            return
        if new_scale is not None and self._in_run:
            self.settle()
        found_inf = self._found_inf()
        self._has_scaled = False
        self._window.begin()
        if new_scale is not None:
            if self._tensors is None:
                self._initial = (float(new_scale), *self._initial[1:])
            else:
                self._tensors.scale.copy_(torch.as_tensor(new_scale).detach())
        elif found_inf is None:
            raise StepError("update() before any step(): no gradients have been looked at")
        else:
            self.advance(found_inf)

    def _found_inf(self) -> Tensor | None:
        """Above 0 if a gradient of any optimizer was not finite in this update; None before an unscale or a step."""
        flags = [turn.found_inf for turn in self._window.turns.values() if turn.found_inf is not None]
        if len(flags) < 2:
            return flags[0] if flags else None
        return torch.stack([flag.to(flags[0].device) for flag in flags]).max()

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last `update`."""
        return any(turn.phase is Phase.STEPPED for turn in self._window.turns.values())

    def settle(self) -> None:
        """`update()`, if an optimizer has stepped since the last one."""
        if self.enabled and self.has_stepped():
            self.update()

    @contextmanager
    def _as_after_update(self) -> Iterator[None]:
        """Inside, scale and counters hold their values after the pending update; afterwards their own again."""
        found_inf = self._found_inf() if self._in_run and self.has_stepped() else None
        if found_inf is None or self._tensors is None:
            yield
            return
        before = [tensor.clone() for tensor in self._tensors]
        try:
            self.advance(found_inf)
            yield
        finally:
            for tensor, value in zip(self._tensors, before):
                tensor.copy_(value)

    def advance(self, found_inf: Tensor) -> None:
        """One step of the rule: `found_inf` is 0 after a good step and above 0 after an overflow."""
        rule, (scale, growth_tracker, hysteresis) = self.rule, self._on(found_inf.device)
        found_inf = to_device(found_inf, scale.device)
        if not rule.dynamic:
            return
        if (rule.growth_delay, rule.hysteresis, rule.min_scale, rule.max_scale) == (0, 1, 0.0, float("inf")):
            # torch's kernel has this rule in one launch.
            torch._amp_update_scale_(
                scale, growth_tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
            )
            return
        overflows = found_inf > 0
        falls = overflows & (hysteresis <= 1)
        if rule.raise_at_minimum and bool(falls & (scale <= rule.min_scale)):
            raise StepError(
                f"the gradients overflowed at the smallest loss scale, {rule.min_scale:g}: it cannot be decreased "
                "anymore. The loss itself is likely not finite: look at the data and the learning rate"
            )
        good_steps = torch.where(overflows, 0, growth_tracker + 1)
        grows = good_steps >= rule.growth_interval + rule.growth_delay
        lower = _times(scale, rule.backoff_factor).clamp(min=rule.min_scale)
        higher = _times(scale, rule.growth_factor).clamp(max=rule.max_scale)
        # An infinite scale would never come down again.
        higher = torch.where(higher.isfinite(), higher, scale)
        refills = ~overflows if rule.refill_each_step else grows
        remaining = torch.where(overflows & ~falls, hysteresis - 1, hysteresis)
        hysteresis.copy_(torch.where(refills, rule.hysteresis, remaining))
        scale.copy_(torch.where(falls, lower, torch.where(grows, higher, scale)))
        growth_tracker.copy_(torch.where(grows, rule.growth_delay, good_steps))

    @property
    def current_scale(self) -> float | Tensor:
        """The scale of the gradients at this moment, on its device. As a number it waits for the device."""
        return self._initial[0] if self._tensors is None else self._tensors.scale

    def get_scale(self) -> float:
        """The scale of the next loss. Waits for the device."""
        if not self.enabled:
            return 1.0
        with self._as_after_update():
            return float(self.current_scale)

    def state_dict(self) -> dict[str, Any]:
        """torch.amp.GradScaler's keys and, for rules that torch lacks, the remaining `hysteresis`."""
        if not self.scales:
            return {}
        with self._as_after_update():
            _, growth_tracker, hysteresis = self._initial
            if self._tensors is not None:
                growth_tracker, hysteresis = int(self._tensors.growth_tracker), int(self._tensors.hysteresis)
            scale = float(self.current_scale)
        rule = {name: getattr(self.rule, name) for name in ("growth_factor", "backoff_factor", "growth_interval")}
        return {"scale": scale, **rule, "_growth_tracker": growth_tracker, "hysteresis": hysteresis}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set scale and counters from `state_dict`, ours or torch.amp.GradScaler's. The rule stays this scaler's."""
        if not self.scales:
            return
        if not state:
            raise SettingError("this state comes from a scaler that was off: there is no scale in it")
        rule = self.rule
        self._initial = (
            float(state["scale"]),
            # torch's kernel compares for equality: a counter beyond this rule's interval would never grow.
            min(int(state["_growth_tracker"]), rule.growth_interval + rule.growth_delay - 1),
            min(int(state.get("hysteresis", rule.hysteresis)), rule.hysteresis),
        )
        tensors, self._tensors = self._tensors, None
        self._window.begin()
        if tensors is not None:
            self._on(tensors.scale.device)


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


@contextmanager
def amp_attributes(optimizer: Optimizer, grad_scale: Tensor | None, found_inf: Tensor | None) -> Iterator[None]:
    """Inside, a step of `optimizer` divides by `grad_scale` and is skipped where `found_inf` is above 0.

    This is torch's protocol for fused optimizers.
    """
    attributes: dict[str, Any] = vars(optimizer)
    before: dict[str, Any] = {name: attributes[name] for name in ("grad_scale", "found_inf") if name in attributes}
    attributes.update(grad_scale=grad_scale, found_inf=found_inf)
    try:
        yield
    finally:
        del attributes["grad_scale"], attributes["found_inf"]
        attributes.update(before)


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether the step reads `found_inf` on the device: fused optimizers of torch, or a class that declares it.

    Not SGD with momentum before its first step: torch leaves the momentum of a skipped first step uninitialised.
    """
    kind = type(optimizer)  # an instance of a subclass of torch's says so, too, although its step may do more
    if hasattr(kind, "_step_supports_amp_scaling"):
        return bool(getattr(optimizer, "_step_supports_amp_scaling"))  # noqa: B009
    fused = all(g.get("fused") for g in optimizer.param_groups)
    if not kind.__module__.startswith("torch.optim") or not fused:
        return False
    return not any(g.get("momentum") for g in optimizer.param_groups) or bool(optimizer.state)
