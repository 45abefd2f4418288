"""One rank of a launched script: runs it as python would, and on failure writes a record for the launcher instead of printing.

Started by path, ``python worker.py script|module CORES NAME arguments…``, so that it is found where the launcher was found. CORES
is ``""`` or a mask for each local rank, such as ``"ff;ff00"``: one bit a core, as taskset has it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NamedTuple, NoReturn

FAREWELL = 30.0  # seconds that a failed rank has for its exit handlers, which may be waiting for ranks that wait for it
RESTART = 75  # EX_TEMPFAIL of sysexits.h: the rank has saved itself and wants to be started again
RECORD = "failure.json"  # beside elastic's error file, which has whole seconds only, and which elastic writes for functions
FATAL = "fatal.txt"  # Python's stacks at SIGSEGV and its like, by faulthandler


class Failure(NamedTuple):
    """One rank's end. `code` as `subprocess` has it: negative for a signal."""

    rank: int
    code: int
    type: str = ""
    message: str = ""
    text: str = ""  # the traceback, from the user's first line on
    timestamp: float = float("inf")  # seconds since the epoch; infinite where the rank could not write

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 + n for signal n."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def words(self) -> str:
        """The failure in a line."""
        if self.type:
            first = self.message.strip().splitlines()
            return f"{self.type}: {first[0]}" if first else self.type
        if self.code < 0:
            return f"killed by {signal_name(-self.code)}"
        if self.code == RESTART:
            return f"told to stop, it saved {self.message or 'its state'} and can be started again (exit code {RESTART})"
        return f"exit code {self.code}"


def record(path: str | None, rank: int, error: BaseException, code: int, tb: TracebackType | None) -> None:
    """Write this rank's failure beside `path`, elastic's error file; frames before `tb` are left out."""
    if not path:
        return
    kind, message, text = type(error).__name__, str(error), ""
    if not isinstance(error, SystemExit):
        text = "".join(traceback.format_exception(type(error), error, tb))
    elif error.code is not None and not isinstance(error.code, int):
        text = f"{error.code}\n"
    if isinstance(error, SystemExit):
        kind, message = "", "".join(getattr(error, "__notes__", ()))  # the checkpoint of a preempted run
    fresh = Path(path).with_name(f"{RECORD}.tmp")  # this rank may be killed while it writes
    failure = Failure(rank, code, kind, message, text, time.time())
    fresh.write_text(json.dumps(failure._asdict()), encoding="utf-8")
    fresh.replace(fresh.with_suffix(""))


def say(text: str) -> None:
    """Write a line of the launcher to stderr."""
    sys.stderr.write(f"easymp launch: {text}\n")
    sys.stderr.flush()


def signal_name(number: int) -> str:
    """``"SIGKILL (signal 9)"``."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def main() -> NoReturn:
    """Run the rank from its first line to its end."""
    kind, cores, name, *arguments = sys.argv[1:]
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)
    from easymp.base import env

    error_file, rank = env.read("TORCHELASTIC_ERROR_FILE"), env.integer("RANK", 0)
    if sys.platform == "linux":  # SIGTERM when the launcher is killed (PR_SET_PDEATHSIG = 1): no orphans
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if cores:
        mask = int(cores.split(";")[env.integer("LOCAL_RANK", 0)], 16)
        os.sched_setaffinity(0, {core for core in range(mask.bit_length()) if mask >> core & 1})
    _count_local_ranks(env)
    if error_file:
        faulthandler.enable(file=open(Path(error_file).with_name(FATAL), "w"))  # noqa: SIM115 (for good)
    code = 0
    try:
        if env.read("EASYMP_AS") is not None:
            importlib.import_module("easymp.compat.alias").install()
            env.put({"EASYMP_AS": None})
        run_module(name, arguments) if kind == "module" else run_script(name, arguments)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code:
            record(error_file, rank, end, code & 0xFF, None)
            sys.last_value = end  # exit handlers do not see the code; they do not wait for the others then
    except BaseException as error:
        code = 1
        record(error_file, rank, error, code, _from_script(error))
        # As the interpreter does when it prints: exit handlers can see the error.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if code:
        threading.Thread(target=_exit_later, args=(code,), daemon=True).start()
    sys.exit(code)


def run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    full = os.path.abspath(path)
    _search_first(os.path.dirname(os.path.realpath(path)))
    module = _become_main(full)
    module.__loader__ = SourceFileLoader("__main__", full)
    with io.open_code(full) as file:
        code = compile(file.read(), full, "exec")
    exec(code, module.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    _search_first(os.getcwd())
    sys.argv = ["-m", *arguments]
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and hasattr(spec.loader, "get_code") else None
    if code is None:
        raise ModuleNotFoundError(f"no module to run under the name {name!r}", name=name)
    sys.argv[0] = spec.origin or name
    module = _become_main(spec.origin)
    module.__spec__, module.__package__, module.__loader__ = spec, spec.parent, spec.loader
    exec(code, module.__dict__)


def _search_first(folder: str) -> None:
    """Begin Python's search for modules in `folder`, or (``python -P``) leave out the entry for the script's folder."""
    sys.path[:1] = [] if sys.flags.safe_path else [folder]


def _become_main(path: str | None) -> ModuleType:
    """A fresh ``__main__``, which lasts to the end: exit handlers and unpickled objects look names up in it."""
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = module
    return module


def _from_script(error: BaseException) -> TracebackType | None:
    """The traceback without this file's frames before the script's first."""
    here = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_filename == __file__:
        here = here.tb_next
    return here


def _count_local_ranks(env: ModuleType) -> None:
    """Count local ranks over all launchers of this machine; each numbers its own workers from 0."""
    beside = env.read("EASYMP_LAUNCHER")
    if beside is not None:
        launcher, _, launchers = beside.partition(" of ")
        rank, size = env.integer("LOCAL_RANK"), env.integer("LOCAL_WORLD_SIZE")
        local = {"LOCAL_RANK": int(launcher) * size + rank, "LOCAL_WORLD_SIZE": int(launchers) * size}
        env.put({name: str(value) for name, value in local.items()} | {"EASYMP_LAUNCHER": None})


def _exit_later(code: int) -> None:
    threading.Event().wait(FAREWELL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
