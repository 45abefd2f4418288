"""One rank of a launched script: runs it as python would, and on failure writes down how, instead of printing.

Started by path, ``python worker.py script|module CORES NAME arguments…``, so that it is found wherever the launcher was found. What CORES
may be, `binding` says.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import io
import os
import signal
import sys
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NoReturn

FAREWELL = 30.0  # seconds that a failed rank has for its exit handlers, which may be waiting for ranks that wait for it


def main() -> NoReturn:
    """The process's whole life."""
    kind, cores, name, *arguments = sys.argv[1:]
    root = str(Path(__file__).resolve().parent.parent.parent)
    sys.path[0] = root
    from easymp.base import env
    from easymp.launcher import binding, failure

    error_file, rank = env.read("TORCHELASTIC_ERROR_FILE"), env.integer("RANK", 0)
    _die_with_launcher()
    binding.bind(cores, env.integer("LOCAL_RANK", 0))
    _count_local_ranks(env)
    if error_file:
        faulthandler.enable(file=open(Path(error_file).with_name(failure.FATAL), "w"))  # noqa: SIM115 (for good)
    code = 0
    try:
        _module(name, arguments) if kind == "module" else _script(name, arguments)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code:
            failure.record(error_file, rank, end, code & 0xFF, None)
            sys.last_value = end  # exit handlers do not see the code, and shall not wait for the others
    except BaseException as error:
        code = 1
        failure.record(error_file, rank, error, code, _from_script(error))
        # As the interpreter does when it prints: exit handlers can see that this is no ordinary end.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if code:
        threading.Thread(target=_hurry, args=(code,), daemon=True).start()
    sys.exit(code)


def _script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    full = os.path.abspath(path)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    else:
        del sys.path[0]
    module = _become_main(full)
    module.__loader__ = SourceFileLoader("__main__", full)
    with io.open_code(full) as file:
        code = compile(file.read(), full, "exec")
    _execute(code, module)


def _module(name: str, arguments: list[str]) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    else:
        del sys.path[0]
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
    _execute(code, module)


def _become_main(path: str | None) -> ModuleType:
    """A fresh ``__main__``, which lasts to the end: exit handlers and whatever arrives from other processes look names up in it."""
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = module
    return module


def _execute(code: CodeType, module: ModuleType) -> None:
    exec(code, module.__dict__)


def _from_script(error: BaseException) -> object:
    """The traceback without this file's frames and the import machinery before the script's first."""
    here = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_filename == __file__:
        here = here.tb_next
    return here


def _die_with_launcher() -> None:
    """On Linux: SIGTERM when the launcher dies without a word (prctl, PR_SET_PDEATHSIG = 1), so that no rank is orphaned."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _count_local_ranks(env: ModuleType) -> None:
    """Where several launchers share this machine, each of them has numbered its own workers from 0."""
    beside = env.read("EASYMP_LAUNCHER")
    if beside is not None:
        launcher, _, launchers = beside.partition(" of ")
        rank, size = env.integer("LOCAL_RANK"), env.integer("LOCAL_WORLD_SIZE")
        local = {"LOCAL_RANK": int(launcher) * size + rank, "LOCAL_WORLD_SIZE": int(launchers) * size}
        env.put({name: str(value) for name, value in local.items()} | {"EASYMP_LAUNCHER": None})


def _hurry(code: int) -> None:
    threading.Event().wait(FAREWELL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
