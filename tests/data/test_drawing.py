"""What data sets and collate functions draw.

Replayed by a run that goes on, in workers, in streams, and where a batch is read ahead.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from easymp.data import loader as loader_module

from .loaders import Numbers, Placed, prepared

Draw = tuple[int, float, float, float]


def drawn(i: int) -> Draw:
    return i, random.random(), float(numpy.random.rand()), float(torch.rand(()))


class Augmented(Numbers):
    def __getitem__(self, i: int) -> Any:
        return drawn(i)


class Shuffled(IterableDataset[Any]):
    """An order of its own, by the global stream."""

    def __iter__(self) -> Iterator[Draw]:
        info = get_worker_info()
        order = list(range(22))
        random.shuffle(order)
        yield from map(drawn, order if info is None else order[info.id :: info.num_workers])


class Augmenting(Placed):
    def item(self, i: int) -> Any:
        return drawn(i)


def collate(items: list[Draw]) -> list[Any]:
    return [*items, random.random()]


def everything(loader: Any, times: int) -> list[list[Any]]:
    return [[batch for batch in loader] for _ in range(times)]  # noqa: C416  list() would ask for a length


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize(
    "data", [lambda: Augmented(22), Shuffled, lambda: Augmenting(22)], ids=["map", "shuffled", "placed"]
)
def test_draws_are_replayed_in_the_pass_that_goes_on_and_after_it(data, workers, monkeypatch):
    monkeypatch.setattr(loader_module, "reads_ahead", lambda device, non_blocking: True)  # as to a GPU

    def make_loader() -> Any:
        return prepared(DataLoader(data(), 4, collate_fn=collate, **workers))

    straight = everything(make_loader(), 3)
    loader = make_loader()
    everything(loader, 1)
    states = [json.loads(json.dumps(loader.state_dict())) for _ in loader]
    for stop in (1, 5):
        random.seed(stop)  # the training has drawn something
        torch.manual_seed(stop)
        resumed = make_loader()
        resumed.load_state_dict(states[stop - 1])
        assert everything(resumed, 2) == [straight[1][stop:], straight[2]]


def passes_of(data: Any, rank: int = 0, size: int = 1, workers: int = 0) -> list[Draw]:
    random.seed(rank)  # the ranks' own streams differ
    torch.manual_seed(rank)
    loader = prepared(DataLoader(data, 2, collate_fn=list, num_workers=workers), rank, size)
    return [item for batch in loader for item in batch]


def test_another_number_of_workers_draws_the_same() -> None:
    assert passes_of(Augmented(9), workers=1) == passes_of(Augmented(9), workers=2)


def test_ranks_draw_for_themselves_and_shuffle_a_stream_alike() -> None:
    first, second = (passes_of(Augmented(8), rank, 2, workers=1) for rank in (0, 1))
    assert not {x for _, x, *_ in first} & {x for _, x, *_ in second}
    for workers in (0, 1):
        ranks = [passes_of(Shuffled(), rank, 2, workers) for rank in (0, 1)]
        assert {i for rank in ranks for i, *_ in rank} == set(range(22))


def test_a_map_style_data_set_draws_from_the_trainings_streams_and_a_stream_leaves_them_alone() -> None:
    values = [x for _, x, *_ in passes_of(Augmented(4))]
    random.seed(0)
    assert values == [random.random() for _ in range(4)]
    passes_of(Shuffled())
    after = random.random(), torch.rand(())
    random.seed(0)
    torch.manual_seed(0)
    assert after == (random.random(), torch.rand(()))
