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
    """This process among all processes of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this node
    local_size: int = 1
    announced: str = ""  # by "RANK and WORLD_SIZE", "Slurm's srun" and so on; "" for a process alone
    bound: bool = False  # the launcher lets it see one accelerator only (Slurm's --gpus-per-task)
    meeting: tuple[str | None, int | None] | None = None  # rank 0's address and port, if not MASTER_ADDR's
    single_reason: str = "no launcher announced others"  # why there is one process
    # "rank": local_rank and local_size stand for one machine until `locate` counts them by host; "size": local_size
    unknown: str = ""
    device: int | None = None  # number of the accelerator that the opener of the process group chose

    @property
    def nodes(self) -> int:
        return max(1, self.size // max(1, self.local_size))


class Launcher(NamedTuple):
    """A launcher and its variables; ``""`` where it has none."""

    name: str  # for messages, as a singular
    rank: str  # of this process among all; of a launcher with `node_size`, of this node among all nodes
    size: str
    local_rank: str = ""  # on this machine
    local_size: str = ""
    address: str = "MASTER_ADDR"  # where rank 0 listens
    port: str = "MASTER_PORT"
    job: str = ""  # the same in all processes; a port is made of it
    node_size: str = ""  # number of processes that each node starts
    # Reads the variables; returns the reason why this process trains alone, or "" where nothing is announced.
    read: Callable[[Launcher], Announced | str] = lambda launcher: ""


class Announced(NamedTuple):
    """This process among all that a launcher announced; None where it does not say something."""

    launcher: Launcher
    rank: int | None  # of this process among all; where `processes` is not 1, of this node among all nodes
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    port: int | None = None
    max_nodes: int | None = None  # where nodes come and go
    processes: int = 1  # to be started by each node; 0: as many as it has accelerators


def read_ranks() -> Ranks:
    """The running process group's ranks, or those that a launcher announced, or one process."""
    import torch.distributed as dist  # here: the launcher reads variables without torch

    if dist.is_available() and dist.is_initialized():
        local_rank, local_size = env.integer("LOCAL_RANK"), env.integer("LOCAL_WORLD_SIZE")
        group = _ranks(Announced(GROUP, dist.get_rank(), dist.get_world_size(), local_rank, local_size))
        # Ray Train names the worker's accelerator, since a worker may see several.
        device = re.fullmatch(r"\w+:(\d+)", env.read("ACCELERATE_TORCH_DEVICE", ""))
        return group._replace(device=int(device[1]) if device else None)
    announced = read()
    if isinstance(announced, str):
        if announced == BATCH and env.integer("SLURM_NTASKS", 1) > 1:
            warnings.warn(
                f"one process trains, of the {env.read('SLURM_NTASKS')} tasks of Slurm's job: its batch script starts "
                "all of them with srun before the command",
                EasympWarning,
                stacklevel=3,
            )
        return Ranks(single_reason=f"no launcher announced others: {announced}") if announced else Ranks()
    launcher, single = announced.launcher, announced.processes == 1
    if announced.processes == 0:  # one for each accelerator of the node
        import torch

        single = max(torch.cuda.device_count(), torch.xpu.device_count()) <= 1
    if not single or announced.max_nodes is not None or announced.rank is None:
        raise WorldError(
            f"{variables(launcher.size, launcher.node_size)} announce {announced.size} "
            f"node{'s' * (announced.size > 1)} with {announced.processes or 'several'} processes each, and this "
            "process was started as one: start it with torchrun or `easymp launch`, which take their part in it, or "
            f"unset {launcher.size} and {launcher.node_size}"
        )
    return _ranks(announced)


def _ranks(announced: Announced) -> Ranks:
    assert announced.rank is not None
    unknown = "rank" if announced.local_rank is None else "size" if announced.local_size is None else ""
    local_rank = announced.rank if announced.local_rank is None else announced.local_rank
    visible = [text.split(",") for name in VISIBLE if (text := env.read(name)) is not None]
    return Ranks(
        rank=announced.rank,
        size=announced.size,
        local_rank=local_rank,
        local_size=announced.local_size or max(announced.size, local_rank + 1),
        announced=announced.launcher.name,
        bound=any(len(cards) == 1 and cards[0].strip() not in ("", "-1") for cards in visible),
        meeting=None if announced.launcher in (EXPLICIT, GROUP) else (announced.address, announced.port),
        unknown=unknown if announced.size > 1 else "",
    )


def read() -> Announced | str:
    """This process among those that a launcher announced; or why it trains alone ("" without a launcher)."""
    explicit, pod = _announced(EXPLICIT), _read_pod(KUBEFLOW)
    if isinstance(pod, Announced) and (explicit is None or pod.processes > 1):
        return pod
    if explicit is not None and (explicit.size > 1 or _within_torchrun()):
        return explicit
    answers = (launcher.read(launcher) for launcher in LAUNCHERS if launcher not in (EXPLICIT, KUBEFLOW))
    announced: Announced | str = next((answer for answer in answers if answer), "")
    if explicit is None:
        return announced
    if isinstance(announced, Announced):
        raise WorldError(
            f"{variables('RANK', 'WORLD_SIZE')} announce one process, and {announced.launcher.name} announces "
            f"{announced.size} by {variables(announced.launcher.rank, announced.launcher.size)}: unset RANK and "
            f"WORLD_SIZE to train on all {announced.size}"
        )
    return ONE if None in (explicit.address, explicit.port) else explicit


def read_node() -> Announced | str:
    """The node or process announced to this launcher, which starts its ranks; or the reason for none, as `read`."""
    if env.read("TORCHELASTIC_RUN_ID") is not None and env.integer("WORLD_SIZE", 1) > 1:
        raise WorldError(
            f"this process is rank {env.read('RANK')} of {env.read('WORLD_SIZE')}, which torchrun or `easymp launch` "
            "started, and every rank would launch a run of its own: run the script with python, or start the launch "
            "outside of the ranks; for a run apart, unset TORCHELASTIC_RUN_ID, RANK and WORLD_SIZE"
        )
    pod = _read_pod(KUBEFLOW)
    return pod if isinstance(pod, Announced) else read()


def variables(*names: str) -> str:
    """``"RANK=0 and WORLD_SIZE=2"``, of the variables that are set."""
    return " and ".join(f"{name}={text!s}" for name in names if (text := env.read(name)) is not None)


def _within_torchrun() -> bool:
    """Whether torchrun started this process, as a rank."""
    return env.read("LOCAL_RANK") is not None or env.read("TORCHELASTIC_RUN_ID") is not None


def _announced(launcher: Launcher) -> Announced | None:
    """This process as the launcher's variables say; None without them, or with a size of 1 and no rank."""
    rank, size = env.integer(launcher.rank), env.integer(launcher.size)
    if rank is None and size in (None, 1):
        return None
    if rank is None:
        raise _missing(launcher.size, launcher.rank)
    if size is None:
        raise _missing(launcher.rank, launcher.size)
    if not 0 <= rank < size:
        raise WorldError(
            f"{variables(launcher.rank, launcher.size)} contradict each other: a rank lies in 0 … {size - 1}. Check "
            "the settings of the launcher, or unset both to train in one process"
        )
    local_rank = env.integer(launcher.local_rank)
    local_size = None if local_rank is None else env.integer(launcher.local_size)
    if local_rank is not None and not 0 <= local_rank < min(local_size or size, size):
        names = variables(launcher.local_rank, launcher.local_size, launcher.size)
        raise WorldError(
            f"{names} contradict each other: a local rank lies in 0 … local size - 1, and a machine has no more "
            f"ranks than the run. Unset {launcher.local_rank} to have them counted"
        )
    address, port = env.read(launcher.address) or None, env.integer(launcher.port)
    return Announced(launcher, rank, size, local_rank, local_size, address, port)


def _missing(present: str, absent: str) -> WorldError:
    return WorldError(
        f"{variables(present)} is in the environment but {absent} is not: a launcher sets both. Start with "
        f"`easymp launch` or another launcher, set {absent}, or unset {present} to train in one process"
    )


# -- nodes that start their processes ----------------------------------------------------------------------------------


def _read_pod(launcher: Launcher) -> Announced | str:
    """This node among those that call torchrun, by torchrun's options in variables (torch's argparse_util.py)."""
    if _within_torchrun():
        return ""
    text, node_size = env.read(launcher.size) or "1", env.read(launcher.node_size) or "1"
    nodes, remedy = re.fullmatch(r"\s*([1-9]\d*)(?::(\d+))?\s*", text), "check the job's settings"
    if nodes is None or int(nodes[1]) > int(nodes[2] or nodes[1]):
        raise WorldError(f"PET_NNODES={text!r} is not a number of nodes, such as 2 or 1:4: {remedy}")
    if re.fullmatch(r"[1-9]\d*|auto|gpu|cpu|xpu", node_size) is None:
        raise WorldError(f"PET_NPROC_PER_NODE={node_size!r} is not a number of processes, such as 8 or auto: {remedy}")
    min_nodes, max_nodes = int(nodes[1]), int(nodes[2] or nodes[1])
    processes = int(node_size) if node_size.isdecimal() else 0  # by the node's accelerators
    if max_nodes == 1 and processes in (0, 1):
        return ""
    rank = env.integer(launcher.rank)
    if rank is None:
        rank = env.integer("RANK")
    host, _, port = env.read("PET_RDZV_ENDPOINT", "").rpartition(":")
    address = env.read(launcher.address) or host or env.read("MASTER_ADDR") or None
    default_port = int(port) if port.isdecimal() else env.integer("MASTER_PORT", PORT)
    port_number = env.integer(launcher.port, default_port)
    if rank is not None and not 0 <= rank < max_nodes:
        raise WorldError(f"{variables(launcher.size)} and node rank {rank} contradict each other: {remedy}")
    if max_nodes > 1 and rank is None and max_nodes == min_nodes:
        raise _missing(launcher.size, launcher.rank)
    if max_nodes > 1 and address is None:
        raise _missing(launcher.size, launcher.address)
    node = Announced(launcher, rank, min_nodes, address=address, port=port_number, processes=processes)
    return node._replace(max_nodes=max_nodes) if max_nodes > min_nodes else node


def _read_skypilot(launcher: Launcher) -> Announced | str:
    node = _announced(launcher)
    if node is None or node.size == 1:
        return ""
    addresses = (node.address or "").split()
    if len(addresses) != node.size:
        raise WorldError(
            f"{variables(launcher.size)} and {len(addresses)} lines in {launcher.address} contradict each other: leave "
            "the variables as SkyPilot sets them"
        )
    return node._replace(address=addresses[0], port=node.port or PORT, processes=0)


# -- MPI and submitit --------------------------------------------------------------------------------------------------


def _read_mpi(launcher: Launcher) -> Announced | str:
    process = _announced(launcher)
    if process is None:
        return ""
    if launcher is PMI and (process.rank, process.size) == (env.integer(SLURM.rank), env.integer(SLURM.size)):
        return ""  # srun's PMI; Slurm's own variables say more
    if process.size == 1:
        return f"{launcher.name} started one process"
    address, port, job = process.address, process.port, env.read(launcher.job)
    if port is None:
        port = FIRST_PORT + zlib.crc32(job.encode()) % 10_000 if job else PORT
    if address is None and process.local_size == process.size:
        address = LOOPBACK
    if address is None:
        # Open MPI 4 names the addresses of mpirun and of this node's daemon. By default rank 0 is beside mpirun.
        mpirun, daemon = (env.read(f"OMPI_MCA_orte_{name}_uri", "") for name in ("hnp", "local_daemon"))
        match = re.search(r";tcp://([\d.]+)", mpirun)
        if match and (process.rank or daemon == mpirun):
            address = match[1]
    if address is None:
        raise WorldError(
            f"{launcher.name} announces {process.size} processes on several machines by "
            f"{variables(launcher.size, launcher.local_size)}, and not where rank 0 runs: export its address to all of "
            "them as MASTER_ADDR (mpirun -x MASTER_ADDR=HOST with Open MPI, -genv MASTER_ADDR HOST with MPICH and "
            "Intel MPI)"
        )
    return process._replace(address=address, port=port)


def _read_pmix(launcher: Launcher) -> str:
    if env.read(launcher.rank) is None or env.read(SLURM.rank) is not None:
        return ""
    raise WorldError(
        f"{variables(launcher.rank)} is in the environment, and no variable says how many processes there are: start "
        "with mpirun or srun, export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset "
        f"{launcher.rank} to train in one process"
    )


# -- Slurm -------------------------------------------------------------------------------------------------------------


def _read_slurm(launcher: Launcher) -> Announced | str:
    """This process as one of several tasks of srun, or the reason why it is not one.

    Batch scripts outside srun and interactive shells have some of srun's variables, too; a program there trains alone.
    An interactive shell is told by its job's name and by one task or a terminal: ``srun bash run.sh``, and srun inside
    salloc, can have that job name with several tasks and no terminal. The tasks meet at the step's first host, at port
    15000 + the last four digits of the job's number.
    """
    tasks = env.integer(launcher.size)
    if env.integer(launcher.rank) is None:
        return "srun did not start this process" if env.read("SLURM_JOB_ID") else ""
    if env.read("ENVIRONMENT") == "BATCH" and env.read("SLURM_STEP_ID") is None:
        return BATCH
    if env.read("SLURM_JOB_NAME") in INTERACTIVE and (tasks in (None, 1) or os.isatty(0)):
        return f"Slurm's job is interactive, by its name {env.read('SLURM_JOB_NAME')!r}"
    if tasks is None:
        launcher = launcher._replace(size="SLURM_NTASKS")
    if env.integer(launcher.size) == 1:
        return "Slurm's srun started one task"
    task = _announced(launcher)
    if task is None or task.local_rank is None:
        raise _missing(launcher.rank, launcher.local_rank)
    # A step may run on some of the job's nodes only.
    nodes = next(filter(None, map(env.read, ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"))), "")
    port, job = task.port, env.read(launcher.job, "")
    if not task.address and not nodes:
        raise _no_meeting("SLURM_JOB_NODELIST", "MASTER_ADDR")
    if port is None:
        if not job.isdecimal():
            raise _no_meeting(launcher.job, "MASTER_PORT")
        port = FIRST_PORT + int(job[-4:])
    local_size = _slurm_local_size(task.local_rank, task.size, nodes)
    return task._replace(launcher=SLURM, local_size=local_size, address=task.address or hosts(nodes)[0], port=port)


def _no_meeting(name: str, remedy: str) -> WorldError:
    return WorldError(
        f"{variables(SLURM.rank)} is in the environment, and {name}={env.read(name)!r} does not say where the tasks "
        f"meet: start with srun, which sets both, or export {remedy}"
    )


def _slurm_local_size(local_rank: int, size: int, nodes: str) -> int:
    """Tasks on this node: SLURM_TASKS_PER_NODE "4(x2),3" is two nodes with four tasks each, and one with three."""
    text = env.read("SLURM_STEP_TASKS_PER_NODE") or env.read("SLURM_TASKS_PER_NODE")
    node = env.integer("SLURM_NODEID", 0)
    if not text:
        tasks = env.integer("SLURM_NTASKS_PER_NODE") or (-(-size // len(hosts(nodes))) if nodes else 1)
        return max(local_rank + 1, tasks)
    matches = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item) for item in text.split(",")]
    counts = [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]
    if None in matches or not 0 <= node < len(counts) or local_rank >= counts[node]:
        names = variables("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        raise WorldError(
            f"SLURM_NODEID={node}, SLURM_LOCALID={local_rank} and {names} contradict each other (tasks are written as "
            "'4(x2),3'): start with srun, which sets all of them"
        )
    return counts[node]


def hosts(text: str) -> list[str]:
    """The names in a list as Slurm shortens it: ``n[5-9,12],login1`` is n5, n6, n7, n8, n9, n12 and login1.

    Not by ``scontrol show hostnames``, which containers do not have. Of several brackets in a name the last one counts
    fastest; leading zeros are kept.
    """
    numbers = r"\d+(?:-\d+)?"
    item = rf"(?:[^\[\],\s]|\[{numbers}(?:,{numbers})*\])+"  # up to a comma outside of brackets
    names: list[str] = []
    for shortened in re.findall(item, text) if re.fullmatch(rf"{item}(?:,{item})*", text) else ():
        segments = re.split(r"\[([^\]]*)\]", shortened)  # text and the content of brackets, by turns
        choices = [_numbers(segment) if i % 2 else [segment] for i, segment in enumerate(segments)]
        names += map("".join, product(*choices))
    if not names:
        raise WorldError(f"{text!r} is not a list of hosts as Slurm writes them, such as 'n[5-9,12],login1'")
    return names


def _numbers(ranges: str) -> list[str]:
    ends = [(item.split("-")[0], item.split("-")[-1]) for item in ranges.split(",")]
    return [f"{n:0{len(first)}d}" for first, last in ends for n in range(int(first), int(last) + 1)]


# -- the table ---------------------------------------------------------------------------------------------------------


def _mpi(name: str, prefix: str, job: str = "") -> Launcher:
    rank, size, local_rank, local_size = (f"{prefix}_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return Launcher(name, rank, size, local_rank, local_size, job=job, read=_read_mpi)


GROUP = Launcher("the process group", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# torchrun, `easymp launch`, Ray, Kubernetes. PyTorchJob of Kubeflow sets RANK to the pod's number.
EXPLICIT = GROUP._replace(name="RANK and WORLD_SIZE")
KUBEFLOW = Launcher(
    "PET_NNODES and PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_NNODES", address="PET_MASTER_ADDR",
    port="PET_MASTER_PORT", node_size="PET_NPROC_PER_NODE", read=_read_pod,
)  # fmt: skip
PMI = Launcher(
    "PMI (mpirun of MPICH or Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", read=_read_mpi
)
SUBMITIT = Launcher(
    "submitit", "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_NTASKS",
    job="SUBMITIT_LOCAL_JOB_ID", read=_read_mpi,
)  # fmt: skip
SLURM = Launcher(
    "Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", job="SLURM_JOB_ID", read=_read_slurm
)
SKYPILOT = Launcher(
    "SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", address="SKYPILOT_NODE_IPS",
    node_size="SKYPILOT_NUM_GPUS_PER_NODE", read=_read_skypilot,
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
