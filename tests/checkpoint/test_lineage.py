"""Checkpoints form lines.

`resume`, retention and the list follow what was saved last, from what; and a project's folder has one run.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from easymp import Accelerator, CheckpointError, ProjectConfiguration, checkpoint
from easymp.cli import main

from .samples import flip, lineage_of, rewrite


class Run:
    """A training that adds `pace` to its only weight at each update."""

    def __init__(self, root: str, limit: int | None = None, pace: float = 1.0) -> None:
        project = ProjectConfiguration(root, total_limit=limit)
        self.acc = Accelerator(project_dir=project, log_with="none", save_on_signal=False)
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        self.model, self.optimizer = self.acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        self.pace = pace

    def to(self, *steps: int, async_: bool = False) -> None:
        """Train to each of these steps, and save there."""
        for step in steps:
            while self.optimizer.updates < step:
                self.acc.backward(-self.pace * self.model(torch.ones(1, 1)).sum())
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.acc.save_state(async_=async_)

    @property
    def weight(self) -> float:
        return next(self.model.parameters()).item()


@contextmanager
def run(root, limit=None, pace=1.0, load=None) -> Iterator[Run]:
    training = Run(str(root), limit, pace)
    try:
        if load is not None:
            training.acc.load_state(f"{root}/checkpoints/{load}")
        yield training
    finally:
        training.acc.close()


def trained(root: Any, *to: int, **options: Any) -> None:
    with run(root, **options) as training:
        training.to(*to)


def resumed(root: Any) -> tuple[str | None, float]:
    """The folder that a new run resumes, and the weight that is then there."""
    with run(root) as training:
        folder = training.acc.resume()
        return folder and plainly(folder.rpartition("/")[2]), training.weight


def plainly(name: str) -> str:
    """Without what an object store adds to a name that is used again."""
    return name.partition(".save-")[0]


def listed(root: Any) -> dict[str, str]:
    """Each checkpoint, with a ' where it was set aside, and what the list says of it."""
    return {
        plainly(e.name).partition(".line")[0] + ("'" if ".line" in e.name else ""): e.why
        or ("newest" if e.newest else "abandoned" if e.abandoned else "")
        for e in checkpoint.list_checkpoints(f"{root}/checkpoints")
    }


def steps(*numbers: int) -> list[str]:
    return [f"step-{number:08d}" for number in numbers]


def states(**numbers: str) -> dict[str, str]:
    """What `listed` says, of s8="newest", s10_="abandoned" …"""
    return {f"step-{int(n.strip('s_')):08d}" + "'" * n.endswith("_"): state for n, state in numbers.items()}


@pytest.fixture(params=["folder", "store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path)
        return
    yield f"memory://lineage/{tmp_path.name}"
    fsspec.filesystem("memory").rm("/lineage", recursive=True)


FOREIGN = (".tmp-mine", "mine", "step-00000000")


def names(root: str) -> list[str]:
    """What lies beside files that are not ours."""
    fs, path = fsspec.url_to_fs(f"{root}/checkpoints")
    assert all(fs.cat_file(f"{path}/{folder}/notes.txt") == b"mine" for folder in FOREIGN)
    return sorted({name.rpartition("/")[2] for name in fs.ls(path, detail=False)} - {*FOREIGN})


def test_going_on_from_an_older_step_leaves_the_newer_ones_aside(root, caplog):
    async_ = "://" in root
    fs, path = fsspec.url_to_fs(f"{root}/checkpoints")
    for folder in FOREIGN:
        fs.makedirs(f"{path}/{folder}")
        fs.pipe_file(f"{path}/{folder}/notes.txt", b"mine")
    with run(root, limit=3) as training:
        training.to(8)
        training.acc.save_state(f"{root}/checkpoints/best")
        training.to(16, 18, 20, async_=async_)
    assert names(root) == ["best", "latest", *steps(16, 18, 20)]
    with run(root, limit=3) as training:
        training.acc.load_state(f"{root}/checkpoints/best")
        for step in (10, 12, 14, 15):
            training.to(step, async_=async_)
            training.acc.wait_for_everyone()
    assert names(root) == ["best", "latest", *steps(12, 14, 15, 16, 18, 20)]
    assert "Not on it, and kept: step-00000016, step-00000018, step-00000020" in caplog.text
    assert resumed(root) == ("step-00000015", 15)
    gone = {f"s{step}": "abandoned" for step in (16, 18, 20)}
    unfinished, best, *committed = listed(root).items()
    assert unfinished[0] == "step-00000000" and best == ("best", "")
    assert committed == list(states(**gone, s12="", s14="", s15="newest").items())
    trained(root, 19, load="step-00000018")  # back to the first line
    assert resumed(root) == ("step-00000019", 19) and fs.cat_file(f"{path}/latest") == b"step-00000019\n"
    assert [name for name, state in listed(root).items() if state == "abandoned"] == steps(20, 12, 14, 15)


@pytest.mark.parametrize("same_run", [False, True])
def test_a_name_of_the_abandoned_line_is_taken_and_both_stay(root, caplog, same_run):
    with run(root) as training:
        training.to(8, 10, 12)
        if same_run:  # a run that goes back leaves its own later checkpoints aside
            training.acc.load_state(f"{root}/checkpoints/step-00000008")
            training.pace = 2.0
            training.to(10, 12)
    if not same_run:
        trained(root, 10, 12, load="step-00000008", pace=2.0)
    assert "is of another line of checkpoints, and is named step-00000010.line-" in caplog.text
    assert resumed(root) == ("step-00000012", 16)
    assert listed(root) == states(s8="", s10_="abandoned", s12_="abandoned", s10="", s12="newest")
    entries = checkpoint.list_checkpoints(f"{root}/checkpoints")
    aside = next(e.name for e in entries if e.name.startswith("step-00000012.line-"))
    assert checkpoint.verify(f"{root}/checkpoints/{aside}") == []
    with run(root, load=aside) as training:
        assert training.weight == 12
        training.to(14)
    assert resumed(root) == ("step-00000014", 14)


def test_a_run_without_resume_begins_a_line_and_the_older_one_stays(root, caplog):
    trained(root, 10, 20, limit=2)
    trained(root, 2, 4, 6, limit=2)
    assert "begins without resume()" in caplog.text
    expected = states(s10="abandoned", s20="abandoned", s4="", s6="newest")
    assert list(listed(root).items()) == list(expected.items())
    assert resumed(root) == ("step-00000006", 6)
    checkpoints = f"{root}/checkpoints"
    assert checkpoint.prune(checkpoints, keep=2).kept == tuple(steps(6, 4, 20))  # the last of another line stays
    pruned = checkpoint.prune(checkpoints, keep=1, abandoned=True)
    assert (pruned.kept, set(pruned.removed)) == (tuple(steps(6)), set(steps(4, 20)))
    assert resumed(root) == ("step-00000006", 6)


def test_a_damaged_last_one_gives_way_to_what_it_was_continued_from(tmp_path):
    trained(tmp_path, 8, 16, 20)
    trained(tmp_path, 10, load="step-00000008")
    flip(tmp_path / "checkpoints/step-00000010/model-00001-of-00001.safetensors", -1)
    with run(tmp_path) as training:
        assert training.acc.resume().endswith("step-00000008") and training.weight == 8
        training.to(12)  # what it goes on to is not the damaged one's
    by_name = listed(tmp_path)
    assert (by_name["step-00000010"], by_name["step-00000012"]) == ("abandoned", "newest")
    for step in (8, 12):
        flip(tmp_path / f"checkpoints/step-{step:08d}/model-00001-of-00001.safetensors", -1)
    message = r"no checkpoint is whole any more: .*not on the current line"
    with run(tmp_path) as training, pytest.raises(CheckpointError, match=message):
        training.acc.resume()


def old(folder: Path, *numbers: int) -> None:
    """Rewrite checkpoints as easymp 0.1 did, in this order of time."""
    for second, number in enumerate(numbers):
        rewrite(folder / f"step-{number:08d}", None, written=f"2026-01-01T00:00:{second:02d}+00:00")


def test_folders_of_the_first_release(tmp_path):
    root = tmp_path / "checkpoints"
    trained(tmp_path, 8, 10, 16, 18, 20)
    old(root, 8, 16, 18, 20, 10)  # as when a run had gone on from step 8
    assert "lineage" not in json.loads((root / "step-00000020" / "manifest.json").read_bytes())["plan"]
    assert resumed(tmp_path) == ("step-00000010", 10)
    old(root, 8, 10, 16, 18, 20)
    with run(tmp_path, limit=3) as training:
        assert training.acc.resume().endswith("step-00000020") and training.weight == 20
        training.to(22)
    assert list(listed(tmp_path)) == steps(18, 20, 22)
    trained(tmp_path, 19, 20, limit=3, load="step-00000018")
    assert listed(tmp_path) == states(s18="", s20_="abandoned", s22="abandoned", s19="", s20="newest")
    assert resumed(tmp_path) == ("step-00000020", 20)


def test_a_clock_that_went_back_changes_no_order(tmp_path):
    trained(tmp_path, 2)
    folder = tmp_path / "checkpoints/step-00000002"
    rewrite(folder, lineage_of(folder), written="2999-01-01T00:00:00.000000+00:00")
    trained(tmp_path, 1)
    assert resumed(tmp_path) == ("step-00000001", 1)


def test_the_command_lists_lines(tmp_path, capsys):
    trained(tmp_path, 8, 10)
    trained(tmp_path, 9, load="step-00000008")
    assert main(["checkpoint", "list", f"{tmp_path}/checkpoints"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == steps(8, 10, 9)
    assert rows[0][6] == rows[1][6] != rows[2][6] and rows[2][7] == "step-00000008"
    assert [" ".join(row[8:]) for row in rows[1:]] == ["not on the current line", "newest"]
    assert main(["checkpoint", "inspect", f"{tmp_path}/checkpoints/step-00000009"]) == 0
    assert re.search(rf"line +{rows[2][6]}, continues step-00000008", capsys.readouterr().out)


PROCESSES = multiprocessing.get_context("forkserver")  # the pool's, which has torch already


def hold(root: str, store: dict[str, Any] | None, pipe: Any) -> None:
    """A run that resumes and saves, and goes on until it is told to end."""
    if store is not None:
        fsspec.config.conf["s3"] = store
    with run(root) as training:
        training.acc.resume()
        training.to(2)
        pipe.send("saved")
        pipe.recv()


@contextmanager
def another(root, store=None):
    """A live run in another process."""
    parent_pipe, child_pipe = PROCESSES.Pipe()
    process = PROCESSES.Process(target=hold, args=(root, store, child_pipe))
    process.start()
    child_pipe.close()
    try:
        assert parent_pipe.recv() == "saved"
        yield process, parent_pipe
    finally:
        process.kill()
        process.join()


def optimizer_of(acc: Accelerator) -> torch.optim.Optimizer:
    return torch.optim.SGD(acc.prepare(nn.Linear(1, 1)).parameters(), lr=0.1)


def refused(root: str, pid: int | None) -> None:
    message = rf"checkpoints is being written by process {pid} on .* since 2"
    with Accelerator(project_dir=root, log_with="none") as acc:
        net = acc.prepare(nn.Linear(1, 1, bias=False))
        acc.load_state(strict=False)  # an evaluation only reads
        assert net.weight.item() == 2
        for use in (lambda: acc.prepare(torch.optim.SGD(net.parameters(), lr=0.1)), acc.resume):
            with pytest.raises(CheckpointError, match=message):
                use()
    assert list(listed(root)) == steps(2)


def ranks_refused(root: str) -> str:
    with Accelerator(project_dir=root, log_with="none") as acc, pytest.raises(CheckpointError) as caught:
        acc.prepare(optimizer_of(acc))
    return str(caught.value)


def test_a_second_live_run_is_refused_and_a_dead_one_is_not_waited_for(ranks, tmp_path, monkeypatch):
    root = str(tmp_path)
    monkeypatch.chdir(tmp_path)
    with another(root) as (process, _):
        refused(root, process.pid)
        with Accelerator(log_with="none") as acc:  # no folder was named, and the default one is the other's
            acc.prepare(optimizer_of(acc))
            for use in (acc.resume, acc.save_state):
                with pytest.raises(CheckpointError, match=f"process {process.pid} on "):
                    use()
        with Accelerator(project_dir=root, log_with="none") as acc, monkeypatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: "elsewhere")
            with pytest.raises(CheckpointError, match=rf"is gone, remove {root}/.*lock"):
                acc.prepare(optimizer_of(acc))
        first, second = ranks(ranks_refused, root)
        assert first == second and f"process {process.pid} on " in first
        trained(f"{root}/other", 1)
        shared = ProjectConfiguration(f"{root}/trial", logging_dir=root)  # one of a sweep
        with Accelerator(project_dir=shared, log_with="none") as acc:
            acc.prepare(optimizer_of(acc))
            acc.save_state(f"{root}/checkpoints/trial-1")  # no step's name: `resume` never takes it
        process.kill()
        process.join()
        assert resumed(root) == ("step-00000002", 2)
    with another(root) as (process, pipe):
        pipe.send("end")
        process.join()
        with run(root) as training:
            training.acc.resume()
            training.to(3)


@pytest.mark.slow
def test_a_second_live_run_in_an_object_store(tmp_path, s3):
    root = f"{s3}/{tmp_path.name}"
    with another(root, fsspec.config.conf["s3"]) as (process, _):
        refused(root, process.pid)
        process.kill()
        process.join()
        assert resumed(root) == ("step-00000002", 2)


def test_a_folder_that_is_read_only_can_be_resumed_from(tmp_path, monkeypatch):
    trained(tmp_path, 1)
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, "Read-only file system", path)
        return real(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    assert resumed(tmp_path) == ("step-00000001", 1)
    with run(tmp_path) as training, pytest.raises(CheckpointError, match="Read-only file system"):
        training.to(2)


@pytest.mark.parametrize("root", ["store"], indirect=True)
def test_a_copy_that_fails_loses_nothing(root, monkeypatch):
    trained(root, 8, 10)
    memory, calls = type(fsspec.filesystem("memory")), []
    copy = memory.cp_file

    def fail(self: Any, *args: Any, **keywords: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise TimeoutError("the store does not answer")
        copy(self, *args, **keywords)

    with run(root, load="step-00000008", pace=2.0) as training:
        with monkeypatch.context() as patch:
            patch.setattr(memory, "cp_file", fail)
            with pytest.raises(CheckpointError, match="does not answer"):
                training.to(10)
        assert resumed(root) == ("step-00000010", 10)
        training.to(10)
    assert resumed(root) == ("step-00000010", 12)
    assert [state for name, state in listed(root).items() if "'" in name] == ["abandoned"]


def test_one_process_has_several_runs_one_after_the_other_or_at_once(tmp_path):
    with run(tmp_path) as first, run(tmp_path) as second:
        first.acc.resume()
        first.to(1)
        second.acc.resume()  # of a cell that was run again, in a notebook
        second.to(2)
    assert not [name for name in os.listdir(tmp_path) if "lock" in name]
    assert resumed(tmp_path) == ("step-00000002", 2)


def shared(root: str) -> list[tuple[str | None, float]]:
    results = []
    for _ in range(2):
        with run(root) as training:
            resumed = training.acc.resume()
            training.to(training.optimizer.updates + 2)
            results.append((resumed and resumed.rpartition("/")[2], training.weight))
    return results


def test_ranks_share_the_claim_and_the_line(ranks, tmp_path):
    assert ranks(shared, str(tmp_path)) == [[(None, 2), ("step-00000002", 4)]] * 2
    assert len({e.line for e in checkpoint.list_checkpoints(f"{tmp_path}/checkpoints")}) == 1
