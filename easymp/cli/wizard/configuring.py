"""The wizard from its first line to its last: look, propose, ask, show the file, write it, say what to type next."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import settings
from ...base import env
from ...settings import NAMES, written
from .ahead import Said, UnansweredError, accept, begin, unanswered
from .case import Case
from .dialogue import BACK, QUIT, Dialogue, timed
from .editing import edit
from .foreign import Foreign, read_foreign
from .looking import Machine, facts
from .next_step import command
from .questions import QUESTIONS
from .screen import QuitError, Screen
from .toml import compose
from .writing import Target, target, write

YES, NO = ("y", "yes"), ("n", "no")


@dataclass(frozen=True)
class Wish:
    """What was asked for on the command line.

    Attributes:
        path: of the file; None: the one that EASYMP_CONFIG names, or ``easymp.toml`` here.
        ahead: settings by name.
        foreign: a file of Accelerate or DeepSpeed to take over.
        yes: take the defaults.
        dry_run: write nothing.
        everything: ask all questions, also those that seem to change nothing here.
        measure: time the precisions first.
    """

    path: str | None = None
    ahead: Mapping[str, Any] = field(default_factory=dict)
    foreign: str | None = None
    yes: bool = False
    dry_run: bool = False
    everything: bool = False
    measure: bool = False


def configure(screen: Screen, machine: Machine, wish: Wish, answered: bool = True) -> None:
    """Go through all of it.

    Args:
        answered: somebody is there to answer.

    Raises:
        SettingError, RefusedError: what was said before cannot be had, or the file cannot be read or written.
        UnansweredError: nobody is there, and `wish` does not say to take the defaults.
        QuitError: somebody left. Nothing is written then.
    """
    place = Path(wish.path or env.read(settings.VARIABLE) or settings.FILE)
    there = target(place, writable=not wish.dry_run)
    said = [Said("--set", wish.ahead, settled=True)]
    foreign = read_foreign(wish.foreign) if wish.foreign else None
    if foreign is not None:
        said.append(Said(str(wish.foreign), {**foreign.settings, **foreign.launching}))
    if there.before is not None:
        said.append(Said(str(place), written(settings.read(place))))
    start = Case(machine)
    if foreign is not None and _for_several(start, said, foreign):
        start = dataclasses.replace(start, assumed=2)
    if not answered and not wish.yes:
        raise UnansweredError(unanswered(start, said))
    screen.say("What is here", strong=True)
    screen.rows(facts(machine))
    if foreign is not None:
        screen.say()
        _tell_foreign(screen, foreign, str(wish.foreign))
        if start.assumed:
            screen.say(
                f"strategy {foreign.settings['strategy']} is for several processes, and here would be one: it is written for machines that "
                f"start several, and planned below for {start.assumed}."
            )
    if wish.measure:
        screen.say()
        start = timed(screen, begin(start, said))
    proposed = accept(start, said, strict=wish.yes)
    screen.say()
    screen.say("The plan", strong=True)
    screen.rows(plan(proposed))
    case = (
        proposed
        if wish.yes
        else _talk(screen, Dialogue(screen, start, said, wish.everything), proposed, there, wish)
    )
    text = text_for(case, there)
    if wish.yes:
        _show(screen, text, there)
    _end(screen, text, there, wish)
    if foreign is not None and foreign.script:
        screen.say()
        screen.say("In the script", strong=True)
        screen.text(foreign.script)
    screen.say()
    screen.say("Next", strong=True)
    line, where = command(case, place)
    if where:
        screen.say(where)
    screen.text(f"  {line}")
    for name in case.values:
        variable = env.PREFIX + name.upper()
        if name in NAMES and env.read(variable):
            screen.say(f"{variable} in the environment wins over the file.")


def _for_several(case: Case, said: Sequence[Said], foreign: Foreign) -> bool:
    """Whether the file asks for a strategy that two processes could have, and the one that would be started here cannot."""
    for each in reversed(said):
        for name in ("cpu", "processes", "nodes"):
            if name in each.values:
                case = case.settle(name, each.values[name])
    spread = foreign.settings.get("strategy")
    if spread is None or case.world > 1 or "strategy" in said[0].values:  # --set wins
        return False
    return bool(case.refusal("strategy", spread)) and not dataclasses.replace(case, assumed=2).refusal(
        "strategy", spread
    )


def _tell_foreign(screen: Screen, foreign: Foreign, name: str) -> None:
    screen.say(f"What becomes of {name} ({foreign.origin})", strong=True)
    for line, became in foreign.lines:
        screen.say(line)
        screen.say(became, indent=4)


def plan(case: Case) -> list[list[str]]:
    """Rows of a decision, and what it came to, with the reason. Two columns: three are too many for 40."""
    made = case.plan()
    least, most = case.nodes
    nodes = "" if most == 1 else f" on {most} nodes" if least == most else f" on {least} to {most} nodes"
    asked = "asked for" if case.get("processes") else "assumed" if case.assumed else ""
    why = asked or QUESTIONS[0].here(case).partition("(")[2].rstrip(")")
    rows = [["processes", f"{case.world}{nodes} ({why})"]]
    return rows + [[name, f"{choice.value} ({choice.reason})"] for name, choice in made.choices.items()]


def text_for(case: Case, there: Target) -> str:
    """The file with the case's values: the one that is there, edited, or a new one."""
    whys = {question.name: question.here(case) for question in QUESTIONS if question.name in case.values}
    before = (there.before or b"").decode()
    return edit(before, case.values, whys) if before.strip() else compose(case.values, whys)


def _talk(screen: Screen, dialogue: Dialogue, proposed: Case, there: Target, wish: Wish) -> Case:
    screen.say()
    screen.say(
        f"Enter takes what stands in brackets, {BACK} goes to the question before, {QUIT} leaves, help says more."
    )
    while True:
        case = dialogue.run()
        if plan(case) != plan(proposed):
            screen.say()
            screen.say("The plan with these answers", strong=True)
            screen.rows(plan(case))
        text = text_for(case, there)
        _show(screen, text, there)
        if wish.dry_run or text.encode() == there.before or _confirmed(screen, there):
            return case
        if not dialogue.back():
            screen.say("There is no question before: all was answered ahead.")


def _show(screen: Screen, text: str, there: Target) -> None:
    screen.say()
    if there.before is None:
        screen.say(f"{there.path}", strong=True)
        screen.text(text)
        return
    old, new = (words.replace("\r\n", "\n").split("\n") for words in (there.before.decode(), text))
    difference = list(difflib.unified_diff(old, new, str(there.path), f"{there.path} (new)", lineterm=""))
    if difference:
        screen.say(f"What changes in {there.path}", strong=True)
        screen.text("\n".join(difference))


def _confirmed(screen: Screen, there: Target) -> bool:
    """Whether to write; False: back to the last question."""
    kept = ", and keep the one before beside it" if there.before is not None else ""
    screen.say()
    screen.say(f"Write {there.path.absolute()}{kept}?")
    while True:
        answer = screen.ask("yes, no or back [yes]: ").strip().lower()
        if answer in (*NO, QUIT):
            raise QuitError
        if answer == BACK:
            return False
        if not answer or answer in YES:
            return True
        screen.say(f"{answer!r} is neither yes, no nor back.")


def _end(screen: Screen, text: str, there: Target, wish: Wish) -> None:
    screen.say()
    if text.encode() == there.before:
        screen.say(f"{there.path} says so already, and stays as it is.")
    elif wish.dry_run:
        screen.say(f"Nothing is written, as --dry-run asks; it would go to {there.path.absolute()}.")
    else:
        kept = write(there, text)
        screen.say(
            f"Written to {there.path.absolute()}." + (f" The one before is {kept.name}." if kept else "")
        )
