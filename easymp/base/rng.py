"""Random streams, and torch's process-wide flags for determinism and TF32.

All ranks share one stream until the models are prepared, for draws that must be equal on all of them (initial weights,
data order); each rank has its own from then on (dropout, augmentation). Seeds are hashed, so that neighbouring seeds,
epochs and ranks give unrelated streams.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import env

# The release of torch: (2, 11) of "2.11.0+cu130", and of the pre-release "2.11.0a0+1234".
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
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

    All ranks get the same seed, so models built now start with equal weights. `prepare` then gives each rank a stream
    of its own, f(seed, rank), so that dropout differs between ranks.

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
        seed = mix(torch.initial_seed(), "rank", rank)
        if _shared:
            seed_all(seed)
        else:
            torch.manual_seed(seed)  # Python's and NumPy's streams were not seeded, and differ already


# -- the stream of a device


def random_state(device: torch.device) -> Any:
    """The state of torch's generator of a device: on CUDA two numbers."""
    if device.type != "cuda":
        return torch.default_generator.get_state()
    generator = torch.cuda.default_generators[device.index or 0]
    return generator.initial_seed(), generator.get_offset()


def put_random_state(device: torch.device, state: Any) -> None:
    """Restore what `random_state` returned."""
    if device.type != "cuda":
        torch.default_generator.set_state(state)
        return
    generator = torch.cuda.default_generators[device.index or 0]
    generator.manual_seed(state[0])
    generator.set_offset(state[1])


# -- flags of torch, set for a run and put back after it


def set_torch_flags(tf32: bool, deterministic: bool, undo: Callable[..., Any]) -> None:
    """Set torch's flags; ``undo(function, *args)`` registers how to restore each, as `ExitStack.callback` does.

    `tf32` is for matrix products and convolutions that stay in fp32. Deterministic cuBLAS needs a fixed workspace
    (CUDA's documentation of CUBLAS_WORKSPACE_CONFIG), and deterministic cuDNN may not choose by timing.
    """
    if tf32:
        backends: Any = torch.backends  # reading a flag may raise after a script has set ``fp32_precision``
        try:
            undo(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        except RuntimeError:
            undo(setattr, backends.cuda.matmul, "fp32_precision", backends.cuda.matmul.fp32_precision)
        try:
            undo(setattr, backends.cudnn, "allow_tf32", backends.cudnn.allow_tf32)
        except RuntimeError:
            for operation in (backends.cudnn.conv, backends.cudnn.rnn):
                undo(setattr, operation, "fp32_precision", operation.fp32_precision)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if deterministic:
        warn = torch.is_deterministic_algorithms_warn_only_enabled()
        undo(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warn)
        undo(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        undo(env.put, env.put({"CUBLAS_WORKSPACE_CONFIG": env.read("CUBLAS_WORKSPACE_CONFIG", ":4096:8")}))
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
