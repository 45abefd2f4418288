"""`convert`: weights of every kind become safetensors that load; shards become whole tensors with the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import easymp
from easymp import CheckpointError, SettingError, checkpoint
from easymp.cli import main
from tests.strategies.models import make

from .samples import flip

OF_ONE, OF_TWO = "step-00000002", "step-00000003"
INDEX = "model.safetensors.index.json"
State = dict[str, Tensor]


def weights_in(folder: Path, pattern: str = "*.safetensors") -> State:
    files = sorted(folder.glob(pattern))
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


def loaded(path: Path) -> State:
    """The weights that the tied model takes from there."""
    model = make("tied")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not easymp.load_weights(model, path)
    return model.state_dict()


def same(one: State, second: State) -> bool:
    return one.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in one.items())


def torch_saved(folder: Path, kind: str) -> Path:
    """A file or folder of torch.save with the tied model."""
    state = make("tied").state_dict()
    names, inner = list(state), state
    folder.mkdir()
    if kind == "sharded":
        table = {name: f"pytorch_model-{1 + (i > 1):05d}-of-00002.bin" for i, name in enumerate(names)}
        for file in set(table.values()):
            torch.save({name: state[name] for name in names if table[name] == file}, folder / file)
        index = json.dumps({"metadata": {}, "weight_map": table})
        (folder / "pytorch_model.bin.index.json").write_text(index)
        return folder
    if kind == "folder":
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    if kind == "wrapped":
        inner = {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}
    file, old = folder / "last.ckpt", kind == "old"
    torch.save(inner if old else {"epoch": 3, "state_dict": inner}, file, _use_new_zipfile_serialization=not old)
    return file


def test_files_of_torch_save_are_converted_with_trust(tmp_path):
    for kind in ("sharded", "folder", "nested", "wrapped", "old"):
        path, target = torch_saved(tmp_path / kind, kind), tmp_path / f"{kind} out"
        with pytest.raises(CheckpointError, match=r"of torch.save, .*trust=True, or --trust"):
            checkpoint.convert(path, target)
        assert not target.exists()
        checkpoint.convert(path, target, trust=True)
        assert same(loaded(target), make("tied").state_dict())


def test_a_checkpoint_is_converted_to_another_precision(samples, tmp_path):
    full, bf16, fp32 = (tmp_path / name for name in ("full", "half", "back"))
    checkpoint.convert(samples / OF_TWO, full)
    checkpoint.convert(samples / OF_TWO, bf16, dtype="bf16", max_shard_size="4KB")
    assert len(list(bf16.glob("*.safetensors"))) > 2
    assert same(
        weights_in(bf16), {n: t.bfloat16() if t.is_floating_point() else t for n, t in weights_in(full).items()}
    )
    checkpoint.convert(bf16, fp32, dtype="fp32")  # a Hugging Face folder with an index
    assert same(weights_in(fp32), {n: weights_in(bf16)[n].to(t.dtype) for n, t in weights_in(full).items()})


def test_integers_and_8_bit_floats_keep_their_dtype(tmp_path):
    small = torch.ones(4).to(torch.float8_e4m3fn)
    state = {"n": torch.arange(3), "b": torch.tensor([True]), "f8": small, "w": torch.ones(2)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "out", dtype="fp16")
    dtypes = {name: t.dtype for name, t in weights_in(tmp_path / "out").items()}
    assert dtypes == {name: t.dtype for name, t in state.items()} | {"w": torch.float16}


def test_what_convert_refuses(samples, tmp_path):
    weights, pickled, target = tmp_path / "model.safetensors", tmp_path / "x.pt", tmp_path / "out"

    def refused(message: str, path: Path = weights, target_path: Path = target, **options: Any) -> None:
        with pytest.raises((CheckpointError, SettingError), match=message):
            checkpoint.convert(path, target_path, **options)

    safetensors.torch.save_file({"w": torch.ones(1), "module.w": torch.ones(1)}, weights)
    refused("module.w and w are both 'w' without wrappers")
    safetensors.torch.save_file({"w": torch.tensor([1e6])}, weights)
    refused(r"w has values up to 1e\+06, too large for torch.float16: convert to bf16", dtype="fp16")
    assert not list(target.glob("model*"))
    refused("would be replaced while it is read", tmp_path, tmp_path)
    refused("dtype='bf61' is not one of fp32, .*'bf16'", dtype="bf61")
    refused("is a checkpoint of save_state", target_path=samples / OF_TWO)
    torch.save({"weights": 3}, pickled)
    refused("no state dict at its top or under state_dict.*it has weights", pickled, trust=True)
    torch.save(make("tied"), pickled)
    refused("holds more than plain data, and running it is not done here", pickled, trust=True)
    pickled.write_bytes(b"nothing")
    refused("cannot be read|more than plain data", pickled, trust=True)


def test_the_command_converts(tmp_path, capsys):
    paths = str(torch_saved(tmp_path / "in", "nested")), str(tmp_path / "out")
    assert main(["checkpoint", "convert", *paths]) == 1
    assert "trust=True, or --trust" in capsys.readouterr().err
    assert main(["checkpoint", "convert", "--trust", "--dtype", "bf16", "--json", *paths]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(tmp_path / "out")}
    assert {t.dtype for t in weights_in(tmp_path / "out").values()} == {torch.bfloat16}


def test_converted_weights_are_as_hugging_face_reads_them(samples, tmp_path):
    for name in (OF_ONE, OF_TWO):
        target = tmp_path / name
        checkpoint.convert(samples / name, target)
        assert [f.name for f in target.iterdir()] == ["model.safetensors"]
        tensors = checkpoint.inspect(samples / name).tensors
        expected = {t.name.removeprefix("model/"): t.shape for t in tensors if t.name.startswith("model/")}
        assert {n: tuple(t.shape) for n, t in weights_in(target).items()} == expected
        assert same(loaded(samples / name), loaded(target))
    assert not same(loaded(target), make("tied").state_dict())


def test_converting_damage_leaves_nothing(root, tmp_path):
    flip(root / OF_TWO / "model-00002-of-00002.safetensors", -1)
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        checkpoint.convert(root / OF_TWO, tmp_path / "out")
    assert not [f for f in tmp_path.glob("*out*/**/*") if f.is_file() and not f.name.startswith(".model")]


def test_what_is_refused_of_a_checkpoint(root, tmp_path):
    def refused(message: str, target: Path, **options: Any) -> None:
        with pytest.raises((CheckpointError, SettingError), match=message):
            checkpoint.convert(root / OF_TWO, target, **options)

    refused("no weights of 'modle', did you mean 'model'", tmp_path / "out", model="modle")
    refused("max_shard_size='big'", tmp_path / "out", max_shard_size="big")
    (root / OF_TWO / "COMMIT").unlink()
    refused("not committed", tmp_path / "out")
    assert checkpoint.verify(root / OF_ONE) == []


def test_convert_reads_and_writes_urls(samples, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    try:
        checkpoint.convert(samples / OF_TWO, "memory://merged/weights")
        assert memory.isfile("/merged/weights/model.safetensors")
    finally:
        memory.rm("/merged", recursive=True)
