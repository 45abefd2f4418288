"""The matrix: strategy × precision × processes × accumulation × clip × model, one training a row.

In fp32 the losses and gradient norms of each row equal those of one process; in half precision they agree within
`HALF`; what does not run says why. `make test` runs a cross-section, `make test-slow` most rows: any two values meet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest

from easymp import GradScalerKwargs, PrepareError, RefusedError, SettingError, conflicts
from easymp.strategies import STRATEGIES

from .models import adamw, make, message, sgd, train, under
from .ways import WAYS, Way

# Numbers of processes that a strategy is not for: the words of its refusal.
ELSEWHERE = {("hsdp", 2): "2 ranks make no such groups of 2, a node's ranks: use strategy='fsdp' or 'ddp'"}
for _name, _kind in STRATEGIES.items():
    ELSEWHERE[_name, 1 if _kind.several else 2] = (
        rf"'{_name}' {_kind.several}.*there is one; start several"
        if _kind.several
        else rf"'{_name}' is for one process, and 2 were started.*use strategy='ddp' or 'auto'"
    )

EXACT = ("fp32", "O0")
# Precisions in which a row's losses may differ from one process's by so much, relatively, and its norms by four times
# that.
HALF = {"bf16": 0.05, "fp16": 0.02, "O1": 0.02, "O2": 0.05, "O3": 0.2, "bf16-true": 0.1, "fp16-true": 0.05}
# What no strategy can run on a CPU.
NOT_HERE = {
    "tf32": r"TF32 is a mode of GPU Tensor Cores and training runs on the CPU; use fp32 or bf16",
    "fp8": "fp8 needs the fp8 Tensor Cores of an NVIDIA GPU .*, and training runs on the CPU; use bf16, fp32 or auto",
}
# Pairs that are refused: pattern.
REFUSED: dict[tuple[str, str], str] = {}
for _name in ("pipeline", "local_sgd"):
    for _precision in ("O2", "fp16-true"):
        REFUSED[_name, _precision] = f"{_name} and {_precision} do not go together: .*masters.*Use bf16, or fp16"
    REFUSED[_name, "bf16-true"] = (
        rf"would lose small updates .*{_name} and bf16 weights without .* Use Settings\(stochastic_rounding=True\)"
    )


JOIN_REFUSED = {row.word for row in conflicts.table() if row.other == "join_uneven_inputs()"}
# Small enough that no step overflows: whether one does depends on how many samples a rank's gradient is of.
SCALE = GradScalerKwargs(init_scale=1024.0)


class Row(NamedTuple):
    kind: str
    steps: int
    clip: float | None


ROWS = [Row(*values) for values in product(("mlp", "conv", "tied", "idle"), (1, 3), (None, 0.1))]
# fp16 has no number as small as AdamW's epsilon, and squares of gradients become 0: plain fp16 weights want SGD.
WITHOUT_ADAM = ("O3",)


def trainings(case: Way, precision: str, adam: bool, rows: Sequence[Row]) -> list[dict[str, Any] | str]:
    """Losses, norms and skipped steps of each row; or the words of its refusal."""
    results: list[dict[str, Any] | str] = []
    for row in rows:
        try:
            options = {**case.options, **case.more.get(row.kind, {})}
            settings = {"convert_sync_batchnorm": True, "scaler_options": SCALE, "timeout": 30}
            with under(case.strategy, options, row.steps, precision, **settings) as acc:
                got = train(acc, row.kind, row.clip, adamw if adam else sgd)
                results.append({name: got[name] for name in ("losses", "norms", "skipped")})
        except (RefusedError, SettingError, PrepareError) as error:
            results.append(str(error))
    return results


_trained_once: dict[tuple[bool, str, Row], Any] = {}


def single_process(ranks: Any, precision: str, adam: bool, rows: Sequence[Row]) -> list[Any]:
    """The same rows on one process, each trained once a session."""
    missing = [row for row in rows if (adam, precision, row) not in _trained_once]
    if missing:  # in a worker, which has one thread: the optimum for models of this size
        (results,) = ranks(trainings, WAYS["single"], precision, adam, missing, processes=1, timeout=500)
        _trained_once.update(((adam, precision, row), got) for row, got in zip(missing, results))
    return [_trained_once[adam, precision, row] for row in rows]


def difference(case: Way, precision: str, got: dict[str, Any] | str, one: Any) -> str | None:
    """What is wrong with a row, in words."""
    pattern = REFUSED.get((case.strategy, precision))
    if pattern or isinstance(got, str):
        expected = pattern and isinstance(got, str) and re.search(pattern, got)
        return None if expected else f"{got}, not a refusal with {pattern}"
    bounds = {"losses": 1e-5, "norms": 1e-5}
    if precision not in EXACT:
        bounds = {"losses": HALF[precision], "norms": 4 * HALF[precision]}
    if any(got["skipped"]) or any(one["skipped"]):
        return f"skipped {got['skipped']}, one process {one['skipped']}"
    for name in ("losses", "norms") if case.norms else ("losses",):
        if got[name] != pytest.approx(one[name], rel=bounds[name]):
            return f"{name} {got[name]}, of one process {one[name]}"
    return None


def check(ranks: Any, label: str, size: int, precision: str, rows: Sequence[Row]) -> None:
    case = WAYS[label]
    rows = [row for row in rows if case.norms or row.clip is None]
    adam = case.adam and precision not in WITHOUT_ADAM
    results = ranks(trainings, case, precision, adam, rows, processes=size, timeout=500)
    ones = single_process(ranks, precision, adam, rows)
    wrong = [
        f"rank {rank}: {row}: {fault}"
        for rank, rank_results in enumerate(results)
        for row, got, one in zip(rows, rank_results, ones)
        if (fault := difference(case, precision, got, one))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("label", [label for label, way in WAYS.items() if " " not in label and way.sizes[0] < 4])
def test_cross_section(ranks: Any, label: str) -> None:
    """Two models in fp32 and a third in half precision; over the ways, everything comes up."""
    number, size = list(WAYS).index(label), WAYS[label].sizes[0]
    check(ranks, label, size, "fp32", [ROWS[(5 * number + i) % len(ROWS)] for i in (0, 9)])
    check(ranks, label, size, ("bf16", "fp16")[number % 2], [ROWS[(5 * number + 6) % len(ROWS)]])


ALL = [(label, size) for label, way in WAYS.items() for size in way.sizes]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("label", "size"), ALL)
def test_fp32_is_that_of_one_process(ranks: Any, label: str, size: int) -> None:
    """Rows in which any two values meet; on two processes all rows of a way that has no clip."""
    cross_section = [row for row in ROWS if ((row.steps > 1) == bool(row.clip)) == (row.kind in ("mlp", "tied"))]
    check(ranks, label, size, "fp32", cross_section if WAYS[label].norms or size == 4 else ROWS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("label", "size"), ALL)
def test_the_other_precisions_agree(ranks: Any, label: str, size: int) -> None:
    """One model a precision; the next precision and the next way have the next one."""
    rows = [row for row in ROWS[::5] if WAYS[label].norms or row.clip is None]
    precisions = sorted({*EXACT, *HALF} - {"fp32"})
    for number, precision in enumerate(precisions, ALL.index((label, size))):
        check(ranks, label, size, precision, [rows[number % len(rows)]])


def refusal(strategy: str, precision: str) -> str:
    return message((RefusedError, SettingError), under, strategy, precision=precision)


@pytest.mark.parametrize(("strategy", "size"), ELSEWHERE)
def test_a_strategy_that_is_not_for_this_number_of_processes_says_so(ranks, strategy, size):
    for error_text in [refusal(strategy, "fp32")] if size == 1 else ranks(refusal, strategy, "fp32", processes=size):
        assert re.search(ELSEWHERE[strategy, size], error_text), error_text


def joined(case: Way) -> str:
    with under(case.strategy, dict(case.options)) as acc:
        model = acc.prepare(make("mlp"))
        return message(RefusedError, acc.join_uneven_inputs, [model])


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name in JOIN_REFUSED])
def test_only_some_strategies_join_uneven_inputs(ranks: Any, strategy: str) -> None:
    case = next(case for case in WAYS.values() if case.strategy == strategy)
    for error_text in ranks(joined, case, processes=case.sizes[0]):
        assert f"join_uneven_inputs() and {strategy} do not go together" in error_text


@pytest.mark.parametrize("precision", NOT_HERE)
def test_a_precision_that_a_cpu_lacks_says_so(precision: str) -> None:
    assert re.search(NOT_HERE[precision], refusal("single", precision))
