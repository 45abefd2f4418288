"""`initialize`: models and optimizers at one of Apex's levels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....optim.masters import LOW
from ....precision.levels import cast, cast_model
from . import optimizers as of_optimizers
from .casts import handle
from .state import PROPERTIES, ApexError, LossScaler, Properties, layer, maybe_print, properties, state

NATIVE = """
acc = Accelerator(mixed_precision="{level}")
model, optimizer, loader = acc.prepare(model, optimizer, loader)
acc.backward(loss)  # with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()
acc.clip_grad_norm_(model.parameters(), 1.0)  # clip_grad_norm_(amp.master_params(optimizer), 1.0)
optimizer.step()
"""
BRIEF = {
    "O0": "fp32 training",
    "O1": "casts around torch's functions",
    "O2": "fp16 training with fp32 batch-norm and fp32 master weights",
    "O3": "pure fp16 training",
}


def initialize(
    models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None, patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None, master_weights: bool | str | None = None,
    loss_scale: float | str | None = None, cast_model_outputs: torch.dtype | None = None, num_losses: int = 1,
    verbosity: int = 1, min_loss_scale: float | None = None, max_loss_scale: float = 2.0**24,
) -> Any:  # fmt: skip
    """`models` and `optimizers`, the same objects, changed in place to train at `opt_level`; wrap for DDP afterwards.

    Dynamic scales begin at 2**16, double after 2,000 good blocks and are halved at an overflow. cast_model_type=False casts nothing.

    Raises:
        TypeError: models or optimizers of another type.
        ApexError: a level or property that is not known or does not fit; a model that is wrapped or not fp32; an optimizer that was given
            before. Nothing has changed then.
    """
    nets = list(models) if isinstance(models, list) else [models]
    steppers = list(optimizers or []) if isinstance(optimizers, list | None) else [optimizers]
    if not all(isinstance(net, nn.Module) for net in nets):
        raise TypeError("models must be either a single model or a list of models")
    if not all(isinstance(stepper, torch.optim.Optimizer) for stepper in steppers):
        raise TypeError("optimizers must be either a single optimizer or a list of optimizers")
    if not enabled:
        handle._deactivate()
        state.opt_properties, state.loss_scalers = Properties(), []
        return models if optimizers is None else (models, optimizers)
    values = (cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale)
    given = {name: value for name, value in zip(PROPERTIES, values) if value is not None}
    level = properties(opt_level, given)
    _check(nets)
    of_optimizers.check(steppers)
    bounds = {"min_loss_scale": min_loss_scale, "max_loss_scale": max_loss_scale}
    scalers = [LossScaler(level.loss_scale, **bounds) for _ in range(num_losses)]
    handle._deactivate()
    layer.use("amp", NATIVE.format(level=opt_level))
    state.opt_properties, state.loss_scalers, state.verbosity = level, scalers, verbosity
    changed = ", ".join(f"{name}={value!r}" for name, value in given.items())
    brief = BRIEF[opt_level] + (changed and f", with {changed}")
    maybe_print(f"Selected optimization level {opt_level}: {brief}.", True)
    for name in PROPERTIES:
        maybe_print(f"{name:22} : {getattr(level, name)}", True)
    for i, scaler in enumerate(scalers):
        scaler.number = i
    for net in nets:
        _prepare(net, level, cast_model_outputs)
    for stepper in steppers:
        of_optimizers.prepare(stepper, level)
    if level.patch_torch_functions:
        handle.on(next((p.device for net in nets for p in net.parameters()), torch.device("cpu")))
    return models if optimizers is None else (models, optimizers)


def _check(models: list[nn.Module]) -> None:
    """Refuse models that are wrapped already or not fp32, before anything has changed."""
    for model in models:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ApexError(
                f"Incoming model is an instance of {type(model).__name__}. Parallel wrappers should only be applied to the model(s) AFTER "
                "the model(s) have been returned from amp.initialize"
            )
        if state.allow_incoming_model_not_fp32:
            continue
        wrong = [("param", *entry) for entry in model.named_parameters() if entry[1].dtype != torch.float32]
        wrong += [("buffer", *entry) for entry in model.named_buffers() if entry[1].dtype in LOW]
        for what, name, tensor in wrong:
            if tensor.is_floating_point():
                raise ApexError(
                    f"Found {what} {name} with type {tensor.dtype}, expected torch.float32. When using amp.initialize, you do not "
                    "need to call .half() on your model before passing it, no matter what optimization level you choose"
                )


def _prepare(model: nn.Module, level: Properties, outputs: torch.dtype | None) -> None:
    """Cast `model`'s parameters, inputs and outputs; for ``outputs=None`` these to fp32 where inputs are cast."""
    dtype = level.cast_model_type
    if isinstance(dtype, torch.dtype):
        if dtype in LOW:
            cast_model(model, dtype, bool(level.keep_batchnorm_fp32))
            for module in model.modules():
                module.register_state_dict_post_hook(partial(_save_in_fp32, dtype))
        model.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
        outputs = outputs or torch.float32
    if outputs is not None:
        model.register_forward_hook(partial(_cast_outputs, outputs), prepend=True)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast(args, dtype), cast(kwargs, dtype)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, outputs: Any) -> Any:
    return cast(outputs, dtype)


def _save_in_fp32(dtype: torch.dtype, module: nn.Module, found: dict[str, Any], prefix: str, _: Any) -> None:
    """Tensors of `dtype` become fp32 in state dicts, so that checkpoints are alike at every level."""
    for name, tensor in found.items():
        if name.startswith(prefix) and isinstance(tensor, Tensor) and tensor.dtype == dtype:
            found[name] = tensor.float()
