"""Folders of Accelerate's save_state.

They are read, no code of theirs runs unless allowed, and a training goes on from them.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator, CheckpointError, Settings, load_weights
from easymp.checkpoint.accelerate import read_folder

from ..strategies.models import make, whole
from .samples import Holder

pytest.importorskip("accelerate")


def prepared(acc: Any) -> tuple[Any, ...]:
    """Two models, their optimizers, and a schedule; an object that is registered."""
    model, second_model = nn.Sequential(make("tied"), nn.Dropout(0.2)), make("mlp")
    inner: Any = model[0]
    groups = [{"params": list(inner.blocks.parameters())}, {"params": [inner.embed.weight], "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 20)
    counter = Holder({"count": 0})
    acc.register_for_checkpointing(counter)
    return *acc.prepare(model, second_model, optimizer, torch.optim.AdamW(second_model.parameters()), schedule), counter


def steps(acc: Any, prepared_objects: tuple[Any, ...], begin: int, end: int) -> list[float]:
    model, second_model, *optimizers, schedule, _ = prepared_objects
    losses = []
    torch.set_num_threads(1)  # Accelerate sets another number in a process that a launcher started
    for i in range(begin, end):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(i))
        loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 5)
        acc.backward(loss)
        acc.backward(second_model(x).square().mean())
        for stepped in (*optimizers, schedule):
            stepped.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_with_accelerate(folder: Path) -> dict[str, Any]:
    """Train a little with Accelerate, save, and go on.

    What was live when it was saved, and the losses that followed.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    torch.manual_seed(1)
    acc = Accelerator(cpu=True)
    objects = prepared(acc)
    steps(acc, objects, 0, 3)
    *_, schedule, counter = objects
    counter.state = {"count": 3}
    for safe in (True, False):
        acc.save_state(folder / str(safe), safe_serialization=safe)
        torch.save({"scale": 8.0}, folder / str(safe) / "scaler.pt")  # as runs in fp16 write it
    models = [acc.unwrap_model(m).state_dict() for m in objects[:2]]
    live = {
        "models": [{name: t.clone() for name, t in state.items()} for state in models],
        "schedule": schedule.state_dict(),
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    live["losses"] = steps(acc, objects, 3, 6)
    acc.end_training()
    AcceleratorState._reset_state(True)
    return live


@pytest.fixture(scope="module")
def accelerate_folders(ranks, tmp_path_factory):
    """A folder with Accelerate's folders "True" (of safetensors) and "False", and what was live."""
    folder = tmp_path_factory.mktemp("accelerate")
    return folder, ranks(save_with_accelerate, folder, processes=1)[0]


@pytest.mark.parametrize("safe", ["True", "False"])
def test_all_of_a_folder_is_read(accelerate_folders, safe, caplog):
    folder, live = accelerate_folders
    states = read_folder(folder / safe, allow_pickle=True)
    for got, expected in zip(states["model"].values(), live["models"], strict=True):
        assert set(got) | {"0.head.weight"} == set(expected) | {"0.head.weight"}
        assert all(torch.equal(got[name], expected[name]) for name in got)
    optimizers = states["optimizer"].values()
    assert [len(state["param_groups"]) for state in optimizers] == [2, 1]
    assert {int(entry["step"]) for state in optimizers for entry in state["state"].values()} == {3}
    assert (states["scheduler"], states["custom_checkpoint"]) == ({0: live["schedule"]}, {0: {"count": 3}})
    assert states["scaler"] == {0: {"scale": 8.0}} and list(states["random_states"]) == [0]
    assert states["random_states"][0]["random_state"] == live["python"]
    assert torch.equal(states["random_states"][0]["torch_manual_seed"], live["torch"])
    assert "its pickle is run" not in caplog.text  # all of it is plain data


def test_pickles_are_named_and_not_read_unless_allowed(accelerate_folders, tmp_path, monkeypatch):
    folder = tmp_path / "a"
    shutil.copytree(accelerate_folders[0] / "True", folder)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "load", None)
        with pytest.raises(CheckpointError, match=r"optimizer_1.bin, .*can run code.*allow_pickle=True"):
            read_folder(folder)
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    assert len(read_folder(folder)["model"]) == 2
    (folder / "model.safetensors").unlink()
    (folder / "model_1.safetensors").rename(folder / "model.safetensors")
    assert not load_weights(make("mlp"), folder)


class Crafted:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_pickle_runs_only_where_allowed(tmp_path, caplog):
    folder, mark = tmp_path / "folder", tmp_path / "mark"
    folder.mkdir()
    torch.save(Crafted(mark), folder / "custom_checkpoint_0.pkl")
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0.pkl are pickles"):
        read_folder(folder)
    assert not mark.exists()
    read_folder(folder, allow_pickle=True)
    assert mark.exists()
    assert "custom_checkpoint_0.pkl holds more than plain data: its pickle is run" in caplog.text


WRONG = {
    r"not a folder of Accelerate's save_state": [],
    r"optimizer 1 is missing, 2 is there": ["optimizer.bin", "optimizer_2.bin"],
    r"fsdp_0 was written .*merge-weights": ["pytorch_model_fsdp_0/", "random_states_0.pkl"],
    r"model 0 is there twice": ["model.safetensors", "pytorch_model.bin"],
    r"optimizer.bin: cannot be read": ["half", "optimizer.bin"],
}


def test_folders_that_cannot_be_read(tmp_path):
    for number, (message, names) in enumerate(WRONG.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in names:
            if name.endswith("/"):
                (folder / name).mkdir()
            elif name != "half":
                torch.save({"a": torch.ones(3)}, folder / name)
        if "half" in names:
            (folder / name).write_bytes((folder / name).read_bytes()[:200])
        with pytest.raises(CheckpointError, match=message):
            read_folder(folder, allow_pickle=True)


def load_with_easymp(folder: Path, strategy: str | None) -> tuple[list[float], list[Any], int]:
    with Accelerator(cpu=True, strategy=strategy, settings=Settings(fused=False, timeout=50)) as acc:
        objects = prepared(acc)
        model, second_model, optimizer, _, schedule, counter = objects
        with torch.no_grad():
            for p in (*model.parameters(), *second_model.parameters()):
                p.zero_()
        with pytest.raises(CheckpointError, match="are pickles"):
            acc.load_state(folder)
        loaded = acc.load_state(folder, allow_pickle=True)
        assert loaded.skipped == () and counter.state == {"count": 3} and optimizer.updates == 3
        weights = [{name: whole(t) for name, t in module.state_dict().items()} for module in (model, second_model)]
        return steps(acc, objects, 3, 6), weights, int(schedule.state_dict()["last_epoch"])


def test_a_training_goes_on_from_it(ranks, accelerate_folders):
    folder, live = accelerate_folders
    single = ranks(load_with_easymp, folder / "True", None, processes=1)
    assert single[0][0] == live["losses"] and single[0][2] == 6
    for _, weights, _ in (*single, *ranks(load_with_easymp, folder / "True", "fsdp")):
        for got, expected in zip(weights, live["models"], strict=True):
            assert all(torch.equal(got[name], value) for name, value in expected.items())
