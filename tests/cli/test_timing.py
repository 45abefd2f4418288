"""``easymp config --measure``: what is found on machines that are made up, and that it runs on this one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from easymp import Hardware, detect
from easymp.cli.config.timing import BLOCKS, ROUNDS, WIDTHS, Measurement, Work, measure

from ..hardware.machines import MACHINES


class Machine:
    """A clock that only work moves on: `factors` times as long as fp32 for each precision, 8 times for each doubling of the width."""

    def __init__(
        self,
        smallest: float,
        factors: dict[str, float],
        noise: Callable[[], float] = lambda: 1.0,
        memory: int = 10**9,
    ) -> None:
        self.smallest, self.factors = smallest, {"fp32": 1.0, **factors}
        self.noise, self.memory = noise, memory
        self.now, self.done = 0.0, list[Work]()

    def run(self, work: Work) -> float:
        width = work.network.width
        if width > self.memory:
            raise torch.OutOfMemoryError("made up")
        if work.precision not in self.factors:
            raise RuntimeError(f'"addmm" not implemented for {work.precision}\nand more')
        took = self.smallest * (width / WIDTHS[0]) ** 3 * self.factors[work.precision] * self.noise()
        self.now += took
        self.done.append(work)
        return took

    def measure(self, hardware: Hardware, seconds: float = 10.0) -> Measurement:
        return measure(hardware, seconds, timer=self.run, clock=lambda: self.now)


LAPTOP, AMPERE, VOLTA = MACHINES["laptop CPU"], MACHINES["A100"], MACHINES["V100"]


@pytest.mark.parametrize(
    ("machine", "smallest", "factors", "fastest", "width"),
    [
        (AMPERE, 1e-6, {"tf32": 0.5, "bf16": 0.25, "fp16": 0.25}, "bf16", 2048),
        (AMPERE, 1e-6, {"tf32": 0.5, "bf16": 0.51, "fp16": 0.52}, "tf32", 2048),
        (VOLTA, 1e-5, {"bf16": 1.1, "fp16": 0.4}, "fp16", 2048),
        (LAPTOP, 1e-4, {"bf16": 1.02, "fp16": 20.0}, "fp32", 512),
        (LAPTOP, 1e-2, {"bf16": 0.5, "fp16": 3.9}, "bf16", 128),
    ],
)
def test_the_fastest_is_found_in_time(machine, smallest, factors, fastest, width):
    fake = Machine(smallest, factors)
    found = fake.measure(machine)
    if machine is VOLTA:
        assert set(found.left_out) >= {"tf32"}
    assert found.fastest == fastest
    assert {s.precision: s.ratio for s in found.speeds} == pytest.approx(
        {"fp32": 1.0, **{name: 1 / f for name, f in factors.items() if name not in found.left_out}}
    )
    assert found.speeds[0].width == width
    assert all(speed.certain and speed.rounds >= ROUNDS[0] for speed in found.speeds)
    assert found.seconds == fake.now <= 10.0
    assert {work.network.block for work in fake.done} == set(BLOCKS)


@pytest.mark.parametrize("smallest", [1e-7, 1e-5, 1e-3, 1e-2, 0.1, 1.0, 60.0])
@pytest.mark.parametrize("seconds", [0.5, 10.0])
def test_it_ends_in_time_or_with_the_first_round(smallest, seconds):
    found = Machine(smallest, {"bf16": 0.8, "fp16": 26.0}).measure(LAPTOP, seconds)
    first = 2 * smallest * len(BLOCKS) * (1 + 0.8 + 26.0)  # a warm-up and a round of the smallest work
    assert found.seconds <= max(seconds, first) + first
    assert found.speeds[0].precision == "fp32" and len(found.speeds) == 3


def test_precisions_take_turns():
    fake = Machine(1e-3, {"bf16": 0.8, "fp16": 1.5})
    fake.measure(LAPTOP)
    last = [work.precision for work in fake.done[-6:] if work.network.block == "transformer"]
    assert sorted(last) == ["bf16", "fp16", "fp32"]
    assert len({fake.done[-6 * i].precision for i in range(1, 4)}) == 3


def test_on_a_busy_machine_nothing_is_certain():
    noise = random.Random(0)
    found = Machine(1e-3, {"bf16": 0.8, "fp16": 1.0}, lambda: noise.choice([1.0, 1.0, 9.0])).measure(LAPTOP)
    assert found.fastest == "fp32"
    assert "bf16 beside fp32 could not be measured: the machine is too busy" in found.sentences[0]


def test_what_does_not_run_is_left_out_and_what_does_not_fit_is_made_smaller():
    found = Machine(1e-6, {"tf32": 0.5, "bf16": 0.25}, memory=512).measure(AMPERE)
    assert found.left_out == {"fp16": 'it does not run ("addmm" not implemented for fp16)'}
    assert found.speeds[0].width == 512 and found.fastest == "bf16"
    with pytest.raises(torch.OutOfMemoryError):
        Machine(1e-6, {}, memory=1).measure(AMPERE)


@pytest.mark.parametrize(
    ("factor", "said"), [(0.476, "is 2.1 times as fast"), (1.4, "1.4 times as long"), (0.97, "is as fast")]
)
def test_the_sentence(factor, said):
    found = Machine(1e-4, {"bf16": factor, "fp16": 5.0}).measure(LAPTOP)
    assert said in found.reason("bf16") and found.sentences[0].startswith(
        f"{found.reason('bf16')} (transformer "
    )
    assert found.reason("fp32") == f"{found.reason('bf16')}; {found.reason('fp16')}"
    assert found.reason("tf32") == "tf32 was not measured"
    assert "measured on cpu in" in found.sentences[-1]


def test_it_runs_here():
    """The shortest measurement; torch's flags (fixtures look) and its random numbers stay as they are."""
    before = torch.get_rng_state()
    found = measure(detect(use_accelerators=False), seconds=0.0)
    assert {s.precision for s in found.speeds} | {*found.left_out} == {"fp32", "tf32", "bf16", "fp16"}
    assert "TF32 is a mode of GPU Tensor Cores" in found.left_out["tf32"]
    assert all(speed.ratio > 0 for speed in found.speeds) and torch.equal(before, torch.get_rng_state())


@pytest.mark.gpu
def test_it_runs_on_a_gpu():
    found = measure(seconds=5.0)
    assert found.device.startswith("cuda") and found.seconds < 10
    assert found.speeds[0].certain
