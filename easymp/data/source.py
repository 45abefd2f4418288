"""What a prepared loader reads from: one kind of source a kind of loader, all with the same few verbs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from .shard import Cut

IN_ORDER = "in_order" in inspect.signature(DataLoader.__init__).parameters  # torch 2.6 and newer


class Note(NamedTuple):
    """What travels with a batch."""

    rank: int
    end: int  # global samples of the epoch up to and with this batch's round
    surplus: int  # repeated samples at the end of the round; -1 where their number is not knowable
    size: int | None  # this rank's samples
    last: bool  # whether this rank's pass ends here
    mark: Any = None  # where a stream stands after it


class Source(Protocol):
    """Reads this rank's batches."""

    loader: DataLoader[Any]
    seed: int
    cut: Cut  # may be replaced between two passes

    def batches(self, rank: int) -> int | None:
        """Batches that a data rank gets in a whole epoch; None where that is not knowable."""
        ...

    def samples(self) -> int | None:
        """Samples in an epoch over all ranks; None where that is not known beforehand."""
        ...

    def read(self, epoch: int, start: int, skip: int) -> Iterator[tuple[Any, Note]]:
        """One pass: from global sample `start`, without the first `skip` batches."""
        ...

    def state(self) -> dict[str, Any]:
        """What beside epoch, position and seed a resume in the middle of a pass needs; plain JSON types, but for what a data
        set's own state_dict holds."""
        ...

    def drawing(self) -> list[torch.Tensor] | None:
        """States of the sampler's own generators, where they say what the next pass draws."""
        ...

    def passed(self, mark: Any) -> None:
        """The batch whose note holds `mark` is being worked on."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...


def rebuild(
    given: DataLoader[Any], dataset: Any, pin_memory: bool, in_order: bool | None = None, **how: Any
) -> DataLoader[Any]:
    """A DataLoader with the settings of `given`, other sampling, and a generator of its own: iterating it leaves the global
    one alone."""
    settings: dict[str, Any] = {
        "collate_fn": given.collate_fn,
        "num_workers": given.num_workers,
        "pin_memory": pin_memory,
        "timeout": given.timeout,
        "worker_init_fn": given.worker_init_fn,
        "generator": torch.Generator(),
    }
    if given.num_workers > 0:
        settings["multiprocessing_context"] = given.multiprocessing_context
        settings["prefetch_factor"] = given.prefetch_factor
        settings["persistent_workers"] = given.persistent_workers
    if IN_ORDER:
        settings["in_order"] = given.in_order if in_order is None else in_order
    return DataLoader(dataset, **{**settings, **how})
