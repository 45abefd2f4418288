"""skip_first_batches, on prepared and on plain loaders."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from easymp import BatchError, skip_first_batches

from .loaders import Numbers, Stream, numbers, passes, prepared


def read(loader: Any) -> list[list[int]]:
    return [numbers(batch) for batch in loader]


@pytest.mark.parametrize(
    "make", [lambda: DataLoader(Numbers(10), 2, shuffle=True), lambda: DataLoader(Stream(10), 2)]
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_prepared_loader_skips_for_one_pass(make: Any, size: int) -> None:
    first, second = passes(prepared(make(), 0, size), 2)
    loader = prepared(make(), 0, size)
    skipped = skip_first_batches(loader, 1)
    assert read(skipped) == first[1:]
    assert read(skipped) == second
    assert loader.epoch == 2


def test_skipped_samples_are_not_loaded() -> None:
    data = Numbers(10)
    read(skip_first_batches(prepared(DataLoader(data, 2), 0, 2), 1))
    assert data.loaded == [4, 5, 8, 9]
    data.loaded.clear()
    read(skip_first_batches(DataLoader(data, 2), 3))
    assert data.loaded == [6, 7, 8, 9]


@pytest.mark.parametrize(
    "loader", [DataLoader(Numbers(7), 2), DataLoader(Stream(7), 2), DataLoader(Numbers(4), None)]
)
def test_plain_loaders_skip_for_one_pass(loader: Any) -> None:
    whole = [str(batch) for batch in loader]
    skipped = skip_first_batches(loader, 2)
    assert [[str(batch) for batch in skipped] for _ in range(2)] == [whole[2:], whole]


def test_a_skipping_plain_loader_can_be_prepared() -> None:
    loader = prepared(skip_first_batches(DataLoader(Numbers(8), 2), 1))
    assert passes(loader, 2) == [[[2, 3], [4, 5], [6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]]


@pytest.mark.parametrize(
    ("loader", "batches"), [([1], 1), (DataLoader(Numbers(4)), -1), (DataLoader(Numbers(4)), 1.5)]
)
def test_wrong_arguments_are_refused(loader: Any, batches: Any) -> None:
    with pytest.raises(BatchError):
        skip_first_batches(loader, batches)
