"""initialize: models and optimizers as one of Apex's levels has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..saying import layer
from . import models as of_models
from . import optimizers as of_optimizers
from .casts import casts
from .properties import properties
from .state import LossScaler, state

NATIVE = """
acc = Accelerator(mixed_precision="{level}")
model, optimizer, loader = acc.prepare(model, optimizer, loader)
acc.backward(loss)  # with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()
acc.clip_grad_norm_(model.parameters(), 1.0)  # clip_grad_norm_(amp.master_params(optimizer), 1.0)
optimizer.step()
"""


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """`models` and `optimizers`, the same objects, changed in place to train at `opt_level`; wrap for DDP afterwards.

    Args:
        models: one, or a list: what is returned is alike.
        optimizers: one, a list, or None: then only models are returned.
        enabled: False changes nothing, and `scale_loss` hands out the loss.
        opt_level: "O0" fp32, "O1" casts around functions, "O2" fp16 with fp32 masters, "O3" fp16.
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale: where the level is to be another; None is
            what it has. Booleans may be strings.
        cast_model_outputs: type of the models' outputs. By default O0, O2 and O3 give fp32, O1 what the last function made.
        num_losses: how many losses have a scale of their own (`scale_loss`'s loss_id).
        verbosity: 0 prints nothing.
        min_loss_scale, max_loss_scale: of dynamic scales, which begin at 2**16, double after 2,000 good blocks and are halved at an
            overflow.

    Raises:
        TypeError: models or optimizers that are none.
        ApexError: a level or property that is not known or does not fit; a model that is wrapped or not fp32; an optimizer that was given
            before. Nothing has changed then.
    """
    models_listed, optimizers_listed = isinstance(models, list), isinstance(optimizers, list)
    nets = list(models) if models_listed else [models]
    steppers = list(optimizers) if optimizers_listed else [] if optimizers is None else [optimizers]
    if not all(isinstance(net, nn.Module) for net in nets):
        raise TypeError("models must be either a single model or a list of models")
    if not all(isinstance(stepper, torch.optim.Optimizer) for stepper in steppers):
        raise TypeError("optimizers must be either a single optimizer or a list of optimizers")
    if enabled:
        given = {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
        }
        level = properties(opt_level, given)
        of_models.check(nets)
        of_optimizers.check(steppers)
        scalers = [LossScaler(i, level.loss_scale, min_loss_scale, max_loss_scale) for i in range(num_losses)]
        layer.use("amp", NATIVE.format(level=opt_level))
        state.properties, state.loss_scalers = level, scalers
        state.verbosity = verbosity
        _say(opt_level, given)
        for net in nets:
            of_models.prepare(net, level, cast_model_outputs)
        for stepper in steppers:
            of_optimizers.prepare(stepper, level)
    casts.off()
    state.enabled = bool(enabled)
    if not enabled:
        state.properties, state.loss_scalers = None, []
    elif level.patch_torch_functions:
        first = next((p for net in nets for p in net.parameters()), torch.empty(()))
        casts.on(first.device)
    if optimizers is None:
        return models
    return models, optimizers


def _say(opt_level: str, given: dict[str, Any]) -> None:
    level = state.properties
    assert level is not None
    changed = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    state.say(
        f"Selected optimization level {opt_level}: {level.brief}{', with ' + ', '.join(changed) if changed else ''}.",
        True,
    )
    for name in given:
        state.say(f"{name:22} : {getattr(level, name)}", True)
