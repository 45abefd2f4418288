"""What `easymp estimate` takes for a model: counts, weights in files, and functions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from easymp import Accelerator
from easymp.base.dtensor import local
from easymp.cli.estimating import read_count, read_model, read_sample
from easymp.errors import CheckpointError, SettingError
from easymp.strategies.blocks import find_blocks
from easymp.training.memory import estimate

from ..strategies import models

KINDS = [
    ("mlp", "fp32"),
    ("mlp", "bf16"),
    ("conv", "bf16"),
    ("tied", "fp32"),
]  # that a table is multiplied with, too, no name says


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1.5B", 1_500_000_000),
        ("350M", 350_000_000),
        ("7b", 7 * 10**9),
        ("1e6", 10**6),
        ("1_000,000", 10**6),
        ("12k", 12_000),
        ("x", None),
    ],
)
def test_counts(text: str, count: int | None) -> None:
    assert read_count(text) == count


@pytest.mark.parametrize("count", [999, 10**6, 1_234_567, 10**7, 124_439_808, 7 * 10**9, 10**11])
def test_a_stand_in_has_exactly_so_many_parameters(count: int) -> None:
    sized = read_model(str(count))
    assert sized.parameters == count and not sized.runs
    if isinstance(sized.model, nn.Module):
        assert sum(p.numel() for p in sized.model.parameters()) == count
        assert all(p.is_meta for p in sized.model.parameters())
        assert len(find_blocks(sized.model, "blocks")) >= 2
        assert "a stand-in: a transformer of" in sized.notes[0]
    else:
        assert count < 10**6


# -- files -------------------------------------------------------------------------------------------------------------


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = models.make(kind).to(dtype)
    tied = {id(t): (name, t) for name, t in reversed(list(model.state_dict(keep_vars=True).items()))}
    save_file({name: t.detach() for name, t in tied.values()}, folder / "model.safetensors")
    return model


@pytest.mark.parametrize(("kind", "precision"), KINDS)
def test_a_file_needs_what_its_model_needs(tmp_path: Path, kind: str, precision: str) -> None:
    """The arithmetic of the model itself is held against real training in test_memory."""
    model = saved(kind, tmp_path)
    sized = read_model(str(tmp_path / "model.safetensors"))
    for strategy, world in (("ddp", 2), ("zero1", 2), ("fsdp", 4)):
        by_file, by_model = (
            estimate(m, strategy=strategy, precision=precision, world=world) for m in (sized.model, model)
        )
        for name in ("weights", "buffers", "gradients", "states", "copies"):
            assert getattr(by_file, name) == getattr(by_model, name), name


def test_a_training_holds_what_its_file_predicted(tmp_path: Path) -> None:
    model: nn.Module = saved("mlp", tmp_path)
    predicted = estimate(read_model(str(tmp_path)).model, precision="fp32")
    with Accelerator(mixed_precision="fp32", cpu=True) as acc:
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = acc.prepare(model, optimizer)
        acc.backward(model(torch.randn(8, 12)).square().mean())
        optimizer.step()
        states = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
        held = [
            [local(t).nbytes for t in found]
            for found in (model.parameters(), (p.grad for p in model.parameters()), states)
        ]
    assert [sum(sizes) for sizes in held] == [predicted.weights, predicted.gradients, predicted.states]


def test_types_of_a_file(tmp_path: Path) -> None:
    saved("mlp", tmp_path, torch.bfloat16)
    usual, own, half = (read_model(str(tmp_path), dtype) for dtype in (None, "own", "fp16"))
    assert {p.dtype for p in usual.model.parameters()} == {torch.float32}
    assert "the file holds bfloat16; counted as trained in fp32" in usual.notes[1]
    assert {p.dtype for p in own.model.parameters()} == {torch.bfloat16} and len(own.notes) == 1
    assert {p.dtype for p in half.model.parameters()} == {torch.float16}


def test_shards_with_an_index_and_names_of_all_kinds(tmp_path: Path) -> None:
    parts = {
        "a.safetensors": {
            "model.layers.0.attn.q.weight": (4, 8),
            "model.layers.0.attn.q.bias": (4,),
            "model.layers.0.norm.weight": (8,),
        },
        "b.safetensors": {
            "model.layers.1.attn.q.weight": (4, 8),
            "model.embed_tokens.weight": (9, 8),
            "model.forward.weight": (2, 2),
        },
    }
    for file, shapes in parts.items():
        extra = (
            {"model.rotary.inv_freq": torch.ones(3), "model.steps": torch.tensor(1)}
            if file == "b.safetensors"
            else {}
        )
        save_file({**{name: torch.zeros(shape) for name, shape in shapes.items()}, **extra}, tmp_path / file)
    index = {name: file for file, shapes in parts.items() for name in shapes}
    index |= {"model.rotary.inv_freq": "b.safetensors", "model.steps": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    sized = read_model(str(tmp_path / "model.safetensors.index.json"))
    assert dict(sized.model.named_parameters()).keys() == {
        name for shapes in parts.values() for name in shapes
    }
    assert dict(sized.model.named_buffers()).keys() == {"model.rotary.inv_freq", "model.steps"}
    kinds = {name: type(module).__name__ for name, module in sized.model.named_modules()}
    assert (kinds["model.layers.0.attn.q"], kinds["model.embed_tokens"], kinds["model.layers"]) == (
        "Linear",
        "Embedding",
        "ModuleDict",
    )
    assert len(find_blocks(sized.model, "blocks")) == 2
    assert sized.parameters == 2 * 32 + 4 + 8 + 72 + 4


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("nonsense", SettingError, "is no model: pass a number of parameters"),
        ("absent.safetensors", CheckpointError, "absent.safetensors"),
        ("weights.bin", SettingError, "holds Python objects, which can run code"),
        ("1e30", SettingError, "is no number of parameters"),
        ("0", SettingError, "is no number of parameters"),
        ("no_such_module:make", SettingError, "No module named 'no_such_module'"),
        ("torch.nn:Transformr", SettingError, "did you mean 'Transformer'"),
        ("torch.nn:Linear", SettingError, "missing 2 required positional arguments"),
        ("math:pi", SettingError, "is a float, neither a model nor something to call"),
        ("os:getcwd", SettingError, "gives a str, not a model"),
    ],
)
def test_what_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception], words: str
) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        read_model(text)
    assert words in str(caught.value)


# -- functions ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch

def make():
    return torch.nn.Linear(3, 5)

def looks():
    model = torch.nn.Linear(3, 5)
    assert model.weight.sum().item() < 1e9
    return model

class Space:
    model = torch.nn.Linear(3, 5)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "a_script_of_mine.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    yield "a_script_of_mine"
    sys.modules.pop("a_script_of_mine", None)


def test_functions_classes_and_models(script: str) -> None:
    before = list(sys.path)
    made, looked, kept = (read_model(f"{script}:{name}") for name in ("make", "looks", "Space.model"))
    assert all(p.is_meta for p in made.model.parameters()) and not made.notes
    assert (
        not any(p.is_meta for p in looked.model.parameters())
        and "built in the host's memory" in looked.notes[0]
    )
    assert made.parameters == looked.parameters == kept.parameters == 20 and kept.runs
    assert {p.dtype for p in read_model(f"{script}:make", "bf16").model.parameters()} == {torch.bfloat16}
    assert sys.path == before
    with pytest.raises(SettingError, match="dtype='f8' is none of own, fp32, bf16, fp16"):
        read_model(f"{script}:make", "f8")


def test_inputs_by_their_shapes() -> None:
    image, words = read_sample(["8x3x32x32", "8x1024:int64"])
    assert image.shape == (8, 3, 32, 32) and image.dtype == torch.float32 and image.is_meta
    assert words.shape == (8, 1024) and words.dtype == torch.int64
    for wrong in ("8x", "8x3:int63", "axb", ""):
        with pytest.raises(SettingError, match="is no input: pass its shape"):
            read_sample([wrong])
