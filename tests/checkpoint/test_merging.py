"""Shards become whole tensors, with the same bytes, that other tools and `load_state` read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import easymp
from easymp import Accelerator, CheckpointError, SettingError
from easymp.checkpoint import diff, inspect, merge, verify
from easymp.checkpoint.manifest import COMMIT, MANIFEST
from tests.strategies.models import make, whole

from .samples import flip

OF_ONE, OF_TWO = "step-00000002", "step-00000003"
INDEX = "model.safetensors.index.json"


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


@pytest.mark.parametrize("name", [OF_ONE, OF_TWO])
def test_weights_as_hugging_face_reads_them(samples: Path, tmp_path: Path, name: str) -> None:
    merge(samples / name, tmp_path / "out")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    weights = weights_in(tmp_path / "out")
    stored = inspect(samples / name)
    expected = {t.name.removeprefix("model/"): t.shape for t in stored.tensors if t.name.startswith("model/")}
    assert {n: tuple(t.shape) for n, t in weights.items()} == expected
    one, other = make("tied"), make("tied")
    easymp.load_weights(one, samples / name)
    easymp.load_weights(other, tmp_path / "out")
    for (n, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), n
        assert not torch.equal(a, make("tied").state_dict()[n]) or a.numel() < 20, n


@pytest.mark.parametrize("size", ["5GB", 4000])
def test_all_of_it_is_a_checkpoint_with_whole_tensors(samples: Path, tmp_path: Path, size: Any) -> None:
    out = tmp_path / "whole"
    merge(samples / OF_TWO, out, max_shard_size=size, all=True)
    assert diff(samples / OF_TWO, out).same
    assert verify(out) == []
    before, after = inspect(samples / OF_TWO), inspect(out)
    assert {t.pieces for t in after.tensors} == {1} and {t.pieces for t in before.tensors} != {1}
    assert (before.step, before.written, before.world_size, before.states) == (
        after.step,
        after.written,
        after.world_size,
        after.states,
    )
    assert (len(after.files) == len(after.groups) + 1) == (size == "5GB")
    assert json.loads((out / INDEX).read_text())["weight_map"].keys() == weights_of_model(out).keys()
    merge(out, tmp_path / "again", all=True)
    assert diff(out, tmp_path / "again").same


def weights_of_model(folder: Path) -> dict[str, torch.Tensor]:
    return {
        n: t for f in folder.glob("model-*.safetensors") for n, t in safetensors.torch.load_file(f).items()
    }


def go_on(strategy: str, folder: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Load, and train a step more."""
    acc = Accelerator(strategy=strategy)
    model = make("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 20)
    model, optimizer, schedule = acc.prepare(model, optimizer, schedule)
    acc.load_state(folder)
    loss = nn.functional.cross_entropy(model(torch.ones(8, 12)), torch.arange(8) % 5)
    acc.backward(loss)
    optimizer.step()
    schedule.step()
    found = {name: whole(p) for name, p in model.named_parameters()}
    acc.close()
    return float(loss), found


@pytest.mark.parametrize(("strategy", "processes"), [("fsdp", 2), ("single", 1)])
def test_training_goes_on_from_it_as_from_the_shards(
    samples: Path, tmp_path: Path, ranks: Any, strategy: str, processes: int
) -> None:
    merge(samples / OF_TWO, tmp_path / "whole", all=True)
    shards = ranks(go_on, strategy, str(samples / OF_TWO), processes=processes)[0]
    merged = ranks(go_on, strategy, str(tmp_path / "whole"), processes=processes)[0]
    assert shards[0] == merged[0]
    assert all(torch.equal(shards[1][n], merged[1][n]) for n in shards[1])


@pytest.mark.parametrize("all_", [False, True])
def test_what_is_damaged_leaves_nothing(root: Path, tmp_path: Path, all_: bool) -> None:
    flip(root / OF_TWO / "model-00002-of-00002.safetensors", -1)
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        merge(root / OF_TWO, tmp_path / "out", all=all_)
    assert not [
        f for f in tmp_path.rglob("*") if f.is_file() and "out" in str(f) and not f.name.startswith(".model")
    ]


def test_refusals(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights of 'modle', did you mean 'model'"):
        merge(root / OF_TWO, tmp_path / "out", model="modle")
    with pytest.raises(SettingError, match="max_shard_size='big' is no size"):
        merge(root / OF_TWO, tmp_path / "out", max_shard_size="big")
    with pytest.raises(SettingError, match="asks for everything"):
        merge(root / OF_TWO, tmp_path / "out", model="model_1", all=True)
    with pytest.raises(CheckpointError, match="is a checkpoint of save_state"):
        merge(root / OF_TWO, root / OF_ONE)
    with pytest.raises(CheckpointError, match="would be replaced by itself"):
        merge(root / OF_TWO, root / OF_TWO, all=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        merge(root / OF_TWO, tmp_path / "mine", all=True)
    (root / OF_TWO / COMMIT).unlink()
    with pytest.raises(CheckpointError, match="not committed"):
        merge(root / OF_TWO, tmp_path / "out")
    assert (root / OF_ONE / MANIFEST).exists() and verify(root / OF_ONE) == []
