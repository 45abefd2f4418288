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
from itertools import groupby
from typing import TYPE_CHECKING

import easymp

from .. import cuda, distributed
from ..base.lazy import modules_at_first_use
from ..base.units import size
from ..hardware import Hardware
from ..settings import resolve
from ..version import __version__
from .terminal import print_json, table

if TYPE_CHECKING:
    from ..hardware import gpus
else:  # it imports torch
    modules_at_first_use(globals(), gpus=".hardware.gpus")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    words = "another machine: 8xH100, 2x8xA100-80GB (two nodes), 64x80GB, 4xcpu"
    parser.add_argument("--for", dest="machine", metavar="MACHINE", help=words)


def run(args: argparse.Namespace) -> int:
    settings = resolve()
    if args.machine is not None:
        return _elsewhere(args, settings)
    hardware = easymp.detect()
    plan = easymp.make_plan(settings, hardware, distributed.read_ranks())
    if args.json:
        facts_of = {"hardware": dataclasses.asdict(hardware), "kernels": kernels(hardware)}
        return print_json({"versions": versions(), **facts_of, "plan": plan.as_dict()})
    rows = [*versions().items(), *facts(hardware), ("kernels", kernels(hardware))]
    print(table([row for row in rows if row[1]]))
    print("\nPlan")
    print(plan.explain())
    return 0


def _elsewhere(args: argparse.Namespace, settings: easymp.Settings) -> int:
    there = gpus.describe(args.machine)
    world = there.nodes * there.processes
    ranks = distributed.Ranks(0, world, 0, there.processes, f"--for {args.machine}")
    plan = easymp.make_plan(settings, there.hardware, ranks)
    if args.json:
        known = {**there._asdict(), "hardware": dataclasses.asdict(there.hardware)}
        return print_json({**known, "plan": plan.as_dict()})
    unknown = [["not known", words] for words in there.unknown]
    rows = [*facts(there.hardware), ["nodes", there.nodes], *unknown]
    print(f"{table(rows, fold=True)}\n\nPlan\n{plan.explain()}")
    return 0


def versions() -> dict[str, str]:
    import torch

    return {
        "easymp": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def facts(hardware: Hardware) -> list[list[str]]:
    """Rows of a name and a fact about the machine. Equal accelerators share a row."""
    cpu = hardware.cpu
    threads = f"{cpu.threads} threads usable, {cpu.numa_nodes} NUMA node(s)"
    rows = [
        ["processor", f"{cpu.name} ({cpu.architecture})"],
        ["", f"{cpu.cores} cores, {threads}, {size(cpu.memory)}"],
        ["", " ".join(sorted(cpu.features)) or "no vector instructions known"],
    ]
    rows = rows if cpu.architecture else []  # of a machine in words
    alike = groupby(hardware.devices, lambda device: dataclasses.replace(device, index=0))
    for _, group in alike:
        one, *others = group
        many = f"-{others[-1].index}" if others else ""
        build = "" if one.built_for else "; this torch has no code for it"
        count = f"{1 + len(others)} x " if others else ""
        rows.append([f"{one.kind}:{one.index}{many}", f"{count}{one.name}, {size(one.memory)}{build}"])
        units = one.tensor_cores | {name for name in ("bf16", "fp16") if getattr(one, name)}
        rows.append(["", f"{one.architecture or ''} {' '.join(sorted(units))}".strip()])
    rows += [["links", hardware.links]] if hardware.links else []
    return rows + [["" if i else "not found", why] for i, why in enumerate(hardware.looked_for)]


def kernels(hardware: Hardware) -> str:
    """The installed CuPy, or why the kernels do not run here. CuPy is not imported."""
    import torch

    capability = next((d.capability for d in hardware.devices if d.kind == "cuda"), None)
    found = cuda.facts(torch.device("cpu"))._replace(capability=capability)
    wheels = ", ".join(f"{version} ({name})" for name, version in found.wheels.items())
    return cuda.unavailable(found) or f"CuPy {wheels}"
