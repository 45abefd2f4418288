"""``acc.epochs(n)`` goes on where the loaded state stands: in a new process and in one that has run loops before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from easymp import Accelerator, CheckpointError, StepError

PER_EPOCH = 10
Stop = Callable[[int], object]


class Run(NamedTuple):
    acc: Accelerator
    model: nn.Module
    optimizer: Any
    loader: Any

    def train(self, count: int, stop: int = 0, loaded_at: int = 0, place: str = "") -> list[int]:
        """The script's loop; it is left after `stop` updates, and loads `place` once, after `loaded_at`."""
        begun = []
        for epoch in self.acc.epochs(count):
            begun.append(epoch)
            for x in self.loader:
                self.acc.backward(self.model(x).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.optimizer.updates == stop:
                    return begun
                if self.optimizer.updates == loaded_at:
                    loaded_at = 0
                    self.acc.load_state(place)
                elif self.optimizer.updates in (6, 12, 25):
                    self.acc.save_state()
        return begun


@contextmanager
def run(folder: Path) -> Iterator[Run]:
    with Accelerator(cpu=True, mixed_precision="no", seed=3, project_dir=folder) as acc:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        samples = torch.randn(PER_EPOCH, 2, generator=torch.Generator().manual_seed(5))
        yield Run(acc, *acc.prepare(model, optimizer, DataLoader(samples, shuffle=True)))


@pytest.fixture
def straight(tmp_path: Path) -> list[float]:
    """The weights after five epochs without a break."""
    with run(tmp_path / "straight") as it:
        assert it.train(5) == [0, 1, 2, 3, 4]
        return it.model.weight.flatten().tolist()


@pytest.mark.parametrize("ended", [20, 25, 0], ids=["at an epoch's end", "inside an epoch", "at its own end"])
@pytest.mark.parametrize("way", ["load_state", "resume"])
def test_a_loop_after_a_load_goes_on_at_the_state(tmp_path: Path, straight: list[float], way: str, ended: int) -> None:
    with run(tmp_path) as it:
        it.train(5, stop=ended)
        places = [str(place) for place in sorted((tmp_path / "checkpoints").glob("step-*"))]
        for place in (places[1], places[0], places[-1]):
            it.acc.load_state(place) if way == "load_state" else it.acc.resume()
            begun = it.train(5)
            assert begun[-1] == 4 and it.optimizer.updates == 5 * PER_EPOCH
            assert it.model.weight.flatten().tolist() == straight


def test_a_kill_after_a_rollback_goes_on_at_the_state(tmp_path: Path, straight: list[float]) -> None:
    with run(tmp_path) as it:
        it.train(5, stop=20)
        it.acc.load_state(tmp_path / "checkpoints" / "step-00000006")
        it.train(5, stop=17)  # a kill, after the save at update 12
    with run(tmp_path) as it:
        it.acc.resume()
        assert it.train(5) == [1, 2, 3, 4] and it.optimizer.updates == 5 * PER_EPOCH
        assert it.model.weight.flatten().tolist() == straight


@pytest.mark.parametrize("step", [12, 0], ids=["inside an epoch", "before the first epoch"])
def test_a_rollback_inside_the_loop(tmp_path: Path, straight: list[float], step: int) -> None:
    with run(tmp_path) as it:
        it.acc.save_state()
        it.train(5, loaded_at=33, place=str(tmp_path / "checkpoints" / f"step-{step:08d}"))
        assert it.optimizer.updates == 5 * PER_EPOCH and it.model.weight.flatten().tolist() == straight


def test_two_loops_of_a_script(tmp_path: Path) -> None:
    with run(tmp_path) as it:
        assert it.train(2) == [0, 1]
        assert it.train(2) == [0, 1]
        first, second = (str(tmp_path / "checkpoints" / f"step-000000{step}") for step in (12, 25))
        it.acc.load_state(second)  # of the second loop
        assert it.train(2) == [0, 1] and it.optimizer.updates == 40
        with pytest.raises(CheckpointError):
            it.acc.load_state(tmp_path / "nothing")
        assert it.train(2) == [0, 1]  # a load that failed has changed nothing
        with pytest.raises(StepError, match="leave the loop before load_state"):
            it.train(2, loaded_at=it.optimizer.updates + 1, place=first)
    with run(tmp_path) as it:
        it.acc.load_state(second)
        assert (it.train(2), it.train(2)) == ([], [0, 1]) and it.optimizer.updates == 40
