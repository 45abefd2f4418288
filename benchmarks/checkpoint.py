"""What checkpoints cost: time, lost steps and memory, beside torch, safetensors, DCP, Accelerate, Fabric, plain bytes.

    python benchmarks/checkpoint.py                                   # 1 and 4 GB, on one process and on two; --keep
    keeps the tables python benchmarks/checkpoint.py --case ddp --size 4GB --rounds 2 python benchmarks/checkpoint.py
    --record FILE --seconds 130       # a piece: begins nothing after 130 s, and ends with 75 if work is
                                                                      # left, which the same command goes on with

The state is a GPT in fp32 with its AdamW states. Each contender saves and loads as its own users would; rounds are
interleaved, each in another order. A cell is the median of the rounds (least … most), a ratio the median of the ratios
within a round.

Every measurement is a process of its own, forked off this one, which holds the state and the imports and has never
computed on more than one thread: so all begin with the same memory. Loads go to a run that was just built, with
parameters in memory and no optimizer state yet, except for "live" ones; the clock stops when every page of the state
has been touched, or a mapped file would look free. What was loaded is compared with what was saved, each time. A
measurement that does not end in time, or fails, costs its contender the later rounds of that case, and the table says
so; the others go on.

durable   until all is on disk: what a contender does not fsync itself (files and folders), the harness does, and
counts. Each process saves
          twice, and removes the first one before the second, which is the one that counts: runs save again and again.
warm      the files are in the page cache (read through beforehand). cold: they were dropped from it, which mincore
checks; a
          virtual machine's host may still have them in its memory.
live      the warm load once more in the same process, into the run that it filled, of which all has been set to zero
meanwhile: as one
          goes back to an earlier step. Touching what is in memory already is taken off. Left out where memory might not
          hold it: for some that is a second whole state a process.
plain     the same bytes by os.write into one file a rank, then fsync; by readinto, into new memory (warm, cold) and
into memory that was
          in use before (live; "used"). A resuming run needs new memory for two thirds of its state, so new memory is
          the base of its loads; ratios to both are given.
memory    the most that was held beyond the state (anonymous and shared pages; page cache and mapped files are none), by
VmHWM and by
          samples every 5 ms, of the rank that needs most. While loading, the state's own memory does not count.
blocked   how long an asynchronous save holds up training; the second one may use the first one's memory again.
stall     what the second one costs training in all: blocked, and how much slower the steps were until it was durable. A
step is forward,
          backward and AdamW of one block of the model, on one thread; it changes the state that is being saved.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import logging
import mmap
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import report
import torch
import torch.distributed as dist
from checkpointers import (
    ASYNC,
    BASE,
    CONTENDERS,
    OURS,
    SIZES,
    THEIRS,
    Contender,
    Job,
    described,
    local,
    memory_of,
    sync,
)

from easymp.checkpoint.storage import crc32

CASES = {"one": 1, "ddp": 2, "fsdp": 2}  # processes
TITLES = {"one": "one process", "ddp": "ddp, two processes", "fsdp": "fsdp, two processes"}
RUNS = {  # rounds
    ("one", "1GB"): 3, ("one", "4GB"): 3, ("ddp", "1GB"): 3, ("ddp", "4GB"): 1, ("fsdp", "1GB"): 3, ("fsdp", "4GB"): 1
}  # fmt: skip
STEPS = 12  # before and after a save, to know what a step costs alone
AIMS = {"1GB": 1.05, "4GB": 0.9}  # durable save / plain write
AGAIN = {
    "one": 2.5,
    "fsdp": 3.5,
    "ddp": 4.5,
}  # copies of the state that a live load may take, live and loaded in each process
LIMITS = {
    "tiny": 20.0,
    "64MB": 30.0,
    "1GB": 60.0,
    "4GB": 90.0,
}  # seconds for one measurement: what takes longer hangs
LEFT = 75  # exit code: there is work left (EX_TEMPFAIL)


# -- files -------------------------------------------------------------------------------------------------------------


def sync_all(path: Path) -> None:
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
    sync(path.parent)


def files_in(path: Path) -> list[Path]:
    return [Path(folder, name) for folder, _, names in os.walk(path) for name in names]


def fill_cache(path: Path) -> None:
    buffer = bytearray(2**22)
    for name in files_in(path):
        with open(name, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_cache(path: Path) -> float:
    """Drop the files from the page cache; returns which part of them is still there."""
    there = pages = 0
    for name in files_in(path):
        descriptor = os.open(name, os.O_RDWR)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(descriptor).st_size
        if size:
            with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE) as view:
                count = -(-size // mmap.PAGESIZE)
                said = (ctypes.c_ubyte * count)()
                first = (ctypes.c_char * size).from_buffer(view)
                ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), said)
                del first
                there, pages = there + sum(b & 1 for b in said), pages + count
        os.close(descriptor)
    return there / max(pages, 1)


# -- one measurement, in processes of its own --------------------------------------------------------------------------


def resident(pid: int | str = "self") -> dict[str, int]:
    """Bytes: anonymous and shared pages ("held"), those of mapped files, all, and the most there were of all."""
    found = dict.fromkeys(("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem"), 0)  # a process that has ended has none
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        word, _, value = line.partition(":")
        if word in found:
            found[word] = int(value.split()[0]) * 1024
    return {
        "held": found["RssAnon"] + found["RssShmem"], "file": found["RssFile"],
        "all": found["VmRSS"], "most": found["VmHWM"]
    }  # fmt: skip


class Measuring:
    """The child's side: what it tells the one that started it."""

    def __init__(self, pipe: Connection, run: Contender) -> None:
        self.pipe, self.run = pipe, run

    def meet(self) -> None:
        if self.run.size > 1:
            dist.barrier()

    def begin(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self.start = resident()
        self.pipe.send("begin")
        self.meet()

    def end(self) -> int:
        """Bytes at the peak above those at the start, by VmHWM; what files were mapped meanwhile is taken off."""
        now = resident()
        self.pipe.send("end")
        return now["most"] - self.start["all"] - max(0, now["file"] - self.start["file"])


def digests(run: Contender) -> list[int]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda t: zlib.crc32(memory_of(t)), run.live()))


def touch(run: Contender) -> None:
    for tensor in run.live():
        tensor.reshape(-1)[:: mmap.PAGESIZE // tensor.itemsize].sum()


def compare(run: Contender, wanted: Any) -> None:
    if digests(run) != wanted[run.rank]:
        raise ValueError("what was loaded is not what was saved")


def away(told: Measuring, path: Path) -> None:
    """Remove a checkpoint, and let the disk come to rest."""
    if told.run.rank == 0:
        shutil.rmtree(path)
        os.sync()
    told.meet()


def saving(told: Measuring, path: Path, wanted: Any) -> dict[str, Any]:
    run = told.run

    def save(path: Path) -> float:
        told.meet()
        begin = time.perf_counter()
        run.save(path)
        told.meet()
        if run.rank == 0 and not run.durable:
            sync_all(path)
        told.meet()
        return time.perf_counter() - begin

    before = digests(run)
    told.begin()
    other = path.with_name(f"{path.name}-first")
    first = save(other)
    away(told, other)
    return {"durable": save(path), "durable_first": first, "held": told.end(), "digests": before}


def loading(told: Measuring, path: Path, wanted: Any) -> dict[str, Any]:
    run = told.run
    told.begin()
    begin = time.perf_counter()
    run.load(path)
    touch(run)
    took = {"load": time.perf_counter() - begin}
    new = 2 * sum(local(p).nbytes for p in run.net.parameters())  # the optimizer's states, which have to be
    took["held"] = told.end()
    compare(run, wanted)
    return {**took, "own": new}


def loading_twice(told: Measuring, path: Path, wanted: Any) -> dict[str, Any]:
    """The second time into what is live by then."""
    run = told.run
    first = loading(told, path, wanted)
    for tensor in run.live():
        # a load that did nothing would pass otherwise; and what was a mapped file's is memory of this process
        tensor.zero_()
    gc.collect()
    told.meet()
    begin = time.perf_counter()
    run.load(path)
    touch(run)
    touched = time.perf_counter()
    touch(run)  # finds all in memory: what looking takes, which would be a quarter of a plain read into used memory
    live = touched - begin - (time.perf_counter() - touched)
    compare(run, wanted)
    return {**first, "live": live}


def loading_cold(told: Measuring, path: Path, wanted: Any) -> dict[str, Any]:
    left = drop_cache(path) if told.run.rank == 0 else 0.0
    told.meet()
    return {**loading(told, path, wanted), "cached": left}


def copying(told: Measuring, path: Path, wanted: Any) -> dict[str, Any]:
    """What copying the state in memory takes: the measure of a blocked save."""
    there = told.run.live()
    image = torch.empty(sum(t.numel() for t in there))
    parts = [part.view(t.shape) for part, t in zip(image.split([t.numel() for t in there]), there)]
    took = []
    for _ in range(2):
        told.meet()
        begin = time.perf_counter()
        for part, tensor in zip(parts, there):
            part.copy_(tensor)
        took.append(time.perf_counter() - begin)
    return {"copy_first": took[0], "copy": took[1]}


def saving_meanwhile(told: Measuring, path: Path, wanted: Any) -> dict[str, Any]:
    run, net = told.run, told.run.net
    x = torch.randn(1, 64, net.norm.normalized_shape[0], generator=torch.Generator().manual_seed(1))

    def steps(done: Callable[[], bool]) -> list[float]:
        """Seconds of each step, until `done` on all ranks."""
        took = []
        while True:
            begin = time.perf_counter()
            net(x).square().mean().backward()
            if run.case == "ddp":
                for p in net.parameters():
                    if p.grad is not None:
                        dist.all_reduce(p.grad.div_(run.size))
            run.optimizer.step()
            run.optimizer.zero_grad()
            ready = torch.tensor(float(done()))
            if run.size > 1:
                dist.all_reduce(ready, dist.ReduceOp.MIN)
            took.append(time.perf_counter() - begin)
            if ready:
                return took

    def alone() -> list[float]:
        left = iter(range(STEPS - 1))
        return steps(lambda: next(left, None) is None)

    def save(path: Path) -> dict[str, Any]:
        costs = alone()
        before = digests(run)
        told.meet()
        begin = time.perf_counter()
        done = run.begin(path)
        blocked = time.perf_counter() - begin
        beside = steps(done)
        if run.rank == 0 and not run.durable:
            sync_all(path)
        durable = time.perf_counter() - begin
        told.meet()
        step = statistics.mean(costs + alone())
        return {
            "durable": durable, "blocked": blocked, "stall": blocked + sum(beside) - step * len(beside), "step": step,
            "slower": statistics.mean(beside) / step, "digests": before,
        }  # fmt: skip

    alone()
    told.begin()
    other = path.with_name(f"{path.name}-first")
    first = save(other)
    away(told, other)
    second = save(path)
    held = told.end()
    run.end()
    return {**second, "held": held, "blocked_first": first["blocked"], "durable_first": first["durable"]}


def flipped(told: Measuring, path: Path, wanted: Any) -> dict[str, Any]:
    """Whether a load notices one wrong bit among the tensors."""
    largest = max(files_in(path), key=lambda name: name.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    try:
        told.run.load(path)
    except Exception:
        return {"noticed": "yes"}
    return {"noticed": "no" if digests(told.run) != wanted[told.run.rank] else "?"}


PHASES: dict[str, Callable[[Measuring, Path, Any], dict[str, Any]]] = {
    "save": saving,
    "save beside training": saving_meanwhile,
    "warm": loading,
    "warm, live": loading_twice,
    "cold": loading_cold,
    "copy": copying,
    "flip": flipped,
}
FRESH = ("warm", "warm, live", "cold", "flip")  # what begins with a run that was just built
ALONE = ("save beside training", "copy")  # on one thread, as a process that drives a GPU


def child(
    pipe: Connection, log: str, job: Job, name: str, case: str, phase: str, rank: int, port: int, rest: Any
) -> None:
    """A measuring process's whole life."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    size = CASES[case]
    torch.set_num_threads(1 if phase in ALONE else max(1, (os.cpu_count() or 1) // size))
    try:
        if size > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("gloo")
        if phase in FRESH:
            with torch.no_grad():
                for p in job.net.parameters():
                    p.zero_()  # in memory of this process
        run = CONTENDERS[name](job, case)
        if phase not in FRESH:
            run.remember(job)
        told = Measuring(pipe, run)
        result = PHASES[phase](told, *rest)
        told.meet()
        pipe.send((result, sorted(sys.modules)))
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)  # nothing is left to say; peers that clean up at exit would wait for each other


class Failed(Exception):
    """Why a contender has no figures, in a few words; the rest is in the log."""

    def __init__(self, why: str, log: str) -> None:
        super().__init__(why)
        self.log = log


def free_port() -> int:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        return there.getsockname()[1]


def measured(job: Job, name: str, case: str, phase: str, path: Path, wanted: Any = None) -> list[dict[str, Any]]:
    """What each rank found.

    "peak" is the most that it held above its start. Raises Failed, after `LIMITS` seconds at the latest.
    """
    context = multiprocessing.get_context("fork")
    port, size = free_port(), CASES[case]
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        workers: list[Any] = []
        pipes: list[Connection] = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            rest = (path, wanted)
            workers.append(
                context.Process(target=child, args=(theirs, log.name, job, name, case, phase, rank, port, rest))
            )
            workers[-1].start()
            theirs.close()
            pipes.append(mine)
        results: list[Any] = [None] * size
        start: dict[int, int] = {}
        peak = [0] * size
        limit = time.monotonic() + LIMITS[job.size]
        try:
            while any(found is None for found in results):
                if time.monotonic() > limit:
                    busy = max(sum(psutil.Process(worker.pid).cpu_times()[:2]) for worker in workers)
                    why = (
                        f"hangs: {phase!r} had no end after {LIMITS[job.size]:g} s, in which it computed for {busy:.0f}"
                    )
                    raise Failed(why, log.read())
                for pipe in wait([pipe for pipe, found in zip(pipes, results) if found is None], 0.005):
                    rank = pipes.index(pipe)  # type: ignore[arg-type]
                    try:
                        said = pipe.recv()  # type: ignore[union-attr]
                    except EOFError:
                        workers[rank].join()
                        said = f"it ended with {workers[rank].exitcode} (below zero: a signal)"
                    if said == "begin":
                        start[rank] = resident(workers[rank].pid)["held"]
                    elif said == "end":
                        start.pop(rank, None)
                    elif isinstance(said, str):
                        raise Failed(
                            f"fails: {phase!r}: {said.strip().splitlines()[-1]}",
                            f"rank {rank}: {said}\n{log.read()}",
                        )
                    else:
                        results[rank], modules = said
                        load_modules(modules)
                for rank, before in start.items():
                    peak[rank] = max(peak[rank], resident(workers[rank].pid)["held"] - before)
        finally:
            for worker in workers:
                if None in results:
                    worker.kill()
                worker.join()
    for found, seen in zip(results, peak):
        found["peak"] = max(seen, found.pop("held", 0)) - found.pop("own", 0)
    return results


def load_modules(names: Iterable[str]) -> None:
    """What a child has imported on the way, this process has from then on: no measurement pays for imports."""
    for name in names:
        if name not in sys.modules and not name.startswith("__"):
            try:
                importlib.import_module(name)
            except Exception:
                continue  # a module that is made, not found


# -- all measurements --------------------------------------------------------------------------------------------------


class Records:
    """Measurements, each kept in a line of JSON as soon as it is there.

    A run that was cut short goes on where it was.
    """

    def __init__(self, place: Path | None) -> None:
        self.place = place
        lines = place.read_text().splitlines() if place and place.exists() else []
        self.all: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, **key: Any) -> bool:
        return any(all(record.get(k) == v for k, v in key.items()) for record in self.all)

    def add(self, record: dict[str, Any]) -> None:
        self.all.append(record)
        if self.place:
            with open(self.place, "a") as file:
                file.write(json.dumps(record) + "\n")

    def found(self, case: str, size: str) -> dict[str, dict[int, dict[str, float]]]:
        """Contender → round → figures."""
        table: dict[str, dict[int, dict[str, float]]] = {}
        for r in self.all:
            if (r.get("case"), r.get("size")) == (case, size) and "figures" in r:
                table.setdefault(r["contender"], {})[r["round"]] = r["figures"]
        return {name: table[name] for name in CONTENDERS if name in table}

    def why_not(self, case: str, size: str) -> dict[str, str]:
        """Contender → why it has no figures, or no more of them.

        One that failed its rehearsal (of any size) has none.
        """
        there = {name: f"left out: {kind.left_out[case]}" for name, kind in CONTENDERS.items() if case in kind.left_out}
        return there | {
            r["contender"]: r["why"]
            for r in self.all
            if "why" in r and r["case"] == case and r["size"] in ("tiny", size)
        }

    def told(self, word: str) -> dict[str, Any]:
        """Contender → what was found once for all."""
        return {r["contender"]: r[word] for r in self.all if word in r}


def most(results: list[dict[str, Any]], word: str) -> float:
    return max(found[word] for found in results)


def one_round(job: Job, name: str, case: str, folder: Path) -> dict[str, float]:
    """Save, load warm, load cold; nothing is left on the disk."""
    path = folder / "checkpoint"
    figures: dict[str, float] = {}
    try:
        os.sync()  # what others have written is not this one's to wait for
        beside = CONTENDERS[name].asynchronous
        saved = measured(job, name, case, "save beside training" if beside else "save", path)
        figures = {k: most(saved, k) for k in ("durable", "durable_first")} | {"save_peak": most(saved, "peak")}
        if beside:
            figures |= {k: most(saved, k) for k in ("blocked_first", "blocked", "stall", "step", "slower")}
        wanted = [found["digests"] for found in saved]
        fill_cache(path)
        # The plain bytes go to where they were.
        again = name == BASE or psutil.virtual_memory().available > AGAIN[case] * job.bytes
        warm = measured(job, name, case, "warm, live" if again else "warm", path, wanted)
        figures |= {"warm": most(warm, "load"), "load_peak": most(warm, "peak")}
        if again:
            figures["warm_used"] = most(warm, "live")
        if not beside:  # the same files otherwise
            cold = measured(job, name, case, "cold", path, wanted)
            figures |= {"cold": most(cold, "load"), "cached": most(cold, "cached")}
        if name == BASE:
            copied = measured(job, name, case, "copy", path)
            figures |= {k: most(copied, k) for k in ("copy_first", "copy")}
    finally:
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(f"{path}-first", ignore_errors=True)
        os.sync()
    return figures


def rehearse(job: Job, name: str, case: str, records: Records, folder: Path) -> None:
    """Once, tiny.

    Imports what the contender needs, and tells whether it runs at all and whether a load notices a flipped bit.
    """
    one_round(job, name, case, folder)
    if name not in records.told("noticed"):
        path = folder / "checkpoint"
        saved = measured(job, name, "one", "save", path)
        noticed = measured(job, name, "one", "flip", path, [found["digests"] for found in saved])[0]["noticed"]
        shutil.rmtree(path)
        records.add({"contender": name, "noticed": noticed})


def room(job: Job, case: str, folder: Path) -> None:
    """Refuse to begin what would fill the disk or the memory."""
    disk, memory = shutil.disk_usage(folder).free, psutil.virtual_memory().available
    copies = {"one": 2.5, "fsdp": 3, "ddp": 3.5}[case]  # beside the state itself; ddp was seen to take 2.9
    for what, free, needed in (("disk", disk, 2.5 * job.bytes), ("memory", memory, copies * job.bytes)):
        if free < needed:
            raise SystemExit(
                f"{TITLES[case]} with {job.size} needs about {needed / 1e9:.1f} GB of free {what}, and there are "
                f"{free / 1e9:.1f}"
            )


def warm_memory(size: int) -> None:
    """Use `size` bytes once.

    A virtual machine that has never used them would be given them in the middle of a measurement.
    """
    with mmap.mmap(-1, size) as pages:
        for at in range(0, size, mmap.PAGESIZE):
            pages[at] = 1


# -- the report --------------------------------------------------------------------------------------------------------

Found = dict[str, dict[int, dict[str, float]]]


def values(found: Found, name: str, word: str) -> list[float]:
    return [figures[word] for _, figures in sorted(found.get(name, {}).items()) if word in figures]


def ratios(found: Found, name: str, word: str, base: str, other: str) -> list[float]:
    """Of one round each."""
    there = found.get(base, {})
    return [
        f[word] / there[r][other] for r, f in sorted(found[name].items()) if word in f and other in there.get(r, {})
    ]


def cell(numbers: list[float]) -> str:
    if not numbers:
        return ""
    if len(numbers) == 1:
        return f"{numbers[0]:.3g}"
    return f"{statistics.median(numbers):.3g} ({min(numbers):.3g} … {max(numbers):.3g})"


def middle(numbers: list[float]) -> str:
    return f"{statistics.median(numbers):.2f}" if numbers else ""


def megabytes(numbers: list[float]) -> str:
    return f"{max(0.0, statistics.median(numbers)) / 1e6:.0f}" if numbers else ""


def short(why: str) -> str:
    return why.partition(":")[0]


def saves_and_loads(found: Found, why_not: dict[str, str]) -> str:
    rows = []
    for name in CONTENDERS:
        if name not in found:
            if name in why_not:
                rows.append([name, *[short(why_not[name])] * 2, *[""] * 10])
            continue
        rows.append([
            name, cell(values(found, name, "durable_first")),
            cell(values(found, name, "durable")), middle(ratios(found, name, "durable", BASE, "durable")),
            cell(values(found, name, "warm")),
            middle(ratios(found, name, "warm", BASE, "warm")), middle(ratios(found, name, "warm", BASE, "warm_used")),
            cell(values(found, name, "warm_used")), middle(ratios(found, name, "warm_used", BASE, "warm_used")),
            cell(values(found, name, "cold")), middle(ratios(found, name, "cold", BASE, "cold")),
            megabytes(values(found, name, "save_peak")),
            "" if name == BASE else megabytes(values(found, name, "load_peak")),
        ])  # fmt: skip
    head = [
        "",
        "durable the first time, s",
        "durable, s",
        "× plain",
        "warm load, s",
        "× plain",
        "× plain, used",
        "warm load, live, s",
        "× plain, used",
        "cold load, s",
        "× plain",
        "save, MB",
        "load, MB",
    ]
    return report.table(head, rows)


def beside_training(found: Found, why_not: dict[str, str]) -> str:
    copies = [cell(values(found, BASE, word)) for word in ("copy_first", "copy")]
    rows = [["a copy of the state in memory", *copies, "1.00", "", "", "", ""]]
    for name in (name for name in CONTENDERS if CONTENDERS[name].asynchronous):
        if name not in found:
            if name in why_not:
                rows.append([name, *[short(why_not[name])] * 2, *[""] * 5])
            continue
        rows.append([
            name,
            cell(values(found, name, "blocked_first")), cell(values(found, name, "blocked")),
            middle(ratios(found, name, "blocked", BASE, "copy")),
            cell(values(found, name, "stall")), cell(values(found, name, "durable")),
            middle([1e3 * s for s in values(found, name, "step")]), middle(values(found, name, "slower")),
        ])  # fmt: skip
    head = [
        "",
        "blocked the first time, s",
        "blocked, s",
        "× copy",
        "stall, s",
        "durable, s",
        "a step alone, ms",
        "× beside the save",
    ]
    return report.table(head, rows)


def aims(found: Found, size: str, state: int) -> Iterator[str]:
    """What was aimed at, and what came of it."""

    def median(name: str, word: str) -> float | None:
        there = values(found, name, word)
        return statistics.median(there) if there else None

    def ratio(name: str, word: str, base: str, other: str) -> float | None:
        there = ratios(found, name, word, base, other) if name in found else []
        return statistics.median(there) if there else None

    def line(what: str, figure: float | None, limit: float | None, unit: str = "") -> Iterator[str]:
        if figure is not None and limit is not None:
            yield f"- {what}: {figure:.3g}{unit}, aim {limit:.3g}{unit}: {'met' if figure <= limit else 'missed'}"

    yield from line("durable save / plain write", ratio(OURS, "durable", BASE, "durable"), AIMS[size])
    peers = [v for n in found if n not in (BASE, OURS, ASYNC) and (v := median(n, "durable")) is not None]
    yield from line(
        "durable save, seconds, beside the quickest peer", median(OURS, "durable"), min(peers, default=None)
    )
    yield from line("verified warm load / plain read into new memory", ratio(OURS, "warm", BASE, "warm"), 1.6)
    yield from line("verified warm load / plain read into used memory", ratio(OURS, "warm", BASE, "warm_used"), 1.6)
    yield from line("verified warm load / Accelerate's", ratio(OURS, "warm", "Accelerate", "warm"), 0.5)
    yield from line(
        "verified warm load, live / plain read into used memory",
        ratio(OURS, "warm_used", BASE, "warm_used"),
        1.6,
    )
    yield from line(
        "verified warm load, live / Accelerate's, live",
        ratio(OURS, "warm_used", "Accelerate", "warm_used"),
        0.5,
    )
    yield from line("blocked / a copy of the state", ratio(ASYNC, "blocked", BASE, "copy"), 1.0)
    yield from line("stall / DCP async_save's", ratio(ASYNC, "stall", THEIRS, "stall"), 0.2)
    held = median(OURS, "save_peak")
    yield from line("memory beyond the state, synchronous", None if held is None else held / 1e6, 64, " MB")
    held = median(ASYNC, "save_peak")
    yield from line(
        "memory beyond the state, asynchronous",
        None if held is None else held / 1e6,
        1.05 * state / 1e6,
        " MB",
    )


def section(found: Found, why_not: dict[str, str], case: str, size: str) -> str:
    count = max((len(rounds) for rounds in found.values()), default=0)
    state, tensors = described(size)
    still = max((v for name in found for v in values(found, name, "cached")), default=0.0)
    return "\n".join([
        f"## {TITLES[case]}, {size}",
        "",
        (
            f"{state / 1e6:.0f} MB in {tensors} tensors (beside AdamW's step counts); {count} "
            f"round{'s' * (count != 1)}. Before "
            f"cold loads at most {still:.1%} of the files were still in the page cache."
        ),
        "",
        saves_and_loads(found, why_not),
        "",
        beside_training(found, why_not),
        "",
        *(f"- {name}: {why}" for name, why in why_not.items()),
        *(aims(found, size, state // CASES[case]) if size in AIMS else ["- No aims are set for this size."]),
        "",
    ])  # fmt: skip


def file_system(folder: Path) -> str:
    """Its type: on one in memory nothing is durable."""
    there = [p for p in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(p.mountpoint)]
    return max(there, key=lambda p: len(p.mountpoint)).fstype if there else "unknown"


def checksum_engine() -> str:
    """What easymp hashes with: ``"isal 1.9.1"``, or ``"zlib"``, which is several times slower."""
    package = crc32().__module__.partition(".")[0]
    return package if package == "zlib" else f"{package} {metadata.version(package)}"


def main() -> None:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, help="turns of each contender (3; 1 with 4 GB on two processes)")
    parser.add_argument("--size", nargs="*", choices=list(SIZES), help="of the state (1GB and 4GB)")
    parser.add_argument("--case", nargs="*", choices=list(CASES), help="all of them")
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="CONTENDER",
        choices=list(CONTENDERS),
        help="these, beside the plain bytes",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="on the disk to measure (the temporary one)",
    )
    parser.add_argument(
        "--record", type=Path, help="file that keeps every measurement; those it has are not made again"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"begin no measurement after that many; the exit code is {LEFT} where some are left",
    )
    report.options(parser, "checkpoint")
    asked = parser.parse_args()
    if asked.seconds is not None and asked.record is None:
        parser.error("--seconds needs --record FILE, which the next piece goes on from")
    if sys.platform != "linux":
        raise SystemExit("this benchmark reads /proc and drops files from Linux's page cache: run it there")
    torch.set_num_threads(1)  # a process that has computed on more cannot be forked
    # torch asks for the names of both ends of every connection: a name server that loses one question costs 5 seconds.
    ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    import accelerate  # noqa: F401 - here, not in each child
    import lightning_fabric  # noqa: F401

    where = report.here("safetensors", "accelerate", "lightning-fabric")
    runs = [
        (case, size, asked.rounds or RUNS.get((case, size), 3))
        for case in asked.case or CASES
        for size in asked.size or [size for known, size in RUNS if known == case]
    ]
    names = [name for name in CONTENDERS if not asked.only or name in asked.only or name == BASE]
    records = Records(asked.record)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and remove what lies on the disk

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", file=sys.stderr, flush=True)

    def why_not(case: str, size: str) -> dict[str, str]:
        return {name: why for name, why in records.why_not(case, size).items() if name in names}

    def failed(key: dict[str, Any], error: Failed) -> None:
        if key["contender"] == BASE:
            raise SystemExit(f"{BASE}, which all is measured by: {error}\n{error.log}")
        say(f"{key['contender']}: {error}\n{error.log}")
        records.add({**key, "why": str(error)})

    engine = checksum_engine()
    left = 0
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=asked.folder) as there:
        folder = Path(there)
        tiny, job = Job("tiny"), None
        rehearsed: set[tuple[str, str]] = set()
        ready: tuple[str, str] | None = None
        for case, size, rounds in runs:
            for k in range(rounds):
                order = names[k % len(names) :] + names[: k % len(names)]
                for name in order if k % 2 == 0 else reversed(order):
                    key = {"case": case, "size": size, "contender": name, "round": k}
                    if records.has(**key) or name in why_not(case, size):
                        continue
                    if asked.seconds is not None and time.monotonic() - begun > asked.seconds:
                        left += 1
                        continue
                    try:
                        if (case, name) not in rehearsed:
                            rehearse(tiny, name, case, records, folder)
                            rehearsed.add((case, name))
                    except Failed as error:
                        failed({**key, "size": "tiny"}, error)
                        continue
                    if ready != (case, size):
                        ready = (case, size)
                        if job is None or job.size != size:
                            job = None  # two would not fit
                            job = Job(size)
                        room(job, case, folder)
                        warm_memory(min(2 * job.bytes * CASES[case], psutil.virtual_memory().available // 2))
                    try:
                        figures = one_round(job, name, case, folder)
                    except Failed as error:
                        failed(key, error)
                        continue
                    records.add({**key, "figures": figures, "engine": engine})
                    told = ", ".join(
                        f"{word} {figures[word]:.2f}"
                        for word in ("durable", "stall", "warm", "warm_used", "cold")
                        if word in figures
                    )
                    say(f"{case} {size} round {k + 1} of {rounds}: {name}: {told}")
        kind = file_system(folder)
    noticed = records.told("noticed")
    facts = [[name, *CONTENDERS[name].facts, noticed.get(name, "?")] for name in names if name != BASE]
    engines = " and ".join(sorted(set(records.told("engine").values()) | {engine}))
    text = "\n".join([
        "# Checkpoints",
        "",
        ("Medians (least … most) of interleaved rounds; ratios are medians of the ratios within a round. "
        "`benchmarks/checkpoint.py` says"),
        "what each column is.",
        "",
        *(section(records.found(case, size), why_not(case, size), case, size) for case, size, _ in runs),
        "## What a checkpoint is worth",
        "",
        report.table(["", "whole or not at all", "checksums", "pickle in it", "a flipped bit is noticed"], facts),
        "",
        where + f"; files on {kind}",
        f"- easymp's CRC-32 is computed by {engines}",
        *([f"- {left} measurements are left to make"] if left else []),
    ])  # fmt: skip
    report.hand_in(text, asked.out)
    if left:
        raise SystemExit(LEFT)


if __name__ == "__main__":
    main()
