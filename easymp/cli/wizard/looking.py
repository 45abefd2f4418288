"""What is here, for people: the accelerators, what they multiply, how they reach each other, the processor, the nodes."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from ...base import env
from ...base.units import size
from ...hardware import CPU, Device, Hardware, detect

# How many nodes a job has, as Slurm says it (man sbatch, "OUTPUT ENVIRONMENT VARIABLES").
SLURM = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")


@dataclass(frozen=True)
class Machine:
    """This machine, and how many like it were announced to take part.

    Attributes:
        nodes_why: who announced them; "" where nobody did.
        name: by which others may reach it.
    """

    hardware: Hardware
    nodes: int = 1
    nodes_why: str = ""
    name: str = ""


def look() -> Machine:
    """The facts; see `detect` for what is asked of devices."""
    for name in SLURM:
        nodes = env.integer(name)
        if nodes is not None and nodes > 0:
            return Machine(detect(), nodes, f"{name} in the environment", socket.gethostname())
    return Machine(detect(), name=socket.gethostname())


def facts(machine: Machine) -> list[list[str]]:
    """Rows of a name and what was found."""
    hardware = machine.hardware
    rows = [row for group in _alike(hardware.devices) for row in _devices(group)]
    rows += [
        ["no GPU" if i == 0 else "", why] for i, why in enumerate(hardware.looked_for if not rows else ())
    ]
    if hardware.links:
        rows.append(["links", hardware.links])
    rows += _processor(hardware.cpu)
    why = f" ({machine.nodes_why})" if machine.nodes_why else " (nothing announced others)"
    return [*rows, ["nodes", f"{machine.nodes}{why}"]]


def _alike(devices: Iterable[Device]) -> list[list[Device]]:
    """Neighbours that differ in nothing but their index."""
    return [list(group) for _, group in groupby(devices, lambda device: dataclasses.replace(device, index=0))]


def _devices(group: list[Device]) -> list[list[str]]:
    one, last = group[0], group[-1]
    name = (
        one.kind
        if one.kind == "mps"
        else f"{one.kind}:{one.index}" + (f"-{last.index}" if len(group) > 1 else "")
    )
    capability = f"{one.capability[0]}.{one.capability[1]}" if one.capability else ""
    architecture = f"({one.architecture})" if capability and one.architecture else one.architecture or ""
    rows = [
        [name, f"{len(group)} x {one.name}" if len(group) > 1 else one.name],
        ["memory", size(one.memory) + (" each" if len(group) > 1 else "")],
        ["capability", f"{capability} {architecture}".strip()],
        ["bf16", "yes" if one.bf16 else "no units for it"],
        ["fp16", "yes" if one.fp16 else "no faster than fp32"],
        ["fp8", "yes" if one.fp8 else "no"],
        ["TF32", "yes" if one.tf32 else "no"],
        ["", "" if one.built_for else "this torch has no code for it"],
    ]
    return [row for row in rows if row[1]]


def _processor(cpu: CPU) -> list[list[str]]:
    of_bf16 = sorted(feature for feature in cpu.features if feature.endswith("_bf16"))
    return [
        ["processor", f"{cpu.name} ({cpu.architecture})"],
        ["cores", f"{cpu.cores}, {cpu.threads} thread(s) usable, {cpu.numa_nodes} NUMA node(s)"],
        ["memory", size(cpu.memory)],
        ["bf16", ", ".join(of_bf16) if cpu.bf16 else "no instructions for it"],
    ]
