"""``acc.epochs(n)`` goes on where the loaded state stands: in a new process and in one that has run loops before."""

from __future__ import annotations

from pathlib import Path

import pytest

from easymp import CheckpointError, StepError

from .samples import Small

PER_EPOCH = 5


class Run(Small):
    def train(self, count: int, stop: int = 0, loaded_at: int = 0, place: str = "") -> list[int]:
        """The script's loop; it is left after `stop` updates, and loads `place` once, after `loaded_at`."""
        begun = []
        for epoch in self.acc.epochs(count):
            begun.append(epoch)
            for batch in self.loader:
                self.step(batch)
                if self.optimizer.updates == stop:
                    return begun
                if self.optimizer.updates == loaded_at:
                    loaded_at = 0
                    self.acc.load_state(place)
                elif self.optimizer.updates in (3, 6, 12):
                    self.acc.save_state()
        return begun

    def end(self) -> tuple[int, list[list[float]]]:
        return self.optimizer.updates, self.weight().tolist()


@pytest.fixture
def straight(tmp_path: Path) -> tuple[int, list[list[float]]]:
    """The updates and weights after five epochs without a break."""
    with Run(tmp_path / "straight") as it:
        assert it.train(5) == [0, 1, 2, 3, 4] and it.optimizer.updates == 5 * PER_EPOCH
        return it.end()


@pytest.mark.parametrize("ended", [10, 12, 0], ids=["at an epoch's end", "inside an epoch", "at its own end"])
@pytest.mark.parametrize("way", ["load_state", "resume"])
def test_a_loop_after_a_load_goes_on_at_the_state(tmp_path, straight, way, ended):
    with Run(tmp_path) as it:
        it.train(5, stop=ended)
        places = [str(place) for place in sorted((tmp_path / "checkpoints").glob("step-*"))]
        for place in (places[1], places[0], places[-1]):
            it.acc.load_state(place) if way == "load_state" else it.acc.resume()
            assert it.train(5)[-1] == 4 and it.end() == straight


def test_a_kill_after_a_rollback_goes_on_at_the_state(tmp_path, straight):
    with Run(tmp_path) as it:
        it.train(5, stop=10)
        it.acc.load_state(tmp_path / "checkpoints" / "step-00000003")
        it.train(5, stop=8)  # a kill, after the save at update 6
    with Run(tmp_path) as it:
        it.acc.resume()
        assert it.train(5) == [1, 2, 3, 4] and it.end() == straight


@pytest.mark.parametrize("step", [6, 0], ids=["inside an epoch", "before the first epoch"])
def test_a_rollback_inside_the_loop(tmp_path, straight, step):
    with Run(tmp_path) as it:
        it.acc.save_state()
        it.train(5, loaded_at=17, place=str(tmp_path / "checkpoints" / f"step-{step:08d}"))
        assert it.end() == straight


def test_two_loops_of_a_script(tmp_path):
    with Run(tmp_path) as it:
        assert it.train(2) == [0, 1]
        assert it.train(2) == [0, 1]
        first, second = (str(tmp_path / "checkpoints" / f"step-000000{step}") for step in ("06", "12"))
        it.acc.load_state(second)  # of the second loop
        assert it.train(2) == [0, 1] and it.optimizer.updates == 20
        with pytest.raises(CheckpointError):
            it.acc.load_state(tmp_path / "nothing")
        assert it.train(2) == [0, 1]  # a load that failed has changed nothing
        with pytest.raises(StepError, match="leave the loop before load_state"):
            it.train(2, loaded_at=it.optimizer.updates + 1, place=first)
    with Run(tmp_path) as it:
        it.acc.load_state(second)
        assert (it.train(2), it.train(2)) == ([], [0, 1]) and it.optimizer.updates == 20
