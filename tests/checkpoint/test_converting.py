"""Weights of every kind that is read here become safetensors that load, in the precision asked for; what is not trusted is not opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import easymp
import easymp.cli as cli
from easymp import CheckpointError, SettingError
from easymp.checkpoint import convert
from tests.strategies.models import make

OF_TWO = "step-00000003"


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def torch_saved(folder: Path, kind: str) -> tuple[Path, nn.Module]:
    """A file or folder of torch.save with the tied model, and the model."""
    model = make("tied")
    state = model.state_dict()
    folder.mkdir()
    if kind == "sharded":
        names = list(state)
        for i, part in enumerate((names[:2], names[2:]), 1):
            torch.save({name: state[name] for name in part}, folder / f"pytorch_model-{i:05d}-of-00002.bin")
        table = {name: f"pytorch_model-{1 + (name not in names[:2]):05d}-of-00002.bin" for name in names}
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": table})
        )
        return folder, model
    if kind == "folder":
        torch.save(state, folder / "pytorch_model.bin")
        return folder, model
    inner = (
        {f"module._orig_mod.{name}": tensor for name, tensor in state.items()} if kind == "wrapped" else state
    )
    torch.save(
        {"epoch": 3, "state_dict": inner} if kind != "old" else inner,
        folder / "last.ckpt",
        _use_new_zipfile_serialization=kind != "old",
    )
    return folder / "last.ckpt", model


@pytest.mark.parametrize("kind", ["sharded", "folder", "nested", "wrapped", "old"])
def test_files_of_torch_save(kind: str, tmp_path: Path) -> None:
    place, model = torch_saved(tmp_path / "in", kind)
    with pytest.raises(
        CheckpointError, match=r"of torch.save, a format that can hold code: .*trust=True, or --trust"
    ):
        convert(place, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    convert(place, tmp_path / "out", trust=True)
    other = make("tied")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not easymp.load_weights(other, tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_a_checkpoint_of_ours_in_another_precision(samples: Path, tmp_path: Path) -> None:
    convert(samples / OF_TWO, tmp_path / "whole")
    convert(samples / OF_TWO, tmp_path / "half", dtype="bf16", max_shard_size="4KB")
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 2
    whole = safetensors.torch.load_file(tmp_path / "whole" / "model.safetensors")
    half = {
        n: t
        for f in (tmp_path / "half").glob("*.safetensors")
        for n, t in safetensors.torch.load_file(f).items()
    }
    assert whole.keys() == half.keys()
    for name, tensor in whole.items():
        assert torch.equal(half[name], tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
    convert(tmp_path / "half", tmp_path / "back", dtype="fp32")  # a Hugging Face folder with an index
    back = safetensors.torch.load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[n], half[n].to(whole[n].dtype)) for n in whole)


def test_what_is_no_float_stays(tmp_path: Path) -> None:
    state = {
        "n": torch.arange(3),
        "b": torch.tensor([True]),
        "f8": torch.ones(4).to(torch.float8_e4m3fn),
        "w": torch.ones(2),
    }
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "out", dtype="fp16")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {name: t.dtype for name, t in found.items()} == {
        "n": torch.int64, "b": torch.bool, "f8": torch.float8_e4m3fn, "w": torch.float16,
    }  # fmt: skip


def test_refusals(samples: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.tensor([1e6]), "module.w": torch.ones(1)}, weights)
    with pytest.raises(CheckpointError, match=r"module.w and w are both 'w' without their wrappers"):
        convert(weights, tmp_path / "out")
    safetensors.torch.save_file({"w": torch.tensor([1e6])}, weights)
    with pytest.raises(
        CheckpointError, match=r"w has values up to 1e\+06, too large for torch.float16: convert to bf16"
    ):
        convert(weights, tmp_path / "out", dtype="fp16")
    assert not list((tmp_path / "out").glob("model*"))
    with pytest.raises(CheckpointError, match="would be replaced while it is read"):
        convert(tmp_path, tmp_path)
    with pytest.raises(SettingError, match=r"dtype='bf61' is not one of fp32, .*'bf16'"):
        convert(weights, tmp_path / "out", dtype="bf61")
    with pytest.raises(CheckpointError, match="is a checkpoint of save_state"):
        convert(weights, samples / OF_TWO)
    torch.save({"weights": 3}, tmp_path / "x.pt")
    with pytest.raises(
        CheckpointError, match=r"no state dict of a model at its top or under state_dict.*it holds weights"
    ):
        convert(tmp_path / "x.pt", tmp_path / "out", trust=True)
    torch.save(make("tied"), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="holds more than plain data, and running it is not done here"):
        convert(tmp_path / "x.pt", tmp_path / "out", trust=True)
    (tmp_path / "x.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"cannot be read|more than plain data"):
        convert(tmp_path / "x.pt", tmp_path / "out", trust=True)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, _ = torch_saved(tmp_path / "in", "nested")
    assert cli.main(["checkpoint", "convert", str(place), str(tmp_path / "out")]) == 1
    assert "say so (trust=True, or --trust)" in capsys.readouterr().err
    assert (
        cli.main(
            [
                "checkpoint",
                "convert",
                "--trust",
                "--dtype",
                "bf16",
                "--json",
                str(place),
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out) == {"out": str(tmp_path / "out")}
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
