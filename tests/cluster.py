"""A Slurm for tests: munged, slurmctld and two slurmd on the loopback, in a folder, run by the user of the tests.

Its nodes are named 127.0.0.1 and 127.0.0.2; a job's tasks meet at the first. No cgroups, no accounting: the daemons run
in a container, too.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from .pool import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
CONFIG = """\
ClusterName=easymp
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
StateSaveLocation={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
MpiDefault=none
MailProg=/bin/true
KillWait=2
NodeName=127.0.0.1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=127.0.0.2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """A sentence, where this machine has no Slurm."""
    programs = (*DAEMONS, "sbatch", "srun", "scontrol")
    lacking = ", ".join(name for name in programs if shutil.which(name, path=PATH) is None)
    return lacking and f"optional packages are not installed: slurm-wlm and munge (Debian's), for {lacking}"


class Cluster:
    """Runs from `start` to `stop`."""

    def __init__(self) -> None:
        # a short path: a socket's has at most 107 characters
        self.folder = tempfile.mkdtemp(prefix="easymp-slurm-")
        self.variables = {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": PATH}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        folder, ports = Path(self.folder), [free_port() for _ in range(3)]
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        host = socket.gethostname().split(".")[0]
        text = CONFIG.format(folder=folder, host=host, user=getpass.getuser(), ports=ports)
        (folder / "slurm.conf").write_text(text)
        files = {"key-file": "key", "socket": "munge", "pid-file": "munge.pid", "log-file": "munge.log"}
        files["seed-file"] = "seed"
        # --force: munged refuses a folder that only its owner may read.
        self._daemon("munged", "--foreground", "--force", *(f"--{k}={folder}/{file}" for k, file in files.items()))
        self.until((folder / "munge").exists, "munged listens")
        self._daemon("slurmctld", "-D", "-c")
        for node in ("127.0.0.1", "127.0.0.2"):
            self._daemon("slurmd", "-D", "-N", node)
        idle = lambda: self.run("sinfo", "-h", "-o", "%D %t", check=False).strip() == "2 idle"  # noqa: E731
        self.until(idle, "both nodes are idle")

    def stop(self) -> None:
        """End jobs and daemons; nothing of them is left, or the test fails."""
        self.run("scancel", "--full", "--user", getpass.getuser(), check=False)
        deadline = time.monotonic() + 60
        while self.run("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
            time.sleep(0.1)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        left = self.left()
        for process in left:
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not left, f"still running: {left}"

    def left(self) -> list[psutil.Process]:
        """Processes that belong to this cluster, by their environment."""
        processes = []
        for process in psutil.process_iter():
            try:
                config = process.environ().get("SLURM_CONF")
                gone = process.status() == psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if process.pid != os.getpid() and config == self.variables["SLURM_CONF"] and not gone:
                processes.append(process)
        return processes

    def run(self, *command: str, check: bool = True, cwd: str | Path | None = None) -> str:
        """A command of Slurm's, or any other that talks to this cluster; its output."""
        process = self.popen(command, cwd)
        output, err = process.communicate(timeout=250)
        assert not check or process.returncode == 0, f"{command[0]} ended with {process.returncode}\n{output}\n{err}"
        return output

    def popen(self, command: Sequence[str], cwd: str | Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=cwd, env=self.variables, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def until(self, true: Callable[[], bool], goal: str, seconds: float = 250) -> None:
        """Wait; the test fails with the daemons' last words where it does not come."""
        deadline = time.monotonic() + seconds
        while not true():
            gone = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not gone, f"a daemon has ended: {gone}\n{self.logs()}"
            assert time.monotonic() < deadline, f"{seconds:g} s have passed before {goal}\n{self.logs()}"
            time.sleep(0.1)

    def until_state(self, job: str, state: str) -> None:
        self.until(lambda: f"JobState={state}" in self.run("scontrol", "show", "job", job), f"{job} is {state}")

    def logs(self) -> str:
        logs = sorted(Path(self.folder).glob("*.out"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def _daemon(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=PATH)
        assert program is not None
        with open(f"{self.folder}/{len(self._daemons)}-{name}.out", "wb") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": self.variables}
            self._daemons.append(subprocess.Popen([program, *arguments], **options))


@contextmanager
def running(**variables: str) -> Iterator[Cluster]:
    """A cluster whose commands have these variables, too."""
    cluster = Cluster()
    cluster.variables.update(variables)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
