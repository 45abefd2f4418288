"""Checkpoints of one sharded model or optimizer, by the functions of ``accelerate.utils`` that libraries call."""

from __future__ import annotations

import os
from typing import Any

from ...checkpoint import folders, load, save
from ...checkpoint.model_state import ModelState, OptimizerState
from ...errors import StepError


def save_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: Any, output_dir: str, model_index: int = 0, **_: Any
) -> None:
    """Write the weights of one prepared model to ``pytorch_model_fsdp_0`` in `output_dir`; all ranks call it."""
    _save(accelerator, _model(accelerator, model), output_dir, "pytorch_model_fsdp", model_index)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: str,
    optimizer_index: int = 0,
    **_: Any,
) -> None:
    """Write the state of one prepared optimizer to ``optimizer_0`` in `output_dir`; all ranks call it."""
    _save(accelerator, _optimizer(accelerator, optimizer), output_dir, "optimizer", optimizer_index)


def load_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: Any, input_dir: str, model_index: int = 0, **_: Any
) -> None:
    """Load what `save_fsdp_model` wrote; all ranks call it."""
    _load(accelerator, _model(accelerator, model), input_dir, "pytorch_model_fsdp", model_index)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: str,
    optimizer_index: int = 0,
    **_: Any,
) -> None:
    """Load what `save_fsdp_optimizer` wrote; all ranks call it."""
    _load(accelerator, _optimizer(accelerator, optimizer), input_dir, "optimizer", optimizer_index)


def _model(accelerator: Any, model: Any) -> Any:
    (route,) = accelerator._prepared.routes((model,))
    index = [prepared.route for prepared in accelerator._prepared.models].index(route)
    return _parts(accelerator, ModelState)[index]


def _optimizer(accelerator: Any, optimizer: Any) -> Any:
    there = [o for o in accelerator._prepared.optimizers if optimizer in (o, o.optimizer)]
    if not there:
        raise StepError(f"this {type(optimizer).__name__} is not prepared: pass what prepare() returned")
    return _parts(accelerator, OptimizerState)[accelerator._prepared.optimizers.index(there[0])]


def _parts(accelerator: Any, kind: type) -> list[Any]:
    models = range(len(accelerator._prepared.models))
    return [part for part in accelerator._parts(models) if isinstance(part, kind)]


def _save(accelerator: Any, part: Any, folder: str, name: str, index: int) -> None:
    accelerator._world.settle()
    plan = accelerator.plan.as_dict()
    target = save.Target(folders.open_storage(os.fspath(folder)), f"{name}_{index}", 0, plan)
    accelerator._saver().save(target, [part])


def _load(accelerator: Any, part: Any, folder: str, name: str, index: int) -> None:
    storage = folders.open_storage(os.fspath(folder))
    load.load_checkpoint(accelerator._world, storage, f"{name}_{index}", [part])
