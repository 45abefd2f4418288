"""A training goes on from a checkpoint: bit for bit where it runs as before, and from the same values everywhere else.

`make test` runs a cross-section; `make test-slow` every strategy on 1, 2 and 4 processes, each to a third of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ..strategies.ways import WAYS
from .trainings import AFTER, BEFORE, Row, Training, all_loaded, difference, saved, saved_and_loaded, union

SIZES = (1, 2, 4)
KINDS = ("mlp", "conv", "tied", "idle")
HALF = ("bf16", "fp16", "O2", "O3", "auto")
WITHOUT_MASTERS = ("pipeline", "local_sgd")  # refuse O2


def ways(size: int) -> list[str]:
    return [label for label, way in WAYS.items() if size in way.sizes]


def rows_of(size: int) -> list[Row]:
    rows = [Row(way, kind, size=size) for way, kind in product(ways(size), KINDS)]
    rows += [Row(way, "mlp", "no", 3, size) for way in ways(size)]
    for i, (way, precision) in enumerate(product(ways(size), HALF)):
        if precision != "O2" or WAYS[way].strategy not in WITHOUT_MASTERS:
            rows.append(Row(way, ("tied", "conv")[i % 2], precision, 1, size))
    # What four processes add to two is meshes of two dimensions, and ranks without rows.
    meshes = ("hsdp", "tensor_parallel in fsdp")
    return [row for row in rows if size < 4 or row.way in meshes or row[1:4] == ("mlp", "no", 1)]


ROWS = [Row("zero1", "tied", "bf16"), Row("fsdp", "conv", "O2"), Row("pipeline", "tied", "no", 3)]


def not_as_before(rows: Sequence[Row], found: Sequence[Any]) -> list[str]:
    """In words; `found` is each rank's."""
    words = []
    for i, row in enumerate(rows):
        apart = row.way == "local_sgd"
        before, after = (union([rank[i][when][0] for rank in found], apart) for when in (0, 1))
        if wrong := difference(before, after):
            words.append(f"{row}: {wrong}")
        losses = [[rank[i][when][1] for rank in found] for when in (0, 1)]
        if losses[0] != losses[1]:
            words.append(f"{row}: losses {losses[0]}, and from the checkpoint {losses[1]}")
    return words


def test_a_training_goes_on_bit_for_bit(ranks: Any, tmp_path: Path) -> None:
    words = not_as_before(ROWS, ranks(saved_and_loaded, ROWS, tmp_path))
    assert not words, "\n".join(words)


@pytest.mark.slow
@pytest.mark.timeout(500)  # other tests may run beside it
@pytest.mark.parametrize("size", SIZES)
def test_every_training_goes_on_bit_for_bit(ranks: Any, tmp_path: Path, size: int) -> None:
    rows = rows_of(size)
    words = not_as_before(rows, ranks(saved_and_loaded, rows, tmp_path, processes=size, timeout=400))
    assert not words, "\n".join(words)


def uninterrupted(kind: str) -> list[float]:
    """The losses of one process after BEFORE updates."""
    run = Training(Row("single", kind, size=1))
    with run.acc:
        return run.run(0, BEFORE + AFTER)[BEFORE:]


def moved(ranks: Any, folder: Path, before: Sequence[Row], after: Sequence[Row], every: int = 1) -> list[str]:
    """What is not as it was saved, when one in `every` of `before` is loaded into each of `after`, in words."""
    states: dict[Row, Any] = {}
    for size in sorted({row.size for row in before}):
        rows = [row for row in before if row.size == size]
        found = ranks(saved, rows, folder, processes=size, timeout=400)
        states.update((row, union([rank[i][0] for rank in found], True)) for i, row in enumerate(rows))
    words = []
    reference = {
        kind: ranks(uninterrupted, kind, processes=1)[0] for kind in sorted({row.kind for row in before})
    }
    for size in sorted({row.size for row in after}):
        fits = {row: [b for b in before if b[1:3] == row[1:3]] for row in after}
        tables = [(fits[row][i % every :: every], row) for i, row in enumerate(after) if row.size == size]
        found = ranks(all_loaded, tables, folder, processes=size, timeout=400)
        for t, (sources, row) in enumerate(tables):
            for i, source in enumerate(sources):
                there = union([rank[t][i][0] for rank in found], row.way == "local_sgd")
                if wrong := difference(states[source], there):
                    words.append(f"{source} to {row}: {wrong}")
                losses = found[0][t][i][1]
                alike = row.precision == "no" and "local_sgd" not in (source.way, row.way)
                if alike and losses != pytest.approx(reference[row.kind], rel=1e-5):
                    words.append(f"{source} to {row}: losses {losses}, uninterrupted {reference[row.kind]}")
    return words


def test_a_checkpoint_moves_to_other_strategies_and_worlds(ranks: Any, tmp_path: Path) -> None:
    before = [Row("single", size=1), Row("zero1"), Row("pipeline")]
    after = [Row("tensor_parallel"), Row("fsdp", size=4)]
    words = moved(ranks, tmp_path, before, after)
    assert not words, "\n".join(words)


@pytest.mark.slow
@pytest.mark.timeout(500)  # other tests may run beside it
def test_checkpoints_of_every_strategy_move_to_every_other(ranks: Any, tmp_path: Path) -> None:
    rows = [Row(way, "tied", size=size) for size in SIZES for way in ways(size)]
    rows += [Row("ddp", "conv", "O2"), Row("fsdp", "conv", "O2"), Row("zero1", "conv", "O2", size=4)]
    words = moved(ranks, tmp_path, rows, rows, every=3)
    assert not words, "\n".join(words)
