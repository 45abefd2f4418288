"""Run a script or a function on several processes.

Functions run in forked processes, because a notebook's function cannot be sent to a fresh one. A fork copies the
calling thread only: a parent that has initialised CUDA cannot have children that use it (refused), and torch's thread
pool is gone in the children, so they compute on one thread (a second one would wait for ever).
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import hardware, settings
from ..base import env, ranks
from ..base.lazy import modules_at_first_use
from ..errors import RefusedError, SettingError, WorldError, check_whole
from ..registry import PrecisionName
from . import worker
from .rendezvous import WAIT, RendezvousConfig, find_nodes
from .worker import RESTART, signal_name

if TYPE_CHECKING:
    from . import agent

# These import torch, which a mistyped script need not wait for.
modules_at_first_use(globals(), "agent")

R = TypeVar("R")
GRACE = 30.0  # seconds
# Further options of the notebook_launcher of Accelerate, which are for several machines or torchrun, with its defaults.
OTHER_OPTIONS = {
    "master_addr": "127.0.0.1",
    "node_rank": 0,
    "num_nodes": 1,
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_conf": None,
    "rdzv_id": "none",
    "monitor_interval": 0.1,
    "log_line_prefix_template": None,
}


def launch_script(
    script: str,
    arguments: Sequence[str] = (),
    processes: int | None = None,
    *,
    module: bool = False,
    max_restarts: int = 0,
    rendezvous: RendezvousConfig | None = None,
    grace: float = GRACE,
    variables: Mapping[str, str | None] | None = None,
) -> int:
    """Run a script on several processes of this machine, and wait for it.

    On failure the first failing rank's own traceback goes to stderr, last and alone; for a rank of another node a line
    names it. `script` is a path, or with `module` the name after ``python -m``. When a signal comes, the ranks have
    `grace` seconds to save themselves; a second one, 2 seconds later or more, kills them.

    Returns:
        0, or the exit code of the rank that failed first: 1 for an exception, n for ``sys.exit(n)``, 128 + n for signal
        n. 75 where a signal came and all ranks saved themselves.
    """
    check_script(script, module)
    processes = _check_processes(processes, max_restarts)
    # elastic fills in ${local_rank} in arguments; a doubled $ comes out as the user's own.
    command = (worker.__file__, "module" if module else "script", script, *arguments)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -W, -X, -O, as multiprocessing
    try:
        agent.run(
            sys.executable,
            [*flags, *(str(argument).replace("$", "$$") for argument in command)],
            processes,
            config=rendezvous or RendezvousConfig(),
            max_restarts=max_restarts,
            monitor_interval=0.1,
            threads=max(1, hardware.detect(use_accelerators=False).cpu.threads // processes),
            variables=variables or {},
            grace=grace,
        )
    except agent.RanksFailed as error:
        sys.stdout.flush()
        print(error.explain(), file=sys.stderr, flush=True)  # noqa: T201
        return error.failure.exit_code
    except agent.Interrupted as error:
        text = f"stopped by {signal_name(error.number)}{f' on {error.node}' if error.node else ''}"
        if error.checkpoint:
            text += f"; the ranks saved {error.checkpoint} and can be started again"
        elif error.number != signal.SIGINT:
            remedy = "at SIGTERM and SIGUSR1 ranks save one, once they have called Accelerator.resume()"
            text += f"; no checkpoint was saved: {remedy}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        return RESTART if error.checkpoint else 128 + error.number
    return 0


def launch(processes: int | None = None) -> None:
    """Make a plain ``python train.py`` run on several processes: call it first thing in the script.

    In a process that a launcher started as a rank, or srun or mpirun as one of several tasks, it returns at once, and
    so it does for one process. Otherwise this process runs the same command on `processes` workers, and exits with
    their exit code. In a pod that is announced as a node of several processes it takes that node's part.

    Args:
        processes: how many; None takes one an accelerator, or 1 without any.

    Raises:
        SettingError: there is no script to run again (a notebook, ``python -c``, an interactive session).

    Example:
        >>> launch(processes=1)  # launch(2) would run this script twice, and exit
    """
    announced = ranks.read()
    if announced == ranks.ONE:
        return
    if isinstance(announced, ranks.Announced) and announced.processes == 1 and announced.max_nodes is None:
        return
    processes = _check_processes(processes)
    if processes == 1 and isinstance(announced, str):
        return
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is None and (path is None or not os.path.isfile(path)):
        raise SettingError(
            "launch() starts the script again on every process, and an interactive session has no script: "
            "put the training into a function and call notebook_launcher(function, num_processes=…)"
        )
    script = sys.argv[0] if os.path.isfile(sys.argv[0]) else str(path)
    if spec is not None:
        script = spec.name.removesuffix(".__main__")
    config, variables = (None, None) if announced is None else find_nodes(None, None, None, None, WAIT)
    module = spec is not None
    sys.exit(launch_script(script, sys.argv[1:], processes, module=module, rendezvous=config, variables=variables))


def notebook_launcher(
    function: Callable[..., R],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: PrecisionName | None = None,
    use_port: int | str | None = None,
    *,
    max_restarts: int = 0,
    **options: Any,
) -> list[R | None]:
    """Run ``function(*args)`` on several processes of this machine, from a notebook or a script.

    Build the Accelerator and everything else that touches a device inside the function.

    Args:
        function: any function, also one defined in a cell.
        args: its arguments.
        num_processes: how many; None takes one an accelerator, or 1 without any. With one process the function is
            called directly.
        mixed_precision: setting for the Accelerators made in the function; None leaves it to them.
        use_port: where the ranks meet; None finds a free port.
        max_restarts: how often all processes are started again after one failed.
        options: Accelerate's further options, with its defaults; other values are refused.

    Returns:
        What the function returned, in rank order; None, with a line on stderr, for a value that cannot be sent to
        another process.

    Raises:
        TypeError: an option that Accelerate does not have.
        RefusedError: CUDA is initialised in this process already, a process group is running, or several machines are
            to take part.
        SettingError: an impossible number of processes, or no possible port.
        WorldError: a rank failed; the message ends with the first failing rank's own traceback.
        KeyboardInterrupt: the run was interrupted; the processes are gone. (SystemExit for SIGTERM.)

    Example:
        >>> def train(lr):
        ...     acc = Accelerator(cpu=True)
        ...     return acc.process_index, lr
        >>> notebook_launcher(train, (0.1,), num_processes=2)
        [(0, 0.1), (1, 0.1)]
    """
    processes = _check_processes(num_processes, max_restarts)
    for name, value in options.items():
        if name not in OTHER_OPTIONS:
            raise TypeError(f"notebook_launcher() got an unexpected keyword argument {name!r}")
        if value != OTHER_OPTIONS[name]:
            raise RefusedError(
                f"notebook_launcher({name}={value!r}) is not honoured: it starts processes of this machine only. Leave "
                "it out, or put the function into a script for `easymp launch`, which has --nodes and --main-address"
            )
    port = None
    if use_port is not None:
        port = int(use_port) if str(use_port).isdecimal() else 0
        if not 0 < port < 65536:
            raise SettingError(f"use_port={use_port!r} is not a port: use a number from 1 to 65535")
    variables = {} if mixed_precision is None else {"EASYMP_MIXED_PRECISION": mixed_precision}
    if processes == 1:
        with env.override(**variables):
            return [function(*args)]
    return _run_function(function, args, processes, RendezvousConfig(port=port), variables, max_restarts)


def debug_launcher(function: Callable[..., R], args: Sequence[Any] = (), num_processes: int = 2) -> list[R | None]:
    """Run ``function(*args)`` on a few CPU processes, to see whether it works on several ranks.

    Args:
        function: as in `notebook_launcher`.
        args: its arguments.
        num_processes: how many.

    Returns:
        What the function returned on each rank.

    Raises:
        WorldError: a rank failed; the message ends with its traceback.

    Example:
        >>> debug_launcher(lambda x: x + Accelerator().process_index, (1,))
        [1, 2]
    """
    processes, variables = _check_processes(num_processes), {"EASYMP_CPU": "1"}
    return _run_function(function, args, processes, RendezvousConfig(), variables, max_restarts=0)


# -- checks


def check_script(script: str, module: bool) -> None:
    """Raises SettingError where a script is not a file, or a module's package cannot be found. Nothing is imported."""
    if not module and not Path(script).is_file():
        raise SettingError(f"{script!r} is not a file: pass the script's path, or -m and a module's name")
    top = script.partition(".")[0]
    if module and not (PathFinder.find_spec(top, [os.getcwd()]) or find_spec(top)):
        raise SettingError(f"there is no module {script!r}, here or where Python finds packages")


def _check_processes(processes: int | None, max_restarts: int = 0) -> int:
    """`processes`, or the number that suits this machine. Raises SettingError for impossible numbers."""
    check_whole(f"max_restarts={max_restarts!r}", max_restarts, 0)
    return default_processes() if processes is None else check_whole(f"processes={processes!r}", processes)


def default_processes() -> int:
    """The number announced for each node; else one an accelerator, or 1 without any (or with ``cpu`` set)."""
    announced = ranks.read_node()
    local_size: int | None = None
    if isinstance(announced, ranks.Announced):
        if announced.processes > 1:
            return announced.processes
        local_size = announced.local_size
    if settings.resolve().cpu or (local_size or 1) > 1:
        return 1
    import torch

    # By NVML where it can: a process that has initialised CUDA cannot fork workers that use it.
    return max(1, torch.cuda.device_count(), torch.xpu.device_count())


# -- functions


def _run_function(
    function: Callable[..., R],
    args: Sequence[Any],
    processes: int,
    config: RendezvousConfig,
    variables: Mapping[str, str],
    max_restarts: int,
) -> list[R | None]:
    """Run a function in forked processes. Return its results in rank order."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RefusedError(
            "a process group is running in this process, and forked processes would share its connections: end it "
            "(Accelerator.end_training() or torch.distributed.destroy_process_group()), or restart the kernel"
        )
    if torch.cuda.is_initialized() and variables.get("EASYMP_CPU") != "1":
        raise RefusedError(
            "CUDA is already in use in this process, and a forked process cannot use it again: restart the notebook's "
            "kernel, and build models, tensors on the GPU and the Accelerator inside the function only"
        )
    try:
        results = agent.run(
            lambda: _in_child(function, args),
            [],
            processes,
            config=config,
            max_restarts=max_restarts,
            monitor_interval=0.05,
            threads=1,
            # torch.cuda.is_available(), which elastic calls, would initialise the driver in this process without it.
            variables={"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **variables},
            grace=GRACE,
        )
    except agent.RanksFailed as error:
        raise WorldError(error.explain()) from None
    except agent.Interrupted as error:
        if error.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.number) from None
    return [value for _, value in sorted(results.items())]


def _in_child(function: Callable[..., R], args: Sequence[Any]) -> Any:
    import torch

    os.setsid()  # Ctrl-C in a terminal goes to its whole group: the launcher hands it on, once
    torch.set_num_threads(1)
    # A forked process ends without its exit handlers, and starts with its parent's: only its own are to run.
    atexit._clear()
    sys.last_value = None  # an error of an earlier cell is not this process's
    try:
        value = function(*args)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        tb = error.__traceback__.tb_next if error.__traceback__ is not None else None
        worker.write_failure(env.read("TORCHELASTIC_ERROR_FILE"), env.integer("RANK") or 0, error, code, tb)
        sys.last_value = error
        raise
    finally:
        atexit._run_exitfuncs()
    try:
        ForkingPickler.dumps(value)  # as elastic sends it later
    except Exception as error:
        worker.print_line(f"the function's result cannot be sent back ({error}): it is None there")
        return None
    return value
