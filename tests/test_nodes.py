"""Several machines: launchers that meet on the loopback, each with processes of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from easymp.cli import main
from easymp.launcher import rendezvous

from .pool import hold_port
from .test_launcher import python, wait_for
from .test_launcher import script as script

HOST = socket.gethostname()
UNSAVED = (
    "; no checkpoint was saved: at SIGTERM and SIGUSR1 ranks save one, once they have called Accelerator.resume()\n"
)


@pytest.fixture
def port():
    """One that no other test takes meanwhile."""
    reservation, number = hold_port()
    yield number
    reservation.close()


def launched(port, arguments, after="", signals=0) -> tuple[int, str]:
    """In one of several processes: `easymp launch` as that node; exit code, and what the launcher said.

    Args:
        words: for all nodes, or for each.
        after: files of this name and a number; when they are all there, each launcher that `signals` has the bit of
            gets two SIGTERM.
    """
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def stop() -> None:
        while not all(os.path.exists(f"{after}{rank}") for rank in range(nodes)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # as from a program that signals a group and its leader

    thread = threading.Thread(target=stop)
    if signals >> node & 1:
        thread.start()
    node_arguments = (
        arguments[node]
        if isinstance(arguments[0], list)
        else ["--nodes", str(nodes), "--node-rank", str(node), *arguments]
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as stderr:
        for name in "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split():  # the pool's
            patch.delenv(name, raising=False)
        code = main(["launch", "--main-address", f"127.0.0.1:{port}", *node_arguments])
    if thread.ident:
        thread.join()
    return code, stderr.getvalue()


def test_ranks_are_in_the_order_of_the_nodes_and_the_first_failure_is_told_to_all(ranks, script, tmp_path, port):
    path = script("""
        names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE")
        open(sys.argv[1] + str(rank), "w").write(" ".join(os.environ[name] for name in names))
        if rank == 2:
            others = [sys.argv[1] + str(r) for r in (0, 1, 3)]
            while not all(os.path.exists(file) and os.path.getsize(file) for file in others):
                time.sleep(0.05)
            raise ValueError("the cause")
        time.sleep(60)
    """)
    (main_code, main_stderr), (code, stderr) = ranks(launched, port, ["--processes", "2", path, str(tmp_path / "x")])
    assert [(tmp_path / f"x{rank}").read_text() for rank in range(4)] == ["0 0 4", "0 1 4", "1 0 4", "1 1 4"]
    assert (code, main_code) == (1, 1)
    first = "rank 2 of 4 failed first"
    assert stderr.startswith(f"{first}: ValueError: the cause\nTraceback")
    assert stderr.endswith("ValueError: the cause\n")
    assert main_stderr == f"{first}, on node 1 ({HOST}): ValueError: the cause; the launcher there says more\n"


def test_a_failure_after_another_nodes_ranks_are_done_is_told_there_too(ranks, script, tmp_path, port):
    path = script("""
        if rank == 1:
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.05)
            time.sleep(1)  # for rank 0's launcher to see that it is done
            raise ValueError("late")
        open(sys.argv[1], "w").close()
    """)
    (main_code, main_stderr), (code, stderr) = ranks(launched, port, [path, str(tmp_path / "done")])
    assert (main_code, code) == (1, 1)
    assert main_stderr.startswith(f"rank 1 of 2 failed first, on node 1 ({HOST}): ValueError: late")
    assert stderr.endswith("ValueError: late\n")


def test_a_signal_reaches_the_ranks_of_all_nodes_and_saving_may_take_as_long_as_the_grace(
    ranks, script, tmp_path, port
):
    path = script("""
        caught = []
        signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
        open(sys.argv[1] + "ready" + str(rank), "w").close()
        while not caught:
            time.sleep(0.02)
        time.sleep(0.6 if rank == 0 else 60)
        open(sys.argv[1] + str(rank), "w").write(str(len(caught)))
    """)
    arguments = ["--nodes", "2", path, str(tmp_path / "x")]
    by_node = [["--node-rank", "0", *arguments], ["--node-rank", "1", "--grace", "1", *arguments]]
    results = ranks(launched, port, by_node, str(tmp_path / "xready"), 0b11)
    assert results == [(143, f"stopped by SIGTERM (signal 15){UNSAVED}")] * 2
    assert (tmp_path / "x0").read_text() == "1"  # once
    assert not (tmp_path / "x1").exists()


def test_one_launcher_that_is_stopped_ends_a_run_of_fixed_size(ranks, script, tmp_path, port):
    path = script("open(sys.argv[1] + str(rank), 'w').close(); time.sleep(60)")
    arguments = ["--max-restarts", "2", path, str(tmp_path / "x")]
    assert ranks(launched, port, arguments, str(tmp_path / "x"), 0b10) == [
        (143, f"stopped by SIGTERM (signal 15) on node 1 ({HOST}){UNSAVED}"),
        (143, f"stopped by SIGTERM (signal 15){UNSAVED}"),
    ]


def twice(port, arguments) -> list[tuple[int, str]]:
    return [launched(port, arguments), launched(port, arguments)]


def test_one_run_after_another_at_the_same_port(ranks, script, port):
    assert ranks(twice, port, [script("time.sleep(0.2 * rank)")]) == [[(0, ""), (0, "")]] * 2


# -- where they do not meet --------------------------------------------------------------------------------------------


@pytest.fixture
def refused(capsys, script):
    """What a launcher says that starts nothing."""

    def run(flags: str, *arguments: str) -> str:
        assert main(["launch", *flags.split(), *arguments, script("")]) == 2
        return capsys.readouterr().err

    return run


def test_what_listens_at_the_port_is_no_launcher(refused, monkeypatch):
    monkeypatch.setattr(rendezvous, "CONNECT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        address = f"--main-address 127.0.0.1:{port}"
        assert refused(f"--nodes 2 --node-rank 0 {address}").startswith(
            f"easymp: port {port} on the main node, which is this one, is taken, by another program or by another "
            "launcher of this run (pass --node-rank to each): pass a free one, --main-address 127.0.0.1:PORT, on all"
        )
        assert f"port {port} on this machine is taken" in refused(address)
        stderr = refused(f"--nodes 2 --node-rank 1 {address}")
        assert f"the program that listens at 127.0.0.1:{port} does not answer as the main node's laun" in stderr


def test_nodes_that_never_come(refused, port):
    end = "or wait longer with --wait SECONDS\n"
    assert refused(f"--nodes 2 --node-rank 1 --wait 0.5 --main-address 127.0.0.1:{port}") == (
        f"easymp: the main node did not answer at 127.0.0.1:{port} for 0.5 seconds (Connection refused): start it "
        f"there with --node-rank 0, correct --main-address, {end}"
    )
    assert refused(f"--nodes 2 --node-rank 0 --wait 1 --main-address 127.0.0.1:{port}") == (
        f"easymp: 2 nodes were to meet at 127.0.0.1:{port}, and after 1 seconds not enough are there (so far came: "
        f"node 0 ({HOST})): start the others, ask for fewer with --nodes, {end}"
    )
    elsewhere = refused("--nodes 2 --node-rank 0 --wait 1 --main-address 192.0.2.1")  # of documentation, RFC 5737
    assert "'192.0.2.1' is not an address of this machine, which is to be" in elsewhere


@pytest.mark.parametrize(
    ("second", "other_nodes", "wait", "message"),
    [  # in the first case the main node waits for one that is started rightly
        ("2", 1, "2", "was started for 3 nodes, this one for 2 nodes"),
        ("3", 2, "50", "say the same --node-rank 1: each machine needs its own"),
    ],
)
def test_nodes_that_contradict_one_another(ranks, script, second, other_nodes, wait, message, port):
    main_one = ["--nodes", "3", "--node-rank", "0", "--wait", wait, script("")]
    other_arguments = [["--nodes", second, "--node-rank", "1", "--wait", "50", script("")]] * other_nodes
    results = ranks(launched, port, [main_one, *other_arguments], processes=1 + other_nodes)
    assert all(code == 2 for code, _ in results)
    assert message in results[1][1]


# -- launchers that are processes of their own -------------------------------------------------------------------------

QUICK = """
import sys
from easymp.launcher import agent, rendezvous
agent.AGAIN, rendezvous.LAST_CALL, rendezvous.HEARTBEAT, rendezvous.MISSED = 0.2, 1, 1, 4
from easymp.cli import main
sys.exit(main(sys.argv[1:]))
"""

TRAIN = """
import json, torch
from easymp import Accelerator, Settings

folder, deaths, updates = sys.argv[1], sys.argv[2], int(sys.argv[3])
acc = Accelerator(mixed_precision="no", seed=0, cpu=True, project_dir=folder, settings=Settings(timeout=30))
model = torch.nn.Linear(8, 1)
x = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=32 // acc.num_processes, shuffle=True)
model, optimizer, loader = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
resumed = acc.resume()
losses = []
open(f"{folder}.up{acc.num_processes}.{rank}", "w").close()
for epoch in acc.epochs(updates // 2):
    if deaths == "until two" and acc.num_processes == 1 and os.path.exists(f"{folder}.up2.1"):
        break
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(acc.reduce(loss.detach(), "mean").item())
    acc.save_state()
    if deaths == "kill" and rank == 1 and epoch == 1 and not resumed:
        os.kill(os.getpid(), signal.SIGKILL)
    if deaths == "until two":
        time.sleep(0.2)
open(f"{folder}.out{rank}", "w").write(json.dumps([acc.num_processes, losses[-1:], model.weight.tolist()]))
acc.end_training()
"""


@pytest.fixture
def node(port):
    """Starts a launcher as one of several nodes; all are gone at the end."""
    started = []

    def start(*arguments, main="127.0.0.1", before=()):
        address = ["--main-address", f"{main}:{port}"] if "--nodes" in arguments else []
        started.append(python("-c", QUICK, "launch", *address, *arguments, before=before))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for_success(*processes: subprocess.Popen) -> list[str]:
    """What each of them said; all have ended well."""
    errors = [process.communicate(timeout=250)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), errors
    return errors


@pytest.mark.slow
@pytest.mark.cold
def test_a_second_signal_kills_ranks_that_do_not_end(node, script, tmp_path):
    path = script("""
        signal.signal(signal.SIGTERM, lambda number, frame: open(sys.argv[1] + "told", "w").close())
        open(sys.argv[1] + "begun", "w").close()
        while True:
            time.sleep(60)
    """)
    launcher = node("--processes", "1", "--grace", "1000", path, str(tmp_path / "x"))
    for sign in ("xbegun", "xtold"):
        wait_for(tmp_path / sign)
        time.sleep(0.4)
        launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(100) == 143


def result(folder: Path, rank: int = 0) -> list:
    return json.loads(Path(f"{folder}.out{rank}").read_text())


@pytest.mark.slow
def test_two_nodes_of_which_a_rank_is_killed_train_to_the_result_of_one(script, node, tmp_path):
    path, one_node, two_nodes = script(TRAIN), tmp_path / "one", tmp_path / "two"
    wait_for_success(node("--processes", "2", path, str(one_node), "none", "8"))
    arguments = ["--nodes", "2", "--max-restarts", "1", path, str(two_nodes), "kill", "8"]
    first, second = wait_for_success(*(node("--node-rank", str(k), *arguments) for k in (0, 1)))
    nodes = f"on 2 nodes: node 0 ({HOST}), node 1 ({HOST})\n"
    assert f"easymp launch: a rank failed; restart 1, {nodes}" in second
    assert nodes in first
    assert result(one_node) == result(two_nodes) == result(two_nodes, 1)


@pytest.mark.slow
@pytest.mark.cold
def test_a_node_that_joins_and_one_that_dies(script, node, tmp_path):
    arguments = [script(TRAIN), str(tmp_path / "run"), "until two", "10000"]
    first = node("--nodes", "1:2", "--node-rank", "0", *arguments)
    wait_for(tmp_path / "run.up1.0")
    second = node("--nodes", "1:2", "--node-rank", "1", *arguments)
    wait_for(tmp_path / "run.up2.1")
    second.kill()  # and its rank with it
    (stderr,) = wait_for_success(first)
    assert f"the workers start again, on 2 nodes: node 0 ({HOST}), node 1 ({HOST})\n" in stderr
    assert f"on 1 node: node 0 ({HOST})\n" in stderr
    assert result(tmp_path / "run")[0] == 1


@pytest.fixture
def hosts(tmp_path):
    """Two network namespaces with a cable between them.

    What to write before a command, for each, and the first one's address.
    """
    lacking = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if lacking:
        pytest.skip(f"optional packages are not installed (iproute2, util-linux): {' and '.join(lacking)}")
    names = [f"easymp-{os.getpid()}-{k}" for k in (0, 1)]
    lookups = tmp_path / "nsswitch.conf"
    lookups.write_text("hosts: files\n")  # no name server is reached from there
    try:
        for name in names:
            process = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if process.returncode:
                pytest.skip(f"needs hardware: two hosts, or network namespaces: {process.stderr.strip()}")
        commands = [f"ip link add left netns {names[0]} type veth peer right netns {names[1]}"]
        for k, (name, end) in enumerate(zip(names, ("left", "right"))):
            prefix = f"ip -n {name}"
            commands.append(f"{prefix} addr add 10.77.0.{k + 1}/24 dev {end}")
            commands += [f"{prefix} link set lo up", f"{prefix} link set {end} up"]
        for command in commands:
            subprocess.run(command.split(), check=True)
        bind = 'mount --bind "$0" /etc/nsswitch.conf && exec "$@"'
        within = ("unshare", "--mount", "sh", "-c", bind, str(lookups))
        yield [("ip", "netns", "exec", name, *within) for name in names], "10.77.0.1"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.cold
def test_two_hosts_find_out_who_is_the_main_one_and_train_over_the_cable(script, node, hosts, tmp_path):
    path = script("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        value = torch.tensor(float(rank + 1))
        dist.all_reduce(value)
        dist.destroy_process_group()
        facts = value.item(), os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"]
        open(sys.argv[1] + str(rank), "w").write("{} {} {}".format(*facts))
    """)
    before, main = hosts
    arguments = ["--nodes", "2", path, str(tmp_path / "x")]
    wait_for_success(*(node(*arguments, main=main, before=host) for host in reversed(before)))
    for rank, end in enumerate(("left", "right")):
        assert (tmp_path / f"x{rank}").read_text() == f"3.0 {main} {end}"
