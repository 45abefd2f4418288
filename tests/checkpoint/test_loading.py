"""A load puts all in place, or says what is wrong, on every rank, and leaves everything as it was."""

from __future__ import annotations

import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from easymp import Accelerator, CheckpointError


def net(*widths: int, names: Sequence[str] = (), dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = [nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)]
    model = nn.Sequential()
    for name, layer in zip(names or map(str, range(len(layers))), layers):
        model.add_module(name, layer)
    return model


class Run:
    """A model, an AdamW that has stepped, and a schedule."""

    def __init__(self, model: nn.Module, steps: int = 1, **settings: Any) -> None:
        self.acc = Accelerator(cpu=True, timeout=50, **settings)
        optimizer: Any = torch.optim.AdamW(model.parameters(), 0.1)
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.model, self.optimizer, self.schedule = self.acc.prepare(model, optimizer, schedule)
        for _ in range(steps):
            for p in self.model.parameters():
                p.grad = torch.ones_like(p)
            self.optimizer.step()
            self.schedule.step()

    def image(self) -> list[Any]:
        """All that is live here, copied."""

        def copied(tensor: Any) -> Any:
            return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()

        tensors = [copied(t) for t in self.model.state_dict().values()]
        tensors += [copied(t) for s in self.optimizer.state.values() for t in s.values()]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return [
            tensors,
            groups,
            self.optimizer.updates,
            self.schedule.state_dict(),
            self.acc.scaler.state_dict(),
        ]


@contextmanager
def unchanged(run: Run) -> Iterator[None]:
    before = run.image()
    yield
    after = run.image()
    assert len(before[0]) == len(after[0]) and all(torch.equal(a, b) for a, b in zip(before[0], after[0]))
    assert before[1:] == after[1:]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Run(net(3, 4, 2)).acc as acc:
        acc.save_state(tmp_path / "a")
    return tmp_path / "a"


def test_a_schedule_of_another_length_is_named_with_both_numbers(tmp_path: Path, caplog: Any) -> None:
    def schedule(length: int) -> tuple[Accelerator, Any]:
        acc, model = Accelerator(cpu=True), net(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        inner = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, length)]
        return acc, acc.prepare(model, optimizer, SequentialLR(optimizer, inner, [2]))[2]

    acc, _ = schedule(10)
    with acc:
        acc.save_state(tmp_path / "a")
    for length in (10, 20):
        acc, made = schedule(length)
        with acc:
            acc.load_state(tmp_path / "a")
            assert made.scheduler._schedulers[1].T_max == 10
    (said,) = [record.message for record in caplog.records if "continues with" in record.message]
    assert "SequentialLR continues with _schedulers[1].T_max=10 of the checkpoint, and not with 20" in said


MISFITS = {
    "names": (net(3, 4, 2, names=("0", "last")), r"model: not in the checkpoint: 'last\.weight', did you mean '1\.weight'\?"),
    "more": (net(3, 4, 2, 2), r"not in the checkpoint: '2\.weight'.*; '2\.bias'"),
    "fewer": (net(3, 4), r"only in the checkpoint: '1\.weight'; '1\.bias'"),
    "shapes": (net(3, 4, 5), r"model: 1\.weight has shape \[2, 4\] in the checkpoint, and \[5, 4\] here; 1\.bias has shape \[2\]"),
    "dtypes": (net(3, 4, 2, dtype=torch.float64), r"0\.weight is torch\.float32 in the checkpoint, and torch\.float64 here"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_another_model_is_an_error_that_says_how_it_differs(saved: Path, name: str) -> None:
    model, pattern = MISFITS[name]
    with (
        (run := Run(model)).acc as acc,
        unchanged(run),
        pytest.raises(CheckpointError, match=pattern) as caught,
    ):
        acc.load_state(saved)
    assert "nothing has changed" in str(caught.value) and "strict=False" in str(caught.value)


def test_without_strict_what_fits_is_loaded_and_what_does_not_is_said(saved: Path, caplog: Any) -> None:
    with Accelerator(cpu=True) as acc:
        one = acc.prepare(net(3, 4, 2))
        acc.load_state(saved, strict=False)
    with (run := Run(net(3, 4, 5))).acc as acc:
        before = run.model[1].weight.detach().clone()
        found = acc.load_state(saved, strict=False)
        assert torch.equal(run.model[0].weight, one[0].weight) and torch.equal(run.model[1].weight, before)
        assert run.optimizer.state[run.model[0].weight]["exp_avg"].shape == (4, 3)
        assert any("1.weight has shape" in words for words in found.skipped)
        assert any(
            "remembers parameters of another shape: model/1.weight" in words for words in found.skipped
        )
        acc.backward(run.model(torch.ones(1, 3)).sum())
        run.optimizer.step()
    assert "skipped: model: 1.weight has shape" in caplog.text


def test_what_was_saved_and_is_not_prepared_is_named(saved: Path) -> None:
    with Accelerator(cpu=True) as acc:
        with pytest.raises(CheckpointError, match=r"nothing here takes model; optimizer; .*prepare it"):
            acc.load_state(saved)
    with Accelerator(cpu=True) as acc:
        nets = acc.prepare(net(3, 4, 2), net(2, 2))
        with pytest.raises(CheckpointError, match="the checkpoint has no model_1"):
            acc.load_state(saved)
        assert "the checkpoint has no model_1" in acc.load_state(saved, strict=False).skipped
        assert nets[1][0].weight.shape == (2, 2)


def damaged(folder: Path, which: str) -> str:
    """fsdp: rank 1's shard is damaged, which rank 0 does not read; or rank 1's schedule refuses its state."""
    with (run := Run(net(8, 8, 8), strategy="fsdp")).acc as acc:
        acc.save_state(folder)
    with (run := Run(net(8, 8, 8), 2, strategy="fsdp")).acc as acc:
        if which == "file" and acc.is_main_process:
            (file,) = folder.glob("model-00002*")
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        acc.wait_for_everyone()
        if which == "schedule":
            take = run.schedule.scheduler.load_state_dict

            def refuse(state: Any) -> None:
                take(state)
                if acc.process_index == 1 and state["last_epoch"] == 1:
                    raise ValueError("not this one")

            run.schedule.scheduler.load_state_dict = refuse
        with unchanged(run), pytest.raises(CheckpointError) as caught:
            acc.load_state(folder)
        acc.backward(run.model(torch.ones(2, 8)).sum())  # the run goes on
        run.optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize(
    ("which", "words"),
    [("file", "model-00002-of-00002"), ("schedule", "state/scheduler_0: ValueError: not this one")],
)
def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing(ranks, tmp_path, which, words):
    said = ranks(damaged, tmp_path / "a", which)
    assert said[0] == said[1]
    assert "rank 1: " in said[0] and words in said[0] and "nothing has changed" in said[0]


def test_an_object_that_cannot_be_put_back_is_named(saved: Path) -> None:
    with (run := Run(net(3, 4, 2), 2)).acc as acc:

        def refuse(state: Any) -> None:
            raise ValueError("never")

        run.schedule.scheduler.load_state_dict = refuse
        with pytest.raises(CheckpointError, match="was not loaded: state/scheduler_0: ValueError: never;"):
            acc.load_state(saved)


def test_without_strict_an_object_that_fails_is_put_back_and_the_rest_is_loaded(saved: Path) -> None:
    with (run := Run(net(3, 4, 2), 3)).acc as acc:
        take = run.schedule.scheduler.load_state_dict

        def refuse(state: Any) -> None:
            take(state)
            if state["last_epoch"] == 1:
                raise ValueError("not this one")

        run.schedule.scheduler.load_state_dict = refuse
        assert acc.load_state(saved, strict=False).skipped == ("state/scheduler_0: ValueError: not this one",)
        assert run.schedule.state_dict()["last_epoch"] == 3 and run.optimizer.updates == 1


def meanwhile(run: Run, act: Callable[[], Any]) -> None:
    """Do it once, when all has been verified, and nothing has been read into live tensors."""
    take = run.schedule.scheduler.load_state_dict

    def acting(state: Any) -> None:
        run.schedule.scheduler.load_state_dict = take
        act()
        take(state)

    run.schedule.scheduler.load_state_dict = acting


def flip(file: Path) -> None:
    """In place: a process that has it open reads it."""
    with file.open("r+b") as there:
        there.seek(-1, 2)
        (byte,) = there.read(1)
        there.seek(-1, 2)
        there.write(bytes([byte ^ 1]))


def shorten(file: Path) -> None:
    with file.open("r+b") as there:
        there.truncate(100)


@pytest.mark.parametrize(
    ("change", "words"),
    [(flip, "block 0 .* is not what was written"), (shorten, "ends at byte 100 while it is read")],
)
def test_a_file_that_changes_after_it_was_verified_is_said(saved, change, words):
    (file,) = saved.glob("model-0*")
    content = file.read_bytes()
    with (run := Run(net(3, 4, 2), 2)).acc as acc:
        meanwhile(run, lambda: change(file))
        with pytest.raises(
            CheckpointError, match=f"was loaded in part, .* load this or another checkpoint .*{words}"
        ) as caught:
            acc.load_state(saved)
        assert "nothing has changed" not in str(caught.value)
        file.write_bytes(content)
        acc.load_state(saved)
        assert run.optimizer.updates == 1


def test_a_checkpoint_that_is_removed_after_it_was_verified_is_loaded(saved: Path) -> None:
    with Run(net(3, 4, 2)).acc as acc:
        one = acc.load_state(saved)
    with (run := Run(net(3, 4, 2), 2)).acc as acc:
        meanwhile(run, lambda: shutil.rmtree(saved))
        assert acc.load_state(saved).manifest == one.manifest
        assert run.optimizer.updates == 1 and not saved.exists()


REFERENCES = Path("/proc/self/clear_refs")


def peak() -> int:
    """Bytes: the most that was resident, since ``clear_refs`` where there is one."""
    if REFERENCES.exists():
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_a_load_takes_no_second_copy_of_the_state(tmp_path: Path) -> None:
    with (run := Run(net(1024, 2048))).acc as acc:  # 24 MiB with its states
        acc.save_state(tmp_path / "a")
        states = [t for state in run.optimizer.state.values() for t in state.values() if t.ndim]
        places = [t.data_ptr() for t in [*run.model.parameters(), *states]]
        expected = [t.detach().clone() for t in [*run.model.parameters(), *states]]
        with torch.no_grad():
            for t in [*run.model.parameters(), *states]:
                t.zero_()
        if REFERENCES.exists():
            REFERENCES.write_text("5")
        before = peak()
        acc.load_state(tmp_path / "a")
        assert peak() - before < 12 * 2**20
        now = [t for state in run.optimizer.state.values() for t in state.values() if t.ndim]
        assert [t.data_ptr() for t in [*run.model.parameters(), *now]] == places
        assert all(torch.equal(a, b) for a, b in zip([*run.model.parameters(), *now], expected))
