"""torchrun's engine, with its voice turned down and its answer turned into ours."""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import env
from ..errors import SettingError
from .failure import RESTART, Failure, collect

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # handed on to the workers
LOUD = ("torch.distributed.elastic", "torch.distributed.launcher", "torchelastic-events-null")


@dataclass(frozen=True)
class Place:
    """Where the ranks meet. One node needs none of it: a free port on the loopback is found."""

    nodes: int = 1
    node_rank: int = 0
    address: str = "127.0.0.1"  # of node 0
    port: int | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise SettingError(f"{self.nodes} nodes cannot train: use at least 1")
        if not 0 <= self.node_rank < self.nodes:
            raise SettingError(f"node_rank={self.node_rank} does not lie in 0 … {self.nodes - 1} for {self.nodes} node(s)")
        if self.nodes > 1 and self.port is None:
            raise SettingError(f"{self.nodes} nodes need a port to meet at on {self.address}: pass the same free port on each")


class RanksFailed(Exception):
    """Workers failed; `failures` has the likeliest cause first, `size` is the number of all ranks."""

    def __init__(self, failures: list[Failure], size: int) -> None:
        super().__init__(failures[0].words)
        self.failures = failures
        self.size = size


class Interrupted(Exception):
    """A signal stopped the launcher, and the workers with it; `saved`: those say that they can be started again."""

    def __init__(self, number: int, saved: bool = False) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.saved = number, saved


def run(
    entrypoint: Callable[..., Any] | str,
    arguments: list[Any],
    processes: int,
    *,
    place: Place,
    max_restarts: int,
    monitor_interval: float,
    variables: dict[str, str | None],
) -> dict[int, Any]:
    """Run `processes` workers on this node to their end; return values by rank, where the entry point is a function.

    Raises:
        RanksFailed: a worker failed, and no restart is left.
        Interrupted: SIGINT, SIGTERM or their like came; the workers got it too, and 30 seconds.
    """
    with warnings.catch_warnings():
        # torch says so on import where numpy is not installed; here nothing needs it.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    size = processes * place.nodes
    directory = tempfile.mkdtemp(prefix="easymp-launch-")
    try:
        with env.override(**surroundings(processes), **variables), _signals(), _quiet():
            config = LaunchConfig(
                min_nodes=place.nodes,
                max_nodes=place.nodes,
                nproc_per_node=processes,
                run_id="easymp",
                start_method="fork",  # of functions: one from a notebook cannot be sent. Scripts are started afresh
                max_restarts=max_restarts,
                monitor_interval=monitor_interval,
                logs_specs=DefaultLogsSpecs(log_dir=directory),
                **_rendezvous(place),
            )
            return elastic_launch(config, entrypoint)(*arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        raise RanksFailed(collect(Path(directory), codes, place.node_rank * processes), size) from None
    except SignalException as error:
        ended = collect(Path(directory), {})
        raise Interrupted(error.sigval, bool(ended) and all(failure.code == RESTART for failure in ended)) from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _rendezvous(place: Place) -> dict[str, Any]:
    if place.port is None:
        return {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{place.address}:{place.port}",
        "rdzv_configs": {"rank": place.node_rank, "timeout": 900},
    }


def surroundings(processes: int) -> dict[str, str | None]:
    """Variables for workers on this machine, where the user has not set them."""
    # Imports torch, which the worker's entry must not do before the user's script does.
    from ..hardware import detect

    threads = max(1, detect(use_accelerators=False).cpu.threads // processes)
    return {
        # Each worker would otherwise take all cores.
        "OMP_NUM_THREADS": env.read("OMP_NUM_THREADS") or str(threads),
        # The agent's store keeps the keys of an earlier attempt, and a restarted gloo reads them: pytorch issue 135712.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # elastic writes it for good.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(SIGNALS),
    }


@contextmanager
def _signals() -> Iterator[None]:
    """elastic takes the signals' handlers and keeps them; in a notebook the process lives on and wants its own back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
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
