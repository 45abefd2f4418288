"""scale_loss: a loss times its scale, and after the block gradients divided by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ....errors import RefusedError
from ..saying import ApexError
from .optimizers import share_of
from .state import state


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """``with scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()``.

    Afterwards gradients (`master_params`'s) are divided by the scale, and added to those of the blocks since the last step. An overflow
    skips the next step of every optimizer given, once, and the step says so.

    Args:
        loss: a tensor with one element.
        optimizers: every one whose parameters the loss depends on.
        loss_id: which scale, below `initialize`'s num_losses.
        model: without effect, as in Apex, which reserves it.
        delay_unscale: leave gradients multiplied by the scale; the next block without it, with the same loss_id, divides them all.

    Raises:
        ApexError: before `initialize`; an optimizer or loss_id that it does not know; gradients that are scaled otherwise.
        RefusedError: delay_overflow_check, which Apex has for its own experiments.
    """
    if delay_overflow_check:
        raise RefusedError(
            "amp.scale_loss(delay_overflow_check=True): each overflow is looked for at once; leave it out"
        )
    if state.enabled is None:
        raise ApexError(
            "Invoked 'with amp.scale_loss', but internal Amp state has not been initialized. model, optimizer = amp.initialize(model, "
            "optimizer, opt_level=...) must be called before 'with amp.scale_loss'"
        )
    if not state.enabled:
        yield loss
        return
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    shares = [share_of(optimizer) for optimizer in given]
    scaler = state.loss(loss_id)
    assert state.properties is not None
    if not state.properties.master_weights and not scaler.dynamic and scaler.loss_scale() == 1.0:
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
    found = scaler.scaler.divide([g for share in shares for g in share.gradients()], loss.device)
    for share in shares:
        share.end()
    if scaler.overflowed(found):
        for share in shares:
            share.overflow = scaler
