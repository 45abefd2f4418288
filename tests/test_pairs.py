"""Any two words are in a row of a covering array (`tests/pairs.py`), or the table of `easymp.conflicts` refuses them.

Each refused pair is an error with the table's reason, before the first update. `make test` tries a sample of them.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from easymp import EasympError, conflicts
from easymp.cli import main
from easymp.cli.rehearse import NO_DEVICE, device

from . import pairs
from .cli.test_rehearse import HANG, START

SEED = 11
BATCH = 8  # runs of one call of the ranks, which has a timeout
PARTS = 6  # of the slow test, which workers share
REHEARSALS = 3  # the same, of the rehearsals


def test_each_possible_pair_is_in_a_row() -> None:
    assert len(pairs.WORDS) == len(set(pairs.WORDS)) >= 45
    assert pairs.possible_pairs() <= {pair for row in pairs.rows() for pair in pairs.pairs_of(row)}
    assert not any(pair in pairs.refusals() for row in pairs.rows() for pair in pairs.pairs_of(row))
    exact_pairs = {pair for row in pairs.exact_rows() for pair in pairs.pairs_of(row)}
    assert pairs.possible_pairs(pairs.EXACT_AXES) <= exact_pairs


def refused(pairs_of_size: Sequence[tuple[Sequence[str], str]], folder: str) -> list[str]:
    """What is wrong with the refusals of these pairs: each is easymp's error with the table's reason."""
    faults = []
    for words, reason in pairs_of_size:
        row = pairs.row_of(words)
        training: Any = None
        try:
            training = pairs.Training(row, row["strategy"], folder, 1, False)
            training.fit(0, pairs.MICRO)
            error_text = "nothing"
        except EasympError as error:
            error_text = str(error)
        except Exception as error:
            error_text = f"{type(error).__name__}: {error}"
        if reason not in error_text:
            faults.append(f"{words}: {error_text}, not {reason!r}")
        if training is not None and training.acc.updates:
            faults.append(f"{words}: {training.acc.updates} updates before the refusal")
        pairs.close_all()
    return faults


def check_refused(ranks: Any, refused_pairs: Iterable[frozenset[str]], folder: str) -> None:
    by_size: dict[int, list[Any]] = {1: [], 2: [], 4: []}
    for pair in refused_pairs:
        row = pairs.row_of(sorted(pair))
        size = pairs.RANKS.get(row["strategy"], 2)
        if "joined" in pair or row["strategy"] in pairs.PARALLEL:
            size = max(size, 2)
        by_size[size].append((sorted(pair), pairs.refusals()[pair].reason))
    faults = [
        fault
        for size, cases in by_size.items()
        if cases
        for rank_faults in ranks(refused, cases, folder, processes=size)
        for fault in rank_faults
    ]
    assert not faults, "\n".join(faults)


def test_a_sample_of_the_table_is_refused_with_its_reason(ranks: Any, tmp_path: Any) -> None:
    all_pairs = sorted(pairs.refusals(), key=sorted)
    check_refused(ranks, random.Random(SEED).sample(all_pairs, len(all_pairs) // 4), str(tmp_path))


@pytest.mark.slow
def test_each_pair_of_the_table_is_refused_with_its_reason(ranks: Any, tmp_path: Any) -> None:
    check_refused(ranks, pairs.refusals(), str(tmp_path))


# -- the rows train as the plain loop does


def check_trained(ranks: Any, rows: Sequence[pairs.Row], folder: str) -> None:
    """Train each row under its strategy and on one process, and compare with the plain loop."""
    faults = []
    for size, runs in pairs.runs_of(list(enumerate(rows))).items():
        for begin in range(0, len(runs), BATCH):
            batch = runs[begin : begin + BATCH]
            by_rank = ranks(pairs.outcomes, batch, folder, processes=size, timeout=300)
            for (_, row, strategy), results in zip(batch, zip(*by_rank)):
                if fault := pairs.fault(row, strategy, results):
                    words = [word for word in row.values() if word not in pairs.PLAIN.values()]
                    faults.append(f"({', '.join(words)}) under {strategy}: {fault}")
    assert not faults, "\n".join(faults)


def test_a_sample_of_the_rows_trains_as_the_plain_loop(ranks: Any, tmp_path: Any) -> None:
    draw = random.Random(SEED)
    check_trained(ranks, draw.sample(pairs.rows(), 3) + draw.sample(pairs.exact_rows(), 3), str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_each_row_trains_as_the_plain_loop(ranks: Any, tmp_path: Any, part: int) -> None:
    check_trained(ranks, (pairs.rows() + pairs.exact_rows())[part::PARTS], str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(REHEARSALS))
def test_each_row_is_rehearsed_on_a_node_of_gpus(tmp_path: Any, part: int, capsys: Any) -> None:
    """Nothing is on the wrong device, and nothing waits for the device but what the guarantees name."""
    if not device.IS_POSSIBLE:  # an older torch, with which rehearsals say so
        (tmp_path / "train.py").write_text(START + HANG)
        main(["rehearse", str(tmp_path / "train.py"), "--for", "8xH100", "--ranks", "0", "--strategy", "ddp"])
        assert NO_DEVICE.strip() in " ".join(capsys.readouterr().out.split())
        return
    # torch has no fake kernels for sparse tensors on a device.
    numbers = [str(number) for number, row in enumerate(pairs.rows()) if row["parameters"] != "sparse"]
    command = [sys.executable, "-m", "tests.rehearsals", str(tmp_path), *numbers[part::REHEARSALS]]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    faults = json.loads(result.stdout.splitlines()[-1])
    assert not faults, "\n".join(faults)


def test_sentences_name_both_words_and_a_remedy() -> None:
    for row in conflicts.table():
        assert row.word != row.other and row.reason and row.remedy
        assert not row.remedy.endswith(".") and row.remedy[0].isupper(), row
        assert str(row).startswith(f"{row.word} and {row.other} do not go together: {row.reason}.")
