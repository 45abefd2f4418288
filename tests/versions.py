"""What needs a newer torch than easymp does: marks for tests, and the version that runs."""

from __future__ import annotations

import pytest

from easymp.release import TORCH

takes_a_grace = pytest.mark.skipif(
    TORCH < (2, 13), reason="torch 2.11 gives workers 30 seconds after a signal: another grace is refused"
)
trusts_sums = pytest.mark.skipif(
    TORCH < (2, 11), reason="DTensors add wrongly to sums of themselves before torch 2.11: refused there"
)
