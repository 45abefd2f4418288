"""The launchers of docs/guides/launching: what their pages show runs here, with the variables that the launchers set."""

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

from ..cluster import Cluster, missing
from ..examples.run import ROOT, environment
from ..pool import free_port
from ..test_announced import announces, clear, seat, train
from .blocks import Block, blocks

yaml = pytest.importorskip("yaml")
GUIDES = ROOT / "docs/guides/launching"


def block(page: str, title: str) -> Block:
    """The block that is written to the file `title`."""
    found = blocks(page, (GUIDES / page).read_text(encoding="utf-8"))
    return next(block for block in found if block.title == title)


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


# -- Kubernetes --------------------------------------------------------------------------------------------------------


def trainjob(title: str) -> tuple[list[str], list[dict[str, str]]]:
    """The command of the pods of a TrainJob, and the variables of each (kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go)."""
    job = yaml.safe_load(block("kubernetes.md", title).code)
    policy = yaml.safe_load(block("kubernetes.md", "runtime.yaml").code)["spec"]["mlPolicy"]
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    each = trainer.get("numProcPerNode", policy["torch"].get("numProcPerNode", "auto"))
    nodes = trainer.get("numNodes", policy["numNodes"])
    pods = [
        {
            "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(each), "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29500",
        }
        for index in range(nodes)
    ]  # fmt: skip
    return trainer["command"] + trainer["args"], pods


def pytorchjob(each: str = "") -> tuple[list[str], list[dict[str, str]]]:
    """The same of the PyTorchJob (kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go); `each` replaces nprocPerNode."""
    job = yaml.safe_load(block("kubernetes.md", "pytorchjob.yaml").code)
    each = each or job["spec"]["nprocPerNode"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    total = sum(spec["replicas"] for spec in replicas.values())
    pods = [
        {
            "PYTHONUNBUFFERED": "0", "MASTER_ADDR": f"{job['metadata']['name']}-master-0", "MASTER_PORT": "23456",
            "WORLD_SIZE": str(total * (int(each) if each.isdecimal() else 1)), "RANK": str(rank), "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": each, "PET_NNODES": str(total),
        }
        for rank in range(total)
    ]  # fmt: skip
    container = replicas["Master"]["template"]["spec"]["containers"][0]
    return container["command"] + container["args"], pods


def here(pod: dict[str, str], port: int | str) -> dict[str, str]:
    """The variables of a pod whose first pod is this machine, as its name server would have it."""
    changed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {name: changed.get(name.removeprefix("PET_"), value) for name, value in pod.items()}


def in_pod(pods: list[dict[str, str]]) -> tuple[int, int, int, float, str]:
    pod = here(pods[int(os.environ["RANK"])], os.environ["MASTER_PORT"])
    clear()
    os.environ.update(pod)
    return seat()


@pytest.mark.parametrize(
    ("pods", "by"),
    [
        pytest.param(
            trainjob("trainjob-one-gpu.yaml")[1], "PET_NNODES and PET_NPROC_PER_NODE", id="TrainJob"
        ),
        pytest.param(pytorchjob("1")[1], "RANK and WORLD_SIZE", id="PyTorchJob"),
        pytest.param(pytorchjob("auto")[1], "RANK and WORLD_SIZE", id="PyTorchJob, auto"),
    ],
)
def test_plain_python_in_pods_with_one_accelerator(ranks: Any, pods: list[dict[str, str]], by: str) -> None:
    assert ranks(in_pod, pods) == [(0, 2, 0, 1.0, by), (1, 2, 1, 1.0, by)]


# One write a line: unbuffered ranks share a pipe.
TELL = """
import os, sys
line = " ".join(os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
os.write(1, f"{line} {sys.argv[1:]}\\n".encode())
"""


@pytest.mark.parametrize(
    ("job", "launcher"),
    [
        pytest.param(trainjob("trainjob.yaml"), "easymp", id="TrainJob"),
        pytest.param(trainjob("trainjob.yaml"), "torchrun", marks=pytest.mark.slow, id="TrainJob, torchrun"),
        pytest.param(pytorchjob(), "easymp", marks=pytest.mark.slow, id="PyTorchJob"),
    ],
)
def test_the_command_of_pods_with_several_accelerators(
    tmp_path: Path, job: tuple[list[str], list[dict[str, str]]], launcher: str
) -> None:
    words, pods = job
    assert words == ["easymp", "launch", "/workspace/train.py", "--lr", "0.01"]
    (tmp_path / "train.py").write_text(TELL)
    words = [*(["easymp", "launch"] if launcher == "easymp" else ["torchrun"]), "train.py", *words[3:]]
    port = free_port()
    told = ended(*(start(words, here(pod, port), tmp_path) for pod in pods))
    arguments = ["--lr", "0.01"]
    for node, out in enumerate(told):
        each = [f"{4 * node + local} 8 {local} 4 {arguments}" for local in range(4)]
        assert sorted(out.splitlines()) == each


# -- SkyPilot ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_task_of_skypilot(tmp_path: Path) -> None:
    task = yaml.safe_load(block("skypilot.md", "train.yaml").code)
    (tmp_path / "train.py").write_text(TELL)
    nodes = task["num_nodes"]
    said = {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * nodes)}
    said |= {
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].split(":")[1],
        "MASTER_PORT": str(free_port()),
    }
    each = [{**said, "SKYPILOT_NODE_RANK": str(node)} for node in range(nodes)]
    told = ended(*(start(["bash", "-c", task["run"]], variables, tmp_path) for variables in each))
    assert told == ["0 2 0 1 ['--lr', '0.01']\n", "1 2 0 1 ['--lr', '0.01']\n"]


# -- submitit ----------------------------------------------------------------------------------------------------------


def lacks(name: str) -> Any:
    absent = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(absent, reason=f"an optional package is not installed: {name}")


@lacks("submitit")
@pytest.mark.slow
def test_submitit_on_this_machine(tmp_path: Path) -> None:
    for name in ("training.py", "submit.py"):
        (tmp_path / name).write_text(block("submitit.md", name).code)
    (told,) = ended(start([sys.executable, "submit.py"], {}, tmp_path))
    first, second = told.splitlines()
    assert first.startswith("rank 0 of 2: loss ")
    assert second == first.replace("rank 0", "rank 1")


ON_SLURM = """
import submitit
from training import Train

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
save = Accelerator.save_state

def save_and_wait(acc, *args, **options):
    found = save(acc, *args, **options)
    while not os.path.exists("signalled"):
        open("saved", "w").close()
        time.sleep(0.1)
    return found

resume = Accelerator.resume

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
    (tmp_path / "training.py").write_text(block("submitit.md", "training.py").code + SLOW)
    (tmp_path / "submit.py").write_text(ON_SLURM.replace("import Train", "import Slow"))
    cluster = Cluster()
    try:
        cluster.start()
        process = start(
            [sys.executable, "submit.py"], {"SLURM_CONF": cluster.variables["SLURM_CONF"]}, tmp_path
        )
        cluster.until((tmp_path / "saved").exists, "the first epoch is saved")
        job = process.stdout.readline().strip()
        cluster.run("scancel", "--signal=USR2", job)
        cluster.until(
            lambda: "JobState=PENDING" in cluster.run("scontrol", "show", "job", job),
            "the job is in the queue again",
        )
        (tmp_path / "signalled").touch()
        time.sleep(2)  # as in test_slurm_real
        cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        (told,) = ended(process, seconds=400)
    finally:
        cluster.stop()
    results = [
        line for line in told.splitlines() if line.startswith("rank")
    ]  # submitit warns that there is no sacct
    assert [line.partition(":")[0] for line in results] == ["rank 0 of 2", "rank 1 of 2"]
    log = "".join(log.read_text() for log in (tmp_path / "jobs").glob("*_log.out"))
    assert "resumed from None" in log
    assert re.search(r"resumed from \S+/step-", log)


# -- Ray ---------------------------------------------------------------------------------------------------------------

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
    """Its workers train in a thread. One is killed, then one hangs; the bridge of the page resumes from what Ray has stored."""
    bridge = block("ray.md", "train_ray.py").code.partition("def train(config)")[0]
    (tmp_path / "work.py").write_text(f"{bridge}{RAY}")
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    ended(start([sys.executable, "work.py", str(tmp_path)], variables, tmp_path), seconds=580)
    said = (tmp_path / "said").read_text()
    assert said.startswith("rank 0 gave up in wait_for_everyone: timed out")
    assert "work.py" in said.partition("rank 1: ")[2] and "in stuck" in said
    assert [(tmp_path / "out").read_text()] == [f"True {said}" for said in ranks(train, 3) if said]
