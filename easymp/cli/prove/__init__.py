"""Show that a script trains under a plan as it does on one process in fp32.

SCRIPT runs twice, for a few updates: under the plan, and on one process in fp32 with the same samples and weights.
Losses, gradients and weights of each update are compared. What differs by more than the precision explains is named,
with both values. SCRIPT needs an Accelerator, and loaders that it prepares.

examples:
  easymp prove train.py --strategy fsdp --processes 2
  easymp prove train.py --processes 2 --precision bf16 --steps 3
  easymp prove train.py --set gradient_accumulation_steps=4
  easymp prove train.py --strategy ddp --processes 2 --no-dropout -- --epochs 1
  easymp prove train.py --strategy fsdp --processes 64 --set cpu=true
  easymp prove train.py --against old-env/bin/python
  easymp prove train.py --against accelerate --processes 2
  easymp prove moved.py --against before.py
  easymp prove train.py --kill 20 --processes 2
  easymp prove train.py --kill 20 --processes 2,1

With --kill, SCRIPT runs to its end. Then it is killed at random instants, also inside saves, and started again. Each
update is compared: bit for bit on as many processes, else within rounding. What was not restored is named.

Words after -- are the script's own. Options win over the script's settings.

Exit codes: 0 proven; 1 a run differs, or the script fails in it; 2 it could not be compared, and the sentence
says why, or wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ... import hardware
from ...base import env
from ...errors import SettingError
from ...launcher.entrypoints import check_script
from ...settings import overrides, resolve
from ..harness import (
    DIFFERS,
    FAILED,
    FAILURE,
    FINISHED,
    INTERRUPTED,
    NOT_COMPARED,
    PROVEN,
    REFUSED,
    End,
    Script,
    check_new,
    count,
    headline,
    plan_settings,
)
from ..harness import arguments as script_arguments
from ..harness import reworded as reworded
from ..harness import run as run_once
from ..terminal import ended_by_signals, plain, print_json, table, wrap
from . import kills

# Libraries that run the reference, and the packages that easymp stands for in the other run.
LIBRARIES = {"accelerate": ("accelerate",), "fabric": ("lightning", "lightning_fabric")}
FIRST, ROWS, SKIPPED = "update-0.safetensors", "rows.json", "skipped"
CODES = {PROVEN: 0, DIFFERS: 1, FAILED: 1, NOT_COMPARED: 2}
UNDER_PLAN, ONE, HERE = "under the plan", "on one process", "here"
PLAN = {"replica_check": "0"}  # differences of ranks are named by the proof
ONE_PROCESS = {
    **PLAN,
    "mixed_precision": "no",
    "strategy": "single",
    "strategy_options": "{}",
    "compile": "no",
    "fused": "false",
    "gradient_accumulation_steps": "1",
    "activation_checkpointing": "no",
    "activation_offload": "false",
}
WAITING = {"timeout": "600", "hang_after": "0"}  # of ranks that wait for a processor
FEW = 2  # updates of such ranks
# Causes, and what to do.
DROPOUT = (
    "--no-dropout sets the rates of dropout layers to 0 in both runs; other modules that draw need a rate of 0 in the "
    "script."
)
SAMPLES = (
    "Read the data by loaders that were passed to prepare(), without random augmentation, and with rows of one length."
)
STEPPED = "The ranks step other parameters, or with other options: build and change the optimizer alike on all ranks."
REDUCED = (
    "No rank averages this gradient: call accelerator.backward(loss) in place of loss.backward(), and the prepared "
    "model in place of its parts."
)
BATCHNORM = (
    "{} takes the statistics of each process's micro-batch by itself: Settings(convert_sync_batchnorm=True) takes "
    "those of all processes; micro-batches of an accumulation stay apart."
)
PREPARED = (
    "Steps of other libraries and of torch alone are not compared: give the model, the optimizer and the loader to the "
    "prepare() of one Accelerator. Where the first updates overflow, pass more --steps."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    script_arguments(parser)
    add = parser.add_argument
    add("--processes", type=_counts, default=[1], metavar="N", help="on this machine (1); with --kill, N,M,… in turn")
    add("--steps", type=count, metavar="N", help=f"updates of each optimizer (5; {FEW} where ranks share a processor)")
    add("--kill", type=count, metavar="N", help="kill the script N times, and show that it goes on as if it was not")
    reference = "compare with the run by another PYTHON, by accelerate or fabric itself, or of a script before its move"
    add("--against", metavar="REFERENCE", help=reference)
    add("--seed", type=int, default=0, metavar="N", help="of the instants of --kill (%(default)s)")
    dropout = "set the rates of dropout layers to 0 in both runs, which cannot draw the same masks"
    add("--no-dropout", action="store_false", dest="dropout", help=dropout)
    add("--timeout", type=float, metavar="SECONDS", help="stop a run that takes longer")
    add("--output", type=Path, metavar="DIR", help="a new folder that keeps what the runs print and record")


def _counts(text: str) -> list[int]:
    return [count(number) for number in text.split(",")]


def run(args: argparse.Namespace) -> int:
    script = Script(args.script, args.arguments, args.module)
    check_script(args.script, args.module)
    settings = plan_settings(args)
    if len(args.processes) > 1 and not args.kill:
        raise SettingError("--processes with several numbers is for --kill: pass one")
    if args.kill and args.against:
        raise SettingError("--kill compares with the script's own uninterrupted run: leave --against out")
    args.steps = args.steps or (5 if args.processes[0] <= processors() else FEW)
    moved = args.against is not None and not is_interpreter(args.against)
    if args.output:
        check_new(args.output)
    output = nullcontext(args.output) if args.output else tempfile.TemporaryDirectory(prefix="easymp-prove-")
    with ended_by_signals(), output as folder, env.override(**overrides(args.set)):
        # The script's own wins; a moved script draws as its reference does, from torch's generator.
        seed = {} if moved or resolve().seed is not None else {f"{env.PREFIX}SEED": "0"}
        with env.override(**seed):
            if args.kill:
                record = kills.Kills(script, settings, args, Path(folder).absolute()).run()
            else:
                record = prove(script, settings, args, moved, Path(folder).absolute())
    code = CODES[record["verdict"]]
    if args.json:
        print_json(record)
        return code
    print(headline(record["sentence"], code))
    for hint in record["hints"]:
        print(wrap(plain(hint)))
    if record["updates"]:
        print(f"\n{update_table(record['updates'])}")
    return code


def prove(
    script: Script, settings: Mapping[str, str], args: argparse.Namespace, moved: bool, folder: Path
) -> dict[str, Any]:
    """Run the script under the plan, then on one process, which compares; and judge.

    A script that has `moved` from another library is compared with what it was before.
    """
    records = folder / "records"
    records.mkdir(parents=True)
    against = args.against
    reference = against if moved and against.endswith(".py") else script.path
    facts = {"against": against, "reference": reference, "steps": args.steps, "dropout": args.dropout}
    script.write_task(records, **facts)
    rank = Script(f"easymp.cli.prove.{'against' if moved else 'rank'}", [str(records)], module=True)
    processes = args.processes[0]
    runs = [(UNDER_PLAN, {**PLAN, **settings}, processes), (ONE, ONE_PROCESS, 1)]
    if against:
        runs[0] = (f"against {Path(against).name}", *runs[0][1:])
    if moved:  # a reference may count its micro-batches itself
        plan = {**ONE_PROCESS, "strategy": "ddp" if processes > 1 else "single"}
        del plan["gradient_accumulation_steps"]
        runs[1] = (HERE, plan, processes)
    failures: dict[str, End] = {}

    def read(name: str) -> str:
        return (records / name).read_text(encoding="utf-8") if (records / name).exists() else ""

    for number, (name, plan, processes) in enumerate(runs, 1):
        if number == 2 and (read(REFUSED) or not (records / FIRST).exists()):
            break
        if number == 2 and (records / SKIPPED).exists():
            plan = {**plan, "nonfinite": "skip"}
        run_folder, command = folder / name.replace(" ", "-"), rank.launch(processes)
        if processes > processors():
            plan = {**WAITING, **plan}
            command = [sys.executable, "-m", "easymp.cli.prove.forks", str(records), str(processes), rank.path]
        if number == 1 and against and not moved:
            command[0] = against
        end = run_once(f"{number}/2 {name}", command, run_folder, plan, args.timeout)
        if end.status == INTERRUPTED:
            raise KeyboardInterrupt
        if end.status != FINISHED:
            failures[name] = end
    rows = json.loads(read(ROWS) or "[]")
    for row in rows:
        row["plan"] |= {"by": f" by {against}" if against and not moved else "", "second": runs[1][0]}
    return judge(rows, read(REFUSED), failures, args.steps)


def is_interpreter(against: str) -> bool:
    """Whether `against` is a Python interpreter. SettingError if it is no reference of any kind."""
    if against in LIBRARIES or (against.endswith(".py") and Path(against).is_file()):
        return False
    path = shutil.which(against)
    if path is None or against == "plain":
        raise SettingError(
            f"--against {against}: pass the path of the script before its move, a plain loop for example; accelerate "
            "or fabric, for a script that imports it; or a Python, such as old/bin/python"
        )
    return True


def processors() -> int:
    """Ranks that this machine runs at the same time: one a processor, or an accelerator."""
    machine = hardware.detect()
    return max(len(machine.devices), machine.cpu.threads)


def judge(rows: Sequence[Any], refusal: str, failures: Mapping[str, End], steps: int) -> dict[str, Any]:
    """The verdict, its sentence, and hints; of the `rows` that the rank wrote, or why there are none."""
    verdict, hints = NOT_COMPARED, list[str]()
    compared = [row for row in rows if "weights" in row]
    sentences = [f"the run {name} failed: {end.why.rstrip('.')}" for name, end in failures.items()]
    row = rows[-1] if rows and rows[-1].get("differs") else None
    if row and not row["apart"] and row["draws"]:
        reason, hints = f"{row['draws']} draws random numbers, others for other parts of a batch", [DROPOUT]
    elif row and not row["apart"] and not row["same samples"]:
        reason, hints = f"update {row['update']} reads other samples {row['plan']['second']}", [SAMPLES]
    elif row:
        verdict, reason = DIFFERS, difference(row)
        hints = causes(row) + [f"Then {failure}." for failure in sentences]
    elif refusal:
        reason = refusal
    elif failures:
        reason = sentences[0]
        if UNDER_PLAN in failures and failures[UNDER_PLAN].status == FAILURE:
            verdict = FAILED
    elif not compared:
        reason = (
            "no update was made with a prepared optimizer, or each one had an overflow, or a window that was not full"
        )
        hints = [PREPARED]
    else:
        differences = [row[kind]["largest"] for row in compared for kind in ("gradients", "weights")]
        largest = max(filter(None, differences), key=lambda d: d["times"])
        count, verdict = len({row["update"] for row in compared}), PROVEN
        other = "the script here" if compared[0]["plan"]["second"] == HERE else "one process in fp32"
        reason = (
            f"{count} update{'s' * (count > 1)} {plan_text(compared[0])} gave the losses, gradients and weights of "
            f"{other}. The largest difference is {largest['times']:.2g} of what "
            f"{compared[0]['plan']['precision']} explains ({largest['name']})"
        )
        if count < steps:
            hints = [f"The others of {steps} were not made, overflowed, or lie at the end of an epoch."]
    sentence = f"{verdict.capitalize()}: {reason}."
    return {"verdict": verdict, "sentence": sentence, "hints": hints, "updates": list(rows)}


def plan_text(row: Mapping[str, Any]) -> str:
    plan = row["plan"]
    plural = "es" * (plan["processes"] > 1)
    return f"under {plan['strategy']} on {plan['processes']} process{plural} in {plan['precision']}{plan['by']}"


def difference(row: Mapping[str, Any]) -> str:
    """The first difference of an update, with both values."""
    head = f"at update {row['update']} of {row['class']}, {plan_text(row)}, "
    if tensor := row["apart"]:
        values = f"{tensor['plan']:.6g} on rank {tensor['rank']} and {tensor['one']:.6g} on rank 0"
        element = f"{tensor['name']}{tensor['at']} in {tensor['layer']}"
        return f"{head}the {tensor['kind']} of {element} is {values}, and must be equal"
    clauses, second = list[str](), row["plan"]["second"]
    if not row.get("loss", {"times": 0})["times"] <= 1:
        clauses.append(f"the loss is {row['loss']['plan']:.6g}, and {row['loss']['one']:.6g} {second}")
    if row["option"]:
        clauses.append("{} of the optimizer is {:.6g}, and {:.6g} {}".format(*row["option"], second))
    for kind in ("gradients", "weights"):
        if tensors := row[kind]["beyond"]:
            tensor, count = tensors[0], len(tensors) - 1
            clauses.append(
                f"the {kind[:-1]} of {tensor['name']}{tensor['at']} in {tensor['layer']} is {tensor['plan']:.6g}, and "
                f"{tensor['one']:.6g} {second}, {tensor['times']:.2g} times what the precision explains"
                f"{f' ({count} others differ, too)' if count else ''}"
            )
            break
    if row["layer"]:
        clauses.append(f"the first layer whose output differs is {row['layer']}")
    return head + "; ".join(clauses)


def causes(row: Mapping[str, Any]) -> list[str]:
    if row["apart"]:
        return [STEPPED if row["apart"]["kind"] == "weight" else REDUCED]
    ratio, shares, accumulation = row["ratio"], row["plan"]["shares"], row["plan"]["accumulation"]
    if row["batchnorm"] and shares * accumulation > 1:
        return [BATCHNORM.format(row["batchnorm"])]
    second = "here" if row["plan"]["second"] == HERE else "of one process"
    if ratio is None or abs(ratio - 1) < 0.1:
        return []
    divisors = {"the number of processes": shares, "gradient_accumulation_steps": accumulation}
    names = [f"{name} ({n})" for name, n in divisors.items() if n > 1 and abs(ratio * n - 1) < 0.1]
    cause = f": the script divides the loss by {' or '.join(names)}, as the Accelerator does" if names else ""
    return [f"All gradients are {ratio:.3g} × those {second}{cause}."]


def update_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The updates: losses, and the largest differences as multiples of what the precision explains."""
    cells: list[list[Any]] = [["update", "optimizer", "loss", rows[0]["plan"]["second"], "gradients", "weights"]]
    for row in rows:
        losses = [f"{row['loss'][key]:.6g}" if "loss" in row else None for key in ("plan", "one")]
        missing = "skipped" if row["skipped"] else "not full" if row["short"] else None
        differences = [row[kind]["largest"] if kind in row else None for kind in ("gradients", "weights")]
        cells.append(
            [row["update"], row["class"], *losses, *(f"{d['times']:.2g}" if d else missing for d in differences)]
        )
    return table(cells, right={0, 2, 3, 4, 5})
