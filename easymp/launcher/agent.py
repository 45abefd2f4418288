"""torchrun's engine, with its voice turned down and its answer turned into ours."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ..base import env
from ..errors import RefusedError
from .alone import Alone
from .failure import RESTART, Failure, collect
from .meeting import Ended, Meeting
from .place import Place, interface, own_address
from .reports import Report, first

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # handed on to the workers
LOUD = ("torch.distributed.elastic", "torch.distributed.launcher", "torchelastic-events-null")
GRACE = 30.0  # seconds
STAY = 300.0  # seconds that a node whose ranks are done waits for those of the others, as elastic does
AGAIN = (
    2.0  # seconds: who signals a process and its group (a terminal, timeout, a scheduler) does so within less
)


class RanksFailed(Exception):
    """Workers failed; `failures` has the likeliest cause first, on `node` if that is named; `size` is the number of all ranks."""

    def __init__(self, failures: list[Failure], size: int, node: str = "") -> None:
        super().__init__(failures[0].words)
        self.failures = failures
        self.size = size
        self.node = node


class Interrupted(Exception):
    """A signal stopped the launcher (that of `node`, if named), and the workers with it; `saved`: those can be started again."""

    def __init__(self, number: int, saved: bool = False, node: str = "") -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.saved, self.node = number, saved, node


def run(
    entrypoint: Callable[..., Any] | str,
    arguments: list[Any],
    processes: int,
    *,
    place: Place,
    max_restarts: int,
    monitor_interval: float,
    threads: int,
    variables: dict[str, str | None],
    grace: float = GRACE,
) -> dict[int, Any]:
    """Run `processes` workers on this node to their end; return values by rank, where the entry point is a function.

    Args:
        threads: for each worker's own computing, where OMP_NUM_THREADS does not say it.
        grace: seconds that the workers have after a signal, before they are killed.

    Raises:
        RanksFailed: a worker failed, and no restart is left; on several nodes, a worker of any node.
        Interrupted: SIGINT, SIGTERM or their like came; the workers got it too, and `grace` seconds. A second one kills them at once.
        WorldError, SettingError: the nodes did not come together.
        RefusedError: `grace` is below 0, or this torch cannot give it.
    """
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    directory = tempfile.mkdtemp(prefix="easymp-launch-")
    workers: list[Any] = []
    try:
        with (
            env.override(**surroundings(place, threads), **variables),
            _signals(workers, SignalException),
            _quiet(),
        ):
            meeting = Meeting(place) if place.limit > 1 else Alone(place)
            over = True
            try:
                spec = WorkerSpec(
                    role="default",
                    local_world_size=processes,
                    entrypoint=entrypoint,
                    args=tuple(arguments),
                    rdzv_handler=meeting,
                    max_restarts=max_restarts,
                    monitor_interval=monitor_interval,
                )
                agent = LocalElasticAgent(
                    spec,
                    DefaultLogsSpecs(log_dir=directory),
                    start_method="fork",  # of functions: one from a notebook cannot be sent. Scripts are started afresh
                    **_grace(LocalElasticAgent, grace),
                )
                stopped: set[int] = set()
                # Weakly: an agent that holds itself would keep the store, and its port, until garbage is collected.
                agent._start_workers = partial(
                    _start_workers, LocalElasticAgent._start_workers, weakref.proxy(agent), stopped
                )
                if place.limit > 1:
                    agent._exit_barrier = partial(_leave_together, weakref.proxy(agent), meeting)
                group = agent.get_worker_group()
                workers.append(group)
                result = agent.run()
                if not result.is_failed():
                    return result.return_values
                codes = {
                    rank: failure.exitcode for rank, failure in result.failures.items() if rank not in stopped
                }
                own = Report("", tuple(collect(Path(directory), codes, group.workers[0].global_rank)))
                meeting.tell(own)
                raise _ending(own, meeting.hear(own), group.workers[0].world_size)
            except SignalException as error:
                own = Report("", tuple(collect(Path(directory), {})), error.sigval)
                saved = bool(own.failures) and all(failure.code == RESTART for failure in own.failures)
                meeting.tell(Report("", (), error.sigval, saved))
                over = False
                raise Interrupted(error.sigval, saved) from None
            except Ended as error:
                raise _ending(Report(""), error.reports, group.workers[0].world_size) from None
            finally:
                meeting.close(over)
    except SignalException as error:  # before there was anything to stop
        raise Interrupted(error.sigval) from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _start_workers(start: Callable[[Any, Any], Any], agent: Any, stopped: set[int], group: Any) -> Any:
    """elastic's start of the workers, and in `stopped` the ranks that were alive when it began to stop them.

    elastic lists the signals by which it ended those among the failures, as if they had come from elsewhere.
    """
    started = start(agent, group)
    stopped.clear()
    first, close = group.workers[0].global_rank, agent._pcontext.close

    def noted(*args: Any, **options: Any) -> None:
        if not stopped:
            stopped.update(
                first + local for local, process in agent._pcontext.pids().items() if _alive(process)
            )
        close(*args, **options)

    agent._pcontext.close = noted
    return started


def _alive(child: int) -> bool:
    """Whether a child process runs; it is not reaped."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _leave_together(agent: Any, meeting: Meeting) -> None:
    """Wait for the other nodes' ranks when those here have ended well, in place of elastic's wait, which hears of no failure there.

    Raises:
        Ended: the run has ended on another node.
    """
    deadline = time.monotonic() + STAY
    try:
        agent._store.add("ended", 1)  # of this round: nodes that begin again count anew
        while (
            agent._store.add("ended", 0) < agent.get_worker_group().group_world_size
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
            meeting.num_nodes_waiting()
    except RuntimeError:
        pass  # the main node is gone: nobody is left to wait for


def _ending(own: Report, others: list[Report], size: int) -> RanksFailed | Interrupted:
    """What became of the run, by what all nodes say."""
    if not own.caused:
        for report in others:
            if report.signal is not None and not report.caused:
                return Interrupted(report.signal, report.saved, report.node)
    failure, node = first(own, others)
    if failure is None:  # told without a rank's failure: nothing is known but where
        return RanksFailed([Failure(0, 1)], size, others[0].node)
    rest = [other for other in own.failures if other is not failure]
    return RanksFailed([failure, *rest], size, node)


def _grace(agent: type, seconds: float) -> dict[str, Any]:
    """elastic's option for it, where this torch has one."""
    if seconds < 0:
        raise RefusedError(f"a grace of {seconds:g} seconds is below 0: use 0 to kill at once")
    if "shutdown_timeout" in inspect.signature(agent).parameters:
        return {"shutdown_timeout": seconds}
    if seconds != GRACE:
        import torch  # `easymp --help` imports none; the agent's class is torch's, so here it is loaded

        raise RefusedError(
            f"torch {torch.__version__} gives workers {GRACE:g} seconds after a signal, whatever is asked for: torch 2.13 takes {seconds:g}"
        )
    return {}


def surroundings(place: Place, threads: int) -> dict[str, str | None]:
    """Variables for workers on this machine, where the user has not set them."""
    found: dict[str, str | None] = {
        # Each worker would otherwise take all cores.
        "OMP_NUM_THREADS": env.read("OMP_NUM_THREADS") or str(threads),
        # The agent's store keeps the keys of an earlier attempt, and a restarted gloo reads them: pytorch issue 135712.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # elastic would install its handlers over ours: a name that is no signal's.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "none",
    }
    if place.limit > 1 and not env.read("GLOO_SOCKET_IFNAME"):
        # gloo would take the address that the host's name stands for, on many machines the loopback's.
        found["GLOO_SOCKET_IFNAME"] = interface(own_address(place.address, place.port))
    return found


@contextmanager
def _signals(groups: list[Any], stop: type[Exception]) -> Iterator[None]:
    """The launcher's own handlers: the first signal raises `stop`, and the same after a while kills the workers of `groups`.

    Put back at the end: in a notebook the process lives on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    import psutil  # not needed by every import of easymp

    since: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not since:
            since.append(time.monotonic())
            raise stop(signal.Signals(number).name, sigval=signal.Signals(number))
        if time.monotonic() - since[0] > AGAIN:
            for worker in (worker for group in groups for worker in group.workers):
                with suppress(psutil.Error):
                    process = psutil.Process(worker.id)
                    if process.ppid() == os.getpid():  # a number may be somebody else's by now
                        process.kill()

    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            if before[number] is not signal.SIG_IGN:  # nohup
                signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def _quiet() -> Iterator[None]:
    """elastic's log lines go nowhere, unless LOGLEVEL asks for them: what they say is said better at the end."""
    if env.read("LOGLEVEL"):
        yield
        return
    silence = logging.NullHandler()
    loggers = [logging.getLogger(name) for name in LOUD]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before):
            logger.removeHandler(silence)
            logger.propagate = propagate
