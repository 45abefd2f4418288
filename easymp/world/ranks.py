"""Who this process is, as a launcher announced it: pure reading, nothing is started."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from .. import env
from ..errors import WorldError


@dataclass(frozen=True)
class Ranks:
    """This process among all processes of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this node
    local_size: int = 1
    announced: str = ""  # who said so: "torchrun", "the process group", or "" where nobody did
    bound: bool = False  # sees one accelerator only, chosen for it by the launcher (as Slurm's --gpus-per-task does)

    @property
    def nodes(self) -> int:
        return max(1, self.size // max(1, self.local_size))


def read_ranks() -> Ranks:
    """The running process group's ranks, or RANK, WORLD_SIZE and so on, or one process.

    Raises:
        WorldError: the launch variables are incomplete or contradict each other.
    """
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        local = env.integer("LOCAL_RANK", rank)
        return Ranks(rank, size, local, env.integer("LOCAL_WORLD_SIZE", max(size, local + 1)), "the process group", bound())
    rank, size = env.integer("RANK"), env.integer("WORLD_SIZE")
    if rank is None and size is None:
        return Ranks()
    if rank is None or size is None:
        there, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        if size == 1:
            return Ranks()
        raise WorldError(
            f"{there}={env.read(there)} is in the environment but {missing} is not: a launcher sets both. "
            f"Start with `easymp launch`, or unset {there} to train in one process"
        )
    if not 0 <= rank < size:
        raise WorldError(f"RANK={rank} does not lie in 0 … WORLD_SIZE - 1 = {size - 1}: check the launcher's settings")
    local = env.integer("LOCAL_RANK", rank)
    return Ranks(rank, size, local, env.integer("LOCAL_WORLD_SIZE", max(size, local + 1)), "RANK and WORLD_SIZE", bound())


def bound() -> bool:
    """Whether a visible-devices variable leaves this process one accelerator."""
    shown = [env.read(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")]
    return any(text is not None and len(text.split(",")) == 1 and text.strip() not in ("", "-1") for text in shown)
