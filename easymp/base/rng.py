"""Random streams: all ranks share one until the models are prepared; each rank has its own from then on.

Draws that must be equal on all ranks (initial weights, data order) use the shared seed; others (dropout, augmentation) use the rank's
stream. Seeds are hashed, so that neighbouring seeds, epochs and ranks give unrelated streams.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import env

_shared = False  # whether set_seed gave this process the stream that other ranks have, too


def mix(*parts: int | str) -> int:
    """A 63-bit seed from numbers and words, by BLAKE2b: any two different inputs give unrelated seeds."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_host(seed: int) -> None:
    """Seed Python, NumPy (if it is loaded) and torch on the CPU, but no accelerator. Takes some microseconds."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed as `seed_host` does, and torch on every device."""
    seed_host(seed)
    torch.manual_seed(seed)


def host_states() -> list[Any]:
    """The states of the streams of `seed_host`."""
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    return [random.getstate(), drawn, torch.default_generator.get_state()]


def set_host_states(states: list[Any]) -> None:
    """Restore the states that `host_states` returned."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
    torch.default_generator.set_state(states[2])


@contextmanager
def isolated() -> Iterator[None]:
    """A context that restores the CPU's random streams at its end."""
    states = host_states()
    try:
        yield
    finally:
        set_host_states(states)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the Python, NumPy and torch streams of this rank.

    All ranks get the same seed, so models built now start with equal weights. `prepare` then gives each rank a stream of its own, f(seed,
    rank), so that dropout differs between ranks.

    Args:
        seed: any integer of 0 or more.
        device_specific: give each rank its own stream at once.
        deterministic: also call ``torch.use_deterministic_algorithms(True)``.

    Example:
        >>> set_seed(0)
        >>> torch.rand(2)
        tensor([0.4963, 0.7682])
    """
    global _shared
    _shared = not device_specific
    seed_all(mix(seed, "rank", env.integer("RANK", 0)) if device_specific else seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def diverge(rank: int) -> None:
    """Give this rank its own stream, f(seed, rank). Rank 0 keeps the stream that all ranks shared."""
    if rank:
        own = mix(torch.initial_seed(), "rank", rank)
        if _shared:
            seed_all(own)
        else:
            torch.manual_seed(own)  # Python's and NumPy's streams were not seeded, and differ already
