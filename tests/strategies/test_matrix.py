"""Each way to run a strategy, in fp32 on two processes and on four: the losses and gradient norms of one process.

Rows are a model, a number of micro-batches, and a clip; precisions and options are in tests/test_pairs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest

from .models import adamw, sgd, train, under
from .ways import WAYS, Way


class Row(NamedTuple):
    kind: str
    steps: int
    clip: float | None


ROWS = [Row(*values) for values in product(("mlp", "conv", "tied", "idle"), (1, 3), (None, 0.1))]


def trainings(case: Way, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Losses and norms of each row."""
    results = []
    for row in rows:
        options = {**case.options, **case.more.get(row.kind, {})}
        with under(case.strategy, options, row.steps, convert_sync_batchnorm=True, timeout=30) as acc:
            trained = train(acc, row.kind, row.clip, adamw if case.adam else sgd)
            results.append({name: trained[name] for name in ("losses", "norms")[: 1 + case.norms]})
    return results


CASES = [
    pytest.param(label, size, marks=[pytest.mark.slow] * (size > 2 or " " in label))
    for label, way in WAYS.items()
    for size in way.sizes
    if label != "single"
]


@pytest.mark.parametrize(("label", "size"), CASES)
def test_a_way_trains_as_one_process(ranks: Any, label: str, size: int) -> None:
    """Two rows a way; over the ways, all of them come up."""
    case, number = WAYS[label], list(WAYS).index(label)
    rows = [ROWS[(5 * number + i) % len(ROWS)] for i in (0, 9)]
    rows = [row if case.norms else row._replace(clip=None) for row in rows]
    # In a worker, which has one thread: the optimum for models of this size.
    alone = Way("single", adam=case.adam, norms=case.norms)
    (expected,) = ranks(trainings, alone, rows, processes=1)
    for results in ranks(trainings, case, rows, processes=size):
        assert results == [{name: pytest.approx(row[name], rel=1e-5) for name in row} for row in expected]
