"""examples/char_gpt.py.

It learns, and learns the same in every strategy.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..conftest import Ranks
from .run import number, run, within

SCRIPT = "examples/char_gpt.py"
FP32 = ("--precision", "fp32")
SHORT = (*FP32, "--steps", "6", "--batch-size", "8", "--windows", "32")

# Strategies that split the model: processes and further arguments. Replicas are those of tests/strategies.
SPREAD: dict[str, tuple[int, tuple[str, ...]]] = {
    **dict.fromkeys(("fsdp", "tensor_parallel", "pipeline"), (2, ())),
    "hsdp": (4, ("--options", '{"shard_size": 2}')),
}


def test_a_few_updates_with_accumulation_on_two_processes(ranks: Ranks, tmp_path: Path) -> None:
    few = ("--steps", "3", "--batch-size", "8", "--accumulation", "2", "--windows", "64", "--profile")
    printed, silent = ranks(within, SCRIPT, *FP32, *few, env={"EASYMP_PROJECT_DIR": str(tmp_path)})
    assert "profile of rank 0 of 2, 1 step of " in printed
    assert {p.name for p in (tmp_path / "profile").iterdir()} == {"rank0-001.json", "rank1-001.json"}
    assert "2 per device × 2 processes × 2 accumulation = 8" in printed
    assert silent == ""
    assert 2.5 < number("validation", printed) < 6
    assert "characters/s" in printed


_alone: list[float] = []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SPREAD)
def test_a_strategy_changes_no_number(ranks: Ranks, strategy: str) -> None:
    if not _alone:
        _alone.append(number("validation", ranks(within, SCRIPT, *SHORT, processes=1)[0]))
    processes, more = SPREAD[strategy]
    printed, *silent = ranks(within, SCRIPT, *SHORT, "--strategy", strategy, *more, processes=processes)
    assert f"strategy      {strategy}" in printed
    assert "= 8\n" in printed
    assert set(silent) == {""}
    assert number("validation", printed) == pytest.approx(_alone[0], abs=1e-3 + 1e-9)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # 70 updates on one thread, beside other tests
def test_it_comes_far_below_the_frequency_of_characters() -> None:
    printed = run(SCRIPT, "--steps", "70", "--windows", "256")
    assert number("validation", printed) < 2.4
    assert float(re.search(r"alone ([0-9.]+)", printed)[1]) > 3
