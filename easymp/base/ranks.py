"""Who this process is, as a launcher announced it in variables. Nothing is started here.

`LAUNCHERS`, at the end, is the one table of launchers and their variables, in the order in which they are read.
"""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from ..errors import EasympWarning, WorldError
from . import env

PORT = 29500  # torchrun's
FIRST_PORT = 15000
LOOPBACK = "127.0.0.1"
ONE = "RANK and WORLD_SIZE announced one process"
BATCH = "this is Slurm's batch script, before any srun"
INTERACTIVE = ("bash", "interactive")  # names of jobs
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Ranks(NamedTuple):
    """This process among all processes of the run.

    Attributes:
        unknown: "rank": local_rank and local_size stand for one machine until `locate` counts them by host; "size": local_size does.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this node
    local_size: int = 1
    announced: str = ""  # by "RANK and WORLD_SIZE", "Slurm's srun" and so on; "" for a process alone
    bound: bool = False  # the launcher lets it see one accelerator only (Slurm's --gpus-per-task)
    meeting: tuple[str | None, int | None] | None = None  # rank 0's address and port, if not MASTER_ADDR's
    alone: str = "no launcher announced others"  # why there is one process
    unknown: str = ""
    device: int | None = None  # number of the accelerator that the opener of the process group chose

    @property
    def nodes(self) -> int:
        return max(1, self.size // max(1, self.local_size))


class Launcher(NamedTuple):
    """A launcher and its variables; ``""`` where it has none."""

    name: str  # for messages, as a singular
    rank: str  # of this process among all; of a launcher with `each`, of this node among all nodes
    size: str
    local_rank: str = ""  # on this machine
    local_size: str = ""
    address: str = "MASTER_ADDR"  # where rank 0 listens; of most launchers MASTER_ADDR goes first
    port: str = "MASTER_PORT"
    job: str = ""  # the same in all processes; a port is made of it
    each: str = ""  # number of processes that each node starts
    # Finds this process; returns the reason why it trains alone, or "" where nothing is announced.
    read: Callable[[Launcher], Announced | str] = lambda launcher: ""


class Announced(NamedTuple):
    """This process among all that a launcher announced; None where it does not say something."""

    by: Launcher
    rank: int | None  # of this process among all; where `processes` is not 1, of this node among all nodes
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    port: int | None = None
    most: int | None = None  # nodes that may take part, where they come and go
    processes: int = 1  # to be started by each node; 0: as many as it has accelerators


def read_ranks() -> Ranks:
    """The running process group's ranks, or those that a launcher announced, or one process."""
    import torch.distributed as dist  # here: the launcher reads variables without torch

    if dist.is_available() and dist.is_initialized():
        local = env.integer("LOCAL_RANK"), env.integer("LOCAL_WORLD_SIZE")
        # Ray Train's variable for it: a worker may have several of the accelerators that all workers of its machine see.
        chosen = re.fullmatch(r"\w+:(\d+)", env.read("ACCELERATE_TORCH_DEVICE", ""))
        group = _ranks(Announced(GROUP, dist.get_rank(), dist.get_world_size(), *local))
        return group._replace(device=int(chosen[1]) if chosen else None)
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
    single = found.processes == 1
    if found.processes == 0:  # one for each accelerator of the node
        import torch

        single = max(torch.cuda.device_count(), torch.xpu.device_count()) <= 1
    if not single or found.most is not None or found.rank is None:
        raise WorldError(
            f"{said(found.by.size, found.by.each)} announce {found.size} node{'s' * (found.size > 1)} with "
            f"{found.processes or 'several'} processes each, and this process was started as one: start it with torchrun or "
            f"`easymp launch`, which take their part in it, or unset {found.by.size} and {found.by.each}"
        )
    return _ranks(found)


def _ranks(found: Announced) -> Ranks:
    rank, size, local, beside = found.rank, found.size, found.local_rank, found.local_size
    unknown = "" if size == 1 else "rank" if local is None else "size" if beside is None else ""
    local = rank if local is None else local
    shown = [text.split(",") for name in VISIBLE if (text := env.read(name)) is not None]
    bound = any(len(cards) == 1 and cards[0].strip() not in ("", "-1") for cards in shown)
    meeting = None if found.by in (EXPLICIT, GROUP) else (found.address, found.port)
    return Ranks(
        *(rank, size, local, beside or max(size, local + 1), found.by.name, bound, meeting), unknown=unknown
    )


def read() -> tuple[Announced | None, str]:
    """This process among those that a launcher announced, or None and the reason why it trains alone (``""``: nothing is announced)."""
    own = _read_explicit(EXPLICIT)
    pods = _read_pods(KUBEFLOW)
    if isinstance(pods, Announced) and (isinstance(own, str) or pods.processes > 1):
        return pods, ""
    if isinstance(own, Announced) and (own.size > 1 or _within_torchrun()):
        return own, ""
    others = (launcher.read(launcher) for launcher in LAUNCHERS if launcher not in (EXPLICIT, KUBEFLOW))
    found = next((found for found in others if found), "")
    if isinstance(own, str):
        return (None, found) if isinstance(found, str) else (found, "")
    if isinstance(found, Announced):
        raise WorldError(
            f"{said('RANK', 'WORLD_SIZE')} announce one process, and {found.by.name} announces {found.size} by "
            f"{said(found.by.rank, found.by.size)}: unset RANK and WORLD_SIZE to train on all {found.size}"
        )
    return (None, ONE) if None in (own.address, own.port) else (own, "")


def read_node() -> tuple[Announced | None, str]:
    """This process as a launcher: which of the announced nodes it starts the ranks of, or None and the reason, as `read`.

    Where processes are announced, each of them is a node.
    """
    if env.read("TORCHELASTIC_RUN_ID") is not None and env.integer("WORLD_SIZE", 1) > 1:
        raise WorldError(
            f"this process is rank {env.read('RANK')} of {env.read('WORLD_SIZE')}, which torchrun or `easymp launch` started, and every "
            "rank would launch a run of its own: run the script with python, or start the launch outside of the ranks; for a run apart, "
            "unset TORCHELASTIC_RUN_ID, RANK and WORLD_SIZE"
        )
    pods = _read_pods(KUBEFLOW)
    return (pods, "") if isinstance(pods, Announced) else read()


def said(*names: str) -> str:
    """``"RANK=0 and WORLD_SIZE=2"``, of the variables that are set."""
    return " and ".join(f"{name}={text!s}" for name in names if (text := env.read(name)) is not None)


def _within_torchrun() -> bool:
    """Whether torchrun started this process, as a rank."""
    return env.read("LOCAL_RANK") is not None or env.read("TORCHELASTIC_RUN_ID") is not None


def _pair(launcher: Launcher) -> tuple[int, int] | None:
    """Rank and size; a size of 1 without a rank counts as absent. Raises WorldError where they contradict each other."""
    rank, size = env.integer(launcher.rank), env.integer(launcher.size)
    if rank is None and size in (None, 1):
        return None
    if rank is None or size is None:
        raise _missing(*(launcher[2:0:-1] if rank is None else launcher[1:3]))
    if not 0 <= rank < size:
        raise WorldError(
            f"{said(launcher.rank, launcher.size)} contradict each other: a rank lies in 0 … {size - 1}. Check the settings of "
            "the launcher, or unset both to train in one process"
        )
    return rank, size


def _missing(there: str, missing: str) -> WorldError:
    return WorldError(
        f"{said(there)} is in the environment but {missing} is not: a launcher sets both. Start with `easymp launch` or another "
        f"launcher, set {missing}, or unset {there} to train in one process"
    )


def _local(launcher: Launcher, size: int) -> tuple[int | None, int | None]:
    """Local rank and size; the size without a rank is nothing. Raises WorldError where they contradict each other."""
    rank, many = env.integer(launcher.local_rank), env.integer(launcher.local_size)
    if rank is None:
        return None, None
    if not 0 <= rank < (size if many is None else min(many, size)):
        raise WorldError(
            f"{said(launcher.local_rank, launcher.local_size, launcher.size)} contradict each other: a local rank lies in 0 … local "
            f"size - 1, and a machine has no more ranks than the run. Unset {launcher.local_rank} to have them counted"
        )
    return rank, many


def _read_explicit(launcher: Launcher) -> Announced | str:
    pair, address = _pair(launcher), env.read(launcher.address) or None
    if pair is None:
        return ""
    return Announced(launcher, *pair, *_local(launcher, pair[1]), address, env.integer(launcher.port))


# -- nodes that start their processes ----------------------------------------------------------------------------------


def _read_pods(launcher: Launcher) -> Announced | str:
    """This node among those that are to call torchrun, by torchrun's options in variables (torch/distributed/argparse_util.py)."""
    if _within_torchrun():
        return ""
    text, each = env.read(launcher.size) or "1", env.read(launcher.each) or "1"
    nodes, check = re.fullmatch(r"\s*([1-9]\d*)(?::(\d+))?\s*", text), "check the job's settings"
    if nodes is None or int(nodes[1]) > int(nodes[2] or nodes[1]):
        raise WorldError(f"PET_NNODES={text!r} is not a number of nodes, such as 2 or 1:4: {check}")
    if re.fullmatch(r"[1-9]\d*|auto|gpu|cpu|xpu", each) is None:
        raise WorldError(
            f"PET_NPROC_PER_NODE={each!r} is not a number of processes, such as 8 or auto: {check}"
        )
    least, most = int(nodes[1]), int(nodes[2] or nodes[1])
    processes = int(each) if each.isdecimal() else 0  # by the node's accelerators
    if most == 1 and processes in (0, 1):
        return ""
    rank = env.integer(launcher.rank, env.integer("RANK"))
    host, _, port = (env.read("PET_RDZV_ENDPOINT") or "").rpartition(":")
    address = env.read(launcher.address) or host or env.read("MASTER_ADDR") or None
    otherwise = int(port) if port.isdecimal() else env.integer("MASTER_PORT", PORT)
    if rank is not None and not 0 <= rank < most:
        raise WorldError(f"{said(launcher.size)} and node rank {rank} contradict each other: {check}")
    if most > 1 and rank is None and most == least:
        raise _missing(launcher.size, launcher.rank)
    if most > 1 and address is None:
        raise _missing(launcher.size, launcher.address)
    place = address, env.integer(launcher.port, otherwise), most if most > least else None
    return Announced(launcher, rank, least, None, None, *place, processes)


def _read_skypilot(launcher: Launcher) -> Announced | str:
    pair, addresses = _pair(launcher), (env.read(launcher.address) or "").split()
    if pair is None or pair[1] == 1:
        return ""
    if len(addresses) != pair[1]:
        raise WorldError(
            f"{said(launcher.size)} and {len(addresses)} lines in {launcher.address} contradict each other: leave the variables as "
            "SkyPilot sets them"
        )
    port = env.integer(launcher.port, PORT)
    return Announced(launcher, *pair, address=addresses[0], port=port, processes=0)


# -- MPI and submitit --------------------------------------------------------------------------------------------------


def _read_mpi(launcher: Launcher) -> Announced | str:
    pair, address, port = _pair(launcher), env.read(launcher.address) or None, env.integer(launcher.port)
    if pair is None or (launcher is PMI and pair == (env.integer(SLURM.rank), env.integer(SLURM.size))):
        return ""  # srun's PMI, of which Slurm's own variables say more
    if pair[1] == 1:
        return f"{launcher.name} started one process"
    local, job = _local(launcher, pair[1]), env.read(launcher.job)
    if port is None:
        port = FIRST_PORT + zlib.crc32(job.encode()) % 10_000 if job else PORT
    if address is None and local[1] == pair[1]:
        address = LOOPBACK
    if address is None:
        # Open MPI 4 says where mpirun itself runs, and where the daemon of this node does: by default rank 0 is beside mpirun.
        main, own = (env.read(f"OMPI_MCA_orte_{daemon}_uri", "") for daemon in ("hnp", "local_daemon"))
        match = re.search(r";tcp://([\d.]+)", main)
        if match and (pair[0] > 0 or own == main):
            address = match[1]
    if address is None:
        raise WorldError(
            f"{launcher.name} announces {pair[1]} processes on several machines by {said(launcher.size, launcher.local_size)}, and not "
            "where rank 0 runs: export its address to all of them as MASTER_ADDR (mpirun -x MASTER_ADDR=HOST with Open MPI, -genv "
            "MASTER_ADDR HOST with MPICH and Intel MPI)"
        )
    return Announced(launcher, *pair, *local, address, port)


def _read_pmix(launcher: Launcher) -> str:
    if env.read(launcher.rank) is None or env.read(SLURM.rank) is not None:
        return ""
    raise WorldError(
        f"{said(launcher.rank)} is in the environment, and no variable says how many processes there are: start with mpirun or "
        f"srun, export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset {launcher.rank} to train in one process"
    )


# -- Slurm -------------------------------------------------------------------------------------------------------------


def _read_slurm(launcher: Launcher) -> Announced | str:
    """This process as one of several tasks of srun.

    A batch script before its srun, and a shell in an allocation, have some of the same variables; a program trains alone there. The
    shell is known by its job's name, which ``srun bash run.sh`` and srun in an allocation of salloc have, too: those are several
    tasks without a terminal. They meet at the step's first host, at port 15000 + the last four digits of the job's number.
    """
    rank, tasks = env.integer(launcher.rank), env.integer(launcher.size)
    if rank is None:
        return "srun did not start this process" if env.read("SLURM_JOB_ID") else ""
    if env.read("ENVIRONMENT") == "BATCH" and env.read("SLURM_STEP_ID") is None:
        return BATCH
    if env.read("SLURM_JOB_NAME") in INTERACTIVE and (tasks in (None, 1) or os.isatty(0)):
        return f"Slurm's job is interactive, by its name {env.read('SLURM_JOB_NAME')!r}"
    if tasks is None:
        launcher = launcher._replace(size="SLURM_NTASKS")
    pair = _pair(launcher)
    if pair is None or pair[1] == 1:
        return "Slurm's srun started one task"
    local = env.integer(launcher.local_rank)
    if local is None:
        raise _missing(launcher.rank, launcher.local_rank)
    # A step may run on some of the job's nodes only.
    lists = map(env.read, ("SLURM_STEP_NODELIST", "SLURM_NODELIST", launcher.address))
    nodes = next(filter(None, lists), None)
    address, port, job = env.read("MASTER_ADDR"), env.integer(launcher.port), env.read(launcher.job, "")
    for missing, name, use in (
        (not address and not nodes, launcher.address, "MASTER_ADDR"),
        (port is None and not job.isdecimal(), launcher.job, "MASTER_PORT"),
    ):
        if missing:
            raise WorldError(
                f"{said(launcher.rank)} is in the environment, and {name}={env.read(name)!r} does not say where the tasks meet: start "
                f"with srun, which sets both, or export {use}"
            )
    place = address or hosts(nodes)[0], FIRST_PORT + int(job[-4:]) if port is None else port
    return Announced(SLURM, *pair, local, _slurm_local_size(local, pair[1], nodes), *place)


def _slurm_local_size(local: int, size: int, nodes: str | None) -> int:
    """Number of tasks on this node. SLURM_TASKS_PER_NODE "4(x2),3" means two nodes with four tasks each, and one with three."""
    text = env.read("SLURM_STEP_TASKS_PER_NODE") or env.read("SLURM_TASKS_PER_NODE")
    node = env.integer("SLURM_NODEID", 0)
    if not text:
        each = env.integer("SLURM_NTASKS_PER_NODE") or (-(-size // len(hosts(nodes))) if nodes else 1)
        return max(local + 1, each)
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    counts = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    if None in parts or not 0 <= node < len(counts) or local >= counts[node]:
        raise WorldError(
            f"SLURM_NODEID={node}, SLURM_LOCALID={local} and {said('SLURM_STEP_TASKS_PER_NODE', 'SLURM_TASKS_PER_NODE')} contradict "
            "each other (tasks are written as '4(x2),3'): start with srun, which sets all of them"
        )
    return counts[node]


def hosts(text: str) -> list[str]:
    """The names in a list as Slurm shortens it: ``n[5-9,12],login1`` is n5, n6, n7, n8, n9, n12 and login1.

    Not by ``scontrol show hostnames``, which containers do not have. Of several brackets in a name the last one counts fastest; leading
    zeros are kept.
    """
    numbers = r"\d+(?:-\d+)?"
    item = rf"(?:[^\[\],\s]|\[{numbers}(?:,{numbers})*\])+"  # up to a comma outside of brackets
    found = []
    for name in re.findall(item, text) if re.fullmatch(rf"{item}(?:,{item})*", text) else ():
        plain, *rest = re.split(r"\[([^\]]*)\]", name)
        for inside in product(*map(_numbers, rest[::2])):
            found.append(plain + "".join(number + tail for number, tail in zip(inside, rest[1::2])))
    if not found:
        raise WorldError(f"{text!r} is not a list of hosts as Slurm writes them, such as 'n[5-9,12],login1'")
    return found


def _numbers(inside: str) -> list[str]:
    ends = [(part.split("-")[0], part.split("-")[-1]) for part in inside.split(",")]
    return [f"{n:0{len(first)}d}" for first, last in ends for n in range(int(first), int(last) + 1)]


# -- the table ---------------------------------------------------------------------------------------------------------


def _mpi(name: str, prefix: str, job: str = "") -> Launcher:
    words = (f"{prefix}_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return Launcher(name, *words, job=job, read=_read_mpi)


GROUP = Launcher("the process group", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# torchrun, `easymp launch`, Ray, Kubernetes. PyTorchJob of Kubeflow sets RANK to the pod's number.
EXPLICIT = GROUP._replace(name="RANK and WORLD_SIZE", read=_read_explicit)
KUBEFLOW = Launcher(
    "PET_NNODES and PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_NNODES", address="PET_MASTER_ADDR", port="PET_MASTER_PORT",
    each="PET_NPROC_PER_NODE", read=_read_pods,
)  # fmt: skip
PMI = Launcher(
    "PMI (mpirun of MPICH or Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", read=_read_mpi
)  # fmt: skip
SUBMITIT = Launcher(
    "submitit", *(f"SUBMITIT_LOCAL_{word}" for word in ("GLOBALID", "NTASKS", "LOCALID", "NTASKS")), job="SUBMITIT_LOCAL_JOB_ID",
    read=_read_mpi,
)  # fmt: skip
SLURM = Launcher(
    "Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE", "SLURM_JOB_NODELIST",
    job="SLURM_JOB_ID", read=_read_slurm,
)  # fmt: skip
SKYPILOT = Launcher(
    "SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", address="SKYPILOT_NODE_IPS", each="SKYPILOT_NUM_GPUS_PER_NODE",
    read=_read_skypilot,
)  # fmt: skip
LAUNCHERS = (
    EXPLICIT,
    KUBEFLOW,
    # A task of srun may be a daemon of mpirun, so mpirun goes before Slurm.
    _mpi("Open MPI's mpirun", "OMPI_COMM_WORLD", "PMIX_NAMESPACE"),
    _mpi("MVAPICH2's mpirun", "MV2_COMM_WORLD"),
    PMI,
    SUBMITIT,
    SLURM,
    Launcher("PMIx", "PMIX_RANK", "", read=_read_pmix),
    SKYPILOT,
)
