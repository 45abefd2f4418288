"""The questions, put to somebody: one after the other, back and forth, until all are answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ...errors import SettingError
from .ahead import Said, begin, propose
from .case import Case
from .questions import QUESTIONS, Question
from .screen import QuitError, Screen, sentence

BACK, QUIT, HELP, MEASURE = "back", "quit", ("help", "?"), "measure"


class BackError(Exception):
    """To the question before."""


class Dialogue:
    """Goes through `QUESTIONS` with somebody."""

    def __init__(self, screen: Screen, case: Case, said: Sequence[Said], everything: bool = False) -> None:
        self._screen, self._said, self._everything = screen, said, everything
        self._cases = {0: begin(case, said)}  # before the question of each number
        self._asked: list[int] = []
        self._answers: dict[str, Any] = {}  # what was answered before somebody went back

    def run(self) -> Case:
        """Ask on from the last question that is open; returns all that is settled.

        Raises:
            QuitError: by ``quit``, or the end of the input.
        """
        number = len(self._cases) - 1
        while number < len(QUESTIONS):
            number = self._visit(number)
        return self._cases[number]

    def back(self) -> bool:
        """Open the last question again; False where none was asked."""
        if not self._asked:
            return False
        number = self._asked.pop()
        self._cases = {n: case for n, case in self._cases.items() if n <= number}
        return True

    def _visit(self, number: int) -> int:
        question, case = QUESTIONS[number], self._cases[number]
        proposal = propose(question, case, self._said)
        if proposal.problem:
            self._screen.say(sentence(proposal.problem))
        if proposal.settled or not (self._everything or question.matters(case)):
            if proposal.origin or proposal.problem:
                case = case.settle(question.name, proposal.value, proposal.origin or "detected")
        else:
            try:
                value = self._ask(question, case, proposal.value)
            except BackError:
                return len(self._cases) - 1
            self._asked.append(number)
            case = self._cases[number].settle(
                question.name, value, (proposal.origin if value == proposal.value else "") or "asked for"
            )
        self._cases[number + 1] = case
        return number + 1

    def _ask(self, question: Question, case: Case, default: Any) -> Any:
        screen = self._screen
        screen.say()
        screen.say(question.title, strong=True)
        screen.say(f"{question.help}. {question.consequence(case)}")
        possible = [word for word in question.choices if not case.refusal(question.name, word)]
        if possible:
            more = f"; {MEASURE} times them, ten seconds long" if question.measurable else ""
            screen.say(f"Possible here: {', '.join(possible)}{more}.")
        here = question.here(case)
        if here:
            screen.say(f"Here: {here}.")
        remembered = self._answers.get(question.name, default)
        if not case.refusal(question.name, remembered):
            default = remembered
        while True:
            text = screen.ask(f"{question.name} [{question.shown(default)}]: ").strip()
            if text.lower() == QUIT:
                raise QuitError
            if text.lower() == BACK:
                if self.back():
                    raise BackError
                screen.say("This is the first question.")
            elif text.lower() == MEASURE and question.measurable:
                measured = timed(screen, case).measured
                self._cases = {
                    number: dataclasses.replace(c, measured=measured) for number, c in self._cases.items()
                }
            elif text.lower() in HELP:
                self._help(question, case)
            else:
                try:
                    value = question.read(question, text) if text else default
                except SettingError as error:
                    screen.say(sentence(str(error)))
                    continue
                problem = case.refusal(question.name, value)
                if not problem:
                    break
                screen.say(sentence(problem))
        self._answers[question.name] = value
        caution = question.caution(case.settle(question.name, value))
        if caution:
            screen.say(sentence(caution))
        return value

    def _help(self, question: Question, case: Case) -> None:
        rows = []
        for word, words in question.choices.items():
            refusal = case.refusal(question.name, word)
            rows.append(
                [
                    word,
                    f"not here: {refusal.partition('cannot run here: ')[2] or refusal}" if refusal else words,
                ]
            )
        rows += [
            ["Enter", "takes what stands in brackets"],
            [BACK, "to the question before"],
            [QUIT, "writes nothing"],
        ]
        self._screen.rows(rows)


def timed(screen: Screen, case: Case) -> Case:
    """`case`, measured, and what was found said; as it was where torch cannot use the device."""
    screen.say("Timing a few small networks in each precision, about ten seconds long.")
    try:
        case = case.measure()
    except RuntimeError as error:
        screen.say(f"They could not be timed: {error}")
        return case
    assert case.measured is not None
    for words in case.measured.sentences:
        screen.say(sentence(words), indent=2)
    return case
