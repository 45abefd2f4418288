"""Run the start of a script and two updates as a few ranks of a world that does not exist, and say what would happen there.

Nothing is allocated or sent: parameters have shapes without values, and torch's
fake process group takes the collectives. Said are the plan, bytes of a rank by
kind and at their peak, collectives by group with bytes and predicted time, what
a rank reads, and what it writes of a checkpoint. SCRIPT needs an Accelerator.

examples:
  easymp rehearse train.py --processes 512 --for 8xH100
  easymp rehearse train.py --for 64x8xH100 --strategy hsdp --json
  easymp rehearse train.py --processes 64 --set strategy_options.size=8
  easymp rehearse train.py --processes 512 --global-batch 2048 -- --lr 0.1

Words after -- are the script's own. Options win over the script's settings.

Exit codes: 0 it would run; 1 it would fail there, and the sentence says why;
2 it could not be rehearsed, or wrong usage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import hardware
from ...base import env
from ...base.lazy import modules_at_first_use
from ...base.units import duration, size
from ...errors import SettingError
from ...launcher.entrypoints import check_script
from ...settings import NAMES, OVERRIDE, checked, overrides
from ..compare import count
from ..terminal import BOLD, GREEN, RED, YELLOW, ended_by_signals, paint, plain, print_json, table, wrap

if TYPE_CHECKING:
    from ...hardware import gpus
else:  # they import torch
    modules_at_first_use(globals(), gpus="..hardware.gpus")

TASK = "task.json"
STOPPED, ENDED, FAILED, UNKNOWN = "stopped", "ended", "failed", "not known"
RUNS, FAILS, NOT_REHEARSED = CODES = ("it would run", "it would fail", "not rehearsed")
COLOURS = (GREEN, RED, YELLOW)
AT_ONCE = 2  # ranks that run at the same time
SPARE = 0.05  # of the memory: what the device's runtime and fragmentation take
# What needs the other ranks, files or time.
QUIET = {
    "replica_check": "0", "probe": "false", "hang_after": "0", "log_with": "none", "save_on_signal": "false",
    "replay": "0", "debug": "false", "compile": "no",
}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "easymp rehearse SCRIPT [OPTIONS] [-- ARGUMENTS]"
    add("script", metavar="SCRIPT", help="its path; its own arguments follow --")
    add("--processes", type=count, metavar="N", help="ranks of the world (all of --for)")
    add("--nodes", type=count, metavar="N", help="among which they are divided (as many as --for needs)")
    add(
        "--for",
        dest="machine",
        metavar="MACHINE",
        help="a node, or all: 8xH100, 64x8xA100-80GB (this machine)",
    )
    add("--strategy", metavar="NAME", help="ddp, zero1, fsdp, hsdp … (the script's own)")
    add("--precision", metavar="NAME", help="fp32, bf16 … (the script's own)")
    sets = "a setting of the plan, over the script's own; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=sets)
    add("--ranks", default="", metavar="N,...", help="which are run (0, one inside, the last)")
    add("--steps", type=count, default=2, metavar="N", help="updates (%(default)s)")
    add("--global-batch", type=count, metavar="N", help="samples of an update that are meant; others fail")
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    add("--json", action="store_true", help="print all of it as JSON")


def reworded(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Keep the words after ``--`` for the script."""
    cut = words.index("--") if "--" in words else len(words)
    parser.set_defaults(arguments=words[cut + 1 :])
    return words[:cut]


def run(args: argparse.Namespace) -> int:
    check_script(args.script, args.module)
    there = gpus.describe(args.machine) if args.machine else None
    node = there.hardware if there else hardware.detect()
    each = (there.processes if there else len(node.devices)) or 0
    processes = args.processes or (there.nodes * there.processes if there else max(1, each))
    nodes = args.nodes or -(-processes // each if each else 1)
    if processes % nodes or (each and processes // nodes > each):
        raise SettingError(
            f"--processes {processes} on {nodes} node{'s' * (nodes > 1)} of {each} devices: pass a number that divides evenly among them"
        )
    here = processes // nodes
    words = args.ranks.split(",") if args.ranks else ["0", str(processes // 2), str(processes - 1)]
    if not all(word.strip().isdecimal() and int(word) < processes for word in words):
        raise SettingError(
            f"--ranks {args.ranks}: write numbers from 0 to {processes - 1}, as in 0,8,{processes - 1}"
        )
    ranks = sorted({int(word) for word in words})
    asked = {"mixed_precision": args.precision, "strategy": args.strategy}
    asked = {name: checked(NAMES[name], word, f"{name}=") for name, word in asked.items() if word is not None}
    task = {
        "processes": processes, "machine": args.machine, "module": args.module, "script": args.script,
        "arguments": args.arguments, "updates": args.steps,
    }  # fmt: skip
    begun = time.perf_counter()
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="easymp-rehearse-") as folder:
        Path(folder, TASK).write_text(json.dumps(task), encoding="utf-8")
        with env.override(
            **overrides([*args.set, *(f"{name}={word}" for name, word in {**QUIET, **asked}.items())])
        ):
            seen = rehearse(Path(folder), ranks, processes, here)
    found = judge(seen, args.global_batch, processes, here, node.devices[0].name if node.devices else "")
    found["seconds"] = time.perf_counter() - begun
    if args.json:
        print_json(found)
    else:
        show(found)
    return CODES.index(found["verdict"])


def rehearse(folder: Path, ranks: Sequence[int], processes: int, here: int) -> list[dict[str, Any]]:
    """Run the ranks, each in a process of its own; returns what each has found."""
    left, running, seen = list(ranks), dict[int, subprocess.Popen[bytes]](), []
    while left or running:
        while left and len(running) < AT_ONCE:
            rank = left.pop(0)
            place = {
                "RANK": rank,
                "WORLD_SIZE": processes,
                "LOCAL_RANK": rank % here,
                "LOCAL_WORLD_SIZE": here,
            }
            mine = {**{name: str(number) for name, number in place.items()}, "CUDA_VISIBLE_DEVICES": ""}
            project = f"{env.read(OVERRIDE)} project_dir={folder / f'project-{rank}'}"
            with open(folder / f"output-{rank}.txt", "wb") as output:
                command = [sys.executable, "-m", "easymp.cli.rehearse.rank", str(folder), str(rank)]
                variables = env.merged(
                    {**mine, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", OVERRIDE: project}
                )
                running[rank] = subprocess.Popen(
                    command, env=variables, stdout=output, stderr=subprocess.STDOUT
                )
        rank, process = next(iter(running.items()))
        try:
            process.wait()
        except BaseException:
            for other in running.values():
                other.kill()
            raise
        del running[rank]
        record = folder / f"rank-{rank}.json"
        if record.exists():
            seen.append(json.loads(record.read_text(encoding="utf-8")))
        else:
            text = (folder / f"output-{rank}.txt").read_text(encoding="utf-8", errors="replace")
            why = f"its process ended with {process.returncode}: {(text.strip().splitlines() or [''])[-1]}"
            seen.append(
                {"rank": rank, "end": UNKNOWN, "why": why, "collectives": [], "reads": 0, "updates": 0}
            )
    return seen


# -- the verdict


def judge(
    seen: Sequence[dict[str, Any]], batch: int | None, processes: int, here: int, device: str
) -> dict[str, Any]:
    """What the ranks have found, as one record, with the verdict and its sentence.

    Args:
        batch: samples of an update that are meant; None: any number.
        here: ranks of a node.
        device: the name of each one's GPU.
    """
    verdict, why = RUNS, ""
    broken = [one for one in seen if one["end"] in (FAILED, UNKNOWN)]
    apart = unlike(seen)
    full = [one for one in seen if one.get("peak", 0) > one.get("memory", 0) * (1 - SPARE)]
    if apart:  # which may also be why one of them has failed
        verdict, why = FAILS, apart
    elif broken:
        one = broken[0]
        verdict = FAILS if one["end"] == FAILED else NOT_REHEARSED
        why = f"rank {one['rank']}: {one['why']}"
    elif not any(one.get("bytes") for one in seen):
        verdict, why = NOT_REHEARSED, "the script made no Accelerator, or prepared nothing"
    elif full:
        one = max(full, key=lambda one: one["peak"])
        most = max(one["at_peak"], key=lambda kind: one["at_peak"][kind])
        verdict, why = (
            FAILS,
            (
                f"out of memory: rank {one['rank']} needs {size(one['peak'])} at its peak, most of it {most} "
                f"({size(one['at_peak'][most])}), and has {size(one['memory'])}, of which {SPARE:.0%} are left to the device's runtime"
            ),
        )
    elif batch is not None and any(one["batch"] != batch for one in seen):
        verdict, why = (
            FAILS,
            f"an update reads {seen[0]['batch']} samples over all ranks, and {batch} are meant (--global-batch)",
        )
    elif not all(one["updates"] for one in seen):
        verdict, why = NOT_REHEARSED, "the script ended before an update of its prepared optimizers"
    ranks = [summary(one, here, device) for one in seen]
    sentence = f"{verdict.capitalize()}{': ' + why if why else f' on {processes} ranks'}."
    world = {"processes": processes, "nodes": processes // here}
    return {"verdict": verdict, "sentence": sentence, **world, "ranks": ranks}


def unlike(seen: Sequence[Mapping[str, Any]]) -> str:
    """The first meeting at which two ranks differ, although both belong to it; "" where there is none."""
    for one, other in combinations(seen, 2):
        sides: list[dict[Any, list[Any]]] = [{}, {}]
        for side, rows in zip(sides, (one["collectives"], other["collectives"])):
            for row in rows:
                if row["kind"] not in ("send", "receive"):
                    side.setdefault((row["first"], row["last"], row["ranks"]), []).append(row)
        for group in sides[0].keys() | sides[1].keys():
            within = all(group[0] <= rank["rank"] <= group[1] for rank in (one, other))
            if not within or (group[2] <= group[1] - group[0] and not all(group in side for side in sides)):
                continue  # of ranks with a stride, both are members if both have met there
            first, second = (side.get(group, []) for side in sides)
            said = [[(row["kind"], row["bytes"]) for row in side] for side in (first, second)]
            at = next((i for i, (a, b) in enumerate(zip(*said)) if a != b), min(map(len, said)))
            if at < max(len(first), len(second)):
                return (
                    f"the ranks would wait for each other for good: rank {one['rank']} comes to {meeting(first, at)}, and rank "
                    f"{other['rank']} to {meeting(second, at)}, as number {at + 1} of their group of {group[2]} ranks. "
                    "All of them must make the same calls in one order"
                )
    return ""


def meeting(rows: Sequence[Mapping[str, Any]], at: int) -> str:
    if at >= len(rows):
        return "its end"
    row = rows[at]
    return f"{row['kind']}{' of ' + size(row['bytes']) if row['bytes'] else ''}{' at ' + row['line'] if row['line'] else ''}"


def summary(one: Mapping[str, Any], here: int, device: str) -> dict[str, Any]:
    """A rank's record, with its collectives of the start and of the last update, by group and kind, and their predicted time."""
    rows: dict[Any, dict[str, Any]] = {}
    last = max(0, one["updates"] - 1)
    for row in one["collectives"]:
        when = "update" if row["phase"] == last and last else "start" if row["phase"] == 0 else ""
        nodes = min(row["last"] // here - row["first"] // here + 1, row["ranks"])
        if when and row["bytes"]:
            mine = rows.setdefault(
                (when, row["kind"], row["ranks"], nodes),
                {"when": when, "kind": row["kind"], "ranks": row["ranks"], "nodes": nodes, "calls": 0, "bytes": 0, "seconds": None},
            )  # fmt: skip
            mine["calls"] += 1
            mine["bytes"] += row["bytes"]
            seconds = gpus.collective_seconds(row["kind"], row["bytes"], row["ranks"], nodes, device)
            if seconds is not None:
                mine["seconds"] = (mine["seconds"] or 0.0) + seconds
    kept = {name: value for name, value in one.items() if name != "collectives"}
    return {**kept, "collectives": list(rows.values())}


# -- for people


def show(found: Mapping[str, Any]) -> None:
    """Print the plan, bytes, collectives, samples and the verdict."""
    ranks = [one for one in found["ranks"] if one.get("plan")]
    if ranks:
        first = ranks[0]
        rows = [[name, c["value"], c["reason"]] for name, c in first["plan"].items() if isinstance(c, dict)]
        rows += [["candidate", c["strategy"], c["reason"]] for c in first["plan"].get("candidates", ())]
        print(table([["processes", found["processes"], f"on {found['nodes']} nodes"], *rows], fold=True))
        kinds = [
            kind
            for kind in first["at_peak"]
            if any(one["at_peak"][kind] or one["bytes"].get(kind) for one in ranks)
        ]
        lines = [["rank", *kinds, "peak", "of", "checkpoint", "samples"]]
        for one in ranks:
            bytes_ = [size(max(one["bytes"].get(kind, 0), one["at_peak"][kind])) for kind in kinds]
            rest = (size(one[k]) for k in ("peak", "memory", "checkpoint"))
            lines.append([one["rank"], *bytes_, *rest, one["samples"]])
        print(f"\n{table(lines, right=set(range(len(lines[0]))))}")
        note = "Each kind at its largest, and the peak of an update; communication: buffers of collectives; activations: with "
        print(
            wrap(
                note
                + "whole gradients of a block and other short-lived tensors. Samples: that a rank reads in an update."
            )
        )
        sent = [["when", "collective", "ranks", "nodes", "calls", "bytes", "predicted"]]
        for row in first["collectives"]:
            cells = [row[k] for k in ("when", "kind", "ranks", "nodes", "calls")]
            took = "–" if row["seconds"] is None else f"{1000 * row['seconds']:,.2f} ms"
            sent.append([*cells, size(row["bytes"]), took])
        if len(sent) > 1:
            print(f"\nCollectives of rank {first['rank']}:\n{table(sent, right={2, 3, 4, 5, 6})}")
        batch = f"An update reads {first['batch']} samples over all ranks. " if first["batch"] else ""
        reads = f"{first['reads']} values that the script read were made up. " if first["reads"] else ""
        print(wrap(f"\n{batch}{reads}Rehearsed in {duration(found['seconds'])}."))
    print(paint(wrap(plain(found["sentence"])), f"{BOLD};{COLOURS[CODES.index(found['verdict'])]}"))
