"""`easymp prove --kill`: a training that is killed at random instants goes on as one that is not.

The script runs to its end once. Then it runs in chains: each start of a chain but the last is killed, and the next one
goes on from the chain's checkpoints. Every update of every start is compared with the uninterrupted run's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from ..harness import DIFFERS, FAILED, NOT_COMPARED, PROVEN, REFUSED, Child, Script

KILLED = "killed"  # a file, and an end of a start
POLL = 0.005  # seconds between two looks at a run
ROUNDING = 2**-14  # relative difference of a loss for each update, on another number of processes
KEPT = (
    "save_state() keeps what prepare() and accelerator.register_for_checkpointing() were given. The latter takes "
    "objects with state_dict and load_state_dict."
)
SAMPLER = "Checkpoints keep no sampler of the script: let it draw from a seed and the epoch, in set_epoch(epoch)."
LOOP = "Loop by `for epoch in accelerator.epochs(n)` over loaders that were passed to prepare()."
# Groups of an update's state, those that explain others first, each with a remedy.
REMEDIES = {
    "weights": "Pass the model to prepare() before resume().",
    "optimizers": "Pass the optimizer and its scheduler to prepare() before resume().",
    "objects": KEPT,
    "random numbers": "After resume() the script draws or seeds random numbers otherwise than after an update.",
    "samples": LOOP,
    "modules": "Checkpoints keep persistent buffers, and what get_extra_state() of a module returns.",
    "variables": KEPT,
    "losses": f"The inputs may differ. {LOOP}",
    "assigned": "",  # variables that each round of a loop assigns: they only explain others
}
Entry = dict[str, Any]  # an event of a run
Key = tuple[int, int]  # an update, and the number of its optimizer


class Verdict(Exception):
    """Ends the runs with a verdict, its sentence, and hints."""


@dataclass(frozen=True)
class Start:
    """One run of the script: how it ended, and the events of each rank."""

    code: int | None  # the exit code; None where it was killed
    why: str  # it failed
    ranks: list[list[Entry]]
    steps: list[dict[Key, Entry]] = field(default_factory=list)

    def events(self, *names: str) -> list[Entry]:
        return [event for event in self.ranks[0] if event["event"] in names]

    @property
    def begin(self) -> int:
        """The update from which it goes on."""
        return next((event["updates"] for event in self.events("loaded")), 0)

    @property
    def updates(self) -> int:
        return max((update for update, _ in self.steps[0]), default=self.begin)


class Kills:
    """Runs the script with kills, and compares.

    Args:
        args: of the command: ``kill``, ``processes``, ``seed``, ``dropout`` and ``timeout``.
        folder: for all that the runs write.
    """

    def __init__(self, script: Script, settings: Mapping[str, str], args: argparse.Namespace, folder: Path) -> None:
        self._script = script if script.module else script._replace(path=os.path.abspath(script.path))
        self._settings, self._args, self._folder = settings, args, folder
        self._several = len(set(args.processes)) > 1
        self._random = random.Random(args.seed)
        self._kills: list[Entry] = []
        self._batches: list[int | None] = []  # of all processes, by loaders
        self._ignored: set[str] = set()  # variables that never change, or differ between runs without a kill
        self._resumes = 0

    def run(self) -> dict[str, Any]:
        chain = 0
        try:
            self._run_reference()
            while len(self._kills) < self._args.kill:
                chain += 1
                self._run_chain(self._folder / f"chain-{chain}")
                if chain > 2 * len(self._kills) + 2:
                    raise Verdict(NOT_COMPARED, "the script ends before it can be killed")
            if not self._resumes:
                raise Verdict(NOT_COMPARED, "no start went on from a checkpoint: save more often, or pass more kills")
            raise Verdict(PROVEN, self._success(chain))
        except Verdict as end:
            verdict, reason, *hints = end.args
        facts = {"sentence": f"{verdict.capitalize()}: {reason}.", "hints": hints, "seed": self._args.seed}
        return {"verdict": verdict, **facts, "kills": self._kills, "updates": []}

    def _success(self, chains: int) -> str:
        sizes = list(dict.fromkeys(self._args.processes))
        inside = sum(kill["inside a save"] for kill in self._kills)
        processes = f"{' and '.join(map(str, sizes))} process{'es' * (sizes != [1])}"
        return (
            f"killed {len(self._kills)} times ({inside} inside a save) in {chains} training{'s' * (chains > 1)} of "
            f"{self._reference.updates} updates on {processes}, the script went on from {self._resumes} checkpoints, "
            f"{'within rounding' if self._several else 'bit for bit'} as the uninterrupted run (--seed "
            f"{self._args.seed})"
        )

    # -- runs

    def _run_reference(self) -> None:
        self._reference = reference = self._start(self._folder / "uninterrupted", 1, None, self._args.processes[0])
        if reference.code:
            raise Verdict(NOT_COMPARED, f"the uninterrupted run failed: {reference.why}")
        if not reference.updates:
            raise Verdict(NOT_COMPARED, "no update was made with a prepared optimizer")
        if not reference.events("saving"):
            reason = f"the script makes {reference.updates} updates without save_state(), so a kill loses all of them"
            raise Verdict(NOT_COMPARED, reason, "Call accelerator.resume() before the loop, and save_state() inside.")
        self._batches = reference.events("prepared")[-1]["batches"]
        states = [step["state"] for step in reference.steps[0].values()]
        for group in ("variables", "objects"):
            values = [state[group] for state in states]
            self._ignored |= {name for name in values[0] if all(v.get(name) == values[0][name] for v in values)}
        if self._several and any(step["filled"] for steps in reference.steps for step in steps.values()):
            reason = "the last batch of an epoch is filled up with repeated samples, others for other processes"
            raise Verdict(NOT_COMPARED, reason, "Pass drop_last=True to the DataLoader.")
        draws = [a["random numbers"]["torch"] != b["random numbers"]["torch"] for a, b in pairwise(states)]
        if self._several and draws and all(draws):
            reason = "each update draws random numbers, others on another number of processes"
            raise Verdict(NOT_COMPARED, reason, "--no-dropout sets the rates of dropout layers to 0.")
        second = self._start(self._folder / "uninterrupted-again", 1, None, self._args.processes[0])
        if second.code:
            raise Verdict(NOT_COMPARED, f"another uninterrupted run failed: {second.why}")
        self._compare(second, "another uninterrupted run begins at update 0", exact=True, is_control=True)

    def _run_chain(self, folder: Path) -> None:
        """Start the script until it ends by itself. Starts are killed until the number of kills is reached."""
        sizes, position, exact = self._args.processes, 0, True
        for number in count(1):
            has_checkpoint, unfinished = any(folder.glob("*/**/COMMIT")), self._unfinished(folder)
            processes = sizes[(number - 1) % len(sizes)]
            exact = exact and processes == sizes[0]
            is_over = len(self._kills) >= self._args.kill or position >= self._reference.updates
            kill = None if is_over else self._draw(position, processes)
            start = self._start(folder, number, kill, processes)
            saved = start.events("loaded", "saving")
            head = f"after kill {len(self._kills)} the script goes on from update {start.begin}"
            if start.code:
                if number == 1:
                    raise Verdict(FAILED, f"another run ends, and fails: {start.why}")
                changed = self._changed_in_loaders(start)
                clauses = [head, *(f"with another {name}" for name in changed), f"and fails: {start.why}"]
                hints = [SAMPLER] if changed else []
                raise Verdict(FAILED, ", ".join(clauses), *hints)
            if has_checkpoint and start.steps[0] and not start.events("loaded"):
                reason = "the script begins anew though there is a checkpoint"
                raise Verdict(NOT_COMPARED, reason, "Call accelerator.resume() after prepare().")
            self._resumes += start.updates > start.begin > 0
            self._compare(start, head, exact, is_control=number == 1)
            if start.code == 0:
                return
            position = saved[-1]["updates"] if saved else position
            inside = bool(self._unfinished(folder) - unfinished)
            facts = {"training": folder.name, "start": number, "processes": processes, "from": start.begin}
            self._kills.append({**facts, "update": start.updates, "inside a save": inside})
            instant = f"in update {start.updates}{', inside a save' * inside}"
            print(f"kill {len(self._kills)}/{self._args.kill}: {instant}", file=sys.stderr, flush=True)

    def _unfinished(self, folder: Path) -> set[Path]:
        """Folders of checkpoints that were being written."""
        return {path for path in folder.glob("*/**/.tmp-*") if path.is_dir()}

    def _draw(self, position: int, processes: int) -> Entry:
        """Draw the instant of a kill after an event: half of them in saves. The first is after a save."""
        spans = [(event, following["at"] - event["at"]) for event, following in pairwise(self._reference.ranks[0])]
        names = [event["event"] for event, _ in spans]
        spans = [span for span in spans if span[0]["updates"] >= position or span[0]["event"] == "begin"]
        if not self._kills:
            spans = spans[names.index("saving") + 1 :] or spans
        saves = [span for span in spans if span[0]["event"] == "saving"]
        event, seconds = self._random.choice(saves if saves and self._random.random() < 0.5 else spans)
        delay, rank = seconds * self._random.random(), self._random.randrange(processes)
        return {"event": event["event"], "updates": event["updates"], "delay": delay, "rank": rank}

    def _start(self, folder: Path, number: int, kill: Entry | None, processes: int) -> Start:
        record, work = folder / f"start-{number}", folder / "work"
        record.mkdir(parents=True)
        if number == 1:  # files that the script makes stay in its training's own folder
            work.mkdir()
            for path in Path.cwd().iterdir():
                if not self._folder.is_relative_to(path):
                    (work / path.name).symlink_to(path)
        facts = {"directory": str(work), "chain": os.path.realpath(folder), "dropout": self._args.dropout}
        facts["several"] = self._several
        self._script.write_task(record, kill=kill, batches=self._batches, **facts)
        rank = Script("easymp.cli.prove.kills_rank", [str(record)], module=True)
        command = rank.launch(processes) if processes > 1 else rank.command()
        single = {"strategy": "single", "strategy_options": "{}"} if processes == 1 != self._args.processes[0] else {}
        settings = {**self._settings, **single, "project_dir": str(folder / "project"), "log_with": "none"}
        child, mark = Child(command, settings, output=record / "output.txt"), record / KILLED
        end = time.monotonic() + (self._args.timeout or float("inf"))
        try:
            while child.process.poll() is None and not mark.exists():
                if time.monotonic() > end:
                    raise Verdict(NOT_COMPARED, f"a run was stopped after {self._args.timeout:g} seconds (--timeout)")
                time.sleep(POLL)
        finally:
            child.kill()
        if (record / REFUSED).exists():
            raise Verdict(NOT_COMPARED, (record / REFUSED).read_text(encoding="utf-8"))
        ranks = [read(record / f"rank-{rank}.jsonl") for rank in range(processes)]
        steps = [{tuple(e["key"]): e for e in events if e["event"] == "step"} for events in ranks]
        code = None if mark.exists() else child.process.returncode
        return Start(code, child.reason().rstrip(".") if code else "", ranks, steps)

    # -- the comparison

    def _compare(self, start: Start, head: str, exact: bool, is_control: bool) -> None:
        """Raise a Verdict for the first update that is not as in the uninterrupted run."""
        for rank, steps in enumerate(start.steps if exact else start.steps[:1]):
            for key in steps:
                update, last = key[0], self._reference.updates
                if key not in self._reference.steps[rank]:
                    reason = f"{head}, and makes update {update}, though the uninterrupted run ended after {last}"
                    raise Verdict(DIFFERS, reason + self._counter_difference(start), LOOP)
                groups = differing(steps[key]["state"], self._reference.steps[rank][key]["state"], self._ignored)
                if is_control:  # which no kill has interrupted
                    for group in ("variables", "objects"):
                        self._ignored |= groups.pop(group, {}).keys()
                if not exact:
                    groups = self._beyond_rounding(groups, start, key)
                if is_control and groups.keys() - {"assigned"}:
                    reason = f"two uninterrupted runs differ at update {update}: {', '.join(groups)}"
                    raise Verdict(NOT_COMPARED, reason, "Pass Accelerator(seed=0), and seed what the script draws.")
                if groups.keys() - {"assigned"}:
                    reason, *hints = describe(groups)
                    raise Verdict(DIFFERS, f"{head}, and at update {update} {reason}", *hints)
        if start.code == 0 and start.updates < self._reference.updates:
            reason = f"{head}, and ends after update {start.updates}, and not {self._reference.updates}"
            raise Verdict(DIFFERS, reason + self._counter_difference(start), LOOP)

    def _changed_in_loaders(self, start: Start) -> list[str]:
        """Names of loader values that differ between a failed start and the same update without a kill."""
        state: Entry = {}  # of the update in which it failed
        for (update, _), step in self._reference.steps[0].items():
            if update == start.updates + 1:
                state = step["state"]
        expected = {**state.get("objects", {}), **state.get("variables", {})}
        values = {name: value for event in start.events("failed") for name, value in event["loaders"].items()}
        return [name for name in values if name in expected and values[name] != expected[name]]

    def _counter_difference(self, start: Start) -> str:
        """A clause about the counter of a loop that is otherwise at the first update of a start; "" for none."""
        for key, step in list(start.steps[0].items())[:1]:
            expected = self._reference.steps[0].get(key, step)["state"]
            for name, (value, other) in differing(step["state"], expected, self._ignored).get("assigned", {}).items():
                if value[1].isdecimal() and other[1].isdecimal():
                    return f": at update {key[0]} {name} is {value[1]}, and not {other[1]}"
        return ""

    def _beyond_rounding(self, groups: dict[str, Any], start: Start, key: Key) -> dict[str, Any]:
        """The groups that explain why the mean loss differs by more than rounding, or {}."""
        losses, samples = [], []
        for run in (start, self._reference):
            states = [steps[key]["state"] for steps in run.steps if key in steps]
            if len(states) < len(run.steps):
                return {}  # a rank was killed before it
            pairs = [map(float.fromhex, pair) for state in states for pair in state["losses"]["the loss"]]
            if not pairs:  # a second optimizer steps by the same losses
                return {}
            total, items = map(sum, zip(*pairs))
            losses.append(total / items)
            samples.append({crc for state in states for rows in state["samples"].values() for crc in rows})
        if samples[0] != samples[1]:
            return groups
        if abs(losses[0] - losses[1]) <= ROUNDING * key[0] * abs(losses[1]):
            return {}
        rounded = {"samples"}
        if "weights" in groups:
            rounded |= {"weights", "optimizers", "modules"}
        return {group: values for group, values in groups.items() if group not in rounded}


def read(path: Path) -> list[Entry]:
    """The events of a rank; a line that a kill has cut is left out."""
    events = []
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            events.append(json.loads(line))
    return events


def differing(state: Mapping[str, Any], expected: Mapping[str, Any], ignored: set[str]) -> dict[str, dict[str, Any]]:
    """The values of each group that differ, in the order of REMEDIES, each with the expected one."""
    groups: dict[str, dict[str, Any]] = {}
    for group in REMEDIES:
        values, expected_values = state[group], expected[group]
        compares_all = group in ("optimizers", "samples")  # in others a name may be new, or gone
        names = dict.fromkeys([*values, *expected_values]) if compares_all else values
        for name in names:
            value = values.get(name), expected_values.get(name)
            if value[0] != value[1] and (compares_all or name in expected_values) and name not in ignored:
                groups.setdefault(group, {})[name] = value
    return groups


def describe(groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The clause about an update that differs, with what explains it first, and a hint."""
    cause, *other_groups = [group for group in groups if group != "assigned"]
    values = dict(groups[cause])
    if cause == "losses":
        values |= groups.get("assigned", {})
    clauses = []
    for name, pair in list(values.items())[:3]:
        texts = [value[1] if isinstance(value, list) and len(value) == 2 else "" for value in pair]
        is_shown = all(isinstance(text, str) and text for text in texts)
        clauses.append(f"{name} is {texts[0]}, and not {texts[1]}" if is_shown else f"{name} differs")
    if len(values) > 3:
        clauses.append(f"{len(values) - 3} more of its kind differ")
    clauses.append(f"{', '.join(other_groups)} differ, too" if other_groups else "all else is equal")
    return ["; ".join(clauses), REMEDIES[cause]]
