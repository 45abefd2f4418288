"""An optimizer that knows the accumulation window and the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import SWALR
from torch.utils.hooks import RemovableHandle

from ..base.accumulation import StepClock
from ..base.dtensor import local
from ..cuda import EMA
from ..errors import StepError
from ..logging import get_logger
from ..precision import Scaler
from .engine import Engine, Factor, TorchEngine, leave_to_step, may_leave
from .fused import FusedOptimizer
from .masters import Masters, Sums, without
from .sharded import ShardedOptimizer, holder_of
from .torch_step import fill_momentum, keep_implementation

logger = get_logger(__name__)


class PreparedOptimizer(torch.optim.Optimizer):
    """The user's optimizer behind `step` and `zero_grad` that act once a window.

    State, param groups, hooks and everything else are the wrapped optimizer's own (`.optimizer`).

    Args:
        given: what the user passed, where the strategy steps another one in its place.
        masters: what `given` holds in place of low-precision parameters; None where it holds the parameters.
        sums: of gradients over the window, to be forgotten with the gradients.
        engine: what runs the step; torch's own by default.

    Attributes:
        factor: what a clip has left to the next step; set by `leave`.
        away: the parameters are their averages for a while.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clock: StepClock,
        scaler: Scaler,
        given: torch.optim.Optimizer | None = None,
        masters: Masters | None = None,
        sums: Sums | None = None,
        engine: Engine | None = None,
    ) -> None:
        # torch's own __init__ would build param groups and state a second time.
        self.optimizer = optimizer
        self.given = given or optimizer
        self._masters = masters
        self._sums = sums
        self._clock = clock
        self._scaler = scaler
        self.engine: Engine = engine or TorchEngine(optimizer, free=False)
        self.factor: Factor | None = None
        self._by_itself: RemovableHandle | None = (
            None  # hears of a step of the wrapped optimizer while there is a factor
        )
        self.away = False
        self.updates = 0  # steps that ended a window, skipped ones included
        self._seen = 0  # backward passes before the last step of accumulation by hand
        self._spent = False  # whether the gradients have been stepped on, and not cleared since
        self._waiting = False  # whether the last call was a step that waits for the end of the window
        self._told = False  # of averages that were dropped
        # A stage that holds none of the parameters has it, too: whether overflows are read on the device is alike on all ranks.
        fill_momentum(optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update at the end of a window, skipped if a gradient overflowed; nothing on other micro-steps.

        Raises:
            StepError: with accumulation, outside an `accumulate` block and before as many backward passes as a window has.
        """
        clock = self._clock
        if clock.accumulation != 1:
            if not clock.inside:
                self._end_window_by_hand()
            elif not clock.sync:
                self._waiting = True
                return None
        if self.away:
            raise StepError(
                "optimizer.step() inside `with accelerator.averaged():`, where the weights are not those of training"
            )
        self._spent, self._waiting = True, False
        self.updates += 1
        low = self._masters is not None or (self._sums is not None and self._sums.on)
        result = self._step_low(closure) if low else self._step(closure)
        for hear in clock.stepped:
            hear(self)
        return result

    def _end_window_by_hand(self) -> None:
        """A script that counts micro-batches itself steps after as many as a window has, or with the last batch of its loader."""
        clock = self._clock
        done, self._seen = clock.backwards - self._seen, clock.backwards
        if done < clock.accumulation and not (done and clock.last):
            raise StepError(
                f"optimizer.step() outside `with accelerator.accumulate(model):`, {done} of gradient_accumulation_steps="
                f"{clock.accumulation} backward passes after the last step: it would step with a fraction of the gradient. Put forward, "
                "backward, step and zero_grad inside the block, or set gradient_accumulation_steps=1"
            )

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        scaler = self._scaler
        if closure is not None:
            self.apply_factor()
            moving = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
            return self.engine.averages.around(moving, lambda: scaler.step(self.optimizer, closure))
        if scaler.enabled and may_leave([self], scaler):
            leave_to_step([self], float("inf"), scaler)
        factor, found, scale = self.factor, None, None
        if factor is not None:
            factor.check()
        if scaler.enabled:
            found = scaler.begin_step(self.optimizer)
            scale = scaler.lend(self.optimizer)
        if factor is None:
            return self.engine.step(None, found, scale)
        self.leave(None)
        return self.engine.step(factor.value, found, scale)

    def _step_low(self, closure: Callable[[], Any] | None) -> Any:
        """`step` where parameters are low-precision."""
        if self._masters is not None:
            if closure is not None:
                raise StepError(
                    f"a closure cannot be used with fp32 masters: {type(self.optimizer).__name__} would evaluate the model at weights "
                    "that the model does not have yet. Use an optimizer without one, or another precision"
                )
            self.gather()
        result = self._step(closure)
        if self._masters is not None:
            if self.engine.reads_low:
                self._masters.clear()
            else:
                self._masters.give_back()
        if self._sums is not None and self._sums.on:
            self._forget()
        return result

    def leave(self, factor: Factor | None) -> None:
        """The next step is to multiply by `factor`; None: by nothing."""
        self.factor = factor
        if self._by_itself is not None:
            self._by_itself.remove()
            self._by_itself = None
        if factor is not None:
            self._by_itself = self.optimizer.register_step_pre_hook(lambda *_: self.apply_factor())

    def apply_factor(self) -> None:
        """Multiply gradients in memory by what a clip has left to the step, so that they can be looked at and changed."""
        factor = self.factor
        self.leave(None)
        if factor is not None:
            factor.apply()

    def unused(self) -> bool:
        """Whether this rank holds gradients that no step has used since they were cleared. Waits for the device."""
        if self._spent:
            return False
        grads = [local(p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return any(bool((g._values() if g.is_sparse else g).any()) for g in grads)

    def parameters(self) -> list[tuple[Tensor, Tensor]]:
        """What the param groups hold, each with the model's own parameter: itself, or the one whose master it is."""
        low = {} if self._masters is None else self._masters.low
        return [(held, low.get(id(held), held)) for group in self.param_groups for held in group["params"]]

    def gather(self, in_memory: bool = False) -> None:
        """Put gradients where the step looks for them, before they are measured; or `in_memory` to be unscaled or clipped there."""
        if self._masters is not None and (in_memory or not self.engine.reads_low):
            self._masters.gather()

    def release(self) -> None:
        """Give the optimizer its own parameters back."""
        if self._masters is not None:
            self._masters.release()

    def _forget(self) -> None:
        assert self._sums is not None
        self._sums.drop(p for group in self.param_groups for p in group["params"])
        if self._masters is not None:
            self._sums.drop(self._masters.parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, unless they hold part of a window that is not finished.

        Both idioms work: after `step`, and at the beginning of each micro-step, also after another optimizer's backward.
        """
        clock, waiting = self._clock, self._waiting
        self._waiting = False
        if clock.accumulation != 1 and not self._spent:
            begins = (
                waiting or not clock.backwards
            )  # the call opens a micro-step; otherwise it follows this one's step
            if (begins and clock.micro > 1) or (clock.backwards and not clock.sync):
                return
        self._spent = False
        if self.factor is not None:
            self.leave(None)
        self.optimizer.zero_grad(set_to_none)
        if self._masters is not None:
            self._masters.clear()
        if self._sums is not None and self._sums.on:
            self._forget()

    @property
    def synchronizes(self) -> bool:
        """Whether the current micro-step ends its accumulation window."""
        return self._clock.sync

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped for an overflow. Waits for the device under fp16."""
        return self._scaler.skipped(self.optimizer)

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @property
    def has_masters(self) -> bool:
        return self._masters is not None

    @property
    def masters(self) -> list[tuple[Tensor, Tensor]]:
        """Low-precision parameters, each with the fp32 master that is stepped in its place, up to date."""
        return [] if self._masters is None else self._masters.pairs()

    def rest(self) -> dict[str, Any]:
        """What `state_dict` shows beside state and param groups, made by the class or a hook. Where there may be any, all ranks call it."""
        there: Any = self.optimizer
        hooks = there._optimizer_state_dict_pre_hooks or there._optimizer_state_dict_post_hooks
        if type(self.given).state_dict is torch.optim.Optimizer.state_dict and not hooks:
            return {}
        return {
            key: value for key, value in there.state_dict().items() if key not in ("state", "param_groups")
        }

    def listens(self) -> bool:
        """Whether the class or a hook has a part in `load_state_dict`."""
        there: Any = self.optimizer
        hooks = there._optimizer_load_state_dict_pre_hooks or there._optimizer_load_state_dict_post_hooks
        return type(self.given).load_state_dict is not torch.optim.Optimizer.load_state_dict or bool(hooks)

    def laid_out(self) -> list[tuple[Tensor, Tensor]]:
        """What the param groups hold, each parameter as its states lie: itself, or a DTensor where they are sharded and it is not."""
        held = [p for group in self.param_groups for p in group["params"]]
        there: Any = self.optimizer
        return list(zip(held, held if there is self.given else there.laid_out(held)))

    def remember(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """These are the states from now on, and no others; as `state` shows them. Parameters become their masters, rounded.

        Averages of the weights are left out where this run keeps none (see `load_state_dict`).
        """
        there: Any = self.optimizer
        states = self._without_stale(states)
        if there is self.given:
            there.state.clear()
            there.state.update(states)
        else:
            there.remember(states)
        if self._masters is not None:
            self._masters.give_back()
        fill_momentum(there)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state from here or from the plain optimizer; which implementation runs (fused, foreach) stays this run's.

        Averages of the weights are left out, with a word in the log, where this run keeps none: no step would move them, and a later run
        would take them for those of its weights. Only of torch's classes and ours: what another one calls "ema" may be its own.
        """
        if "state" in state_dict:  # a class may have a form of its own
            state_dict = {**state_dict, "state": self._without_stale(state_dict["state"])}
        self.optimizer.load_state_dict(keep_implementation(self.optimizer, state_dict))
        fill_momentum(self.optimizer)

    def _without_stale(self, states: Mapping[Any, Any]) -> Mapping[Any, Any]:
        given = self.given
        own = isinstance(given, FusedOptimizer)
        if self.engine.averages.decay is not None or (own and given.options.ema_decay is not None):
            return states
        if not own and not type(given).__module__.startswith("torch.optim"):
            return states
        kept = without(states)
        if not self._told and any(state is not states[key] for key, state in kept.items()):
            self._told = True
            logger.warning(
                f"{type(given).__name__}'s state comes with averages of the weights, and this run keeps none: they are dropped. "
                "Accelerator(ema_decay=…) goes on with them"
            )
        return kept

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def take_group(self) -> None:
        """The wrapped optimizer has got another param group."""
        if self._masters is not None:
            self._masters.take(self.optimizer.param_groups[-1:])
        fill_momentum(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)  # while a copy is being made of it
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"Prepared({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        names = ("optimizer", "_clock", "_scaler", "_seen", "_spent", "_waiting", "_masters", "_sums")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.engine = TorchEngine(self.optimizer, free=False)
        self.factor = self._by_itself = None
        self.away = self._told = False


for _name in (
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
):

    def _delegate(self: PreparedOptimizer, *args: Any, _name: str = _name, **kwargs: Any) -> Any:
        return getattr(self.optimizer, _name)(*args, **kwargs)

    setattr(PreparedOptimizer, _name, _delegate)


# -- Averages of the weights in the place of the weights, for a while.


@contextmanager
def averages_in(optimizers: Sequence[PreparedOptimizer], chosen: Container[int] | None) -> Iterator[None]:
    """Inside, parameters are their averages, where there are such; afterwards what they were, bit for bit. A collective under zero1.

    The weights of training are copied meanwhile. They are written past the counters by which a change is noticed (masters, autograd):
    nothing has been stepped.

    Args:
        chosen: ids of the parameters; None: all.
    """
    kept: list[tuple[Tensor, Tensor]] = []
    for optimizer in optimizers:
        there = optimizer.optimizer
        reunited: list[Tensor] = []
        for held, parameter in optimizer.parameters():
            average = average_of(there, held) if chosen is None or id(parameter) in chosen else None
            if average is None:
                continue
            whole = local(parameter).data
            kept.append((whole, whole.clone()))
            if isinstance(there, ShardedOptimizer):
                there.rows(whole).copy_(average)
                reunited.append(whole)
            else:
                whole.copy_(average)
        if isinstance(there, ShardedOptimizer):
            there.reunite(reunited)
        optimizer.away = True
    try:
        yield
    finally:
        for optimizer in optimizers:
            optimizer.away = False
        for whole, values in kept:
            whole.copy_(values)


def average_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """The average of `parameter`, or of this rank's part; None where no step has moved it yet."""
    holder, states = holder_of(optimizer, parameter)
    found = states[holder].get(EMA) if holder in states else None
    return None if found is None else local(found)


# -- A scheduler that counts optimizer updates.


class PreparedScheduler:
    """The user's scheduler, stepped only after an optimizer update: not on other micro-steps, nor where an overflow skipped it.

    Args:
        scheduler: any object with `step`.
        optimizers: the prepared optimizers it drives.
        with_optimizer: False steps it at every call.
        steps: steps of the wrapped scheduler a call (Accelerate: the number of processes).

    Attributes:
        each_update: whether the script's last call followed the one before by one update, and had no arguments.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        with_optimizer: bool = True,
        steps: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._with_optimizer = with_optimizer
        self._steps = steps
        self._seen = [optimizer.updates for optimizer in self.optimizers]
        self.each_update = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule, if there was an update since the last call: after each batch, or once an epoch."""
        if self._with_optimizer:
            since = max(self.behind, default=0)
            if since:
                self.each_update = since == 1 and not args and not kwargs
            if not self._updated():
                return
        if not self._with_optimizer or self._steps == 1:
            self.scheduler.step(*args, **kwargs)
            return
        for _ in range(self._steps):
            if not self._at_horizon():
                self.scheduler.step(*args, **kwargs)

    def _at_horizon(self) -> bool:
        """Whether torch would refuse a further step (OneCycleLR). Ranks are given whole rounds of batches: counted a process, they come to
        more steps than the loader had batches before it was shared out."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and self.scheduler.last_epoch >= total

    def _updated(self) -> bool:
        since = self.behind
        self.behind = [0] * len(since)
        # Several updates in a row are not all skipped: the scale falls with each.
        return any(
            n > 1 or (n == 1 and not optimizer.step_was_skipped)
            for n, optimizer in zip(since, self.optimizers)
        )

    @property
    def behind(self) -> list[int]:
        """Updates of each optimizer since the last call of `step`."""
        return [optimizer.updates - seen for optimizer, seen in zip(self.optimizers, self._seen)]

    @behind.setter
    def behind(self, counts: Sequence[int]) -> None:
        self._seen = [optimizer.updates - count for optimizer, count in zip(self.optimizers, counts)]

    def get_last_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        state = self.scheduler.state_dict()
        if isinstance(self.scheduler, SWALR):
            state.pop(
                "anneal_func", None
            )  # a function that its constructor sets; in its state before torch 2.10
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)  # while a copy is being made of it
        return getattr(self.scheduler, name)
