"""The version of torch, and its process-wide flags, set for a run and put back after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import env


def numbers(version: str) -> tuple[int, ...]:
    """``(2, 11)`` of ``"2.11.0+cu130"``, and of ``"2.11.0a0+1234"``: a pre-release counts as its release."""
    return tuple(int(part) for part in version.split(".")[:2])


TORCH = numbers(torch.__version__)


def switch(tf32: bool, deterministic: bool, undo: Callable[..., Any]) -> None:
    """Set torch's flags; ``undo(function, *args)`` registers how to restore each, as `ExitStack.callback` does.

    Args:
        tf32: TF32 for matrix products and convolutions that stay in fp32.
        deterministic: deterministic algorithms only; cuBLAS then needs a fixed workspace (CUDA's documentation of
            CUBLAS_WORKSPACE_CONFIG), and cuDNN may not choose by timing.
    """
    if tf32:
        _remember(undo)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if deterministic:
        warn = torch.is_deterministic_algorithms_warn_only_enabled()
        undo(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warn)
        undo(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        undo(env.put, env.put({"CUBLAS_WORKSPACE_CONFIG": env.read("CUBLAS_WORKSPACE_CONFIG", ":4096:8")}))
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _remember(undo: Callable[..., Any]) -> None:
    """Register the present TF32 flags with `undo`.

    torch 2.9 and newer have switches of another kind (``fp32_precision``), which the older ones set, too. After a script has used
    the newer ones, reading an older one is an error where the two disagree.
    """
    backends: Any = torch.backends
    try:
        undo(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    except RuntimeError:
        undo(setattr, backends.cuda.matmul, "fp32_precision", backends.cuda.matmul.fp32_precision)
    try:
        undo(setattr, backends.cudnn, "allow_tf32", backends.cudnn.allow_tf32)
    except RuntimeError:
        for operation in (backends.cudnn.conv, backends.cudnn.rnn):
            undo(setattr, operation, "fp32_precision", operation.fp32_precision)
