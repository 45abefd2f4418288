"""What `log` takes, and what becomes of it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from easymp.errors import SettingError
from easymp.trackers.rows import checked_step, checked_values


def test_numbers_and_words_of_all_kinds() -> None:
    given = {
        "int": 3, "float": 0.5, "bool": True, "word": "x", "np": np.float32(0.5), "np0": np.array(2), "np_bool": np.bool_(True),
        "fraction": Fraction(1, 4), "none": None, "a": {"b": {"c": 1}, "d": None}, "loss": torch.tensor(2.0, requires_grad=True),
    }  # fmt: skip
    found = checked_values(given)
    loss = found.pop("loss")
    assert not loss.requires_grad and loss.ndim == 0
    assert found == {
        "int": 3, "float": 0.5, "bool": True, "word": "x", "np": 0.5, "np0": 2, "np_bool": True, "fraction": 0.25, "a/b/c": 1,
    }  # fmt: skip
    assert {type(value) for value in found.values()} == {int, float, bool, str}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({1: 2}, "got 1 as a name"),
        ({"x": torch.ones(1)}, r"shape \(1,\): reduce it to one number first, such as x.mean\(\)"),
        ({"x": torch.tensor(1j)}, "it has no real value"),
        ({"x": torch.ones((), device="meta")}, "on meta: it has no real value"),
        ({"x": np.ones(2)}, "got a ndarray, which is no number and no word: for pictures"),
        ({"x": [1, 2]}, "got a list"),
    ],
)
def test_what_is_none_is_refused(values: dict, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        checked_values(values)


def test_steps() -> None:
    assert [checked_step(step) for step in (3, np.int64(4), -1)] == [3, 4, -1]
    for wrong in (True, 1.0, "1", torch.tensor(1)):
        with pytest.raises(SettingError, match="whole number"):
            checked_step(wrong)
