"""What Slurm's variables say of this process: pure reading, nothing is started.

srun starts tasks and numbers them. A batch script before its srun, and a shell in an allocation, have some of the same variables, and are
no task: there a program trains alone, and the reason says why. That shell is known by its job's name, ``bash`` or ``interactive``, which
``srun bash run.sh`` and srun in an allocation of salloc have, too: those are several tasks (SLURM_STEP_NUM_TASKS) without a terminal.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from ..base import env
from ..errors import WorldError
from .node_list import hosts

INTERACTIVE = ("bash", "interactive")  # names of jobs
BATCH = "this is Slurm's batch script, before any srun"
FIRST_PORT = 15000
COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # "4(x2)": two nodes with four tasks each


class Task(NamedTuple):
    """This process among the tasks that srun started, two or more."""

    rank: int
    size: int
    local_rank: int  # on this node
    local_size: int
    address: str  # where the tasks meet
    port: int


def read_task() -> tuple[Task | None, str]:
    """This process as one of several tasks, and the reason: who said so, or why it is none (``""`` outside of Slurm).

    Where they meet is MASTER_ADDR and MASTER_PORT if set, else the step's first host and 15000 + the last four digits of the job's number.

    Raises:
        WorldError: variables are missing, or contradict each other.
    """
    rank, tasks = env.integer("SLURM_PROCID"), env.integer("SLURM_STEP_NUM_TASKS")
    if rank is None:
        return None, "srun did not start this process" if env.read("SLURM_JOB_ID") else ""
    if env.read("ENVIRONMENT") == "BATCH" and env.read("SLURM_STEP_ID") is None:
        return None, BATCH
    if env.read("SLURM_JOB_NAME") in INTERACTIVE and (tasks in (None, 1) or os.isatty(0)):
        return None, f"Slurm's job is interactive, by its name {env.read('SLURM_JOB_NAME')!r}"
    size = env.integer("SLURM_NTASKS") if tasks is None else tasks
    if size is None:
        raise WorldError(
            f"SLURM_PROCID={rank} is in the environment but SLURM_NTASKS is not: srun sets both. Start with srun, "
            "or unset SLURM_PROCID to train in one process"
        )
    if not 0 <= rank < size:
        counted = "SLURM_NTASKS" if tasks is None else "SLURM_STEP_NUM_TASKS"
        raise WorldError(
            f"SLURM_PROCID={rank} does not lie in 0 … {size - 1}, as it must for {counted}={size}: start with srun, which sets both"
        )
    if size == 1:
        return None, "Slurm's srun started one task"
    local = env.integer("SLURM_LOCALID")
    if local is None:
        raise WorldError(
            f"SLURM_PROCID={rank} is in the environment but SLURM_LOCALID is not: start with srun, which sets both"
        )
    return Task(rank, size, local, _local_size(local, size), _address(), _port()), "Slurm's srun"


def _local_size(local: int, size: int) -> int:
    """How many tasks this node has."""
    text, node = _step("TASKS_PER_NODE"), env.integer("SLURM_NODEID", 0)
    if text is not None:
        said = f"SLURM_{'STEP_' * bool(env.read('SLURM_STEP_TASKS_PER_NODE'))}TASKS_PER_NODE={text!r}"
        counts = []
        for part in text.split(","):
            match = COUNT.fullmatch(part)
            if match is None:
                raise WorldError(
                    f"{said} is no list of counts such as '4(x2),3': start with srun, which sets it"
                )
            counts += [int(match[1])] * int(match[2] or 1)
        if not 0 <= node < len(counts) or local >= counts[node]:
            raise WorldError(
                f"SLURM_NODEID={node} and SLURM_LOCALID={local} do not lie in {said}: start with srun, which sets all three"
            )
        return counts[node]
    nodes = _nodelist()
    return max(
        local + 1, env.integer("SLURM_NTASKS_PER_NODE") or (-(-size // len(hosts(nodes))) if nodes else 1)
    )


def _address() -> str:
    asked, nodes = env.read("MASTER_ADDR"), _nodelist()
    if asked:
        return asked
    if not nodes:
        raise WorldError(
            "SLURM_PROCID is in the environment but SLURM_JOB_NODELIST is not, whose first host the tasks meet at: "
            "start with srun, or export MASTER_ADDR"
        )
    return hosts(nodes)[0]


def _port() -> int:
    asked, job = env.integer("MASTER_PORT"), env.read("SLURM_JOB_ID", "")
    if asked is not None:
        return asked
    if not job.isdecimal():
        found = f"SLURM_JOB_ID={job!r} is no number" if job else "SLURM_JOB_ID is not in the environment"
        raise WorldError(
            f"{found}, and the port that the tasks meet at is made of it: start with srun, or export MASTER_PORT"
        )
    return FIRST_PORT + int(job[-4:])


def _nodelist() -> str | None:
    return _step("NODELIST") or env.read("SLURM_JOB_NODELIST") or None


def _step(name: str) -> str | None:
    """A variable of this step, which may run on some of the job's nodes only; else the job's."""
    return env.read(f"SLURM_STEP_{name}") or env.read(f"SLURM_{name}") or None
