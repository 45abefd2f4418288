"""A collective that waits is reported before its timeout, with the call at which the ranks differ."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from easymp.distributed.hang_watch import Call, first_differences

from ..examples.run import environment

# Rank 1 is late in three ways, each until rank 0 has reported it; at last its calls come in another order.
SCRIPT = """
import json, os, pathlib, signal, subprocess, sys, threading, time
import torch, torch.distributed as dist
from easymp import Accelerator, Settings

acc = Accelerator(cpu=True, project_dir=sys.argv[1], settings=Settings(hang_after=0.5))
late, file, tensor = acc.process_index == 1, pathlib.Path(sys.argv[1], "hang-0.json"), torch.ones(3)
done = lambda: file.exists() and '"report"' in file.read_text() and file.read_text().endswith("}")

def until_reported(way):
    while late and not done():
        way()
    (acc.gather if way is work else dist.all_reduce)(tensor)
    dist.barrier()
    if acc.is_main_process:
        print(way.__name__, json.loads(file.read_text())["report"], flush=True)
        file.unlink()
    dist.barrier()

def sleep():
    time.sleep(0.1)

def work():
    for _ in range(10**4):
        pass

def stop():
    watch = f"until grep -qs report.: {file}; do sleep 0.1; done; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", watch])
    os.kill(os.getpid(), signal.SIGSTOP)

for way in (sleep, work, stop):
    until_reported(way)

def leave():
    while not done():
        time.sleep(0.1)
    if acc.is_main_process:
        print("order", json.loads(file.read_text())["report"], flush=True)
    os._exit(0)

threading.Thread(target=leave, daemon=True).start()
if late:
    dist.broadcast(torch.ones(5), 0)
dist.all_reduce(tensor)  # line of the others
"""


@pytest.mark.slow
def test_a_rank_that_is_late_and_calls_in_another_order_are_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "easymp", "launch", "--processes", "3", str(script), str(tmp_path)]
    process = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr[-3000:]
    reports = dict(line.split(" ", 1) for line in process.stdout.splitlines() if line.split(" ", 1)[0] in KINDS)
    for kind, pattern in KINDS.items():
        assert re.search(pattern, reports[kind]), reports[kind]
    assert "ranks 0, 2 have waited for 0.5 s, rank 0 in call" in process.stderr
    assert {file.name for file in tmp_path.glob("hang-*.json")} >= {"hang-1.json", "hang-2.json"}
    assert json.loads((tmp_path / "hang-1.json").read_text())["calls"]


# A message that nobody sends, which gloo's recorder does not have.
MESSAGES = """
import sys, torch, torch.distributed as dist
from easymp import Accelerator, Settings

acc = Accelerator(cpu=True, project_dir=sys.argv[1], settings=Settings(hang_after=1, timeout=10))
if acc.process_index == 0:
    dist.recv(torch.ones(3), 1)
request = dist.irecv(torch.ones(3), 0)
request.wait()
"""


@pytest.mark.slow
@pytest.mark.cold
def test_ranks_that_wait_for_messages_are_named_with_their_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MESSAGES)
    command = [sys.executable, "-m", "easymp", "launch", "--processes", "2", str(script), str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        report = "".join(next(line for line in run.stderr if "have waited" in line) + next(run.stderr))
        run.terminate()
    # The rank that fell asleep first reports: on a busy machine either.
    assert re.search(r"ranks 0, 1 have waited for 1 s, rank [01] in a message, ", report), report
    assert {*re.findall(r"send or receive at \S+train.py:(\d+)", report)} == {"7", "9"}, report


KINDS = {
    "sleep": r"rank 1 has not come to it, and stands still: .* at \S+train.py:\d+ in sleep",
    "work": r"gather.*rank 1 has not come to it, and still moves: .* in (work|<lambda>|until_reported)",
    "stop": r"rank 1 is stopped: process \d+",
    "order": r"is not the same on all ranks: ranks 0, 2: all_reduce\(float\[3\]\) at \S+train.py:\d+; "
    r"rank 1: broadcast\(float\[5\]\) at \S+train.py:\d+",
}


def test_the_first_call_that_differs_is_found() -> None:
    def calls(*names: str, group: str = "all") -> list[Call]:
        return [Call(group, n, name, "float[2]", "", n < len(names)) for n, name in enumerate(names, 1)]

    sentences = first_differences({0: calls("a", "b", "c"), 1: calls("a", "c", "b"), 2: calls("a", "b")})
    assert sentences == ["call 2 of all is not the same on all ranks: ranks 0, 2: b(float[2]); rank 1: c(float[2])"]
    rank_1_behind = {0: calls("a", "b"), 1: [calls("a")[0]._replace(finished=True)]}
    assert first_differences(rank_1_behind) == []
    # Ranks give all_gather shapes of their own; all_reduce sums equal ones.
    for name, count in (("all_gather", 0), ("all_reduce", 1)):
        assert len(first_differences({0: calls(name), 1: [calls(name)[0]._replace(shapes="float[3]")]})) == count
    assert first_differences({0: calls("a"), 1: calls("b", group="other")}) == []
