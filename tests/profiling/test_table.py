"""The table of a profile, and the sentences below it."""

from __future__ import annotations

from typing import Any

import pytest

from easymp.profiling import breakdown
from easymp.profiling.breakdown import Breakdown

MS = 1_000_000


def made(rank: int = 0, device: str = "cpu", idle: dict[str, int] | None = None, **phases: int) -> Breakdown:
    """Two steps, with phases in ms a step and ``_`` for a blank."""
    time = {name.replace("_", " "): ms * 2 * MS for name, ms in phases.items()}
    return Breakdown(
        rank, device, [sum(time.values()) // 2] * 2, time, {k: v * 2 * MS for k, v in (idle or {}).items()}
    )


def test_the_table_adds_up_and_stands_in_columns() -> None:
    own = made(device="cuda:0", data_wait=10, forward=20, backward=60, other=10, idle={"forward": 15})
    own.peak = {"forward": 3 << 20, "backward": 5 << 20}
    assert breakdown.table(own).splitlines() == [
        "phase      ms a step  share  cuda:0 idle  peak memory",
        "data wait      10.00   10 %         0.00",
        "forward        20.00   20 %        15.00      3.0 MiB",
        "backward       60.00   60 %         0.00      5.0 MiB",
        "other          10.00   10 %         0.00",
        "a step        100.00  100 %        15.00      5.0 MiB",
    ]


@pytest.mark.parametrize(
    ("phases", "workers", "said"),
    [
        ({"forward": 30, "backward": 70}, 0, ["70 %"]),
        ({"data_wait": 31, "backward": 69}, 0, ["69 %", "num_workers=2"]),
        ({"data_wait": 31, "backward": 69}, 4, ["69 %", "num_workers=4"]),
        ({"communication": 20, "backward": 80}, 0, ["80 %", "20.0 ms"]),
        ({"optimizer": 40, "backward": 60}, 0, ["60 %", "40.0 ms"]),
        ({"other": 50, "backward": 40}, 0, ["56 %", "50.0 ms"]),
        (
            {"forward": 40, "backward": 60, "idle": {"forward": 30}},
            0,
            ["60 %", "30.0 ms of the step, the most in forward"],
        ),
    ],
)
def test_causes_of_waiting_have_a_sentence(phases: dict[str, Any], workers: int, said: list[str]) -> None:
    own = made(**phases)
    found = breakdown.sentences(own, [own], workers)
    assert len(found) == len(said)
    assert all(words in sentence for words, sentence in zip(said, found))


def test_hidden_communication_and_unlike_steps() -> None:
    own = made(communication=20, backward=80)
    own.hidden, own.steps = 2 * 9 * MS, [20 * MS, 100 * MS]
    found = breakdown.sentences(own)
    assert "9.0 ms more" in found[1] and "100.0 ms, the shortest 20.0 ms" in found[-1]
    assert breakdown.sentences(Breakdown(0, "cpu")) == []


def test_ranks_have_a_line_each_and_the_slowest_is_named() -> None:
    ranks = [made(0, forward=50, communication=50), made(1, forward=60, data_wait=40)]
    assert breakdown.of_ranks(ranks).splitlines() == [
        "rank  ms a step  own work  communication  data wait",
        "0        100.00     50.00          50.00       0.00",
        "1        100.00    100.00           0.00      40.00",
    ]
    assert "Rank 1 is the slowest (its loader)" in breakdown.sentences(ranks[0], ranks)[-1]
    assert breakdown.straggler([ranks[0], made(1, forward=55, communication=45)]) == []
    many = breakdown.of_ranks([made(r, forward=100 + r) for r in range(64)]).splitlines()
    assert len(many) == 1 + breakdown.ROWS + 1 and many[1].startswith("0 ") and many[-2].startswith("63 ")
