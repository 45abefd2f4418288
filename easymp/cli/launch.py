"""Run a script on several processes of this machine.

When a rank fails, the traceback of the one that failed first comes last, alone, and its exit code is kept.

examples:
  easymp launch train.py --lr 0.1             one process an accelerator; one without any
  easymp launch --processes 2 train.py        two
  easymp launch --processes 2 -m pkg.train    as python -m
"""

from __future__ import annotations

import argparse

from ..launcher import launch_script


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, metavar="N", help="how many (default: one an accelerator, 1 without any)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="start all workers again after a failure, up to N times (0)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the script's path")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="the script's own arguments, untouched")


def run(args: argparse.Namespace) -> int:
    return launch_script(args.script, args.arguments, args.processes, module=args.module, max_restarts=args.max_restarts)
