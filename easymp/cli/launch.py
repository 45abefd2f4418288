"""Run a script on several processes, of this machine and of others.

When a rank fails, the traceback of the first one that failed comes last, alone, and its exit code is kept.

examples:
  easymp launch train.py --lr 0.1             one process an accelerator; one without any
  easymp launch --processes 2 train.py        two
  easymp launch --processes 2 -m pkg.train    as python -m
  easymp launch --set strategy=fsdp --set strategy_options.cpu_offload=true train.py
  easymp launch --as accelerate train.py      `import accelerate` gives easymp, also in transformers; flags of
                                              `accelerate launch` may follow: --num_processes 2 --mixed_precision bf16

on each of several machines, with the address of the first and a number of its own:
  easymp launch --nodes 2 --main-address node-a --node-rank 0 train.py
  easymp launch --nodes 1:4 --main-address node-a train.py    machines may come and go

on a cluster with Slurm: one task a node in a job, or a batch script for it:
  srun easymp launch train.py
  easymp launch --slurm "submit --time=8:00:00" --processes 4 train.py

Flags that are not given come from the table [launch] of easymp.toml. --set
takes any setting, and wins over the script's own.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
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
from ..settings import VARIABLE

if TYPE_CHECKING:
    from .config import importers
else:  # it imports torch
    modules_at_first_use(globals(), importers="config.importers")

CPUS = 4  # of a process with a GPU and its loaders
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
RESTARTS = 3  # where nodes may come and go: a node that leaves ends the ranks of the others


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
    slurm_help = "print or submit: a batch script for Slurm; after the word, options of sbatch for it"
    add("--slurm", metavar="WORDS", help=slurm_help)
    add("--config", metavar="FILE", help="a project file in place of easymp.toml, for the workers too")
    sets = "a setting for this run, over the script's own; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=sets)
    name = "the script and its libraries get easymp under this name: accelerate"
    add("--as", dest="name", choices=("accelerate",), help=name)
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    add("script", metavar="SCRIPT", help="the script's path")
    rest = "the script's own arguments, unchanged"
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help=rest)


def reworded(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Behind ``--as accelerate`` flags of ``accelerate launch`` count, too."""
    if words[:2] != ["--as", "accelerate"]:
        return words
    own = {flag: action.nargs != 0 for action in parser._actions for flag in action.option_strings}
    return [*words[:2], *importers.translate(words[2:], own)]


def run(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if name in settings.LAUNCHING}
    wanted = settings.resolve_launching(args.config, **given)
    changes = {VARIABLE: str(Path(args.config).resolve())} if args.config else {}
    with env.override(**changes, **settings.overrides(args.set)):
        settings.resolve()  # an error in it is said once, and not by each worker
        if args.slurm is not None:
            return _slurm(args, wanted)
        rendezvous, variables = find_nodes(
            wanted.nodes, args.node_rank, wanted.main_address, wanted.main_port, wanted.wait
        )
        usual = RESTARTS if rendezvous.elastic else 0
        return launch_script(
            args.script,
            args.arguments,
            wanted.processes,
            module=args.module,
            max_restarts=usual if wanted.max_restarts is None else wanted.max_restarts,
            rendezvous=rendezvous,
            grace=wanted.grace,
            numa=wanted.numa,
            variables=variables if args.name is None else {**variables, "EASYMP_AS": args.name},
        )


def _slurm(args: argparse.Namespace, wanted: settings.Launching) -> int:
    """Print the batch script for a job, or hand it in."""
    action, options = read_slurm(args.slurm)
    if not args.module:  # the job may find modules that this machine does not have
        check_script(args.script, module=False)
    if args.node_rank is not None:
        raise SettingError(
            f"--node-rank {args.node_rank} is for one node, and --slurm starts all: leave it out"
        )
    names = ("nodes", "main_address", "wait", "max_restarts", "grace", "config")
    flags = {"--processes": wanted.processes, **{f"--{n.replace('_', '-')}": getattr(args, n) for n in names}}
    flags["--as"] = args.name
    words = [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
    words += [word for pair in args.set for word in ("--set", pair)]
    words += ["--no-numa"] * (args.numa is False) + ["-m"] * args.module
    name = args.script.rpartition(".")[2] if args.module else Path(args.script).stem
    text = batch_script(name, [*words, args.script, *args.arguments], options, wanted)
    if action == "print":
        print(text, end="")
        return 0
    if (program := shutil.which("sbatch")) is None:
        raise SettingError(
            "sbatch is not on PATH: run this on the cluster's login node, or use --slurm print"
        )
    return subprocess.run(
        [program], input=text, text=True, check=False
    ).returncode  # its words are the answer


# -- the batch script of Slurm: one task a node, which starts the node's processes


def read_slurm(text: str) -> tuple[str, list[str]]:
    """Action and options of ``"submit --partition=gpu --time 2:00:00"``; without a word before the options it is "print"."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingError(f"--slurm {text!r}: {error}; write it as in a shell") from None
    action = words.pop(0) if words and not words[0].startswith("-") else "print"
    if action not in ("print", "submit") or "\n" in text:
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
            raise SettingError(f"--slurm {text!r}: {word!r} is not an option of sbatch: it has no dash")
    return action, options


def batch_script(
    name: str, command: Sequence[str], options: Sequence[str], wanted: settings.Launching
) -> str:
    """The text of a batch script that runs `easymp launch` with the arguments `command` on each node.

    SIGUSR1 comes half a minute before the `grace` that a run has to save itself, and before preemption where Slurm is set so. A run
    that has called ``resume`` ends with exit code 75, and the script puts the job back into the queue. `options` of sbatch replace ours.
    """
    processes, nodes, gpus = wanted.processes, wanted.nodes, not settings.resolve().cpu
    if processes is None:
        raise SettingError(
            "--slurm asks for nodes that may be unlike this machine: say how many processes each is to run with "
            "--processes N (each gets a GPU; with EASYMP_CPU=1 none)"
        )
    given = {_name(option) for option in options}
    if not name.isprintable() and "--job-name" not in given:
        raise SettingError(
            f"the script's name {name!r} cannot be the job's name in a batch script: "
            "name the job with --slurm 'print --job-name=NAME', or rename the script"
        )
    read_nodes(nodes or "1")
    if nodes is not None and "--nodes" in given:
        raise SettingError(
            f"nodes are given twice, as --nodes {nodes} and among Slurm's options: leave one out"
        )
    ours = {
        "--job-name": _quoted(name),
        "--nodes": (nodes or "1").replace(":", "-"),
        "--ntasks-per-node": "1",
        "--cpus-per-task": str(processes * CPUS if gpus else processes),
        "--gpus-per-node": str(processes) if gpus else None,
        "--output": "%x-%j.out",
        "--open-mode": "append",  # goes on in the same file, too
        "--signal": f"USR1@{ceil(wanted.grace) + 30}",
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
