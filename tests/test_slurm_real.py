"""A real Slurm on the loopback, with two nodes.

Ranks by srun, launchers by sbatch, and a run that is warned and resumes by itself.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from .cluster import missing, running
from .docs.blocks import blocks
from .site import PATH

ROOT = str(Path(__file__).resolve().parent.parent)
LAUNCH = (sys.executable, "-m", "easymp", "launch")
VARIABLES = {"PYTHONPATH": PATH, "EASYMP_CPU": "1", "OMP_NUM_THREADS": "1"}
STEPS = 40
TRAIN = f"""
import os, signal, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from easymp import Accelerator

acc = Accelerator(seed=0, project_dir=sys.argv[1])
x = torch.randn({STEPS * 8}, 4, generator=torch.Generator().manual_seed(1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True, num_workers=1)
model, optimizer, loader = acc.prepare(model, optimizer, loader)
heard = []
signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
resumed = acc.resume()
ranks = open(sys.argv[1] + ".ranks", "a")
ranks.write(f"rank {{acc.process_index}} of {{acc.num_processes}}\\n")
log = open(sys.argv[1] + ".log", "a")
for _ in acc.epochs(1):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        loss = acc.reduce(loss.detach(), "mean").item()
        if acc.is_main_process:
            log.write(f"{{optimizer.updates}} {{loss!r}}\\n")
            log.flush()
        while sys.argv[2] == "wait" and not resumed and optimizer.updates == 15 and not heard:
            time.sleep(0.05)
acc.end_training()
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture(scope="module")
def cluster():
    with running(**VARIABLES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "train.py").write_text(TRAIN)
    return folder


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture(scope="module")
def losses(cluster, folder) -> list[str]:
    """Those of two tasks of one node, without a launcher."""
    cluster.run("srun", "-N", "1", "-n", "2", sys.executable, "train.py", "plain", "go on", cwd=folder)
    assert sorted(lines(folder / "plain.ranks")) == ["rank 0 of 2", "rank 1 of 2"]
    return lines(folder / "plain.log")


def test_tasks_of_srun_are_ranks(losses):
    assert [int(line.split()[0]) for line in losses] == list(range(1, STEPS + 1))


def test_a_script_that_asks_slurm_itself(cluster, folder):
    """examples/approaches/with_slurm.py: ranks by variables, and where to meet by scontrol."""
    command = [sys.executable, f"{ROOT}/examples/approaches/with_slurm.py", "--epochs", "1"]
    output = cluster.run("srun", "-N", "2", "--ntasks-per-node=1", *command, cwd=folder)
    assert output.count("test accuracy  9") == 1


def test_a_job_that_is_warned_saves_itself_and_resumes(cluster, folder, losses):
    """The batch script of docs/recipes/slurm.md, one task on each of two nodes."""
    log = folder / "job.log"
    page = Path(ROOT, "docs/recipes/slurm.md").read_text(encoding="utf-8")
    script = next(block.code for block in blocks("slurm.md", page) if block.title == "job.sh")
    command = f"{shlex.join(LAUNCH)} train.py job wait"
    (folder / "job.sh").write_text(script.replace("easymp launch train.py", command))
    job = cluster.run("sbatch", "--nodes=2", "job.sh", cwd=folder).split()[-1]
    cluster.until(lambda: len(lines(log)) > 10, "ten steps are done")
    # What --signal has Slurm do when the time is up: to all tasks, not to the script. They wait for it.
    cluster.run("scancel", "--signal=USR1", job)
    cluster.until_state(job, "PENDING")
    # Slurm would give it two minutes' rest, lest a node takes the new start for the old one; it counts in seconds
    time.sleep(2)
    cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now")
    cluster.until_state(job, "COMPLETED")
    assert sorted(lines(folder / "job.ranks")) == ["rank 0 of 2"] * 2 + ["rank 1 of 2"] * 2
    assert lines(log) == losses  # bit for bit, as if nothing had been
    output = (folder / f"train-{job}.out").read_text()
    assert re.search(r"the ranks saved \S*/checkpoints/step-\d+ and can be started again", output)
    assert "Traceback" not in output


def test_launchers_of_several_tasks_on_one_node_share_its_local_ranks(cluster, folder):
    names = "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')"
    (folder / "tell.py").write_text(f"import os\nprint(*(os.environ[n] for n in {names}))\n")
    output = cluster.run("srun", "-N", "1", "-n", "2", *LAUNCH, "tell.py", cwd=folder)
    assert sorted(output.splitlines()) == ["0 2 0 2", "1 2 1 2"]


def test_the_cause_of_a_failure_on_another_node_is_said_and_its_code_is_kept(cluster, folder):
    (folder / "fail.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit('the cause')\ntime.sleep(60)\n"
    )
    process = cluster.popen(["srun", "-N", "2", "--ntasks-per-node=1", *LAUNCH, "fail.py"], folder)
    err = process.communicate(timeout=250)[1]
    assert process.returncode == 1
    written = err.splitlines()  # srun mixes the lines of the nodes
    assert "rank 1 of 2 failed first: exit code 1" in written and "the cause" in written
