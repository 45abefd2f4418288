"""Hooks before a step: whether one may look at gradients, which then must be in memory what the step uses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

indifferent: weakref.WeakSet[Callable[..., Any]] = (
    weakref.WeakSet()
)  # our own, to which clipped and unclipped gradients are the same


def watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook of somebody else's looks in just before `optimizer` steps."""
    hooks: dict[int, Any] = optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    return any(hook not in indifferent for hook in hooks.values())
