"""Loaders on two real processes: what takes talking."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from easymp import BatchError, skip_first_batches
from easymp.base.ranks import read_ranks
from easymp.distributed.process_group import World

from .loaders import CPU, Numbers, Stream, numbers, passes, prepared


class Private(Sampler[int]):
    """Draws from a random source that cannot be seeded from outside."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(8), 8))

    def __len__(self) -> int:
        return 8


class Broken(Numbers):
    def __getitem__(self, i: int) -> int:
        if i == 5:
            raise OSError("unreadable")
        return i


class OnlyOnZero(Numbers):
    def __getitem__(self, i: int) -> int:
        assert os.environ["RANK"] == "0"
        return i


def in_world(job: Callable[[World], Any]) -> Callable[[], Any]:
    """`job` with a world of the ranks that it is called on."""

    @wraps(job)
    def run() -> Any:
        # The pool's processes are daemons, which may not start DataLoader workers; a user's ranks are none.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        world = World(read_ranks(), CPU, timeout=20)
        try:
            return job(world)
        finally:
            world.close()
            multiprocessing.current_process()._config["daemon"] = True  # type: ignore[attr-defined]

    return run


def of(world: World, loader: Any, **config: Any) -> Any:
    return prepared(loader, world.rank, world.size, world=world, **config)


KINDS: dict[str, Callable[[], Any]] = {
    "map": lambda: (OnlyOnZero(11), 2, True),
    "stream": lambda: (Stream(11), 2),
    "ready": lambda: ([torch.arange(i, i + 2) for i in range(5)], None),
}


def two_epochs(loader: Any) -> Any:
    facts = [(numbers(b), loader.position, loader.last) for _ in range(2) for b in loader]
    skipped = [] if loader.batch_size is None else [loader.surplus for _ in skip_first_batches(loader, 1)]
    return facts, skipped, loader.epoch


CASES = [(kind, even) for kind in KINDS for even in (True, False)]


@in_world
def dispatched(world: World) -> Any:
    return [
        two_epochs(of(world, DataLoader(*KINDS[kind]()), dispatch_batches=True, even_batches=even))
        for kind, even in CASES
    ]


def sharded(kind: str, even: bool, rank: int) -> Any:
    data, *batch_size = KINDS[kind]()
    loader = DataLoader(Numbers(11) if kind == "map" else data, *batch_size)
    return two_epochs(prepared(loader, rank, 2, even_batches=even))


def test_dispatched_ranks_get_what_sharded_ones_read(ranks: Any) -> None:
    for rank, results in enumerate(ranks(dispatched)):
        assert results == [sharded(kind, even, rank) for kind, even in CASES]


@in_world
def left_early(world: World) -> Any:
    loader, resumed = (of(world, DataLoader(Stream(20), 2), dispatch_batches=True) for _ in range(2))
    for number, _ in enumerate(loader):
        if number == 1:
            state = loader.state_dict()
            break
    batches = passes(loader)[0]
    resumed.load_state_dict(state)
    return batches, passes(resumed)[0]


def test_a_dispatched_loop_can_be_left_and_resumed(ranks: Any) -> None:
    for rank, (batches, resumed) in enumerate(ranks(left_early)):
        assert batches == [[k, k + 1] for k in range(2 * rank, 20, 4)]
        assert resumed == batches[2:]


@in_world
def read_broken(world: World) -> Any:
    with pytest.raises((OSError, BatchError)) as caught:
        passes(of(world, DataLoader(Broken(8), 2), dispatch_batches=True))
    return caught.typename, str(caught.value)


def test_when_rank_0_cannot_read_all_ranks_hear_why(ranks: Any) -> None:
    (first, _), (second, sentence) = ranks(read_broken)
    assert (first, second) == ("OSError", "BatchError") and "OSError: unreadable" in sentence


@in_world
def own_order(world: World) -> Any:
    torch.manual_seed(world.rank)
    sampling = {"sampler": Private(world.rank)}, {"shuffle": True}
    loaders = [of(world, DataLoader(Numbers(8), 2, **options), use_seedable_sampler=False) for options in sampling]
    return [epoch for loader in loaders for epoch in passes(loader, 2)]


def test_rank_0_draws_for_all_on_request(ranks: Any) -> None:
    for epoch in zip(*ranks(own_order)):
        assert sorted(i for share in epoch for batch in share for i in batch) == list(range(8))


@in_world
def disagree(world: World) -> str:
    with pytest.raises(BatchError) as caught:
        passes(of(world, DataLoader(Numbers(8), 2, sampler=Private(world.rank))))
    return str(caught.value)


def test_ranks_whose_samplers_disagree_are_told(ranks: Any) -> None:
    assert all("drew different orders" in sentence for sentence in ranks(disagree))
