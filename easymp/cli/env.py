"""Show this machine, and the plan that a run has on it, with the reasons.

examples:
  easymp env           for people, and for a bug report
  easymp env --json    for programs
  easymp env --for 8xH100          what would be decided on another machine
  easymp env --for 2x8xA100-80GB   on two nodes of eight
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import easymp

from .. import cuda, distributed
from ..base.lazy import modules_at_first_use
from ..base.units import size
from ..settings import resolve
from ..version import __version__
from .terminal import MACHINE_HELP, print_json, table

if TYPE_CHECKING:
    from ..hardware import Hardware, accelerators
else:  # it imports torch
    modules_at_first_use(globals(), accelerators=".hardware.accelerators")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--for", dest="machine", metavar="MACHINE", help=MACHINE_HELP)


def run(args: argparse.Namespace) -> int:
    import torch

    settings = resolve()
    rows: list[Sequence[str]]
    if args.machine is None:
        hardware, ranks = easymp.detect(), distributed.read_ranks()
        versions = {
            "easymp": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        }
        record = {"versions": versions, "hardware": dataclasses.asdict(hardware), "kernels": kernels(hardware)}
        rows = [*versions.items(), *facts(hardware), ("kernels", kernels(hardware))]
    else:
        machine = accelerators.describe(args.machine)
        hardware, processes = machine.hardware, machine.processes
        ranks = distributed.Ranks(0, machine.nodes * processes, 0, processes, f"--for {args.machine}")
        record = {**machine._asdict(), "hardware": dataclasses.asdict(hardware)}
        unknown = (["not known", sentence] for sentence in machine.unknown)
        rows = [*facts(hardware), ["nodes", str(machine.nodes)], *unknown]
    plan = easymp.make_plan(settings, hardware, ranks)
    if args.json:
        return print_json({**record, "plan": plan.as_dict()})
    print(f"{table([row for row in rows if row[1]], fold=args.machine is not None)}\n\nPlan\n{plan.explain()}")
    return 0


def facts(hardware: Hardware) -> list[list[str]]:
    """Rows of a name and a fact about the machine. Equal accelerators share a row."""
    cpu, rows = hardware.cpu, []
    if cpu.architecture:  # a machine that was described in words has none
        threads = f"{cpu.threads} threads usable, {cpu.numa_nodes} NUMA node(s)"
        rows += [
            ["processor", f"{cpu.name} ({cpu.architecture})"],
            ["", f"{cpu.cores} cores, {threads}, {size(cpu.memory)}"],
            ["", " ".join(sorted(cpu.features)) or "no vector instructions known"],
        ]
    for device, group in groupby(hardware.devices, lambda device: dataclasses.replace(device, index=0)):
        indices = [member.index for member in group]
        last_index = f"-{indices[-1]}" if len(indices) > 1 else ""
        count = f"{len(indices)} x " if len(indices) > 1 else ""
        note = "" if device.built_for else "; this torch has no code for it"
        rows.append([f"{device.kind}:{indices[0]}{last_index}", f"{count}{device.name}, {size(device.memory)}{note}"])
        units = device.tensor_cores | {name for name in ("bf16", "fp16") if getattr(device, name)}
        rows.append(["", f"{device.architecture or ''} {' '.join(sorted(units))}".strip()])
    return rows + [["" if i else "not found", reason] for i, reason in enumerate(hardware.looked_for)]


def kernels(hardware: Hardware) -> str:
    """The installed CuPy, or why the kernels do not run here. CuPy is not imported."""
    import torch

    nvidia = any(d.kind == "cuda" and d.capability is not None for d in hardware.devices)
    cupy = cuda.facts(torch.device("cpu"))._replace(nvidia=nvidia)
    wheels = ", ".join(f"{version} ({name})" for name, version in cupy.wheels.items())
    return cuda.unavailable(cupy) or f"CuPy {wheels}"
