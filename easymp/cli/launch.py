"""Run a script on several processes, of this machine and of others.

When a rank fails, the traceback of the first one that failed comes last, alone, and its exit code is kept.

examples:
  easymp launch train.py --lr 0.1             one process an accelerator; one without any
  easymp launch --processes 2 train.py        two
  easymp launch --processes 2 -m pkg.train    as python -m
  easymp launch --set strategy=fsdp --set strategy_options.cpu_offload=true train.py
  easymp launch --as accelerate train.py      `import accelerate` gives easymp, also in transformers; flags of
                                              `accelerate launch` may follow: --num_processes 2 --mixed_precision bf16
  easymp launch --as deepspeed train.py       `import deepspeed` gives easymp; the script gets --local_rank=N

on each of several machines, with the address of the first and a number of its own:
  easymp launch --nodes 2 --main-address node-a --node-rank 0 train.py
  easymp launch --nodes 1:4 --main-address node-a train.py    machines may come and go

on a cluster with Slurm: one task a node in a job, or a batch script for it:
  srun easymp launch train.py
  easymp launch --slurm "submit --time=8:00:00" --processes 4 train.py

Flags that are not given come from the table [launch] of easymp.toml. --set takes any setting, and wins over the
script's own.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from .. import settings
from ..base import env
from ..base.lazy import modules_at_first_use
from ..errors import SettingError
from ..launcher import launch_script
from ..launcher.entrypoints import check_script
from ..launcher.rendezvous import find_nodes, read_nodes
from ..launcher.worker import RESTART
from ..registry import STRATEGIES
from ..settings import VARIABLE, as_record, read_record

if TYPE_CHECKING:
    from .config import importers
else:  # it imports torch
    modules_at_first_use(globals(), importers="config.importers")

CPUS = 4  # of a process with a GPU and its loaders
# Options of sbatch that contradict ours.
CONFLICTS = {
    "--gpus-per-node": {"--gpus", "-G", "--gres", "--gpus-per-task", "--gpus-per-socket"},
    "--cpus-per-task": {"--cpus-per-gpu"},
}

TEMPLATE = """\
#!/bin/bash
{options}

# One task a node: it starts the node's processes, and all of them meet on the first node.
srun ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} {command}
code=$?
{requeue}exit "$code"
"""
REQUEUE = f"""\
# A run that calls resume() was warned and has saved itself: back into the queue, from where it goes on.
if [ "$code" -eq {RESTART} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""
ELASTIC_RESTARTS = 3  # where nodes may come and go: a node that leaves ends the ranks of the others


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--processes", type=int, metavar="N", help="on this machine (one an accelerator, 1 without any)")
    add("--nodes", metavar="N|MIN:MAX", help="how many machines; MIN:MAX: they may come and go (1)")
    add("--main-address", metavar="HOST[:PORT]", help="of the first machine, for the others (port 29500)")
    add("--node-rank", type=int, metavar="K", help="number of this machine, from 0 (0 at the main address)")
    add("--wait", type=float, metavar="SECONDS", help="that machines wait for one another (600)")
    restarts = "restarts of all workers after a failure (0; 3 with MIN:MAX)"
    add("--max-restarts", type=int, metavar="N", help=restarts)
    add("--grace", type=float, metavar="SECONDS", help="that workers have to save after a signal (30)")
    numa = "workers may use the cores of all NUMA nodes"
    add("--no-numa", action="store_const", const=False, dest="numa", help=numa)
    slurm = "print or submit: a batch script for Slurm; after the word, options of sbatch for it"
    add("--slurm", metavar="WORDS", help=slurm)
    add("--config", metavar="FILE", help="a project file in place of easymp.toml, for the workers too")
    setting = "a setting for this run, over the script's own; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=setting)
    alias = "the script and its libraries get easymp under this name: accelerate or deepspeed"
    add("--as", dest="alias", choices=("accelerate", "deepspeed"), help=alias)
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    add("script", metavar="SCRIPT", help="the script's path")
    arguments = "the script's own arguments, unchanged"
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help=arguments)


def reworded(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Translate flags of ``accelerate launch`` behind ``--as accelerate``."""
    if arguments[:2] != ["--as", "accelerate"]:
        return arguments
    flags = {flag: action.nargs != 0 for action in parser._actions for flag in action.option_strings}
    return [*arguments[:2], *importers.translate(arguments[2:], flags)]


def run(args: argparse.Namespace) -> int:
    flags = {name: value for name, value in vars(args).items() if name in settings.LAUNCHING}
    launching = settings.resolve_launching(args.config, **flags)
    changes = {VARIABLE: str(Path(args.config).resolve())} if args.config else {}
    with env.override(**changes, **settings.overrides(args.set)):
        asked = settings.resolve()  # an error in it is printed once, and not by each worker
        by_set = any(pair.startswith("strategy=") for pair in args.set)  # else the script may name another one
        if by_set and asked.strategy in STRATEGIES:
            read_options = partial(as_record, STRATEGIES[asked.strategy].Options, f"strategy {asked.strategy!r}")
            read_record(asked, "strategy_options", read_options)
        if args.slurm is not None:
            return _slurm(args, launching)
        rendezvous, variables = find_nodes(
            launching.nodes, args.node_rank, launching.main_address, launching.main_port, launching.wait
        )
        restarts = launching.max_restarts
        if restarts is None:
            restarts = ELASTIC_RESTARTS if rendezvous.elastic else 0
        return launch_script(
            args.script,
            args.arguments,
            launching.processes,
            module=args.module,
            max_restarts=restarts,
            rendezvous=rendezvous,
            grace=launching.grace,
            numa=launching.numa,
            variables=variables if args.alias is None else {**variables, "EASYMP_AS": args.alias},
        )


def _slurm(args: argparse.Namespace, launching: settings.Launching) -> int:
    """Print the batch script of a job or hand it in. `args.slurm` is as in ``"submit --partition=gpu -t 2:00:00"``."""
    action, _, options = args.slurm.strip().partition(" ")
    if not action or action.startswith("-"):
        action, options = "print", args.slurm.strip()
    if action not in ("print", "submit") or "\n" in options:
        raise SettingError(
            f"--slurm {args.slurm!r}: it takes print or submit, and then options of sbatch, in one line, as in "
            "'submit --time=2:00:00'"
        )
    if not args.module:  # the job may find modules that this machine does not have
        check_script(args.script, module=False)
    if args.node_rank is not None:
        raise SettingError(f"--node-rank {args.node_rank} is for one node, and --slurm starts all: leave it out")
    names = ("nodes", "main_address", "wait", "max_restarts", "grace", "config")
    flags = {"--processes": launching.processes, **{f"--{n.replace('_', '-')}": getattr(args, n) for n in names}}
    flags["--as"] = args.alias
    command = [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
    command += [text for pair in args.set for text in ("--set", pair)]
    command += ["--no-numa"] * (args.numa is False) + ["-m"] * args.module
    name = args.script.rpartition(".")[2] if args.module else Path(args.script).stem
    text = batch_script(name, [*command, args.script, *args.arguments], options.strip(), launching)
    if action == "print":
        print(text, end="")
        return 0
    if (program := shutil.which("sbatch")) is None:
        raise SettingError("sbatch is not on PATH: run this on the cluster's login node, or use --slurm print")
    return subprocess.run([program], input=text, text=True, check=False).returncode  # its output is the answer


def batch_script(name: str, command: Sequence[str], options: str, launching: settings.Launching) -> str:
    """The text of a batch script that runs `easymp launch` with the arguments `command` on each node.

    SIGUSR1 comes half a minute before the `grace` that a run has to save itself, and before preemption where Slurm is
    set so. sbatch takes the last of equal options, so the user's `options` follow ours.
    """
    processes, nodes, gpus = launching.processes, launching.nodes, not settings.resolve().cpu
    if processes is None:
        raise SettingError(
            "--slurm asks for nodes that may be unlike this machine: say how many processes each is to run with "
            "--processes N (each gets a GPU; with EASYMP_CPU=1 none)"
        )
    user_flags = {flag if flag[1] == "-" else flag[:2] for flag in re.findall(r"(?<!\S)--?[a-zA-Z][\w-]*", options)}
    if not name.isprintable() and "--job-name" not in user_flags:
        raise SettingError(
            f"the script's name {name!r} cannot be the job's name in a batch script: "
            "name the job with --slurm 'print --job-name=NAME', or rename the script"
        )
    read_nodes(nodes or "1")
    if nodes is not None and user_flags & {"--nodes", "-N"}:
        raise SettingError(f"nodes are given twice, as --nodes {nodes} and among Slurm's options: leave one out")
    defaults = {
        "--job-name": f"={_quoted(name)}",
        "--nodes": f"={(nodes or '1').replace(':', '-')}",
        "--ntasks-per-node": "=1",
        "--cpus-per-task": f"={processes * CPUS if gpus else processes}",
        "--gpus-per-node": f"={processes}",
        "--output": "=%x-%j.out",
        "--open-mode": "=append",  # a requeued job goes on in the same file
        "--signal": f"=USR1@{ceil(launching.grace) + 30}",
        "--requeue": "",
    }
    if not gpus:
        del defaults["--gpus-per-node"]
    lines = [f"{flag}{value}" for flag, value in defaults.items() if not user_flags & {flag, *CONFLICTS.get(flag, ())}]
    return TEMPLATE.format(
        options="\n".join(f"#SBATCH {line}" for line in [*lines, options] if line),
        command=shlex.join([sys.executable, "-m", "easymp", "launch", *command]),
        requeue="" if "--no-requeue" in user_flags else REQUEUE,
    )


def _quoted(text: str) -> str:
    """As sbatch reads its lines: outside of quotes a blank ends a word, and # begins a comment."""
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"' if re.search(r"""[\s#\\'"]""", text) else text
