"""Interpreters that start warm: `python` and `easymp` commands that are forks of a process which has imported torch.

Importing torch with torch._dynamo takes seconds in each process that a test starts, and most slow tests start several.
A server imports them once. Commands of a folder of their own send it their arguments, variables, working directory and
open files; it forks a process that runs as a fresh interpreter would, and tells the command how that ended. The command
passes signals on. The forks' ``sys.executable`` is that command, so that what they start is warm, too.

A command that asks for what a fork cannot give (options of the interpreter, variables that torch reads while it is
imported) starts a real interpreter. Tests of imports, of signals to process groups, and of a parent's death start real
ones by themselves: `COLD`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import io
import json
import linecache
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .site import PATH

COLD = sys.executable
PRELOAD = [
    "numpy", "psutil", "torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.optim",
    "torch.utils.data", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "easymp.accelerator", "easymp.training.prepare", "easymp.checkpoint.save", "easymp.checkpoint.load",
]  # fmt: skip
# Read while the interpreter, torch or the C library start: a fork has the server's.
READ_AT_START = (
    "LD_", "GLIBC_", "MALLOC_", "PYTHON", "TORCH_LOGS", "TORCHDYNAMO", "TORCH_COMPILE", "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip
HONOURED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE")
LENGTH = 8  # bytes of a request's length
ABOVE = 400  # file descriptors that no process of a test has

# The command: an interpreter without site packages, which starts in a hundredth of a second.
COMMAND = """#!{python} -IS
import os, sys, signal
SOCKET, PYTHON, STARTED, READ, HONOURED = {socket!r}, {python!r}, {started!r}, {read!r}, {honoured!r}
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
if name == "easymp":
    words = [os.path.join(os.path.dirname(PYTHON), name), *words]
while words and words[0] in ("-u", "-B"):
    os.environ["PYTHONUNBUFFERED" if words.pop(0) == "-u" else "PYTHONDONTWRITEBYTECODE"] = "1"
asked = dict((n, v) for n, v in os.environ.items() if n.startswith(READ) and n not in HONOURED)
plain = words and (words[0] in ("-c", "-m") or (words[0][0] != "-" and os.path.isfile(words[0])))
if asked != STARTED or not plain:
    os.execv(PYTHON, [PYTHON, *words])
import _socket, json
ignored = [int(n) for n in (signal.SIGINT, signal.SIGQUIT) if signal.getsignal(n) is signal.SIG_IGN]
link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
link.connect(SOCKET)
def tell(number, frame):
    link.send(bytes([number]))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    if number not in ignored:
        signal.signal(number, tell)
files = [n for n in map(int, os.listdir("/proc/self/fd")) if n != link.fileno()]
files = [n for n in files if os.path.exists("/proc/self/fd/%d" % n)]
request = json.dumps(dict(words=words, executable=os.path.join({folder!r}, "python"), files=files, ignored=ignored,
    variables=dict(os.environ), directory=os.getcwd(), mask=os.umask(0o22))).encode()
import array
rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", files).tobytes())
link.sendmsg([len(request).to_bytes({length}, "big")], [rights])
while request:
    request = request[link.send(request):]
answer = b""
while len(answer) < 4:
    part = link.recv(4)
    if not part:
        sys.exit("the server of warm interpreters has ended")
    answer += part
code = int.from_bytes(answer, "big", signed=True)
if code < 0:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def write_commands(folder: Path, address: str, started: dict[str, str]) -> None:
    facts = {"read": READ_AT_START, "honoured": HONOURED, "folder": str(folder), "length": LENGTH}
    text = COMMAND.format(python=COLD, socket=address, started=started, **facts)
    for name in ("python", "python3", "easymp"):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


# -- the server --------------------------------------------------------------------------------------------------------


class Server:
    """Forks a process for each request, and ends with all of them when its standard input ends."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(listener, selectors.EVENT_READ, None)
        self._waiting.register(0, selectors.EVENT_READ, None)
        started_with = ["", *os.environ["PYTHONPATH"].split(os.pathsep)]
        self._path = [folder for folder in sys.path if folder not in started_with]
        self._connections: dict[int, socket.socket] = {}  # of the processes that run

    def serve(self) -> None:
        while True:
            for key, _ in self._waiting.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == 0:
                    for process in self._connections:
                        os.kill(process, signal.SIGKILL)
                    return
                elif key.data not in self._connections:
                    continue  # its process has ended, and its command was killed at the same time
                elif isinstance(key.fileobj, socket.socket):
                    self._pass_on(key.fileobj, key.data)
                else:
                    self._ended(key.fd, key.data)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            request, files = receive(connection)
        except (OSError, ValueError):
            connection.close()
            return
        process = os.fork()
        if not process:
            become(request, files, self._path)
        for descriptor in files:
            os.close(descriptor)
        self._connections[process] = connection
        self._waiting.register(connection, selectors.EVENT_READ, process)
        self._waiting.register(os.pidfd_open(process), selectors.EVENT_READ, process)

    def _pass_on(self, connection: socket.socket, process: int) -> None:
        """Send the process the signals of its command; one whose command has been killed is killed."""
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        if not numbers:
            self._waiting.unregister(connection)

    def _ended(self, descriptor: int, process: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        self._waiting.unregister(descriptor)
        os.close(descriptor)
        connection = self._connections.pop(process)
        with contextlib.suppress(KeyError):
            self._waiting.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(code.to_bytes(4, "big", signed=True))
        connection.close()


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the file descriptors that came with it."""
    head, files, _, _ = socket.recv_fds(connection, LENGTH, 250)
    rest, text = int.from_bytes(head, "big"), bytearray()
    while len(text) < rest:
        data = connection.recv(rest - len(text))
        if not data:
            raise ValueError("the command ended")
        text += data
    return json.loads(text), files


# -- the process that it forks -----------------------------------------------------------------------------------------


def become(request: dict[str, Any], files: list[int], path: list[str]) -> None:
    """Become the interpreter of a request, and end with its exit code."""
    code = 1
    try:
        take_files(request["files"], files)
        os.environ.clear()
        os.environ.update(request["variables"])
        os.chdir(request["directory"])
        os.umask(request["mask"])
        for number in (signal.SIGINT, signal.SIGQUIT):
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
        start_afresh(request, path)
        code = run(request["words"])
    finally:
        os._exit(code)


def take_files(numbers: list[int], files: list[int]) -> None:
    """Hold what the command held, at the same numbers, and nothing else."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE) for descriptor in files]
    os.closerange(0, ABOVE)
    for number, descriptor in zip(numbers, high, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        errors = "backslashreplace" if number == 2 else "strict"
        binary = open(number, "wb", closefd=False)  # noqa: SIM115
        lines = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(binary, "utf-8", errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def start_afresh(request: dict[str, Any], path: list[str]) -> None:
    """What an interpreter reads when it starts."""
    import numpy
    import torch

    variables = os.environ
    sys.executable, sys.orig_argv = request["executable"], [request["executable"], *request["words"]]
    sys.dont_write_bytecode = bool(variables.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:] = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *path]
    importlib.invalidate_caches()
    easymp = importlib.machinery.PathFinder.find_spec("easymp")
    if easymp is None or easymp.origin != sys.modules["easymp"].__file__:  # PYTHONPATH leads to a copy
        for name in [name for name in sys.modules if name.partition(".")[0] == "easymp"]:
            del sys.modules[name]
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    numpy.random.seed()
    random.seed()
    tempfile.tempdir = None
    gc.enable()


def run(words: list[str]) -> int:
    """Run ``-c CODE``, ``-m MODULE`` or a script, each with its arguments; returns the exit code."""
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    code = 0
    try:
        execute(words, main)
    except SystemExit as error:
        if isinstance(error.code, int) or error.code is None:
            code = error.code or 0
        else:
            print(error.code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    shut_down = threading._shutdown  # type: ignore[attr-defined]
    for finish in (shut_down, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(OSError, ValueError):
            finish()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code & 0xFF


def execute(words: list[str], main: types.ModuleType) -> None:
    first, *others = words
    if first == "-m":
        sys.argv = ["-m", *others[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(others[0])  # type: ignore[attr-defined]
        return
    if first == "-c":
        sys.argv, name, text = ["-c", *others[1:]], "<string>", others[0]
        sys.path.insert(0, "")
    else:
        sys.argv, name = [first, *others], first
        sys.path.insert(0, os.path.dirname(os.path.realpath(first)))
        text = Path(first).read_bytes().decode()
        main.__file__ = first
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", first)
    linecache.checkcache(name)
    exec(compile(text, name, "exec"), main.__dict__)


def serve(address: str) -> None:
    gc.disable()
    for name in PRELOAD:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("sklearn.datasets")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"ready\n")
    Server(listener).serve()


# -- in the test session -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def commands() -> Iterator[Path]:
    """A folder with the commands, while a server runs."""
    with tempfile.TemporaryDirectory(prefix="warm-") as name:
        folder = Path(name)
        address = str(folder / "socket")
        started = {n: v for n, v in os.environ.items() if n.startswith(READ_AT_START) and n not in HONOURED}
        server = subprocess.Popen(
            [COLD, "-c", "import sys; from tests.warm import serve; serve(sys.argv[1])", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": PATH},
        )
        assert server.stdin is not None and server.stdout is not None
        try:
            if server.stdout.readline() != b"ready\n":
                raise RuntimeError("the server of warm interpreters did not start: see its error above")
            write_commands(folder, address, started)
            yield folder
        finally:
            server.stdin.close()
            server.wait()
            server.stdout.close()
