"""Folders of Accelerate's save_state: they are read, no code of theirs runs unless allowed, and a training goes on from them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, CheckpointError, checkpoint, load_weights

from ..strategies.models import make, whole

pytest.importorskip("accelerate")


class Counter:
    """A user's own object."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def written(folder: str, safe: bool) -> dict[str, Any]:
    """Train two models a little, and save; the live state."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import set_seed

    set_seed(3)
    acc = Accelerator(cpu=True)
    models = [make("mlp"), make("conv")]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizers[0], 1.0, 0.2, 20)
    *models, optimizers[0], optimizers[1], scheduler = acc.prepare(*models, *optimizers, scheduler)
    counter = Counter()
    counter.count = 7
    acc.register_for_checkpointing(counter)
    for model, optimizer in zip(models, optimizers):
        acc.backward(model(torch.randn(4, 12)).square().mean())
        optimizer.step()
        scheduler.step()
    acc.save_state(folder, safe_serialization=safe)
    torch.save({"scale": 8.0, "growth_factor": 2.0}, Path(folder, "scaler.pt"))  # as runs in fp16 write it
    models = [acc.unwrap_model(m) for m in models]
    acc.end_training()
    AcceleratorState._reset_state(True)
    return {
        "models": [m.state_dict() for m in models],
        "optimizers": [o.state_dict() for o in optimizers],
        "scheduler": scheduler.state_dict(),
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }


@pytest.mark.parametrize("safe", [True, False])
def test_all_of_a_folder_is_read(ranks, tmp_path, safe, caplog):
    (live,) = ranks(written, str(tmp_path), safe, processes=1)
    found = checkpoint.read_accelerate(tmp_path, allow_pickle=True)
    for got, expected in zip(found.models, live["models"], strict=True):
        assert set(got) == set(expected)
        assert all(torch.equal(got[name], t) for name, t in expected.items())
    for got, expected in zip(found.optimizers, live["optimizers"], strict=True):
        assert got["param_groups"] == expected["param_groups"]
        for number, state in expected["state"].items():
            assert all(torch.equal(got["state"][number][word], t) for word, t in state.items())
    assert (found.schedulers, found.custom) == ((live["scheduler"],), ({"count": 7},))
    assert found.scaler == {"scale": 8.0, "growth_factor": 2.0}
    assert list(found.rng) == [0] and found.step == 0
    assert found.rng[0]["random_state"] == live["python"]
    assert torch.equal(found.rng[0]["torch_manual_seed"], live["torch"])
    assert "its pickle is run" not in caplog.text  # all of it is plain data


def test_pickles_are_named_and_not_read_unless_allowed(ranks, tmp_path, monkeypatch):
    ranks(written, str(tmp_path), True, processes=1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "load", None)
        with pytest.raises(CheckpointError, match=r"optimizer_1.bin, .*can run code.*allow_pickle=True"):
            checkpoint.read_accelerate(tmp_path)
    assert not load_weights(make("mlp"), tmp_path)
    for path in tmp_path.iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    assert len(checkpoint.read_accelerate(tmp_path).models) == 2


class Crafted:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_pickle_runs_only_where_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, mark = tmp_path / "folder", tmp_path / "mark"
    folder.mkdir()
    torch.save(Crafted(mark), folder / "custom_checkpoint_0.pkl")
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0.pkl are pickles"):
        checkpoint.read_accelerate(folder)
    assert not mark.exists()
    checkpoint.read_accelerate(folder, allow_pickle=True)
    assert mark.exists()
    assert "custom_checkpoint_0.pkl holds more than plain data: its pickle is run" in caplog.text


WRONG = {
    "nothing": ([], r"not a folder of Accelerate's save_state"),
    "a gap": (["optimizer.bin", "optimizer_2.bin"], r"optimizer 1 is missing, 2 is there"),
    "shards": (["pytorch_model_fsdp_0/", "random_states_0.pkl"], r"fsdp_0 was written .*merge-weights"),
    "both": (["model.safetensors", "pytorch_model.bin"], r"model 0 is there twice"),
    "half": (["optimizer.bin/2"], r"optimizer.bin: cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_folders_that_cannot_be_read(tmp_path: Path, case: str) -> None:
    names, pattern = WRONG[case]
    for name in names:
        file, slash, half = name.partition("/")
        if slash and not half:
            (tmp_path / file).mkdir()
            continue
        torch.save({"a": torch.ones(3)}, tmp_path / file)
        if half:
            content = (tmp_path / file).read_bytes()
            (tmp_path / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=pattern):
        checkpoint.read_accelerate(tmp_path, allow_pickle=True)


def objects() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(make("tied"), nn.Dropout(0.2))
    inner: Any = model[0]
    groups = [{"params": list(inner.blocks.parameters())}, {"params": [inner.embed.weight], "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 20)


def steps(acc: Any, model: Any, optimizer: Any, schedule: Any, begin: int, end: int) -> list[float]:
    losses = []
    torch.set_num_threads(1)  # Accelerate sets another number in a process that a launcher started
    for i in range(begin, end):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(i))
        loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 5)
        acc.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def theirs(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    from accelerate import Accelerator as Theirs
    from accelerate.state import AcceleratorState

    torch.manual_seed(1)
    acc = Theirs(cpu=True)
    model, optimizer, schedule = acc.prepare(*objects())
    counter = Counter()
    acc.register_for_checkpointing(counter)
    steps(acc, model, optimizer, schedule, 0, 3)
    counter.count = 3
    acc.save_state(folder)
    saved = {name: t.detach().clone() for name, t in acc.unwrap_model(model).state_dict().items()}
    losses = steps(acc, model, optimizer, schedule, 3, 6)
    acc.end_training()
    AcceleratorState._reset_state(True)
    return losses, saved


def ours(folder: Path, strategy: str | None) -> tuple[list[float], dict[str, Tensor], int]:
    with Accelerator(cpu=True, strategy=strategy, fused=False, timeout=50) as acc:
        model, optimizer, schedule = objects()
        for p in model.parameters():
            nn.init.zeros_(p)
        model, optimizer, schedule = acc.prepare(model, optimizer, schedule)
        counter = Counter()
        acc.register_for_checkpointing(counter)
        with pytest.raises(CheckpointError, match="are pickles"):
            acc.load_state(folder)
        found = acc.load_state(folder, allow_pickle=True)
        assert found.skipped == () and counter.count == 3 and optimizer.updates == 3
        weights = {name: whole(t) for name, t in model.state_dict().items()}
        return steps(acc, model, optimizer, schedule, 3, 6), weights, int(schedule.state_dict()["last_epoch"])


def test_a_training_goes_on_from_it(ranks: Any, tmp_path: Path) -> None:
    ((losses, saved),) = ranks(theirs, tmp_path / "a", processes=1)
    ((here, weights, epoch),) = ranks(ours, tmp_path / "a", None, processes=1)
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    assert here == losses and epoch == 6
    for _, weights, _ in ranks(ours, tmp_path / "a", "fsdp"):
        assert all(torch.equal(weights[name], value) for name, value in saved.items())


def test_another_order_of_parameters_is_an_error(ranks: Any, tmp_path: Path) -> None:
    ranks(theirs, tmp_path / "a", processes=1)
    with Accelerator(cpu=True) as acc:
        model, _, _ = objects()
        model, _optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(CheckpointError, match=r"param groups of \[\d+, 1\] parameters, and has"):
            acc.load_state(tmp_path / "a", allow_pickle=True)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
