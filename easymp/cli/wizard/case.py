"""A machine and the values settled so far: what they come to, and whether one more can be had.

Nothing is decided here: the plan is asked as it will be in a run, for the smallest and the largest world that the values allow, and
as the last rank of each, which is the one that lacks a device where there are too few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...distributed import Ranks
from ...errors import RefusedError, SettingError
from ...launcher.rendezvous import read_nodes
from ...plan import Plan, make_plan
from ...protocols import Source
from ...settings import LAUNCHING, NAMES, Settings, checked
from .looking import Machine
from .measuring import Measurement, measure

KNOWN = {**NAMES, **LAUNCHING}
AUTO = "auto"


@dataclass(frozen=True)
class Case:
    """One machine and some values.

    Attributes:
        values: settings by name, those of `easymp launch` among them; what is not there has its default.
        origins: who said so, of some.
        measured: how fast the precisions are here, where somebody wanted to know.
        assumed: processes on each node, where the values are for another machine than this one; 0: as many as here.
    """

    machine: Machine
    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    measured: Measurement | None = None
    assumed: int = 0

    def settle(self, name: str, value: Any, origin: str = "asked for") -> Case:
        """This case with one value more."""
        return dataclasses.replace(
            self, values={**self.values, name: value}, origins={**self.origins, name: f"{origin}"}
        )

    def get(self, name: str) -> Any:
        """The value of a setting, or its default."""
        return self.values.get(name, KNOWN[name].default)

    @property
    def devices(self) -> int:
        """Accelerators to train on; 0: the CPU does."""
        return 0 if self.get("cpu") else len(self.machine.hardware.devices)

    @property
    def processes(self) -> int:
        """On each node: as said, or as assumed, or one an accelerator, or one."""
        return self.get("processes") or self.assumed or max(1, self.devices)

    @property
    def nodes(self) -> tuple[int, int]:
        """At least, and at most: as said, or as many as were announced."""
        return read_nodes(self.get("nodes") or str(self.machine.nodes))

    @property
    def world(self) -> int:
        """Processes in all, on the largest number of nodes."""
        return self.processes * self.nodes[1]

    def plan(self) -> Plan:
        """As rank 0 of the largest world sees it.

        Raises:
            RefusedError: the values cannot be had here.
        """
        return make_plan(
            self._settings(), self.machine.hardware, Ranks(0, self.world, 0, self.processes, "asked for")
        )

    def refusal(self, name: str, value: Any) -> str:
        """Why `value` cannot be had beside what is settled, or ``""``."""
        try:
            there = self.settle(name, checked(KNOWN[name], value, f"{name} = "), f"{name} = {value}")
            for ranks in there._worlds():
                make_plan(there._settings(), self.machine.hardware, ranks)
        except (SettingError, RefusedError) as error:
            return str(error)
        return ""

    def measure(self) -> Case:
        """This case with its precisions timed, about ten seconds long.

        Raises:
            RuntimeError: torch cannot use the device.
        """
        return dataclasses.replace(self, measured=measure(self.machine.hardware, cpu=self.get("cpu")))

    def _worlds(self) -> Iterator[Ranks]:
        local = self.processes
        for nodes in dict.fromkeys(self.nodes):
            yield Ranks(local * nodes - 1, local * nodes, local - 1, local)

    def _settings(self) -> Settings:
        values = {name: value for name, value in self.values.items() if name in NAMES}
        return Settings(
            **values,
            sources={name: (Source.ASKED, self.origins[name]) for name in values if name in self.origins},
        )
