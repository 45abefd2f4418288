"""Launching in a job: where the launchers of its nodes meet, and the batch script of Slurm that starts them.

There is one task a node, which starts the node's processes. A minute before the job's time is up (and before preemption, where Slurm is
set so) SIGUSR1 comes: a run that has called ``resume`` saves itself and ends with exit code 75, the script puts the job back into the
queue, and it goes on from there.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from ..base import env, ranks
from ..errors import SettingError
from .rendezvous import RendezvousConfig, read_config, read_nodes
from .worker import RESTART

CPUS = 4  # of a process with a GPU and its loaders
ACTIONS = ("print", "submit")
SHORT = {"-J": "--job-name", "-N": "--nodes", "-c": "--cpus-per-task", "-o": "--output", "-G": "--gpus"}
# Options with the same meaning: ours is left out where one of these is given.
SAME = {
    "--gpus-per-node": ("--gpus", "--gres", "--gpus-per-task", "--gpus-per-socket"),
    "--cpus-per-task": ("--cpus-per-gpu",),
    "--requeue": ("--no-requeue",),
}

TEMPLATE = """\
#!/bin/bash
{options}

# One task a node: it starts the node's processes, and all of them meet on the first node.
srun ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} {command}
code=$?
{again}exit "$code"
"""
AGAIN = f"""\
# A run that calls resume() was warned and has saved itself: back into the queue, from where it goes on.
if [ "$code" -eq {RESTART} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


def find_nodes(
    nodes: str | None, node_rank: int | None, main_address: str | None, main_port: int | None, wait: float
) -> tuple[RendezvousConfig, dict[str, str | None]]:
    """Where this launcher meets the others, as `read_config`, and variables for its workers; announced values fill the gaps.

    Each announced task (of srun, mpirun, a pod of Kubeflow) is a launcher, and counts as a node.
    """
    least, most = read_nodes(nodes or "1")
    found, why = ranks.read_node()
    if why == ranks.BATCH and nodes is None and (count := env.integer("SLURM_JOB_NUM_NODES", 1)) > 1:
        raise SettingError(
            f"Slurm's job has {count} nodes, and its batch script runs on the first one only: write srun before the command, which "
            "starts it on all (`easymp launch --slurm print` shows how), or pass --nodes 1 to use this one"
        )
    if found is None or (found.size == 1 and found.most is None):
        return read_config(nodes, node_rank, main_address, main_port, wait), {}
    if nodes and not least <= found.size <= most:
        raise SettingError(
            f"nodes={nodes!r} and {ranks.said(found.by.size)} contradict each other: leave --nodes out, and start a launcher on each "
            f"node, or unset {found.by.size} for a run of this machine alone"
        )
    there = str(found.size) if found.most is None else f"{found.size}:{found.most}"
    rank = found.rank if node_rank is None else node_rank
    met = read_config(nodes or there, rank, main_address or found.address, main_port or found.port, wait)
    if (found.local_size or 1) == 1:
        return met, {}
    # The worker's entry counts local ranks over all launchers of this machine: each of them numbers its own workers from 0.
    return met, {"EASYMP_LAUNCHER": f"{found.local_rank} of {found.local_size}"}


class Asked(NamedTuple):
    """The value of ``--slurm``: an action, and options of sbatch, one a line of the script."""

    action: str
    options: list[str]


def asked(text: str) -> Asked:
    """Read ``"submit --partition=gpu --time 2:00:00"``; without a word before the options it is "print"."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingError(f"--slurm {text!r}: {error}; write it as in a shell") from None
    action = words.pop(0) if words and not words[0].startswith("-") else "print"
    if action not in ACTIONS or "\n" in text:
        raise SettingError(
            f"--slurm {text!r}: it takes print or submit, and then options of sbatch, in one line, as in 'submit --time=2:00:00'"
        )
    options: list[str] = []
    for word in words:
        if word.startswith("-"):
            options.append(_quoted(word))
        elif options:
            options[-1] += " " + _quoted(word)
        else:
            raise SettingError(
                f"--slurm {text!r}: {word!r} is not an option of sbatch: those start with a dash"
            )
    return Asked(action, options)


def batch_script(
    name: str,
    command: Sequence[str],
    options: Sequence[str] = (),
    *,
    processes: int | None,
    nodes: str | None = None,
    gpus: bool = True,
    grace: float = 30.0,
) -> str:
    """The text of a batch script that runs `easymp launch` with the arguments `command` on each node.

    Args:
        options: of sbatch, one each; they replace ours.
        nodes: how many, as ``"2"``, or ``"1:4"`` for at least 1 and at most 4; None for one.
        gpus: each of a node's `processes` gets one.
        grace: seconds that the workers have to save themselves; the warning comes half a minute earlier.
    """
    if processes is None:
        raise SettingError(
            "--slurm asks for nodes that need not be like this machine: say how many processes each is to run with --processes N "
            "(each gets a GPU; with EASYMP_CPU=1 none)"
        )
    given = {_name(option) for option in options}
    if not name.isprintable() and "--job-name" not in given:
        raise SettingError(
            f"the script's name {name!r} has a character that cannot stand in a batch script's options, where the job's name is made of "
            "it: name the job with --slurm 'print --job-name=NAME', or rename the script"
        )
    read_nodes(nodes or "1")
    if nodes is not None and "--nodes" in given:
        raise SettingError(
            f"nodes are given twice, as --nodes {nodes} and among Slurm's options: leave one of them out"
        )
    ours = {
        "--job-name": _quoted(name),
        "--nodes": (nodes or "1").replace(":", "-"),
        "--ntasks-per-node": "1",
        "--cpus-per-task": str(processes * CPUS if gpus else processes),
        "--gpus-per-node": str(processes) if gpus else None,
        "--output": "%x-%j.out",
        "--open-mode": "append",  # goes on in the same file, too
        "--signal": f"USR1@{ceil(grace) + 30}",
        "--requeue": "",
    }
    kept = {
        key: value
        for key, value in ours.items()
        if value is not None and not given & {key, *SAME.get(key, ())}
    }
    lines = [*(f"{key}={value}" if value else key for key, value in kept.items()), *options]
    words = shlex.join([sys.executable, "-m", "easymp", "launch", *command])
    again = "" if "--no-requeue" in given else AGAIN
    return TEMPLATE.format(options="\n".join(f"#SBATCH {line}" for line in lines), command=words, again=again)


def _name(option: str) -> str:
    """The long name of a line's option: of ``-N2``, ``-N 2``, ``--nodes=2`` and ``--nodes 2`` it is ``--nodes``."""
    option = option.lstrip('"')
    return re.split("[= ]", option)[0] if option.startswith("--") else SHORT.get(option[:2], option[:2])


def _quoted(word: str) -> str:
    """As sbatch reads its lines: outside of quotes a blank ends a word, and # begins a comment."""
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"' if re.search(r"""[\s#\\'"]""", word) else word


def submit(text: str) -> int:
    """Hand a batch script in; sbatch's own words are its answer. Returns its exit code."""
    program = shutil.which("sbatch")
    if program is None:
        raise SettingError(
            "sbatch is not on PATH: run this on the cluster's login node, or keep the script with --slurm print"
        )
    return subprocess.run([program], input=text, text=True, check=False).returncode
