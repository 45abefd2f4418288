"""Runs this folder's programs on two processes, and writes README.md: what each takes to write, start and train.

python examples/approaches/table.py              the table, and README.md
python examples/approaches/table.py --rounds 1 --only horovod easymp --print
"""

from __future__ import annotations

import argparse
import ast
import datetime
import io
import os
import platform
import re
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

import torch

import easymp

FOLDER = Path(__file__).resolve().parent
PYTHON = (sys.executable,)
LAUNCH = (*PYTHON, "-m", "easymp", "launch", "--processes", "2")


@dataclass(frozen=True)
class Approach:
    """One program, and how it is started."""

    name: str
    title: str
    precision: str
    shown: str  # the command, as a user types it; {} is the program
    command: tuple[str, ...] = LAUNCH
    arguments: tuple[str, ...] = ()
    processes: int = 2
    file: str = ""  # a configuration that it needs

    @property
    def program(self) -> Path:
        return FOLDER / f"with_{self.name}.py"


APPROACHES = (
    Approach("dataparallel", "DataParallel", "fp32", "python {}", PYTHON, processes=1),
    Approach(
        "distributed", "torch.distributed", "fp32", "python -m torch.distributed.launch --nproc_per_node 2 {}",
        (*PYTHON, "-m", "torch.distributed.launch", "--nproc_per_node", "2"),
    ),
    Approach("spawn", "multiprocessing.spawn", "fp32", "python {} --processes 2", PYTHON, ("--processes", "2")),
    Approach("slurm", "Slurm", "fp32", "srun -n 2 python {}", PYTHON),
    Approach("apex", "Apex (easymp.compat)", "fp16 (O2)", "easymp launch --processes 2 {}"),
    Approach("horovod", "Horovod (easymp.compat)", "fp32, sent as fp16", "easymp launch --processes 2 {}"),
    Approach("deepspeed", "DeepSpeed (easymp.compat)", "bf16", "easymp launch --processes 2 {}", file="ds_config.json"),
    Approach("easymp", "easymp", "fp32", "easymp launch --processes 2 {}"),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a program said at its end."""

    accuracy: float  # per cent
    loss: float
    seconds: float
    memory: float  # MiB


def lines_of_code(source: str) -> int:
    """Lines that are neither blank nor comments nor docstrings."""
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def size(approach: Approach) -> str:
    """Lines of the program, and of its configuration."""
    code = str(lines_of_code(approach.program.read_text(encoding="utf-8")))
    return (
        f"{code} + {len((FOLDER / approach.file).read_text(encoding='utf-8').splitlines())}" if approach.file else code
    )


def run(approach: Approach, *arguments: str) -> Run:
    """Train by it, on one thread a process.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    foreign = ("EASYMP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    clean |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), clean.get("PYTHONPATH", "")]),
    }
    command = [*approach.command, str(approach.program), *approach.arguments, *arguments]
    started = [
        subprocess.Popen(command, env=clean | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for variables in (srun() if approach.name == "slurm" else [{}])
    ]
    said = [process.communicate()[0] for process in started]
    for process, words in zip(started, said):
        if process.returncode:
            raise RuntimeError(f"{approach.program.name} ended with {process.returncode}:\n{words[-3000:]}")
    return Run(*(number(name, said[0]) for name in ("test accuracy", "test loss", "training", "peak memory")))


def srun() -> list[dict[str, str]]:
    """The variables that two tasks of srun have, so that the program can be shown without a cluster."""
    job = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1"}
    return [job | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]


def number(name: str, said: str) -> float:
    found = re.search(rf"^{name} +([0-9.]+)", said, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no line of {name!r} in:\n{said[-3000:]}")
    return float(found[1])


HEAD = ("approach", "lines", "precision", "training", "peak memory", "test accuracy", "started by")


def row(approach: Approach, runs: list[Run]) -> tuple[str, ...]:
    best = min(runs, key=lambda run: run.seconds)
    return (
        f"[{approach.title}]({approach.program.name})",
        size(approach),
        approach.precision,
        f"{best.seconds:.1f} s",
        f"{best.memory:.0f} MiB",
        f"{best.accuracy:.2f} %",
        f"`{approach.shown.format(approach.program.name)}`",
    )


def table(rows: list[tuple[str, ...]]) -> str:
    lines = [HEAD, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    told = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths)) for line in lines]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [told[0], rule, *told[1:]])


def machine() -> str:
    cpu = easymp.detect().cpu
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cpu.name}, {cpu.cores} cores"
    return f"{device}; {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"


TEXT = """# One model, eight approaches

The network and the digits of [`examples/digits.py`](../digits.py), trained for 15 epochs by updates of 64 samples with
AdamW, as users of each approach write it. Shared ([task.py](task.py)) are the data, the model, the sums of an
evaluation in which each test sample counts once, and a prefetcher that copies the next batch to the device on a side
stream. The programs for Apex, Horovod and DeepSpeed are those of their users but for the import line, which a comment
has as it was; [docs/](../../docs) has a guide for each.

{table}

{machine}; {date}; {load:.0f} processes were waiting or running in the last minute.
Made by `python examples/approaches/table.py`.

- Lines are the program's own, without blank ones, comments and docstrings; behind the `+` those of its configuration.
- Two processes, of which each has one thread; DataParallel is one process (that drives all GPUs, where there are some).
  Training is the time of all epochs with an evaluation after each. On a model this small that is mostly the cost of
  starting operations and messages, and fp16 is slow on most CPUs: what is quick here says little about large models on
  GPUs. What other processes do meanwhile counts, too: a program of the same code (torch.distributed, spawn, Slurm)
  differs from run to run by as much as these rows.
- Peak memory is that of the first process with its libraries on a CPU, and of the device on a GPU.
- For Slurm the table starts two processes with the variables that srun sets.
"""


def kept() -> dict[str, tuple[str, ...]]:
    """The rows that README.md has, by their first cell."""
    place = FOLDER / "README.md"
    lines = place.read_text(encoding="utf-8").splitlines() if place.exists() else []
    cells = [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines if line.startswith("| [")]
    return {row[0]: row for row in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=2, help="runs of each, of which the quickest counts (%(default)s)"
    )
    parser.add_argument("--only", nargs="+", choices=[a.name for a in APPROACHES], help="these programs")
    args = parser.parse_args()
    chosen = [a for a in APPROACHES if not args.only or a.name in args.only]
    runs: dict[str, list[Run]] = {a.name: [] for a in chosen}
    for _ in range(args.rounds):  # in turn, so that a disturbance meets one run of several
        for approach in chosen:
            runs[approach.name].append(run(approach))
            print(approach.name, runs[approach.name][-1], file=sys.stderr)
    rows = kept() | {first: (first, *rest) for first, *rest in (row(a, runs[a.name]) for a in chosen)}
    order = [f"[{a.title}]({a.program.name})" for a in APPROACHES]
    told = table([rows[first] for first in order if first in rows])
    print(told)
    text = TEXT.format(table=told, machine=machine(), date=datetime.date.today().isoformat(), load=os.getloadavg()[0])
    (FOLDER / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
