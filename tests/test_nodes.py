"""Several machines: launchers that meet on the loopback, each with processes of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from easymp import env

from .pool import free_port

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).resolve().parent.parent)
QUICK = """
import sys
from easymp.launcher import meeting
meeting.LAST_CALL, meeting.HEARTBEAT, meeting.MISSED = 1, 1, 4
from easymp.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script, returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text("import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def node(request):
    """Starts a launcher as one of several; all are gone at the end."""
    port, started = free_port(), []

    def start(rank: int | None, *words: str, nodes: str = "2") -> subprocess.Popen:
        place = ["--nodes", nodes, "--main-address", f"127.0.0.1:{port}", *(() if rank is None else ("--node-rank", str(rank)))]
        path = os.pathsep.join(filter(None, [ROOT, env.read("PYTHONPATH")]))
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", QUICK, "launch", *place, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env.merged({"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}),
            )
        )
        return started[-1]

    start.port = port
    yield start
    for process in started:
        process.kill()
        process.communicate()


def ends(*processes: subprocess.Popen, seconds: float = 60) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    deadline = time.monotonic() + seconds
    said = [process.communicate(timeout=max(1, deadline - time.monotonic())) for process in processes]
    return [(process.returncode, *words) for process, words in zip(processes, said)]


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.05)


def test_ranks_are_in_the_order_of_the_node_ranks_and_the_first_failure_is_told_to_all(script, node):
    path = script("""
        sys.stdout.write(f"{rank} of {os.environ['WORLD_SIZE']}, local {os.environ['LOCAL_RANK']}\\n")
        sys.stdout.flush()
        if rank == 2:
            time.sleep(0.5)
            raise ValueError("the cause")
        time.sleep(60)
    """)
    nodes = [node(rank, "--processes", "2", path) for rank in (1, 0)]
    (code, out, err), (main_code, main_out, main_err) = ends(*nodes)
    assert sorted(out.splitlines()) == ["2 of 4, local 0", "3 of 4, local 1"]
    assert sorted(main_out.splitlines()) == ["0 of 4, local 0", "1 of 4, local 1"]
    assert (code, main_code) == (1, 1)
    assert err.startswith("rank 2 of 4 failed first: ValueError: the cause\nTraceback")
    assert err.endswith("ValueError: the cause\n")
    where = f"node 1 ({socket.gethostname()})"
    assert main_err == f"rank 2 of 4 failed first, on {where}: ValueError: the cause; the launcher there says more\n"


def test_a_signal_to_all_launchers_reaches_all_ranks_once_and_one_that_saves_longer_than_the_grace_is_killed(
    script, node, tmp_path
):
    path = script("""
        caught = []
        signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
        open(sys.argv[1] + "ready" + str(rank), "w").close()
        while not caught:
            time.sleep(0.05)
        time.sleep(1 if rank == 0 else 60)
        open(sys.argv[1] + str(rank), "w").write(str(len(caught)))
    """)
    target = str(tmp_path / "x")
    nodes = [node(0, path, target), node(1, "--grace", "2", path, target)]
    wait_for(tmp_path / "xready0", tmp_path / "xready1")
    for each in nodes:
        each.send_signal(signal.SIGTERM)
        each.send_signal(signal.SIGTERM)  # as from a program that signals a group and its leader
    for code, _, err in ends(*nodes):
        assert (code, err) == (143, "stopped by SIGTERM (signal 15)\n")
    assert (tmp_path / "x0").read_text() in ("1", "2")
    assert not (tmp_path / "x1").exists()


def test_one_launcher_that_is_stopped_ends_a_run_of_a_fixed_size(script, node, tmp_path):
    path = script("open(sys.argv[1] + str(rank), 'w').close(); time.sleep(60)")
    nodes = [node(rank, "--max-restarts", "2", path, str(tmp_path / "x")) for rank in (0, 1)]
    wait_for(tmp_path / "x0", tmp_path / "x1")
    nodes[1].send_signal(signal.SIGTERM)
    (code, _, err), (_, _, other) = ends(*nodes)
    assert (code, err) == (143, f"stopped by SIGTERM (signal 15) on node 1 ({socket.gethostname()})\n")
    assert other == "stopped by SIGTERM (signal 15)\n"


def test_who_cannot_meet_says_why(script, node):
    path = script("")
    with socket.create_server(("127.0.0.1", node.port)):
        [(code, _, err)] = ends(node(0, path))
        assert code == 1
        assert err.startswith(f"easymp: port {node.port} on the main node, which is this one, is taken by another program")
        assert err.count("\n") == 1
    waiting = [node(1, "--wait", "0.5", path), node(0, "--wait", "1", path, nodes="1:3")]
    (code, _, err), _ = ends(*waiting)
    assert code == 1
    assert f"127.0.0.1:{node.port}" in err


def test_a_main_node_that_never_comes(script, node):
    [(code, _, err)] = ends(node(1, "--wait", "0.5", script("")))
    assert code == 1
    assert err == (
        f"easymp: the main node did not answer at 127.0.0.1:{node.port} for 0.5 seconds (Connection refused): start it there with "
        "--node-rank 0, correct --main-address, or wait longer with --wait SECONDS\n"
    )


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [((0, "2"), (1, "3"), "was started for 2 nodes, this one for 3 nodes"), ((1, "3"), (1, "3"), "say the same --node-rank 1")],
)
def test_nodes_that_contradict_one_another(script, node, first, second, words):
    path = script("")
    started = [node(rank, "--wait", "6", path, nodes=count) for rank, count in dict.fromkeys([(0, first[1]), first, second])]
    if first == second:
        started.append(node(second[0], "--wait", "6", path, nodes=second[1]))
    found = ends(*started)
    assert any(words in err for _, _, err in found), found
