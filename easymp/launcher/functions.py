"""Functions on several processes: for notebooks, and for trying out a run of several ranks without a script.

The processes are forked, because a notebook's function cannot be sent to a fresh process. A fork copies only the calling thread, which has
two consequences: a parent that has initialised CUDA cannot have children that use it (refused), and torch's thread pool is
gone in the children while its bookkeeping says it is there, so they compute on one thread (a second one would wait forever).
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ..base import env
from ..errors import EasympWarning, RefusedError, SettingError, WorldError
from . import agent
from .failure import explain, record
from .place import WAIT, Place, read_address
from .scripts import checked


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: int | str | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> list[Any]:
    """Run ``function(*args)`` on several processes of this machine, from a notebook or a script.

    Build the Accelerator and everything else that touches a device inside the function.

    Args:
        function: any function, also one defined in a cell.
        args: its arguments.
        num_processes: how many on this node; None takes one an accelerator, or 1 without any. With one process (on one
            node) the function is called directly.
        mixed_precision: setting for the Accelerators made in the function; None leaves it to them.
        use_port: where the ranks meet; None finds a free port.
        master_addr, node_rank, num_nodes: for several machines, each of which runs this call: node 0's address, this
            node's number, and how many there are. They need `use_port`.
        rdzv_backend: "static" or "c10d", which here are the same.
        rdzv_endpoint: ``"host:port"`` of node 0, in place of `master_addr` and `use_port`.
        rdzv_conf: ``{"timeout": seconds}`` that the nodes wait for one another (or "join_timeout"), and nothing else.
        rdzv_id, log_line_prefix_template: refused.
        max_restarts: how often all processes are started again after one failed.
        monitor_interval: seconds between looks at the processes.

    Returns:
        What the function returned on this node's ranks, in rank order; None, with a warning, for a value that cannot be
        sent to another process.

    Raises:
        RefusedError: CUDA is initialised in this process already, a process group is running, or an option has no counterpart here.
        SettingError: an impossible number of processes or nodes, or no possible port or address.
        WorldError: the nodes did not meet, or a rank failed; the message ends with the first failing rank's own traceback.
        KeyboardInterrupt: the run was interrupted; the processes are gone. (SystemExit for SIGTERM.)
    """
    processes = checked(num_processes)
    _no_counterpart(rdzv_backend, rdzv_conf, rdzv_id, log_line_prefix_template)
    port = None if use_port is None else _port(use_port)
    if rdzv_endpoint:
        master_addr, port = read_address(rdzv_endpoint)
    place = Place(
        num_nodes, node_rank, master_addr, port, wait=float(next(iter((rdzv_conf or {}).values()), WAIT))
    )
    if max_restarts < 0:
        raise SettingError(f"max_restarts={max_restarts} is below 0: use 0 for no restart")
    variables = {} if mixed_precision is None else {"EASYMP_MIXED_PRECISION": mixed_precision}
    if processes == 1 and num_nodes == 1:
        with env.override(**variables):
            return [function(*args)]
    return _fork(function, args, processes, place, max_restarts, monitor_interval, variables)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> list[Any]:
    """Run ``function(*args)`` on a few CPU processes, to see whether it works on several ranks.

    Returns and raises what `notebook_launcher` does; accelerators are not used.
    """
    processes = checked(num_processes)
    return _fork(function, args, processes, Place(), 0, 0.05, {"EASYMP_CPU": "1"})


def _fork(
    function: Callable[..., Any],
    args: Sequence[Any],
    processes: int,
    place: Place,
    max_restarts: int,
    monitor_interval: float,
    variables: dict[str, str | None],
) -> list[Any]:
    _refuse(cpu=variables.get("EASYMP_CPU") == "1")
    # torch.cuda.is_available(), which elastic calls, would initialise the driver in this process without it.
    variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **variables}

    def entrypoint() -> Any:
        return _in_child(function, args)

    try:
        results = agent.run(
            entrypoint, [], processes, place=place, max_restarts=max_restarts,
            monitor_interval=monitor_interval, threads=1, variables=variables,
        )  # fmt: skip
    except agent.RanksFailed as error:
        raise WorldError(explain(error.failures, error.size, error.node)) from None
    except agent.Interrupted as error:
        if error.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.number) from None
    values = [results[rank] for rank in sorted(results)]
    for rank, value in enumerate(values):
        if isinstance(value, _Unsendable):
            warnings.warn(
                f"rank {rank}'s result cannot be sent back ({value.why}): it is None here",
                EasympWarning,
                stacklevel=3,
            )
    return [None if isinstance(value, _Unsendable) else value for value in values]


@dataclass(frozen=True)
class _Unsendable:
    """Stands for a result that cannot be sent back, and says why."""

    why: str


def _in_child(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    import torch

    os.setsid()  # Ctrl-C in a terminal goes to its whole group: the launcher hands it on, once
    torch.set_num_threads(1)
    # A forked process ends without its exit handlers, and starts with its parent's. Its own are run, the parent's are not.
    atexit._clear()
    # What a cell raised earlier is not how this process ends.
    sys.last_value = None
    try:
        value = function(*args)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        hide = error.__traceback__.tb_next if error.__traceback__ is not None else None
        record(env.read("TORCHELASTIC_ERROR_FILE"), env.integer("RANK", 0), error, code, hide)
        sys.last_value = error
        raise
    finally:
        atexit._run_exitfuncs()
    why_not = _unsendable(value)
    return value if why_not is None else _Unsendable(why_not)


def _unsendable(value: Any) -> str | None:
    """Why `value` cannot go to another process; None where it can. Asked of what sends it later: once for nobody."""
    nobody = Connection(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), readable=False)
    try:
        nobody.send(value)
    except Exception as error:
        return str(error)
    finally:
        nobody.close()
    return None


def _refuse(cpu: bool) -> None:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RefusedError(
            "a process group is running in this process, and forked processes would share its connections: end it "
            "(Accelerator.end_training() or torch.distributed.destroy_process_group()), or restart the notebook's kernel"
        )
    if torch.cuda.is_initialized() and not cpu:
        raise RefusedError(
            "CUDA is already in use in this process, and a forked process cannot use it again: restart the notebook's kernel, "
            "and build models, tensors on the GPU and the Accelerator inside the function only"
        )


def _no_counterpart(backend: str, conf: Mapping[str, Any] | None, run: str, prefix: str | None) -> None:
    if backend not in ("static", "c10d"):
        raise RefusedError(f"rdzv_backend={backend!r} is not there: nodes meet at node 0, leave it away")
    if len(set((conf or {}).values())) > 1:
        raise RefusedError(
            f"rdzv_conf={dict(conf or {})!r} has two timeouts, and there is one wait: leave one of them out"
        )
    if unknown := [name for name in conf or {} if name not in ("timeout", "join_timeout")]:
        raise RefusedError(
            f"rdzv_conf has {unknown[0]!r}, which has no counterpart here: 'timeout' is all that it may have"
        )
    if run != "none":
        raise RefusedError(
            f"rdzv_id={run!r} has no counterpart here: runs are kept apart by node 0's port, use_port"
        )
    if prefix is not None:
        raise RefusedError(
            "log_line_prefix_template has no counterpart here: ranks write to this process's output as they are"
        )


def _port(value: int | str) -> int:
    try:
        port = int(value)
        if not 0 < port < 65536:
            raise ValueError
    except ValueError:
        raise SettingError(f"use_port={value!r} is no port: use a number from 1 to 65535") from None
    return port
