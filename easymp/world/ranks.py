"""Who this process is, as a launcher announced it: pure reading, nothing is started."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch.distributed as dist

from .. import env
from ..errors import EasympWarning, WorldError
from ..slurm import BATCH, read_task


class Ranks(NamedTuple):
    """This process among all processes of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this node
    local_size: int = 1
    announced: str = ""  # who said so: "RANK and WORLD_SIZE", "the process group", "Slurm's srun", or "" where nobody did
    bound: bool = False  # sees one accelerator only, chosen for it by the launcher (as Slurm's --gpus-per-task does)
    meeting: tuple[str, int] | None = None  # rank 0's address and port, where MASTER_ADDR and MASTER_PORT do not say them
    alone: str = "no launcher announced others"  # why there is one process, where nobody announced it

    @property
    def nodes(self) -> int:
        return max(1, self.size // max(1, self.local_size))


def read_ranks() -> Ranks:
    """The running process group's ranks, or RANK, WORLD_SIZE and so on, or Slurm's task, or one process.

    Raises:
        WorldError: the launch variables are incomplete or contradict each other.
    """
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        local = env.integer("LOCAL_RANK", rank)
        return Ranks(rank, size, local, env.integer("LOCAL_WORLD_SIZE", max(size, local + 1)), "the process group", bound())
    rank, size = env.integer("RANK"), env.integer("WORLD_SIZE")
    if rank is None and size is None:
        return _slurm()
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


def _slurm() -> Ranks:
    task, why = read_task()
    if task is not None:
        meeting = (task.address, task.port)
        return Ranks(task.rank, task.size, task.local_rank, task.local_size, why, bound(), meeting)
    if why == BATCH and env.integer("SLURM_NTASKS", 1) > 1:
        warnings.warn(
            f"one process trains, of the {env.read('SLURM_NTASKS')} tasks of Slurm's job: its batch script starts all of them "
            "with srun before the command",
            EasympWarning,
            stacklevel=4,
        )
    return Ranks(alone=f"no launcher announced others: {why}") if why else Ranks()


def bound() -> bool:
    """Whether a visible-devices variable leaves this process one accelerator."""
    shown = [env.read(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")]
    return any(text is not None and len(text.split(",")) == 1 and text.strip() not in ("", "-1") for text in shown)
