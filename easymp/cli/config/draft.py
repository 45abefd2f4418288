"""The machine, and the settings chosen for it so far: what they come to, and whether one more is possible.

The plan is asked as it will be in a run, for the smallest and the largest world that the settings allow, and as the last
rank of each, which is the one that lacks a device where there are too few.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ... import hardware as hardware_package
from ...base import env
from ...distributed import Ranks
from ...errors import RefusedError, SettingError
from ...hardware import Hardware
from ...launcher.rendezvous import read_nodes
from ...plan import Plan, make_plan
from ...protocols import Source
from ...settings import LAUNCHING, NAMES, Settings, checked
from .timing import Measurement

KNOWN = {**NAMES, **LAUNCHING}
AUTO = "auto"
# How many nodes a job has, in Slurm's variables (man sbatch, "OUTPUT ENVIRONMENT VARIABLES").
SLURM = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")


@dataclass(frozen=True)
class Machine:
    """This machine, and how many like it were announced to take part."""

    hardware: Hardware
    nodes: int = 1
    nodes_why: str = "nothing announced others"
    name: str = ""  # by which others reach it


def look() -> Machine:
    """This machine."""
    found = [(env.integer(name) or 0, f"{name} in the environment") for name in SLURM]
    nodes, why = next((pair for pair in found if pair[0] > 0), (1, Machine.nodes_why))
    return Machine(hardware_package.detect(), nodes, why, socket.gethostname())


@dataclass(frozen=True)
class Draft:
    """One machine and some settings, those of `easymp launch` among them; the others have their defaults."""

    machine: Machine
    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)  # of the values, in words
    measured: Measurement | None = None
    assumed: int = 0  # processes on each node, where the settings are for another machine

    def settle(self, name: str, value: Any, origin: str = "asked for") -> Draft:
        """This draft with one value more."""
        values, origins = {**self.values, name: value}, {**self.origins, name: origin}
        return dataclasses.replace(self, values=values, origins=origins)

    def get(self, name: str) -> Any:
        """The value of a setting, or its default."""
        return self.values.get(name, KNOWN[name].default)

    @property
    def devices(self) -> int:
        """Accelerators to train on; 0: the CPU does."""
        return 0 if self.get("cpu") else len(self.machine.hardware.devices)

    @property
    def processes(self) -> int:
        """On each node: as set, or as assumed, or one an accelerator, or one."""
        return self.get("processes") or self.assumed or max(1, self.devices)

    @property
    def nodes(self) -> tuple[int, int]:
        """At least, and at most: as set, or as announced."""
        return read_nodes(self.get("nodes") or str(self.machine.nodes))

    @property
    def world(self) -> int:
        """Processes in all, on the largest number of nodes."""
        return self.processes * self.nodes[1]

    def plan(self) -> Plan:
        """As rank 0 of the largest world sees it.

        Raises:
            RefusedError: the values are impossible here.
        """
        ranks = Ranks(0, self.world, 0, self.processes, "asked for")
        return make_plan(self._settings(), self.machine.hardware, ranks)

    def refusal(self, name: str, value: Any) -> str:
        """Why `value` is impossible beside the other values, or ``""``."""
        try:
            there = self.settle(name, checked(KNOWN[name], value, f"{name} = "), f"{name} = {value}")
            local = there.processes
            for nodes in dict.fromkeys(there.nodes):
                ranks = Ranks(local * nodes - 1, local * nodes, local - 1, local)
                make_plan(there._settings(), self.machine.hardware, ranks)
        except (SettingError, RefusedError) as error:
            return str(error)
        return ""

    def _settings(self) -> Settings:
        values = {name: value for name, value in self.values.items() if name in NAMES}
        origins = {name: (Source.ASKED, self.origins[name]) for name in values if name in self.origins}
        return Settings(**values, sources=origins)
