"""The random streams of each rank in a checkpoint.

Ranks that share their data share their stream (tensor parallelism needs the same dropout on all of them), so where the layout of the
ranks has changed, a stream is found by the slice of the data that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.rng import mix, seed_all
from ..errors import CheckpointError
from ..logging import get_logger
from .fitting import check_like
from .snapshot import Reading, Snapshot
from .streams import put_states, states
from .wellformed import check_number

logger = get_logger(__name__)
NAME = "state/random"


class RandomState:
    """Python's, NumPy's and torch's streams of this rank.

    The same number of ranks with the same slices of the data go on exactly. A slice of the data that no rank had before (a larger
    world) gets a stream f(seed, slice, step), and a line in the log says so.

    Args:
        devices: accelerators of this process that draw; its own first.
        data_rank, data_size: which slice of the data this rank sees, of how many.
        seed: the run's, the same on all ranks.
    """

    def __init__(
        self, rank: int, size: int, devices: Sequence[torch.device], data_rank: int, data_size: int, seed: int
    ) -> None:
        self._rank, self._size, self._devices = rank, size, [d for d in devices if d.type != "cpu"]
        self._data_rank, self._data_size, self._seed = data_rank, data_size, seed

    def bring(self, into: Snapshot) -> None:
        slices = {"data_rank": self._data_rank, "data_size": self._data_size, "seed": self._seed}
        into.add(NAME, {**slices, "streams": states(self._devices)}, own=True)

    def take(self, source: Reading) -> Callable[[], None]:
        size, states_of = source.manifest.world_size, source.manifest.states
        kept = {
            rank: states_of[name] for rank in range(size) if (name := f"ranks/{rank:05d}/{NAME}") in states_of
        }
        if len(kept) < size:
            source.complain(f"the checkpoint has the random streams of {len(kept)} of its {size} ranks")
        slices = {"data_rank": self._data_rank, "data_size": self._data_size}
        for rank, saved in kept.items():
            check_like(f"{NAME} of rank {rank}", {key: saved[key] for key in slices}, slices)
            check_number(
                f"the seed of rank {rank}", saved["seed"], -(2**63), 2**64 - 1
            )  # torch's own are unsigned
        step = source.manifest.step
        if not kept:
            return lambda: seed_all(mix(self._seed, "rank", self._data_rank, "step", step))
        mine = self._choose(kept, size)
        seed = next(iter(kept.values()))["seed"]
        self._say(kept)
        if mine is None:
            return lambda: seed_all(mix(seed, "rank", self._data_rank, "step", step))
        found = source.state(f"ranks/{mine:05d}/{NAME}")["streams"]
        check_like(f"{NAME}['streams']", found, states(self._devices))
        self._check(found)

        def put() -> None:
            fresh = self._devices and self._devices[0].type not in found["devices"]
            if fresh:  # of another kind of device: this one's stream begins here
                seed_all(mix(seed, "rank", self._data_rank, "step", step))
            put_states(found, self._devices)

        return put

    def _choose(self, kept: dict[int, Any], size: int) -> int | None:
        """The rank of the saved run whose stream this one goes on with."""
        own = kept.get(self._rank)
        if size == self._size and own is not None and own["data_rank"] == self._data_rank:
            return self._rank
        return next((rank for rank, saved in kept.items() if saved["data_rank"] == self._data_rank), None)

    def _say(self, kept: dict[int, Any]) -> None:
        known = {saved["data_rank"] for saved in kept.values()}
        fresh = [str(i) for i in range(self._data_size) if i not in known]
        if fresh:
            logger.warning(
                "random streams: %d of %d slices of the data have none in the checkpoint (%s); theirs are derived from the seed",
                *(len(fresh), self._data_size, ", ".join(fresh[:8]) + (" …" if len(fresh) > 8 else "")),
            )

    def _check(self, found: dict[str, Any]) -> None:
        """So that `put_states` does not fail."""
        words = found["python"]["words"]
        if (
            words.shape != (625,)
            or found["torch"].shape != torch.get_rng_state().shape
            or found["torch"].dtype != torch.uint8
        ):
            raise CheckpointError(
                "the checkpoint's random streams are of another version of Python or torch; strict=False is no help here"
            )
