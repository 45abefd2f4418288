"""The six questions of `easymp config`, and the draft that they fill: this machine with the settings chosen so far."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from ... import hardware as hardware_package
from ...base import env
from ...distributed import Ranks
from ...errors import RefusedError, SettingError
from ...hardware import Hardware
from ...launcher.rendezvous import read_nodes
from ...plan import Plan, make_plan
from ...protocols import Facts, Source
from ...registry import PRECISIONS, STRATEGIES
from ...settings import NAMES, Settings, checked
from .rules import KNOWN

AUTO = "auto"
UNSET = {"processes": AUTO, "nodes": AUTO, "project_dir": "."}  # answers that leave a setting out of the file
# How many nodes a job has, in Slurm's variables (man sbatch, "OUTPUT ENVIRONMENT VARIABLES").
SLURM = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")


class Machine(NamedTuple):
    """A machine, and the number of machines announced to take part; `name`: by which others reach it."""

    hardware: Hardware
    nodes: int
    nodes_why: str
    name: str = ""


def look() -> Machine:
    """This machine."""
    found = [(env.integer(name) or 0, f"{name} in the environment") for name in SLURM]
    nodes, why = max(found) if max(found)[0] > 0 else (1, "nothing announced others")
    return Machine(hardware_package.detect(), nodes, why, socket.gethostname())


@dataclass(frozen=True)
class Draft:
    """One machine and some settings, those of `easymp launch` among them; the others have their defaults."""

    machine: Machine
    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)  # of the values, in words
    measured: str = ""  # how fast the precisions are here, where they were timed
    assumed: int = 0  # processes on each node, where the settings are for another machine

    def settle(self, name: str, value: Any, origin: str = "asked for") -> Draft:
        """This draft with one value more."""
        return replace(self, values={**self.values, name: value}, origins={**self.origins, name: origin})

    def get(self, name: str) -> Any:
        """The value of a setting, or its default."""
        return self.values.get(name, KNOWN[name].default)

    @property
    def devices(self) -> int:
        """Accelerators to train on; 0: the CPU does."""
        return 0 if self.get("cpu") else len(self.machine.hardware.devices)

    @property
    def threads(self) -> int:
        return self.machine.hardware.cpu.threads

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
        """The plan of rank 0 in the largest world. Raises RefusedError where the values are impossible here."""
        return self._plan(Ranks(0, self.world, 0, self.processes, "asked for"))

    def refusal(self, name: str, value: Any) -> str:
        """Why `value` is impossible beside the other values, or ``""``."""
        try:
            there = self.settle(name, checked(KNOWN[name], value, f"{name} = "), f"{name} = {value}")
            local = there.processes
            for nodes in dict.fromkeys(there.nodes):
                there._plan(Ranks(local * nodes - 1, local * nodes, local - 1, local))
        except (SettingError, RefusedError) as error:
            return str(error)
        return ""

    def _plan(self, ranks: Ranks) -> Plan:
        sources = {name: (Source.ASKED, self.origins[name]) for name in self.values if name in NAMES}
        settings = Settings(**{name: self.values[name] for name in sources}, sources=sources)
        return make_plan(settings, self.machine.hardware, ranks)


class Question(NamedTuple):
    """One setting to decide; an empty text says nothing."""

    name: str
    title: str
    consequence: Callable[[Draft], str]  # the effect of the answer
    matters: Callable[[Draft], bool]  # whether it changes anything here
    here: Callable[[Draft], str]  # the machine's suggestion, with the reason
    choices: Mapping[str, str] = {}  # word: its meaning; empty: any answer
    caution: Callable[[Draft], str] = lambda draft: ""  # about the answer that the draft holds

    @property
    def help(self) -> str:
        words = str(KNOWN[self.name].metadata["help"])
        return words[0].upper() + words[1:]

    @property
    def default(self) -> Any:
        return KNOWN[self.name].default

    def shown(self, value: Any) -> str:
        """The answer that means `value`."""
        return UNSET[self.name] if value is None else str(value)

    def read(self, text: str) -> Any:
        """The value that an answer means. Raises SettingError."""
        if text.lower() == UNSET.get(self.name):
            return None
        if self.name == "nodes":
            least, most = read_nodes(text)
            return f"{least}:{most}" if least < most else str(most)
        if self.name == "project_dir":
            text = os.path.expanduser(text)
            if problem := unusable(text):
                raise SettingError(problem)
        return checked(KNOWN[self.name], text, "")


def unusable(place: str) -> str:
    """Why nothing can be written to `place`, a folder or a URL of fsspec, or ``""``. Nothing is created or connected to."""
    if not place.isprintable():
        return f"{place!r} holds characters that a terminal does not show: use a plain name"
    if "://" in place:
        try:
            fsspec.get_filesystem_class(place.split("://")[0])
        except (ValueError, ImportError) as error:
            return f"fsspec cannot open {place}: {error}"
        return ""
    there = next(path for path in (Path(place), *Path(place).absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{str(there)!r} is a file, so there can be no folder {place}: choose another name"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there.absolute()} cannot be written to by this user: choose another folder"
    return ""


def _processes_consequence(draft: Draft) -> str:
    shared = f"They share the {draft.threads} threads here, and each"
    who = "Each trains on a GPU of its own and" if draft.devices else shared
    return f"{who} sees its own part of the data."


def _too_many(draft: Draft) -> str:
    said = f"{draft.processes} processes take turns on {draft.threads} thread(s): slower than {draft.threads} would be."
    return "" if draft.devices or draft.processes <= draft.threads else said


def _precisions_differ(draft: Draft) -> bool:
    hardware = draft.machine.hardware
    facts = Facts(hardware, hardware.kind if draft.devices else "cpu", draft.world)
    return len({(p.param, p.compute) for p in PRECISIONS.values() if p.refuse(facts) is None}) > 1


def _auto(draft: Draft, name: str, decision: str) -> str:
    choice = draft.settle(name, AUTO).plan().choices[decision]
    return f"auto is {'found out in training' if choice.value == AUTO else choice.value} ({choice.reason})"


def _precision_here(draft: Draft) -> str:
    measured = f"; timed here: {draft.measured}" if draft.measured else ""
    return _auto(draft, "mixed_precision", "precision") + measured


def _precision_caution(draft: Draft) -> str:
    said = draft.plan().precision.reason.partition("; ")[2] if draft.get("mixed_precision") != AUTO else ""
    return said[:1].upper() + said[1:]


def _strategy_caution(draft: Draft) -> str:
    alone = draft.get("strategy") == "hsdp" and draft.nodes[0] == 1
    return "On one node it needs shard_size = ... in the table [strategy_options]." if alone else ""


def _batch(draft: Draft) -> str:
    several = f", times {draft.world} processes" if draft.world > 1 else ""
    return f"An update sees a loader's batch, times this{several}: more than memory holds at once."


QUESTIONS = (
    Question(
        "processes",
        "Processes",
        _processes_consequence,
        lambda draft: draft.devices > 1 or (not draft.devices and draft.threads > 1),
        lambda d: f"auto is {d.devices or 1} ({'one a GPU' if d.devices else 'training runs on the CPU'})",
        caution=_too_many,
    ),
    Question(
        "nodes",
        "Nodes",
        lambda draft: "Each must start the command, and reach the first by the network.",
        lambda draft: draft.devices > 1 or draft.machine.nodes > 1,
        lambda draft: f"auto is {draft.machine.nodes} ({draft.machine.nodes_why})",
    ),
    Question(
        "mixed_precision",
        "Precision",
        lambda draft: "Half precision takes less memory, and less time on hardware with units for it.",
        _precisions_differ,
        _precision_here,
        {AUTO: "decided by the hardware", **PRECISIONS.words},
        _precision_caution,
    ),
    Question(
        "strategy",
        "Strategy",
        lambda draft: "Parts that are divided take less memory on each process, and more communication.",
        lambda draft: draft.world > 1 or draft.devices > 1,
        lambda draft: _auto(draft, "strategy", "strategy"),
        {AUTO: "one process alone, several with ddp, or fsdp where a model does not fit", **STRATEGIES.words},
        _strategy_caution,
    ),
    Question(
        "gradient_accumulation_steps",
        "Gradient accumulation",
        _batch,
        lambda draft: True,
        lambda draft: draft.plan().accumulation.reason,
    ),
    Question(
        "project_dir",
        "Place of checkpoints",
        lambda draft: "Checkpoints go to checkpoints/ in it: several times the model's size each.",
        lambda draft: True,
        lambda draft: "the working directory" if draft.get("project_dir") is None else "",
    ),
)
