"""The six questions, as data: what each decides, when it matters here, what the machine suggests, and what an answer may be."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import SettingError
from ...launcher.rendezvous import read_nodes
from ...protocols import Facts
from ...registry import PRECISIONS, STRATEGIES
from ...settings import checked
from .case import AUTO, KNOWN, Case
from .places import unusable

# A few words each, for who has to choose.
PRECISION = {AUTO: "decided by the hardware", **PRECISIONS.words}
STRATEGY = {
    AUTO: "one process alone, several with ddp, or fsdp where a model does not fit",
    **STRATEGIES.words,
}
# What a strategy needs of the script where there is one node.
ON_ONE_NODE = {"hsdp": "On one node it needs strategy_options=HSDPOptions(shard_size=...) in the script."}


@dataclass(frozen=True)
class Question:
    """One thing to decide.

    Attributes:
        name: of the setting.
        title: in words.
        consequence: one sentence: what the answer changes.
        matters: whether it changes anything here.
        here: what the machine suggests, with the reason; "" for nothing.
        choices: words to choose from, each with its meaning; none where other answers are possible.
        read: an answer as the setting's value. Raises SettingError.
        caution: what to know of an answer that can be had; "" for nothing. The case has it settled.
        measurable: whether ten seconds can say more about it.
    """

    name: str
    title: str
    consequence: Callable[[Case], str]
    matters: Callable[[Case], bool]
    here: Callable[[Case], str]
    choices: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Question, str], Any] = lambda question, text: checked(KNOWN[question.name], text, "")
    caution: Callable[[Case], str] = lambda case: ""
    measurable: bool = False

    @property
    def help(self) -> str:
        """What the setting is, with a capital."""
        words = str(KNOWN[self.name].metadata["help"])
        return words[0].upper() + words[1:]

    @property
    def default(self) -> Any:
        return KNOWN[self.name].default

    def shown(self, value: Any) -> str:
        """The answer that means `value`."""
        return UNSET[self.name] if value is None else str(value)


# The answers that leave a setting out of the file.
UNSET = {"processes": AUTO, "nodes": AUTO, "project_dir": "."}


def _processes(question: Question, text: str) -> int | None:
    return None if text.lower() == AUTO else checked(KNOWN[question.name], text, "")


def _nodes(question: Question, text: str) -> str | None:
    if text.lower() == AUTO:
        return None
    least, most = read_nodes(text)
    return f"{least}:{most}" if least < most else str(most)


def _place(question: Question, text: str) -> str | None:
    place = os.path.expanduser(text)
    problem = unusable(place)
    if problem:
        raise SettingError(problem)
    return None if place == UNSET[question.name] else place


def _processes_here(case: Case) -> str:
    if case.devices:
        return f"auto is {case.devices} (one a GPU)"
    return "auto is 1 (training runs on the CPU)"


def _processes_consequence(case: Case) -> str:
    if case.devices:
        return "Each trains on a GPU of its own and sees its own part of the data."
    return f"They share the {case.machine.hardware.cpu.threads} threads here, and each sees its own part of the data."


def _too_many(case: Case) -> str:
    threads = case.machine.hardware.cpu.threads
    if case.devices or case.processes <= threads:
        return ""
    return f"{case.processes} processes take turns on {threads} thread(s): slower than {threads} would be."


def _nodes_here(case: Case) -> str:
    machine = case.machine
    return f"auto is {machine.nodes} ({machine.nodes_why or 'nothing announced others'})"


def _several_nodes(case: Case) -> bool:
    return case.devices > 1 or case.machine.nodes > 1


def _precisions_differ(case: Case) -> bool:
    facts = Facts(case.machine.hardware, case.machine.hardware.kind if case.devices else "cpu", case.world)
    kinds = {(p.param, p.compute) for p in PRECISIONS.values() if p.refuse(facts) is None}
    return len(kinds) > 1


def _auto(case: Case, name: str, decision: str) -> str:
    choice = case.settle(name, AUTO).plan().choices[decision]
    return f"auto is {'found out in training' if choice.value == AUTO else choice.value} ({choice.reason})"


def _precision_here(case: Case) -> str:
    measured = f"; timed here: {case.measured.reason(case.measured.fastest)}" if case.measured else ""
    return _auto(case, "mixed_precision", "precision") + measured


def _precision_caution(case: Case) -> str:
    said = case.plan().precision.reason.partition("; ")[2] if case.get("mixed_precision") != AUTO else ""
    return said[:1].upper() + said[1:]


def _batch(case: Case) -> str:
    several = f", times {case.world} processes" if case.world > 1 else ""
    return f"An update sees a loader's batch, times this{several}: larger batches than memory holds, and as much longer."


QUESTIONS = (
    Question(
        "processes",
        "Processes",
        _processes_consequence,
        lambda case: case.devices > 1 or (case.devices == 0 and case.machine.hardware.cpu.threads > 1),
        _processes_here,
        read=_processes,
        caution=_too_many,
    ),
    Question(
        "nodes",
        "Nodes",
        lambda case: "Each must start the command, and reach the first by the network.",
        _several_nodes,
        _nodes_here,
        read=_nodes,
    ),
    Question(
        "mixed_precision",
        "Precision",
        lambda case: (
            "Half precision takes less memory, and less time where the hardware has units for it; fp32 is exact."
        ),
        _precisions_differ,
        _precision_here,
        PRECISION,
        caution=_precision_caution,
        measurable=True,
    ),
    Question(
        "strategy",
        "Strategy",
        lambda case: (
            "What is divided takes less memory on each process, and more communication between them."
        ),
        lambda case: case.world > 1 or case.devices > 1,
        lambda case: _auto(case, "strategy", "strategy"),
        STRATEGY,
        caution=lambda case: ON_ONE_NODE.get(case.get("strategy"), "") if case.nodes[0] == 1 else "",
    ),
    Question(
        "gradient_accumulation_steps",
        "Gradient accumulation",
        _batch,
        lambda case: True,
        lambda case: case.plan().accumulation.reason,
    ),
    Question(
        "project_dir",
        "Place of checkpoints",
        lambda case: "Checkpoints go to checkpoints/ in it: several times the model's size each.",
        lambda case: True,
        lambda case: "the working directory" if case.get("project_dir") is None else "",
        read=_place,
    ),
)
