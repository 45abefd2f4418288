"""Launching under Slurm, without one: the batch script's text, how it is handed in, where launchers meet. test_slurm_real has a Slurm."""

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


def lines(text: str) -> list[str]:
    """The options of a script."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.fixture
def train(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


def printed(capsys, *words: str) -> tuple[list[str], list[str]]:
    """The options of the script that is printed, and the words of its srun."""
    assert main(["launch", *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    (srun,) = [line for line in text.splitlines() if line.startswith("srun ")]
    return lines(text), shlex.split(srun)


def test_script(train, capsys):
    words = ["--processes", "4", "--nodes", "2", train, "--name", "it's $HOME"]
    options, srun = printed(capsys, "--slurm", "print --time=1:00", *words)
    assert options == [
        "--job-name=train", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--gpus-per-node=4", "--output=%x-%j.out",
        "--open-mode=append", "--signal=USR1@60", "--requeue", "--time=1:00",
    ]  # fmt: skip
    at = srun.index("easymp")
    assert srun[at - 2 :] == [sys.executable, "-m", "easymp", "launch", *words]


@pytest.mark.parametrize(
    ("asked", "there", "gone"),
    [
        ("print -N 3 -J x -c 8", ["-N 3"], ["--nodes", "--job-name", "--cpus-per-task"]),
        ("-N3", ["-N3"], ["--nodes"]),
        ("--nodes 3 --exclusive", ["--nodes 3", "--exclusive"], ["--nodes=1"]),
        ("--gres=gpu:a100:2", ["--gres=gpu:a100:2"], ["--gpus"]),
        ("-G 2", ["-G 2"], ["--gpus"]),
        ("--cpus-per-gpu=6", ["--gpus-per-node=2"], ["--cpus-per-task"]),
        ("--signal=USR1@300", ["--signal=USR1@300"], ["--signal=USR1@60"]),
        ("--no-requeue", ["--no-requeue"], ["--requeue"]),
        ("print --comment='two words' -C 'a&b|c'", ['"--comment=two words"', "-C a&b|c"], []),
        ("--job-name='a \"b\" #c \\'", [r'"--job-name=a \"b\" #c \\"'], ["--job-name=train"]),
    ],
)
def test_slurm_s_own_options_go_before_ours(train, capsys, asked, there, gone):
    found, _ = printed(capsys, f"--slurm={asked}", "--processes", "2", train)
    assert set(there) <= set(found)
    assert not [line for line in found for name in gone if line.startswith(name)]


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (75, True), (143, False)])
def test_a_run_that_saved_itself_goes_back_into_the_queue(train, tmp_path, capsys, code, requeued):
    (tmp_path / "srun").write_text(f'#!/bin/sh\necho "srun $1"\nexit {code}\n')
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "scontrol $*"\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    assert main(["launch", "--slurm", "print", "--processes", "1", train]) == 0
    words = ["/bin/bash", "-c", capsys.readouterr().out]
    variables = {"PATH": str(tmp_path), "SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "4"}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.splitlines() == ["srun --cpus-per-task=4", *["scontrol requeue 17"] * requeued]


NASTY = [
    "$(touch pwned).py", "`touch pwned`.py", "it's.py", 'a"b;touch pwned;".py', "a b #c.py", "a\\.py", "*.py", "!x&&y|z>.py", "${HOME}é.py",
]  # fmt: skip


@pytest.mark.parametrize("script", NASTY)
def test_what_stands_in_the_batch_script_is_handed_on_as_it_is(tmp_path, monkeypatch, capsys, script):
    monkeypatch.chdir(tmp_path)
    Path(script).write_text("")
    words = [*NASTY, "two\nlines\ntouch pwned", ""]
    asked = "print -p 'a;touch pwned' --comment='$(touch pwned) \"'"
    assert main(["launch", "--slurm", asked, "--processes", "2", script, *words]) == 0
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    srun.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash"],
        input=capsys.readouterr().out,
        env={"PATH": f"{srun.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\0")[-len(words) - 2 : -1] == [script, *words]
    assert done.stderr == "" and not Path("pwned").exists()


def test_what_cannot_stand_in_the_batch_script_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = "a\ntouch pwned\n.py"
    Path(script).write_text("")
    asked = ["launch", "--processes", "2", "--slurm"]
    assert main([*asked, "print", script]) == 1
    assert r"name 'a\ntouch pwned\n' cannot be the job's name in a batch script" in capsys.readouterr().err
    assert main([*asked, "print --job-name=x", script]) == 0  # only srun's command has it then, quoted
    assert [line for line in lines(capsys.readouterr().out) if "touch" in line] == []
    Path("train.py").write_text("")
    assert main([*asked, "print", "--nodes", "1\ntouch pwned", "train.py"]) == 1
    assert "is not a number of nodes" in capsys.readouterr().err


def test_submitting_is_sbatch_s(train, tmp_path, monkeypatch, capfd):
    words = ["launch", "--slurm", "submit", "--processes", "1", train]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(words) == 1
    assert "sbatch is not on PATH: run this on the cluster's login node" in capfd.readouterr().err
    program = Path(tmp_path / "sbatch")
    program.write_text("#!/bin/sh\nread line\necho got $line\nexit 3\n")
    program.chmod(0o755)
    assert main(words) == 3
    assert capfd.readouterr().out == "got #!/bin/bash\n"


# -- where launchers meet ----------------------------------------------------------------------------------------------

MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), (1, 2, 1, 2))
}
ONE_A_NODE = {**STEP, "SLURM_TASKS_PER_NODE": "1(x8)", "SLURM_NODEID": 5, "SLURM_LOCALID": 0}


def met(nodes=None, node_rank=None, address=None, port=None) -> tuple:
    found, variables = find_nodes(nodes, node_rank, address, port, 600.0)
    return found.nodes, found.most, found.node_rank, found.address, found.port, variables


NO_SLURM = dict.fromkeys(TASK)
ALONE = (1, None, None, "127.0.0.1", None, {})
SECOND = {"EASYMP_LAUNCHER": "1 of 2"}


@pytest.mark.parametrize(
    ("changes", "said", "place"),
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
        (
            {**STEP, "SLURM_TASKS_PER_NODE": "4(x2)"},
            {},
            (8, None, 5, "n007", 15345, {"EASYMP_LAUNCHER": "1 of 4"}),
        ),
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
def test_each_task_s_launcher_counts_as_a_node(slurm, changes, said, place):
    slurm(**changes)
    assert met(**said) == place


def test_what_does_not_fit_is_said(slurm):
    slurm(**BATCH, SLURM_JOB_NUM_NODES=2)
    with pytest.raises(SettingError, match=r"Slurm's job has 2 nodes, .* on the first one only: write srun"):
        met()
    slurm(**ONE_A_NODE)
    with pytest.raises(
        SettingError, match="nodes='2' and SLURM_STEP_NUM_TASKS=8 contradict each other: leave --nodes out"
    ):
        met("2")
    with pytest.raises(SettingError, match="nodes='1' and"):  # not eight trainings
        met("1")


# -- the command -------------------------------------------------------------------------------------------------------


def test_command(train, capsys, monkeypatch):
    words = ["--processes", "2", "--nodes", "3", "--grace", "90"]
    options, told = printed(capsys, "--slurm", "print -p gpu", *words, train, "--lr", "1")
    wanted = {"--job-name=train", "--nodes=3", "--gpus-per-node=2", "--signal=USR1@120", "-p gpu"}
    assert wanted <= set(options)
    asked = told[told.index("launch") + 1 :]
    assert asked == ["--processes", "2", "--nodes", "3", "--grace", "90.0", train, "--lr", "1"]
    monkeypatch.setenv("EASYMP_CPU", "1")
    options, told = printed(capsys, "--slurm=", "--processes", "2", "--no-numa", "-m", "pkg.train")
    assert {"--job-name=train", "--nodes=1", "--cpus-per-task=2"} <= set(options)
    assert told[told.index("launch") + 1 :] == ["--processes", "2", "--no-numa", "-m", "pkg.train"]


def test_command_takes_the_project_s_word(train, capsys, tmp_path):
    (tmp_path / "easymp.toml").write_text('cpu = true\n[launch]\nprocesses = 3\nnodes = "2"\n')
    options, told = printed(capsys, "--slurm", "print", train)
    assert {"--nodes=2", "--cpus-per-task=3"} <= set(options)
    assert not [option for option in options if "gpu" in option]
    assert told[told.index("launch") + 1 :] == ["--processes", "3", train]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["print", "nowhere.py"], "'nowhere.py' is not a file"),
        (["print", "train.py"], "say how many processes each is to run"),
        (["print", "--node-rank", "1", "train.py"], "--node-rank 1 is for one node"),
        (["prnt", "train.py"], "it takes print or submit"),
    ],
)
def test_command_that_cannot_be(train, capsys, words, said):
    assert main(["launch", "--slurm", *words]) == 1
    assert said in capsys.readouterr().err
