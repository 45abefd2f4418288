"""Microseconds that a wrapper adds to a micro-step, beyond a hand-written loop: easymp, Accelerate, Fabric.

    python benchmarks/overhead.py            # one table; --keep writes it to benchmarks/results

Each row is a process (or two, with DDP over gloo) of its own, in which the contenders take turns: a few micro-steps
each, then the next, hundreds of times, each time in another order. A turn begins with untimed micro-steps, so that no
contender pays for the caches another has filled. The figure is the median over the rounds of (contender − hand-written)
in the same round, with the quartiles behind it. The hand-written loop runs twice; the second copy shows what the method
makes of no difference at all.

Two clocks: the main thread's processor time, which is what a wrapper itself costs and does not move when other programs
want the same cores, and the time on the wall, which on two processes is mostly waiting for gloo.

All have the same tiny model (one that does real work would hide the difference), the same data in memory, a DataLoader
of their own with shuffle=True, num_workers=0, and AdamW(fused=True), so that nobody wins by another implementation of
the step. Before anything is timed, all train on the same batches and must end at the same parameters.

What the contenders share in a process: the process group, and torch's global hooks. easymp registers one optimizer hook
where windows are counted; it runs in every contender's step in the rows with accumulation.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import report
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, BATCHES = 4, 512  # samples a micro-batch, micro-batches an epoch and process
WIDTH, CLASSES = 16, 4


@dataclass(frozen=True)
class Row:
    name: str
    bf16: bool = False
    clip: bool = False
    accumulation: int = 1


ROWS = [
    Row("plain"),
    Row("clip", clip=True),
    Row("accumulation 4", accumulation=4),
    Row("bf16", bf16=True),
    Row("bf16 + clip", bf16=True, clip=True),
]


class Job:
    """What every contender starts from: the same model, optimizer, data."""

    def __init__(self, row: Row, shuffle: bool) -> None:
        self.row, self.shuffle = row, shuffle
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(0)
        samples = BATCH * BATCHES * self.size
        self.data = TensorDataset(torch.randn(samples, WIDTH), torch.randint(CLASSES, (samples,)))
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.data, BATCH, shuffle=self.shuffle)


# -- the contenders: loops as their users write them; each `next` of a loop is one micro-step --------------------------


def by_hand(job: Job) -> Iterator[None]:
    row, optimizer = job.row, job.optimizer
    among = job.size > 1
    sampler = DistributedSampler(job.data, shuffle=job.shuffle) if among else None
    loader = DataLoader(job.data, BATCH, sampler=sampler) if among else job.loader()
    model = DistributedDataParallel(job.model) if among else job.model
    micro = 0
    for epoch in count():
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            if row.accumulation == 1:
                if row.bf16:
                    with torch.autocast("cpu", torch.bfloat16):
                        out = model(x)
                    loss = F.cross_entropy(out.float(), y)
                else:
                    loss = F.cross_entropy(model(x), y)
                loss.backward()
                if row.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            else:
                micro += 1
                last = micro % row.accumulation == 0
                with model.no_sync() if among and not last else nullcontext():
                    loss = F.cross_entropy(model(x), y)
                    (loss / row.accumulation).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
            yield


def by_easymp(job: Job, log_with: str = "jsonl") -> Iterator[None]:
    from easymp import Accelerator

    row = job.row
    accelerator = Accelerator(
        mixed_precision="bf16" if row.bf16 else "no",
        gradient_accumulation_steps=row.accumulation,
        cpu=True,
        seed=0,
        log_with=log_with,
    )
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, job.loader())
    while True:
        for x, y in loader:
            if row.accumulation == 1:
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if row.clip:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            else:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            yield


def by_easymp_watched(job: Job) -> Iterator[None]:
    """With the console, which writes whole lines here, because standard error is not a terminal."""
    return by_easymp(job, "console")


def by_accelerate(job: Job) -> Iterator[None]:
    from accelerate import Accelerator

    row = job.row
    accelerator = Accelerator(
        mixed_precision="bf16" if row.bf16 else "no", gradient_accumulation_steps=row.accumulation, cpu=True
    )
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, job.loader())
    while True:
        for x, y in loader:
            if row.accumulation == 1:
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if row.clip:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            else:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            yield


def by_fabric(job: Job) -> Iterator[None]:
    from lightning_fabric import Fabric

    row = job.row
    strategy = "ddp" if job.size > 1 else "auto"
    fabric = Fabric(
        accelerator="cpu",
        strategy=strategy,
        devices=job.size,
        precision="bf16-mixed" if row.bf16 else "32-true",
    )
    fabric.launch()
    model, optimizer = fabric.setup(job.model, job.optimizer)
    loader = fabric.setup_dataloaders(job.loader())
    micro = 0
    for epoch in count():
        if job.size > 1 and job.shuffle:
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            if row.accumulation == 1:
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss)
                if row.clip:
                    fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            else:
                micro += 1
                last = micro % row.accumulation == 0
                with fabric.no_backward_sync(model, enabled=not last):
                    loss = F.cross_entropy(model(x), y)
                    fabric.backward(loss / row.accumulation)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
            yield


HAND, AGAIN = "hand-written", "hand-written again"
PEERS = ("Fabric", "Accelerate")
WATCHED = "easymp, console"
CONTENDERS: dict[str, Callable[[Job], Iterator[None]]] = {
    HAND: by_hand,
    AGAIN: by_hand,
    "easymp": by_easymp,
    WATCHED: by_easymp_watched,
    "Fabric": by_fabric,
    "Accelerate": by_accelerate,
}


# -- one row, inside a process of its own ------------------------------------------------------------------------------


def check(row: Row) -> None:
    """All contenders train alike, or the times compare nothing."""
    ends = {}
    for name, contender in CONTENDERS.items():
        job = Job(row, shuffle=False)
        run = contender(job)
        for _ in range(2 * row.accumulation):
            next(run)
        ends[name] = torch.cat([p.detach().reshape(-1) for p in job.model.parameters()])
    for name, end in ends.items():
        if not torch.allclose(end, ends[HAND], atol=1e-5, rtol=1e-4):
            raise SystemExit(
                f"{name} trains otherwise than the hand-written loop in row {row.name!r}: no use timing it"
            )


Times = dict[str, dict[str, list[float]]]  # clock → contender → microseconds a micro-step, one figure a round
CLOCKS = {"processor": time.thread_time_ns, "wall": time.perf_counter_ns}


def measure(row: Row, rounds: int, steps: int) -> Times:
    runs = {name: contender(Job(row, shuffle=True)) for name, contender in CONTENDERS.items()}
    among = dist.is_initialized()
    times: Times = {clock: {name: [] for name in runs} for clock in CLOCKS}
    names = list(runs)
    warm = 4  # one window
    gc.collect()
    gc.freeze()
    for k in range(rounds + 2):
        shift = k % len(names)
        order = names[shift:] + names[:shift]
        for name in order if k // len(names) % 2 else reversed(order):
            run = runs[name]
            for _ in range(warm):
                next(run)
            if among:
                dist.barrier()
            begin = [read() for read in CLOCKS.values()]
            for _ in range(steps):
                next(run)
            end = [read() for read in CLOCKS.values()]
            if k >= 2:  # the first rounds are warm-up
                for clock, a, b in zip(CLOCKS, begin, end):
                    times[clock][name].append((b - a) / 1e3 / steps)
    return times


def worker(row: Row, rounds: int, steps: int, out: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    check(row)
    gc.collect()
    times = measure(row, rounds, steps)
    if not dist.is_initialized() or dist.get_rank() == 0:
        out.write_text(json.dumps(times))
    if dist.is_initialized():
        gc.collect()  # whatever wraps a model goes before the group does
        dist.barrier()


# -- all rows ----------------------------------------------------------------------------------------------------------


def timed(row: Row, processes: int, rounds: int, steps: int) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        script = [
            __file__,
            "--row",
            row.name,
            "--rounds",
            str(rounds),
            "--steps",
            str(steps),
            "--times",
            str(out),
        ]
        launch = [] if processes == 1 else ["-m", "easymp", "launch", "--processes", str(processes)]
        done = subprocess.run([sys.executable, *launch, *script], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"row {row.name!r} on {processes} process(es) failed:\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text())


def beyond(times: dict[str, list[float]], name: str, base: str = HAND) -> tuple[float, float, float]:
    """Median and quartiles of a contender's µs beyond those of `base` in the same round."""
    low, middle, high = statistics.quantiles([a - b for a, b in zip(times[name], times[base])], n=4)
    return middle, low, high


def comparison(results: dict[str, Times], clock: str) -> str:
    others = [name for name in CONTENDERS if name != HAND]
    lines = []
    for row, clocks in results.items():
        times = clocks[clock]
        cells = ["{:+.1f} ({:+.0f} … {:+.0f})".format(*beyond(times, name)) for name in others]
        lines.append([row, f"{statistics.median(times[HAND]):.0f}", *cells])
    return report.table(["", "hand-written, µs", *others], lines)


def verdict(results: dict[str, Times]) -> str:
    """Whether the goals are met."""
    lost = [
        row
        for row, clocks in results.items()
        if any(beyond(clocks["processor"], "easymp")[0] >= beyond(clocks["processor"], name)[0] for name in PEERS)
    ]
    first = (
        f"easymp is not the least of the three in: {'; '.join(lost)}"
        if lost
        else "easymp is the least of the three in every row"
    )
    plain = [
        f"{row}: {beyond(clocks['processor'], 'easymp')[0]:+.1f} µs, with a goal of 10"
        for row, clocks in results.items()
        if row.startswith("plain")
    ]
    watched = [beyond(clocks["processor"], WATCHED, "easymp")[0] for clocks in results.values()]
    console = f"The console adds {min(watched):+.1f} to {max(watched):+.1f} µs, with a goal of 5"
    return ". ".join([first, *plain, console]) + "."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300, help="turns of each contender (300)")
    parser.add_argument("--steps", type=int, default=12, help="timed micro-steps a turn, a multiple of 4 (12)")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2], metavar="N", help="(1 2)")
    parser.add_argument("--only", nargs="*", metavar="ROW", choices=[row.name for row in ROWS], help="these rows")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    if "--times" in sys.argv:
        asked = parser.parse_args()
        worker(next(row for row in ROWS if row.name == asked.row), asked.rounds, asked.steps, asked.times)
        return

    report.options(parser, "overhead")
    asked = parser.parse_args()
    where = report.here("accelerate", "lightning-fabric")
    rows = [row for row in ROWS if not asked.only or row.name in asked.only]
    results = {
        f"{row.name}, {processes} process{'es' if processes > 1 else ''}": timed(
            row, processes, asked.rounds, asked.steps
        )
        for processes in asked.processes
        for row in rows
    }
    text = "\n".join(
        [
            "# Overhead of a micro-step",
            "",
            (
                "Microseconds beyond the hand-written loop: median (quartiles) of the differences, "
                f"{asked.rounds} interleaved turns of {asked.steps} micro-steps each."
            ),
            "",
            "## Processor time of the main thread",
            "",
            comparison(results, "processor"),
            "",
            verdict(results),
            "",
            "## Time on the wall",
            "",
            comparison(results, "wall"),
            "",
            where,
        ]
    )
    report.hand_in(text, asked.out)


if __name__ == "__main__":
    main()
