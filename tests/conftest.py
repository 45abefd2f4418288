"""Fixtures and checks that every test gets."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch

from .pool import PATIENCE, Ranks, changed_switches, leaked_threads, names_from_the_hosts_file_only, read_switches
from .site import CPUS, PATH, VARIABLE, install
from .warm import COLD
from .warm import commands as warm_commands

install()  # before easymp is imported
# No time limits, which a busy machine passes, and in each run the same examples: what fails, fails for a change of the
# code. `pytest --hypothesis-profile=default` looks for others.
hypothesis.settings.register_profile(
    "same",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("same")

# Written by libraries at import or first use, and by pytest itself.
FOREIGN_VARIABLES = tuple("PYTEST_ KMP_ TORCHINDUCTOR_ TRITON_ MPL TF_ GRPC_ CUDA_MODULE_LOADING".split())
DRIVERS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")  # what a GPU's driver keeps open once it is in use
SLOW = 300  # seconds of a slow test that says none
FOLDER = Path("/proc/self/fd")
SPARE_DESCRIPTORS = 40  # pipes of the pool's workers, libraries loaded by a test


def pytest_configure() -> None:
    names_from_the_hosts_file_only()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PATH, os.environ.get("PYTHONPATH")]))
    # A shell that runs tests in the background has them ignore these, and so would what they start.
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # what tests start imports byte code, as from an installed package
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # beside the workers, two threads on models of this size take several times as long
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked ``reads_hardware`` runs under each recorded processor."""
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if "reads_hardware" in marks and "real_cpu" not in marks:
        metafunc.parametrize("_processor", CPUS, indirect=True)


@pytest.fixture(autouse=True)
def _processor(request: pytest.FixtureRequest) -> Iterator[None]:
    """A recorded processor, so that the suite says the same on every machine; ``real_cpu`` tests see the real one."""
    processor = "real" if request.node.get_closest_marker("real_cpu") else getattr(request, "param", None)
    if processor is None:
        yield
        return
    from easymp.hardware.accelerators import _detect

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, processor)
        _detect.cache_clear()
        yield
    _detect.cache_clear()


# -- which tests run ---------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run when asked for by ``-m``, and have more time; GPU tests where there is a GPU.

    Those with the longest limits begin first, so that no worker waits for the last of another.
    """
    limits = dict.fromkeys(items, 0.0)
    for item in items:
        if item.get_closest_marker("slow"):
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SLOW))
            limits[item] = item.get_closest_marker("timeout").args[0]
    items.sort(key=lambda item: -limits[item])
    if not config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if item.get_closest_marker("slow") is None]
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not torch.cuda.is_available():
        why = "none is here" if torch.version.cuda else "this torch is built without CUDA"
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU; {why}"))


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at what has been imported: it takes a quarter of a second, in each test."""
    gc.collect()
    gc.freeze()


# -- several processes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """``ranks(function, *args, processes=2, timeout=100, env=None)``: a list of return values, one a rank."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test marked ``on_ranks(processes)`` runs on each of them, with its arguments."""
    if (mark := pyfuncitem.get_closest_marker("on_ranks")) is None:
        return None
    arguments = [pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters]
    pyfuncitem._request.getfixturevalue("ranks")(pyfuncitem.obj, *arguments, processes=mark.args[0])
    return True


# -- processes of their own --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _warm_commands() -> Iterator[Path]:
    with warm_commands() as folder:
        yield folder


@pytest.fixture
def warm(_warm_commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python`` and ``easymp``, on PATH and as sys.executable, are forks with torch imported; see `tests.warm`."""
    folders = [str(_warm_commands), str(Path(COLD).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    monkeypatch.setattr(sys, "executable", str(_warm_commands / "python"))


@pytest.fixture(autouse=True)
def _slow_tests_start_warm(request: pytest.FixtureRequest) -> None:
    """A slow test without the mark ``cold`` starts its processes warm."""
    if request.node.get_closest_marker("slow") and not request.node.get_closest_marker("cold"):
        request.getfixturevalue("warm")


# -- what a test may not leave behind ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fails the test that leaves something.

    Variables, directory, threads, a process group, open files, torch's switches.
    """
    environment, directory, threads = dict(os.environ), os.getcwd(), set(threading.enumerate())
    descriptors, switches = _descriptors(), read_switches()
    yield
    threads_left = leaked_threads(threads, lambda t: not t.daemon or t.name.startswith("easymp"))
    left = [
        *_changed_variables(environment),
        *([f"working directory {os.getcwd()}"] if os.getcwd() != directory else []),
        *(f"thread {name}" for name in threads_left),
        *_open(),
        *_unclosed(descriptors),
        *changed_switches(switches),
    ]
    os.chdir(directory)
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


def _changed_variables(before: dict[str, str]) -> list[str]:
    after = dict(os.environ)
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    os.environ.clear()
    os.environ.update(before)
    ours = sorted(name for name in changed if not name.startswith(FOREIGN_VARIABLES))
    os.environ.update({name: after[name] for name in changed if name not in ours and name in after})
    return [f"environment variable {name}={after.get(name)!r}, was {before.get(name)!r}" for name in ours]


def _open() -> Iterator[str]:
    state = sys.modules.get("easymp.training.state")
    if state is not None and state.OPEN_RUNS:
        gc.collect()  # one that nobody holds is closed by that
        gc.freeze()  # what is left lives on: the next collection need not look at it
    for accelerator in state.accelerators() if state is not None else ():
        yield f"an open {type(accelerator).__name__}"
        accelerator.end_training()
    # the world of one process, which easymp's functions join by themselves
    if state is not None and state.OPEN_RUNS:
        state.close_runs(lambda run: True)
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        yield "a process group"
        dist.destroy_process_group()


def _descriptors() -> dict[int, str]:
    """What each open descriptor leads to.

    A path, ``socket:[number]``, ``pipe:[number]`` … Empty where there is no /proc.
    """
    found = {}
    for link in FOLDER.iterdir() if FOLDER.exists() else ():
        try:
            found[int(link.name)] = os.readlink(link)
        except OSError:
            pass  # the listing's own
    return found


def _unclosed(before: dict[int, str]) -> Iterator[str]:
    known = set(before.values())
    deadline = time.monotonic() + PATIENCE
    while True:
        new = {n: t for n, t in _descriptors().items() if t not in known and not t.startswith(DRIVERS)}
        paths = (t for t in new.values() if t.startswith("/"))
        files = sorted(t for t in paths if not t.startswith(("/dev/", "/proc/", "/memfd:")))
        # looking for the peer of each takes long
        plugged = any(target.startswith("socket:") for target in new.values())
        sockets = [c for c in psutil.Process().net_connections("inet") if c.fd in new] if plugged else []
        if (not files and not sockets and len(new) <= SPARE_DESCRIPTORS) or time.monotonic() > deadline:
            break
        gc.collect()  # a reference cycle may hold what is as good as closed
        time.sleep(0.05)
    for path in files:
        yield f"open file {path}"
    for socket in sockets:
        yield f"open socket {tuple(socket.laddr)} {socket.status}"
    if len(new) > SPARE_DESCRIPTORS:
        yield f"{len(new)} new descriptors"
