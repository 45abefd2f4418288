"""Compare what the ranks prepare: objects, options and settings, in words."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..distributed import first_difference, odd_one_out
from ..errors import WorldError
from ..optim.torch_step import IMPLEMENTATION

if TYPE_CHECKING:
    from .state import Run

# Settings by which ranks may differ: their effect is compared, or they do not change what is trained.
MAY_DIFFER = set(
    "mixed_precision strategy gradient_accumulation_steps cpu timeout hang_after memory project_dir log_with sources "
    "strategy_options dataloader_config scaler_options".split()
)


def compare_prepared(run: Run, objects: Sequence[Any], records: Sequence[Any], lines: Sequence[str]) -> list[int]:
    """Random seeds of all ranks; a WorldError where their objects, dataclasses or further lines differ."""
    plan, world = run.plan, run.world
    facts = [f"{name} {getattr(plan, name).value}" for name in ("precision", "strategy", "accumulation")]
    facts += [f"part {part.name} ({type(part).__name__})" for part in run.parts.all if run.parts.is_users(part)]
    facts += _describe_record(plan.settings, MAY_DIFFER)
    facts += [line for record in records for line in _describe_record(record)]
    facts += [line for item in objects for line in _describe(item)]
    facts += lines
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    digests_and_seeds = world.gather_objects((digest, torch.initial_seed()))
    if any(rank_digest != digest for rank_digest, _ in digests_and_seeds):
        difference = first_difference(world.gather_objects(facts))
        raise WorldError(
            f"the ranks prepare different things: {odd_one_out(difference)}. All ranks must build and prepare the same "
            "objects, with the same settings, parts and hyperparameters"
        )
    return [seed for _, seed in digests_and_seeds]


def _describe(item: Any) -> Iterator[str]:
    """The facts of `item` that must be the same on all ranks, a line each."""
    kind = type(item).__name__
    yield kind
    if isinstance(item, nn.Module):
        for name, p in item.named_parameters():
            yield f"{kind}.{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
    elif isinstance(item, torch.optim.Optimizer):
        for g, group in enumerate(item.param_groups):
            yield f"{kind} group {g} with {len(group['params'])} parameters"
        yield from describe_options(item)
    elif hasattr(item, "dataset") and hasattr(item.dataset, "__len__"):
        sampler, drop_last = type(getattr(item, "sampler", None)).__name__, getattr(item, "drop_last", None)
        yield f"{kind} of {len(item.dataset)} samples, batch size {item.batch_size}"
        yield f"{kind} with a {sampler} and drop_last={drop_last}"
    elif type(item).__module__ == "torch.optim.lr_scheduler":
        yield from (f"{kind} {name}={_text_of(value)}" for name, value in vars(item).items() if name[0] != "_")


def describe_options(optimizer: torch.optim.Optimizer, wait: bool = True) -> Iterator[str]:
    """The options of each param group, a line each, save how the step runs; numbers on a device only with `wait`."""
    kind = type(getattr(optimizer, "given", optimizer)).__name__
    for g, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in ("params", "param_names", *IMPLEMENTATION):
                yield f"{kind} group {g} {name}={_text_of(value, wait)}"


def _describe_record(record: Any, without: set[str] | frozenset[str] = frozenset()) -> list[str]:
    """The fields of a dataclass, a line each."""
    names = (f.name for f in dataclasses.fields(record) if f.name not in without)
    return [f"{type(record).__name__} {name}={_text_of(getattr(record, name))}" for name in names]


def _text_of(value: Any, wait: bool = True) -> str:
    """Text by which ranks compare `value`; its type if it is not a plain value."""
    if isinstance(value, Tensor):
        readable = value.numel() == 1 and (wait or value.device.type == "cpu")
        return repr(value.item()) if readable else f"tensor {tuple(value.shape)}"
    if isinstance(value, (set, frozenset)):
        return f"[{', '.join(sorted(map(_text_of, value)))}]"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text_of(v, wait) for v in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text_of(k)}: {_text_of(v, wait)}' for k, v in value.items())}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(_describe_record(value))})"
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str, Enum, torch.dtype, timedelta))
    return repr(value) if is_plain else getattr(value, "__qualname__", type(value).__qualname__)
