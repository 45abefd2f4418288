"""Show that a script trains under a plan as it does on one process in fp32.

SCRIPT runs twice, for a few updates: under the plan, and on one process in
fp32 with the same samples and weights. Losses, gradients and weights of each
update are compared. What differs by more than the precision explains is named,
with both values. SCRIPT needs an Accelerator, and loaders that it prepares.

examples:
  easymp prove train.py --strategy fsdp --processes 2
  easymp prove train.py --processes 2 --precision bf16 --steps 3
  easymp prove train.py --set gradient_accumulation_steps=4
  easymp prove train.py --strategy ddp --processes 2 --no-dropout -- --epochs 1

Words after -- are the script's own. Options win over the script's settings.

Exit codes: 0 proven; 1 the plan differs; 2 it could not be compared, and the
sentence says why, or wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ...base import env
from ...errors import SettingError
from ...launcher.entrypoints import check_script
from ...settings import NAMES, checked, overrides, resolve
from ..compare import Progress, count
from ..compare.runs import FINISHED, INTERRUPTED, Task, Variant
from ..compare.runs import run as run_once
from ..terminal import BOLD, GREEN, RED, YELLOW, ended_by_signals, paint, plain, print_json, table, wrap

TASK, FIRST, ROWS, REFUSED, SKIPPED = (
    "task.json",
    "update-0.safetensors",
    "rows.json",
    "refused.txt",
    "skipped",
)
PROVEN, DIFFERS, NOT_COMPARED = "proven", "differs", "not compared"
CODES, COLOURS = (PROVEN, DIFFERS, NOT_COMPARED), (GREEN, RED, YELLOW)
PLAN = {"replica_check": "0", "probe": "false"}  # differences of ranks are named here
# fmt: off
ONE = {
    **PLAN, "mixed_precision": "no", "strategy": "single", "strategy_options": "{}", "compile": "no", "fused": "false",
    "gradient_accumulation_steps": "1", "activation_checkpointing": "no", "activation_offload": "false",
}
# fmt: on
DROPOUT = "--no-dropout sets the rates of dropout layers to 0 in both runs; other modules that draw need a rate of 0 in the script."
SAMPLES = "Read the data by loaders that were passed to prepare(), without random augmentation, and with rows of one length."
STEPPED = "The ranks step other parameters, or with other options: build and change the optimizer alike on all ranks."
REDUCED = (
    "No rank averages this gradient: call accelerator.backward(loss) in place of loss.backward(), and the prepared model in place of its "
    "parts."
)
BATCHNORM = (
    "{} takes the statistics of each process's micro-batch by itself: Accelerator(convert_sync_batchnorm=True) takes those of all "
    "processes; micro-batches of an accumulation stay apart."
)
PREPARED = (
    "Steps of other libraries and of torch alone are not compared: give the model, the optimizer and the loader to the prepare() of one "
    "Accelerator. Where the first updates overflow, pass more --steps."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "easymp prove SCRIPT [OPTIONS] [-- ARGUMENTS]"
    add("script", metavar="SCRIPT", help="its path; its own arguments follow --")
    add("--strategy", metavar="NAME", help="single, ddp, zero1, fsdp … (the script's own)")
    add("--processes", type=count, default=1, metavar="N", help="on this machine (%(default)s)")
    add("--precision", metavar="NAME", help="fp32, bf16 … (the script's own)")
    add("--steps", type=count, default=5, metavar="N", help="updates of each optimizer (%(default)s)")
    sets = "a setting of the plan, over the script's own; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=sets)
    dropout = "set the rates of dropout layers to 0 in both runs, which cannot draw the same masks"
    add("--no-dropout", action="store_false", dest="dropout", help=dropout)
    add("--timeout", type=float, metavar="SECONDS", help="stop a run that takes longer")
    add("--output", type=Path, metavar="DIR", help="a new folder that keeps what the runs print and record")
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    add("--json", action="store_true", help="print all of it as JSON")


def reworded(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Keep the words after ``--`` for the script."""
    cut = words.index("--") if "--" in words else len(words)
    parser.set_defaults(arguments=words[cut + 1 :])
    return words[:cut]


def run(args: argparse.Namespace) -> int:
    check_script(args.script, args.module)
    if args.output and args.output.exists() and any(args.output.iterdir()):
        raise SettingError(f"{str(args.output)!r} is there, and not empty: name a new folder with --output")
    place = nullcontext(args.output) if args.output else tempfile.TemporaryDirectory(prefix="easymp-prove-")
    with ended_by_signals(), place as folder:
        found = prove(args, Path(folder).absolute())
    code = CODES.index(found["verdict"])
    if args.json:
        print_json(found)
    else:
        print(paint(wrap(plain(found["sentence"])), f"{BOLD};{COLOURS[code]}"))
        for hint in found["hints"]:
            print(wrap(plain(hint)))
        if found["updates"]:
            print(f"\n{lines(found['updates'])}")
    return code


def prove(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the script under the plan, then on one process, which compares; and judge."""
    asked = {"mixed_precision": args.precision, "strategy": args.strategy}
    asked = {name: checked(NAMES[name], word, f"{name}=") for name, word in asked.items() if word is not None}
    records = folder / "records"
    records.mkdir(parents=True)
    (records / TASK).write_text(json.dumps({"steps": args.steps, "dropout": args.dropout}), encoding="utf-8")
    words = [str(records), "module" if args.module else "script", args.script, *args.arguments]
    task = Task("easymp.cli.prove.rank", words, True, args.timeout)
    runs = (("under the plan", {**PLAN, **asked}, args.processes), ("on one process", ONE, 1))
    failed: list[str] = []

    def read(name: str) -> str:
        return (records / name).read_text(encoding="utf-8") if (records / name).exists() else ""

    with env.override(**overrides(args.set)):
        seed = {} if resolve().seed is not None else {f"{env.PREFIX}SEED": "0"}  # the script's own wins
        with env.override(**seed):
            for number, (name, settings, processes) in enumerate(runs, 1):
                if number == 2 and (read(REFUSED) or not (records / FIRST).exists()):
                    break
                if number == 2 and (records / SKIPPED).exists():
                    settings = {**settings, "nonfinite": "skip"}
                place = folder / name.replace(" ", "-")
                progress = Progress(f"{number}/2 {name}", place, None)
                end = run_once(task, Variant(name, settings, processes), place, None, progress)
                progress.say(end.status, last=True)
                if end.status == INTERRUPTED:
                    raise KeyboardInterrupt
                failed += [f"the run {name} failed: {end.why.rstrip('.')}"] * (end.status != FINISHED)
    return judge(json.loads(read(ROWS) or "[]"), read(REFUSED), failed, args.steps)


def judge(rows: Sequence[Any], refused: str, failed: Sequence[str], steps: int) -> dict[str, Any]:
    """The verdict, its sentence, and what to do.

    Args:
        rows: the updates that were compared, as the rank wrote them.
        refused: why they could not be.
        failed: the runs that failed, in words.
        steps: updates that were asked for.
    """
    verdict, hints, done = NOT_COMPARED, [], [row for row in rows if "weights" in row]
    row = rows[-1] if rows and rows[-1].get("differs") else None
    if row and not row["apart"] and row["draws"]:
        why, hints = f"{row['draws']} draws random numbers, others for other parts of a batch", [DROPOUT]
    elif row and not row["apart"] and not row["same samples"]:
        why, hints = f"update {row['update']} reads other samples on one process", [SAMPLES]
    elif row:
        verdict, why, hints = DIFFERS, difference(row), causes(row) + [f"Then {words}." for words in failed]
    elif refused or failed:
        why = refused or failed[0]
    elif not done:
        why = "no update was made with a prepared optimizer, or each one had an overflow, or a window that was not full"
        hints = [PREPARED]
    else:
        every = [row[kind]["largest"] for row in done for kind in ("gradients", "weights")]
        worst = max(filter(None, every), key=lambda one: one["times"])
        number, verdict = len({row["update"] for row in done}), PROVEN
        why = (
            f"{number} update{'s' * (number > 1)} {under(done[0])} gave the losses, gradients and weights of one process in fp32. "
            f"The largest difference is {worst['times']:.2g} of what {done[0]['plan']['precision']} explains ({worst['name']})"
        )
        if number < steps:
            hints = [f"The others of {steps} were not made, overflowed, or lie at the end of an epoch."]
    sentence = f"{verdict.capitalize()}: {why}."
    return {"verdict": verdict, "sentence": sentence, "hints": hints, "updates": list(rows)}


def under(row: Mapping[str, Any]) -> str:
    plan, several = row["plan"], "es" * (row["plan"]["processes"] > 1)
    return f"under {plan['strategy']} on {plan['processes']} process{several} in {plan['precision']}"


def difference(row: Mapping[str, Any]) -> str:
    """What differs first, with both values."""
    head = f"at update {row['update']} of {row['class']}, {under(row)}, "
    if one := row["apart"]:
        values = f"{one['plan']:.6g} on rank {one['rank']} and {one['one']:.6g} on rank 0"
        return f"{head}the {one['kind']} of {named(one)} is {values}, and must be equal"
    parts = []
    if not row.get("loss", {"times": 0})["times"] <= 1:
        parts.append(f"the loss is {row['loss']['plan']:.6g}, and {row['loss']['one']:.6g} on one process")
    if row["option"]:
        parts.append("{} of the optimizer is {:.6g}, and {:.6g} on one process".format(*row["option"]))
    for kind in ("gradients", "weights"):
        if beyond := row[kind]["beyond"]:
            one, others = beyond[0], f" ({len(beyond) - 1} others differ, too)" * (len(beyond) > 1)
            values = f"{one['plan']:.6g}, and {one['one']:.6g} on one process, {one['times']:.2g} times what the precision explains"
            parts.append(f"the {kind[:-1]} of {named(one)} is {values}{others}")
            break
    parts += [f"the first layer whose output differs is {row['layer']}"] * bool(row["layer"])
    return head + "; ".join(parts)


def named(one: Mapping[str, Any]) -> str:
    return f"{one['name']}{one['at']} in {one['layer']}"


def causes(row: Mapping[str, Any]) -> list[str]:
    """A likely cause, and what to do."""
    if row["apart"]:
        return [STEPPED if row["apart"]["kind"] == "weight" else REDUCED]
    ratio, shares, steps = row["ratio"], row["plan"]["shares"], row["plan"]["accumulation"]
    if row["batchnorm"] and shares * steps > 1:
        return [BATCHNORM.format(row["batchnorm"])]
    if ratio is None or abs(ratio - 1) < 0.1:
        return []
    by = {"the number of processes": shares, "gradient_accumulation_steps": steps}
    found = " or ".join(f"{name} ({n})" for name, n in by.items() if n > 1 and abs(ratio * n - 1) < 0.1)
    words = f"All gradients are {ratio:.3g} × those of one process"
    return [words + (f": the script divides the loss by {found}, as the Accelerator does." if found else ".")]


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """The updates as a table: losses, and the largest differences as multiples of what the precision explains."""
    cells = [["update", "optimizer", "loss", "on one process", "gradients", "weights"]]
    for row in rows:
        losses = [f"{row['loss'][side]:.6g}" if "loss" in row else None for side in ("plan", "one")]
        none = "skipped" if row["skipped"] else "not full" if row["short"] else None
        most = [row[kind]["largest"] if kind in row else None for kind in ("gradients", "weights")]
        times = [f"{one['times']:.2g}" if one else none for one in most]
        cells.append([row["update"], row["class"], *losses, *times])
    return table(cells, right={0, 2, 3, 4, 5})
