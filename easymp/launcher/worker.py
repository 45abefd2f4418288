"""One rank of a launched script: runs it as python would, and on failure writes a record for the launcher.

Started by path, ``python worker.py script|module NAME arguments…``, so that it is found where the launcher was found.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import io
import json
import os
import runpy
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
# Beside elastic's error file, which has whole seconds only, and which elastic writes for functions.
RECORD = "failure.json"
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
    def summary(self) -> str:
        """The failure in a line."""
        if self.type:
            lines = self.message.strip().splitlines()
            return f"{self.type}: {lines[0]}" if lines else self.type
        if self.code < 0:
            return f"killed by {signal_name(-self.code)}"
        if self.code == RESTART:
            state = self.message or "its state"
            return f"told to stop, it saved {state} and can be started again (exit code {RESTART})"
        return f"exit code {self.code}"


def write_failure(path: str | None, rank: int, error: BaseException, code: int, tb: TracebackType | None) -> None:
    """Write this rank's failure beside `path`, elastic's error file; frames before `tb` are left out."""
    if not path:
        return
    from easymp.errors import RefusedError, SettingError, with_script_line

    kind, message, text = type(error).__name__, str(error), ""
    if isinstance(error, SystemExit):
        kind, message = "", "".join(getattr(error, "__notes__", ()))  # the checkpoint of a preempted run
        if error.code is not None and not isinstance(error.code, int):
            text = f"{error.code}\n"
    elif isinstance(error, (SettingError, RefusedError)):  # one line
        message = with_script_line(error)
    else:
        text = "".join(traceback.format_exception(type(error), error, tb))
    failure = Failure(rank, code, kind, message, text, time.time())
    unfinished = Path(path).with_name(f"{RECORD}.tmp")  # this rank may be killed while it writes
    unfinished.write_text(json.dumps(failure._asdict()), encoding="utf-8")
    unfinished.replace(unfinished.with_suffix(""))


def print_line(text: str) -> None:
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
    kind, name, *arguments = sys.argv[1:]
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)
    from easymp.base import env

    error_file, rank = env.read("TORCHELASTIC_ERROR_FILE"), env.integer("RANK") or 0
    if sys.platform == "linux":  # SIGTERM when the launcher is killed (PR_SET_PDEATHSIG = 1): no orphans
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    position = env.read("EASYMP_LAUNCHER")
    if position is not None:  # local ranks over all launchers of this machine; each numbers its own workers from 0
        launcher, _, launchers = position.partition(" of ")
        local_rank, size = env.integer("LOCAL_RANK") or 0, env.integer("LOCAL_WORLD_SIZE") or 1
        local = {"LOCAL_RANK": int(launcher) * size + local_rank, "LOCAL_WORLD_SIZE": int(launchers) * size}
        env.put({name: str(value) for name, value in local.items()} | {"EASYMP_LAUNCHER": None})
    if error_file:
        faulthandler.enable(file=open(Path(error_file).with_name(FATAL), "w"))  # noqa: SIM115 (for good)
    code = 0
    try:
        package = env.read("EASYMP_AS")
        if package is not None:
            importlib.import_module("easymp.compat.alias").install(package)
            env.put({"EASYMP_AS": None})
        if package == "deepspeed":  # whose launcher passes it
            arguments.insert(0, f"--local_rank={env.integer('LOCAL_RANK') or 0}")
        run_module(name, arguments) if kind == "module" else run_script(name, arguments)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code:
            write_failure(error_file, rank, end, code & 0xFF, None)
            sys.last_value = end  # exit handlers do not see the code; they do not wait for the others then
    except BaseException as error:
        code = 1
        write_failure(error_file, rank, error, code, _script_traceback(error))
        # As the interpreter does when it prints: exit handlers can see the error.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if code:
        threading.Thread(target=_exit_later, args=(code,), daemon=True).start()
    sys.exit(code)


def run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    absolute_path = os.path.abspath(path)
    _search_first(os.path.dirname(os.path.realpath(path)))
    module = _new_main_module()
    module.__file__, module.__loader__ = absolute_path, SourceFileLoader("__main__", absolute_path)
    with io.open_code(absolute_path) as file:
        code = compile(file.read(), absolute_path, "exec")
    exec(code, module.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    sys.argv = ["-m", *arguments]
    _search_first(os.getcwd())
    _new_main_module()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what ``python -m`` calls


def _search_first(folder: str) -> None:
    """Begin Python's search for modules in `folder`, or (``python -P``) leave out the entry for the script's folder."""
    sys.path[:1] = [] if sys.flags.safe_path else [folder]


def _new_main_module() -> ModuleType:
    """A fresh ``__main__``, which lasts to the end: exit handlers and unpickled objects look names up in it."""
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = module
    return module


def _script_traceback(error: BaseException) -> TracebackType | None:
    """The traceback without the frames before the script's first."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        tb = tb.tb_next
    return tb


def _exit_later(code: int) -> None:
    threading.Event().wait(FAREWELL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
