"""Who this process is, as a launcher announced it in variables. Nothing is started here.

The variables, in the order in which they are read:

- ``RANK`` and ``WORLD_SIZE``: torchrun, `easymp launch`, Ray, Kubernetes. PyTorchJob of Kubeflow sets ``RANK`` to the pod's number.
- ``PET_NNODES``, ``PET_NODE_RANK``, ``PET_NPROC_PER_NODE``, …: torchrun's own options as variables, which Kubeflow sets
  (torch/distributed/argparse_util.py).
- The rows of `LAUNCHERS`. A task of srun may be a daemon of mpirun, so mpirun goes before Slurm.
- ``SLURM_…``. A batch script before its srun, and a shell in an allocation, have some of the same variables; a program trains alone
  there. The shell is known by its job's name, ``bash`` or ``interactive``, which ``srun bash run.sh`` and srun in an allocation of
  salloc have, too: those are several tasks (SLURM_STEP_NUM_TASKS) without a terminal.
"""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from ..base import env
from ..errors import EasympWarning, WorldError

PORT = 29500  # torchrun's
FIRST_PORT = 15000
LOOPBACK = "127.0.0.1"
EXPLICIT = "RANK and WORLD_SIZE"
ONE = f"{EXPLICIT} announced one process"
BATCH = "this is Slurm's batch script, before any srun"
INTERACTIVE = ("bash", "interactive")  # names of jobs
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

# Launchers and their variables: rank, size, local rank, local size, and the job's identifier, the same in all processes of a run.
LAUNCHERS = (
    ("Open MPI's mpirun", *(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), "PMIX_NAMESPACE"),
    ("MVAPICH2's mpirun", *(f"MV2_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), ""),
    ("PMI (mpirun of MPICH or Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    ("submitit", *(f"SUBMITIT_LOCAL_{n}" for n in ("GLOBALID", "NTASKS", "LOCALID", "NTASKS", "JOB_ID"))),
)  # fmt: skip


class Ranks(NamedTuple):
    """This process among all processes of the run.

    Attributes:
        local_rank, local_size: on this node.
        announced: by "RANK and WORLD_SIZE", "the process group", "Slurm's srun" and so on; ``""`` for a process alone.
        bound: it sees one accelerator only, chosen for it by the launcher (as Slurm's --gpus-per-task does).
        meeting: rank 0's address and port, where MASTER_ADDR and MASTER_PORT do not say them.
        alone: why there is one process.
        unknown: "rank": local_rank and local_size stand for one machine until `locate` counts them by host; "size": local_size does.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    announced: str = ""
    bound: bool = False
    meeting: tuple[str | None, int | None] | None = None
    alone: str = "no launcher announced others"
    unknown: str = ""

    @property
    def nodes(self) -> int:
        return max(1, self.size // max(1, self.local_size))


class Announced(NamedTuple):
    """This process among all that a launcher announced.

    Attributes:
        rank, size: this process among all; where `processes` is not 1, this node among all nodes.
        local_rank, local_size: on this machine; None where the launcher does not say it.
        address, port: where rank 0 listens; None where the launcher does not say it.
        by: the launcher.
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


def read_ranks() -> Ranks:
    """The running process group's ranks, or those that a launcher announced, or one process."""
    import torch.distributed as dist  # here: the launcher reads variables without torch

    if dist.is_available() and dist.is_initialized():
        local, beside = env.integer("LOCAL_RANK"), env.integer("LOCAL_WORLD_SIZE")
        return _ranks(
            Announced(dist.get_rank(), dist.get_world_size(), local, beside, by="the process group")
        )
    found, why = read()
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
    return _ranks(found)


def _ranks(found: Announced) -> Ranks:
    rank, size, local, beside, by = found.rank, found.size, found.local_rank, found.local_size, found.by
    unknown = "" if size == 1 else "rank" if local is None else "size" if beside is None else ""
    local = rank if local is None else local
    shown = [text.split(",") for name in VISIBLE if (text := env.read(name)) is not None]
    bound = any(len(cards) == 1 and cards[0].strip() not in ("", "-1") for cards in shown)
    meeting = None if by in (EXPLICIT, "the process group") else (found.address, found.port)
    return Ranks(rank, size, local, beside or max(size, local + 1), by, bound, meeting, unknown=unknown)


def read() -> tuple[Announced | None, str]:
    """This process among those that a launcher announced, or None and the reason why it trains alone (``""``: nothing is announced)."""
    rank, size = _pair("RANK", "WORLD_SIZE", "Start with `easymp launch`")
    # Whether torchrun started this process, as a rank.
    within = env.read("LOCAL_RANK") is not None or env.read("TORCHELASTIC_RUN_ID") is not None
    node = None if within else _read_pet()
    if node is not None and (rank is None or node.processes > 1):
        return node, ""
    own = Announced(rank, size or 1, *_local("LOCAL_RANK", "LOCAL_WORLD_SIZE"), *_master())
    if size is not None and (size > 1 or within):
        return own, ""
    found, why = _read_launcher()
    if size is None:
        return found, why
    if found is not None:
        raise WorldError(
            f"RANK={rank} and WORLD_SIZE=1 are in the environment, and {found.by} announces {found.size} processes: unset RANK and "
            f"WORLD_SIZE to train on all {found.size}"
        )
    return (None, ONE) if None in _master() else (own, "")


def read_node() -> tuple[Announced | None, str]:
    """This process as a launcher: which of the announced nodes it starts the ranks of, or None and the reason, as `read`.

    Without torchrun's options in variables, each process that is announced is a node.
    """
    if env.read("TORCHELASTIC_RUN_ID") is not None and env.integer("WORLD_SIZE", 1) > 1:
        raise WorldError(
            f"this process is rank {env.read('RANK')} of {env.read('WORLD_SIZE')}, which torchrun or `easymp launch` started, and every "
            "rank would launch a run of its own: run the script with python, or start the launch outside of the ranks; for a run apart, "
            "unset TORCHELASTIC_RUN_ID, RANK and WORLD_SIZE"
        )
    node = _read_pet()
    return (node, "") if node is not None else read()


def _pair(rank: str, size: str, remedy: str) -> tuple[int | None, int | None]:
    """Both numbers, or None for both; a size of 1 without a rank counts as absent."""
    number, many = env.integer(rank), env.integer(size)
    if number is None and many in (None, 1):
        return None, None
    if number is None or many is None:
        there, missing = (size, rank) if number is None else (rank, size)
        raise WorldError(
            f"{there}={env.read(there)} is in the environment but {missing} is not: a launcher sets both. {remedy}, "
            f"or unset {there} to train in one process"
        )
    _check_rank(rank, number, f"{size} - 1 = ", many, "check the launcher's settings")
    return number, many


def _check_rank(name: str, rank: int, last: str, size: int, remedy: str) -> None:
    if not 0 <= rank < size:
        raise WorldError(f"{name}={rank} does not lie in 0 … {last}{size - 1}: {remedy}")


def _local(rank: str, size: str) -> tuple[int | None, int | None]:
    """Local rank and size; the size without a rank is nothing."""
    number, many = env.integer(rank), env.integer(size)
    return (None, None) if number is None else (number, many if many is None else max(number + 1, many))


def _master() -> tuple[str | None, int | None]:
    return env.read("MASTER_ADDR") or None, env.integer("MASTER_PORT")


def _read_pet() -> Announced | None:
    """This node among those that are to call torchrun, by its options in variables."""
    nodes = re.fullmatch(r"(\d+)(?::(\d+))?", (text := env.read("PET_NNODES") or "1").strip())
    if nodes is None or int(nodes[1]) < 1:
        raise WorldError(
            f"PET_NNODES={text!r} is not a number of nodes, such as 2 or 1:4: check the job's settings"
        )
    least, most = int(nodes[1]), int(nodes[2] or nodes[1])
    each = env.read("PET_NPROC_PER_NODE") or "1"
    processes = int(each) if each.isdecimal() else 0  # "auto", "gpu", "cpu"
    if most == 1 and processes in (0, 1):
        return None
    rank = env.integer("PET_NODE_RANK", env.integer("RANK"))
    host, _, port = (env.read("PET_RDZV_ENDPOINT") or "").rpartition(":")
    address = env.read("PET_MASTER_ADDR") or host or env.read("MASTER_ADDR") or None
    otherwise = int(port) if port.isdecimal() else env.integer("MASTER_PORT", PORT)
    if rank is not None:
        _check_rank("PET_NODE_RANK", rank, "", most, f"PET_NNODES={text}, check the job's settings")
    missing = {
        "PET_NODE_RANK": ("the node's number, from 0", rank is None and most == least),
        "PET_MASTER_ADDR": ("the first node's address", address is None),
    }
    for name, (value, absent) in missing.items():
        if absent and most > 1:
            raise WorldError(f"PET_NNODES={text} is in the environment but {name} is not: set it to {value}")
    return Announced(
        *(rank, least, None, None, address, env.integer("PET_MASTER_PORT", otherwise)),
        by="PET_NNODES and PET_NPROC_PER_NODE",
        most=most if most > least else None,
        processes=processes,
    )


# -- MPI and submitit --------------------------------------------------------------------------------------------------


def _read_launcher() -> tuple[Announced | None, str]:
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
        place = _mpi_master(by, rank, size, local[1], env.read(job) if job else None)
        return Announced(rank, size, *local, *place, by), ""
    task, why = _read_slurm()
    if task is None and env.read("PMIX_RANK") is not None and env.read("SLURM_PROCID") is None:
        raise WorldError(
            f"PMIX_RANK={env.read('PMIX_RANK')} is in the environment, and no variable says how many processes there are: start with "
            "mpirun or srun, export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset PMIX_RANK to train in one process"
        )
    return task, why


def _mpi_master(by: str, rank: int, size: int, local_size: int | None, job: str | None) -> tuple[str, int]:
    """Address and port of rank 0: MASTER_ADDR and MASTER_PORT if set, else from the MPI launcher's variables."""
    address, port = _master()
    if port is None:
        port = FIRST_PORT + zlib.crc32(job.encode()) % 10_000 if job else PORT
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


# -- Slurm -------------------------------------------------------------------------------------------------------------


def _read_slurm() -> tuple[Announced | None, str]:
    """This process as one of several tasks of srun, or None and the reason (``""`` outside of Slurm).

    They meet at MASTER_ADDR and MASTER_PORT if set, else at the step's first host and 15000 + the last four digits of the job's number.
    """
    rank, tasks = env.integer("SLURM_PROCID"), env.integer("SLURM_STEP_NUM_TASKS")
    if rank is None:
        return None, "srun did not start this process" if env.read("SLURM_JOB_ID") else ""
    if env.read("ENVIRONMENT") == "BATCH" and env.read("SLURM_STEP_ID") is None:
        return None, BATCH
    if env.read("SLURM_JOB_NAME") in INTERACTIVE and (tasks in (None, 1) or os.isatty(0)):
        return None, f"Slurm's job is interactive, by its name {env.read('SLURM_JOB_NAME')!r}"
    counted = "SLURM_NTASKS" if tasks is None else "SLURM_STEP_NUM_TASKS"
    size, local = env.integer(counted), env.integer("SLURM_LOCALID")
    for name, value in (("SLURM_NTASKS", size), ("SLURM_LOCALID", local)):
        if value is None and size != 1:
            raise WorldError(
                f"SLURM_PROCID={rank} is in the environment but {name} is not: srun sets both. Start with srun, "
                "or unset SLURM_PROCID to train in one process"
            )
    _check_rank("SLURM_PROCID", rank, "", size, f"{counted}={size}; start with srun, which sets both")
    if size == 1:
        return None, "Slurm's srun started one task"
    nodes = _slurm("NODELIST") or env.read("SLURM_JOB_NODELIST") or None
    local_size = _slurm_local_size(local, size, nodes)
    return Announced(rank, size, local, local_size, *_slurm_master(nodes), "Slurm's srun"), "Slurm's srun"


def _slurm(name: str) -> str | None:
    """A variable of this step, which may run on some of the job's nodes only; else the job's."""
    return env.read(f"SLURM_STEP_{name}") or env.read(f"SLURM_{name}") or None


def _slurm_local_size(local: int, size: int, nodes: str | None) -> int:
    """Number of tasks on this node. SLURM_TASKS_PER_NODE "4(x2),3" means two nodes with four tasks each, and one with three."""
    text, node = _slurm("TASKS_PER_NODE"), env.integer("SLURM_NODEID", 0)
    if text is None:
        each = env.integer("SLURM_NTASKS_PER_NODE") or (-(-size // len(hosts(nodes))) if nodes else 1)
        return max(local + 1, each)
    said, counts = f"SLURM_{'STEP_' * bool(env.read('SLURM_STEP_TASKS_PER_NODE'))}TASKS_PER_NODE={text!r}", []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise WorldError(
                f"{said} is not a list of counts such as '4(x2),3': start with srun, which sets it"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node < len(counts) or local >= counts[node]:
        raise WorldError(
            f"SLURM_NODEID={node} and SLURM_LOCALID={local} do not lie in {said}: start with srun, which sets all three"
        )
    return counts[node]


def _slurm_master(nodes: str | None) -> tuple[str, int]:
    address, port = _master()
    job = env.read("SLURM_JOB_ID", "")
    if address is None and not nodes:
        raise WorldError(
            "SLURM_PROCID is in the environment but SLURM_JOB_NODELIST is not, whose first host the tasks meet at: "
            "start with srun, or export MASTER_ADDR"
        )
    if port is None and not job.isdecimal():
        found = f"SLURM_JOB_ID={job!r} is not a number" if job else "SLURM_JOB_ID is not in the environment"
        raise WorldError(
            f"{found}, and the port that the tasks meet at is made of it: start with srun, or export MASTER_PORT"
        )
    return address or hosts(nodes)[0], FIRST_PORT + int(job[-4:]) if port is None else port


def hosts(text: str) -> list[str]:
    """The names in a list as Slurm shortens it: ``n[5-9,12],login1`` is n5, n6, n7, n8, n9, n12 and login1.

    Not by ``scontrol show hostnames``, which containers do not have. Of several brackets in a name the last one counts fastest; leading
    zeros are kept.
    """
    item = r"(?:[^\[\],\s]|\[[^\[\]]*\])+"  # up to a comma outside of brackets
    if not re.fullmatch(rf"{item}(?:,{item})*", text):
        raise _not_hosts(text, "names are separated by commas, and numbers stand in brackets that are closed")
    found = []
    for name in re.findall(item, text):
        plain, *rest = re.split(r"\[([^\]]*)\]", name)
        for numbers in product(*(_numbers(text, inside) for inside in rest[::2])):
            found.append(plain + "".join(number + tail for number, tail in zip(numbers, rest[1::2])))
    return found


def _numbers(text: str, inside: str) -> Iterator[str]:
    for part in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise _not_hosts(text, f"[{inside}] should hold numbers and ranges of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _not_hosts(text, f"{part} counts down")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def _not_hosts(text: str, why: str) -> WorldError:
    return WorldError(f"{text!r} is not a list of hosts as Slurm writes them, such as 'n[5-9,12]': {why}")
