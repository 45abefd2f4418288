"""The wizard of `easymp config`: it proposes settings, asks, shows and writes the file, and names the next command."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import socket
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ... import hardware as hardware_package
from ... import settings
from ...base import env
from ...distributed import Ranks
from ...errors import RefusedError, SettingError
from ...hardware import Hardware, describe
from ...launcher.rendezvous import read_nodes
from ...options import AutocastKwargs, DataLoaderConfiguration, GradScalerKwargs
from ...plan import Plan, make_plan
from ...protocols import Facts, Source
from ...registry import PRECISIONS, STRATEGIES
from ...settings import NAMES, Settings, as_record, as_table, checked, read_pairs, written
from ...strategies.transforms import CompileOptions
from ..env import facts
from ..terminal import BOLD, GREEN, RED, paint, plain, require_packages, table, wrap
from . import file
from .foreign import FIELDS, import_document, read_document

AUTO = "auto"
UNSET = {"processes": AUTO, "nodes": AUTO, "project_dir": "."}  # answers that leave a setting out of the file
# The number of nodes of a job, in Slurm's variables (man sbatch, "OUTPUT ENVIRONMENT VARIABLES").
SLURM = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
SCRIPT = "train.py"
MAX_LINES = 10  # of the file that are shown
OPTIONS = "strategy_options"
RECORDS = {
    "autocast_options": AutocastKwargs,
    "scaler_options": GradScalerKwargs,
    "dataloader_config": DataLoaderConfiguration,
    "compile": CompileOptions,
}


# -- a machine, and the settings chosen so far


class Machine(NamedTuple):
    """A machine, and the number of machines announced to take part."""

    hardware: Hardware
    nodes: int
    nodes_reason: str
    name: str = ""  # by which others reach it
    unknown: tuple[str, ...] = ()  # facts that a description of it leaves open


@dataclass(frozen=True)
class Draft:
    """One machine and some settings, those of `easymp launch` among them; the others have their defaults."""

    machine: Machine
    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)  # of the values: "asked for", "--set", a file

    def with_value(self, name: str, value: Any, origin: str = "asked for") -> Draft:
        return replace(self, values={**self.values, name: value}, origins={**self.origins, name: origin})

    def get(self, name: str) -> Any:
        return self.values.get(name, FIELDS[name].default)

    @property
    def devices(self) -> int:
        """Accelerators to train on; 0: the CPU does."""
        return 0 if self.get("cpu") else len(self.machine.hardware.devices)

    @property
    def processes(self) -> int:
        """On each node: as set, or one an accelerator, or one."""
        return self.get("processes") or max(1, self.devices)

    @property
    def nodes(self) -> tuple[int, int]:
        """The least and the largest number: as set, or as announced."""
        return read_nodes(self.get("nodes") or str(self.machine.nodes))

    @property
    def world_size(self) -> int:
        """Processes on the largest number of nodes."""
        return self.processes * self.nodes[1]

    def plan(self, ranks: Ranks | None = None) -> Plan:
        """The plan of a rank, or of rank 0 in the largest world. Raises RefusedError for impossible values."""
        sources = {name: (Source.ASKED, self.origins[name]) for name in self.values if name in NAMES}
        settings = Settings(**{name: self.values[name] for name in sources}, sources=sources)
        first = Ranks(0, self.world_size, 0, self.processes, "asked for")
        return make_plan(settings, self.machine.hardware, ranks or first)

    def refusal(self, name: str, value: Any) -> str:
        """Why `value` is impossible beside the other values, or ``""``."""
        try:
            draft = self.with_value(name, checked(FIELDS[name], value, f"{name} = "), f"{name} = {value}")
            local = draft.processes
            for nodes in dict.fromkeys(draft.nodes):
                draft.plan(Ranks(local * nodes - 1, local * nodes, local - 1, local))
        except (SettingError, RefusedError) as error:
            return str(error)
        return ""

    def automatic(self, name: str, decision: str) -> str:
        """The value of a setting that "auto" gives here, with the reason."""
        choice = self.with_value(name, AUTO).plan().choices[decision]
        return f"auto is {choice.value} ({choice.reason})"


class Question(NamedTuple):
    """One setting to decide."""

    name: str
    title: str
    consequence: str  # of the answer
    matters: Callable[[Draft], bool]  # whether the answer changes anything on the draft's machine
    suggestion: Callable[[Draft], str]  # the machine's, with the reason; "" for none
    choices: Mapping[str, str] = {}  # name: its meaning; empty: any answer

    @property
    def default(self) -> Any:
        return FIELDS[self.name].default

    def shown(self, value: Any) -> str:
        return UNSET[self.name] if value is None else str(value)

    def parse(self, text: str) -> Any:
        if text.lower() == UNSET.get(self.name):
            return None
        if self.name == "nodes":
            smallest, largest = read_nodes(text)
            return f"{smallest}:{largest}" if smallest < largest else str(largest)
        if self.name == "project_dir":
            text = os.path.expanduser(text)
            check_writable(text)
        return checked(FIELDS[self.name], text, "")


def check_writable(path: str) -> None:
    """Raise SettingError where nothing can be written to `path`, a folder or a URL. Nothing is created."""
    if "://" in path:
        from fsspec import available_protocols  # slow to import

        protocol = path.partition("://")[0].rpartition("::")[2]
        if protocol not in available_protocols():
            raise SettingError(f"{path}: fsspec knows no protocol {protocol!r}: check the URL, as in s3://bucket/runs")
        return
    parent = next(folder for folder in (Path(path), *Path(path).absolute().parents) if folder.exists())
    if not parent.is_dir():
        raise SettingError(f"{str(parent)!r} is a file, so there can be no folder {path}: choose another name")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SettingError(f"{parent.absolute()} cannot be written to by this user: choose another folder")


def _precisions_differ(draft: Draft) -> bool:
    hardware = draft.machine.hardware
    facts = Facts(hardware, hardware.kind if draft.devices else "cpu", draft.world_size)
    return len({(p.param, p.compute) for p in PRECISIONS.values() if p.refuse(facts) is None}) > 1


QUESTIONS = (
    Question(
        "processes",
        "Processes",
        "Each sees its own part of the data. They share {threads} threads of the processor, where they train on it.",
        lambda draft: draft.devices > 1 or (not draft.devices and draft.machine.hardware.cpu.threads > 1),
        lambda d: f"auto is {d.devices or 1} ({'one a GPU' if d.devices else 'training runs on the CPU'})",
    ),
    Question(
        "nodes",
        "Nodes",
        "Each must start the command, and reach the first by the network.",
        lambda draft: draft.devices > 1 or draft.machine.nodes > 1,
        lambda draft: f"auto is {draft.machine.nodes} ({draft.machine.nodes_reason})",
    ),
    Question(
        "mixed_precision",
        "Precision",
        "Half precision takes less memory, and less time on hardware with units for it.",
        _precisions_differ,
        lambda draft: draft.automatic("mixed_precision", "precision"),
        {AUTO: "decided by the hardware", **PRECISIONS.words},
    ),
    Question(
        "strategy",
        "Strategy",
        "Parts that are divided take less memory on each process, and more communication.",
        lambda draft: draft.world_size > 1 or draft.devices > 1,
        lambda draft: draft.automatic("strategy", "strategy"),
        {AUTO: "one process alone, several with ddp, or fsdp where a model does not fit", **STRATEGIES.words},
    ),
    Question(
        "gradient_accumulation_steps",
        "Gradient accumulation",
        "An update sees a loader's batch, times this, times the processes: more than memory holds at once.",
        lambda draft: True,
        lambda draft: draft.plan().accumulation.reason,
    ),
    Question(
        "project_dir",
        "Place of checkpoints",
        "Checkpoints go to checkpoints/ in it: several times the model's size each.",
        lambda draft: True,
        lambda draft: "the working directory" if draft.get("project_dir") is None else "",
    ),
)
NAMES_ASKED = frozenset(question.name for question in QUESTIONS)


# -- the wizard


class Preset(NamedTuple):
    """Values that are known before the questions."""

    origin: str  # "--set", "--for …", or the name of a file
    values: Mapping[str, Any]


def read_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """``["strategy=ddp", …]`` as settings. Raises SettingError for a wrong name or value."""
    values: dict[str, Any] = {}
    parsers = {question.name: question.parse for question in QUESTIONS}
    for name, value in read_pairs(pairs, fields=FIELDS, readers=parsers).items():
        table, dot, option = name.partition(".")
        values[table] = {**as_table(values.get(table)), option: value} if dot else value
    return values


def configure(args: argparse.Namespace, command_line: Mapping[str, Any], interactive: bool) -> None:
    """Go through all of it; `args` are the command's, `command_line` the values of ``--set``."""
    path = Path(args.file or env.read(settings.VARIABLE) or settings.FILE)
    target = file.open_target(path, writable=not args.dry_run)
    imported = import_document(read_document(args.foreign), Path(args.foreign).parent) if args.foreign else None
    presets = [Preset("--set", command_line)]
    if args.machine is None:
        counts = [(env.integer(name) or 0, f"{name} in the environment") for name in SLURM]
        nodes, reason = max(counts) if max(counts)[0] > 0 else (1, "nothing announced others")
        machine = Machine(hardware_package.detect(), nodes, reason, socket.gethostname())
    else:
        described = describe(args.machine)
        machine = Machine(described.hardware, described.nodes, f"--for {args.machine}", unknown=described.unknown)
        launching: dict[str, Any] = {"nodes": str(machine.nodes)} if machine.nodes > 1 else {}
        if not machine.hardware.devices:
            launching["processes"] = described.processes
        presets.append(Preset(f"--for {args.machine}", launching))  # what `easymp launch` cannot detect there
    if imported:
        presets.append(Preset(args.foreign, imported.values))
    if target.content is not None:
        presets.append(Preset(str(path), written(settings.read(path))))
    start, answers = Draft(machine), dict[str, tuple[Any, str]]()
    for preset in reversed(presets):
        for name, value in preset.values.items():
            if name in NAMES_ASKED:
                answers[name] = value, preset.origin
            elif name != OPTIONS:
                if isinstance(value, Mapping):
                    value = {**as_table(start.values.get(name)), **value}
                start = start.with_value(name, value, preset.origin)
    print_title(args.machine or "This machine")
    unknown = [["not known", sentence] for sentence in machine.unknown]
    nodes_row = ["nodes", f"{machine.nodes} ({machine.nodes_reason})"]
    print(table([*facts(machine.hardware), nodes_row, *unknown], fold=True))
    if imported:
        print_title(f"The keys of {args.foreign} ({imported.library})")
        for key, sentence in imported.lines:
            print_sentence(key)
            print(wrap(f"    {plain(sentence)}", " " * 4))
    draft = answer_questions(start, answers, args, interactive=False)
    shown = _print_plan("The plan", draft)
    if interactive:
        print_sentence("Enter takes the default, Ctrl-C leaves.")
        draft = answer_questions(start, answers, args, interactive=True)
        _print_plan("The plan with these answers", draft, unless=shown)
    text = _file_text(draft, target, presets)
    _print_changes(text, target)
    if interactive and not args.dry_run and text.encode() != target.content:
        backup = ", with a backup of the present one" if target.content is not None else ""
        if questionary().select(f"Write {path.absolute()}{backup}?", ["yes", "no"]).unsafe_ask() == "no":
            raise KeyboardInterrupt
    print()
    if text.encode() == target.content:
        print_sentence(f"{path} has these settings already, and stays as it is.")
    elif args.dry_run:
        print_sentence(f"Nothing is written, as --dry-run asks; it would go to {path.absolute()}.")
    else:
        backup_path = file.write(target, text)
        note = f" The backup is {backup_path.name}." if backup_path else ""
        print_sentence(f"Written to {path.absolute()}.{note}")
    _print_next_command(draft, path, args.machine)


# -- questions

Answers = dict[str, tuple[Any, str]]  # by setting: its value, and its origin


def answer_questions(draft: Draft, answers: Answers, args: argparse.Namespace, interactive: bool) -> Draft:
    """The draft with all answers; where it is `interactive` the user is asked for those that no option gives.

    An impossible answer is an error under --yes; else the machine's suggestion takes its place.
    """
    for question in QUESTIONS:
        value, origin = answers.get(question.name, (question.default, ""))
        refusal = draft.refusal(question.name, value) if origin else ""
        if refusal and args.yes:
            remedy = f"or pass --set {question.name}={question.shown(question.default)}"
            elsewhere = ", or --for MACHINE to write the file for another machine" if draft.machine.name else ""
            raise RefusedError(f"{origin}: {refusal}; {remedy}{elsewhere}")
        matters = question.matters(draft)
        by_option = origin.startswith("--")
        if refusal and interactive and matters:
            print_sentence(f"{origin}: {refusal}")
        if refusal:
            value, origin, by_option = question.default, "detected", False
        if interactive and matters and not by_option:
            answer = ask(question, draft, value)
            value, origin = answer, origin if answer == value and origin else "asked for"
        if origin or matters:
            draft = draft.with_value(question.name, value, origin or "detected")
    return draft


def questionary() -> Any:
    require_packages("cli", "questionary", "tomlkit")  # which edits the file after the last question
    return importlib.import_module("questionary")


def ask(question: Question, draft: Draft, default: Any) -> Any:
    """Ask for an answer that is possible. Choices that are impossible are shown with the reason."""
    name, select = question.name, questionary().select
    print_title(question.title)
    help_text = str(FIELDS[name].metadata["help"])
    consequence = question.consequence.format(threads=draft.machine.hardware.cpu.threads)
    print_sentence(f"{help_text[0].upper()}{help_text[1:]}. {consequence}")
    if suggestion := question.suggestion(draft):
        print_sentence(f"Here: {suggestion}.")
    if not question.choices:

        def validate(text: str) -> str | bool:
            try:
                return not text.strip() or draft.refusal(name, question.parse(text.strip())) or True
            except SettingError as error:
                return str(error)

        message = f"{name} [{question.shown(default)}]:"
        text = questionary().text(message, validate=validate).unsafe_ask().strip()
        return question.parse(text) if text else default
    refusals = {choice: draft.refusal(name, choice) for choice in question.choices}
    choices = []
    for choice, meaning in question.choices.items():
        reason = refusals[choice].partition("cannot run here: ")[2] or refusals[choice]
        disabled = f"not here: {reason}" if reason else None
        choices.append(questionary().Choice(f"{choice}: {meaning}", choice, disabled=disabled))
    while True:
        answer = select(name, choices, default=default, use_search_filter=True, use_jk_keys=False).unsafe_ask()
        if not refusals.get(answer):
            return answer
        print_sentence(refusals[answer])  # a filtered list offers disabled choices


# -- the plan and the file


def _print_plan(title: str, draft: Draft, unless: Sequence[Sequence[str]] = ()) -> list[list[str]]:
    """Print the plan under a title, if its rows differ from `unless`; return the rows.

    Columns: the decision; its value with the reason. A third column would not fit into 40 characters.
    """
    smallest, largest = draft.nodes
    count = str(largest) if smallest == largest else f"{smallest} to {largest}"
    nodes = f" on {count} nodes" if largest > 1 else ""
    detected = QUESTIONS[0].suggestion(draft).partition("(")[2].rstrip(")")
    reason = draft.origins["processes"] if draft.get("processes") else detected
    decisions = [[name, f"{choice.value} ({choice.reason})"] for name, choice in draft.plan().choices.items()]
    rows = [["processes", f"{draft.world_size}{nodes} ({reason})"], *decisions]
    if rows != unless:
        print_title(title)
        print(table(rows, fold=True))
    return rows


def _file_text(draft: Draft, target: file.Target, presets: Sequence[Preset]) -> str:
    """The file with the draft's values: the existing one, edited, or a new one."""
    values, options = dict(draft.values), dict[str, Any]()
    for preset in reversed(presets):  # a strategy's options go with it
        if preset.origin.startswith("--") or preset.values.get("strategy", AUTO) == draft.get("strategy"):
            options |= preset.values.get(OPTIONS) or {}
    strategy = STRATEGIES[draft.plan().strategy.value]
    as_record(strategy.Options, f"strategy {strategy.name!r}", options)
    for name, record in RECORDS.items():
        as_record(record, name, as_table(values.get(name)))
    values = {name: None if value == {} else value for name, value in {**values, OPTIONS: options}.items()}
    reasons = {question.name: question.suggestion(draft) for question in QUESTIONS if question.name in values}
    text = (target.content or b"").decode()
    if not text.strip():
        return file.compose(values, reasons)
    return file.edit(text, written(settings.read(target.path)), values, reasons)


def _print_changes(text: str, target: file.Target) -> None:
    """Print the settings of a new file, or the lines that change, at most `MAX_LINES`."""
    old, new = (file.setting_lines(tomllib.loads(toml)) for toml in ((target.content or b"").decode(), text))
    lines = [(RED, f"-{line}") for line in old if line not in new]
    lines += [(GREEN, f"+{line}") if target.content else ("", line) for line in new if line not in old]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 :] = [("", f"… and {len(lines) - MAX_LINES + 1} more, in the file")]
    if lines:
        print_title(f"Changes in {target.path}" if target.content else str(target.path))
    for colour, line in lines:
        print(paint(plain(line), colour))


# -- printing


def _print_next_command(draft: Draft, path: Path, machine: str | None) -> None:
    """Print the command that starts a script with the settings file `path`, on this machine or on `machine`."""
    print_title(f"Next, on {machine}, with a copy of the file" if machine else "Next")
    is_default = path.resolve() == Path(env.read(settings.VARIABLE) or settings.FILE).resolve()
    variable = "" if is_default else f"{settings.VARIABLE}={shlex.quote(str(path))} "
    smallest, largest = draft.nodes
    command = f"{'easymp launch' if draft.world_size > 1 else 'python'} {SCRIPT}"
    if draft.machine.nodes > 1 and largest > 1 and not machine:  # the job's variables tell each launcher of the others
        command = f"srun {command}"
    elif largest > 1:
        count = str(largest) if smallest == largest else f"{smallest} to {largest}"
        hint = "put the first one's address for FIRST" if machine else "this one is the first"
        print_sentence(f"On each of the {count} machines; {hint}:")
        address = "" if draft.get("main_address") else f" --main-address {draft.machine.name or 'FIRST'}"
        command = f"easymp launch{address} {SCRIPT}"
    print(f"  {variable}{command}")
    for name in NAMES.keys() & draft.values.keys() if not machine else ():
        if env.read(env.PREFIX + name.upper()):
            print_sentence(f"{env.PREFIX}{name.upper()} in the environment wins over the file.")


def print_sentence(text: str) -> None:
    print(wrap(plain(text)))


def print_title(text: str) -> None:
    print("\n" + "\n".join(paint(line, BOLD) for line in wrap(plain(text)).splitlines()))
