"""Where launchers meet, under Slurm's variables and others'. test_slurm_real has a Slurm."""

from __future__ import annotations

import pytest

from easymp import SettingError
from easymp.launcher.rendezvous import find_nodes

from .test_slurm import BATCH, STEP, TASK
from .test_slurm import slurm as slurm

NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(NAMES, (1, 2, 1, 2))}
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
