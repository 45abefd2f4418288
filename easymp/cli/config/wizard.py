"""The wizard of `easymp config`: look, propose, ask, show the file, write it, and print the next command."""

from __future__ import annotations

import argparse
import shlex
import statistics
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import settings
from ...base import env
from ...base.rng import switch
from ...errors import RefusedError, SettingError
from ...hardware.gpus import describe
from ...options import DataLoaderConfiguration, GradScalerKwargs
from ...precision import PRECISIONS
from ...protocols import Facts
from ...registry import STRATEGIES
from ...settings import NAMES, TABLES, as_record, as_table, read_pairs, written
from ...strategies.transforms import CompileOptions
from ..env import facts
from ..terminal import BOLD, GREEN, RED, library, paint, plain, table, wrap
from . import file
from .importers import import_file
from .questions import AUTO, QUESTIONS, Draft, Machine, Question, look
from .rules import KNOWN, Importer

BACK = "back"
COLOURS = {"+": GREEN, "-": RED}  # by a line's first character
SCRIPT = "train.py"
SHOWN = 10  # lines of the file
OPTIONS = "strategy_options"
RECORDS = {
    "scaler_options": GradScalerKwargs,
    "dataloader_config": DataLoaderConfiguration,
    "compile": CompileOptions,
}

BASE, *OTHERS = ("fp32", "tf32", "bf16", "fp16")
WIDTH = {"cpu": 256}  # of the layer, by device; else 1024
SLOW = 4.0  # times as long as fp32: one round is enough
EQUAL = 1.05  # smaller factors count as equal
NOISE = 1.5  # quartiles further apart than this factor: other work on the machine decides
HEAD = 64  # width of a head of attention


class Preset(NamedTuple):
    """Values that are known before the questions; those that are settled are not asked about."""

    origin: str  # "--set", or the name of a file
    values: Mapping[str, Any]
    settled: bool = False


def read_ahead(pairs: Sequence[str]) -> dict[str, Any]:
    """``["strategy=ddp", …]`` as settings. Raises SettingError for a wrong name or value."""
    found: dict[str, Any] = {}
    for name, value in read_pairs(pairs, known=KNOWN, readers={q.name: q.read for q in QUESTIONS}).items():
        table, dot, option = name.partition(".")
        found[table] = {**as_table(found.get(table)), option: value} if dot else value
    return found


def configure(args: argparse.Namespace, ahead: Mapping[str, Any], asks: bool) -> None:
    """Go through all of it; `args` are the command's, `ahead` the values of ``--set``."""
    place = Path(args.file or env.read(settings.VARIABLE) or settings.FILE)
    there = file.target(place, writable=not args.dry_run)
    foreign = import_file(args.foreign) if args.foreign else None
    presets, machine, unknown = [Preset("--set", ahead, settled=True)], look(), list[list[str]]()
    if args.machine is not None:
        elsewhere, origin = describe(args.machine), f"--for {args.machine}"
        machine = Machine(elsewhere.hardware, elsewhere.nodes, origin)
        unknown = [["not known", words] for words in elsewhere.unknown]
        # What `easymp launch` cannot find out on those machines by itself.
        launched = {"nodes": str(elsewhere.nodes)} if elsewhere.nodes > 1 else {}
        launched |= {} if elsewhere.hardware.devices else {"processes": elsewhere.processes}
        presets.append(Preset(origin, launched, settled=True))
    presets += [Preset(args.foreign, foreign.values)] if foreign else []
    presets += [Preset(str(place), written(settings.read(place)))] if there.before is not None else []
    start = Draft(machine)
    if foreign and _needs_several(start, presets, foreign.values.get("strategy")):
        start = replace(start, assumed=2)
    for preset in reversed(presets):
        for name, value in preset.values.items():
            if name in TABLES and isinstance(value, Mapping):
                value = {**as_table(start.values.get(name)), **value}
            asked = name == OPTIONS or any(question.name == name for question in QUESTIONS)
            start = start if asked else start.settle(name, value, preset.origin)
    title(args.machine or "This machine")
    nodes = ["nodes", f"{machine.nodes} ({machine.nodes_why})"]
    print(table([*facts(machine.hardware), nodes, *unknown], fold=True))
    if foreign:
        _tell_foreign(args.foreign, foreign, start)
    if args.measure:
        start = timed(start)
    draft = proposed = decide(start, presets, strict=args.yes)
    title("The plan")
    print(table(_plan(proposed), fold=True))

    def confirmed(draft: Draft) -> bool:
        if _plan(draft) != _plan(proposed):
            title("The plan with these answers")
            print(table(_plan(draft), fold=True))
        text = _text(draft, there, presets)
        _show(text, there)
        if args.dry_run or text.encode() == there.before:
            return True
        kept = ", and keep the one before beside it" if there.before is not None else ""
        answer = ask("select", f"Write {place.absolute()}{kept}?", ["yes", "no", BACK])
        if answer == "no":
            raise KeyboardInterrupt
        return bool(answer == "yes")

    if asks:
        say("Enter takes the default, Ctrl-C leaves, back goes to the question before.")
        draft = decide(start, presets, confirmed=confirmed, everything=args.all)
    text = _text(draft, there, presets)
    if not asks:
        _show(text, there)
    say()
    if text.encode() == there.before:
        say(f"{place} says so already, and stays as it is.")
    elif args.dry_run:
        say(f"Nothing is written, as --dry-run asks; it would go to {place.absolute()}.")
    else:
        kept = file.write(there, text)
        say(f"Written to {place.absolute()}." + (f" The one before is {kept.name}." if kept else ""))
    _say_next(draft, place, args.machine)


# -- presets and questions


def _needs_several(draft: Draft, presets: Sequence[Preset], strategy: str | None) -> bool:
    """Whether the strategy of an imported file is possible on two processes, and impossible on those that would start here."""
    for preset in reversed(presets):
        for name in ("cpu", "processes", "nodes"):
            draft = draft.settle(name, preset.values[name]) if name in preset.values else draft
    if strategy is None or draft.world > 1 or "strategy" in presets[0].values:
        return False
    two = replace(draft, assumed=2)
    return bool(draft.refusal("strategy", strategy)) and not two.refusal("strategy", strategy)


def decide(
    start: Draft,
    presets: Sequence[Preset],
    *,
    strict: bool = False,
    confirmed: Callable[[Draft], bool] | None = None,
    everything: bool = False,
) -> Draft:
    """Answer `QUESTIONS` by presets and the machine's suggestions; returns the draft with all answers.

    Args:
        strict: an impossible preset is an error; else the machine's suggestion is taken.
        confirmed: asks those questions that matter here, and is called at the end; the last question is asked again unless it is true.
        everything: ask about all that is not settled.
    """
    drafts, asked = [start], list[int]()  # the drafts before each question; the questions that were asked
    answers: dict[str, Any] = {}

    def back() -> None:
        if asked:
            del drafts[asked.pop() + 1 :]
        else:
            say("This is the first question.")

    while True:
        number, draft = len(drafts) - 1, drafts[-1]
        if number == len(QUESTIONS):
            if confirmed is None or confirmed(draft):
                return draft
            back()
            continue
        question, origin, settled, problem = QUESTIONS[number], "", False, ""
        name, value, matters = question.name, question.default, question.matters(draft)
        if preset := next((preset for preset in presets if name in preset.values), None):
            if problem := draft.refusal(name, preset.values[name]):
                problem = f"{preset.origin}: {problem}"
            else:
                origin, value, settled = preset.origin, preset.values[name], preset.settled
        if problem and strict:
            raise RefusedError(f"{problem}; or pass --set {name}={question.shown(question.default)}")
        if problem and confirmed:
            say(problem)
        if confirmed and not settled and (matters or everything):
            answer = _ask(question, draft, answers.get(name, value), value)
            if answer == BACK:
                back()
                continue
            origin = origin if answer == value and origin else "asked for"
            value = answers[name] = answer
            asked.append(number)
        elif not (origin or problem or matters):
            drafts.append(draft)
            continue
        drafts.append(draft.settle(name, value, origin or "detected"))


def ask(kind: str, *args: Any, **options: Any) -> Any:
    """The answer to a prompt of questionary."""
    return getattr(library("questionary", "to ask"), kind)(*args, **options).unsafe_ask()


def _ask(question: Question, draft: Draft, remembered: Any, default: Any) -> Any:
    """The answer; `remembered` is the default, where it is possible."""
    title(question.title)
    say(f"{question.help}. {question.consequence(draft)}")
    default = default if draft.refusal(question.name, remembered) else remembered
    while True:
        if here := question.here(draft):
            say(f"Here: {here}.")
        answer = (_choose if question.choices else _type)(question, draft, default)
        if answer == BACK:
            return answer
        if problem := draft.refusal(question.name, answer):  # a filtered list lets it be chosen
            say(problem)
            continue
        if caution := question.caution(draft.settle(question.name, answer)):
            say(caution)
        return answer


def _choose(question: Question, draft: Draft, default: Any) -> Any:
    """One of the choices; those that are impossible here are shown with the reason."""
    choice, choices = library("questionary", "to ask").Choice, []
    for word, words in question.choices.items():
        refusal = draft.refusal(question.name, word)
        short = refusal.partition("cannot run here: ")[2] or refusal
        choices.append(choice(f"{word}: {words}", word, disabled=f"not here: {short}" if refusal else None))
    choices.append(choice("back: to the question before", BACK))
    return ask("select", question.name, choices, default=default, use_search_filter=True, use_jk_keys=False)


def _type(question: Question, draft: Draft, default: Any) -> Any:
    def problem(text: str) -> str | bool:
        if not text.strip() or text.strip().lower() == BACK:
            return True
        try:
            return draft.refusal(question.name, question.read(text.strip())) or True
        except SettingError as error:
            return str(error)

    text = ask("text", f"{question.name} [{question.shown(default)}]:", validate=problem).strip()
    return BACK if text.lower() == BACK else question.read(text) if text else default


# -- timing


def timed(draft: Draft, seconds: float = 10.0) -> Draft:
    """`draft` with its precisions timed: a transformer layer runs forward and backward in each of them.

    They run in turn, so that other work on the machine meets all alike, and the median over the rounds counts. The draft stays as it
    was where torch cannot use the device.
    """
    say("Timing a transformer layer in each precision, for about ten seconds.")
    hardware, begun = draft.machine.hardware, time.monotonic()
    device = torch.device("cpu" if draft.get("cpu") else hardware.kind)
    refusals = {name: PRECISIONS[name].refuse(Facts(hardware, device.type, 1)) for name in OTHERS}
    left_out = {name: refusal.reason for name, refusal in refusals.items() if refusal}
    found: dict[str, list[float]] = {}
    try:
        layer, inputs = _layer(device)
        step(BASE, layer, inputs)  # a first call allocates and compiles
    except RuntimeError as error:
        say(f"They could not be timed: {error}")
        return draft
    for name in (name for name in OTHERS if name not in left_out):
        try:
            step(name, layer, inputs)
            found[name] = [step(BASE, layer, inputs) / step(name, layer, inputs)]
        except RuntimeError as error:
            left_out[name] = f"it does not run ({(str(error).splitlines() or [''])[0]})"
    going = [name for name, ratios in found.items() if ratios[0] * SLOW > 1]
    while going and time.monotonic() - begun < seconds:
        base = step(BASE, layer, inputs)
        for name in going:
            found[name].append(base / step(name, layer, inputs))
    measured = [_ratio(name, ratios) for name, ratios in found.items()]
    for words in (*measured, *(f"{name} was left out: {why}" for name, why in left_out.items())):
        say(f"  {words}")
    ran = "forward and backward of a transformer layer"
    say(f"  measured on {device} in {time.monotonic() - begun:.0f} s: {ran}")
    return replace(draft, measured="; ".join(measured) or "no other precision is possible here")


def _layer(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    width = WIDTH.get(device.type, 1024)
    with torch.random.fork_rng(devices=[]):
        layer = nn.TransformerEncoderLayer(width, width // HEAD, 4 * width, dropout=0.0, batch_first=True)
        return layer.to(device), torch.randn(1, 2 * width, width).to(device)


def step(name: str, layer: nn.Module, inputs: torch.Tensor) -> float:
    """Seconds of forward and backward in a precision."""
    policy, on_cpu = PRECISIONS[name], inputs.device.type == "cpu"
    wait = (lambda: None) if on_cpu else torch.accelerator.synchronize
    with ExitStack() as stack:
        switch(policy.tf32 and not on_cpu, False, stack.callback)
        wait()
        begin = time.perf_counter()
        output = policy().forward(layer, inputs.device)(inputs)
        torch.autograd.grad(output.float().sum(), list(layer.parameters()))
        wait()
        return time.perf_counter() - begin


def _ratio(name: str, ratios: list[float]) -> str:
    """How fast a precision is, for a plan or a comment in a file."""
    low, times, high = statistics.quantiles(ratios if ratios[1:] else ratios * 2, n=4, method="inclusive")
    between = f"on this machine (middle half of the rounds: {low:.2f} to {high:.2f})"
    if high > low * NOISE:
        return f"{name} beside {BASE} could not be measured: the machine is too busy, or too slow"
    if 1 / EQUAL <= times <= EQUAL:
        return f"{name} is as fast as {BASE} {between}"
    if times > 1:
        return f"{name} is {times:.2g} times as fast as {BASE} {between}"
    return f"{name} takes {1 / times:.2g} times as long as {BASE} {between}"


# -- the plan and the file


def _plan(draft: Draft) -> list[list[str]]:
    """Rows of a decision, and its value with the reason. Two columns: three are too many for 40 characters."""
    least, most = draft.nodes
    nodes = "" if most == 1 else f" on {most} nodes" if least == most else f" on {least} to {most} nodes"
    here = "assumed" if draft.assumed else QUESTIONS[0].here(draft).partition("(")[2].rstrip(")")
    why = draft.origins["processes"] if draft.get("processes") else here
    choices = draft.plan().choices.items()
    decided = [[name, f"{choice.value} ({choice.reason})"] for name, choice in choices]
    return [["processes", f"{draft.world}{nodes} ({why})"], *decided]


def _text(draft: Draft, there: file.Target, presets: Sequence[Preset]) -> str:
    """The file with the draft's values: the existing one, edited, or a new one."""
    values, strategy = dict(draft.values), draft.get("strategy")
    values[OPTIONS] = {}
    for preset in reversed(presets):  # a strategy's options go with it
        if preset.settled or preset.values.get("strategy", AUTO) == strategy:
            values[OPTIONS] |= preset.values.get(OPTIONS) or {}
    kind = STRATEGIES[draft.plan().strategy.value]
    as_record(kind.Options, f"strategy {kind.name!r}", values[OPTIONS])
    for name, record in RECORDS.items():
        as_record(record, name, as_table(values.get(name)))
    values = {name: None if value == {} else value for name, value in values.items()}
    whys = {question.name: question.here(draft) for question in QUESTIONS if question.name in values}
    before = (there.before or b"").decode()
    return file.edit(before, values, whys) if before.strip() else file.compose(values, whys)


def _show(text: str, there: file.Target) -> None:
    """What the file sets, or the lines that change, at most `SHOWN`; comments are in the file."""
    old, new = (file.said(tomllib.loads(words)) for words in ((there.before or b"").decode(), text))
    lines = [f"-{line}" for line in old if line not in new]
    lines += [f"+{line}" if there.before else line for line in new if line not in old]
    if lines:
        title(f"Changes in {there.path}" if there.before else str(there.path))
        more = f"\n… and {len(lines) - SHOWN + 1} more, in the file" if len(lines) > SHOWN else ""
        print_lines("\n".join(lines[: SHOWN - bool(more)]) + more)


# -- printing


def _tell_foreign(name: str, foreign: Importer, draft: Draft) -> None:
    title(f"The keys of {name} ({foreign.library})")
    for key, sentence in foreign.lines:
        print(wrap(plain(key)))
        print(wrap(f"    {plain(sentence)}", " " * 4))  # without a full stop: it may be code
    if draft.assumed:
        say(
            f"Strategy {foreign.values['strategy']} is for several processes, and this machine would start one: the "
            f"file is written for machines that start several, and the plan below assumes {draft.assumed}."
        )


def _say_next(draft: Draft, place: Path, machine: str | None) -> None:
    """The command that starts a script under the file at `place`, on this machine or the one described as `machine`."""
    title(f"Next, on {machine}, with a copy of the file" if machine else "Next")
    usual = Path(env.read(settings.VARIABLE) or settings.FILE)
    same = place.resolve() == usual.resolve()
    named = "" if same else f"{settings.VARIABLE}={shlex.quote(str(place))} "
    least, most = draft.nodes
    if draft.machine.nodes > 1 and most > 1 and not machine:
        # The job's variables tell each launcher of the others.
        command = f"srun easymp launch {SCRIPT}"
    elif most > 1:
        many = str(most) if least == most else f"{least} to {most}"
        first = "put the first one's address for FIRST" if machine else "this one is the first"
        say(f"On each of the {many} machines; {first}:")
        address = "" if draft.get("main_address") else f" --main-address {draft.machine.name or 'FIRST'}"
        command = f"easymp launch{address} {SCRIPT}"
    elif draft.assumed and not draft.get("processes"):
        say("On a machine with several accelerators, without --processes; here:")
        command = f"easymp launch --processes {draft.assumed} {SCRIPT}"
    else:
        command = f"{'easymp launch' if draft.world > 1 else 'python'} {SCRIPT}"
    print_lines(f"  {named}{command}")
    for name in draft.values if not machine else ():
        variable = env.PREFIX + name.upper()
        if name in NAMES and env.read(variable):
            say(f"{variable} in the environment wins over the file.")


def say(text: str = "") -> None:
    words = text.lstrip(" ")
    indent, words = " " * (len(text) - len(words)), plain(words)
    words += "." * bool(words and not words.endswith((".", "?", "!", ":")))
    print(wrap(indent + words, indent))


def title(text: str) -> None:
    print()
    print("\n".join(paint(line, BOLD) for line in wrap(plain(text)).splitlines()))


def print_lines(text: str) -> None:
    for line in text.splitlines():
        print(paint(plain(line.expandtabs()), COLOURS.get(line[:1], "")))
