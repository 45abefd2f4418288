"""Functions on N real processes, out of a warm pool.

A fork server that has imported torch and easymp, and never computed, forks the workers: a `spawn` imports torch in each
process, and a `fork` of a parent that has trained on several threads hangs. Workers live as long as the session; one
that failed is killed. Functions travel by module and name. `conftest.py` makes a fixture of it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import warm

# What tests import anyway: paid once, in the fork server.
PRELOAD = [
    *warm.PRELOAD, "pytest", "hypothesis", "torch.distributed.algorithms.join",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "easymp.training.oom", "easymp.parts.nonfinite",
    "easymp.trackers.logbook", "easymp.checkpoint.run_state", "easymp.checkpoint.resume",
    "easymp.strategies.transforms", "easymp.strategies.ddp", "easymp.strategies.fsdp", "easymp.strategies.zero1",
    "tests.frozen",
]  # fmt: skip

GRACE = 3.0  # seconds that the other ranks have to answer once one has failed
HEAD_START = 0.01  # seconds for rank 0 to open its store: a rank that knocks too early waits about 0.5 s to knock again
BOUND = 100.0  # seconds, of 120 that a test has: against what hangs, and far from what takes long on a busy machine
PATIENCE = 10.0  # seconds that a thread told to end, or a file told to close, has to do so: a busy machine takes some
READY = b"ready"  # what a worker says when it has begun
# fsspec keeps one loop, which looks names up by threads; the last one is torch 2.8's, of the processes that compile.
HARMLESS_THREADS = ("tqdm_monitor", "fsspecIO", "asyncio_0", "asyncio_1", "(_read_thread)")


class Failure(NamedTuple):
    """How one rank failed: an exception's type name and message, ``SIGKILL``, ``exit``, ``Timeout`` or ``Leak``."""

    type: str
    message: str


@dataclass
class Outcome:
    """What one rank came to."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    traceback: str = ""
    time: float = field(default_factory=time.monotonic)  # one clock for all processes of a machine


class RanksFailed(AssertionError):
    """At least one rank failed; the message holds the first one's own traceback."""


# -- torch's and Python's process-wide settings ------------------------------------------------------------------------

SWITCHES: dict[str, tuple[Any, Any]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "automatic garbage collection": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "cpu autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
}
for _name in ("allow_tf32", "deterministic", "benchmark"):
    SWITCHES[f"cudnn.{_name}"] = (
        partial(getattr, torch.backends.cudnn, _name),
        partial(setattr, torch.backends.cudnn, _name),
    )


def read_switches() -> dict[str, Any]:
    """Process-wide settings, of torch and of Python."""
    return {name: read() for name, (read, _) in SWITCHES.items()}


def changed_switches(before: Mapping[str, Any]) -> Iterator[str]:
    """Put them back, and say of each that was not as before what it was."""
    for name, value in read_switches().items():
        if value != before[name]:
            yield f"{name}={value}, was {before[name]}"
            SWITCHES[name][1](before[name])


# -- in the worker -----------------------------------------------------------------------------------------------------


def _work(pipe: Connection, log: str, directory: str) -> None:
    """A worker's whole life: run what is sent, answer, until the pipe closes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # type: ignore[arg-type]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then kills the workers
    names_from_the_hosts_file_only()
    # As in a process of a user's: out of a fork server of their own, each DataLoader's workers would import torch
    # again.
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)  # two threads on busy cores are 4 to 5 times slower
    gc.collect()
    gc.freeze()  # the collection after each call looks at that call's objects only
    os.chdir(directory)
    switches = read_switches()
    pipe.send_bytes(READY)
    while True:
        try:
            rank, task, env = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        answer = _call(rank, task, env, switches)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pipe.send_bytes(answer)
        except OSError:
            return


def names_from_the_hosts_file_only() -> None:
    """Let this process ask no name server (glibc's own call; elsewhere nothing happens).

    torch looks up both ends of each connection, as ``::ffff:127.0.0.1``, which no hosts file knows. A name server that
    loses one of these questions costs 5 seconds.
    """
    try:
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
    except (AttributeError, OSError, TypeError):
        pass


def _call(rank: int, task: bytes, env: Mapping[str, str | None], switches: Mapping[str, Any]) -> bytes:
    """The function's `Outcome`, pickled, with variables and directory as they were."""
    environment, directory, threads = dict(os.environ), os.getcwd(), set(threading.enumerate())
    _fresh(switches)
    try:
        for name, value in env.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        function, args = pickle.loads(task)
        answer = pickle.dumps(Outcome(rank, value=function(*args)))
        gc.collect()  # what frees itself with its last reference does so now, not in the next test
        if left := _left_behind(threads):
            answer = pickle.dumps(Outcome(rank, failure=Failure("Leak", left)))
    except BaseException as error:
        # without the frame of this file
        lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
        failure = Failure(type(error).__name__, str(error))
        answer = pickle.dumps(Outcome(rank, failure=failure, traceback="".join(lines)))
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
    return answer


def _fresh(switches: Mapping[str, Any]) -> None:
    """The process as it was when it was forked, as far as a test may look at it."""
    import numpy

    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    torch.set_default_device(None)
    list(changed_switches(switches))
    logging.disable(logging.NOTSET)


def _left_behind(before: set[threading.Thread]) -> str:
    import torch.distributed as dist

    if dist.is_initialized():
        return "left a process group running: destroy it (World.close does) before the function returns"
    threads = leaked_threads(before)
    return f"left threads running: {', '.join(threads)}" if threads else ""


def leaked_threads(
    before: set[threading.Thread], only: Callable[[threading.Thread], bool] = lambda thread: True
) -> list[str]:
    """Names of threads that were not there `before`, after a moment to end; torch's own worker threads do not count."""
    deadline = time.monotonic() + PATIENCE
    while True:
        new = [
            t.name
            for t in threading.enumerate()
            if t not in before
            and only(t)
            and not t.name.endswith(HARMLESS_THREADS)
            and not isinstance(t, threading._DummyThread)
        ]
        if not new or time.monotonic() > deadline:
            return new
        time.sleep(0.01)


# -- in the test session -----------------------------------------------------------------------------------------------


class Worker:
    """A live process that waits for work."""

    def __init__(self, context: Any, directory: Path, number: int) -> None:
        self.log = directory / f"worker{number}.log"
        self.log.touch()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, str(self.log), os.getcwd()), daemon=True)
        self.process.start()
        theirs.close()
        self.read = 0  # how much of the log belongs to earlier calls

    def begun(self) -> None:
        """Wait until it takes work: what a call may take is counted from then on, for all ranks alike."""
        assert self.pipe.recv_bytes() == READY

    def send(self, message: bytes) -> None:
        self.read = self.log.stat().st_size
        self.pipe.send_bytes(message)

    def printed(self) -> str:
        """What the worker printed since the last `send`."""
        text = self.log.read_bytes()[self.read :].decode(errors="replace").strip()
        return f"\nIt had printed:\n{text[-8000:]}\n" if text else ""

    def print_stacks(self) -> None:
        """Have each thread of the worker print where it is, and wait for that."""
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(1.0)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
        self.log.unlink()


class Ranks:
    """Workers that live as long as a test session, and run functions of modules. `close` ends them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        # By rank: torch keeps things in caches that are true for one rank of a process only, so a worker is never
        # another one.
        self._workers: dict[int, Worker] = {}
        self._number = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Each rank's return value; a rank that fails, fails the test. `options` are those of `_run`."""
        __tracebackhide__ = True
        outcomes = self._run(function, args, patient=False, **options)
        if any(o.failure for o in outcomes):
            raise RanksFailed(explain(outcomes))
        return [o.value for o in outcomes]

    def fails(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """A value, or a `Failure` (type, message), a rank; ranks run to their own end or to the timeout.

        The test fails if none failed.
        """
        __tracebackhide__ = True
        outcomes = self._run(function, args, patient=True, **options)
        if not any(o.failure for o in outcomes):
            raise RanksFailed(f"no rank failed; they returned {[o.value for o in outcomes]}")
        return [o.failure if o.failure is not None else o.value for o in outcomes]

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        patient: bool,
        processes: int = 2,
        timeout: float = BOUND,
        env: Mapping[str, str | None] | None = None,
    ) -> list[Outcome]:
        """`function(*args)` on ranks 0 to `processes` - 1. RANK, WORLD_SIZE and so on are set, and `env`.

        `patient`: one rank's failure does not cut the others short.
        """
        task = pickle.dumps((function, args))
        new = [rank for rank in range(processes) if rank not in self._workers]
        for rank in new:
            self._workers[rank] = Worker(self._context, Path(self._directory.name), self._number)
            self._number += 1
        for rank in new:
            self._workers[rank].begun()
        workers = [self._workers[rank] for rank in range(processes)]
        outcomes: dict[int, Outcome] = {}
        held, port = hold_port()
        try:
            for rank, worker in enumerate(workers):
                if rank == 1:
                    time.sleep(HEAD_START)
                launch = {
                    "RANK": str(rank), "WORLD_SIZE": str(processes),
                    "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                }  # fmt: skip
                worker.send(pickle.dumps((rank, task, {**launch, **(env or {})})))
            self._collect(workers, outcomes, time.monotonic() + timeout, timeout, patient)
        finally:
            held.close()
            for rank, worker in enumerate(workers):
                if rank not in outcomes or outcomes[rank].failure is not None:
                    worker.kill()
                    del self._workers[rank]
        return [outcomes[rank] for rank in range(processes)]

    def _collect(
        self, workers: list[Worker], outcomes: dict[int, Outcome], deadline: float, timeout: float, patient: bool
    ) -> None:
        while len(outcomes) < len(workers):
            waiting = {worker.pipe: rank for rank, worker in enumerate(workers) if rank not in outcomes}
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                rank = waiting[pipe]  # type: ignore[index]
                outcomes[rank] = self._answer(rank, workers[rank])
                if outcomes[rank].failure is not None:
                    outcomes[rank].traceback += workers[rank].printed()
                    if not patient:
                        deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() >= deadline:
                for rank, worker in enumerate(workers):
                    if rank not in outcomes:
                        failure = Failure("Timeout", f"still running, {timeout:g} s allowed")
                        worker.print_stacks()
                        outcomes[rank] = Outcome(rank, failure=failure, traceback=worker.printed())

    def _answer(self, rank: int, worker: Worker) -> Outcome:
        try:
            return pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(5)
            code = worker.process.exitcode
        if code is not None and code < 0:
            failure = Failure(signal.Signals(-code).name, f"killed by signal {-code}")
        else:
            failure = Failure("exit", f"exit code {code}")
        return Outcome(rank, failure=failure, traceback=f"{failure.type}: {failure.message}\n")

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()
        self._directory.cleanup()


def hold_port() -> tuple[socket.socket, int]:
    """A socket that holds a free port below the range that the system hands out, and the port.

    On Linux who opens it with SO_REUSEADDR, as torch's store does, may listen there meanwhile; elsewhere the socket is
    closed.
    """
    source = random.SystemRandom()  # tests seed the global generator, and several sessions may run at once
    while True:
        held, port = socket.socket(socket.AF_INET, socket.SOCK_STREAM), source.randrange(15000, 32000)
        try:
            held.bind(("", port))
        except OSError:
            held.close()
            continue
        if sys.platform == "linux":
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            held.close()
        return held, port


def free_port() -> int:
    """A port that nobody has, for those who cannot hold it."""
    held, port = hold_port()
    held.close()
    return port


def explain(outcomes: list[Outcome]) -> str:
    """The likeliest cause with its traceback, the others in one line each.

    Killed or gone, then by time, at last still running.
    """

    def blame(outcome: Outcome) -> tuple[int, float]:
        kind = outcome.failure.type  # type: ignore[union-attr]
        return (0 if kind.startswith("SIG") or kind == "exit" else 2 if kind == "Timeout" else 1), outcome.time

    first, *others = sorted((o for o in outcomes if o.failure is not None), key=blame)
    lines = [f"rank {first.rank} of {len(outcomes)} failed first: {first.failure.type}: {first.failure.message}"]
    for other in others:
        message = other.failure.message.splitlines()
        lines.append(f"  rank {other.rank}: {other.failure.type}: {message[0] if message else ''}")
    return "\n".join([*lines, "", first.traceback.rstrip()])
