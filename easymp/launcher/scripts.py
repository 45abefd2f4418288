"""Scripts on several processes: from the command line, or from within the script itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..distributed import ranks
from ..errors import SettingError
from . import agent, binding, slurm
from .devices import default_processes
from .failure import RESTART, explain, signal_name
from .place import WAIT, Place

WORKER = str(Path(__file__).with_name("worker.py"))


def launch_script(
    script: str,
    arguments: Sequence[str] = (),
    processes: int | None = None,
    *,
    module: bool = False,
    max_restarts: int = 0,
    place: Place | None = None,
    grace: float = agent.GRACE,
    numa: bool = True,
    variables: Mapping[str, str | None] | None = None,
) -> int:
    """Run a script on several processes of this machine, and wait for it.

    On failure the first failing rank's own traceback goes to stderr, last and alone; where that rank is another node's, a line that
    names it.

    Args:
        script: path, or with `module` the name after ``python -m``.
        arguments: the script's own, as they are.
        processes: how many on this machine; None takes one an accelerator, or 1 without any.
        module: `script` is a module's name.
        max_restarts: how often all workers are started again after one failed.
        place: where the nodes meet; None for this machine alone.
        grace: seconds that the ranks have to save themselves when a signal comes. A second signal, 2 seconds later or more, kills them.
        numa: on Linux machines with several NUMA nodes, each rank runs on the cores of one; `binding` says which.
        variables: for the workers' environment.

    Returns:
        0, or the exit code of the rank that failed first: 1 for an exception, n for ``sys.exit(n)``, 128 + n for signal n. 75 where a
        signal came and all ranks saved themselves.

    Raises:
        SettingError: no such script, or an impossible number of processes.
        RefusedError: `grace` is below 0, or this torch cannot give it.
        WorldError: the nodes did not meet, or a port is taken.
    """
    check_script(script, module)
    if max_restarts < 0:
        raise SettingError(f"max_restarts={max_restarts} is below 0: use 0 for no restart")
    processes = checked(processes)
    cores, threads = binding.plan(processes, numa)
    # elastic fills in ${local_rank} in arguments; a doubled $ comes out as the user's own.
    words = [
        str(word).replace("$", "$$")
        for word in (WORKER, "module" if module else "script", cores, script, *arguments)
    ]
    flags = subprocess._args_from_interpreter_flags()  # -W, -X, -O … as multiprocessing hands them on
    try:
        agent.run(
            sys.executable,
            [*flags, *words],
            processes,
            place=place or Place(),
            max_restarts=max_restarts,
            monitor_interval=0.1,
            threads=threads,
            variables=dict(variables or {}),
            grace=grace,
        )
    except agent.RanksFailed as error:
        sys.stdout.flush()
        _say(explain(error.failures, error.size, error.node))
        return error.failures[0].exit_code
    except agent.Interrupted as error:
        by = f"stopped by {signal_name(error.number)}{f' on {error.node}' * bool(error.node)}"
        if error.saved:
            _say(f"{by}; the ranks saved their state and can be started again")
            return RESTART
        _say(by)
        return 128 + error.number
    return 0


def check_script(script: str, module: bool) -> None:
    """Raises SettingError where a script is no file."""
    if not module and not Path(script).is_file():
        raise SettingError(f"{script!r} is no file: pass the script's path, or -m and a module's name")


def launch(processes: int | None = None) -> None:
    """Make a plain ``python train.py`` run on several processes: call it first thing in the script.

    In a process that a launcher started as a rank, or srun or mpirun as one of several tasks, it returns at once, and so it does for
    one process. Otherwise this process runs the same command on `processes` workers, and exits with their exit code. In a pod that
    is announced as a node of several processes it takes that node's part.

    Args:
        processes: how many; None takes one an accelerator, or 1 without any.

    Raises:
        SettingError: there is no script to run again (a notebook, ``python -c``, an interactive session).
    """
    found, why = ranks.read()
    if (found is not None and found.processes == 1 and found.most is None) or (
        found is None and why == ranks.ONE
    ):
        return
    processes = checked(processes)
    if processes == 1 and found is None:
        return
    name, module = _this_script()
    meeting, variables = (None, {}) if found is None else slurm.meet(None, None, None, None, WAIT)
    sys.exit(launch_script(name, sys.argv[1:], processes, module=module, place=meeting, variables=variables))


def _this_script() -> tuple[str, bool]:
    """What python was started with: a path, or a module's name and True."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name.removesuffix(".__main__"), True
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        raise SettingError(
            "launch() starts the script again on every process, and an interactive session has no script: "
            "put the training into a function and call notebook_launcher(function, num_processes=…)"
        )
    return sys.argv[0] if os.path.isfile(sys.argv[0]) else path, False


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def checked(processes: int | None) -> int:
    """`processes`, or the number that suits this machine. Raises SettingError for what is no number of processes."""
    if processes is None:
        return default_processes()
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise SettingError(f"{processes!r} is no number of processes: use a whole number of at least 1")
    return processes
