"""examples/char_gpt.py: it learns, and learns enough in its default number of steps."""

from __future__ import annotations

import re

import pytest

from ..conftest import Ranks
from .run import number, run, within

SCRIPT = "examples/char_gpt.py"


def test_a_few_updates_with_accumulation_on_two_processes(ranks: Ranks) -> None:
    printed, silent = ranks(
        within, SCRIPT, "--steps", "3", "--batch-size", "8", "--accumulation", "2", "--precision", "fp32", "--windows", "64"
    )
    assert "2 per device × 2 processes × 2 accumulation = 8" in printed
    assert silent == ""
    assert 2.5 < number("validation", printed) < 6
    assert "characters/s" in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_default_run_is_far_below_the_frequency_of_characters() -> None:
    printed = run(SCRIPT)
    assert number("validation", printed) < 1.8
    assert float(re.search(r"alone ([0-9.]+)", printed)[1]) > 3
