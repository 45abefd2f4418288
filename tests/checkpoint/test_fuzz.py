"""Hostile files end in a value or in CheckpointError, by hypothesis in every run and by atheris in the slow ones."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .fuzz import READERS, mutated, seeds

RUNS = 30_000  # of each reader


@pytest.mark.parametrize("target", READERS)
@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_real_file_changed_in_a_few_places(target: str, data: st.DataObject) -> None:
    content = data.draw(st.sampled_from(seeds(target)))
    assert READERS[target](content)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 6))):
        content = mutated(content, rng)
    for at in data.draw(st.lists(st.integers(0, len(content)), max_size=2)):
        content = content[:at] + data.draw(st.binary(max_size=2)) + content[at + data.draw(st.integers(0, 2)) :]
    READERS[target](content)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="an optional package is not installed: atheris")
def test_more_than_a_hundred_thousand_inputs() -> None:
    assert RUNS * len(READERS) >= 100_000
    for target in READERS:
        command = [sys.executable, "-m", "tests.checkpoint.fuzz", target, "--runs", str(RUNS), "--seed", "1"]
        root = Path(__file__).parents[2]
        ran = subprocess.run(command, cwd=root, env=dict(os.environ), capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
        count = re.search(r"stat::number_of_executed_units: (\d+)", ran.stderr)
        assert count is not None and int(count[1]) >= RUNS
