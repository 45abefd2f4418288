"""A load puts all in place, or says what is wrong, on every rank, and leaves everything as it was."""

from __future__ import annotations

import copy
import json
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from easymp import Accelerator, CheckpointError

from .samples import Small, flip, seal


def net(*widths: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)))


def trained(model: nn.Module, steps: int = 1, **options: Any) -> Small:
    run = Small(None, model, cpu=True, timeout=50, **options)
    for _ in range(steps):
        run.step()
    return run


@contextmanager
def unchanged(run: Small) -> Iterator[None]:
    before = run.image()
    yield
    assert run.image() == before


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with trained(net(3, 4, 2)) as run:
        run.acc.save_state(tmp_path / "a")
    return tmp_path / "a"


def test_a_schedule_of_another_length_is_named_with_both_numbers(tmp_path, caplog):
    for length in (10, 10, 20):
        with Accelerator(cpu=True) as acc:
            model = net(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            inner = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, length)]
            *_, scheduler = acc.prepare(model, optimizer, SequentialLR(optimizer, inner, [2]))
            if not (tmp_path / "a").exists():
                acc.save_state(tmp_path / "a")
            acc.load_state(tmp_path / "a")
            assert scheduler.scheduler._schedulers[1].T_max == 10
    (message,) = [record.message for record in caplog.records if "continues with" in record.message]
    assert "SequentialLR continues with _schedulers[1].T_max=10 of the checkpoint, and not with 20" in message


MISFITS = {
    r"model: not in the checkpoint: 'last\.weight', did you mean '1\.weight'\?": lambda: renamed(net(3, 4, 2)),
    r"not in the checkpoint: '2\.weight'.*; '2\.bias'": lambda: net(3, 4, 2, 2),
    r"only in the checkpoint: '1\.weight'; '1\.bias'": lambda: net(3, 4),
    r"model: 1\.weight has shape \[2, 4\] in the checkpoint, and \[5, 4\] here; 1\.bias": lambda: net(3, 4, 5),
    r"0\.weight is torch\.float32 in .*torch\.float64 here": lambda: net(3, 4, 2, dtype=torch.float64),
}


def renamed(model: nn.Sequential) -> nn.Module:
    model_renamed = nn.Sequential(model[0])
    model_renamed.add_module("last", model[1])
    return model_renamed


def test_another_model_is_an_error_that_says_how_it_differs(saved):
    for message, model in MISFITS.items():
        with trained(model()) as run, unchanged(run):
            with pytest.raises(CheckpointError, match=message) as caught:
                run.acc.load_state(saved)
        assert "nothing has changed" in str(caught.value) and "strict=False" in str(caught.value)


def test_without_strict_what_fits_is_loaded_and_what_does_not_is_said(saved, caplog):
    with Accelerator(cpu=True) as acc:
        one = acc.prepare(net(3, 4, 2))
        acc.load_state(saved, strict=False)
    with trained(net(3, 4, 5)) as run:
        model, before = run.model, run.model[1].weight.detach().clone()
        loaded = run.acc.load_state(saved, strict=False)
        assert torch.equal(model[0].weight, one[0].weight) and torch.equal(model[1].weight, before)
        assert run.optimizer.state[model[0].weight]["exp_avg"].shape == (4, 3)
        skipped = " ".join(loaded.skipped)
        assert "1.weight has shape" in skipped and "parameters of another shape: model/1.weight" in skipped
        run.step()
    assert "skipped: model: 1.weight has shape" in caplog.text


def test_what_was_saved_and_is_not_prepared_is_named(saved):
    with Accelerator(cpu=True) as acc:
        with pytest.raises(CheckpointError, match=r"nothing here takes model; optimizer; .*prepare it"):
            acc.load_state(saved)
    with Accelerator(cpu=True) as acc:
        acc.prepare(net(3, 4, 2), net(2, 2))
        with pytest.raises(CheckpointError, match="the checkpoint has no model_1"):
            acc.load_state(saved)
        assert "the checkpoint has no model_1" in acc.load_state(saved, strict=False).skipped


def refusing(run: Small, always: bool = False) -> None:
    """From now on the schedule takes no state of the first update, and raises, or takes none at all."""
    load_state_dict = run.schedule.scheduler.load_state_dict

    def refuse(state: Any) -> None:
        load_state_dict(state)
        if always or state["last_epoch"] == 1:
            raise ValueError("not this one")

    run.schedule.scheduler.load_state_dict = refuse


def damaged(folder: Path) -> list[str]:
    """fsdp: rank 1's schedule refuses its state; and rank 1's shard is damaged, which rank 0 does not read."""
    messages = []
    with trained(net(8, 8, 8), strategy="fsdp") as run:
        run.acc.save_state(folder)
    for fault in ("schedule", "file"):
        with trained(net(8, 8, 8), 2, strategy="fsdp") as run:
            if fault == "schedule" and run.acc.process_index == 1:
                refusing(run)
            if fault == "file" and run.acc.is_main_process:
                flip(next(folder.glob("model-00002*")), -1)
            run.acc.wait_for_everyone()
            with unchanged(run), pytest.raises(CheckpointError) as caught:
                run.acc.load_state(folder)
            run.step()  # the run goes on
        messages.append(str(caught.value))
    return messages


def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing(ranks, tmp_path):
    first, second = ranks(damaged, tmp_path / "a")
    assert first == second
    for message, expected in zip(first, ("state/scheduler_0: ValueError: not this one", "model-00002-of-00002")):
        assert "rank 1: " in message and expected in message and "nothing has changed" in message


def test_an_object_that_fails_is_named_and_put_back_and_without_strict_the_rest_is_loaded(saved):
    message = "state/scheduler_0: ValueError: not this one"
    with trained(net(3, 4, 2), 3) as run:
        refusing(run)
        assert run.acc.load_state(saved, strict=False).skipped == (message,)
        assert run.schedule.state_dict()["last_epoch"] == 3 and run.optimizer.updates == 1
        refusing(run, always=True)  # not even what it had
        with pytest.raises(CheckpointError, match=f"was not loaded: {message};"):
            run.acc.load_state(saved)


def meanwhile(run: Small, act: Callable[[], Any]) -> None:
    """Do it once, when all has been verified, and nothing has been read into live tensors."""
    load_state_dict = run.schedule.scheduler.load_state_dict

    def acting(state: Any) -> None:
        run.schedule.scheduler.load_state_dict = load_state_dict
        act()
        load_state_dict(state)

    run.schedule.scheduler.load_state_dict = acting


def test_a_file_that_changes_after_it_was_verified_is_said(saved):
    (file,) = saved.glob("model-0*")
    content = file.read_bytes()
    changed = content[:-1] + bytes([content[-1] ^ 1])
    with trained(net(3, 4, 2), 2) as run:
        for damaged, message in (
            (changed, "block 0 .* is not what was written"),
            (content[:100], "ends at byte 100 while it is read"),
        ):
            meanwhile(run, lambda damaged=damaged: file.write_bytes(damaged))
            message = f"was loaded in part, .* load this or another checkpoint .*{message}"
            with pytest.raises(CheckpointError, match=message) as caught:
                run.acc.load_state(saved)
            assert "nothing has changed" not in str(caught.value)
            file.write_bytes(content)
        run.acc.load_state(saved)
        assert run.optimizer.updates == 1
        run.step()
        meanwhile(run, lambda: shutil.rmtree(saved))  # open files stay
        run.acc.load_state(saved)
        assert run.optimizer.updates == 1 and not saved.exists()


REFERENCES = Path("/proc/self/clear_refs")


def peak() -> int:
    """Bytes: the most that was resident, since ``clear_refs`` where there is one."""
    if REFERENCES.exists():
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_a_load_takes_no_second_copy_of_the_state(tmp_path):
    with trained(net(1024, 2048)) as run:  # 24 MiB with its states

        def live() -> list[Any]:
            states = [t for state in run.optimizer.state.values() for t in state.values() if t.ndim]
            return [*run.model.parameters(), *states]

        run.acc.save_state(tmp_path / "a")
        addresses = [t.data_ptr() for t in live()]
        expected = [t.detach().clone() for t in live()]
        with torch.no_grad():
            for t in live():
                t.zero_()
        if REFERENCES.exists():
            REFERENCES.write_text("5")
        before = peak()
        run.acc.load_state(tmp_path / "a")
        assert peak() - before < 12 * 2**20
        assert [t.data_ptr() for t in live()] == addresses
        assert all(torch.equal(a, b) for a, b in zip(live(), expected))


WRONG: list[tuple[list[Any], Any]] = [
    (["world_size"], 2**40),
    (["world_size"], 10**7),
    (["step"], 2**64 - 1),
    (["states", "optimizer", "updates"], None),
    (["states", "optimizer", "updates"], [0]),
    (["states", "optimizer", "groups", 0, "lr"], "a"),
    (["states", "optimizer", "groups", 0, "betas", "items"], []),
    (["states", "optimizer/state", "model/0.weight"], True),
    (["states", "optimizer/state", "model/0.weight", "exp_avg"], "a"),
    (["states", "optimizer/state", "model/0.weight", "step"], 2**64 - 1),
    (["states", "state/scheduler_0", "last_epoch"], {}),
    (["states", "state/scheduler_0/behind"], [None, "a"]),
    (["states", "state/each_update"], 3),
    (["states", "state/loader_0", "position"], "a"),
    (["states", "state/run", "iteration"], "a"),
    (["states", "state/epochs", "finished"], "a"),
    (["states", "ranks/00000/state/random", "seed"], "a"),
    (["states", "ranks/00000/state/random", "streams", "devices"], []),
]


@pytest.mark.timeout(60)
def test_what_cannot_be_is_refused_before_anything_live_changes(tmp_path):
    folder = tmp_path / "saved"
    with Small(tmp_path, nn.Sequential(nn.Linear(12, 5))) as run:
        for i, batch in enumerate(run.loader):
            run.step(batch)
            if i == 1:
                run.acc.save_state(folder)
            if i == 3:
                break
        real = json.loads((folder / "manifest.json").read_bytes())
        before = run.image()
        for path, value in WRONG:
            manifest = at = copy.deepcopy(real)
            for key in path[:-1]:
                at = at[key]
            assert at[path[-1]] != value
            at[path[-1]] = value
            seal(folder, manifest)
            with pytest.raises(CheckpointError) as caught:
                run.acc.load_state(folder)
            assert len(str(caught.value)) < 500, path
            assert run.image() == before, path
        seal(folder, real)
        run.acc.load_state(folder)
        assert run.image() != before
