"""The table, and sentences that its figures bear out."""

from __future__ import annotations

from typing import Any

import pytest

from easymp.profiling import breakdown
from easymp.profiling.breakdown import Breakdown

MS = 1_000_000


def made(
    rank: int = 0, device: str = "cpu", steps: int = 2, idle: dict[str, int] | None = None, **phases: int
) -> Breakdown:
    """Phases in ms a step, with ``_`` for a blank."""
    time = {name.replace("_", " "): ms * steps * MS for name, ms in phases.items()}
    each = sum(time.values()) // steps
    return Breakdown(rank, device, [each] * steps, time, {k: v * steps * MS for k, v in (idle or {}).items()})


def test_the_table_adds_up_and_stands_in_columns() -> None:
    own = made(data_wait=10, forward=20, backward=60, other=10)
    own.peak = {"forward": 3 << 20, "backward": 5 << 20}
    assert breakdown.table(own).splitlines() == [
        "phase      ms a step  share  peak memory",
        "data wait      10.00   10 %",
        "forward        20.00   20 %      3.0 MiB",
        "backward       60.00   60 %      5.0 MiB",
        "other          10.00   10 %",
        "a step        100.00  100 %      5.0 MiB",
    ]


def test_an_idle_device_has_a_column() -> None:
    own = made(device="cuda:0", forward=40, backward=60, idle={"forward": 30})
    assert breakdown.table(own).splitlines() == [
        "phase     ms a step  share  cuda:0 idle",
        "forward       40.00   40 %        30.00",
        "backward      60.00   60 %         0.00",
        "a step       100.00  100 %        30.00",
    ]
    assert any(
        "cuda:0 is idle for 30.0 ms of the step, the most in forward" in s for s in breakdown.sentences(own)
    )


@pytest.mark.parametrize(
    ("phases", "workers", "said"),
    [
        ({"forward": 30, "backward": 70}, 0, ["70 % of the step is backward."]),
        ({"data_wait": 31, "backward": 69}, 0, ["69 % of the step", "wait 31.0 ms: num_workers=2 or more"]),
        ({"data_wait": 31, "backward": 69}, 4, ["69 %", "more workers (num_workers=4 now)"]),
        ({"communication": 20, "backward": 80}, 0, ["80 %", "holds the step up for 20.0 ms: with"]),
        ({"optimizer": 40, "backward": 60}, 0, ["60 %", "The optimizer takes 40.0 ms"]),
        ({"other": 50, "backward": 40}, 0, ["56 % of the step is the script's own", "50.0 ms of the step"]),
    ],
)
def test_what_stands_out(phases: dict[str, int], workers: int, said: list[str]) -> None:
    own = made(**phases)
    found = breakdown.sentences(own, [own], workers)
    assert len(found) == len(said)
    assert all(words in sentence for words, sentence in zip(said, found))


def test_hidden_communication_and_unlike_steps() -> None:
    own = made(communication=20, backward=80)
    own.hidden = 2 * 9 * MS
    own.steps = [20 * MS, 100 * MS]
    found = breakdown.sentences(own)
    assert "20.0 ms; 9.0 ms more of it pass behind computation" in found[1]
    assert "the longest took 100.0 ms, the shortest 20.0 ms" in found[-1]
    assert breakdown.sentences(Breakdown(0, "cpu")) == []


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        (
            made(1, forward=80, communication=20),
            ["Rank 1 is the slowest: 80.0 ms of work of its own a step, rank 0 only 50.0 ms"],
        ),
        (made(1, forward=50, data_wait=40, communication=10), ["Rank 1 is the slowest (its loader)"]),
        (made(1, forward=55, communication=45), []),
    ],
)
def test_the_slowest_rank_is_named(slow: Breakdown, words: list[str]) -> None:
    found = breakdown.straggler([made(0, forward=50, communication=50), slow])
    assert len(found) == len(words)
    assert all(w in s for w, s in zip(words, found))


def test_ranks_in_lines() -> None:
    assert breakdown.of_ranks(
        [made(0, forward=50, communication=50), made(1, forward=80, data_wait=20)]
    ).splitlines() == [
        "rank  ms a step  own work  communication  data wait",
        "0        100.00     50.00          50.00       0.00",
        "1        100.00    100.00           0.00      20.00",
    ]
    many = breakdown.of_ranks([made(r, forward=100 + r) for r in range(64)]).splitlines()
    assert len(many) == 1 + breakdown.ROWS + 1
    assert many[1].startswith("0 ")  # the fastest
    assert many[-2].startswith("63 ")
    assert many[-1] == "and 56 more"


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([91_200_000], "1 step of 91.2 ms"),
        ([91_200_000, 92_000_000, 90_800_000], "3 steps of 91.2, 92.0 and 90.8 ms"),
        ([500_000, 40_000], "2 steps of 500.0 and 40.0 µs"),
        ([k * MS for k in range(2, 12)], "10 steps of 2.0 to 11.0 ms"),
    ],
)
def test_how_long(steps: Any, words: str) -> None:
    assert breakdown.how_long(steps) == words
