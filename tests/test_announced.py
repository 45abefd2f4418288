"""Launchers that announce other processes: each is joined, or refused by name."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, SettingError, Settings, WorldError
from easymp.cli import main

ROOT = str(Path(__file__).resolve().parent.parent)
PREFIXES = tuple("OMPI_ MV2_ PMI_ PMIX_ MPI_LOCAL PET_ SLURM_ SUBMITIT_ TORCHELASTIC_ SKYPILOT_".split())
NAMES = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT ENVIRONMENT EASYMP_LAUNCHER"

Seat = tuple[int, int, int, float, str]


def announces(name: str) -> bool:
    return name.startswith(PREFIXES) or name in NAMES.split()


def clear() -> None:
    """Remove what announces other processes from this process's environment."""
    for name in filter(announces, list(os.environ)):
        del os.environ[name]


def seat() -> Seat:
    """Rank, size, local rank, the sum of all ranks, and the plan's word about who announced them."""
    acc = Accelerator(cpu=True, settings=Settings(timeout=60))
    try:
        total = acc.reduce(torch.tensor(float(acc.process_index))).item()
        by = " ".join(acc.plan.explain().splitlines()[0].split()[2:])
        return acc.process_index, acc.num_processes, acc.local_process_index, total, by
    finally:
        acc.end_training()


def seats(announcements: list[dict[str, str]], hosts: str = "") -> list[Seat]:
    """In one of the pool's ranks: its seat where it is announced by these variables alone, for each of them."""
    rank_variables = {"rank": os.environ["RANK"], "size": os.environ["WORLD_SIZE"], "port": os.environ["MASTER_PORT"]}
    seats_found = []
    with pytest.MonkeyPatch.context() as patch:
        if hosts:
            patch.setattr(socket, "gethostname", lambda: hosts.split()[int(rank_variables["rank"])])
        for variables in announcements:
            clear()
            os.environ.update({name: text.format(**rank_variables) for name, text in variables.items()})
            seats_found.append(seat())
    return seats_found


PORT = {"MASTER_PORT": "{port}"}
MEET = {"MASTER_ADDR": "127.0.0.1", **PORT}
TORCHRUN = {"RANK": "{rank}", "WORLD_SIZE": "{size}", **MEET}
OMPI = {f"OMPI_COMM_WORLD_{of}{name}": f"{{{name.lower()}}}" for of in ("", "LOCAL_") for name in ("RANK", "SIZE")}
PET = {"PET_NNODES": "{size}", "PET_NODE_RANK": "{rank}", **{f"PET_{name}": value for name, value in MEET.items()}}
SLURM = {
    "SLURM_PROCID": "{rank}", "SLURM_NTASKS": "{size}", "SLURM_LOCALID": "{rank}", "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NAME": "submitit",
}  # fmt: skip
PMI = {"PMI_RANK": "{rank}", "PMI_SIZE": "{size}"}
JOINED = [
    ({**TORCHRUN, "LOCAL_RANK": "{rank}"}, "RANK and WORLD_SIZE"),
    ({**OMPI, **PORT}, "Open MPI's mpirun"),
    # mpirun of a batch job: its daemons are srun's tasks, one on each node
    ({**OMPI, **PORT, **SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "Open MPI's mpirun"),
    ({**PMI, "MPI_LOCALRANKID": "{rank}", "MPI_LOCALNRANKS": "{size}", **PORT}, "PMI (mpirun of MPICH or Intel MPI)"),
    ({**PMI, **MEET}, "PMI (mpirun of MPICH or Intel MPI)"),
    ({**PMI, **SLURM, "SLURM_STEP_NUM_TASKS": "{size}", **MEET}, "Slurm's srun"),  # srun --mpi=pmi2
    ({"PMIX_RANK": "{rank}", **SLURM, **PORT}, "Slurm's srun"),  # srun --mpi=pmix
    ({**{f"MV2_COMM_WORLD_{n[16:]}": v for n, v in OMPI.items()}, **PORT}, "MVAPICH2's mpirun"),
    ({"SUBMITIT_LOCAL_GLOBALID": "{rank}", "SUBMITIT_LOCAL_LOCALID": "{rank}", "SUBMITIT_LOCAL_NTASKS": "{size}",
      **PORT}, "submitit"),
    ({**SLURM, **PORT}, "Slurm's srun"),
    (PET, "PET_NNODES and PET_NPROC_PER_NODE"),  # tests/docs/test_launching.py has the pods of Kubeflow
    ({"SKYPILOT_NUM_NODES": "{size}", "SKYPILOT_NODE_RANK": "{rank}", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
      **PORT}, "SkyPilot"),
    # a rank that torchrun started in a pod
    ({**TORCHRUN, "LOCAL_RANK": "{rank}", **PET, "PET_NNODES": "1"}, "RANK and WORLD_SIZE"),
]  # fmt: skip


def test_announced_processes_join(ranks):
    for (variables, by), *seats_of_ranks in zip(JOINED, *ranks(seats, [variables for variables, _ in JOINED])):
        assert seats_of_ranks == [(0, 2, 0, 1.0, by), (1, 2, 1, 1.0, by)], variables


@pytest.mark.parametrize(("hosts", "local"), [("a a", [0, 1]), ("a b", [0, 0])])
def test_local_ranks_are_counted_by_host(ranks, hosts, local):
    assert [index for ((_, _, index, _, _),) in ranks(seats, [TORCHRUN], hosts)] == local


def in_a_thread() -> Seat:
    """As Ray Train has it: a process group is open, and the training runs in a thread."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    clear()
    results: list[Seat] = []
    thread = threading.Thread(target=lambda: results.append(seat()))
    thread.start()
    thread.join()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    dist.destroy_process_group()
    return results[0]


def test_an_open_group_is_joined(ranks):
    assert ranks(in_a_thread) == [(0, 2, 0, 1.0, "the process group"), (1, 2, 1, 1.0, "the process group")]


@pytest.fixture
def announce(monkeypatch):
    """Announces with these variables alone."""

    def set_variables(**variables: object) -> None:
        for name in filter(announces, list(os.environ)):
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


def test_one_announced_process_trains_alone(announce):
    for variables, text in (
        ({"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 1}, "Open MPI's mpirun started one process"),
        ({"PMI_RANK": 0, "PMI_SIZE": 1}, "PMI .* started one process"),
        ({"PET_NNODES": 1, "PET_NPROC_PER_NODE": "auto"}, "no launcher announced others"),
        ({"RANK": 0, "WORLD_SIZE": 1}, "RANK and WORLD_SIZE announced one process"),
        ({"PMIX_RANK": 0, "SLURM_PROCID": 0, "SLURM_NTASKS": 1}, "Slurm's srun started one task"),
    ):
        announce(**variables)
        with Accelerator(cpu=True) as acc:
            assert acc.num_processes == 1
            assert re.search(text, str(acc))


TWO = dict(zip(OMPI, (1, 2, 0, 1)))
URI = "7.0;tcp://192.0.2.2,10.0.0.1:56327;tcp6://[fd00::2]:60173"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TWO, "mpirun announces 2 processes on several machines by .*, and not where rank 0 .*mpirun -x MASTER_ADDR"),
        # rank 0 is not beside mpirun, whose address the others would take
        ({**TWO, "OMPI_COMM_WORLD_RANK": 0, "OMPI_MCA_orte_hnp_uri": URI, "OMPI_MCA_orte_local_daemon_uri": "other"},
         "not where rank 0"),
        ({"RANK": 1}, "RANK=1 is in the environment but WORLD_SIZE is not"),
        ({"WORLD_SIZE": 2}, "WORLD_SIZE=2 is in the environment but RANK is not"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2 and WORLD_SIZE=2 contradict each other: a rank lies in 0 … 1"),
        ({"RANK": "first", "WORLD_SIZE": 2}, "RANK='first'"),
        ({"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 2},
         "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 and WORLD_SIZE=4 "),
        ({"OMPI_COMM_WORLD_SIZE": 2}, "OMPI_COMM_WORLD_SIZE=2 is in the environment but OMPI_COMM_WORLD_RANK is not"),
        ({"PMIX_RANK": 1}, "PMIX_RANK=1 is in the environment, and no variable says how many processes there are"),
        ({"RANK": 0, "WORLD_SIZE": 1, **TWO, "MASTER_ADDR": "a"},
         "WORLD_SIZE=1 announce one .* by .*_RANK=1 and OMPI_COMM_WORLD_SIZE=2"),
        ({"PET_NNODES": 2, "PET_MASTER_ADDR": "a"}, "PET_NNODES=2 is in the environment but PET_NODE_RANK is not"),
        ({"PET_NNODES": 2, "PET_NODE_RANK": 2, "PET_MASTER_ADDR": "a"},
         "PET_NNODES=2 and node rank 2 contradict each other"),
        ({"PET_NNODES": 2, "PET_NODE_RANK": 0}, "PET_NNODES=2 is in the environment but PET_MASTER_ADDR is not"),
        ({"PET_NNODES": "two"}, "PET_NNODES='two' is not a number of nodes"),
        ({"PET_NNODES": "4:1"}, "PET_NNODES='4:1' is not a number of nodes"),
        ({"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE='0' is not a number of processes"),
        # what only a launcher can join
        ({"PET_NPROC_PER_NODE": 4},
         "NODE=4 announce 1 node with 4 processes each, .*: start it with torchrun or `easymp launch`"),
        ({"SKYPILOT_NUM_NODES": 2, "SKYPILOT_NODE_IPS": "a\nb"},
         "SKYPILOT_NUM_NODES=2 is in .* but SKYPILOT_NODE_RANK is not"),
        ({"SKYPILOT_NUM_NODES": 2, "SKYPILOT_NODE_RANK": 0, "SKYPILOT_NODE_IPS": "a"},
         "SKYPILOT_NUM_NODES=2 and 1 lines in"),
        ({"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "a:29400"}, "start it with torchrun or `easymp launch`"),
        ({"RANK": 1, "WORLD_SIZE": 8, "MASTER_ADDR": "a", "PET_NNODES": 2, "PET_NPROC_PER_NODE": 4},
         "2 nodes with 4 processes each"),
    ],
)  # fmt: skip
def test_what_cannot_be_joined_is_refused_by_name(announce, variables, message):
    announce(**variables)
    with pytest.raises((WorldError, SettingError), match=message):
        Accelerator(cpu=True)


def test_a_pod_of_several_accelerators_needs_a_launcher(announce, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for variables in (
        {"PET_NNODES": 2, "PET_NODE_RANK": 0, "PET_MASTER_ADDR": "a", "PET_NPROC_PER_NODE": "gpu"},
        {"SKYPILOT_NUM_NODES": 2, "SKYPILOT_NODE_RANK": 0, "SKYPILOT_NODE_IPS": "a\nb"},
    ):
        announce(**variables)
        with pytest.raises(WorldError, match=r"announce 2 nodes with several .*: start it with torchrun"):
            Accelerator(cpu=True)


def test_launch_that_contradicts_is_refused(announce, tmp_path, capsys):
    (tmp_path / "tell.py").write_text("")
    two_ranks = {"RANK": 0, "WORLD_SIZE": 2}
    for variables, flags, message in (
        ({**two_ranks, "MASTER_ADDR": "a"}, ["--nodes", "1"], "nodes='1' and WORLD_SIZE=2 contradict"),
        (two_ranks, [], "2 nodes must know where to meet: pass --main-address"),
        (TWO, [], "announces 2 processes on several machines by OMPI_COMM_WORLD_SIZE=2"),
        ({"RANK": 1, "WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "x"}, [], "rank 1 of 2, which torchrun"),
    ):
        announce(EASYMP_CPU=1, **variables)
        assert main(["launch", *flags, str(tmp_path / "tell.py")]) == 2
        assert message in capsys.readouterr().err


def train(
    epochs: int = 1, resume: Any = None, after: Any = None, folder: str | None = None, timeout: float = 60
) -> str:
    """A few updates.

    Rank 0's weights as text. The Accelerator is passed to `resume`, and to `after` with the number of each epoch.
    """
    acc = Accelerator(cpu=True, mixed_precision="no", seed=0, project_dir=folder, settings=Settings(timeout=timeout))
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, loader = acc.prepare(model, optimizer, loader)
    if resume:
        resume(acc)
    for epoch in acc.epochs(epochs):
        for inputs, targets in loader:
            acc.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if after:
            after(acc, epoch)
    weights = f"{acc.num_processes} {acc.unwrap_model(model).weight.tolist()}" if acc.is_main_process else ""
    acc.end_training()
    return weights


LACKING = "an optional package is not installed: openmpi-bin (mpirun is not on PATH)"
NO_MPI = "" if shutil.which("mpirun") else LACKING
ON_MPI = pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)


def by_mpirun(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`program` on two processes."""
    clean = {name: value for name, value in os.environ.items() if not announces(name)}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    allowed |= {"PYTHONUNBUFFERED": ""}  # a line is one write, which mpirun does not mix with another rank's
    command = ["mpirun", "--oversubscribe", *options, "-n", "2", sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, env={**clean, **allowed}, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
@ON_MPI
def test_open_mpi(ranks):
    process = by_mpirun("from tests.test_announced import train; print(train())")
    assert process.returncode == 0, process.stderr
    expected, _ = ranks(train)
    assert [line for line in process.stdout.splitlines() if line] == [expected]
    assert expected.startswith("2 ")


@pytest.mark.slow
@ON_MPI
def test_open_mpi_on_two_hosts(tmp_path):
    if subprocess.run("unshare --uts true", shell=True, capture_output=True).returncode:
        pytest.skip("needs hardware: two hosts, or a user who may run unshare --uts in their place")
    agent = tmp_path / "agent"  # in place of ssh: the command runs here, under the other host's name
    agent.write_text('#!/bin/bash\nhost=$1; shift\nexec unshare --uts bash -c "hostname $host; $*"\n')
    agent.chmod(0o755)
    rsh = ("--mca", "plm", "rsh", "--mca", "plm_rsh_agent", str(agent), "--host")
    program = "from tests.test_announced import seat; print(seat())"
    process = by_mpirun(program, *rsh, f"{socket.gethostname()}:1,other-host:1")
    assert process.returncode == 0, process.stderr
    by = "on 2 nodes Open MPI's mpirun"
    assert sorted(process.stdout.splitlines()) == [str((rank, 2, 0, 1.0, by)) for rank in (0, 1)]
    process = by_mpirun(program, *rsh, "host-a:1,host-b:1")  # rank 0 is not beside mpirun
    assert process.returncode != 0
    assert (
        "Open MPI's mpirun announces 2 processes on several machines by OMPI_COMM_WORLD_SIZE=2 and "
        "OMPI_COMM_WORLD_LOCAL_SIZE=1, and not where rank 0 runs: export its address" in process.stderr
    )
