"""Prepared loaders over map-style data sets."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

from easymp import BatchError, skip_first_batches

from .loaders import Numbers, Stream, gathered, numbers, passes, prepared

Point = namedtuple("Point", "x y")


class Uneven(Sampler[list[int]]):
    """Batches of 1, 2, 3, 1, 2 … samples in random order."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        left = torch.randperm(self.n).tolist()
        size = 0
        while left:
            size = size % 3 + 1
            yield left[:size]
            left = left[size:]

    def __len__(self) -> int:
        return len([*range(0, self.n, 6)]) * 3 - (3 - [0, 1, 2, 2, 3, 3, 3][self.n % 6 or 6])


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(100, (1,)))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 40),
    batch=st.integers(1, 5),
    size=st.integers(1, 4),
    shuffle=st.booleans(),
    even=st.booleans(),
    drop=st.booleans(),
    epochs=st.integers(1, 3),
)
@pytest.mark.filterwarnings("ignore::easymp.errors.EasympWarning")
def test_every_world_reads_each_sample_once_in_the_same_order(n, batch, size, shuffle, even, drop, epochs):
    def make() -> DataLoader[int]:
        return DataLoader(Numbers(n), batch, shuffle=shuffle, drop_last=drop)

    alone = prepared(make())
    everyone = [prepared(make(), rank, size, even_batches=even) for rank in range(size)]
    for _ in range(epochs):
        order = [i for batch in passes(alone)[0] for i in batch]
        lengths = [len(loader) for loader in everyone]
        if drop:
            order = order[: n // (batch * size) * batch * size]
        assert gathered(everyone) == order
        for loader in everyone:
            loader.set_epoch(loader.epoch - 1)
        assert [len(passes(loader)[0]) for loader in everyone] == lengths
        assert len(set(lengths)) == 1 or not even


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_known_with_each_batch(workers: int) -> None:
    loader = prepared(DataLoader(Numbers(11), 2, num_workers=workers), 1, 2)
    assert (len(loader), loader.batch_size, loader.total_batch_size, loader.uneven) == (3, 2, 4, False)
    assert loader.batch_line(3) == "2 per device × 2 processes × 3 accumulation = 12"
    seen = [(numbers(b), loader.position, loader.surplus, loader.local_size, loader.last) for b in loader]
    assert seen == [([2, 3], 4, 0, 2, False), ([6, 7], 8, 0, 2, False), ([10, 0], 11, 1, 2, True)]
    assert (loader.position, loader.surplus, loader.local_size, loader.last) == (0, 0, None, False)


def test_split_batches_divide_the_loaders_own() -> None:
    loaders = [prepared(DataLoader(Numbers(10), 4), rank, 2, split_batches=True) for rank in range(2)]
    assert [passes(loader)[0] for loader in loaders] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    assert loaders[0].batch_size == 2 and loaders[0].total_batch_size == 4


def test_each_for_is_a_new_epoch_and_an_epoch_is_an_order() -> None:
    loader = prepared(DataLoader(Numbers(20), 4, shuffle=True))
    first, second = passes(loader, 2)
    assert first != second and loader.epoch == 2
    loader.set_epoch(0)
    assert passes(loader, 2) == [first, second]
    assert passes(prepared(DataLoader(Numbers(20), 4, shuffle=True))) == [first]
    assert passes(prepared(DataLoader(Numbers(20), 4, shuffle=True), seed=8)) != [first]
    assert passes(prepared(DataLoader(Numbers(20), 4, shuffle=True), seed=8, data_seed=7)) == [first]


def test_a_loop_left_early_makes_the_next_one_a_new_epoch() -> None:
    loader = prepared(DataLoader(Numbers(20), 4, shuffle=True))
    second = passes(loader, 2)[1]
    loader.set_epoch(0)
    for _ in loader:
        break
    assert (loader.epoch, loader.position) == (1, 0)
    assert passes(loader) == [second]


def test_set_epoch_reaches_those_who_shuffle_themselves() -> None:
    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            self.told = epoch

    data = Told(4)
    loader = prepared(DataLoader(data, 2))
    loader.set_epoch(3)
    assert data.told == 3
    passes(loader, 2)
    assert data.told == 4


def test_a_distributed_sampler_is_replaced_and_its_set_epoch_still_heard() -> None:
    sampler = DistributedSampler(Numbers(16), num_replicas=2, rank=0, shuffle=True)
    loader = prepared(DataLoader(Numbers(16), 2, sampler=sampler), 0, 2)
    first, second = passes(loader, 2)
    assert len(first) == 4 and first != second
    sampler.set_epoch(0)
    assert passes(loader) == [first]
    loader.sampler.set_epoch(1)
    assert passes(loader) == [second]
    quiet = DistributedSampler(Numbers(15), num_replicas=2, rank=0, shuffle=False, drop_last=True)
    assert passes(prepared(DataLoader(Numbers(15), 2, sampler=quiet), 1, 2)) == [[[2, 3], [6, 7], [10, 11]]]


@pytest.mark.parametrize("even", [True, False])
def test_custom_batch_samplers_are_dealt_whole(even: bool) -> None:
    whole = passes(prepared(DataLoader(Numbers(13), batch_sampler=Uneven(13))))[0]
    assert len(whole) == 7
    loaders = [
        prepared(DataLoader(Numbers(13), batch_sampler=Uneven(13)), r, 2, even_batches=even) for r in range(2)
    ]
    shares = [passes(loader)[0] for loader in loaders]
    assert shares[0] == whole[0::2]
    assert shares[1] == (whole[1::2] + [whole[0]] if even else whole[1::2])
    assert [len(loader) for loader in loaders] == ([4, 4] if even else [4, 3])
    assert loaders[0].uneven and loaders[0].batch_size is None
    if even:
        loaders = [prepared(DataLoader(Numbers(13), batch_sampler=Uneven(13)), r, 2) for r in range(2)]
        assert sorted(gathered(loaders)) == list(range(13))


def test_custom_batch_samplers_can_be_split() -> None:
    class Fours(Sampler[list[int]]):
        batch_size = 4

        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10])

        def __len__(self) -> int:
            return 3

    loaders = [
        prepared(DataLoader(Numbers(11), batch_sampler=Fours()), r, 2, split_batches=True) for r in range(2)
    ]
    assert [passes(loader)[0] for loader in loaders] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]]
    assert loaders[0].batch_size == 2 and not loaders[0].uneven
    assert gathered(loaders) == list(range(11))


@pytest.mark.parametrize("workers", [0, 2])
def test_endless_samplers_are_streamed(workers: int) -> None:
    loaders = [
        prepared(DataLoader(Numbers(100), 3, sampler=Endless(), num_workers=workers), r, 2) for r in range(2)
    ]
    alone = iter(prepared(DataLoader(Numbers(100), 6, sampler=Endless())))
    for number, round_ in enumerate(zip(*loaders)):
        assert numbers(torch.cat(round_)) == numbers(next(alone))
        if number == 3:
            break
    with pytest.raises(BatchError, match="no length, because its Endless has none"):
        len(loaders[0])


def test_items_that_are_batches_are_dealt_in_turn() -> None:
    data = TensorDataset(torch.arange(10).reshape(5, 2))
    loaders = [prepared(DataLoader(data, batch_size=None), rank, 2) for rank in range(2)]
    found = [[x.tolist() for (x,) in loader] for loader in loaders]
    assert found == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    assert (len(loaders[0]), loaders[0].batch_size, loaders[0].uneven) == (3, None, True)
    with pytest.raises(BatchError, match="ready batches"):
        [loaders[0].surplus for _ in loaders[0]]


def test_the_loaders_own_random_order_stays_on_request() -> None:
    torch.manual_seed(5)
    plain = [numbers(b) for b in DataLoader(Numbers(20), 4, shuffle=True)]
    torch.manual_seed(5)
    loader = prepared(DataLoader(Numbers(20), 4, shuffle=True), use_seedable_sampler=False)
    assert passes(loader) == [plain]
    loader = prepared(DataLoader(Numbers(20), 4, shuffle=True), use_seedable_sampler=False)
    read = []
    for batch in loader:
        read.append(numbers(batch))
        if len(read) == 2:
            state = json.loads(json.dumps(loader.state_dict()))
    other = prepared(DataLoader(Numbers(20), 4, shuffle=True), use_seedable_sampler=False)
    other.load_state_dict(state)
    assert passes(other)[0] == read[2:]  # the order drawn then is drawn again
    assert passes(other)[0] != read  # and a new one after it


def seed_of_worker(_: list[int]) -> int:
    return torch.initial_seed()


def test_worker_seeds_are_reproducible_and_differ_by_rank_and_epoch() -> None:
    def seeds(rank: int) -> list[int]:
        loader = prepared(DataLoader(Numbers(4), 2, collate_fn=seed_of_worker, num_workers=1), rank, 2)
        return [next(iter(loader)) for _ in range(2)]

    first, again, other = seeds(0), seeds(0), seeds(1)
    assert first == again and len({*first, *other}) == 4


def test_persistent_workers_get_each_epochs_order_also_after_a_loop_left_early() -> None:
    loader = prepared(DataLoader(Numbers(12), 2, num_workers=2, persistent_workers=True, shuffle=True))
    plain = prepared(DataLoader(Numbers(12), 2, shuffle=True))
    for x in (loader, plain):
        for _ in x:
            break
    assert passes(loader, 2) == passes(plain, 2)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 40),
    before=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_a_pass_goes_on_where_it_was_saved_at_any_world_size(n, before, after, epoch, data):
    def world(batch: int, size: int) -> list[Any]:
        return [prepared(DataLoader(Numbers(n), batch, shuffle=True), rank, size) for rank in range(size)]

    alone = prepared(DataLoader(Numbers(n), 1, shuffle=True))
    orders = [[i for batch in epoch for i in batch] for epoch in passes(alone, epoch + 2)]
    (loader, *_) = world(*before)
    loader.set_epoch(epoch)
    stop = data.draw(st.integers(1, len(loader)))
    for number, _ in enumerate(loader, 1):
        if number == stop:
            state = json.loads(json.dumps(loader.state_dict()))
            break
    resumed = world(*after)
    for rank in resumed:
        rank.load_state_dict(state)
        rank.set_epoch(epoch)  # a script that sets it does not lose its place
    assert gathered(resumed) == orders[epoch][state["position"] :]
    assert gathered(resumed) == orders[epoch + 1]


def test_a_data_set_with_a_state_is_asked() -> None:
    class Stateful(Numbers):
        def state_dict(self) -> dict[str, Any]:
            return {"loaded": list(self.loaded)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state["loaded"]

    loader = prepared(DataLoader(Stateful(4), 2))
    next(iter(loader))
    other = prepared(DataLoader(Stateful(4), 2))
    other.load_state_dict(loader.state_dict())
    assert other.dataset.loaded == [0, 1]


def test_states_that_do_not_fit_are_refused() -> None:
    loader = prepared(DataLoader(Numbers(8), 2))
    with pytest.raises(BatchError, match="has no position and no seed"):
        loader.load_state_dict({"epoch": 1})
    with pytest.raises(BatchError, match="an epoch of 9 samples, and this one has 8"):
        loader.load_state_dict({"epoch": 0, "position": 2, "seed": 0, "samples": 9})


def test_a_subclass_of_dataloader_from_before_in_order_is_read() -> None:
    loader = DataLoader(Numbers(6), 2)
    del loader.in_order  # as torchdata's StatefulDataLoader up to 0.10
    assert len(list(prepared(loader, 0, 1))) == 3


@pytest.mark.parametrize(
    ("make", "config", "sentence"),
    [
        (lambda: [1, 2], {}, "a list was passed where a DataLoader belongs"),
        (lambda: DataLoader(Numbers(0), 2), {}, "is empty"),
        (lambda: DataLoader(Numbers(9), 2, in_order=False), {}, "leave in_order=False out"),
        (lambda: DataLoader(Numbers(8), 3), {"split_batches": True}, "batch_size=3 does not divide: use 2"),
        (lambda: DataLoader(Numbers(8), None), {"split_batches": True}, "batch_size=None"),
    ],
)
def test_wrong_loaders_are_refused(make: Any, config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BatchError, match=sentence):
        prepared(make(), 0, 2, **config)


def test_loaders_that_iterate_their_own_way_are_worth_a_warning() -> None:
    class Mine(DataLoader[int]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.warns(UserWarning, match="the __iter__ of Mine is not used"):
        prepared(Mine(Numbers(3), 2))


# -- skip_first_batches -------------------------------------------------------------------------------------------------


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
