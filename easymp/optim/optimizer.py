"""Optimizers and schedulers as `prepare` returns them: they follow the accumulation window and the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import SWALR
from torch.utils.hooks import RemovableHandle

from ..base.accumulation import Phase, Turn, UpdateWindow
from ..base.dtensor import local
from ..cuda import EMA
from ..errors import PrepareError, StepError
from ..logging import get_logger
from ..precision import Scaler
from ..precision.scaler import NO_GRADIENTS
from .engine import Engine
from .fused import FusedOptimizer
from .masters import Masters, Sums
from .muon import Muon
from .sharded import ShardedOptimizer, holder_of
from .torch_step import (
    HOOKS,
    Clip,
    fill_momentum,
    keep_implementation,
    parameters_of,
    step_without_hooks,
    watched,
)

logger = get_logger(__name__)


class PreparedOptimizer(torch.optim.Optimizer):
    """The user's optimizer behind `step` and `zero_grad` that act once an update, not at each micro-batch.

    State, param groups, hooks and everything else are the wrapped optimizer's own (`.optimizer`). A copy or pickle holds a copy of it,
    which steps by itself: without the run's window, loss scale and kernels.

    Args:
        given: the user's optimizer, where the strategy steps another one in its place.
        masters: fp32 parameters that `given` holds in place of low-precision ones.
        sums: of gradients over the window, forgotten with the gradients.
        engine: runs the step; torch's own by default.

    Attributes:
        turn: its part in the current update.
        away: whether the parameters hold their averages at the moment.
        updates: steps that ended a window, skipped ones included.
        cleared: called by `zero_grad` with a function that returns the ids of the model's parameters; None on one rank.
        ahead: ids of the parameters that backward has stepped since the last `step`.

    Example:
        >>> acc = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="no")
        >>> model = nn.Linear(2, 1)
        >>> model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters()))
        >>> for batch in torch.ones(4, 1, 2):
        ...     with acc.accumulate(model):
        ...         acc.backward(model(batch).sum())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> optimizer.updates, optimizer.step_was_skipped, optimizer.masters
        (2, False, [])
    """

    away, updates = False, 0
    cleared: Callable[[Callable[[], set[int]]], None] | None = None
    _told = False  # of averages that were dropped
    _group_of: dict[int, int] | None = None  # of parameters by id, where backward steps them
    # Hook that applies a waiting clip when the script steps the wrapped optimizer itself.
    _alone: RemovableHandle | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        window: UpdateWindow,
        scaler: Scaler,
        given: torch.optim.Optimizer | None = None,
        masters: Masters | None = None,
        sums: Sums | None = None,
        engine: Engine | None = None,
    ) -> None:
        # torch's own __init__ would build param groups and state a second time.
        self.ahead: set[int] = set()
        self.optimizer, self.given = optimizer, given or optimizer
        for name in HOOKS:
            if hasattr(optimizer, name):  # a wrapper may leave out torch's own __init__
                setattr(self, name, getattr(optimizer, name))
        self._masters, self._sums = masters, sums
        self._window, self._scaler = window, scaler
        self.turn = window.turns.setdefault(optimizer, Turn())
        self.engine = engine or Engine(optimizer, free=False)
        # On a stage without parameters, too: whether overflows are read on the device must be the same on all ranks.
        fill_momentum(optimizer)

    def __reduce__(self) -> Any:
        return _copied, (self.optimizer,)

    # -- the step -------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update at the end of a window, unless a gradient overflowed; do nothing on other micro-steps.

        Args:
            closure: evaluates the model again and returns the loss, as in torch.

        Returns:
            What the wrapped optimizer's step returns, or None.

        Raises:
            StepError: under accumulation, outside an `accumulate` block and before the window's number of backward passes; inside
                `averaged`.
        """
        window, turn = self._window, self.turn
        if window.accumulation != 1:
            if not window.inside:
                window.end_by_hand(turn)
            elif not window.sync:
                turn.waiting = True
                return None
        if self.away:
            why = "where the weights are not those of training"
            raise StepError(f"optimizer.step() inside `with accelerator.averaged():`, {why}")
        if self._group_of is not None and closure is not None:
            why = "the backward in the closure steps already. Leave one out"
            raise StepError(f"step(closure) under optimizer_in_backward=True: {why}")
        turn.spent, turn.waiting = True, False
        if turn.dropped:
            turn.dropped, turn.skipped = False, torch.ones(())
            return None
        self.ahead.clear()
        self.updates += 1
        low = self._masters is not None or (self._sums is not None and self._sums.on)
        result = self._step_low(closure) if low else self._step(closure)
        turn.phase = Phase.STEPPED  # of the backward in a closure, too
        for hear in window.stepped:
            hear(self)
        return result

    def step_in_backward(self, ranks: int) -> None:
        """Let `step_now` move parameters as their gradients are done; PrepareError if the optimizer needs all of them at once."""
        optimizer, why = self.optimizer, ""
        if self._masters is not None:
            why = "fp32 masters of low-precision parameters, which are stepped together"
        elif watched(optimizer):
            why = "a hook that looks at all gradients before the step"
        elif "step" in vars(optimizer) and not hasattr(vars(optimizer)["step"], "_wrapped_by_lr_sched"):
            why = "a step that was set on it"
        elif signature(optimizer.step).parameters["closure"].default is Parameter.empty:
            why = "a step that needs a closure"
        elif isinstance(optimizer, Muon) and ranks > 1:
            why = "a step that the ranks share, matrix by matrix"
        elif isinstance(optimizer, FusedOptimizer):
            if getattr(type(optimizer), "rule", None) is None or optimizer.rule.norm:
                why = "a step that needs the gradients of all parameters"
            elif optimizer.rounding is not None:
                why = "stochastic rounding, which draws for all parameters in their order"
            else:
                optimizer.do_without("optimizer_in_backward=True")
        if why:
            what = f"steps each parameter as its gradient is done, and this {type(self.given).__name__} has {why}"
            raise PrepareError(
                f"optimizer_in_backward=True {what}: leave it out, or use another optimizer or precision"
            )
        self._group_of = {}

    @torch.no_grad()
    def step_now(self, parameters: Sequence[Tensor]) -> None:
        """Step `parameters` alone, in backward, and free their gradients. Hooks of steps are left to `step`, which counts the update."""
        optimizer, where, ids = self.optimizer, self._group_of, {id(p) for p in parameters}
        assert where is not None
        if not ids.isdisjoint(self.ahead):
            what = (
                "a second gradient of a parameter before optimizer.step(), under optimizer_in_backward=True"
            )
            ways = "call accelerator.backward() once for each step(), and checkpoint with use_reentrant=False"
            raise StepError(f"{what}, which has stepped on the first: {ways}")
        every = optimizer.param_groups
        if not where.keys() >= ids:  # groups may have been added
            where.update((id(p), g) for g, group in enumerate(every) for p in group["params"])
        chosen: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            chosen.setdefault(where[id(parameter)], []).append(parameter)
        held = {g: every[g]["params"] for g in chosen}
        before = None if self.updates else counters(optimizer)
        step = step_without_hooks(type(optimizer))
        try:
            for g, few in chosen.items():
                every[g]["params"] = few
            optimizer.param_groups = [every[g] for g in chosen]
            self.engine.averages.around(parameters, lambda: step(optimizer))
        finally:
            optimizer.param_groups = every
            for g, params in held.items():
                every[g]["params"] = params
        for parameter in parameters:
            parameter.grad = None
        self.ahead |= ids
        if before is not None and (after := counters(optimizer)) != before:
            name = min(key for key in after if after[key] != before.get(key))[1]
            why = f"a step of this {type(self.given).__name__} has changed {name!r}, which counts for all of them"
            what = f"optimizer_in_backward=True steps each parameter alone, and {why}"
            raise StepError(f"{what}: leave optimizer_in_backward out, or use another optimizer")

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        scaler = self._scaler
        spike, self.turn.spike = self.turn.spike, None
        if closure is not None:
            if spike is not None:
                raise StepError(
                    "step(closure) after guard(), which has judged gradients that the closure replaces: leave one of them out"
                )
            self.apply_clip()
            moving = [p for p in parameters_of(self) if p.requires_grad]
            return self.engine.averages.around(moving, lambda: scaler.step(self.optimizer, closure))
        if scaler.enabled and may_leave([self]):
            leave_to_step([self], float("inf"), scaler)
        clip, found, scale = self.turn.clip, None, None
        if clip is not None:
            clip.gradients()  # checks that they are those that were measured
        if scaler.enabled:
            found = scaler.begin_step(self.optimizer)
            # A spike does not move the loss scale, as a step by our kernels would by what it skips.
            scale = scaler.lend(self.optimizer) if spike is None else None
        if spike is not None:
            found = spike if found is None else torch.maximum(found, spike.to(found.device))
        if spike is not None or not scaler.enabled:
            self.turn.skipped = found
        if clip is None:
            return self.engine.step(None, found, scale)
        self.leave(None)
        return self.engine.step(clip.factor, found, scale)

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
        self._forget()
        return result

    def leave(self, clip: Clip | None) -> None:
        """The next step multiplies by the factor of `clip`; None: by nothing."""
        self.turn.clip = clip
        if self._alone is not None:
            self._alone.remove()
            self._alone = None
        if clip is not None:
            self._alone = self.optimizer.register_step_pre_hook(lambda *_: self.apply_clip())

    def apply_clip(self) -> None:
        """Multiply gradients in memory by the factor that a clip has left to the step, so that they can be read and changed."""
        clip, turn = self.turn.clip, self.turn
        if clip is not None:
            self.leave(None)
            clip.apply()
            if turn.phase is Phase.CLIPPED:
                turn.phase = Phase.UNSCALED if self._scaler.enabled else Phase.ACCUMULATING

    def follow_backward(self) -> None:
        """A backward begins: it adds to gradients that were clipped, or begins the next update."""
        self.apply_clip()
        if self.turn.phase is Phase.STEPPED and not self._scaler.enabled:
            self.turn.begin()

    # -- the gradients --------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, unless they hold part of a window that is not finished."""
        turn = self.turn
        if self._window.keeps_gradients(turn):
            return
        if self.ahead:
            raise StepError(
                "zero_grad() between backward() and step(), under optimizer_in_backward=True: backward has stepped already. Call "
                "optimizer.step() first, or freeze parameters (requires_grad_(False)) through which a loss passes"
            )
        turn.spent, turn.spike = False, None
        if turn.clip is not None:
            self.leave(None)
        if turn.phase is not Phase.STEPPED or not self._scaler.enabled:
            turn.begin()
        self.optimizer.zero_grad(set_to_none)
        if self._masters is not None:
            self._masters.clear()
        self._forget()
        if self.cleared is not None:
            self.cleared(lambda: {id(own) for _, own in self.parameters()})

    def _forget(self) -> None:
        """Drop the fp32 sums of this optimizer's gradients."""
        if self._sums is not None and self._sums.on:
            self._sums.drop(p for pair in self.parameters() for p in pair)

    def unused(self) -> bool:
        """Whether this rank holds gradients that no step has used since they were cleared. Waits for the device."""
        if self.turn.spent:
            return False
        grads = [local(p.grad) for p in parameters_of(self) if p.grad is not None]
        return any(bool((g._values() if g.is_sparse else g).any()) for g in grads)

    def gather(self, in_memory: bool = False) -> None:
        """Move gradients to the masters where the step reads them there; `in_memory`: in any case, to be unscaled or clipped there."""
        if self._masters is not None and (in_memory or not self.engine.reads_low):
            self._masters.gather()

    def parameters(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters of the param groups, each with the model's own parameter: itself, or the one whose master it is."""
        low = {} if self._masters is None else self._masters.low
        return [(held, low.get(id(held), held)) for held in parameters_of(self)]

    def release(self) -> None:
        """Give the optimizer its own parameters back."""
        if self._masters is not None:
            self._masters.release()

    # -- attributes -----------------------------------------------------------------------------------------------------

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

    # -- the state ------------------------------------------------------------------------------------------------------

    def rest(self) -> dict[str, Any]:
        """Entries of `state_dict` beside state and param groups, made by the class or a hook. All ranks call it."""
        hooks = self._optimizer_state_dict_pre_hooks or self._optimizer_state_dict_post_hooks
        if type(self.given).state_dict is torch.optim.Optimizer.state_dict and not hooks:
            return {}
        state = self.optimizer.state_dict()
        return {key: value for key, value in state.items() if key not in ("state", "param_groups")}

    def listens(self) -> bool:
        """Whether the class or a hook has a part in `load_state_dict`."""
        hooks = self._optimizer_load_state_dict_pre_hooks or self._optimizer_load_state_dict_post_hooks
        return type(self.given).load_state_dict is not torch.optim.Optimizer.load_state_dict or bool(hooks)

    def laid_out(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters of the param groups, each with a tensor laid out as its states: itself, or a DTensor where they are sharded."""
        held, there = parameters_of(self), self.optimizer
        return list(zip(held, there.laid_out(held) if isinstance(there, ShardedOptimizer) else held))

    def remember(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Replace all states by these, in the form of `state`. Parameters become their masters, rounded."""
        there, states = self.optimizer, self._without_stale(states)
        if isinstance(there, ShardedOptimizer):
            there.remember(states)
        else:
            there.state.clear()
            there.state.update(states)
        if self._masters is not None:
            self._masters.give_back()
        fill_momentum(there)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state from here or from the plain optimizer; the implementation of the step (fused, foreach) stays this run's."""
        if "state" in state_dict:  # a class may have a form of its own
            state_dict = {**state_dict, "state": self._without_stale(state_dict["state"])}
        self.optimizer.load_state_dict(keep_implementation(self.optimizer, state_dict))
        fill_momentum(self.optimizer)

    def _without_stale(self, states: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """`states` without averages of the weights where this run keeps none; says so once in the log."""
        # No step would move them, and a later run would take them for averages of its weights. Another class than torch's and ours may
        # use the key "ema" itself.
        given = self.given
        own = isinstance(given, FusedOptimizer)
        if self.engine.averages.decay is not None or (own and given.options.ema_decay is not None):
            return states
        if not own and not type(given).__module__.startswith("torch.optim"):
            return states
        with_one = [key for key, state in states.items() if isinstance(state, Mapping) and EMA in state]
        rest = {key: {k: v for k, v in states[key].items() if k != EMA} for key in with_one}
        if rest and not self._told:
            self._told = True
            logger.warning(
                f"{type(given).__name__}'s state comes with averages of the weights, and this run keeps none: they are dropped. "
                "Accelerator(ema_decay=…) goes on with them"
            )
        return {**states, **rest}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def take_group(self) -> None:
        """The wrapped optimizer has got another param group."""
        if self._masters is not None:
            self._masters.take(self.optimizer.param_groups[-1:])
        fill_momentum(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)  # of an object under construction
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"Prepared({self.optimizer!r})"


def counters(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], float]:
    """The numbers that an optimizer keeps beside the states of parameters, by param group (-1: on itself) and name."""
    tables = [(-1, vars(optimizer)), *enumerate(optimizer.param_groups)]
    return {(g, name): v for g, table in tables for name, v in table.items() if type(v) in (int, float)}


def _copied(optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
    return PreparedOptimizer(optimizer, UpdateWindow(), Scaler(enabled=False))


# -- clipping that is left to the step ----------------------------------------------------------------------------------


@torch.no_grad()
def leave_to_step(optimizers: Sequence[PreparedOptimizer], max_norm: float, scaler: Scaler) -> Tensor:
    """Measure all gradients of `optimizers`, which take factors, and leave them the factor; returns the norm (0-dim, float32).

    Under a loss scale the norm is that of the gradients divided by it, and an overflow in any of them skips the steps of all.
    """
    counting = optimizers[0].engine.counting
    for optimizer in optimizers if counting.add is not None else ():
        for parameter in parameters_of(optimizer):
            counting.settle(parameter)
    found = [o.engine.gradients() for o in optimizers]
    here = any(found)
    scale = scaler.scale_of([o.optimizer for o in optimizers], here)
    others: list[Tensor] = []
    for optimizer in optimizers[:-1]:
        optimizer.engine.measure(max_norm, scale, others.append)

    anywhere: list[Tensor] = []  # number of ranks that hold gradients

    def over_ranks(totals: Tensor) -> None:
        for other in others:
            totals += other.to(totals.device)
        if counting.add is not None:
            both = torch.cat([totals, totals.new_full((1,), float(here))])
            counting.add(both)
            totals.copy_(both[:2])
            anywhere.append(both[2])

    alone = not others and counting.add is None
    result = optimizers[-1].engine.measure(max_norm, scale, None if alone else over_ranks)
    bad = result.found_inf
    if scale is not None:
        assert bad is not None
        if counting.add is None:
            bad = scaler.agreed(bad, here)
        elif not here and not anywhere[0].item():
            raise StepError(NO_GRADIENTS)
    for optimizer in optimizers if not scaler.enabled else ():
        optimizer.turn.begin()
    scaler.take([o.optimizer for o in optimizers], bad if scale is not None else None)
    for optimizer, gradients in zip(optimizers, found):
        optimizer.leave(Clip(result.factor, gradients))
    return result.norm


def may_leave(optimizers: Sequence[PreparedOptimizer]) -> bool:
    """Whether `leave_to_step` is for these now. The same on all ranks."""
    if not optimizers or any(o.turn.clip is not None or not o.engine.takes_factor() for o in optimizers):
        return False
    if len({o.engine.counting.add is None for o in optimizers}) > 1:
        return False
    phases = {o.turn.phase for o in optimizers}
    # Without a scale, gradients that are clipped after a step are made by the script itself.
    return not optimizers[0]._scaler.enabled or (len(phases) == 1 and Phase.STEPPED not in phases)


# -- averages of the weights --------------------------------------------------------------------------------------------


@contextmanager
def averages_in(optimizers: Sequence[PreparedOptimizer], chosen: Container[int] | None) -> Iterator[None]:
    """Inside, parameters with these ids (None: all) hold their averages; afterwards their own values, bit for bit. A collective."""
    # Written past the version counters of masters and autograd, since no step has changed the weights.
    kept: list[tuple[Tensor, Tensor]] = []
    for optimizer in optimizers:
        there = optimizer.optimizer
        gathered: list[Tensor] = []
        for held, parameter in optimizer.parameters():
            holder, states = holder_of(there, held)
            average = states[holder].get(EMA) if holder in states else None
            if average is None or not (chosen is None or id(parameter) in chosen):
                continue
            whole = local(parameter).data
            kept.append((whole, whole.clone()))
            if isinstance(there, ShardedOptimizer):
                there.rows(whole).copy_(local(average))
                gathered.append(whole)
            else:
                whole.copy_(local(average))
        if isinstance(there, ShardedOptimizer):
            there.gather_rows(gathered)
        optimizer.away = True
    try:
        yield
    finally:
        for optimizer in optimizers:
            optimizer.away = False
        for whole, values in kept:
            whole.copy_(values)


# -- schedulers ---------------------------------------------------------------------------------------------------------


class PreparedScheduler:
    """The user's scheduler, stepped only after an optimizer update: not on other micro-steps, nor after a skipped one.

    Args:
        scheduler: any object with `step`.
        optimizers: the prepared optimizers it drives.
        with_optimizer: False steps it at every call.
        steps: steps of the wrapped scheduler a call (Accelerate: the number of processes).

    Attributes:
        each_update: whether the script's last call followed the one before by one update, and had no arguments.

    Example:
        >>> acc = Accelerator(cpu=True)
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> model, optimizer, scheduler = acc.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
        >>> scheduler.step()  # no update yet
        >>> scheduler.get_last_lr()
        [1.0]
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        with_optimizer: bool = True,
        steps: int = 1,
    ) -> None:
        self.scheduler, self.optimizers = scheduler, list(optimizers)
        self._with_optimizer, self._steps = with_optimizer, steps
        self._seen = [optimizer.updates for optimizer in self.optimizers]
        self.each_update = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule, if there was an update since the last call: after each batch, or once an epoch.

        Args:
            args: for the wrapped scheduler's step.
            kwargs: likewise.
        """
        if self._with_optimizer:
            since = self.behind
            if last := max(since, default=0):
                self.each_update = last == 1 and not args and not kwargs
            self.behind = [0] * len(since)
            # Several updates in a row are not all skipped: the scale falls with each.
            pairs = zip(since, self.optimizers)
            if not any(n > 1 or (n == 1 and not optimizer.step_was_skipped) for n, optimizer in pairs):
                return
        if not self._with_optimizer or self._steps == 1:
            self.scheduler.step(*args, **kwargs)
            return
        # torch refuses steps beyond `total_steps` (OneCycleLR): batches counted once a process can exceed the loader's length.
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._steps):
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)

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
            state.pop("anneal_func", None)  # set by its constructor; in its state before torch 2.10
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)  # of an object under construction
        return getattr(self.scheduler, name)
