"""Somebody who answers from a list, in the place of a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from easymp.cli.wizard import Machine, QuitError, Wish, configure
from easymp.hardware import Hardware

from ..hardware.machines import MACHINES


class Script:
    """A `Screen` that answers each prompt with the next word, or once by the setting's name, and keeps what it was told."""

    def __init__(self, answers: Sequence[str] | dict[str, str] = ()) -> None:
        self.answers = dict(answers) if isinstance(answers, dict) else list(answers)
        self.prompts: list[str] = []
        self.told: list[str] = []

    def say(self, text: str = "", strong: bool = False, indent: int = 0) -> None:
        self.told.append(text)

    def rows(self, rows: Sequence[Sequence[str]]) -> None:
        self.told.extend(" ".join(row) for row in rows)

    def text(self, text: str) -> None:
        self.told.append(text)

    def ask(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if isinstance(self.answers, dict):
            return self.answers.pop(prompt.split(" [")[0], "")
        if not self.answers:
            raise QuitError
        return self.answers.pop(0)

    @property
    def asked(self) -> list[str]:
        """Names of the settings in the order of the prompts, the last question of all left out."""
        return [prompt.split(" [")[0] for prompt in self.prompts if not prompt.startswith("yes, no")]

    @property
    def heard(self) -> str:
        return "\n".join(self.told)


def machine(name: str | Hardware, nodes: int = 1) -> Machine:
    hardware = MACHINES[name] if isinstance(name, str) else name
    return Machine(hardware, nodes, "SLURM_JOB_NUM_NODES in the environment" if nodes > 1 else "", "gpu1")


def talk(
    name: str | Hardware, *answers: str, nodes: int = 1, by_name: dict[str, str] | None = None, **wish: object
) -> Script:
    """The whole wizard on a machine of the table; in the working directory, where no `path` is given."""
    script = Script(by_name if by_name is not None else answers)
    configure(script, machine(name, nodes), Wish(**wish))
    return script
