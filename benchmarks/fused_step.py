"""The step after backward: norm, unscale, clip, AdamW, averages.

Our kernels beside torch on a GPU; our step beside torch's best on a CPU.

    python benchmarks/fused_step.py                    # on a GPU; where there is none, the table of the CPU. --keep
    keeps it python benchmarks/fused_step.py --cpu              # the CPU's in any case python benchmarks/fused_step.py
    --sweep            # on a GPU: chunks and threads of our kernels python benchmarks/fused_step.py --record FILE
    # goes on where it was cut off

Contenders share the same tensors, as a GPT has them, and take turns on them, each round in another order; all are first
seen to train alike. A figure is a median over the rounds, a ratio the median (quartiles) of the ratios within a round.

On a GPU a turn is what two CUDA events enclose. The device is kept busy before the first of them until the host is far
ahead, so the host's own time is not in it, unless the step waits for the device. "Host" is what a call takes until it
returns: over 40 ms where it waits. TB/s are the bytes that such a step cannot do without, read or written, over its
time (steppers.py has them); "of a copy" is that beside torch's copy_ of as many bytes (up to 4 GiB, from there it is no
quicker), which takes turns with the others. A trace says whether the host waits.

On a CPU a turn is time on the wall. "torch's best" is the quicker of its fused and its foreach step in the same
conditions; the aim is met where the quartiles reach down to 1. A second table shows from what size on it pays to leave
the factor of clipping and unscaling to the step (`easymp.optim.engine.WORTH`).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import report
import torch
from steppers import (
    KERNELS,
    KINDS,
    LEFT,
    MEMORY,
    PLAIN,
    SCALED,
    WORTH,
    Contender,
    Job,
    Run,
    count,
    graphed,
    kernels,
)
from torch import Tensor
from torch.autograd import DeviceType, profiler

from easymp.cuda.cupy_launcher import CupyLauncher, launcher_for
from easymp.cuda.kernel import CHUNK, THREADS
from easymp.optim import engine as torch_engine

COPY = "torch's copy_"
COPY_AIM, SPEED_AIM = 0.9, 1.4  # of a copy's bandwidth; times as fast as GradScaler, clip and AdamW(fused)
SLEEP = 80_000_000  # cycles: the device is busy for some 40 ms before a turn, for a host that steps hundreds of tensors
MOST_COPIED = 2 << 30  # bytes of each of the two tensors of a copy; beyond, it is no quicker
HELD = {"fp32": 24, "ema": 20, "masters": 20, "bf16": 8}  # bytes a parameter, foreach's own included
SMALL = ("8k", "16k", "tiny", "65k", "129k", "260k", "1M", "3M", "10M")
CPU_ROUNDS = {**dict.fromkeys(SMALL, 201), "3M": 81, "10M": 41, "124M": 11, "350M": 7, "1.5B": 5}
GPU_ROUNDS = {"10M": 61, "124M": 61, "350M": 41, "1.5B": 21}
# How near the ends must be, of movements and of moments. Of bf16 gradients torch's norm is bf16, and so is its factor,
# each off by up to 2^-8: twice that in a moment of squares.
NEAR = {"fp32": (1e-4, 1e-4), "ema": (1e-4, 1e-4), "masters": (1e-2, 3e-2), "bf16": (1.0, 3e-2)}
NEAR_AVERAGES = 1e-3  # they move by a thousandth of what the weights do, so that roundings count for more
TITLES = {
    "fp32": "fp32",
    "ema": "fp32, with averages of the weights",
    "masters": "bf16 weights and gradients, fp32 masters",
    "bf16": "all bf16; ours rounds stochastically",
}
CHUNKS, BLOCKS = (4096, 8192, 16384, 32768, 65536), (128, 256, 512, 1024)

# of one contender on this machine, out of memory or out of order: it is told, and leaves the others theirs
FAILURES = Exception

Times = dict[str, dict[str, Any]]  # contender → "ms" and "host" (µs), a figure a round, and "word"


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# -- all train alike ---------------------------------------------------------------------------------------------------


def apart(
    contenders: Mapping[str, Contender],
    kind: str,
    size: str,
    device: torch.device,
    launcher: CupyLauncher | None,
) -> str:
    """Which of them does not end three steps where the first one does, so that the times compare nothing.

    "" where all do.
    """
    wanted: list[Tensor] = []
    first = ""
    for name, contender in contenders.items():
        job = Job(size, kind, device, launcher, 1024.0 if contender.scaled else 1.0)
        begin = [p.detach().clone() for p in job.held]
        given = [p.grad.clone() for p in job.parameters]  # type: ignore[union-attr]
        try:
            run, _ = contender.make(job)
            for _ in range(3):
                for parameter, gradient in zip(job.parameters, given):
                    parameter.grad.copy_(gradient)  # type: ignore[union-attr]
                run()
        except FAILURES:  # `ready` meets it again, and tells
            continue
        moved = [p.detach().float() - b.float() for p, b in zip(job.held, begin)]
        found = [torch.cat([t.float().flatten() for t in of]) for of in (moved, *zip(*job.moments))]
        if job.averages:
            found.append(torch.cat([a.flatten() - b.flatten() for a, b in zip(job.averages, begin)]))
        first, wanted = first or name, wanted or found
        near = [NEAR[kind][0], NEAR[kind][1], NEAR[kind][1], NEAR_AVERAGES]
        for ours, theirs, limit in zip(found, wanted, near):
            off, most = float((ours - theirs).norm()), float(theirs.norm())
            if not off <= limit * most:
                differs = f"{name!r} trains otherwise than {first!r} ({kind}, {size}; {off:.2e} of {most:.2e})"
                return f"{differs}: no use timing it"
    return ""


def replays_alike(size: str, device: torch.device, launcher: CupyLauncher) -> dict[str, Any]:
    """Whether a step that was captured goes on bit for bit as one that is called, on new gradients each time.

    Once they overflow.
    """
    jobs = [Job(size, "fp32", device, launcher) for _ in range(2)]
    runs = [kernels(jobs[0])[0], graphed(jobs[1])[0]]
    try:
        for k in range(8):
            for job, run in zip(jobs, runs):
                made = torch.Generator(device).manual_seed(k)
                for parameter in job.parameters:
                    parameter.grad.normal_(0.0, 0.01, generator=made)  # type: ignore[union-attr]
                if k == 4:
                    job.parameters[0].grad[0, 0] = torch.inf  # type: ignore[index]
                run()
    except FAILURES as error:
        return {"same": False, "why": said(error)}
    ends = [[*job.parameters, job.scale, *(t for pair in job.moments for t in pair)] for job in jobs]
    return {"same": all(torch.equal(a, b) for a, b in zip(*ends))}


# -- turns -------------------------------------------------------------------------------------------------------------


def turn_on_cpu(run: Run) -> tuple[float, float]:
    """Milliseconds of a call, and microseconds until it returns: the same."""
    begin = time.perf_counter()
    run()
    took = time.perf_counter() - begin
    return took * 1e3, took * 1e6


def turn_on_gpu(run: Run) -> tuple[float, float]:
    """Milliseconds on the device, and microseconds until the call returns."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    begin.record()
    start = time.perf_counter()
    run()
    host = time.perf_counter() - start
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), host * 1e6


def take_turns(runs: Mapping[str, Run], rounds: int, turn: Callable[[Run], tuple[float, float]]) -> Times:
    times: Times = {name: {"ms": [], "host": []} for name in runs}
    names = list(runs)
    for k in range(rounds + 1):
        shift = k % len(names)
        order = names[shift:] + names[:shift]
        for name in order if k // len(names) % 2 else reversed(order):
            found = turn(runs[name])
            if k:  # the first round is warm-up
                for word, figure in zip(("ms", "host"), found):
                    times[name][word].append(figure)
    return times


def ready(contenders: Mapping[str, Contender], job: Job) -> tuple[dict[str, Run], dict[str, str], dict[str, str]]:
    """What is timed of each, called a few times; what it says of itself; and of those that fail, why."""
    runs: dict[str, Run] = {}
    words: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name, contender in contenders.items():
        try:
            run, words[name] = contender.make(job)
            for _ in range(3):
                run()
        except FAILURES as error:
            failed[name] = said(error)
        else:
            runs[name] = run
    return runs, words, failed


class Records:
    """Measurements, kept as they are made, a JSON line each."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        there = path is not None and path.exists()
        self._all = [json.loads(line) for line in path.read_text().splitlines()] if there and path is not None else []

    def get(self, make: Callable[[], dict[str, Any]], **key: Any) -> dict[str, Any]:
        for entry in self._all:
            if entry["key"] == key:
                return entry["found"]
        begin = time.monotonic()
        found = make()
        print(
            f"{', '.join(map(str, key.values()))}: {time.monotonic() - begin:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        self._all.append({"key": key, "found": found})
        if self._path is not None:
            with self._path.open("a") as out:
                out.write(json.dumps(self._all[-1]) + "\n")
        return found


def ratios(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """Median and quartiles of the ratios within a round."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(above, below)], n=4, method="inclusive")
    return middle, low, high


def met(it: bool) -> str:
    return "met" if it else "missed"


# -- a CPU -------------------------------------------------------------------------------------------------------------


def on_cpu(size: str, contenders: Mapping[str, Contender], threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    runs, words, failed = ready(contenders, Job(size, "fp32", torch.device("cpu")))
    if failed:
        raise SystemExit(f"{failed}")
    times = take_turns(runs, rounds, turn_on_cpu)
    gc.collect()
    return {"times": times, "words": words}


def cpu_report(sizes: list[str], rounds: int | None, most: int, records: Records) -> str:
    """On one thread, and on `most`."""
    torch.set_num_threads(1)
    cases = {"clip": PLAIN, "loss scale and clip": SCALED}
    for contenders in cases.values():
        if why := apart(contenders, "fp32", "tiny", torch.device("cpu"), None):
            raise SystemExit(why)
    lines: list[list[str]] = []
    missed: list[str] = []
    engines: set[str] = set()
    for size in sizes:
        for threads in sorted({1, most}):
            for case, contenders in cases.items():
                turns = rounds or CPU_ROUNDS[size]
                found = records.get(
                    lambda size=size, contenders=contenders, threads=threads, turns=turns: on_cpu(
                        size, contenders, threads, turns
                    ),
                    part="cpu", size=size, threads=threads, case=case, rounds=turns,
                )  # fmt: skip
                times = {name: found["times"][name]["ms"] for name in contenders}
                row = f"{size}, {case}, {threads} thread{'s' * (threads > 1)}"
                theirs = [name for name in contenders if not contenders[name].ours]
                best = min(theirs, key=lambda name: statistics.median(times[name]))
                line = [row, *(f"{statistics.median(times[name]):.1f}" for name in theirs)]
                for ours in contenders:
                    if ours not in theirs:
                        engines.add(found["words"][ours])
                        middle, low, high = ratios(times[ours], times[best])
                        line += [
                            f"{statistics.median(times[ours]):.1f}",
                            f"{middle:.3f} ({low:.3f} … {high:.3f})",
                        ]
                        if low > 1.0:
                            missed.append(f"{row}: {ours}")
                lines.append(line)
    head = [
        "ms",
        "AdamW(fused)",
        "AdamW(foreach)",
        "Accelerator",
        "/ torch's best",
        "easymp.optim.Engine",
        "/ torch's best",
    ]
    engine = " and ".join(f"'{word}'" for word in sorted(engines))
    return "\n".join([
        "# The step after backward, on a CPU",
        "",
        ("fp32 parameters and states. torch unscales and clips in memory (`GradScaler.unscale_`, `clip_grad_norm_`). "
        "easymp is an"),
        ("Accelerator's `clip_grad_norm_` and `step`, or those of `easymp.optim.Engine`, which under a loss scale is "
        "unscaled in memory by"),
        (f"torch's GradScaler; their engine here: {engine}. Medians of interleaved rounds; ratios are medians "
        "(quartiles) of the ratios"),
        "within a round.",
        "",
        report.table(head, lines),
        "",
        ("Aim, no slower than torch's best within the quartiles: "
        f"{'missed by ' + '; '.join(missed) if missed else 'met in all rows'}."),
        "",
        *worth_report(SMALL[:1] if rounds == 2 else SMALL, rounds, most, records),
        "",
        report.here(),
    ])  # fmt: skip


def worth_report(sizes: Sequence[str], rounds: int | None, most: int, records: Records) -> list[str]:
    """Where leaving the factor to the step begins to pay, and where `WORTH` says so."""
    lines = []
    for threads in sorted({1, most}):
        for size in sizes:
            turns = rounds or CPU_ROUNDS[size]
            line = [f"{size}: {count(size):,}, {threads} thread{'s' * (threads > 1)}"]
            for precision, contenders in WORTH.items():
                found = records.get(
                    lambda size=size, contenders=contenders, threads=threads, turns=turns: on_cpu(
                        size, contenders, threads, turns
                    ),
                    part="worth", size=size, threads=threads, precision=precision, rounds=turns,
                )  # fmt: skip
                memory, left = (found["times"][name]["ms"] for name in (MEMORY, LEFT))
                middle, low, high = ratios(left, memory)
                line += [
                    f"{statistics.median(memory):.3f}",
                    f"{statistics.median(left):.3f}",
                    f"{middle:.3f} ({low:.3f} … {high:.3f})",
                ]
            lines.append(line)
    head = ["ms, parameters", f"clip {MEMORY}", LEFT, "ratio", f"loss scale and clip {MEMORY}", LEFT, "ratio"]
    return [
        "## From what size on a factor is left to the step",
        "",
        (
            "An Accelerator either way, on GPTs of 28 tensors (10M: 100). By itself it clips in memory below "
            f"{torch_engine.WORTH:,} elements,"
        ),
        f"and under a loss scale below {torch_engine.WORTH // torch_engine.SCALED:,}.",
        "",
        report.table(head, lines),
    ]


# -- a GPU -------------------------------------------------------------------------------------------------------------


def on_gpu(size: str, kind: str, device: torch.device, launcher: CupyLauncher, rounds: int) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    contenders = KINDS[kind]
    numbers = count(size)
    copied = min(numbers * contenders[KERNELS].bytes // 2, MOST_COPIED)
    needed, free = numbers * HELD[kind] + 2 * copied, torch.cuda.mem_get_info(device)[0]
    if needed > 0.95 * free:
        return {"why": f"it needs {needed / 2**30:.0f} GiB of the device's memory, and {free / 2**30:.0f} are free"}
    job = Job(size, kind, device, launcher)
    runs, words, failed = ready(contenders, job)
    one, other = (torch.empty(copied // 4, device=device) for _ in range(2))
    runs[COPY] = lambda: one.copy_(other)
    times = take_turns(runs, rounds, turn_on_gpu)
    return {
        "times": times,
        "words": words,
        "failed": failed,
        "count": numbers,
        "copied": 2 * (copied // 4 * 4),
    }


# What makes the host wait for the device, by its name in a trace.
WAIT = re.compile(r"Synchronize|DtoH|^cudaMemcpy$|^cuMemcpyDtoH")
MARK = "one step"
WAITS = f"{KERNELS}, then scale.item()"


def waits(run: Run) -> dict[str, Any]:
    """What a trace shows of three steps: waits of the host, by name, and kernels."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        for _ in range(3):
            with profiler.record_function(MARK):
                run()
        torch.cuda.synchronize()  # outside of the steps
    events = list(traced.events())
    host = [e for e in events if e.device_type == DeviceType.CPU]
    there = [e for e in events if e.device_type == DeviceType.CUDA and e.name != MARK]
    spans = [(e.time_range.start, e.time_range.end) for e in host if e.name == MARK]
    found = [e.name for e in host if WAIT.search(e.name) and any(a <= e.time_range.start <= b for a, b in spans)]
    found += [e.name for e in there if WAIT.search(e.name)]
    works = [e for e in there if not re.match("Memcpy|Memset", e.name)]
    return {"steps": len(spans), "waits": sorted(found), "kernels": len(works) / 3}


def traces(size: str, device: torch.device, launcher: CupyLauncher) -> dict[str, Any]:
    """Of each contender; and of one that waits, to see that a trace shows it."""
    job = Job(size, "fp32", device, launcher)
    runs, _, failed = ready(KINDS["fp32"], job)
    shown = kernels(job)[0]

    def waiting() -> None:
        shown()
        job.scale.item()

    runs[WAITS] = waiting
    found: dict[str, Any] = {}
    for name, run in runs.items():
        try:
            found[name] = waits(run)
        except FAILURES as error:  # a profiler that may not run here
            failed[name] = said(error)
    return {"traces": found, "failed": failed}


def gpu_table(kind: str, sizes: list[str], blocks: Mapping[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The table of one kind, with notes; and what the aims come to."""
    contenders = KINDS[kind]
    against = next(iter(contenders))
    lines: list[list[str]] = []
    notes: list[str] = []
    aims: list[str] = []
    for size in sizes:
        block = blocks[size]
        if "why" in block:
            notes.append(f"- {size}: left out: {block['why']}")
            continue
        times, numbers = block["times"], block["count"]
        notes += [f"- {size}, {name}: {why}" for name, why in block["failed"].items()]
        copy = [block["copied"] / ms for ms in times[COPY]["ms"]]  # bytes a millisecond
        rate = statistics.median(copy)
        lines.append([f"{size}, {COPY}", "", f"{block['copied'] / rate:.3f}", f"{rate / 1e9:.2f}", "", "", ""])
        for name, contender in contenders.items():
            if name not in times:
                continue
            ms, word = times[name]["ms"], block["words"][name]
            size_of = 36 if word == "torch fused" else contender.bytes
            share, *_ = ratios([size_of * numbers / t for t in ms], copy)
            faster = ratios(times[against]["ms"], ms) if against in times else None
            if name == KERNELS and kind == "fp32":
                aims.append(
                    f"- {size}: {share:.0%} of a copy's bandwidth, with an aim of {COPY_AIM:.0%}: "
                    f"{met(share >= COPY_AIM)}"
                )
                if faster is not None:
                    told = met(faster[0] >= SPEED_AIM)
                    aims.append(
                        f"- {size}: {faster[0]:.2f} times as fast as {against}, with an aim of {SPEED_AIM}: {told}"
                    )
            middle = statistics.median(ms)
            lines.append([
                f"{size}, {name}" + (f": {word}" if word else ""),
                str(size_of),
                f"{middle:.3f}",
                f"{size_of * numbers / middle / 1e9:.2f}",
                f"{share:.0%}",
                "" if faster is None else "{:.2f} ({:.2f} … {:.2f})".format(*faster),
                f"{statistics.median(times[name]['host']):.0f}",
            ])  # fmt: skip
    head = [
        f"{TITLES[kind]}",
        "bytes a parameter",
        "ms",
        "TB/s",
        "of a copy",
        f"times as fast as {against}",
        "host, µs",
    ]
    return [report.table(head, lines), "", *notes, *([""] if notes else [])], aims


def gpu_report(
    sizes: list[str], rounds: int | None, records: Records, device: torch.device, launcher: CupyLauncher
) -> str:
    least = sizes[0]
    replay = records.get(lambda: replays_alike(least, device, launcher), part="replay", size=least)
    tables: list[str] = []
    aims: list[str] = []
    for kind, contenders in KINDS.items():
        blocks = {}
        if why := apart(contenders, kind, least, device, launcher):  # the others are of use all the same
            tables += [f"## {TITLES[kind]}", "", f"Left out: {why}.", ""]
            aims.append(f"- {TITLES[kind]}: {why}: {met(False)}")
            continue
        for size in sizes:
            times = rounds or GPU_ROUNDS.get(size, 21)
            blocks[size] = records.get(
                lambda size=size, kind=kind, times=times: on_gpu(size, kind, device, launcher, times),
                part="gpu", size=size, kind=kind, rounds=times,
            )  # fmt: skip
        table, found = gpu_table(kind, sizes, blocks)
        tables += [f"## {TITLES[kind]}", "", *table]
        aims += found
    seen = records.get(
        lambda: traces(least, device, launcher), part="traces", size=least
    )  # last: a profiler leaves its hooks behind
    shown = [
        [name, f"{t['kernels']:g}", str(t["steps"]),
         ", ".join(f"{t['waits'].count(w)} × {w}" for w in dict.fromkeys(t["waits"])) or "none"]
        for name, t in seen["traces"].items()
    ]  # fmt: skip
    ours = seen["traces"].get(KERNELS)
    tells = bool(seen["traces"].get(WAITS, {}).get("waits"))  # whether a trace shows waits here
    silent = tells and ours is not None and ours["steps"] == 3 and ours["kernels"] > 0 and not ours["waits"]
    aims += [
        f"- no wait of the host for the device in a step: {met(silent)}",
        "- a CUDA graph of the step gives the same bits, over eight steps, one of which overflows: "
        f"{met(replay['same'])}" + (f" ({replay['why']})" if "why" in replay else ""),
    ]
    return "\n".join([
        "# The step after backward, on a GPU",
        "",
        ("Medians of interleaved rounds; ratios are medians (quartiles) of the ratios within a round. "
        "`benchmarks/fused_step.py` says"),
        "what each column is.",
        "",
        *tables,
        "## Waits of the host",
        "",
        report.table(["three steps in a trace", "kernels a step", "steps seen", "waits"], shown),
        "",
        *(f"- {name}: {why}" for name, why in seen["failed"].items()),
        "",
        "## Aims",
        "",
        *aims,
        "",
        graphics(device),
        report.here(),
    ])  # fmt: skip


def graphics(device: torch.device) -> str:
    import cupy

    facts = torch.cuda.get_device_properties(device)
    return (
        f"- {facts.name}, {facts.total_memory / 2**30:.0f} GiB, {facts.multi_processor_count} multiprocessors, CUDA "
        f"{torch.version.cuda}, "
        f"CuPy {cupy.__version__}; blocks of {THREADS} threads, chunks of {CHUNK}"
    )


# -- chunks and threads ------------------------------------------------------------------------------------------------

# Both are part of the kernels' text, which is made at import: each pair is a process of its own, told before it imports
# the rest.
BEGIN = """
import runpy, sys
import easymp.cuda.kernel
easymp.cuda.kernel.THREADS, easymp.cuda.kernel.CHUNK = int(sys.argv[1]), int(sys.argv[2])
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def cell(size: str, rounds: int, device: torch.device, launcher: CupyLauncher) -> dict[str, Any]:
    """Of our kernels alone, as they are in this process; printed by ``--cell``."""
    if why := apart(
        {name: KINDS["fp32"][name] for name in list(KINDS["fp32"])[:1] + [KERNELS]},
        "fp32",
        "tiny",
        device,
        launcher,
    ):
        return {"why": why}
    job = Job(size, "fp32", device, launcher)
    runs, _, failed = ready({KERNELS: KINDS["fp32"][KERNELS]}, job)
    if failed:
        return {"why": failed[KERNELS]}
    turn = turn_on_gpu if device.type == "cuda" else turn_on_cpu
    return {
        "ms": statistics.median(take_turns(runs, rounds, turn)[KERNELS]["ms"]),
        "threads": THREADS,
        "chunk": CHUNK,
    }


def one_cell(size: str, threads: int, chunk: int) -> dict[str, Any]:
    here = os.fspath(Path(__file__).resolve().parent)
    paths = os.pathsep.join(filter(None, (here, os.fspath(Path(here).parent), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            BEGIN,
            str(threads),
            str(chunk),
            os.path.abspath(__file__),
            "--cell",
            "--size",
            size,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    if done.returncode:
        return {
            "why": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"it ended with {done.returncode}"
        }
    return json.loads(done.stdout.splitlines()[-1])


def sweep_report(sizes: list[str], records: Records, device: torch.device) -> str:
    told: list[str] = []
    for size in sizes:
        lines = []
        for chunk in CHUNKS:
            row = [f"chunks of {chunk}"]
            for threads in BLOCKS:
                found = records.get(
                    lambda size=size, threads=threads, chunk=chunk: one_cell(size, threads, chunk),
                    part="sweep", size=size, threads=threads, chunk=chunk,
                )  # fmt: skip
                if "ms" in found:
                    assert (found["threads"], found["chunk"]) == (threads, chunk)
                row.append(f"{found['ms']:.3f}" if "ms" in found else found["why"][:60])
            lines.append(row)
        told += ["", report.table([f"{size} fp32, ms", *(f"{n} threads" for n in BLOCKS)], lines)]
    return "\n".join(["# Chunks and threads of the fused step", *told, "", graphics(device), report.here()])


# -- all ---------------------------------------------------------------------------------------------------------------


def main() -> None:
    gpu = torch.cuda.is_available() and torch.version.cuda is not None
    on_cpu_only = not gpu or "--cpu" in sys.argv or "--smoke" in sys.argv
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="our step on this CPU, though there be a GPU")
    parser.add_argument(
        "--smoke", action="store_true", help="see that the CPU's part runs: tiny, two rounds, one thread"
    )
    parser.add_argument("--sweep", action="store_true", help="chunks and threads of our kernels, at 124M (or --size)")
    parser.add_argument("--cell", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--size", nargs="*", choices=list(CPU_ROUNDS), help="parameters (10M and 124M on a CPU, all on a GPU)"
    )
    parser.add_argument("--rounds", type=int, help="turns of each contender, two at least")
    parser.add_argument(
        "--record", type=Path, help="file that keeps every measurement; those it has are not made again"
    )
    report.options(
        parser,
        "fused-step-cpu" if on_cpu_only else "fused-step",
        None if on_cpu_only else torch.cuda.get_device_name(),
    )
    asked = parser.parse_args()
    if asked.rounds is not None and asked.rounds < 2:
        parser.error("--rounds takes 2 or more: fewer have no quartiles")
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    records = Records(asked.record)
    if on_cpu_only:
        if not gpu:
            print("There is no NVIDIA GPU here: this is the CPU's part.", file=sys.stderr)
        if asked.sweep:
            raise SystemExit("--sweep needs an NVIDIA GPU")
        sizes = ["tiny"] if asked.smoke else asked.size or ["10M", "124M"]
        threads = 1 if asked.smoke else torch.get_num_threads()
        report.hand_in(cpu_report(sizes, 2 if asked.smoke else asked.rounds, threads, records), asked.out)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    launcher = launcher_for(device)
    if isinstance(launcher, str):
        raise SystemExit(f"our kernels do not run here: {launcher}. --cpu measures the CPU")
    if asked.cell:
        print(json.dumps(cell((asked.size or ["124M"])[0], asked.rounds or GPU_ROUNDS["124M"], device, launcher)))
    elif asked.sweep:
        report.hand_in(sweep_report(asked.size or ["124M"], records, device), asked.out)
    else:
        sizes = asked.size or list(GPU_ROUNDS)
        report.hand_in(gpu_report(sizes, asked.rounds, records, device, launcher), asked.out)


if __name__ == "__main__":
    main()
