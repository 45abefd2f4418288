"""The launchers of docs/guides/launching.

What their pages show runs here, with the variables that the launchers set.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ..cluster import missing, running
from ..examples.run import ROOT, environment
from ..pool import free_port
from ..test_announced import announces, seats, train
from .blocks import blocks

yaml = pytest.importorskip("yaml")


def code(page: str, title: str) -> str:
    """The block that is written to the file `title`."""
    path = ROOT / "docs/guides/launching" / page
    return next(b.code for b in blocks(page, path.read_text(encoding="utf-8")) if b.title == title)


def start(words: list[str], variables: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    clean = {name: value for name, value in environment().items() if not announces(name)}
    return subprocess.Popen(
        words, cwd=folder, env={**clean, "PATH": path, "EASYMP_CPU": "1", **variables}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(*processes: subprocess.Popen[str], seconds: float = 250) -> list[str]:
    """What each of them printed; all have ended well."""
    told = [process.communicate(timeout=seconds) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), told
    return [out for out, _ in told]


# -- Kubernetes: the command of the pods, and the variables of each; "{port}" is the first pod's, on this machine ------

FIRST = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}
Pods = tuple[list[str], list[dict[str, str]]]


def trainjob(title: str) -> Pods:
    """As kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go, sets them."""
    job = yaml.safe_load(code("kubernetes.md", title))
    policy = yaml.safe_load(code("kubernetes.md", "runtime.yaml"))["spec"]["mlPolicy"]
    trainer = job["spec"]["trainer"]
    each = trainer.get("numProcPerNode", policy["torch"].get("numProcPerNode", "auto"))
    nodes = trainer.get("numNodes", policy["numNodes"])
    same = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(each)}
    same |= {f"PET_{name}": value for name, value in FIRST.items()}
    return trainer["command"] + trainer["args"], [{**same, "PET_NODE_RANK": str(k)} for k in range(nodes)]


def pytorchjob(each: str = "") -> Pods:
    """As kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go, sets them; `each` replaces nprocPerNode."""
    spec = yaml.safe_load(code("kubernetes.md", "pytorchjob.yaml"))["spec"]
    each, replicas = each or spec["nprocPerNode"], spec["pytorchReplicaSpecs"]
    total = sum(spec["replicas"] for spec in replicas.values())
    world = str(total * (int(each) if each.isdecimal() else 1))
    same = {"PYTHONUNBUFFERED": "0", "WORLD_SIZE": world, "PET_NPROC_PER_NODE": each, "PET_NNODES": str(total), **FIRST}
    container = replicas["Master"]["template"]["spec"]["containers"][0]
    pods = [{**same, "RANK": str(rank), "PET_NODE_RANK": str(rank)} for rank in range(total)]
    return container["command"] + container["args"], pods


def in_pods(each: list[list[dict[str, str]]]) -> list[Any]:
    return seats([pods[int(os.environ["RANK"])] for pods in each])


def test_plain_python_in_pods_with_one_accelerator(ranks: Any) -> None:
    jobs = [trainjob("trainjob-one-gpu.yaml"), pytorchjob("1"), pytorchjob("auto")]
    by = ["PET_NNODES and PET_NPROC_PER_NODE", *["RANK and WORLD_SIZE"] * 2]
    found = ranks(in_pods, [pods for _, pods in jobs])
    assert found == [[(rank, 2, rank, 1.0, words) for words in by] for rank in (0, 1)]


# One write a line: unbuffered ranks share a pipe.
TELL = """
import os, sys
line = " ".join(os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
os.write(1, f"{line} {sys.argv[1:]}\\n".encode())
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(trainjob("trainjob.yaml"), id="TrainJob"),
        pytest.param(pytorchjob(), marks=pytest.mark.slow, id="PyTorchJob"),
    ],
)
def test_the_command_of_pods_with_several_accelerators(tmp_path: Path, job: Pods) -> None:
    words, pods = job
    assert words == ["easymp", "launch", "/workspace/train.py", "--lr", "0.01"]
    (tmp_path / "train.py").write_text(TELL)
    words, port = ["easymp", "launch", "train.py", *words[3:]], free_port()
    each = [{name: value.format(port=port) for name, value in pod.items()} for pod in pods]
    told = ended(*(start(words, variables, tmp_path) for variables in each))
    for node, out in enumerate(told):
        lines = [f"{4 * node + local} 8 {local} 4 ['--lr', '0.01']" for local in range(4)]
        assert sorted(out.splitlines()) == lines


# -- SkyPilot, submitit, Ray -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_task_of_skypilot(tmp_path: Path) -> None:
    task = yaml.safe_load(code("other-launchers.md", "train.yaml"))
    (tmp_path / "train.py").write_text(TELL)
    nodes, gpus = task["num_nodes"], task["resources"]["accelerators"].split(":")[1]
    said = {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * nodes)}
    said |= {"SKYPILOT_NUM_GPUS_PER_NODE": gpus, "MASTER_PORT": str(free_port())}
    each = [{**said, "SKYPILOT_NODE_RANK": str(node)} for node in range(nodes)]
    told = ended(*(start(["bash", "-c", task["run"]], variables, tmp_path) for variables in each))
    assert told == ["0 2 0 1 ['--lr', '0.01']\n", "1 2 0 1 ['--lr', '0.01']\n"]


def lacks(name: str) -> Any:
    absent = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(absent, reason=f"an optional package is not installed: {name}")


ON_SLURM = """
import submitit
from training import Slow

executor = submitit.SlurmExecutor(folder="jobs")
executor.update_parameters(nodes=2, ntasks_per_node=1, time=10, stderr_to_stdout=True)
job = executor.submit(Slow(), 0.01)
print(job.job_id, flush=True)
print(*job.results(), sep="\\n")
"""
# Waits for the signal of a time limit after its first epoch.
SLOW = """
import os, time
from easymp import Accelerator
save, resume = Accelerator.save_state, Accelerator.resume

def save_and_wait(acc):
    save(acc)
    while not os.path.exists("signalled"):
        open("saved", "w").close()
        time.sleep(0.1)

class Slow(Train):
    def __call__(self, lr):
        Accelerator.save_state = save_and_wait
        Accelerator.resume = lambda acc: print("resumed from", resume(acc), flush=True)
        return super().__call__(lr)
"""


@lacks("submitit")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_submitit_on_slurm(tmp_path: Path) -> None:
    """A job of two nodes that gets submitit's signal is put into the queue again, and continues from its checkpoint."""
    (tmp_path / "training.py").write_text(code("other-launchers.md", "training.py") + SLOW)
    (tmp_path / "submit.py").write_text(ON_SLURM)
    with running() as cluster:
        conf = {"SLURM_CONF": cluster.variables["SLURM_CONF"]}
        process = start([sys.executable, "submit.py"], conf, tmp_path)
        cluster.until((tmp_path / "saved").exists, "the first epoch is saved")
        job = process.stdout.readline().strip()
        cluster.run("scancel", "--signal=USR2", job)
        cluster.until_state(job, "PENDING")
        (tmp_path / "signalled").touch()
        time.sleep(2)  # as in test_slurm_real
        cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        (told,) = ended(process, seconds=400)
    # submitit warns that there is no sacct
    results = [line.partition(":")[0] for line in told.splitlines() if line.startswith("rank")]
    assert results == ["rank 0 of 2", "rank 1 of 2"]
    log = "".join(log.read_text() for log in (tmp_path / "jobs").glob("*_log.out"))
    assert "resumed from None" in log
    assert re.search(r"resumed from \S+/step-", log)


RAY = """
import os, signal, sys, time
from easymp import WorldError

folder = Path(sys.argv[1])


def stuck():
    while not (folder / "hung").exists():
        time.sleep(0.1)


def train(config):
    from tests.test_announced import train

    def after(acc, epoch):
        report(acc, {"epoch": epoch})
        if epoch == 0 and not (folder / "killed").exists() and acc.process_index == 1:
            while not list(folder.rglob("checkpoint_manager_snapshot.json")):  # Ray has the checkpoint
                time.sleep(0.1)
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if epoch == 1 and not (folder / "hung").exists():
            if acc.process_index == 1:
                stuck()
            try:
                acc.wait_for_everyone()
            except WorldError as error:
                (folder / "said").write_text(str(error))
                (folder / "hung").touch()
                raise

    begun = ray.train.get_checkpoint() is not None
    if said := train(3, resume, after, str(folder / "run"), 10):
        (folder / "out").write_text(f"{begun} {said}")


ray.init(num_cpus=2, include_dashboard=False)
scaling = ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1})
run = RunConfig(storage_path=str(folder / "store"), failure_config=FailureConfig(max_failures=2))
TorchTrainer(train, train_loop_config={}, scaling_config=scaling, run_config=run).fit()
"""


@lacks("ray")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_train(ranks: Any, tmp_path: Path) -> None:
    """Its workers train in a thread.

    One is killed, then one hangs; the bridge of the page resumes from what Ray has stored.
    """
    bridge = code("other-launchers.md", "train_ray.py").partition("def train(config)")[0]
    (tmp_path / "work.py").write_text(f"{bridge}{RAY}")
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    ended(start([sys.executable, "work.py", str(tmp_path)], variables, tmp_path), seconds=580)
    said = (tmp_path / "said").read_text()
    assert said.startswith("rank 0 gave up in wait_for_everyone: timed out")
    assert "work.py" in said.partition("rank 1: ")[2] and "in stuck" in said
    assert [(tmp_path / "out").read_text()] == [f"True {said}" for said in ranks(train, 3) if said]
