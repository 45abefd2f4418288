"""Optimizers and schedulers as `prepare` returns them: they follow the accumulation window and the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.swa_utils import SWALR
from torch.utils.hooks import RemovableHandle

from ..base.accumulation import Phase, Turn, UpdateWindow
from ..base.dtensor import lacks_operation, local
from ..cuda import EMA
from ..errors import StepError
from ..logging import get_logger
from ..precision import Scaler
from ..precision.scaler import NO_GRADIENTS
from .engine import Engine
from .masters import Masters, Sums
from .sharded import ShardedOptimizer
from .torch_step import (
    HOOKS,
    Clip,
    FirstGradient,
    GradientsLeft,
    OwnOptimizer,
    Snapshot,
    WrappingOptimizer,
    fill_momentum,
    keep_implementation,
    multiply,
    parameters_of,
)

logger = get_logger(__name__)

# Updates in which gradients are compared by value with what backward left, which waits for the device. Scripts mostly
# do the same in all updates.
FIRST_UPDATES, COMPARE_EVERY = 3, 100


class PreparedOptimizer(WrappingOptimizer):
    """Wraps the user's optimizer: `step` and `zero_grad` act once an update, not at each micro-batch.

    State, param groups, hooks and everything else are the wrapped optimizer's own (`.optimizer`). A copy or pickle
    holds a copy of it, which steps by itself: without the run's window, loss scale and kernels.

    Args:
        given: the user's optimizer, where the strategy steps another one in its place.
        masters: fp32 parameters that `given` holds in place of low-precision ones.
        sums: of gradients over the window, forgotten with the gradients.
        engine: runs the step; torch's own by default.
        drop_gradients: called when gradients are cleared, with a function that returns the ids of the parameters;
            drops what the strategy keeps of their gradients elsewhere.

    Attributes:
        turn: its part in the current update.
        updates: steps that ended a window, skipped ones included.
        closure: the script's closure while a step with one runs.

    Example:
        >>> acc = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="no")
        >>> model, optimizer = acc.prepare(model, optimizer)
        >>> for batch in torch.ones(4, 1, 2):
        ...     with acc.accumulate(model):
        ...         acc.backward(model(batch).sum())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> optimizer.updates, optimizer.step_was_skipped, optimizer.masters
        (2, False, [])
    """

    updates = 0
    closure: Callable[[], Any] | None = None
    _noted_gradients: FirstGradient | None = None
    _stepped_on: Snapshot | None = None  # gradients of the last step, until they are cleared
    _warned_of_averages = False
    _clip_hook: RemovableHandle | None = None  # applies a waiting clip if the script steps the wrapped optimizer itself

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        window: UpdateWindow,
        scaler: Scaler,
        given: torch.optim.Optimizer | None = None,
        masters: Masters | None = None,
        sums: Sums | None = None,
        engine: Engine | None = None,
        drop_gradients: Callable[[Callable[[], set[int]]], None] | None = None,
    ) -> None:
        self.optimizer, self.given = optimizer, given or optimizer
        for name in HOOKS:
            if hasattr(optimizer, name):  # a wrapper may leave out torch's own __init__
                setattr(self, name, getattr(optimizer, name))
        self._masters, self._sums = masters, sums
        self._window, self._scaler = window, scaler
        self._drop_gradients = drop_gradients
        self.turn = window.turns.setdefault(optimizer, Turn())
        self.engine = engine or Engine(optimizer, free=False)
        fill_momentum(optimizer)  # so that a first step may be skipped on the device

    def __reduce__(self) -> Any:
        return _copied, (self.optimizer,)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update at the end of a window, unless a gradient overflowed; do nothing on other micro-steps.

        Args:
            closure: evaluates the model again and returns the loss, as in torch.

        Returns:
            What the wrapped optimizer's step returns, or None.

        Raises:
            StepError: inside `averaged`; or, under accumulation, outside of `accumulate` before the window has all its
                backward passes.
        """
        window, turn = self._window, self.turn
        if window.accumulation != 1 and not window.ends_at_step(turn):
            return None
        if closure is not None:
            window.refuse("step(closure)")
            if self.has_masters:
                window.refuse("step(closure)", "fp32 masters")
        if self._noted_gradients is not None:
            self.check_gradients()
        # After a step without `zero_grad`, backward has added to gradients that the step has used.
        adds_to_spent = turn.spent and turn.phase is not Phase.STEPPED
        if adds_to_spent and self._stepped_on is not None and self._stepped_on.present:
            raise StepError(
                "gradients of the last update were not cleared, and this update's were added to them, which is wrong "
                "where they are multiplied by a loss scale or handed to fp32 masters: call optimizer.zero_grad() after "
                "each step()"
            )
        turn.spent, turn.waiting = True, False
        self.closure = closure
        try:
            veto = self._ask_parts() if window.parts.step else None
            if veto is True:  # leave the step out: a part has replaced the weights, and gradients are of the old ones
                self.set_clip(None)
                turn.begin()
                turn.skipped = torch.ones(())
                return None
            low_precision = self._masters is not None or (self._sums is not None and self._sums.on)
            result = self._step_low_precision(veto) if low_precision else self._step(veto)
        except RuntimeError as error:
            if lacks_operation(error):
                kind, reason = type(self.given).__name__, str(error).splitlines()[0]
                raise StepError(f"{kind} cannot step on sharded parameters ({reason}): use strategy='ddp'") from error
            raise
        finally:
            self.closure = None
        self.updates += 1
        turn.phase = Phase.STEPPED  # also under a closure, whose backward has begun another update
        # If a later backward must not add to these gradients, note one of them: the next step then refuses the sum.
        if self._scaler.scales or self._masters is not None or (low_precision and window.accumulation != 1):
            snapshots = (Snapshot(parameter) for _, parameter in self.parameters() if parameter.grad is not None)
            self._stepped_on = next(snapshots, None)
        for notify in window.parts.stepped:
            notify(self)
        return result

    def _ask_parts(self) -> Tensor | Literal[True] | None:
        """Ask all parts about the step: True leaves it out; a tensor above 0 makes it change nothing."""
        veto: Tensor | None = None
        for part_step in self._window.parts.step:
            answer = part_step(self)
            if answer is True:
                return True
            if isinstance(answer, Tensor):
                veto = answer if veto is None else torch.maximum(veto, answer)
        return veto

    def _step(self, veto: Tensor | None) -> Any:
        scaler, turn = self._scaler, self.turn
        if self.closure is not None:
            if veto is not None:
                raise StepError(
                    "step(closure) while a part vetoes steps by their gradients, which the closure replaces: leave one "
                    "of them out"
                )
            self.apply_clip()
            closure, parameters = self.closure, [p for p in parameters_of(self) if p.requires_grad]
            return self.engine.averages.follow_step(parameters, lambda: scaler.step(self.optimizer, closure))
        if scaler.enabled and can_clip_in_step([self]):
            clip_in_step([self], float("inf"), scaler)  # clips nothing: the step unscales as it reads gradients
        clip, found_inf = turn.clip, veto
        if clip is not None:
            clip.gradients()  # checks that they are those that were measured
        if scaler.enabled:
            found_inf = scaler.begin_step(self.optimizer)  # sets turn.skipped
            if veto is not None:  # the scaler does not see it, so a veto does not move the loss scale
                found_inf = torch.maximum(found_inf, veto.to(found_inf.device))
        if veto is not None or not scaler.enabled:
            turn.skipped = found_inf
        if clip is None:
            return self.engine.step(None, found_inf)
        self.set_clip(None)
        return self.engine.step(clip.factor, found_inf)

    def _step_low_precision(self, veto: Tensor | None) -> Any:
        if self._masters is not None:
            self.gather(free=True)
            self._masters.follow()
        result = self._step(veto)
        if self._masters is not None:
            if self.engine.reads_low:
                self._masters.clear()  # kernels have written the low-precision parameters
            else:
                self._masters.write_back()
        if self._sums is not None and self._sums.on:
            self._forget_sums(self._sums)
        return result

    def set_clip(self, clip: Clip | None) -> None:
        """Let the next step multiply gradients by the factor of `clip`; None: as they are."""
        self.turn.clip = clip
        if self._clip_hook is not None:
            self._clip_hook.remove()
            self._clip_hook = None
        if clip is not None:
            self._clip_hook = self.optimizer.register_step_pre_hook(lambda *_: self.apply_clip())

    def apply_clip(self) -> None:
        """Apply a clip that waits for the step now, in memory, so that gradients can be read and changed."""
        clip, turn = self.turn.clip, self.turn
        if clip is not None:
            self.set_clip(None)
            clip.apply()
            if turn.phase is Phase.CLIPPED:
                turn.phase = Phase.UNSCALED if self._scaler.enabled else Phase.ACCUMULATING

    # -- the gradients -------------------------------------------------------------------------------------------------

    def resume_accumulating(self) -> None:
        """Prepare for a backward that adds to gradients: apply a clip that waits for the step, or begin an update."""
        self.apply_clip()
        if self.turn.phase is Phase.UNSCALED:  # the next gradients come multiplied by the scale, so these are again
            self.multiply_gradients(torch.as_tensor(self._scaler.current_scale))
            self.turn.begin()
        elif self.turn.phase is Phase.STEPPED and not self._scaler.enabled:
            self.turn.begin()

    def multiply_gradients(self, factor: Tensor) -> None:
        """Multiply gradients in place: a master's, if it has the gradient, else the parameter's."""
        gradients = (
            parameter.grad if stepped.grad is None else stepped.grad for stepped, parameter in self.parameters()
        )
        multiply([gradient for gradient in gradients if gradient is not None], factor)

    def check_before_backward(self) -> None:
        """Check what the script did to gradients since the last backward, before the next one adds to them."""
        window = self._window
        if self._stepped_on is not None and (not self._stepped_on.unchanged or self._stepped_on.cleared):
            self._stepped_on = None
        if self._noted_gradients is not None:
            if window.accumulation != 1 and window.in_accumulate and window.micro > 1 and not self.turn.spent:
                self._noted_gradients.check_kept()
            self.check_gradients()
        if self._masters is not None:
            self._masters.hide()

    def watch_gradients(self, refusal: Callable[[], str] | None, shared: bool = False) -> None:
        """Note the gradients as they are. `refusal` makes the error's text if they change; None: they may be changed.

        `shared`: they are views of a bucket, or shards.
        """
        if self._masters is None:  # without a list of all, which takes longer
            parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        else:
            parameters = (parameter for _, parameter in self.parameters())
        if refusal is None and not shared:
            self._noted_gradients = FirstGradient(parameters)
            return
        compares_values = self.updates < FIRST_UPDATES or self.updates % COMPARE_EVERY == 0
        self._noted_gradients = GradientsLeft(parameters, refusal, compares_values, shared)

    def accept_gradients(self) -> None:
        """Accept changes of gradients since the last backward."""
        self._noted_gradients = None

    def check_gradients(self) -> None:
        """StepError if gradients that may not be changed were changed since `watch_gradients`."""
        noted, self._noted_gradients = self._noted_gradients, None
        if noted is not None and self.turn.phase is Phase.ACCUMULATING and self.turn.clip is None:
            noted.check_unchanged()

    def show_gradients(self) -> None:
        """Show the masters' gradients on the model's parameters, where scripts read and change them."""
        if self._masters is not None and not self.engine.reads_low:
            self._masters.show()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, unless they hold part of a window that is not finished."""
        turn, window = self.turn, self._window
        if window.accumulation != 1 and window.keeps_gradients(turn):
            return
        for notify in window.parts.zero_grad:
            notify(self)
        turn.spent = False
        if turn.clip is not None:
            self.set_clip(None)
        if turn.phase is not Phase.STEPPED or not self._scaler.enabled:  # else the scaler's `update` begins the next
            turn.begin()
        self._noted_gradients = None
        self.optimizer.zero_grad(set_to_none)
        if self._masters is not None:
            self._masters.clear()
        if self._sums is not None and self._sums.on:
            self._forget_sums(self._sums)
        if self._drop_gradients is not None:
            self._drop_gradients(lambda: {id(parameter) for _, parameter in self.parameters()})

    def _forget_sums(self, sums: Sums) -> None:
        """Drop the fp32 sums of this optimizer's gradients."""
        sums.drop(p for pair in self.parameters() for p in pair)

    def has_unused_gradients(self) -> bool:
        """Whether this rank holds gradients that no step has used since they were cleared. Waits for the device."""
        if self.turn.spent:
            return False
        grads = [local(p.grad) for p in parameters_of(self) if p.grad is not None]
        return any(bool((g._values() if g.is_sparse else g).any()) for g in grads)

    def gather(self, in_memory: bool = False, free: bool = False) -> None:
        """Add gradients to the masters' if the step reads them there, or if `in_memory`; `free` drops the others."""
        if self._masters is not None and (in_memory or not self.engine.reads_low):
            self._masters.gather(free)

    def parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a stepped tensor and the model's parameter: a master and its parameter, or one tensor twice."""
        low_by_master = {} if self._masters is None else self._masters.low
        return [(stepped, low_by_master.get(id(stepped), stepped)) for stepped in parameters_of(self)]

    def release(self) -> None:
        """Give the optimizer its own parameters back."""
        if self._masters is not None:
            self._masters.release()

    # -- attributes ----------------------------------------------------------------------------------------------------

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped for an overflow. Waits for the device under fp16."""
        skipped = self.turn.skipped
        return skipped is not None and bool(skipped.item())

    @property
    def has_masters(self) -> bool:
        return self._masters is not None

    @property
    def masters(self) -> list[tuple[Tensor, Tensor]]:
        """Low-precision parameters, each with the fp32 master that is stepped in its place, up to date."""
        return [] if self._masters is None else self._masters.pairs()

    # -- the state -----------------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """Entries of `state_dict` beside "state" and "param_groups", from the class or a hook. All ranks call it."""
        hooks = self._optimizer_state_dict_pre_hooks or self._optimizer_state_dict_post_hooks
        if type(self.given).state_dict is torch.optim.Optimizer.state_dict and not hooks:
            return {}
        state = self.optimizer.state_dict()
        return {key: value for key, value in state.items() if key not in ("state", "param_groups")}

    def customises_load(self) -> bool:
        """Whether the class overrides `load_state_dict`, or a hook of it is registered."""
        hooks = self._optimizer_load_state_dict_pre_hooks or self._optimizer_load_state_dict_post_hooks
        return type(self.given).load_state_dict is not torch.optim.Optimizer.load_state_dict or bool(hooks)

    def laid_out(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters, each with a tensor whose layout is that of its states: itself, or a DTensor."""
        parameters, optimizer = parameters_of(self), self.optimizer
        layouts = optimizer.laid_out(parameters) if isinstance(optimizer, ShardedOptimizer) else parameters
        return list(zip(parameters, layouts))

    def replace_states(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Replace all states, in the form of `state`. Parameters that have masters become the masters, rounded."""
        optimizer, states = self.optimizer, self._without_stale_averages(states)
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.replace_states(states)
        else:
            optimizer.state.clear()
            optimizer.state.update(states)
        if self._masters is not None:
            self._masters.write_back()
        fill_momentum(optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this or of the plain optimizer; how the step runs (fused, foreach) stays as it is."""
        if "state" in state_dict:  # a class may have a form of its own
            state_dict = {**state_dict, "state": self._without_stale_averages(state_dict["state"])}
        self.optimizer.load_state_dict(keep_implementation(self.optimizer, state_dict))
        fill_momentum(self.optimizer)

    def _without_stale_averages(self, states: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """`states` without averages of the weights where this run keeps none; says so once in the log."""
        # No step would move them, and a later run would take them for averages of its weights. Classes that are neither
        # torch's nor ours keep theirs: the key "ema" may be one of their own.
        optimizer = self.given
        if self.engine.averages.decay is not None:
            return states
        if not isinstance(optimizer, OwnOptimizer) and not type(optimizer).__module__.startswith("torch.optim"):
            return states
        with_average = [key for key, state in states.items() if isinstance(state, Mapping) and EMA in state]
        without_averages = {key: {k: v for k, v in states[key].items() if k != EMA} for key in with_average}
        if without_averages and not self._warned_of_averages:
            self._warned_of_averages = True
            logger.warning(
                f"{type(optimizer).__name__}'s state comes with averages of the weights, and this run keeps none: they "
                "are dropped. Accelerator(ema_decay=…) goes on with them"
            )
        return {**states, **without_averages}

    def group_added(self) -> None:
        """Follow `add_param_group` of the wrapped optimizer."""
        if self._masters is not None:
            self._masters.add_groups(self.optimizer.param_groups[-1:])
        fill_momentum(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)  # of an object under construction
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"Prepared({self.optimizer!r})"


def _copied(optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
    return PreparedOptimizer(optimizer, UpdateWindow(), Scaler(enabled=False))


# -- clipping in the step ----------------------------------------------------------------------------------------------


@torch.no_grad()
def clip_in_step(optimizers: Sequence[PreparedOptimizer], max_norm: float, scaler: Scaler) -> Tensor:
    """Measure all gradients, and let the steps of `optimizers` multiply by the factor; returns the norm (0-dim, fp32).

    Under a loss scale the norm is of gradients divided by it, and an overflow in any of them skips all steps.
    """
    counting = optimizers[0].engine.counting
    if counting.add is not None:
        for parameter in chain.from_iterable(map(parameters_of, optimizers)):
            counting.settle(parameter)
    gradients_by_optimizer = [o.engine.gradients() for o in optimizers]
    has_gradients = any(gradients_by_optimizer)
    scale = scaler.gradient_scale([o.optimizer for o in optimizers], has_gradients)
    other_totals: list[Tensor] = []
    for optimizer in optimizers[:-1]:
        optimizer.engine.measure(max_norm, scale, other_totals.append)

    rank_count: Tensor  # of ranks that hold gradients, if `counting` adds

    def over_ranks(totals: Tensor) -> None:
        nonlocal rank_count
        for optimizer_totals in other_totals:
            totals += optimizer_totals.to(totals.device)
        if counting.add is not None:
            counted_totals = torch.cat([totals, totals.new_full((1,), float(has_gradients))])
            counting.add(counted_totals)
            totals.copy_(counted_totals[:2])
            rank_count = counted_totals[2]

    single_total = not other_totals and counting.add is None
    result = optimizers[-1].engine.measure(max_norm, scale, None if single_total else over_ranks)
    found_inf = result.found_inf
    if scale is not None:
        assert found_inf is not None
        if counting.add is None:
            found_inf = scaler.max_over_ranks(found_inf, has_gradients)
        elif not has_gradients and not rank_count.item():
            raise StepError(NO_GRADIENTS)
    if not scaler.enabled:
        for optimizer in optimizers:
            optimizer.turn.begin()
    scaler.leave_to_steps([o.optimizer for o in optimizers], found_inf if scale is not None else None)
    for optimizer, gradients in zip(optimizers, gradients_by_optimizer):
        optimizer.set_clip(Clip(result.factor, gradients))
    return result.norm


def can_clip_in_step(optimizers: Sequence[PreparedOptimizer]) -> bool:
    """Whether `clip_in_step` can take these optimizers now. The same on all ranks."""
    if not optimizers or any(o.turn.clip is not None or not o.engine.takes_factor() for o in optimizers):
        return False
    if len({o.engine.counting.add is None for o in optimizers}) > 1:
        return False
    phases = {o.turn.phase for o in optimizers}
    # Without a loss scale any phase will do: after a step, the script has called loss.backward() by itself.
    return not optimizers[0]._scaler.enabled or (len(phases) == 1 and Phase.STEPPED not in phases)


# -- schedulers --------------------------------------------------------------------------------------------------------


class PreparedScheduler:
    """The user's scheduler, stepped only after an optimizer update: not on other micro-steps, nor after a skipped one.

    Args:
        scheduler: any object with `step`.
        optimizers: the prepared optimizers it drives.

    Attributes:
        each_update: whether the script's last call had no arguments and came one update after the call before.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> model, optimizer, scheduler = acc.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
        >>> scheduler.step()  # no update yet
        >>> scheduler.get_last_lr()
        [1.0]
    """

    def __init__(self, scheduler: Any, optimizers: Sequence[PreparedOptimizer]) -> None:
        self.scheduler, self.optimizers = scheduler, list(optimizers)
        self._last_updates = [optimizer.updates for optimizer in self.optimizers]  # at the last call of `step`
        self.each_update = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule, if there was an update since the last call: after each batch, or once an epoch.

        Args:
            args: for the wrapped scheduler's step.
            kwargs: likewise.
        """
        updates = self.behind
        most_updates = max(updates, default=0)
        if most_updates:
            self.each_update = most_updates == 1 and not args and not kwargs
        self.behind = [0] * len(updates)
        # Of several updates one at least is assumed not to be skipped, since each skip lowers the loss scale.
        pairs = zip(updates, self.optimizers)
        if any(n > 1 or (n == 1 and not optimizer.step_was_skipped) for n, optimizer in pairs):
            self.scheduler.step(*args, **kwargs)

    @property
    def behind(self) -> list[int]:
        """Updates of each optimizer since the last call of `step`."""
        return [optimizer.updates - updates for optimizer, updates in zip(self.optimizers, self._last_updates)]

    @behind.setter
    def behind(self, counts: Sequence[int]) -> None:
        self._last_updates = [optimizer.updates - count for optimizer, count in zip(self.optimizers, counts)]

    def get_last_lr(self) -> list[float]:
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        if isinstance(self.scheduler, SWALR):
            state.pop("anneal_func", None)  # set by its constructor; in its state before torch 2.10
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)  # of an object under construction
        return getattr(self.scheduler, name)
