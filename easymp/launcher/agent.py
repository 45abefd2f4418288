"""torch's elastic agent for the ranks of one node: signals, which failure is the cause, and the endings of other nodes.

torch's `elastic_launch` on top of the agent is not used: it waits 5 minutes for nodes whose ranks have failed and then
succeeds, its "root cause" may be a rank that lost its peer (or the agent's own SIGKILL), and it hides the agent, which
a second signal needs.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import psutil
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from ..base import env
from ..distributed.mailbox import Mailbox, Watch
from ..errors import RefusedError
from .rendezvous import Ended, MultiNode, RendezvousConfig, Report, SingleNode, interface, own_address
from .worker import FATAL, RECORD, RESTART, Failure

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # handed on to the workers
LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torchelastic-events-null")
STAY = 300.0  # seconds that a node whose ranks are done waits for those of the others, as elastic does
# Seconds: a program that signals a process and its group (a terminal, timeout, a scheduler) does so within less.
AGAIN = 2.0
CAUSE, PEER, STOPPED = range(3)  # the rank's own error; a lost connection to another rank; ended by the launcher
# The types in which a backend says that another rank is gone: a user's own error of another type never means that.
PEER_TYPES = set("RuntimeError DistError DistBackendError DistNetworkError DistStoreError WorldError".split())


class RanksFailed(Exception):
    """Workers failed: the likeliest cause, on `node` if that is named. `size` is the number of all ranks."""

    def __init__(self, failure: Failure, size: int, node: str = "") -> None:
        super().__init__(failure.summary)
        self.failure, self.size, self.node = failure, size, node

    def explain(self) -> str:
        """A line that names the rank that failed. Its error text follows, if the rank ran on this node."""
        node = f", on {self.node}" if self.node else ""
        line = f"rank {self.failure.rank} of {self.size} failed first{node}: {self.failure.summary}"
        return f"{line}; the launcher there says more" if self.node else f"{line}\n{self.failure.text}".rstrip()


class Interrupted(Exception):
    """A signal stopped the launcher (that of `node`, if named) and the workers, which may have saved a checkpoint."""

    def __init__(self, number: int, checkpoint: str = "", node: str = "") -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.checkpoint, self.node = number, checkpoint, node


class Agent(LocalElasticAgent):
    """torch's agent, which also waits for other nodes, and notes the ranks that it stopped itself.

    torch lists the signals by which it ended ranks among the failures, as if they had come from elsewhere.
    """

    def __init__(self, spec: WorkerSpec, directory: str, grace: float) -> None:
        # Functions are forked: one from a notebook cannot be sent. Scripts are started afresh.
        super().__init__(spec, DefaultLogsSpecs(log_dir=directory), start_method="fork")
        self.stopped: set[int] = set()
        self._grace = grace

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        workers: dict[int, Any] = super()._start_workers(worker_group)
        self.stopped.clear()
        # No closure has the agent: a cycle would keep its store open, whose port the next run of this process needs.
        context: Any = self._pcontext
        stopped, first_rank, grace = self.stopped, worker_group.workers[0].global_rank, self._grace
        close, handlers = context.close, getattr(context, "subprocess_handlers", {}).values()
        for handler in handlers:
            handler.close = partial(_close_rank, handler.proc, handler.close)

        def close_and_note(death_sig: Any = None, timeout: float = 0) -> None:
            if not stopped:
                stopped.update(first_rank + local for local, pid in context.pids().items() if _is_running_child(pid))
            close(death_sig, grace)
            for handler in handlers:
                with suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, signal.SIGTERM)  # processes that the rank left behind

        context.close = close_and_note
        return workers

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        """An event for torch's log, without this host's full name: a silent name server would delay the start."""
        return Event(f"torchelastic.worker.status.{state}", source)

    def _exit_barrier(self) -> None:
        """Wait for the other nodes' ranks when those here have ended well."""
        group = self.get_worker_group()
        if group.group_world_size == 1 or self._store is None:
            return
        mailbox = Mailbox(self._store, group.group_rank, group.group_world_size)  # of this round
        with suppress(RuntimeError, TimeoutError):  # the main node is gone, and with it everything to wait for
            mailbox.post(f"ended/{mailbox.rank}")
            mailbox.wait(mailbox.of_ranks("ended"), STAY, group.spec.rdzv_handler.num_nodes_waiting, longest=0.1)

    def kill(self) -> None:
        """Kill the workers that run, at once."""
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            if _is_running_child(pid):
                os.kill(pid, signal.SIGKILL)


def _close_rank(process: Any, close: Callable[..., None], death_sig: Any = None) -> None:
    """Signal the rank without the workers of its DataLoaders, without which it could not save itself."""
    if death_sig in (None, signal.SIGKILL):
        close(death_sig)
    else:
        process.send_signal(death_sig)


def _is_running_child(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return bool(process.ppid() == os.getpid() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def run(
    entrypoint: Callable[..., Any] | str,
    arguments: list[Any],
    processes: int,
    *,
    config: RendezvousConfig,
    max_restarts: int,
    monitor_interval: float,
    threads: int,
    variables: Mapping[str, str | None],
    grace: float,
) -> dict[int, Any]:
    """Run `processes` workers on this node to their end; return values by rank, where the entry point is a function.

    A signal reaches the workers, too; after `grace` seconds they are killed, or at a second signal. `threads` is
    OMP_NUM_THREADS where it is not set.
    """
    if grace < 0:
        raise RefusedError(f"a grace of {grace:g} seconds is below 0: use 0 to kill at once")
    directory = tempfile.mkdtemp(prefix="easymp-launch-")
    try:
        with (
            env.override(**worker_variables(config, threads), **variables),
            _SignalHandlers() as handlers,
            _quiet_elastic(),
        ):
            rendezvous: Any = MultiNode(config) if config.limit > 1 else SingleNode(config)
            final = True
            try:
                spec = WorkerSpec(
                    role="default",
                    local_world_size=processes,
                    rdzv_handler=rendezvous,
                    entrypoint=entrypoint,
                    args=tuple(arguments),
                    max_restarts=max_restarts,
                    monitor_interval=monitor_interval,
                )
                handlers.agent = Agent(spec, directory, grace)
                return _results(handlers.agent, rendezvous, Path(directory))
            except SignalException:
                final = False
                raise
            finally:
                rendezvous.close(final)
    except SignalException as error:
        raise Interrupted(error.sigval, _saved_checkpoint(Path(directory))) from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _results(agent: Agent, rendezvous: SingleNode, directory: Path) -> dict[int, Any]:
    group = agent.get_worker_group()  # its workers are new in each round
    try:
        result = agent.run()
    except SignalException as error:
        rendezvous.publish(Report(signal=error.sigval, checkpoint=_saved_checkpoint(directory)))
        raise
    except Ended as error:
        raise _likeliest_cause(Report(), error.reports, group.workers[0].world_size) from None
    if not result.is_failed():
        return dict(result.return_values)
    exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items() if rank not in agent.stopped}
    failures = collect_failures(directory, exit_codes, group.workers[0].global_rank)
    caused = any(blame(failure)[0] == CAUSE and failure.code != RESTART for failure in failures)
    own_report = Report(failures[0], caused)
    rendezvous.publish(own_report)
    raise _likeliest_cause(own_report, rendezvous.other_reports(own_report), group.workers[0].world_size)


def _likeliest_cause(own_report: Report, other_reports: list[Report], size: int) -> RanksFailed | Interrupted:
    """The likeliest cause among the reports of all nodes. Clocks of the machines are compared as they are."""
    for report in other_reports:
        if report.signal is not None and not own_report.caused and not report.caused:
            return Interrupted(report.signal, report.checkpoint, report.node)
    causes = [(blame(report.failure), report) for report in (own_report, *other_reports) if report.failure is not None]
    if not causes:  # a report without a rank's failure: only the node is known
        return RanksFailed(Failure(0, 1), size, other_reports[0].node)
    _, report = min(causes, key=lambda cause: cause[0])
    assert report.failure is not None
    return RanksFailed(report.failure, size, report.node)


def collect_failures(directory: Path, exit_codes: Mapping[int, int], first_rank: int = 0) -> list[Failure]:
    """The failures of the last attempt, the likeliest cause first: the ranks' records, else their bare exit codes."""
    attempts = sorted(directory.glob("*/attempt_*"), key=lambda p: int(p.name.rpartition("_")[2]))
    attempt = attempts[-1] if attempts else directory
    records = (Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in attempt.glob(f"*/{RECORD}"))
    failures = {failure.rank: failure for failure in records}
    for rank, code in exit_codes.items():
        if rank not in failures:
            fatal = attempt / str(rank - first_rank) / FATAL
            text = fatal.read_text(encoding="utf-8", errors="replace") if fatal.exists() else ""
            failures[rank] = Failure(rank, code, text=text)
    return sorted(failures.values(), key=blame)


def _saved_checkpoint(directory: Path) -> str:
    """The checkpoint that the ranks saved before they ended; "" if one of them ended for another reason."""
    failures = collect_failures(directory, {})
    saved = bool(failures) and all(failure.code == RESTART for failure in failures)
    return (failures[0].message or "their state") if saved else ""


def blame(failure: Failure) -> tuple[int, float, int]:
    """Sorting key that puts the likeliest cause first: CAUSE, PEER or STOPPED, the time, and the rank."""
    if not failure.type and failure.code == -signal.SIGTERM:
        return STOPPED, failure.timestamp, failure.rank  # elastic ends the others so, once one has failed
    if failure.type in PEER_TYPES and Watch.caused_by_peer(RuntimeError(failure.message)):
        return PEER, failure.timestamp, failure.rank
    # A killed rank cannot say when: it goes first, for that is how the others lost it.
    return CAUSE, failure.timestamp if failure.code >= 0 else 0.0, failure.rank


def worker_variables(config: RendezvousConfig, threads: int) -> dict[str, str | None]:
    """Variables for workers on this machine, where the user has not set them."""
    log_level = env.read("TORCH_CPP_LOG_LEVEL") or (None if env.read("TORCH_DISTRIBUTED_DEBUG") else "ERROR")
    variables: dict[str, str | None] = {
        # Each worker would otherwise take all cores.
        "OMP_NUM_THREADS": env.read("OMP_NUM_THREADS") or str(threads),
        # Of a rank whose peer was killed, torch's store prints 40 lines of C++ frames as a warning. Errors stay.
        "TORCH_CPP_LOG_LEVEL": log_level,
        # The agent's store keeps the keys of an earlier attempt, and a restarted gloo reads them: pytorch issue 135712.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Not a signal's name: elastic would install its handlers over ours.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "none",
    }
    if not env.read("GLOO_SOCKET_IFNAME") and (config.limit > 1 or sys.platform == "linux"):
        # gloo would look up the host's name: on many machines the loopback's, and a name server may not answer.
        variables["GLOO_SOCKET_IFNAME"] = interface(own_address(config.address, config.port))
    return variables


class _SignalHandlers:
    """The launcher's own handlers: the first signal raises SignalException, a later one kills the workers."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self._first_signal = 0.0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for name in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            number = getattr(signal, name, None)
            if number is not None and (former := signal.getsignal(number)) is not signal.SIG_IGN:  # nohup
                self._former[number] = former
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._first_signal:
            self._first_signal = time.monotonic()
            raise SignalException(signal.Signals(number).name, sigval=signal.Signals(number))
        if time.monotonic() - self._first_signal > AGAIN and self.agent is not None:
            self.agent.kill()


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Drop elastic's log lines, unless LOGLEVEL is set: the launcher's own last line says the same."""
    loggers = [] if env.read("LOGLEVEL") else [logging.getLogger(name) for name in LOGGERS]
    propagated, silence = [logger.propagate for logger in loggers], logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, propagated):
            logger.removeHandler(silence)
            logger.propagate = propagate
