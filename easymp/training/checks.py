"""What the face refuses, in sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.lazy import modules_at_first_use
from ..errors import BatchError, PrepareError, RefusedError, SettingError, StepError, nearest
from ..options import HANDLERS
from ..settings import NAMES

if TYPE_CHECKING:
    from ..optim import torch_step

modules_at_first_use(globals(), torch_step=".optim.torch_step")

# Keywords of the peer that have another place here, or none yet.
ELSEWHERE = {
    "rng_types": "there is nothing to synchronise: data order is f(seed, epoch) on every rank. Leave it out",
    "dynamo_plugin": "pass compile=CompileOptions(...)",
    **{
        name: f"pass dataloader_config=DataLoaderConfiguration({name}=...)"
        for name in ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
    },
    "deepspeed_plugin": "pass strategy='zero1' (ZeRO-1) or 'fsdp' (ZeRO-2 and 3), and strategy_options",
    "deepspeed_plugins": "pass strategy='zero1' (ZeRO-1) or 'fsdp' (ZeRO-2 and 3), and strategy_options",
    "fsdp_plugin": "pass strategy='fsdp' and strategy_options=FSDPOptions(...)",
    "torch_tp_plugin": "pass strategy='tensor_parallel' and strategy_options=TensorParallelOptions(...)",
    "megatron_lm_plugin": "pass strategy='tensor_parallel' or 'pipeline', and strategy_options",
    "parallelism_config": "pass strategy='hsdp' or 'tensor_parallel', and strategy_options",
}
ADDED = "add it to the model before prepare(), or call free_memory() and prepare model and optimizer anew"
# What the constructor takes beside the settings.
KEYWORDS = (
    *(
        "device_placement",
        "dataloader_config",
        "gradient_accumulation_plugin",
        "step_scheduler_with_optimizer",
        "settings",
    ),
    *(
        "scheduler_steps_per_process",
        "kwargs_handlers",
        "strategy_options",
        "initialize",
        "activation_checkpointing",
        "compile",
        "dynamo_backend",
        *("project_config", "save_on_signal"),
        *NAMES,
    ),
)


def refuse_unknown(others: dict[str, Any]) -> None:
    """A sentence for keywords that Accelerator() does not take; those of the peer that are left at None are no request."""
    for name, value in others.items():
        if name in ELSEWHERE:
            if value is not None:
                raise RefusedError(f"Accelerator({name}={value!r}) is not honoured: {ELSEWHERE[name]}")
        else:
            raise SettingError(f"Accelerator() has no argument {name!r}{nearest(name, KEYWORDS)}")


def by_kind(handlers: Sequence[Any] | None) -> dict[type, Any]:
    """kwargs_handlers by their type, at most one of each."""
    found: dict[type, Any] = {}
    for handler in handlers or ():
        if type(handler) not in HANDLERS:
            known = ", ".join(kind.__name__ for kind in HANDLERS)
            raise SettingError(f"kwargs_handlers holds a {type(handler).__name__}; it takes {known}")
        if type(handler) in found:
            raise SettingError(f"kwargs_handlers holds two {type(handler).__name__}: pass one")
        found[type(handler)] = handler
    return found


def loss_trouble(loss: Any) -> str:
    """Why backward cannot start from `loss`."""
    if not isinstance(loss, Tensor):
        return f"backward() needs the loss as a tensor, not {type(loss).__name__}: pass it before .item() or float()"
    if not loss.requires_grad:
        return (
            "backward() got a loss without a graph (requires_grad is False): it was computed under no_grad(), detached, or from "
            "frozen parameters only"
        )
    return (
        f"backward() got a loss of shape {tuple(loss.shape)}: reduce it to one number first, e.g. loss.mean()"
    )


def explain_second_backward(error: RuntimeError) -> None:
    """Raises a StepError where `error` is torch's about a gradient of a gradient."""
    said = str(error).splitlines()[0] if str(error) else ""
    if "double backward" in said or "differentiate twice" in said:
        raise StepError(
            "the loss holds the gradient of a gradient, which a part of the model does not have: torch.compile's default backend, "
            f"Linears in fp8 and synchronised batch-norm have none. Leave these out. torch said: {said}"
        ) from error


def check_batch(leaf: Any, size: int | None, objects: bool = False) -> None:
    """Dimension 0 of what is gathered for metrics must be the batch, or repeated samples could not be told apart."""
    length = (
        (leaf.shape[0] if leaf.ndim else None)
        if isinstance(leaf, Tensor)
        else len(leaf)
        if hasattr(leaf, "__len__")
        else None
    )
    if length is None:
        raise BatchError(
            "gather_for_metrics() got a scalar: repeated samples cannot be taken out of it. Gather one value a sample, or use "
            "mean(value, weight)"
        )
    if size is not None and length != size:
        shape = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{length} items"
        cure = (
            "pass one item for each sample, or use gather_object()"
            if objects
            else "dimension 0 must be the batch. Reshape to one row a sample, or use gather()"
        )
        raise BatchError(
            f"gather_for_metrics() got {shape}, but this rank's batch has {size} samples: {cure}"
        )


def describe(item: Any) -> Iterator[str]:
    """What is prepared, a line a fact that must be the same on all ranks."""
    kind = type(item).__name__
    yield kind
    if isinstance(item, nn.Module):
        for name, p in item.named_parameters():
            if isinstance(p, nn.UninitializedParameter):
                raise PrepareError(
                    f"parameter {name!r} of this {kind} has no shape yet: call the model once on a batch before prepare(), so that its "
                    "lazy layers are made"
                )
            yield f"{kind}.{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
    elif isinstance(item, torch.optim.Optimizer):
        for g, group in enumerate(item.param_groups):
            yield f"{kind} group {g} with {len(group['params'])} parameters"
        yield from describe_options(item)
    elif hasattr(item, "dataset") and hasattr(item.dataset, "__len__"):
        yield f"{kind} of {len(item.dataset)} samples, batch size {item.batch_size}"
        yield f"{kind} with a {type(getattr(item, 'sampler', None)).__name__} and drop_last={getattr(item, 'drop_last', None)}"
    elif type(item).__module__ == "torch.optim.lr_scheduler":
        yield from (f"{kind} {name}={_said(value)}" for name, value in vars(item).items() if name[0] != "_")


def describe_options(optimizer: torch.optim.Optimizer, wait: bool = True) -> Iterator[str]:
    """The options of each param group, a line each; but how the step runs (fused, foreach), which changes what it computes by rounding.

    Args:
        wait: for numbers on a device, which are left out otherwise.
    """
    kind = type(getattr(optimizer, "given", optimizer)).__name__
    for g, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in ("params", "param_names", *torch_step.IMPLEMENTATION):
                yield f"{kind} group {g} {name}={_said(value, wait)}"


def describe_record(record: Any) -> Iterator[str]:
    """The fields of a dataclass, a line each."""
    for f in dataclasses.fields(record):
        yield f"{type(record).__name__} {f.name}={_said(getattr(record, f.name))}"


def _said(value: Any, wait: bool = True) -> str:
    """`value` as text that is the same on every rank where the value is: of what is no plain value, the type."""
    if isinstance(value, Tensor):
        known = value.numel() == 1 and (wait or value.device.type == "cpu")
        return repr(value.item()) if known else f"tensor {tuple(value.shape)}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"[{', '.join(sorted(map(_said, value)) if isinstance(value, (set, frozenset)) else [_said(v, wait) for v in value])}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_said(k)}: {_said(v, wait)}' for k, v in value.items())}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(describe_record(value))})"
    plain = value is None or isinstance(value, (bool, int, float, complex, str, Enum, torch.dtype, timedelta))
    return repr(value) if plain else getattr(value, "__qualname__", type(value).__qualname__)
