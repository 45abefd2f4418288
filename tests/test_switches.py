"""torch's process-wide switches: set for a run, put back after it."""

from __future__ import annotations

import operator
from contextlib import ExitStack

import pytest
import torch

from easymp.base import env
from easymp.base.rng import set_torch_flags


def now() -> tuple:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        env.read("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.mark.parametrize(
    ("tf32", "deterministic", "inside"),
    [
        (False, False, None),
        (True, False, ("high", True, False, False, None)),
        (True, True, ("high", True, True, False, ":4096:8")),
    ],
)
def test_switches_are_put_back(tf32, deterministic, inside):
    before = now()
    with ExitStack() as undo:
        set_torch_flags(tf32, deterministic, undo.callback)
        assert now() == (inside or before)
    assert now() == before
    with env.override(CUBLAS_WORKSPACE_CONFIG=":16:8"), ExitStack() as undo:
        set_torch_flags(tf32, deterministic, undo.callback)
        assert env.read("CUBLAS_WORKSPACE_CONFIG") == ":16:8"  # the user's own stays


NEWER = [("cuda.matmul", "tf32"), ("cudnn.conv", "ieee"), ("cudnn.conv", "tf32"), ("cudnn.rnn", "ieee")]


def test_torchs_newer_switches_may_be_in_use():
    newer = NEWER if hasattr(torch.backends, "fp32_precision") else ()  # torch 2.8 has the older ones only
    for place, precision in newer:
        operation = operator.attrgetter(place)(torch.backends)
        before = operation.fp32_precision
        operation.fp32_precision = precision
        try:
            with ExitStack() as undo:
                set_torch_flags(True, False, undo.callback)
                assert now()[:2] == ("high", True)
            assert operation.fp32_precision == precision
        finally:
            operation.fp32_precision = before
            torch.set_float32_matmul_precision("highest")
