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

on a cluster with Slurm, one task a node:
  srun easymp launch train.py

Flags that are not given come from the table [launch] of easymp.toml. --set takes any setting, and wins over the
script's own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import settings
from ..base import env
from ..base.lazy import modules_at_first_use
from ..compat.alias import PACKAGES
from ..errors import RefusedError, SettingError
from ..launcher import launch_script
from ..launcher.rendezvous import find_nodes
from ..registry import STRATEGIES
from ..settings import VARIABLE, as_record, read_record

if TYPE_CHECKING:
    from .config import foreign
else:  # it reads tables
    modules_at_first_use(globals(), foreign="config.foreign")

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
    add("--config", metavar="FILE", help="a project file in place of easymp.toml, for the workers too")
    setting = "a setting for this run, over the script's own; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=setting)
    alias = f"the script and its libraries get easymp under this name: {', '.join(PACKAGES)}"
    add("--as", dest="alias", choices=tuple(PACKAGES), metavar="PACKAGE", help=alias)
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    add("script", metavar="SCRIPT", help="the script's path")
    arguments = "the script's own arguments, unchanged"
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help=arguments)


def reworded(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Translate flags of ``accelerate launch`` behind ``--as accelerate``."""
    if arguments[:2] != ["--as", "accelerate"]:
        return arguments
    flags = {flag: action.nargs != 0 for action in parser._actions for flag in action.option_strings}
    return [*arguments[:2], *translate(arguments[2:], flags)]


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
            variables=variables if args.alias is None else {**variables, "EASYMP_AS": args.alias},
        )


def translate(arguments: Sequence[str], easymp_flags: Mapping[str, bool]) -> list[str]:
    """The command line behind ``--as accelerate`` in easymp's flags.

    `easymp_flags` has these, and whether each takes a value.
    """
    rules = foreign.ACCELERATE
    section_of = {key: name for name, keys in rules.items() if isinstance(keys, Mapping) for key in keys}
    engines = {f"use_{name.lower()}": name for name in foreign.ENGINES} | {"multi_gpu": "MULTI_GPU"}
    switches = {*engines, "cpu", "debug", "same_network"}
    content: dict[str, Any] = {}
    flags: list[str] = []
    node_rank: list[str] = []
    remaining = list(arguments)
    while remaining and remaining[0].startswith("-"):
        flag, equals, value = remaining.pop(0).partition("=")
        name, is_easymp = flag.removeprefix("--").replace("-", "_"), flag in easymp_flags and "_" not in flag
        takes_value = easymp_flags[flag] if is_easymp else name not in switches
        if takes_value and not equals:
            if not remaining:
                raise SettingError(f"{flag} has no value")
            value = remaining.pop(0)
        if is_easymp:
            flags += [flag, value] if takes_value else [flag]
        elif name == "machine_rank":
            node_rank = ["--node-rank", value]
        elif name == "max_restarts":
            flags += ["--max-restarts", value]
        elif name == "config_file":
            content = {**foreign.read_document(value).content, **content}
        elif name in engines:
            content["distributed_type"] = engines[name]
        elif name == "cpu":
            content["use_cpu"] = True
        elif name in rules:
            content[name] = settings.read_literal(value) if takes_value else True
        elif name in section_of:
            content.setdefault(section_of[name], {})[name] = settings.read_literal(value)
        else:
            threads = f"set OMP_NUM_THREADS={value} in front of the command, and "
            remedy = f"{threads if name == 'num_cpu_threads_per_process' else ''}leave it out"
            raise RefusedError(f"{flag} of accelerate launch has no counterpart: {remedy}")
    if content.get("num_processes", 1) != 1 and "distributed_type" not in content:
        content["distributed_type"] = "MULTI_CPU" if content.get("use_cpu") else "MULTI_GPU"
    if content.get("num_machines", 1) == 1 and node_rank[1:] == ["0"]:
        node_rank = []
    flags += node_rank
    # The settings in the content of a file of Accelerate's, as flags.
    imported = foreign.import_document(foreign.Document("accelerate launch", content), Path()) if content else None
    for key, sentence in imported.lines if imported else ():
        if sentence.startswith(("no counterpart", "not in force", "unknown")):
            raise RefusedError(f"accelerate launch: {key}: {sentence}")
    values = imported.values if imported else {}
    port = values.pop("main_port", None)
    for name, value in values.items():
        if name in settings.LAUNCHING:
            address = f"{value}:{port}" if name == "main_address" and port else str(value)
            flags += [f"--{name.replace('_', '-')}", address]
            continue
        options = {f"{name}.{key}": option for key, option in value.items()} if isinstance(value, Mapping) else {}
        for key, option in (options or {name: value}).items():
            flags += ["--set", f"{key}={option if isinstance(option, str) else json.dumps(option)}"]
    return [*flags, *remaining]
