"""What differs between two checkpoints is found, all of it, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from easymp import Accelerator, CheckpointError
from easymp.checkpoint import diff, inspect

from .samples import flip

OF_ONE, OF_TWO = "step-00000002", "step-00000003"
STATE = "state/object_0"


class Holder:
    """An object with any state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def write(root: Path, name: str, state: dict[str, Any]) -> str:
    with Accelerator(cpu=True, seed=1, log_with="none") as acc:
        acc.register_for_checkpointing(Holder(state))
        return acc.save_state(root / name)


def test_the_same_run_differs_in_nothing_however_it_is_cut(samples: Path, root: Path) -> None:
    for name in (OF_ONE, OF_TWO):
        found = diff(samples / name, root / name)
        assert found.same and found.equal > 100
        assert (found.missing, found.added, found.kinds, found.values, found.states) == ((), (), (), (), ())


def test_another_step_of_it(samples: Path) -> None:
    """One process against two, whole tensors against shards."""
    read: list[int] = []
    found = diff(samples / OF_ONE, samples / OF_TWO, read.append)
    both = [
        t for name in (OF_ONE, OF_TWO) for t in inspect(samples / name).tensors if t.name not in found.added
    ]
    assert sum(read) == sum(t.size for t in both)
    assert not found.same and not found.missing and not found.kinds
    assert all(name.startswith("ranks/00001/") for name in found.added)  # the second process's random streams
    assert "model/embed.weight" in {v.name for v in found.values}
    assert all(v.largest is not None and v.largest > 0 and 0 < v.count <= v.of for v in found.values)
    states = {u.path: (u.one, u.other) for u in found.states}
    assert states["step"] == ("2", "3") and states["world_size"] == ("1", "2")
    assert states["state/scheduler_0/last_epoch"] == ("2", "3")
    assert states["plan/strategy/value"] == ("'single'", "'fsdp'")


@pytest.mark.parametrize(
    ("one", "other", "count", "largest"),
    [
        (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 2.0]), 2, 1.0),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), 0, 0.0),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 0.0]), 1, None),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 2.0]), 1, 1.0),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), 1, None),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1, 0.0),
        (torch.tensor(7), torch.tensor(9), 1, 2.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1, 1.0),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 1, 5.0),
        (torch.empty(0, 3), torch.empty(0, 3), 0, 0.0),
    ],
)
def test_values(tmp_path: Path, one: Tensor, other: Tensor, count: int, largest: float | None) -> None:
    found = diff(write(tmp_path, "a", {"x": one}), write(tmp_path, "b", {"x": other}))
    if not count:
        assert found.same
        return
    (values,) = found.values
    assert (values.count, values.of, values.largest) == (count, one.numel(), largest)


def test_names_kinds_and_states(tmp_path: Path) -> None:
    a = {
        "gone": torch.ones(2),
        "kind": torch.ones(2),
        "shape": torch.ones(2),
        "n": [1, {"deep": (2, "x")}],
        "f": math.inf,
        "b": b"1",
    }
    b = {
        "more": torch.ones(2),
        "kind": torch.ones(2).half(),
        "shape": torch.ones(3),
        "n": [1, {"deep": (3, "x")}, 4],
        "f": 1.0,
        "b": b"1",
    }
    found = diff(write(tmp_path, "a", a), write(tmp_path, "b", b))
    assert (found.missing, found.added) == ((f"{STATE}/gone",), (f"{STATE}/more",))
    assert {u.path: (u.one, u.other) for u in found.kinds} == {
        f"{STATE}/kind": ("float32 [2]", "float16 [2]"),
        f"{STATE}/shape": ("float32 [2]", "float32 [3]"),
    }
    assert {u.path: (u.one, u.other) for u in found.states} == {
        f"{STATE}/gone": (f"'{STATE}/gone'", "nothing"),
        f"{STATE}/more": ("nothing", f"'{STATE}/more'"),
        f"{STATE}/n/1/deep/0": ("2", "3"),
        f"{STATE}/n/2": ("nothing", "4"),
        f"{STATE}/f": ("'inf'", "1.0"),
    }
    assert not diff(write(tmp_path, "c", {"x": 1}), write(tmp_path, "d", {"x": True})).same


def test_damaged_bytes_are_no_difference_but_an_error(root: Path, samples: Path) -> None:
    flip(root / OF_TWO / "model-00001-of-00002.safetensors", -1)
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        diff(samples / OF_TWO, root / OF_TWO)
