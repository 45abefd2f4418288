"""Prepared loaders over iterable data sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from easymp import BatchError

from .loaders import Numbers, Placed, Stream, gathered, numbers, passes, prepared

YES = st.booleans()


class Ready(Stream):
    """Batches of 1, 2, 3, 1 … numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        at = size = 0
        while at < self.n:
            size = size % 3 + 1
            yield torch.arange(at, min(at + size, self.n))
            at += size


class Epochs(IterableDataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from [self.epoch] * 4


@settings(max_examples=40, deadline=None)
@pytest.mark.filterwarnings("ignore::easymp.errors.EasympWarning")
@given(n=st.integers(1, 40), batch=st.integers(1, 5), size=st.integers(1, 4), even=YES, drop=YES)
def test_a_stream_is_cut_as_a_map_style_data_set_is(n, batch, size, even, drop):
    for rank in range(size):
        facts, expected = (
            [(numbers(b), x.position, x.surplus, x.local_size, x.last) for b in x]
            for data in (Stream(n), Numbers(n))
            for x in [prepared(DataLoader(data, batch, drop_last=drop), rank, size, even_batches=even)]
        )
        assert facts == expected


def test_every_worker_cuts_its_own_stream() -> None:
    loaders = [prepared(DataLoader(Stream(18), 2, num_workers=2), rank, 2) for rank in range(2)]
    even, odd = [*range(0, 18, 2)], [*range(1, 18, 2)]
    assert [passes(loader)[0] for loader in loaders] == [
        [even[0:2], odd[0:2], even[4:6], odd[4:6], [16, 0], [17, 1]],
        [even[2:4], odd[2:4], even[6:8], odd[6:8], [2, 4], [3, 5]],
    ]
    assert sorted(gathered(loaders)) == list(range(18))
    assert [(x.position, x.surplus, x.last) for x in [loaders[0]] for _ in x] == [
        (4, 0, False), (8, 0, False), (12, 0, False), (16, 0, False), (17, 3, False), (18, 3, True),
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [0, 1])
def test_ready_batches_are_dealt_in_turn(workers: int) -> None:
    loaders = [prepared(DataLoader(Ready(9), None, num_workers=workers), rank, 2) for rank in range(2)]
    assert [passes(loader)[0] for loader in loaders] == [[[0], [3, 4, 5], [7, 8]], [[1, 2], [6], [0]]]
    assert gathered(loaders) == list(range(9))
    assert loaders[0].uneven and loaders[0].batch_size is None
    assert [x.local_size for x in [loaders[1]] for _ in x] == [2, 1, 1]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_a_stream_goes_on_where_it_was_saved(workers: dict[str, Any]) -> None:
    def make_loader() -> Any:
        return prepared(DataLoader(Stream(27), 2, **workers), 1, 2)

    loader = make_loader()
    batches = passes(loader)[0]
    states = [json.loads(json.dumps(loader.state_dict())) for _ in loader]
    for stop in (1, 5):
        resumed = make_loader()
        for _ in range(2):
            resumed.load_state_dict(states[stop - 1])
            assert passes(resumed, 2) == [batches[stop:], batches]


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 30), before=st.integers(1, 3), after=st.integers(1, 3), data=st.data())
def test_a_single_stream_goes_on_at_any_world_size(n, before, after, data):
    loader = prepared(DataLoader(Stream(n), 2), 0, before)
    states = [loader.state_dict() for _ in loader]
    state = data.draw(st.sampled_from(states))
    resumed = [prepared(DataLoader(Stream(n), 2), rank, after) for rank in range(after)]
    for rank in resumed:
        rank.load_state_dict(state)
    assert gathered(resumed) == list(range(state["position"], n))


def test_another_number_of_workers_cannot_take_over() -> None:
    loader = prepared(DataLoader(Stream(8), 2, num_workers=2))
    state, *_ = [loader.state_dict() for _ in loader]
    with pytest.raises(BatchError, match="num_workers=2"):
        prepared(DataLoader(Stream(8), 2)).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_with_a_state_of_its_own_is_asked(workers: int) -> None:
    def make_loader() -> Any:
        return prepared(DataLoader(Placed(12), 2, num_workers=workers))

    loader, resumed = make_loader(), make_loader()
    batches = passes(loader)[0]
    states = [json.loads(json.dumps(loader.state_dict())) for _ in loader]
    assert "data sets" in states[2]
    resumed.load_state_dict(states[2])
    assert passes(resumed) == [batches[3:]]


@pytest.mark.parametrize("persistent", [False, True])
def test_set_epoch_reaches_the_workers(persistent: bool) -> None:
    loader = prepared(DataLoader(Epochs(), 4, num_workers=1, persistent_workers=persistent))
    assert passes(loader, 3) == [[[0] * 4], [[1] * 4], [[2] * 4]]
