"""Detection as in a fresh process, and without the shell's choice of devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from easymp.base import env
from easymp.hardware import accelerators


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    accelerators._detect.cache_clear()
    with env.override(CUDA_VISIBLE_DEVICES=None, CUDA_DEVICE_ORDER=None):
        yield
    accelerators._detect.cache_clear()
