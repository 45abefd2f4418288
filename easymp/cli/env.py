"""Show what this machine has, and what easymp would decide on it, with the reasons.

examples:
  easymp env           for people, and for a bug report
  easymp env --json    for programs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from typing import Any

import easymp

from .. import cuda, distributed
from ..hardware import Hardware
from ..settings import resolve
from ..version import __version__
from .terminal import table

GIB = 1 << 30


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    settings = resolve()
    hardware = easymp.detect()
    plan = easymp.make_plan(settings, hardware, distributed.read_ranks())
    if args.json:
        facts_of = {"hardware": plain(dataclasses.asdict(hardware)), "kernels": kernels(hardware)}
        print(json.dumps({"versions": versions(), **facts_of, "plan": plain(plan.as_dict())}, indent=2))
        return 0
    print(
        table(
            [row for row in [*versions().items(), *facts(hardware), ("kernels", kernels(hardware))] if row[1]]
        )
    )
    print("\nPlan")
    print(plan.explain())
    return 0


def versions() -> dict[str, str]:
    import torch

    return {
        "easymp": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def facts(hardware: Hardware) -> list[tuple[str, str]]:
    """Lines of (name, value) about the machine."""
    cpu = hardware.cpu
    lines = [
        ("processor", f"{cpu.name} ({cpu.architecture})"),
        (
            "",
            f"{cpu.cores} cores, {cpu.threads} threads usable, {cpu.numa_nodes} NUMA node(s), {cpu.memory / GIB:.1f} GiB",
        ),
        ("", " ".join(sorted(cpu.features)) or "no vector instructions known"),
    ]
    for device in hardware.devices:
        fast = sorted(
            device.tensor_cores | ({"bf16"} if device.bf16 else set()) | ({"fp16"} if device.fp16 else set())
        )
        build = "" if device.built_for else "; this torch has no code for it"
        lines.append(
            (f"{device.kind}:{device.index}", f"{device.name}, {device.memory / GIB:.1f} GiB{build}")
        )
        lines.append(("", f"{device.architecture or ''} {' '.join(fast)}".strip()))
    if hardware.links:
        lines.append(("links", hardware.links))
    lines.extend(("not found" if i == 0 else "", why) for i, why in enumerate(hardware.looked_for))
    return lines


def kernels(hardware: Hardware) -> str:
    """Whether our kernels run here by what is installed, and if not, why; no device is asked, and CuPy is not imported."""
    import torch

    capability = next((d.capability for d in hardware.devices if d.kind == "cuda"), None)
    found = dataclasses.replace(cuda.facts(torch.device("cpu")), capability=capability)
    return cuda.unavailable(found) or "CuPy " + ", ".join(
        f"{version} ({name})" for name, version in found.wheels.items()
    )


def plain(value: Any) -> Any:
    """`value` in JSON's own types; sets become sorted lists."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
