"""What is said before the first question, on the command line and in files: it answers questions, or gives them their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RefusedError, SettingError, nearest
from ...settings import checked
from .case import KNOWN, Case
from .questions import QUESTIONS, Question
from .screen import sentence


class UnansweredError(Exception):
    """There are questions, and nobody to answer them.

    Attributes:
        rows: the settings that are open, what would be taken, and why.
    """

    def __init__(self, rows: Sequence[Sequence[str]]) -> None:
        super().__init__("there are questions, and nobody to answer them")
        self.rows = rows


@dataclass(frozen=True)
class Said:
    """Values that were said before the questions: on the command line, or in a file.

    Attributes:
        origin: who said them, as ``"--set"`` or the file's name.
        settled: they are not asked about again.
    """

    origin: str
    values: Mapping[str, Any]
    settled: bool = False


@dataclass(frozen=True)
class Proposal:
    """What an empty answer means.

    Attributes:
        problem: why what was said before cannot be had; the value is the machine's then.
    """

    value: Any
    origin: str = ""
    settled: bool = False
    problem: str = ""


def propose(question: Question, case: Case, said: Sequence[Said]) -> Proposal:
    """What was said before, the first of `said` first, or what the machine suggests."""
    for each in said:
        if question.name in each.values:
            value = each.values[question.name]
            problem = case.refusal(question.name, value)
            if not problem:
                return Proposal(value, each.origin, each.settled)
            return Proposal(question.default, problem=f"{each.origin}: {problem}")
    return Proposal(question.default)


def begin(case: Case, said: Sequence[Said]) -> Case:
    """`case` with what was said that no question asks about."""
    for each in reversed(said):
        for name, value in each.values.items():
            if all(name != question.name for question in QUESTIONS):
                case = case.settle(name, value, each.origin)
    return case


def accept(case: Case, said: Sequence[Said], strict: bool) -> Case:
    """All defaults.

    Args:
        strict: what was said and cannot be had is an error; otherwise the machine's suggestion is taken.

    Raises:
        RefusedError: the reason, and what to pass.
    """
    case = begin(case, said)
    for question in QUESTIONS:
        proposal = propose(question, case, said)
        if proposal.problem and strict:
            raise RefusedError(
                f"{proposal.problem}; or pass --set {question.name}={question.shown(question.default)}"
            )
        if proposal.origin or proposal.problem or question.matters(case):
            case = case.settle(question.name, proposal.value, proposal.origin or "detected")
    return case


def unanswered(case: Case, said: Sequence[Said]) -> list[list[str]]:
    """Rows of ``setting=value`` and a reason: the questions that nothing has answered, and what would be taken."""
    rows = []
    case = begin(case, said)
    for question in QUESTIONS:
        proposal = propose(question, case, said)
        if question.matters(case) and not proposal.settled:
            why = sentence(proposal.problem) if proposal.problem else proposal.origin or question.here(case)
            rows.append([f"{question.name}={question.shown(proposal.value)}", why])
        if proposal.origin or proposal.problem or question.matters(case):
            case = case.settle(question.name, proposal.value, proposal.origin or "detected")
    return rows


def read_ahead(pairs: Sequence[str]) -> dict[str, Any]:
    """``["strategy=ddp", …]`` as settings.

    Raises:
        SettingError: a wrong name, of which the nearest is named, or a wrong value.
    """
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if name not in KNOWN:
            raise SettingError(
                f"--set {pair}: {name!r} is no setting{nearest(name, KNOWN) or '.'} Known: {', '.join(KNOWN)}"
            )
        if not equals:
            raise SettingError(f"--set {pair}: there is no value; write --set {name}=VALUE")
        question = next((q for q in QUESTIONS if q.name == name), None)
        try:
            found[name] = question.read(question, value) if question else checked(KNOWN[name], value, "")
        except SettingError as error:
            raise SettingError(f"--set {pair}: {error}") from None
    return found
