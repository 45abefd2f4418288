"""Loops of many shapes, saved at any place and begun again there, give the batches and weights that were to come."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from easymp import Accelerator, DataLoaderConfiguration

from .runs import Numbered


class Died(Exception):
    pass


class Run:
    """A training on two loaders, whose loop says where it is; it dies with the save at the place `at`."""

    def __init__(self, folder, at="", lengths=(12, 12), **options):
        self.acc = Accelerator(mixed_precision="no", seed=3, project_dir=folder, **options)
        model = nn.Linear(12, 5)
        given = torch.optim.AdamW(model.parameters(), 0.1)
        loaders = [DataLoader(Numbered(n), 4, shuffle=True) for n in lengths]
        self.model, self.optimizer, self.a, self.b = self.acc.prepare(model, given, *loaders)
        self.said: list[Any] = []
        self._at = at
        self.acc.resume()

    def step(self, *batches: Any) -> None:
        with self.acc.accumulate(self.model):
            for _, x, _ in batches:
                self.acc.backward(self.model(x).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.said += [*(indices.tolist() for indices, *_ in batches), random.random()]
        self.place(f"step {self.optimizer.updates}")

    def place(self, name: str) -> None:
        if name == self._at:
            self.acc.save_state()
            raise Died


def zipped(run: Run) -> None:
    for epoch in run.acc.epochs(3):
        for both in zip(run.a, run.b):
            run.step(*both)
        run.place(f"end {epoch}")


def endless_beside(run: Run) -> None:
    other = (batch for _ in count() for batch in run.b)
    for epoch in run.acc.epochs(3):
        for batch in run.a:
            run.step(batch, next(other))
        run.place(f"end {epoch}")


def begun_again_when_empty(run: Run) -> None:
    other = iter(run.b)
    for epoch in run.acc.epochs(3):
        for batch in run.a:
            try:
                more = next(other)
            except StopIteration:
                other = iter(run.b)
                more = next(other)
            run.step(batch, more)
        run.place(f"end {epoch}")


def a_count_of_steps(run: Run) -> None:
    for epoch in run.acc.epochs(3):
        batches = iter(run.a)
        while run.optimizer.updates < 2 * epoch + 2:
            run.step(next(batches))
        run.place(f"end {epoch}")


def two_zips(run: Run) -> None:
    for epoch in run.acc.epochs(2):
        for _ in range(2):
            for both in zip(run.a, run.b):
                run.step(*both)
        run.place(f"end {epoch}")


def plain(run: Run) -> None:
    for epoch in run.acc.epochs(3):
        for batch in run.a:
            run.step(batch)
        run.place(f"end {epoch}")


UNSEEDED = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=False)}
WINDOWS = {"gradient_accumulation_steps": 2}
# A loop, options of a Run, and places; the first one is the most telling.
LOOPS: dict[str, tuple[Callable[[Run], None], dict[str, Any], str]] = {
    "zip": (zipped, {}, "step 3, step 2, end 0, step 6"),
    "zip with a longer one": (zipped, {"lengths": (12, 20)}, "step 3, step 5"),
    "zip with a shorter one": (zipped, {"lengths": (12, 8)}, "step 2, end 1"),
    "an endless one beside": (endless_beside, {"lengths": (12, 16)}, "end 1, step 2, end 0, step 5"),
    "zip in windows": (zipped, {"lengths": (12, 8), **WINDOWS}, "step 1, step 2, step 3"),
    "an endless one in windows": (
        endless_beside,
        {"lengths": (12, 16), **WINDOWS},
        "step 3, step 1, step 2, end 1",
    ),
    "one that is begun again": (begun_again_when_empty, {"lengths": (12, 8)}, "end 1, step 2, step 3, end 2"),
    "a count of steps": (a_count_of_steps, {}, "step 3, step 1, step 2, end 0, end 1"),
    "two zips": (two_zips, {}, "step 4, step 1, step 3, step 6, end 0"),
    "the sampler's own random order": (plain, UNSEEDED, "step 3, step 2, end 0, step 6"),
}


def life(folder: Path, loop: Callable[[Run], None], at: str = "", **options: Any) -> tuple[bool, list[Any]]:
    """Whether it died, and what it saw; its weights are last."""
    run = Run(folder, at, **options)
    try:
        loop(run)
        return False, [*run.said, *run.model.state_dict().values()]
    except Died:
        return True, run.said
    finally:
        run.acc.close()


def begun_again(folder: Path, name: str, which: slice) -> None:
    loop, options, places = LOOPS[name]
    _, straight = life(folder / "straight", loop, **options)
    for place in places.split(", ")[which]:
        died, before = life(folder / place, loop, place, **options)
        assert died, place
        went_on = life(folder / place, loop, **options)[1]
        rest = straight[len(before) :]
        assert [str(seen) for seen in went_on] == [str(seen) for seen in rest], place
        assert all(torch.equal(weights, other) for weights, other in zip(went_on[-2:], rest[-2:]))


@pytest.mark.parametrize("name", LOOPS)
def test_the_rest_of_the_loop_comes(tmp_path: Path, name: str) -> None:
    begun_again(tmp_path, name, slice(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_rest_of_the_loop_comes_from_any_place(tmp_path: Path, name: str) -> None:
    begun_again(tmp_path, name, slice(1, None))
