"""Launching under Slurm, without one: the batch script's text, how it is handed in, where launchers meet. test_slurm_real has a Slurm."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from easymp.errors import SettingError
from easymp.launcher.slurm import Asked, asked, batch_script, beside, place, submit

from .test_slurm import BATCH, STEP, TASK
from .test_slurm import slurm as slurm

# -- what is asked for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "action", "options"),
    [
        ("print", "print", []),
        ("submit", "submit", []),
        ("", "print", []),
        ("--partition=gpu --time=2:00:00", "print", ["--partition=gpu", "--time=2:00:00"]),
        ("submit -p gpu --time 2:00:00 --exclusive", "submit", ["-p gpu", "--time 2:00:00", "--exclusive"]),
        ("print --comment='two words' -C 'a&b|c'", "print", ['"--comment=two words"', "-C a&b|c"]),
        ("""print --comment='a "b" #c \\'""", "print", [r'"--comment=a \"b\" #c \\"']),
    ],
)
def test_asked(text, action, options):
    assert asked(text) == Asked(action, options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run", "it takes print or submit, and then options of sbatch"),
        ("submit gpu", "'gpu' is no option of sbatch, which start with a dash"),
        ("submit --comment='a", "No closing quotation"),
        ("submit --comment=a\nrm", "it takes print or submit"),
    ],
)
def test_asked_for_something_else(text, words):
    with pytest.raises(SettingError, match=words) as caught:
        asked(text)
    assert f"--slurm {text!r}" in str(caught.value)


# -- the script --------------------------------------------------------------------------------------------------------


def lines(text: str) -> list[str]:
    """The options of a script."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_script():
    text = batch_script(
        "train", ["--processes", "4", "train.py", "--name", "it's $HOME"], ["--time=1:00"], processes=4, nodes="2"
    )
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert lines(text) == [
        "--job-name=train", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--gpus-per-node=4", "--output=%x-%j.out",
        "--open-mode=append", "--signal=USR1@60", "--requeue", "--time=1:00",
    ]  # fmt: skip
    (srun,) = [line for line in text.splitlines() if line.startswith("srun ")]
    words = shlex.split(srun)
    assert words[-5:] == ["--processes", "4", "train.py", "--name", "it's $HOME"]
    assert words[words.index("easymp") - 2 : words.index("easymp") + 2] == [sys.executable, "-m", "easymp", "launch"]


@pytest.mark.parametrize(
    ("options", "given", "there", "gone"),
    [
        ({"gpus": False}, [], ["--cpus-per-task=2"], ["--gpus"]),
        ({"nodes": "1:4"}, [], ["--nodes=1-4"], []),
        ({}, ["-N 3", "-J x", "-o y.out", "-c 8"], ["-N 3"], ["--nodes", "--job-name", "--output", "--cpus-per-task"]),
        ({}, ["-N3"], ["-N3"], ["--nodes"]),
        ({}, ["--nodes 3"], ["--nodes 3"], ["--nodes=1"]),
        ({}, ["--gres=gpu:a100:2"], ["--gres=gpu:a100:2"], ["--gpus"]),
        ({}, ["-G 2"], ["-G 2"], ["--gpus"]),
        ({}, ["--cpus-per-gpu=6"], ["--gpus-per-node=2"], ["--cpus-per-task"]),
        ({}, ["--signal=USR1@300", "--no-requeue"], ["--signal=USR1@300", "--no-requeue"], ["--signal=USR1@60", "--requeue"]),
        ({}, ['"--job-name=a b"'], ['"--job-name=a b"'], ["--job-name=train"]),
    ],
)
def test_slurm_s_own_options_go_before_ours(options, given, there, gone):
    found = lines(batch_script("train", ["train.py"], given, processes=2, **options))
    assert set(there) <= set(found)
    assert not [line for line in found for name in gone if line.startswith(name)]


def test_a_script_must_know_the_processes_and_the_nodes_once():
    with pytest.raises(SettingError, match=r"need not be like this machine: say how many processes .* with --processes N"):
        batch_script("train", ["train.py"], processes=None)
    with pytest.raises(SettingError, match="nodes are given twice, as --nodes 2 and among Slurm's options"):
        batch_script("train", ["train.py"], ["-N 4"], processes=1, nodes="2")


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (75, True), (143, False)])
def test_a_run_that_saved_itself_goes_back_into_the_queue(tmp_path, code, requeued):
    (tmp_path / "srun").write_text(f'#!/bin/sh\necho "srun $1"\nexit {code}\n')
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "scontrol $*"\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", "-c", batch_script("train", ["train.py"], processes=1)],
        env={"PATH": str(tmp_path), "SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert done.stdout.splitlines() == ["srun --cpus-per-task=4", *["scontrol requeue 17"] * requeued]


def test_submitting_is_sbatch_s(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingError, match="sbatch is not on PATH: run this on the cluster's login node"):
        submit("text")
    program = Path(tmp_path / "sbatch")
    program.write_text("#!/bin/sh\nread line\necho got $line\nexit 3\n")
    program.chmod(0o755)
    assert submit("the script\n") == 3
    assert capfd.readouterr().out == "got the script\n"


# -- where launchers meet ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "nodes", "rank", "variables"),
    [
        ({**STEP, "SLURM_TASKS_PER_NODE": "1(x8)", "SLURM_NODEID": 5, "SLURM_LOCALID": 0}, 8, 5, {}),
        ({**STEP, "SLURM_TASKS_PER_NODE": "4(x2)"}, 8, 5, {"EASYMP_LAUNCHER": "1 of 4"}),
    ],
)
def test_each_task_s_launcher_counts_as_a_node(slurm, changes, nodes, rank, variables):
    slurm(**changes)
    found = place()
    assert (found.nodes, found.node_rank, found.address, found.port) == (nodes, rank, "n007", 15345)
    assert beside() == variables


@pytest.mark.parametrize(
    "changes", [dict.fromkeys(TASK), {"SLURM_PROCID": 0, "SLURM_NTASKS": 1}, BATCH, {**BATCH, "SLURM_JOB_NUM_NODES": 1}]
)
def test_a_launcher_that_is_alone(slurm, changes):
    slurm(**changes)
    assert place() is None
    assert beside() == {}


def test_a_batch_script_that_forgets_srun_would_leave_nodes_idle(slurm):
    slurm(**BATCH, SLURM_JOB_NUM_NODES=2)
    with pytest.raises(
        SettingError, match="Slurm's job has 2 nodes, and its batch script runs on the first one only: write srun"
    ):
        place()
