"""What a launcher's variables say of this process: pure reading, nothing is started.

Variables, in the order in which they are read:

- ``RANK`` and ``WORLD_SIZE``: torchrun, `easymp launch`, Ray, Kubernetes. PyTorchJob of Kubeflow sets ``RANK`` to the pod's number.
- ``PET_NNODES``, ``PET_NODE_RANK``, ``PET_NPROC_PER_NODE``, …: torchrun's own options as variables, which Kubeflow sets. Source:
  torch/distributed/argparse_util.py.
- ``OMPI_COMM_WORLD_…`` (Open MPI's mpirun), ``MV2_COMM_WORLD_…`` (MVAPICH2), ``PMI_…`` (the mpirun of MPICH and Intel MPI).
- ``SUBMITIT_LOCAL_…``: submitit's executor on this machine.
- ``SLURM_…``: `slurm`.

A task of srun may be a daemon of mpirun, which is why mpirun goes before Slurm.
"""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple

from ..base import env
from ..errors import WorldError
from . import slurm

PORT = 29500  # torchrun's
LOOPBACK = "127.0.0.1"
EXPLICIT = "RANK and WORLD_SIZE"
ONE = f"{EXPLICIT} announced one process"
# Who announces, and its variables: rank, size, local rank, local size, and the job's identifier, the same in all processes of a run.
LAUNCHERS = (
    *[
        (
            "Open MPI's mpirun",
            *(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
            "PMIX_NAMESPACE",
        )
    ],
    *[
        (
            "MVAPICH2's mpirun",
            *(f"MV2_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
            "",
        )
    ],
    *[
        (
            "PMI (mpirun of MPICH or Intel MPI)",
            "PMI_RANK",
            "PMI_SIZE",
            "MPI_LOCALRANKID",
            "MPI_LOCALNRANKS",
            "",
        )
    ],
    *[("submitit", *(f"SUBMITIT_LOCAL_{n}" for n in ("GLOBALID", "NTASKS", "LOCALID", "NTASKS", "JOB_ID")))],
)


class Announced(NamedTuple):
    """This process among all that a launcher announced.

    Attributes:
        rank, size: this process among all; where `processes` is not 1, this node among all nodes.
        local_rank, local_size: on this machine; None where the launcher does not say it.
        address, port: where rank 0 listens; None where the launcher does not say it.
        by: who announced it.
        most: nodes that may take part, where they come and go.
        processes: to be started by each node; 1 where this process is a rank, 0 where the number is the node's accelerators.
    """

    rank: int | None
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    port: int | None = None
    by: str = EXPLICIT
    most: int | None = None
    processes: int = 1


def read() -> tuple[Announced | None, str]:
    """This process among those that a launcher announced, or None and the reason why it trains alone (``""``: nothing is announced).

    Raises:
        WorldError: variables are incomplete or contradict each other, or say that there are others and not how to reach them.
    """
    rank, size = _pair("RANK", "WORLD_SIZE", "Start with `easymp launch`")
    within = (
        env.read("LOCAL_RANK") is not None or env.read("TORCHELASTIC_RUN_ID") is not None
    )  # started by torchrun, as a rank
    if not within:
        node = _node()
        if node is not None and (rank is None or node.processes > 1):
            return node, ""
    if size is not None and (size > 1 or within):
        return Announced(rank, size, *_local("LOCAL_RANK", "LOCAL_WORLD_SIZE"), *_meeting()), ""
    found, why = _by_launcher()
    if size is None:
        return found, why
    if found is not None:
        raise WorldError(
            f"RANK={rank} and WORLD_SIZE=1 are in the environment, and {found.by} announces {found.size} processes: unset RANK and "
            f"WORLD_SIZE to train on all {found.size}"
        )
    if None in _meeting():
        return None, ONE
    return Announced(rank, 1, *_local("LOCAL_RANK", "LOCAL_WORLD_SIZE"), *_meeting()), ""


def read_node() -> tuple[Announced | None, str]:
    """This process as a launcher: which of the announced nodes it starts the ranks of, or None and the reason, as `read`.

    Without torchrun's options in variables, each process that is announced is a node.

    Raises:
        WorldError: as `read`; or this process is a rank, which torchrun or `easymp launch` started.
    """
    if env.read("TORCHELASTIC_RUN_ID") is not None and env.integer("WORLD_SIZE", 1) > 1:
        raise WorldError(
            f"this process is rank {env.read('RANK')} of {env.read('WORLD_SIZE')}, which torchrun or `easymp launch` started, and every "
            "rank would launch a run of its own: run the script with python, or start the launch outside of the ranks; for a run apart, "
            "unset TORCHELASTIC_RUN_ID, RANK and WORLD_SIZE"
        )
    node = _node()
    return (node, "") if node is not None else read()


def _by_launcher() -> tuple[Announced | None, str]:
    for by, *names, job in LAUNCHERS:
        rank, size = _pair(names[0], names[1], f"{by} sets both")
        if rank is None or size is None:
            continue
        tasks = (env.integer("SLURM_PROCID"), env.integer("SLURM_STEP_NUM_TASKS"))
        if names[0] == "PMI_RANK" and tasks == (rank, size):
            continue  # srun's own, which says more
        if size == 1:
            return None, f"{by} started one process"
        local = _local(names[2], names[3])
        return Announced(
            rank, size, *local, *_place(by, rank, size, local[1], env.read(job) if job else None), by
        ), ""
    task, why = slurm.read_task()
    if task is not None:
        return Announced(*task, why), why
    if env.read("PMIX_RANK") is not None and env.read("SLURM_PROCID") is None:
        raise WorldError(
            f"PMIX_RANK={env.read('PMIX_RANK')} is in the environment, and no variable says how many processes there are: start with "
            "mpirun or srun, export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset PMIX_RANK to train in one process"
        )
    return None, why


def _pair(rank: str, size: str, remedy: str) -> tuple[int | None, int | None]:
    """Both numbers, or None for both; a size of 1 without a rank is nothing."""
    number, many = env.integer(rank), env.integer(size)
    if number is None and many in (None, 1):
        return None, None
    if number is None or many is None:
        there, missing = (size, rank) if number is None else (rank, size)
        raise WorldError(
            f"{there}={env.read(there)} is in the environment but {missing} is not: a launcher sets both. {remedy}, "
            f"or unset {there} to train in one process"
        )
    if not 0 <= number < many:
        raise WorldError(
            f"{rank}={number} does not lie in 0 … {size} - 1 = {many - 1}: check the launcher's settings"
        )
    return number, many


def _local(rank: str, size: str) -> tuple[int | None, int | None]:
    """Local rank and size; the size without a rank is nothing."""
    number, many = env.integer(rank), env.integer(size)
    return (None, None) if number is None else (number, many if many is None else max(number + 1, many))


def _meeting() -> tuple[str | None, int | None]:
    return env.read("MASTER_ADDR") or None, env.integer("MASTER_PORT")


def _place(by: str, rank: int, size: int, local_size: int | None, job: str | None) -> tuple[str, int]:
    """Where rank 0 of an MPI launcher listens: MASTER_ADDR and MASTER_PORT if set; else worked out from the launcher's variables."""
    address, port = _meeting()
    if port is None:
        port = slurm.FIRST_PORT + zlib.crc32(job.encode()) % 10_000 if job else PORT
    if address is None and local_size == size:
        address = LOOPBACK
    if address is None:
        # Open MPI 4 says where mpirun itself runs, and where the daemon of this node does: by default rank 0 is beside mpirun.
        main, own = (env.read(f"OMPI_MCA_orte_{daemon}_uri", "") for daemon in ("hnp", "local_daemon"))
        match = re.search(r";tcp://([\d.]+)", main)
        if match and (rank > 0 or own == main):
            address = match[1]
    if address is None:
        raise WorldError(
            f"{by} announces {size} processes on several machines, and not where rank 0 runs: export its address to all of them as "
            f"MASTER_ADDR (mpirun -x MASTER_ADDR=HOST with Open MPI, -genv MASTER_ADDR HOST with MPICH and Intel MPI)"
        )
    return address, port


def _node() -> Announced | None:
    """This node among those that are to call torchrun, by its options in variables."""
    nodes = re.fullmatch(r"(\d+)(?::(\d+))?", (text := env.read("PET_NNODES") or "1").strip())
    if nodes is None or int(nodes[1]) < 1:
        raise WorldError(
            f"PET_NNODES={text!r} is not a number of nodes, such as 2 or 1:4: check the job's settings"
        )
    least, most = int(nodes[1]), int(nodes[2] or nodes[1])
    each = env.read("PET_NPROC_PER_NODE") or "1"
    processes = int(each) if each.isdecimal() else 0  # "auto", "gpu", "cpu"
    explicit = env.read("RANK") is not None
    if most == 1 and processes in (0, 1):
        return None
    rank = env.integer("PET_NODE_RANK", env.integer("RANK") if explicit else None)
    host, _, port = (env.read("PET_RDZV_ENDPOINT") or "").rpartition(":")
    address = env.read("PET_MASTER_ADDR") or host or env.read("MASTER_ADDR") or None
    number = env.integer(
        "PET_MASTER_PORT", int(port) if port.isdecimal() else env.integer("MASTER_PORT", PORT)
    )
    by = "PET_NNODES and PET_NPROC_PER_NODE"
    if most == least and rank is None and most > 1:
        raise WorldError(
            f"PET_NNODES={text} is in the environment but PET_NODE_RANK is not: set it to the node's number, from 0"
        )
    if rank is not None and not 0 <= rank < most:
        raise WorldError(
            f"PET_NODE_RANK={rank} does not lie in 0 … {most - 1}, as it must for PET_NNODES={text}"
        )
    if most > 1 and address is None:
        raise WorldError(
            f"PET_NNODES={text} is in the environment but PET_MASTER_ADDR is not: set it to the first node's address"
        )
    return Announced(rank, least, None, None, address, number, by, most if most > least else None, processes)
