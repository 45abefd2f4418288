"""The six questions of `easymp config`: what each decides, when it matters here, and what an answer may be."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import SettingError
from ...launcher.rendezvous import read_nodes
from ...protocols import Facts
from ...registry import PRECISIONS, STRATEGIES
from ...settings import checked
from .draft import AUTO, KNOWN, Draft

UNSET = {"processes": AUTO, "nodes": AUTO, "project_dir": "."}  # answers that leave a setting out of the file


@dataclass(frozen=True)
class Question:
    """One setting to decide; "" is nothing to say."""

    name: str
    title: str
    consequence: Callable[[Draft], str]  # what the answer changes
    matters: Callable[[Draft], bool]  # whether it changes anything here
    here: Callable[[Draft], str]  # what the machine suggests, with the reason
    choices: Mapping[str, str] = field(
        default_factory=dict
    )  # word: its meaning; none: other answers are possible
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
        return f"{place!r} holds characters that no terminal shows: use a plain name"
    if "://" in place:
        import fsspec

        name = place.split("://")[0]
        try:
            fsspec.get_filesystem_class(name)
        except ValueError:
            return f"fsspec knows no protocol {name!r}: write a folder, or a URL such as s3://bucket/runs"
        except ImportError as error:
            return f"{name}:// needs a package that is not installed: {error}"
        return ""
    there = Path(place)
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"{str(there)!r} is a file, so there can be no folder {place}: choose another name"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there.absolute()} cannot be written to by this user: choose another folder"
    return ""


def _processes_consequence(draft: Draft) -> str:
    if draft.devices:
        return "Each trains on a GPU of its own and sees its own part of the data."
    threads = draft.machine.hardware.cpu.threads
    return f"They share the {threads} threads here, and each sees its own part of the data."


def _too_many(draft: Draft) -> str:
    threads = draft.machine.hardware.cpu.threads
    if draft.devices or draft.processes <= threads:
        return ""
    return f"{draft.processes} processes take turns on {threads} thread(s): slower than {threads} would be."


def _precisions_differ(draft: Draft) -> bool:
    facts = Facts(
        draft.machine.hardware, draft.machine.hardware.kind if draft.devices else "cpu", draft.world
    )
    return len({(p.param, p.compute) for p in PRECISIONS.values() if p.refuse(facts) is None}) > 1


def _auto(draft: Draft, name: str, decision: str) -> str:
    choice = draft.settle(name, AUTO).plan().choices[decision]
    return f"auto is {'found out in training' if choice.value == AUTO else choice.value} ({choice.reason})"


def _precision_here(draft: Draft) -> str:
    measured = f"; timed here: {draft.measured.reason(draft.measured.fastest)}" if draft.measured else ""
    return _auto(draft, "mixed_precision", "precision") + measured


def _precision_caution(draft: Draft) -> str:
    said = draft.plan().precision.reason.partition("; ")[2] if draft.get("mixed_precision") != AUTO else ""
    return said[:1].upper() + said[1:]


def _strategy_caution(draft: Draft) -> str:
    if draft.get("strategy") != "hsdp" or draft.nodes[0] > 1:
        return ""
    return "On one node it needs shard_size = ... in the table [strategy_options]."


def _batch(draft: Draft) -> str:
    several = f", times {draft.world} processes" if draft.world > 1 else ""
    return f"An update sees a loader's batch, times this{several}: more than memory holds at once."


QUESTIONS = (
    Question(
        "processes",
        "Processes",
        _processes_consequence,
        lambda draft: draft.devices > 1 or (not draft.devices and draft.machine.hardware.cpu.threads > 1),
        lambda draft: (
            f"auto is {draft.devices or 1} ({'one a GPU' if draft.devices else 'training runs on the CPU'})"
        ),
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
        lambda draft: "What is divided takes less memory on each process, and more communication.",
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
