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
from pathlib import Path
from typing import TYPE_CHECKING

from .. import settings
from ..base import env
from ..base.lazy import modules_at_first_use
from ..errors import SettingError
from ..launcher import launch_script, slurm
from ..launcher.entrypoints import check_script
from ..settings import VARIABLE

if TYPE_CHECKING:
    from . import accelerate_flags
else:
    modules_at_first_use(globals(), "accelerate_flags")

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
    return [*words[:2], *accelerate_flags.translate(words[2:], own)]


def run(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if name in settings.LAUNCHING}
    wanted = settings.resolve_launching(args.config, **given)
    changes = {VARIABLE: str(Path(args.config).resolve())} if args.config else {}
    with env.override(**changes, **settings.overrides(args.set)):
        settings.resolve()  # an error in it is said once, and not by each worker
        if args.slurm is not None:
            return _slurm(args, wanted)
        rendezvous, variables = slurm.find_nodes(
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
    asked = slurm.asked(args.slurm)
    if not args.module:  # the job may find modules that this machine does not have
        check_script(args.script, module=False)
    if args.node_rank is not None:
        raise SettingError(
            f"--node-rank {args.node_rank} is for one node, and --slurm starts them all: leave it out"
        )
    names = ("nodes", "main_address", "wait", "max_restarts", "grace", "config")
    flags = {"--processes": wanted.processes, **{f"--{n.replace('_', '-')}": getattr(args, n) for n in names}}
    flags["--as"] = args.name
    words = [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
    words += [word for pair in args.set for word in ("--set", pair)]
    words += ["--no-numa"] * (args.numa is False) + ["-m"] * args.module
    text = slurm.batch_script(
        args.script.rpartition(".")[2] if args.module else Path(args.script).stem,
        [*words, args.script, *args.arguments],
        asked.options,
        processes=wanted.processes,
        nodes=wanted.nodes,
        gpus=not settings.resolve().cpu,
        grace=wanted.grace,
    )
    if asked.action == "submit":
        return slurm.submit(text)
    print(text, end="")
    return 0
