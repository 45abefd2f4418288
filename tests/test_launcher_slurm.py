"""Launching under Slurm, without one.

The batch script's text, how it is handed in, where launchers meet. test_slurm_real has a Slurm.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from easymp import SettingError
from easymp.cli import main
from easymp.launcher.rendezvous import find_nodes

from .test_slurm import BATCH, STEP, TASK
from .test_slurm import slurm as slurm

# -- the script --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")


def program(name: str, text: str) -> None:
    Path(name).write_text(f"#!/bin/sh\n{text}\n")
    Path(name).chmod(0o755)


@pytest.fixture
def script(capsys):
    """The batch script for `easymp launch --slurm ASKED WORDS`, and its options."""

    def printed(slurm, *arguments):
        assert main(["launch", f"--slurm={slurm}", *arguments]) == 0
        text = capsys.readouterr().out
        assert text.startswith("#!/bin/bash\n#SBATCH ")
        options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
        return text, options

    return printed


def asked_of_launch(text: str) -> list[str]:
    """What follows `launch` in the script's srun."""
    (srun,) = [line for line in text.splitlines() if line.startswith("srun ")]
    before, after = srun.split(" launch ", 1)
    assert shlex.split(before)[-3:] == [sys.executable, "-m", "easymp"]
    return shlex.split(after)


def test_script(script):
    arguments = ["--processes", "4", "--nodes", "2", "--grace", "90.0", "train.py", "--name", "it's $HOME"]
    text, options = script("print --time=1:00", *arguments)
    assert options == [
        "--job-name=train", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--gpus-per-node=4",
        "--output=%x-%j.out",
        "--open-mode=append", "--signal=USR1@120", "--requeue", "--time=1:00",
    ]  # fmt: skip
    assert asked_of_launch(text) == arguments


def test_script_of_a_module_on_cpus_and_of_a_project_file(script, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("EASYMP_CPU", "1")
        arguments = ["--processes", "2", "--no-numa", "-m", "pkg.train"]
        text, options = script("", *arguments)
        assert {"--job-name=train", "--nodes=1", "--cpus-per-task=2"} <= set(options)
        assert asked_of_launch(text) == arguments
    Path("easymp.toml").write_text('cpu = true\n[launch]\nprocesses = 3\nnodes = "2"\n')
    text, options = script("print", "train.py")
    assert {"--nodes=2", "--cpus-per-task=3"} <= set(options)
    assert not [option for option in options if "gpu" in option]
    assert asked_of_launch(text) == ["--processes", "3", "train.py"]


@pytest.mark.parametrize(
    ("options", "replaced"),
    [
        ("-N 3 -J x -c 8", ""),  # sbatch takes the last of equal options
        ("--nodes 3 --exclusive", "--nodes"),
        ("--gres=gpu:a100:2", "--gpus-per-node"),
        ("-G2", "--gpus-per-node"),
        ("--cpus-per-gpu=6", "--cpus-per-task"),
        ("--signal=USR1@300", "--signal"),
        ("--comment='two words' -C 'a&b|c'", ""),
        ("--job-name='a #c'", "--job-name"),
    ],
)
def test_slurm_s_own_options_win_over_ours(script, options, replaced):
    defaults = script("print", "--processes", "2", "train.py")[1]
    expected = [line for line in defaults if line.split("=")[0] != replaced]
    assert script(f"print {options}", "--processes", "2", "train.py")[1] == [*expected, options]
    assert script(options, "--processes", "2", "train.py")[1] == [*expected, options]


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (75, True), (143, False)])
def test_a_run_that_saved_itself_goes_back_into_the_queue(script, tmp_path, code, requeued):
    program("srun", f'echo "srun $1"\nexit {code}')
    program("scontrol", 'echo "scontrol $*"')
    command = ["/bin/bash", "-c", script("print", "--processes", "1", "train.py")[0]]
    variables = {"PATH": str(tmp_path), "SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "4"}
    process = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert process.returncode == code
    assert process.stdout.splitlines() == ["srun --cpus-per-task=4", *["scontrol requeue 17"] * requeued]


NASTY = [
    "$(touch pwned).py", "`touch pwned`.py", "it's.py", 'a"b;touch pwned;".py', "a b #c.py", "a\\.py", "*.py",
    "!x&&y|z>.py", "${HOME}é.py",
]  # fmt: skip


@pytest.mark.parametrize("name", [*NASTY, "a\ntouch pwned\n.py"])
def test_what_stands_in_the_batch_script_is_handed_on_as_it_is(script, tmp_path, name):
    Path(name).write_text("")
    arguments = [name, *NASTY, "two\nlines\ntouch pwned", ""]
    slurm = "print -p 'a;touch pwned' --comment='$(touch pwned) \"'" + " --job-name=x" * ("\n" in name)
    text, _ = script(slurm, "--processes", "2", *arguments)
    Path("bin").mkdir()
    program("bin/srun", 'printf "%s\\0" "$@"')
    options = {"env": {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, "capture_output": True, "text": True, "check": True}
    process = subprocess.run(["/bin/bash"], input=text, **options)
    assert process.stdout.split("\0")[-len(arguments) - 1 : -1] == arguments
    assert process.stderr == "" and not Path("pwned").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["print", "a\ntouch pwned\n.py"], r"name 'a\ntouch pwned\n' cannot be the job's name in a batch script"),
        (["print", "--nodes", "1\ntouch pwned", "train.py"], "is not a number of nodes"),
        (["print", "nowhere.py"], "'nowhere.py' is not a file"),
        (["print", "train.py"], "say how many processes each is to run"),
        (["print", "--node-rank", "1", "train.py"], "--node-rank 1 is for one node"),
        (["prnt", "train.py"], "it takes print or submit"),
        (["submit", "train.py"], "sbatch is not on PATH: run this on the cluster's login node"),
    ],
)
def test_what_is_refused(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("a\ntouch pwned\n.py").write_text("")
    processes = [] if "how many" in message else ["--processes", "2"]
    assert main(["launch", *processes, "--slurm", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_submitting_is_sbatch_s(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    program("sbatch", "read line\necho got $line\nexit 3")
    assert main(["launch", "--slurm", "submit", "--processes", "1", "train.py"]) == 3
    assert capfd.readouterr().out == "got #!/bin/bash\n"


# -- where launchers meet ----------------------------------------------------------------------------------------------

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
