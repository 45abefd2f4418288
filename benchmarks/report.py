"""What the benchmarks share: a table, where it was measured, and the file that keeps it."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

import easymp

RESULTS = Path(__file__).parent / "results"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns line up in a terminal too: the first to the left, numbers to the right."""
    lines = [list(map(str, head)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rule = [f"{'-' * widths[0]}", *(f"{'-' * (w - 1)}:" for w in widths[1:])]
    told = [[line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [told[0], rule, *told[1:]])


def processor() -> str:
    """``"AMD EPYC, 2 cores"``: what a reader needs to compare, and nothing that says whose machine it is."""
    cpu = easymp.detect().cpu
    return f"{cpu.name}, {cpu.cores} cores"


def here(*packages: str) -> str:
    """Machine, versions and load, in a line each."""
    versions = [f"easymp {easymp.__version__}", *(f"{name} {metadata.version(name)}" for name in packages)]
    busy = (
        f"{os.getloadavg()[0]:.1f} processes were waiting or running in the last minute"
        if hasattr(os, "getloadavg")
        else ""
    )
    return "\n".join(
        f"- {line}"
        for line in (
            f"{processor()}, {platform.system()} {platform.machine()}",
            f"Python {platform.python_version()}, torch {torch.__version__}, {', '.join(versions)}",
            datetime.date.today().isoformat() + (f"; {busy}" if busy else ""),
        )
        if line
    )


def forget_peak(device: torch.device) -> int:
    """Begin to look for the peak of memory; returns the bytes that are in use."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak(device: torch.device) -> int:
    """The most bytes that were in use since `forget_peak`: on the device, or of this process."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def options(parser: argparse.ArgumentParser, name: str, machine: str | None = None) -> None:
    """Where the result goes. `machine`: what it was measured on, the processor by default."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a result file")
    parser.add_argument(
        "--keep",
        dest="out",
        action="store_const",
        const=_place(name, machine or processor()),
        help="write it to benchmarks/results, named for this machine",
    )


def _place(name: str, machine: str) -> Path:
    words = "-".join("".join(c if c.isalnum() else " " for c in machine.lower()).split())
    return RESULTS / f"{name}-{words}-{datetime.date.today().isoformat()}.md"


def hand_in(text: str, out: Path | None) -> None:
    """Print a report; keep it in a file where one was named."""
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
