"""What a kernel is: text that any launcher compiles, and how it is laid over blocks of threads.

CuPy's ElementwiseKernel compiles it for a GPU, g++ for a test. Threads of a block do not talk to one another but by sums: a body adds
to named doubles, the launcher totals them over the block, in a fixed order, and one thread goes on with the totals. So the same body
runs one thread after another on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

THREADS = 256  # of a block


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        name: a C identifier.
        arguments: "uint64 name" (an address), "int64 name" or "float64 name", each.
        body: C++17 that a thread runs. It sees the arguments, `PREAMBLE`, ``i64 block`` and ``int thread`` (below `THREADS`).
        sums: doubles, zero at first, that `body` adds to.
        after: C++17 that one thread of each block runs when `sums` are totals over the block; sees `block`.
    """

    name: str
    arguments: tuple[str, ...]
    body: str
    sums: tuple[str, ...] = ()
    after: str = ""


class Launcher(Protocol):
    """Runs kernels on one device, in the order of torch's current stream there."""

    device: torch.device

    def ready(self, kernels: Iterable[Kernel]) -> None:
        """Compile what is not compiled yet, so that a failure comes before the first launch changes anything.

        Raises:
            KernelError: one of them cannot be compiled.
        """
        ...

    def launch(self, kernel: Kernel, blocks: int, arguments: Sequence[int | float]) -> None:
        """Run `kernel` on `blocks` blocks, with a number for each of its arguments; does not wait for the device.

        Raises:
            KernelError: it cannot be compiled or started.
        """
        ...
