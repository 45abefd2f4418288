"""Loaders on two real processes: what takes talking."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

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
        import os

        assert os.environ["RANK"] == "0"
        return i


def in_world(job: Callable[[World], Any]) -> Any:
    # The pool's processes are daemons, which may not start DataLoader workers; a user's ranks are none.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    world = World(read_ranks(), CPU, timeout=20)
    try:
        return job(world)
    finally:
        world.close()
        multiprocessing.current_process()._config["daemon"] = True  # type: ignore[attr-defined]


KINDS: dict[str, Callable[[], Any]] = {
    "map": lambda: (OnlyOnZero(11), 2, True),
    "stream": lambda: (Stream(11), 2),
    "ready": lambda: ([torch.arange(i, i + 2) for i in range(5)], None),
}


def two_epochs(loader: Any) -> Any:
    seen = [(numbers(b), loader.position, loader.last) for _ in range(2) for b in loader]
    skipped = [] if loader.batch_size is None else [loader.surplus for _ in skip_first_batches(loader, 1)]
    return seen, skipped, loader.epoch


def dispatched(kind: str, workers: int, even: bool) -> Any:
    def job(world: World) -> Any:
        loader = DataLoader(*KINDS[kind](), num_workers=workers)
        how: Any = {"world": world, "dispatch_batches": True, "even_batches": even}
        return two_epochs(prepared(loader, world.rank, world.size, **how))

    return in_world(job)


def sharded(kind: str, even: bool) -> list[Any]:
    data, *how = KINDS[kind]()
    loaders = [DataLoader(Numbers(11) if kind == "map" else data, *how) for _ in range(2)]
    return [two_epochs(prepared(x, rank, 2, even_batches=even)) for rank, x in enumerate(loaders)]


def test_dispatched_ranks_get_what_sharded_ones_read(ranks: Any) -> None:
    for kind in KINDS:
        for even in (True, False):
            assert ranks(dispatched, kind, 0, even) == sharded(kind, even)


def left_early() -> Any:
    def job(world: World) -> Any:
        def make() -> Any:
            how: Any = {"world": world, "dispatch_batches": True}
            return prepared(DataLoader(Stream(20), 2), world.rank, world.size, **how)

        loader, other = make(), make()
        for number, _ in enumerate(loader):
            if number == 1:
                state = loader.state_dict()
                break
        whole = passes(loader)[0]
        other.load_state_dict(state)
        return whole, passes(other)[0]

    return in_world(job)


def test_a_dispatched_loop_can_be_left_and_resumed(ranks: Any) -> None:
    for rank, (whole, resumed) in enumerate(ranks(left_early)):
        assert whole == [[k, k + 1] for k in range(2 * rank, 20, 4)]
        assert resumed == whole[2:]


def read_broken() -> Any:
    def job(world: World) -> Any:
        loader = prepared(
            DataLoader(Broken(8), 2), world.rank, world.size, world=world, dispatch_batches=True
        )
        try:
            passes(loader)
        except (OSError, BatchError) as error:
            return type(error).__name__, str(error)

    return in_world(job)


def test_when_rank_0_cannot_read_all_ranks_hear_why(ranks: Any) -> None:
    (first, _), (second, sentence) = ranks(read_broken)
    assert (first, second) == ("OSError", "BatchError") and "OSError: unreadable" in sentence


def own_order(seeds: tuple[int, int], sampler: str) -> Any:
    def job(world: World) -> Any:
        torch.manual_seed(seeds[world.rank])
        how = {"sampler": Private(seeds[world.rank])} if sampler == "private" else {"shuffle": True}
        loader = DataLoader(Numbers(8), 2, **how)
        return passes(prepared(loader, world.rank, world.size, world=world, use_seedable_sampler=False), 2)

    return in_world(job)


def test_rank_0_draws_for_all_on_request(ranks: Any) -> None:
    for sampler in ("private", "random"):
        for epoch in zip(*ranks(own_order, (1, 2), sampler)):
            assert sorted(i for share in epoch for batch in share for i in batch) == list(range(8))


def disagree() -> str:
    def job(world: World) -> str:
        loader = prepared(
            DataLoader(Numbers(8), 2, sampler=Private(world.rank)), world.rank, world.size, world=world
        )
        try:
            return str(passes(loader))
        except BatchError as error:
            return str(error)

    return in_world(job)


def test_ranks_whose_samplers_disagree_are_told(ranks: Any) -> None:
    assert all("drew different orders" in sentence for sentence in ranks(disagree))
