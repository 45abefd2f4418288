"""Who this process is, as a launcher announced it: pure reading, nothing is started."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch.distributed as dist

from ..base import env
from ..errors import EasympWarning, WorldError
from . import announced
from .slurm import BATCH


class Ranks(NamedTuple):
    """This process among all processes of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this node
    local_size: int = 1
    announced: str = (
        ""  # who said so: "RANK and WORLD_SIZE", "the process group", "Slurm's srun", or "" where nobody did
    )
    bound: bool = (
        False  # sees one accelerator only, chosen for it by the launcher (as Slurm's --gpus-per-task does)
    )
    # rank 0's address and port, where MASTER_ADDR and MASTER_PORT do not say them
    meeting: tuple[str | None, int | None] | None = None
    alone: str = "no launcher announced others"  # why there is one process, where nobody announced it
    # "rank": local_rank and local_size stand for one machine until `locate` counts them by host; "size": local_size does
    unknown: str = ""

    @property
    def nodes(self) -> int:
        return max(1, self.size // max(1, self.local_size))


def read_ranks() -> Ranks:
    """The running process group's ranks, or what a launcher announced, or one process.

    Raises:
        WorldError: the launch variables are incomplete or contradict each other, or announce processes that this one cannot join.
    """
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        local, beside = env.integer("LOCAL_RANK"), env.integer("LOCAL_WORLD_SIZE")
        return _ranks(rank, size, local, beside, "the process group")
    found, why = announced.read()
    if found is None:
        if why == BATCH and env.integer("SLURM_NTASKS", 1) > 1:
            warnings.warn(
                f"one process trains, of the {env.read('SLURM_NTASKS')} tasks of Slurm's job: its batch script starts all of them "
                "with srun before the command",
                EasympWarning,
                stacklevel=3,
            )
        return Ranks(alone=f"no launcher announced others: {why}") if why else Ranks()
    if found.processes != 1 or found.most is not None or found.rank is None:
        raise WorldError(
            f"{found.by} announce {found.size} node{'s' * (found.size > 1)} with {found.processes or 'several'} processes each, and "
            "this process was started as one: start it with torchrun or `easymp launch`, which take their part in it, or unset "
            "PET_NNODES and PET_NPROC_PER_NODE"
        )
    meeting = None if found.by == announced.EXPLICIT else (found.address, found.port)
    return _ranks(found.rank, found.size, found.local_rank, found.local_size, found.by, meeting)


def _ranks(
    rank: int,
    size: int,
    local: int | None,
    beside: int | None,
    by: str,
    meeting: tuple[str | None, int | None] | None = None,
) -> Ranks:
    unknown = "" if size == 1 else "rank" if local is None else "size" if beside is None else ""
    local = local if local is not None else rank
    return Ranks(rank, size, local, beside or max(size, local + 1), by, bound(), meeting, unknown=unknown)


def bound() -> bool:
    """Whether a visible-devices variable leaves this process one accelerator."""
    shown = [
        env.read(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    ]
    return any(
        text is not None and len(text.split(",")) == 1 and text.strip() not in ("", "-1") for text in shown
    )
