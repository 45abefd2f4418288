"""Ranks and launchers by Slurm's variables, those of Slurm 22.05; test_slurm_real.py has a Slurm."""

from __future__ import annotations

import os

import pytest

from easymp import Accelerator, EasympWarning, SettingError, Settings, WorldError
from easymp.base import env
from easymp.base.ranks import hosts
from easymp.distributed import Ranks, read_ranks
from easymp.launcher.rendezvous import find_nodes

from .test_announced import OMPI
from .test_announced import announce as announce

# Rank 5 of 8, on the second of two nodes.
TASK = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "n[007-008]",
    "SLURM_JOB_ID": "120345", "SLURM_JOB_NAME": "train",
}  # fmt: skip
SIZES = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")  # of a job, and of a step of it
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}  # what srun adds in a real one
# before its srun
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "ENVIRONMENT": "BATCH"}


@pytest.fixture
def slurm(announce):
    """Sets the variables of a task and these (None removes one), and no other of a launcher."""

    def set_variables(**changes: object) -> None:
        announce(**{name: value for name, value in {**TASK, **changes}.items() if value is not None})

    return set_variables


@pytest.mark.parametrize(
    ("changes", "task"),
    [
        ({}, (5, 8, 1, 4, "n007", 15345)),
        ({**STEP, "SLURM_TASKS_PER_NODE": "4(x2)"}, (5, 8, 1, 4, "n007", 15345)),
        ({"SLURM_TASKS_PER_NODE": "3,5"}, (5, 8, 1, 5, "n007", 15345)),
        ({"SLURM_TASKS_PER_NODE": "2(x3),2", "SLURM_NODEID": 3}, (5, 8, 1, 2, "n007", 15345)),
        ({"SLURM_NTASKS_PER_NODE": 4}, (5, 8, 1, 4, "n007", 15345)),
        # a step on some of the job's nodes
        ({**STEP, "SLURM_NTASKS": 99, "SLURM_STEP_NODELIST": "n008", "SLURM_STEP_TASKS_PER_NODE": "8",
          "SLURM_NODEID": 0, "SLURM_TASKS_PER_NODE": "1"}, (5, 8, 1, 8, "n008", 15345)),
        # one's own place to meet, or half of one
        ({"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": 4000}, (5, 8, 1, 4, "10.1.1.1", 4000)),
        ({"MASTER_ADDR": "10.1.1.1"}, (5, 8, 1, 4, "10.1.1.1", 15345)),
        ({"MASTER_PORT": 4000}, (5, 8, 1, 4, "n007", 4000)),
        ({"MASTER_ADDR": "10.1.1.1", "SLURM_JOB_NODELIST": None, "SLURM_TASKS_PER_NODE": "4(x2)"},
         (5, 8, 1, 4, "10.1.1.1", 15345)),
        ({"MASTER_PORT": 4000, "SLURM_JOB_ID": None}, (5, 8, 1, 4, "n007", 4000)),
        # the last four digits of the job's number
        ({"SLURM_JOB_ID": 7}, (5, 8, 1, 4, "n007", 15007)),
        ({"SLURM_JOB_ID": 19999}, (5, 8, 1, 4, "n007", 24999)),
        # `srun bash run.sh`, and srun in an allocation of salloc: several tasks, none at a terminal
        ({**STEP, "SLURM_JOB_NAME": "bash"}, (5, 8, 1, 4, "n007", 15345)),
        ({**STEP, "SLURM_JOB_NAME": "interactive"}, (5, 8, 1, 4, "n007", 15345)),
        # srun in a batch script
        ({**STEP, "ENVIRONMENT": "BATCH"}, (5, 8, 1, 4, "n007", 15345)),
    ],
)  # fmt: skip
def test_task(slurm, changes, task):
    slurm(**changes)
    assert read_ranks() == Ranks(*task[:4], "Slurm's srun", meeting=task[4:])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict.fromkeys(TASK), ""),
        ({"SLURM_PROCID": None}, "srun did not start this process"),  # a shell of salloc
        ({"SLURM_JOB_NAME": "bash"}, "Slurm's job is interactive, by its name 'bash'"),
        ({"SLURM_JOB_NAME": "interactive"}, "Slurm's job is interactive, by its name 'interactive'"),
        *(({"SLURM_PROCID": 0, name: 1}, "Slurm's srun started one task") for name in SIZES),
        ({**BATCH, "SLURM_NTASKS": 1}, "this is Slurm's batch script, before any srun"),
        ({**BATCH, "SLURM_NTASKS": None}, "this is Slurm's batch script, before any srun"),
    ],
)
def test_no_task(slurm, changes, reason):
    slurm(**changes)
    assert read_ranks() == Ranks(
        single_reason=f"no launcher announced others: {reason}" if reason else Ranks().single_reason
    )


def test_a_shell_and_a_batch_script_that_forgets_srun_are_no_tasks(slurm, monkeypatch):
    """`srun -n 8 --pty bash`, and then python: the other seven never come."""
    slurm(**BATCH)
    with pytest.warns(EasympWarning, match="one process trains, of the 8 tasks of Slurm's job.*with srun"):
        assert read_ranks().size == 1
    slurm(**STEP, SLURM_JOB_NAME="bash", SLURM_PROCID=0)
    monkeypatch.setattr(os, "isatty", lambda number: number == 0)
    assert read_ranks().size == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_NTASKS": None}, "SLURM_NTASKS is not"),
        ({"SLURM_NTASKS": 5}, "SLURM_PROCID=5 and SLURM_NTASKS=5 contradict each other"),
        ({"SLURM_STEP_NUM_TASKS": 5}, "SLURM_PROCID=5 and SLURM_STEP_NUM_TASKS=5 contradict each other"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not"),
        ({"SLURM_JOB_NODELIST": None}, "SLURM_JOB_NODELIST=None does not say where .* or export MASTER_ADDR"),
        ({"SLURM_JOB_NODELIST": "n[1"}, r"'n\[1' is not a list of hosts"),
        ({"SLURM_JOB_ID": None}, "SLURM_JOB_ID=None does not say where .* or export MASTER_PORT"),
        ({"SLURM_JOB_ID": "12_3"}, "SLURM_JOB_ID='12_3' does not say"),
        ({"SLURM_TASKS_PER_NODE": "4(x"}, r"SLURM_TASKS_PER_NODE=4\(x contradict"),
        ({"SLURM_TASKS_PER_NODE": "4"}, "SLURM_LOCALID=1 and SLURM_TASKS_PER_NODE=4 contradict"),
        ({"SLURM_TASKS_PER_NODE": "7,1"}, "SLURM_TASKS_PER_NODE=7,1 contradict"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, "SLURM_STEP_TASKS_PER_NODE=4 contradict"),
    ],
)
def test_contradictions(slurm, changes, message):
    slurm(**changes)
    with pytest.raises(WorldError, match=message):
        read_ranks()


def join_as_first_task() -> None:
    """A rank of the pool as the first of three tasks; they meet at the pool's place, as at one's own."""
    task = {**TASK, **STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    task |= {"SLURM_TASKS_PER_NODE": "3", "SLURM_STEP_NUM_TASKS": "3"}
    with env.override(RANK=None, WORLD_SIZE=None, LOCAL_RANK=None, LOCAL_WORLD_SIZE=None, **task):
        Accelerator(cpu=True, settings=Settings(timeout=0.5))


def test_a_task_that_never_comes_is_named(ranks):
    (failure,) = ranks.fails(join_as_first_task, processes=1)
    assert "Slurm's srun announced 3 tasks, but rank 1, 2 did not arrive within 0.5 s" in failure.message
    assert "RANK" not in failure.message


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n5", "n5"),
        ("n[5-9,12]", "n5 n6 n7 n8 n9 n12"),
        ("n[007-010]", "n007 n008 n009 n010"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[3]", "n3"),
        ("b,a", "b a"),
        ("login,n[1-2],gpu-[08,10].local", "login n1 n2 gpu-08.local gpu-10.local"),
        ("rack[1-2]-n[01-02]", "rack1-n01 rack1-n02 rack2-n01 rack2-n02"),
        ("r[1-2][5,7]x,c", "r15x r17x r25x r27x c"),
        ("[10-11]", "10 11"),
        ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
        ("n[1-2,4-5],n7", "n1 n2 n4 n5 n7"),
    ],
)
def test_hosts(text, names):
    assert hosts(text) == names.split()


@pytest.mark.parametrize(
    "text", ["", "n[1-2", "n1]", "n[1-[2-3]]", "a,,b", "a b", "n[]", "n[a-b]", "n[1-2-3]", "n[1,]", "n[9-5]"]
)
def test_what_is_no_list_is_quoted(text):
    with pytest.raises(WorldError, match="is not a list of hosts") as caught:
        hosts(text)
    assert repr(text) in str(caught.value)


# -- where the launchers of tasks meet ---------------------------------------------------------------------------------

MPI = dict(zip(OMPI, (1, 2, 1, 2)))
ONE_A_NODE = {**STEP, "SLURM_TASKS_PER_NODE": "1(x8)", "SLURM_NODEID": 5, "SLURM_LOCALID": 0}
FOUR_A_NODE = {**STEP, "SLURM_TASKS_PER_NODE": "4(x2)"}
NO_SLURM = dict.fromkeys(TASK)
ALONE = (1, None, None, "127.0.0.1", None, {})
SECOND = {"EASYMP_LAUNCHER": "1 of 2"}


def met(nodes=None, node_rank=None, address=None, port=None) -> tuple:
    config, variables = find_nodes(nodes, node_rank, address, port, 600.0)
    return config.nodes, config.max_nodes, config.node_rank, config.address, config.port, variables


@pytest.mark.parametrize(
    ("changes", "flags", "expected"),
    [
        (ONE_A_NODE, {}, (8, None, 5, "n007", 15345, {})),
        (ONE_A_NODE, {"nodes": "8"}, (8, None, 5, "n007", 15345, {})),
        (ONE_A_NODE, {"nodes": "2:9"}, (2, 9, 5, "n007", 15345, {})),
        # what is said goes before what Slurm says
        (ONE_A_NODE, {"node_rank": 3}, (8, None, 3, "n007", 15345, {})),
        (ONE_A_NODE, {"port": 4000}, (8, None, 5, "n007", 4000, {})),
        (ONE_A_NODE, {"address": "10.1.1.1"}, (8, None, 5, "10.1.1.1", 15345, {})),
        (ONE_A_NODE, {"address": "10.1.1.1:4000"}, (8, None, 5, "10.1.1.1", 4000, {})),
        # several tasks on a machine
        (FOUR_A_NODE, {}, (8, None, 5, "n007", 15345, {"EASYMP_LAUNCHER": "1 of 4"})),
        # launchers that mpirun started on one machine, and in batch jobs, where its daemons are srun's tasks
        ({**NO_SLURM, **MPI}, {"port": 4000}, (2, None, 1, "127.0.0.1", 4000, SECOND)),
        ({**ONE_A_NODE, **MPI, "MASTER_PORT": 4000}, {}, (2, None, 1, "127.0.0.1", 4000, SECOND)),
        # pods
        ({**NO_SLURM, "PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "pod-0:7"}, {}, (1, 4, None, "pod-0", 7, {})),
        ({**NO_SLURM, "PET_NPROC_PER_NODE": 4}, {}, ALONE),
        # alone
        (NO_SLURM, {}, ALONE),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 1}, {}, ALONE),
        (BATCH, {}, ALONE),
        ({**BATCH, "SLURM_JOB_NUM_NODES": 2}, {"nodes": "1"}, ALONE),
    ],
)
def test_each_task_s_launcher_counts_as_a_node(slurm, changes, flags, expected):
    slurm(**changes)
    assert met(**flags) == expected


@pytest.mark.parametrize(
    ("changes", "nodes", "message"),
    [
        (BATCH | {"SLURM_JOB_NUM_NODES": 2}, None, "job has 2 nodes, .* on the first one only: write srun"),
        (ONE_A_NODE, "2", "nodes='2' and SLURM_STEP_NUM_TASKS=8 contradict each other: leave --nodes out"),
        (ONE_A_NODE, "1", "nodes='1' and"),  # not eight trainings
    ],
)
def test_what_does_not_fit_is_said(slurm, changes, nodes, message):
    slurm(**changes)
    with pytest.raises(SettingError, match=message):
        met(nodes)
