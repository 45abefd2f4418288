"""Optimizers under amp: fp32 masters, accumulated gradients kept apart from scaled ones, skipped steps, and `scale_loss`.

In place: an optimizer gets a subclass of its own class, so that schedulers made before go on with it, and masters replace its half
parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from ....errors import RefusedError
from ....optim.larc import LARC
from ....optim.masters import Masters
from .casts import disable_casts
from .state import ApexError, LossScaler, Properties, maybe_print, state

Seen = list[tuple[Tensor, Tensor | None, int]]  # parameters, each with its gradient and that one's version


class Share:
    """The state of amp for one optimizer between two steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: bool) -> None:
        self._optimizer: Any = weakref.proxy(optimizer)  # makes no cycle
        self.masters = Masters(self._optimizer, {}) if masters else None
        self.scaler: LossScaler | None = None  # of the present gradients
        self.overflow: LossScaler | None = None  # on which a gradient overflowed since the last step
        self._stash: list[tuple[Tensor, Tensor]] = []  # divided gradients of the blocks before
        self._strange: Seen = []  # gradients of a loss that this optimizer was not given with

    def parameters(self) -> Iterator[Tensor]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def begin(self, scaler: LossScaler) -> None:
        """Put present gradients aside before scaled ones come, unless they are scaled, too."""
        if self.scaler is scaler:
            return
        if self.scaler is not None:
            raise ApexError(
                f"gradients scaled with loss_id={self.scaler.number} are waiting (delay_unscale=True), and others with loss_id="
                f"{scaler.number} would be added: end each loss with a context that unscales before the next begins"
            )
        self.check()
        for parameter in self.masters.parameters if self.masters is not None else ():
            parameter.grad = None  # of a loss that this optimizer was not given with
        self._stash = [(p, p.grad) for p in self.parameters() if p.grad is not None]
        for parameter, _ in self._stash:
            parameter.grad = None
        self.scaler = scaler

    @torch.no_grad()
    def end(self) -> None:
        """Add the gradients that were put aside to the divided ones."""
        for parameter, stashed in self._stash:
            if parameter.grad is None:
                parameter.grad = stashed
            elif parameter.grad.is_sparse or stashed.is_sparse:
                parameter.grad = parameter.grad + stashed
            else:
                parameter.grad.add_(stashed)
        self._stash, self.scaler = [], None

    def abort(self) -> None:
        """Restore the gradients that were put aside, after a failed block."""
        stash = self._stash
        for parameter in self.parameters():
            parameter.grad = None
        self.forget()
        self._stash = stash
        self.end()

    def forget(self) -> None:
        """The gradients were cleared."""
        self._stash, self._strange, self.scaler = [], [], None
        if self.masters is not None:
            self.masters.clear()

    def seen(self) -> Seen:
        """The gradients before the backward of a loss that this optimizer was not given with."""
        return [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in self.parameters()]

    def compare(self, before: Seen) -> None:
        """Note gradients that changed since `before`: they are multiplied by an unknown scale until they are cleared."""
        for (parameter, grad, version), (_, now, newer) in zip(before, self.seen()):
            if now is not None and (now is not grad or newer != version):
                self._strange.append((parameter, now, newer))

    def check(self) -> None:
        """Raise ApexError where such gradients were not cleared."""
        if any(p.grad is g and g is not None and g._version == version for p, g, version in self._strange):
            raise ApexError(
                "this optimizer's parameters hold gradients of a loss whose amp.scale_loss it was not given with, still multiplied by "
                "the loss scale: pass every optimizer whose parameters the loss depends on, as in amp.scale_loss(loss, [optimizer_a, "
                "optimizer_b]), or clear them with zero_grad() first"
            )
        self._strange = []

    def check_ready(self) -> None:
        """Raise ApexError where gradients are not ready for a step."""
        if self.scaler is not None:
            raise ApexError(
                "step() on gradients that the loss scale multiplies: amp.scale_loss before it must not have delay_unscale=True"
            )
        self.check()
        if self.masters is not None and any(p.grad is not None for p in self.masters.parameters):
            raise ApexError(
                "the model holds gradients that did not come by amp.scale_loss with this optimizer: put `with amp.scale_loss(loss, "
                "optimizer) as scaled_loss: scaled_loss.backward()` around every backward, with every optimizer whose parameters the "
                "loss depends on"
            )


class Stepping:
    """Comes before the optimizer's own class."""

    _amp: Share

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, or none after an overflow; parameters become their masters, rounded."""
        self._opt_called = True  # by which torch's schedulers know that a step came before theirs
        share = self._amp
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None and (share.masters is not None or share.overflow is not None):
            raise ApexError("Currently, Amp does not support closure use: call the closure before step()")
        if share.overflow is not None:
            scaler, share.overflow = share.overflow, None
            reducing = f"loss scaler {scaler.number} reducing loss scale to {scaler.loss_scale()}"
            maybe_print(f"Gradient overflow.  Skipping step, {reducing}")
            if share.masters is not None:
                share.masters.clear()
            return None
        share.check_ready()
        if share.masters is not None:
            share.masters.pairs()  # take over weights that were loaded into the model since
        with disable_casts():
            result = super().step(*args, **kwargs)  # type: ignore[misc]
        if share.masters is not None:
            share.masters.give_back()
        return result

    # torch's marks: the inner step calls the hooks, and schedulers read `_opt_called`.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears gradients, of masters and of the model."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        self._amp.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Half parameters get masters, as those of `initialize` did."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._amp.masters is not None:
            self._amp.masters.take(self.param_groups[-1:])  # type: ignore[attr-defined]


def check(optimizers: list[torch.optim.Optimizer]) -> None:
    """Raise ApexError for optimizers that were initialized before, or have another library's step."""
    for i, optimizer in enumerate(optimizers):
        if isinstance(optimizer, Stepping) or any(optimizer is other for other in optimizers[:i]):
            raise ApexError("A given optimizer should only be passed through amp.initialize once")
        step: Callable[..., Any] | None = vars(optimizer).get("step")
        if step is not None and "_wrapped_by_lr_sched" not in vars(step):
            raise ApexError(
                f"the step of this {type(optimizer).__name__} was replaced by another library, past which no step can be skipped: call "
                "amp.initialize first"
            )


def prepare(optimizer: torch.optim.Optimizer, level: Properties) -> None:
    """Give `optimizer` masters, where the level has them, and a step that may be skipped."""
    kind, it = type(optimizer), cast(Any, optimizer)
    vars(it).pop("step", None)  # a scheduler's counter, which ours replaces
    it._amp = Share(optimizer, bool(level.master_weights))
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    it.__class__ = type(kind.__name__, (Stepping, kind), names)
    state.optimizers.add(optimizer)


def share_of(optimizer: Any) -> Share:
    """The state of amp for `optimizer`. Raises ApexError where it was not given to `initialize`."""
    outer = isinstance(optimizer, LARC) and not isinstance(optimizer, Stepping)
    inside = optimizer.optim if outer else optimizer
    if not isinstance(inside, Stepping):
        raise ApexError(
            f"this {type(inside).__name__} was not passed to amp.initialize: model, optimizer = amp.initialize(model, optimizer, "
            "opt_level=…) comes before amp.scale_loss"
        )
    return inside._amp


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors that the optimizer steps: fp32 masters, up to date, and parameters without one. For clipping, after `scale_loss`."""
    if isinstance(optimizer, Stepping) and optimizer._amp.masters is not None:
        optimizer._amp.masters.pairs()
    return (p for group in optimizer.param_groups for p in group["params"])


@contextmanager
def scale_loss(
    loss: Tensor, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], loss_id: int = 0,
    model: Any = None, delay_unscale: bool = False, delay_overflow_check: bool = False,
) -> Iterator[Tensor]:  # fmt: skip
    """Give a ``with`` block the scaled loss, whose ``backward()`` it calls.

    Afterwards gradients (of `master_params`) are divided by the scale, and added to those of the blocks since the last step. An
    overflow skips the next step of every optimizer given, once, and the step says so.

    Each optimizer whose parameters the loss depends on must be given. With `delay_unscale` gradients stay multiplied by the scale; the next
    block without it, with the same `loss_id`, divides them all. Raises RefusedError for `delay_overflow_check`, ApexError for the rest.
    """
    if delay_overflow_check:
        raise RefusedError("delay_overflow_check=True: each overflow is looked for at once; leave it out")
    if state.opt_properties is None:
        raise ApexError(
            "Invoked 'with amp.scale_loss', but internal Amp state has not been initialized. model, optimizer = amp.initialize(model, "
            "optimizer, opt_level=...) must be called before 'with amp.scale_loss'"
        )
    if not state.opt_properties.enabled:
        yield loss
        return
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    shares, scaler = [share_of(optimizer) for optimizer in given], state.loss(loss_id)
    if not scaler.dynamic and scaler.loss_scale() == 1.0 and all(share.masters is None for share in shares):
        yield loss.float()
        return
    others = [share for share in map(share_of, state.optimizers) if share not in shares]
    before = [share.seen() for share in others]
    began = [share for share in shares if share.scaler is None]
    for share in shares:
        share.begin(scaler)
    try:
        yield scaler.scaler.scale(loss.float())
    except BaseException:
        for share in began:
            share.abort()
        raise
    for share, gradients in zip(others, before):
        share.compare(gradients)
    if delay_unscale:
        return
    for share in shares:
        if share.masters is not None:
            share.masters.gather()
    gradients = [p.grad for share in shares for p in share.parameters() if p.grad is not None]
    found = scaler.scaler.divide(gradients, loss.device)
    for share in shares:
        share.end()
    if scaler.overflowed(found):
        for share in shares:
            share.overflow = scaler
