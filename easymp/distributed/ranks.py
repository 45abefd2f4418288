"""Who this process is, as a launcher announced it: pure reading, nothing is started."""

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
    import torch.distributed as dist  # here: the launcher reads variables without torch

    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        local, beside = env.integer("LOCAL_RANK"), env.integer("LOCAL_WORLD_SIZE")
        return _ranks(rank, size, local, beside, "the process group")
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
    meeting = None if found.by == EXPLICIT else (found.address, found.port)
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


# -- What a launcher's variables say of this process: pure reading, nothing is started.


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
    task, why = read_task()
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


# -- What Slurm's variables say of this process: pure reading, nothing is started.


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


# -- Slurm's short form of host names: ``n[5-9,12],login1`` for n5, n6, n7, n8, n9, n12 and login1.


ITEM = r"(?:[^\[\],\s]|\[[^\[\]]*\])+"  # up to a comma outside of brackets
LIST = re.compile(rf"{ITEM}(?:,{ITEM})*")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def hosts(text: str) -> list[str]:
    """The names, in Slurm's order: of several brackets in a name the last one counts fastest; leading zeros are kept.

    Raises:
        WorldError: it is no such list.
    """
    if not LIST.fullmatch(text):
        raise _wrong(text, "names are separated by commas, and numbers stand in brackets that are closed")
    found = []
    for item in re.findall(ITEM, text):
        plain, *rest = re.split(r"\[([^\]]*)\]", item)
        choices = [list(_numbers(text, inside)) for inside in rest[::2]]
        for numbers in product(*choices):
            found.append(plain + "".join(number + tail for number, tail in zip(numbers, rest[1::2])))
    return found


def _numbers(text: str, inside: str) -> Iterator[str]:
    for part in inside.split(","):
        match = RANGE.fullmatch(part)
        if match is None:
            raise _wrong(text, f"[{inside}] should hold numbers and ranges of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _wrong(text, f"{part} counts down")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _wrong(text: str, why: str) -> WorldError:
    return WorldError(f"{text!r} is no list of hosts as Slurm writes them, such as 'n[5-9,12]': {why}")
