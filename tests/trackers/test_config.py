"""Hyperparameters of all kinds as what trackers take."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch

from easymp import Accelerator
from easymp.trackers.rows import concise, flat, plain


class Kind(Enum):
    SMALL = "small"


@dataclass
class Model:
    depth: int = 2
    sizes: tuple[int, ...] = (1, 2)
    kind: Kind = Kind.SMALL
    more: dict = field(
        default_factory=lambda: {"path": Path("a/b"), "device": torch.device("cpu"), "dtype": torch.float16}
    )


def test_anything_becomes_plain_and_flat() -> None:
    found = plain(
        argparse.Namespace(lr=0.1, name=None, model=Model(), tags={"b", "a"}, scale=torch.tensor(2.0))
    )
    assert found == {
        "lr": 0.1,
        "name": None,
        "model": {
            "depth": 2,
            "sizes": [1, 2],
            "kind": "small",
            "more": {"path": "a/b", "device": "cpu", "dtype": "torch.float16"},
        },
        "tags": ["a", "b"],
        "scale": 2.0,
    }
    assert flat(found)["model/more/path"] == "a/b" and flat(found)["model/sizes"] == "[1, 2]"


def test_the_plan_and_the_machine_are_few_words() -> None:
    with Accelerator(cpu=True, mixed_precision="no") as acc:
        found = concise({"lr": 0.1, "easymp": plain(acc._facts())})
    assert found["easymp/plan/precision"] == "fp32" and found["easymp/machine/cpu"] == acc.hardware.cpu.name
    assert all(value is None or isinstance(value, (str, int, float, bool)) for value in found.values())
