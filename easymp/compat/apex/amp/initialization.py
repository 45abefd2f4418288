"""initialize: models and optimizers as one of Apex's levels has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....optim.masters import LOW
from ....precision.levels import cast, cast_model
from ..layer import ApexError, layer
from . import optimizers as of_optimizers
from .casts import casts
from .state import LossScaler, Properties, properties, state

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
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale: override the level's
            properties; None keeps them. Booleans may be strings.
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
        check(nets)
        of_optimizers.check(steppers)
        scalers = [LossScaler(i, level.loss_scale, min_loss_scale, max_loss_scale) for i in range(num_losses)]
        layer.use("amp", NATIVE.format(level=opt_level))
        state.properties, state.loss_scalers = level, scalers
        state.verbosity = verbosity
        _say(opt_level, given)
        for net in nets:
            prepare(net, level, cast_model_outputs)
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


def check(models: list[nn.Module]) -> None:
    """Refuse models that cannot be initialized, before anything has changed.

    Raises:
        ApexError: a model that is wrapped already, or is not fp32.
    """
    for model in models:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ApexError(
                f"Incoming model is an instance of {type(model).__name__}. Parallel wrappers should only be applied to the model(s) AFTER "
                "the model(s) have been returned from amp.initialize"
            )
        for what, named in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                if (
                    tensor.is_floating_point()
                    and tensor.dtype != torch.float32
                    and (what == "param" or tensor.dtype in LOW)
                ):
                    raise ApexError(
                        f"Found {what} {name} with type {tensor.dtype}, expected torch.float32. When using amp.initialize, you do not "
                        "need to call .half() on your model before passing it, no matter what optimization level you choose"
                    )


def prepare(model: nn.Module, level: Properties, outputs: torch.dtype | None) -> None:
    """Cast `model`'s parameters, inputs and outputs.

    Args:
        outputs: their type; None: fp32 where inputs are cast, and else what the last function made of them.
    """
    dtype = level.cast_model_type
    if dtype is not None:
        if dtype in LOW:
            cast_model(model, dtype, bool(level.keep_batchnorm_fp32))
            for module in model.modules():
                module.register_state_dict_post_hook(InFP32(dtype))
        model.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
        outputs = outputs or torch.float32
    if outputs is not None:
        model.register_forward_hook(CastOutputs(outputs), prepend=True)


@dataclass
class CastInputs:
    """A hook before forward: floating-point inputs become `dtype`."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast(args, self.dtype), cast(kwargs, self.dtype)


@dataclass
class CastOutputs:
    """A hook after forward: floating-point outputs become `dtype`."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        return cast(outputs, self.dtype)


@dataclass
class InFP32:
    """A hook after state_dict: tensors of `dtype` become fp32, so that checkpoints are alike at every level."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, found: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, tensor in found.items():
            if name.startswith(prefix) and isinstance(tensor, Tensor) and tensor.dtype == self.dtype:
                found[name] = tensor.float()
