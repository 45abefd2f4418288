"""Prepared loaders over map-style data sets."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from easymp import BatchError, PreparedLoader, skip_first_batches

from .loaders import Numbers, Stream, gathered, numbers, passes, prepared

WORLDS = st.tuples(st.integers(1, 4), st.integers(1, 3))  # size of a batch, number of ranks


class Given(Sampler[list[int]]):
    """Batches of these sizes, of samples in random order; `batch_size`, where there is one, lets them be split."""

    def __init__(self, sizes: list[int], batch_size: int | None = None) -> None:
        self.sizes = sizes
        if batch_size is not None:
            self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        left = torch.randperm(sum(self.sizes)).tolist()
        for size in self.sizes:
            yield left[:size]
            left = left[size:]

    def __len__(self) -> int:
        return len(self.sizes)


class Endless(Sampler[int]):
    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(100, (1,), generator=self.generator))


class Everything(Sampler[float]):
    """Draws from every global source of randomness."""

    def __iter__(self) -> Iterator[Any]:
        yield from (random.random(), float(numpy.random.rand()), float(torch.rand(1)))

    def __len__(self) -> int:
        return 3


YES = st.booleans()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), batch=st.integers(1, 5), size=st.integers(1, 4), shuffle=YES, even=YES, drop=YES)
@pytest.mark.filterwarnings("ignore::easymp.errors.EasympWarning")
def test_every_world_reads_each_sample_once_in_the_same_order(n, batch, size, shuffle, even, drop):
    def make_loader() -> DataLoader[int]:
        return DataLoader(Numbers(n), batch, shuffle=shuffle, drop_last=drop)

    single_loader = prepared(make_loader())
    rank_loaders = [prepared(make_loader(), rank, size, even_batches=even) for rank in range(size)]
    for _ in range(2):
        order = [i for batch in passes(single_loader)[0] for i in batch]
        lengths = [len(loader) for loader in rank_loaders]
        if drop:
            order = order[: n // (batch * size) * batch * size]
        assert gathered(rank_loaders) == order
        for loader in rank_loaders:
            loader.set_epoch(loader.epoch - 1)
        assert [len(passes(loader)[0]) for loader in rank_loaders] == lengths
        assert len(set(lengths)) == 1 or not even


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_known_with_each_batch(workers: int) -> None:
    loader = prepared(DataLoader(Numbers(11), 2, num_workers=workers), 1, 2)
    assert (len(loader), loader.batch_size, loader.total_batch_size, loader.uneven) == (3, 2, 4, False)
    assert loader.batch_line(3) == "2 per device × 2 processes × 3 accumulation = 12"
    facts = [(numbers(b), loader.position, loader.surplus, loader.local_size, loader.last) for b in loader]
    assert facts == [([2, 3], 4, 0, 2, False), ([6, 7], 8, 0, 2, False), ([10, 0], 11, 1, 2, True)]
    assert (loader.position, loader.surplus, loader.local_size, loader.last) == (0, 0, None, False)


def test_each_for_is_a_new_epoch_and_an_epoch_is_an_order() -> None:
    loader = prepared(DataLoader(Numbers(20), 4, shuffle=True))
    first, second = passes(loader, 2)
    assert first != second and loader.epoch == 2
    loader.set_epoch(0)
    assert passes(loader, 2) == [first, second]
    assert passes(prepared(DataLoader(Numbers(20), 4, shuffle=True))) == [first]
    loader.set_epoch(0)
    for _ in loader:
        break  # a loop that is left early ends its epoch
    assert (loader.epoch, loader.position) == (1, 0)
    assert passes(loader) == [second]


def test_the_order_is_a_function_of_the_seed_for_all_time() -> None:
    loader = prepared(DataLoader(Numbers(8), 8, shuffle=True), seed=7)
    assert passes(loader, 2) == [[[5, 7, 0, 2, 4, 6, 1, 3]], [[1, 5, 0, 3, 7, 6, 4, 2]]]


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(9), num_samples=25),
        RandomSampler(range(9), replacement=True, num_samples=30),
        SubsetRandomSampler([3, 1, 2, 8, 7, 5], generator=torch.Generator()),
        WeightedRandomSampler([0.1, 0.9], 12),
        Everything(),
    ],
)
def test_one_seed_one_order_and_no_generator_touched(sampler: Any) -> None:
    def states() -> tuple[Any, ...]:
        generator = getattr(sampler, "generator", None)
        generator_states = [g.get_state().tolist() for g in (torch.default_generator, generator) if g is not None]
        return random.getstate(), numpy.random.get_state()[1].tolist(), generator_states

    before = states()
    first, repeated, other_seed = (
        [b.tolist() for b in prepared(DataLoader(Numbers(9), 8, sampler=sampler), seed=s)] for s in (1, 1, 2)
    )
    assert first == repeated != other_seed
    assert before == states()


def test_set_epoch_reaches_those_who_shuffle_themselves() -> None:
    class WithSetEpoch(Numbers):
        def set_epoch(self, epoch: int) -> None:
            self.last_epoch = epoch

    loader = prepared(DataLoader(data := WithSetEpoch(4), 2))
    loader.set_epoch(3)
    assert data.last_epoch == 3
    passes(loader, 2)
    assert data.last_epoch == 4


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


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    size=st.integers(1, 3),
    even=st.booleans(),
    data=st.data(),
)
@pytest.mark.filterwarnings("ignore::easymp.errors.EasympWarning")
def test_custom_batch_samplers_are_dealt_whole(sizes, size, even, data):
    def world(size: int) -> list[PreparedLoader]:
        loaders = [DataLoader(Numbers(sum(sizes)), batch_sampler=Given(sizes)) for _ in range(size)]
        return [prepared(loader, rank, size, even_batches=even) for rank, loader in enumerate(loaders)]

    (batches,) = passes(world(1)[0])
    loaders, resumed = world(size), world(size)
    dealt = batches + [batches[i % len(batches)] for i in range(-len(batches) % size if even else 0)]
    assert [len(loader) for loader in loaders] == [len(dealt[rank::size]) for rank in range(size)]
    assert loaders[0].uneven == (size > 1) and loaders[0].batch_size is None
    states = [loaders[0].state_dict() for _ in loaders[0]]
    assert [passes(loader)[0] for loader in world(size)] == [dealt[rank::size] for rank in range(size)]
    state = data.draw(st.sampled_from(states))
    for loader in resumed:
        loader.load_state_dict(state)
    remaining = [i for batch in batches for i in batch][state["position"] :]
    assert sorted(gathered(resumed)) == sorted(remaining)


@settings(max_examples=40, deadline=None)
@given(
    full=st.integers(0, 4), last=st.integers(1, 6), part_size=st.integers(1, 3), ranks=st.integers(1, 3), data=st.data()
)
@pytest.mark.filterwarnings("ignore::easymp.errors.EasympWarning")
def test_custom_batch_samplers_can_be_split(full, last, part_size, ranks, data):
    sizes, even = [part_size * ranks] * full + [min(last, part_size * ranks)], data.draw(st.booleans())

    def world(size: int, **config: Any) -> list[PreparedLoader]:
        loaders = [DataLoader(Numbers(sum(sizes)), batch_sampler=Given(sizes, part_size * ranks)) for _ in range(size)]
        return [prepared(loader, rank, size, **config) for rank, loader in enumerate(loaders)]

    order = [i for batch in passes(world(1)[0])[0] for i in batch]
    loaders, resumed = (world(ranks, split_batches=True, even_batches=even) for _ in range(2))
    assert gathered(loaders) == order
    for loader in loaders:
        loader.set_epoch(0)
    state = data.draw(st.sampled_from([loaders[0].state_dict() for _ in loaders[0]]))
    for loader in resumed:
        loader.load_state_dict(state)
    assert gathered(resumed) == order[state["position"] :]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_endless_samplers_are_streamed(workers: int, generator: Any) -> None:
    def make_loader(batch: int, rank: int, size: int, workers: int = 0) -> PreparedLoader:
        loader = DataLoader(Numbers(100), batch, sampler=Endless(generator), num_workers=workers)
        return prepared(loader, rank, size)

    loaders = [make_loader(3, rank, 2, workers) for rank in range(2)]
    for number, (batch, *round_) in enumerate(zip(make_loader(6, 0, 1), *loaders)):
        assert numbers(torch.cat(round_)) == numbers(batch)
        torch.rand(5)  # the training draws, too
        if number == 3:
            break
    with pytest.raises(BatchError, match="no length, because its Endless has none"):
        len(loaders[0])


def test_items_that_are_batches_are_dealt_in_turn() -> None:
    data = torch.arange(10).reshape(5, 2)
    loaders = [prepared(DataLoader(data, batch_size=None), rank, 2) for rank in range(2)]
    assert [passes(loader)[0] for loader in loaders] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    assert (len(loaders[0]), loaders[0].batch_size, loaders[0].uneven) == (3, None, True)
    with pytest.raises(BatchError, match="ready batches"):
        [loaders[0].surplus for _ in loaders[0]]


def test_the_loaders_own_random_order_stays_on_request() -> None:
    def make_loader() -> Any:
        return prepared(DataLoader(Numbers(20), 4, shuffle=True), use_seedable_sampler=False)

    torch.manual_seed(5)
    plain = [numbers(b) for b in DataLoader(Numbers(20), 4, shuffle=True)]
    torch.manual_seed(5)
    assert passes(make_loader()) == [plain]
    loader, resumed = make_loader(), make_loader()
    states = [(numbers(batch), json.loads(json.dumps(loader.state_dict()))) for batch in loader]
    resumed.load_state_dict(states[1][1])
    batches = [batch for batch, _ in states]
    assert passes(resumed)[0] == batches[2:]  # the order drawn then is drawn again
    assert passes(resumed)[0] != batches  # and a new one after it


def seed_of_worker(_: list[int]) -> int:
    return torch.initial_seed()


def test_worker_seeds_are_reproducible_and_differ_by_rank_and_epoch() -> None:
    def seeds(rank: int) -> list[int]:
        loader = prepared(DataLoader(Numbers(4), 2, collate_fn=seed_of_worker, num_workers=1), rank, 2)
        return [next(iter(loader)) for _ in range(2)]

    first, repeated, second_rank = seeds(0), seeds(0), seeds(1)
    assert first == repeated and len({*first, *second_rank}) == 4


def test_persistent_workers_get_each_epochs_order_also_after_a_loop_left_early() -> None:
    loaders = [
        prepared(DataLoader(Numbers(12), 2, shuffle=True, **workers))
        for workers in ({}, {"num_workers": 2, "persistent_workers": True})
    ]
    for loader in loaders:
        next(iter(loader))
    assert passes(loaders[0], 2) == passes(loaders[1], 2)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), before=WORLDS, after=WORLDS, epoch=st.integers(0, 2), data=st.data())
def test_a_pass_goes_on_where_it_was_saved_at_any_world_size(n, before, after, epoch, data):
    def world(batch: int, size: int) -> list[Any]:
        return [prepared(DataLoader(Numbers(n), batch, shuffle=True), rank, size) for rank in range(size)]

    orders = [[i for batch in epoch for i in batch] for epoch in passes(world(1, 1)[0], epoch + 2)]
    (loader, *_) = world(*before)
    loader.set_epoch(epoch)
    states = [json.loads(json.dumps(loader.state_dict())) for _ in loader]
    state = data.draw(st.sampled_from(states))
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

    loader, resumed = (prepared(DataLoader(Stateful(4), 2)) for _ in range(2))
    next(iter(loader))
    resumed.load_state_dict(loader.state_dict())
    assert resumed.dataset.loaded == [0, 1]


def eight() -> DataLoader[int]:
    return DataLoader(Numbers(8), 3)


WRONG: dict[str, Any] = {
    "has no position and no seed": lambda: prepared(eight()).load_state_dict({"epoch": 1}),
    "an epoch of 9 samples, and this one has 8": lambda: prepared(eight()).load_state_dict(
        {"epoch": 0, "position": 2, "seed": 0, "samples": 9}
    ),
    "is empty": lambda: prepared(DataLoader(Numbers(0), 2), 0, 2),
    "leave in_order=False out": lambda: prepared(DataLoader(Numbers(9), 2, in_order=False), 0, 2),
    "batch_size=3 does not divide: use 2 or 4, or": lambda: prepared(eight(), 0, 2, split_batches=True),
    "batch_size=3 does not divide: use 64, or": lambda: prepared(eight(), 0, 64, split_batches=True),
    "batch_size=None": lambda: prepared(DataLoader(Numbers(8), None), 0, 2, split_batches=True),
    "list": lambda: skip_first_batches([1], 1),
    "-1": lambda: skip_first_batches(eight(), -1),
    "1.5": lambda: skip_first_batches(eight(), 1.5),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message: str) -> None:
    with pytest.raises(BatchError, match=message):
        WRONG[message]()


def test_a_subclass_of_dataloader_from_before_in_order_is_read() -> None:
    loader = DataLoader(Numbers(6), 2)
    del loader.in_order  # as torchdata's StatefulDataLoader up to 0.10
    assert len(list(prepared(loader, 0, 1))) == 3


def test_loaders_that_iterate_their_own_way_are_worth_a_warning() -> None:
    class Mine(DataLoader[int]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.warns(UserWarning, match="the __iter__ of Mine is not used"):
        prepared(Mine(Numbers(3), 2))


# -- skip_first_batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_loader", [lambda: DataLoader(Numbers(10), 2, shuffle=True), lambda: DataLoader(Stream(10), 2)]
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_prepared_loader_skips_for_one_pass(make_loader: Any, size: int) -> None:
    first, second = passes(prepared(make_loader(), 0, size), 2)
    loader = prepared(make_loader(), 0, size)
    assert passes(skip_first_batches(loader, 1), 2) == [first[1:], second]
    assert loader.epoch == 2


def test_skipped_samples_are_not_loaded() -> None:
    data = Numbers(10)
    passes(skip_first_batches(prepared(DataLoader(data, 2), 0, 2), 1))
    assert data.loaded == [4, 5, 8, 9]
    data.loaded.clear()
    passes(skip_first_batches(DataLoader(data, 2), 3))
    assert data.loaded == [6, 7, 8, 9]


@pytest.mark.parametrize("loader", [DataLoader(Numbers(7), 2), DataLoader(Stream(7), 2), DataLoader(Numbers(4), None)])
def test_plain_loaders_skip_for_one_pass(loader: Any) -> None:
    batches = [str(batch) for batch in loader]
    skipped = skip_first_batches(loader, 2)
    assert [[str(batch) for batch in skipped] for _ in range(2)] == [batches[2:], batches]
    prepared_too = prepared(skip_first_batches(loader, 1))
    assert [len([*map(str, prepared_too)]) for _ in range(2)] == [len(batches) - 1, len(batches)]
