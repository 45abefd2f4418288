"""Run the start of a script and two updates as a few ranks of a world that does not exist, and say what would happen.

Nothing is allocated or sent: parameters have shapes without values, and torch's fake process group takes the
collectives. Printed are the plan, bytes of a rank by kind and at their peak, collectives by group with their bytes, the
samples that a rank reads, and the bytes that it writes of a checkpoint. SCRIPT needs an Accelerator.

examples:
  easymp rehearse train.py --processes 512 --for 8xH100
  easymp rehearse train.py --for 64x8xH100 --strategy hsdp --json
  easymp rehearse train.py --processes 64 --set strategy_options.size=8
  easymp rehearse train.py --processes 512 --global-batch 2048 -- --lr 0.1

Words after -- are the script's own. Options win over the script's settings.

Exit codes: 0 it would run; 1 it would fail there, and the sentence says why; 2 it could not be rehearsed, or wrong
usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
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
from ...settings import overrides
from ..harness import INTERRUPTED, Child, Script, count, headline, plan_settings
from ..harness import arguments as script_arguments
from ..harness import reworded as reworded
from ..terminal import ended_by_signals, print_json, table, wrap

if TYPE_CHECKING:
    from ...training import peak
else:  # they import torch
    modules_at_first_use(globals(), peak="..training.peak")

STOPPED, ENDED, FAILED, UNKNOWN = "stopped", "ended", "failed", "not known"
RUNS, FAILS, NOT_REHEARSED = CODES = ("it would run", "it would fail", "not rehearsed")
AT_ONCE = 2  # ranks that run at the same time
HOST_MEMORY = "Leave cpu=True out, or describe processes on CPUs, as in --for 8xcpu-512GB"
SPARE = 0.05  # of the memory: what the device's runtime and fragmentation take
LEGEND = (
    "Each kind at its largest, and the peak of an update; communication: buffers of collectives; activations: with "
    "whole gradients of a block and other short-lived tensors. Samples: that a rank reads in an update."
)
NO_DEVICE = "This torch is too old to find tensors on a wrong device and waits for the device: update torch. "
# These need the other ranks, files or time.
OFF = {
    **dict.fromkeys(("replica_check", "hang_after", "replay"), "0"),
    **dict.fromkeys(("save_on_signal", "debug"), "false"),
    "log_with": "none",
    "compile": "no",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    script_arguments(parser)
    add = parser.add_argument
    add("--processes", type=count, metavar="N", help="ranks of the world (all of --for)")
    add("--nodes", type=count, metavar="N", help="among which they are divided (as many as --for needs)")
    described = "a node, or all: 8xH100, 64x8xA100-80GB (this machine)"
    add("--for", dest="machine", default="", metavar="MACHINE", help=described)
    add("--ranks", default="", metavar="N,...", help="which are run (0, one inside, the last)")
    add("--steps", type=count, default=2, metavar="N", help="updates (%(default)s)")
    add("--global-batch", type=count, metavar="N", help="samples of an update that are meant; others fail")


def run(args: argparse.Namespace) -> int:
    script = Script(args.script, args.arguments, args.module)
    check_script(args.script, args.module)
    described = hardware.describe(args.machine) if args.machine else None
    devices = described.processes if described else len(hardware.detect().devices)  # of a node
    processes = args.processes or (described.nodes * devices if described else max(1, devices))
    nodes = args.nodes or (-(-processes // devices) if devices else 1)
    if processes % nodes or (devices and processes // nodes > devices):
        raise SettingError(
            f"--processes {processes} on {nodes} node{'s' * (nodes > 1)} of {devices} devices: pass a number that "
            "divides evenly among them"
        )
    per_node = processes // nodes
    texts = args.ranks.split(",") if args.ranks else ["0", str(processes // 2), str(processes - 1)]
    if not all(text.strip().isdecimal() and int(text) < processes for text in texts):
        raise SettingError(f"--ranks {args.ranks}: write numbers from 0 to {processes - 1}, as in 0,8,{processes - 1}")
    settings, start = {**OFF, **plan_settings(args)}, time.perf_counter()
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="easymp-rehearse-") as name:
        folder = Path(name)
        script.write_task(folder, processes=processes, machine=args.machine, updates=args.steps)
        with env.override(**overrides(args.set)):
            records = rehearse(folder, settings, sorted(set(map(int, texts))), processes, per_node)
    verdict, reason = verdict_on(records, args.global_batch, args.machine)
    record = {
        "verdict": verdict,
        "sentence": f"{verdict.capitalize()}{f': {reason}' if reason else f' on {processes} ranks'}.",
        "processes": processes,
        "nodes": nodes,
        "ranks": [summary(rank_record, per_node) for rank_record in records],
        "seconds": time.perf_counter() - start,
    }
    if args.json:
        print_json(record)
    else:
        show(record)
    return CODES.index(verdict)


def rehearse(
    folder: Path, settings: Mapping[str, str], ranks: Sequence[int], processes: int, per_node: int
) -> list[dict[str, Any]]:
    """Run the ranks, each in a process of its own; returns the record of each."""
    waiting, running, records = list(ranks), dict[int, Child](), []
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                rank = waiting.pop(0)
                variables = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(processes),
                    "LOCAL_RANK": str(rank % per_node),
                    "LOCAL_WORLD_SIZE": str(per_node),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                }
                command = [sys.executable, "-m", "easymp.cli.rehearse.rank", str(folder), str(rank)]
                rank_settings = {**settings, "project_dir": str(folder / f"project-{rank}")}
                running[rank] = Child(command, rank_settings, variables, folder / f"output-{rank}.txt")
            rank = next(iter(running))
            if running[rank].wait() == INTERRUPTED:
                raise KeyboardInterrupt
            child, path = running.pop(rank), folder / f"rank-{rank}.json"
            if path.exists():
                records.append(json.loads(path.read_text(encoding="utf-8")))
            else:
                failure = {"end": UNKNOWN, "why": f"its process failed: {child.reason()}"}
                records.append({"rank": rank, **failure, "collectives": [], "waits": [], "updates": 0})
    finally:
        for child in running.values():
            child.stop()
    return records


def verdict_on(records: Sequence[dict[str, Any]], batch: int | None, machine: str) -> tuple[str, str]:
    if difference := first_difference(records):  # which may also be why one of them has failed
        return FAILS, difference
    for record in records:
        if record["end"] in (FAILED, UNKNOWN):
            return FAILS if record["end"] == FAILED else NOT_REHEARSED, f"rank {record['rank']}: {record['why']}"
    if not any(record.get("bytes") for record in records):
        return NOT_REHEARSED, "the script made no Accelerator, or prepared nothing"
    fullest = max(records, key=lambda record: record["peak"] - record["memory"])
    if not fullest["memory"]:
        device = fullest["plan"]["device"]["value"]
        return NOT_REHEARSED, f"the plan trains on {device}, and --for {machine} does not say its memory. {HOST_MEMORY}"
    if fullest["peak"] > fullest["memory"] * (1 - SPARE):
        kind, kind_bytes = max(fullest["at_peak"].items(), key=lambda item: item[1])
        return FAILS, (
            f"out of memory: rank {fullest['rank']} needs {size(fullest['peak'])} at its peak, most of it {kind} "
            f"({size(kind_bytes)}), and has {size(fullest['memory'])}, of which {SPARE:.0%} are left to the device's "
            "runtime"
        )
    if batch is not None and any(record["batch"] != batch for record in records):
        read = records[0]["batch"]
        return FAILS, f"an update reads {read} samples over all ranks, and {batch} are meant (--global-batch)"
    if not all(record["updates"] for record in records):
        return NOT_REHEARSED, "the script ended before an update of its prepared optimizers"
    return RUNS, ""


def first_difference(records: Sequence[Mapping[str, Any]]) -> str:
    """The first collective at which two ranks differ, although both belong to it; "" where there is none."""
    for pair in combinations(records, 2):
        groups = [by_group(record["collectives"]) for record in pair]
        for first, last, ranks in groups[0].keys() | groups[1].keys():
            if not all(first <= record["rank"] <= last for record in pair):
                continue
            rows = [rows_by_group.get((first, last, ranks), []) for rows_by_group in groups]
            if ranks <= last - first and not all(rows):
                continue  # of ranks with a stride, both are members if both have met there
            calls = [[(row["kind"], row["bytes"]) for row in rank_rows] for rank_rows in rows]
            index = next((i for i, (a, b) in enumerate(zip(*calls)) if a != b), min(map(len, calls)))
            if index < max(map(len, calls)):
                return (
                    f"the ranks would wait for each other for good: rank {pair[0]['rank']} comes to "
                    f"{call_at(rows[0], index)}, and rank {pair[1]['rank']} to {call_at(rows[1], index)}, as number "
                    f"{index + 1} of their group of {ranks} ranks. All of them must make the same calls in one order"
                )
    return ""


def by_group(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int, int], list[Mapping[str, Any]]]:
    """The collectives of each group: its first and last rank, and how many it has."""
    groups: dict[tuple[int, int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["kind"] not in ("send", "receive"):
            groups.setdefault((row["first"], row["last"], row["ranks"]), []).append(row)
    return groups


def call_at(rows: Sequence[Mapping[str, Any]], index: int) -> str:
    if index >= len(rows):
        return "its end"
    row = rows[index]
    bytes_ = f" of {size(row['bytes'])}" if row["bytes"] else ""
    line = f" at {row['line']}" if row["line"] else ""
    return f"{row['kind']}{bytes_}{line}"


def summary(record: Mapping[str, Any], per_node: int) -> dict[str, Any]:
    """A rank's record, with its collectives of the start and of the last update, by group and kind."""
    rows: dict[Any, dict[str, Any]] = {}
    last_update = max(0, record["updates"] - 1)
    for row in record["collectives"]:
        phase = "update" if row["phase"] == last_update and last_update else "start" if row["phase"] == 0 else ""
        if phase and row["bytes"]:
            nodes = min(row["last"] // per_node - row["first"] // per_node + 1, row["ranks"])
            key = {"when": phase, "kind": row["kind"], "ranks": row["ranks"], "nodes": nodes}
            total = rows.setdefault(tuple(key.values()), {**key, "calls": 0, "bytes": 0})
            total["calls"] += 1
            total["bytes"] += row["bytes"]
    waits = Counter(row["line"] or "easymp" for row in record["waits"] if row["phase"] == last_update)
    return {**record, "collectives": list(rows.values()), "waits": dict(waits)}


def show(record: Mapping[str, Any]) -> None:
    ranks = [rank for rank in record["ranks"] if rank.get("plan")]
    if ranks:
        first = ranks[0]
        rows = [[name, c["value"], c["reason"]] for name, c in first["plan"].items() if isinstance(c, dict)]
        rows += [["candidate", c["strategy"], c["reason"]] for c in first["plan"].get("candidates", ())]
        nodes = f"on {record['nodes']} node{'s' * (record['nodes'] > 1)}"
        print(table([["processes", record["processes"], nodes], *rows], fold=True))
        largest = [
            {kind: max(rank["bytes"].get(kind, 0), at_peak) for kind, at_peak in rank["at_peak"].items()}
            for rank in ranks
        ]
        names = [kind for kind in first["at_peak"] if any(sizes[kind] for sizes in largest)]
        rows = [["rank", *names, "peak", "of", "checkpoint", "samples"]]
        for rank, sizes in zip(ranks, largest):
            totals = [size(rank[name]) for name in ("peak", "memory", "checkpoint")]
            rows.append([rank["rank"], *(size(sizes[name]) for name in names), *totals, rank["samples"]])
        print(f"\n{table(rows, right=set(range(len(rows[0]))))}\n{wrap(LEGEND)}")
        rows = [[*list(row.values())[:-1], size(row["bytes"])] for row in first["collectives"]]
        if rows:
            rows.insert(0, ["when", "collective", "ranks", "nodes", "calls", "bytes"])
            print(f"\nCollectives of rank {first['rank']}:\n{table(rows, right={2, 3, 4, 5})}")
        if first["largest"]:
            cells = peak.cells(first["largest"], size)
            print(f"\nThe largest tensors at the peak of rank {first['rank']}:\n{table(cells, right={0}, fold=True)}")
        batch = f"An update reads {first['batch']} samples over all ranks. " if first["batch"] else ""
        places = ", ".join(f"{line} ({number})" for line, number in first["waits"].items())
        waits = f"In it the host waits for the device, which takes time: {places}. " if places else ""
        if first["device"] == "cpu" and not first["plan"]["device"]["value"].startswith("cpu"):
            waits = NO_DEVICE
        closing = f"{batch}{waits}Rehearsed in {duration(record['seconds'])}."
        print(f"\n{wrap(closing)}")
    print(headline(record["sentence"], CODES.index(record["verdict"])))
