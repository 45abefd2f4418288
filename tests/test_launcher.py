"""Launching, with real processes. Scripts that need no torch import none, so most of these take half a second."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from easymp import RefusedError, SettingError, WorldError, debug_launcher, notebook_launcher
from easymp.cli import main
from easymp.launcher.agent import blame
from easymp.launcher.entrypoints import default_processes
from easymp.launcher.rendezvous import RendezvousConfig, SingleNode
from easymp.launcher.worker import Failure

from .examples.run import environment
from .pool import hold_port


@pytest.fixture
def script(tmp_path):
    """Writes a script, returns its path."""

    def write(text, name="train.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        head = "import os, sys, time, signal\nrank = int(os.environ.get('RANK', -1))\n"
        path.write_text(head + textwrap.dedent(text))
        return str(path)

    return write


def python(*arguments, before=()) -> subprocess.Popen:
    """A python that knows easymp, with its output in pipes."""
    command = [*before, sys.executable, *arguments]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def launched(path, arguments=(), processes=2, *flags) -> int:
    return main(["launch", "--processes", str(processes), *flags, path, *arguments])


def started(path, *arguments) -> subprocess.Popen:
    """`easymp launch` of two processes, as a process of its own."""
    return python("-m", "easymp", "launch", "--processes", "2", path, *map(str, arguments))


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 100
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.05)


# -- what a script sees ------------------------------------------------------------------------------------------------

TELL = """
import atexit, json, pickle
class Thing: pass
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
word = f"rank {rank} ends\\n"
atexit.register(lambda: sys.stdout.write(word))
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
main = sys.modules["__main__"]
seen = {"argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "main": main.rank,
        "torch": "torch" in sys.modules, "package": main.__package__, **{n: os.environ.get(n) for n in names}}
open(sys.argv[1] + str(rank), "w").write(json.dumps(seen))
"""


def test_script_sees_what_plain_python_shows_it(script, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path, target = script(TELL), str(tmp_path / "told")
    script_arguments = [target, "--processes", "9", "-m", "--", "${local_rank}", "$$HOME", "a b", ""]
    assert launched(path, script_arguments) == 0
    for rank in (0, 1):
        facts_of_rank = json.loads((tmp_path / f"told{rank}").read_text())
        facts = {"name": "__main__", "file": path, "path": str(tmp_path), "package": None, "main": rank}
        facts |= {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": "2"}
        facts |= {"argv": [path, *script_arguments], "MASTER_ADDR": "127.0.0.1"}
        assert facts_of_rank == facts_of_rank | facts
        assert not facts_of_rank["torch"]  # the script is the first to import it
        assert int(facts_of_rank["OMP_NUM_THREADS"]) >= 1
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 ends", "rank 1 ends"]
    path = script(TELL, "pkg/train.py")
    monkeypatch.chdir(tmp_path)
    assert launched("pkg.train", [target, "x"], 1, "-m") == 0
    facts_of_rank = json.loads((tmp_path / "told0").read_text())
    assert facts_of_rank["argv"] == [path, target, "x"]
    assert (facts_of_rank["path"], facts_of_rank["package"]) == (str(tmp_path), "pkg")


# -- when a rank fails -------------------------------------------------------------------------------------------------


def test_first_failing_rank_comes_last_and_alone(script, capfd):
    path = script("""
        def inner():
            raise ValueError("the cause")
        if rank == 1:
            inner()
        def fail(number, frame):
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        signal.signal(signal.SIGTERM, fail)  # told to end, which comes after the cause
        time.sleep(60)
    """)
    assert launched(path) == 1
    err = re.sub(r"\n +[~^]+(?=\n)", "", capfd.readouterr().err)  # below calls, since Python 3.13
    assert err == (
        "rank 1 of 2 failed first: ValueError: the cause\n"
        "Traceback (most recent call last):\n"
        f'  File "{path}", line 7, in <module>\n    inner()\n'
        f'  File "{path}", line 5, in inner\n    raise ValueError("the cause")\n'
        "ValueError: the cause\n"
    )


def test_a_wrong_setting_is_one_line(script, capfd):
    path = script("import easymp; easymp.Accelerator(nonfinite='rise')")
    line = f"SettingError: nonfinite='rise' is not one of raise, skip, warn, did you mean 'raise'? ({path}:3)\n"
    assert launched(path, [], 1) == 1
    assert capfd.readouterr().err == f"rank 0 of 1 failed first: {line}"
    plain = python(path)
    assert (plain.communicate()[1], plain.returncode) == (line, 1)


@pytest.mark.parametrize(
    ("statement", "code", "text"),
    [
        ("sys.exit(7)", 7, "exit code 7\n"),
        ("sys.exit('a last word')", 1, "exit code 1\na last word\n"),
        ("os._exit(5)", 5, "exit code 5\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL (signal 9)\n"),
        ("import ctypes; ctypes.string_at(0)", 139, "killed by SIGSEGV (signal 11)\nFatal Python error: S"),
    ],
)
def test_exit_codes_are_kept(script, capfd, statement, code, text):
    assert launched(script(f"if rank == 1:\n    {statement}\ntime.sleep(60)")) == code
    assert capfd.readouterr().err.startswith(f"rank 1 of 2 failed first: {text}")


def test_exit_handlers_of_a_rank_see_its_code_so_that_it_waits_for_no_other(script, tmp_path):
    """tests/distributed/test_world.py has a world that is left so."""
    path = script("""
        import atexit
        atexit.register(lambda: open(sys.argv[1], "w").write(repr(sys.last_value)))
        sys.exit(3)
    """)
    assert launched(path, [str(tmp_path / "seen")], 1) == 3
    assert (tmp_path / "seen").read_text() == "SystemExit(3)"


@pytest.mark.slow  # torch leaves a group with a stopped rank after 30 seconds
def test_a_stopped_rank_is_named_by_the_one_that_waits(script):
    path = script("""
        import torch
        from easymp import Accelerator, Settings
        acc = Accelerator(cpu=True, settings=Settings(timeout=2))
        acc.wait_for_everyone()
        if rank == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGSTOP)
        acc.gather(torch.ones(1))
    """)
    arguments = ("-m", "easymp", "launch", "--processes", "2", "--grace", "0", path)
    for stopped, run in enumerate([python(*arguments, "0"), python(*arguments, "1")]):
        text = run.communicate(timeout=100)[1]
        assert run.returncode == 1
        first = text.partition("failed first: ")[2]
        assert first.startswith(f"WorldError: rank {1 - stopped} gave up in gather: timed out"), text
        assert "has ended, was killed, or is stopped" in first


def test_restart_runs_all_again(script, tmp_path, capfd):
    path = script("""
        marker = sys.argv[1] + str(rank)
        if rank == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if not os.path.exists(sys.argv[1] + "1"):
            time.sleep(30)
        open(sys.argv[1] + "done" + str(rank), "w").write(os.environ["TORCHELASTIC_RESTART_COUNT"])
    """)
    assert launched(path, [str(tmp_path / "x")], 2, "--max-restarts", "1") == 0
    assert (tmp_path / "xdone1").read_text() == "1"
    assert capfd.readouterr().err == "easymp launch: a rank failed; restart 1\n"


def test_the_port_of_the_ranks_is_nobody_else_s_before_they_open_it():
    node = SingleNode(RendezvousConfig())
    port = node.next_rendezvous().bootstrap_store_info.master_port
    try:
        if sys.platform == "linux":  # elsewhere a port cannot be kept, but its number is another each time
            with socket.socket() as program, pytest.raises(OSError, match="in use"):
                program.bind(("127.0.0.1", port))
        for libuv in (True, False):
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=libuv)
            del store  # as one rank's world after another
        assert node.next_rendezvous().bootstrap_store_info.master_port != port
        with socket.socket() as program:
            program.bind(("127.0.0.1", port))
    finally:
        node.close(True)


def test_blame():
    """From the likeliest cause to consequences."""
    failures = [
        Failure(4, -signal.SIGKILL),
        Failure(6, 1, "TimeoutError", "download timed out", "", 9.0),  # a user's own words mean no peer
        Failure(0, 1, "ValueError", "x", "", 10.0),
        Failure(1, 1, "KeyError", "y", "", 10.2),  # by time, to fractions of a second
        Failure(5, 3),
        Failure(2, 1, "RuntimeError", "[../gloo/pair.cc] Connection closed by peer", "", 9.0),
        Failure(3, -signal.SIGTERM),
    ]
    assert sorted(failures[3:] + failures[:3], key=blame) == failures


# -- signals: tests/test_nodes.py has SIGTERM --------------------------------------------------------------------------


@pytest.fixture
def waiting(script, tmp_path) -> subprocess.Popen:
    """A launcher whose ranks wait; each has written its process's number."""
    path = script("""
        def save(number, frame):
            time.sleep(0.3)
            open(sys.argv[1] + str(rank), "w").write(str(number))
            sys.exit(0)
        signal.signal(signal.SIGINT, save)
        open(sys.argv[1] + str(rank), "w").write(str(os.getpid()))
        os.rename(sys.argv[1] + str(rank), sys.argv[1] + "ready" + str(rank))
        time.sleep(60)
    """)
    process = started(path, tmp_path / "x")
    wait_for(tmp_path / "xready0", tmp_path / "xready1")
    return process


def test_ctrl_c_reaches_the_workers_and_gives_them_time(waiting, tmp_path):
    waiting.send_signal(signal.SIGINT)
    assert waiting.communicate(timeout=100) == ("", "stopped by SIGINT (signal 2)\n")
    assert waiting.returncode == 130
    assert [(tmp_path / f"x{rank}").read_text() for rank in (0, 1)] == ["2"] * 2


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_rank_outlives_its_launcher(waiting, tmp_path):
    waiting.kill()
    waiting.communicate(timeout=100)
    pids, deadline = [int((tmp_path / f"xready{rank}").read_text()) for rank in (0, 1)], time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_rank_whose_loader_has_workers_saves_itself_at_a_signal(script, tmp_path):
    path = script("""
        import torch
        from torch.utils.data import DataLoader
        from easymp import Accelerator
        acc = Accelerator(cpu=True, project_dir=sys.argv[1], save_on_signal=True, log_with="none")
        model = torch.nn.Linear(1, 1)
        loader = DataLoader(torch.zeros(4000, 1), batch_size=1, num_workers=2)
        model, optimizer, loader = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for batch in loader:
            acc.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            open(sys.argv[1] + "begun", "w").close()
            time.sleep(0.05)
    """)
    launcher = started(path, tmp_path / "run")
    wait_for(tmp_path / "runbegun")
    launcher.send_signal(signal.SIGTERM)
    stderr = launcher.communicate(timeout=100)[1]
    assert launcher.returncode == 75, stderr
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


# -- from within the script, and functions -----------------------------------------------------------------------------


def test_launch_runs_the_same_command_again(script, tmp_path):
    path = script("""
        from easymp import launch
        launch(2)
        open(sys.argv[1] + str(rank), "w").write(" ".join(sys.argv))
        while not (os.path.exists(sys.argv[1] + "0") and os.path.getsize(sys.argv[1] + "0")):
            time.sleep(0.05)
        sys.exit(4 * rank)
    """)
    process = python(path, str(tmp_path / "x"), "--own")
    _, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (4, "rank 1 of 2 failed first: exit code 4\n")
    assert sorted(p.name for p in tmp_path.glob("x*")) == ["x0", "x1"]  # the caller itself went no further
    assert (tmp_path / "x0").read_text() == f"{path} {tmp_path / 'x'} --own"


def test_one_process_an_accelerator(monkeypatch):
    for devices, cpu, processes in ((0, "0", 1), (4, "0", 4), (4, "1", 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=devices: number)
        monkeypatch.setenv("EASYMP_CPU", cpu)
        assert default_processes() == processes


def test_functions_run_on_real_ranks_with_exit_handlers_of_their_own_and_return_in_order(capfd, tmp_path):
    offset = 10

    def note(name):
        (tmp_path / f"{name}-{os.environ.get('RANK')}").touch()

    def summed(start):  # a closure: nothing that could be pickled
        assert getattr(sys, "last_value", None) is None
        atexit.register(note, "child")
        dist.init_process_group("gloo")
        value = torch.tensor(float(start + offset + dist.get_rank()))
        dist.all_reduce(value)
        dist.destroy_process_group()
        return dist.get_rank.__name__, value, os.environ["EASYMP_CPU"], torch.get_num_threads()

    before = signal.getsignal(signal.SIGINT)
    atexit.register(note, "parent")
    try:
        assert debug_launcher(summed, (1,)) == [("get_rank", torch.tensor(23.0), "1", 1)] * 2
    finally:
        atexit.unregister(note)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child-0", "child-1"]
    assert signal.getsignal(signal.SIGINT) is before
    assert debug_launcher(lambda: lambda: 1, num_processes=1) == [None]
    assert "the function's result cannot be sent back" in capfd.readouterr().err


def test_function_that_fails():
    def fail():
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("in the cell")
        time.sleep(30)

    with pytest.raises(WorldError) as caught:
        debug_launcher(fail)
    first, second, *lines = str(caught.value).splitlines()
    assert first == "rank 1 of 2 failed first: ZeroDivisionError: in the cell"
    assert (second, lines[-1]) == ("Traceback (most recent call last):", "ZeroDivisionError: in the cell")
    assert "in fail" in lines[0] and "easymp" not in str(caught.value)


def test_notebook_options_are_honoured():
    def read_variables():
        names = ("EASYMP_MIXED_PRECISION", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError
        return [os.environ.get(name) for name in names]

    reservation, port = hold_port()
    with reservation:
        options = {"mixed_precision": "bf16", "use_port": str(port), "max_restarts": 1}
        results = notebook_launcher(read_variables, num_processes=2, **options)
    assert results == [["bf16", str(port), "2", "1"]] * 2


def test_refusals(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(RefusedError, match="restart the notebook's kernel"):
            notebook_launcher(print, num_processes=2)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        with pytest.raises(RefusedError, match="process group is running"):
            debug_launcher(print)
    with pytest.raises(SettingError, match="is not a port"):
        notebook_launcher(print, num_processes=2, use_port="http")
    for name, value in (
        *(("num_nodes", 2), ("node_rank", 1), ("master_addr", "a"), ("rdzv_backend", "etcd"), ("rdzv_endpoint", "a:1")),
        *(("rdzv_conf", {"timeout": 10}), ("rdzv_id", "7"), ("log_line_prefix_template", "")),
    ):
        with pytest.raises(RefusedError, match=f"{name}=.*easymp launch"):
            notebook_launcher(print, num_processes=2, **{name: value})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nodes'"):
        notebook_launcher(print, num_processes=2, nodes=2)
    assert notebook_launcher(int, num_processes=1, num_nodes=1, rdzv_backend="static") == [0]
    err = python("-c", "from easymp import launch; launch(2)").communicate(timeout=100)[1]
    assert "SettingError" in err and "notebook_launcher" in err


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank(script, tmp_path):
    path = script("""
        import torch
        from easymp import Accelerator, Settings

        acc = Accelerator(mixed_precision="no", seed=0, settings=Settings(timeout=20))
        model = torch.nn.Linear(2, 1)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in range(3):
            if step == 1 and acc.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            acc.backward(model(torch.full((1, 2), float(rank))).sum())
            optimizer.step()
            optimizer.zero_grad()
        whole = acc.gather(model.weight[None])
        open(sys.argv[1] + str(rank), "w").write(str([acc.num_processes, acc.plan.strategy.value, whole.tolist()]))
    """)
    arguments = "-m torch.distributed.run --nproc-per-node 2 --standalone --max-restarts 1".split()
    process = python(*arguments, path, str(tmp_path / "x"))
    stderr = process.communicate(timeout=250)[1]
    assert process.returncode == 0, stderr
    assert (tmp_path / "x0").read_text() == (tmp_path / "x1").read_text()
