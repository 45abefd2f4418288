"""What hooks write into a checkpoint is part of it, and comes back to hooks, wherever it lies; on all ranks or on none."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import easymp
from easymp import Accelerator, CheckpointError, checkpoint
from easymp.cli import main

from ..conftest import Ranks
from ..strategies.models import make, whole
from ..strategies.ways import WAYS
from .samples import flip

NAMES = ("unet/.notes", "unet/config.json", "unet/weights.safetensors")


class Run:
    """A training whose hooks keep its weights, as scripts of diffusers do: on the main process when saving, on each when loading."""

    def __init__(self, folder: Path | None = None, hooks: bool = True, **options: Any) -> None:
        self.acc = Accelerator(mixed_precision="no", seed=3, project_dir=folder, **options)
        model = nn.Linear(4, 3)
        self.model, self.optimizer = self.acc.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
        self.given: list[str] = []
        if hooks:
            self.acc.register_save_state_pre_hook(self.save)
            self.acc.register_load_state_pre_hook(self.load)

    def save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        self.given.append(output_dir)
        assert os.listdir(output_dir) == [] and len(models) == len(weights) == 1
        if self.acc.is_main_process:
            folder = Path(output_dir, "unet")
            folder.mkdir()
            state = self.acc.unwrap_model(models[0]).state_dict()
            save_file({name: t.clone() for name, t in state.items()}, folder / "weights.safetensors")
            (folder / "config.json").write_text("{}")
            (folder / ".notes").write_bytes(b"")
            weights.pop()

    def load(self, models: list[Any], input_dir: str) -> None:
        self.given.append(input_dir)
        assert json.loads(Path(input_dir, "unet/config.json").read_text()) == {}
        models.pop().load_state_dict(load_file(Path(input_dir, "unet/weights.safetensors")))

    def step(self) -> None:
        self.acc.backward(self.model(torch.ones(2, 4)).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.acc.close()


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "root")
    return f"{'memory:/' if request.param == 'memory' else request.getfixturevalue('s3')}/{tmp_path.name}"


@pytest.mark.parametrize(
    ("root", "async_"),
    [("folder", False), ("folder", True), ("memory", False), ("s3", True)],
    indirect=["root"],
)
def test_their_files_are_part_of_it(root, async_, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    place = f"{root}/checkpoint-7"
    with Run() as run:
        run.step()
        run.acc.save_state(place, async_=async_)
        weight = run.weight()
        run.step()
        run.acc.load_state(place)
        assert torch.equal(run.weight(), weight)
        assert [Path(given).name for given in run.given] == ["checkpoint-7"] * 2
        assert [os.path.exists(given) for given in run.given] == [False, "://" not in root]
    assert not [name for name in os.listdir(tmp_path / "tmp") if name.startswith("easymp-")]
    assert [entry.name for entry in checkpoint.list_checkpoints(root)] == ["checkpoint-7"]
    found = checkpoint.inspect(place)
    assert sorted(found.extra) == list(NAMES) and set(NAMES) <= set(found.files)
    assert not any(tensor.name.startswith("model/") for tensor in found.tensors)
    assert checkpoint.verify(place) == []
    if "://" not in root:
        assert not [name for name in os.listdir(root) if name.startswith(".")]
        assert (Path(place) / "unet/config.json").read_text() == "{}"


def test_they_are_compared_merged_shown_and_pruned_with_it(tmp_path, capsys):
    with Run(tmp_path) as run:
        steps = []
        for _ in range(3):
            run.step()
            steps.append(Path(run.acc.save_state()))
    states = [it.path.partition("/crc32")[0] for it in checkpoint.diff(*steps[:2]).states]
    assert [path for path in states if path.startswith("extra")] == ["extra/unet/weights.safetensors"]
    merged = tmp_path / "merged"
    checkpoint.merge(steps[2], merged, all=True)
    assert checkpoint.verify(merged) == [] and checkpoint.diff(steps[2], merged).same
    with Run() as run:
        run.acc.load_state(merged)
    assert main(["checkpoint", "inspect", str(steps[0])]) == 0
    assert "unet/config.json" in capsys.readouterr().out
    size = sum(file.stat().st_size for step in steps[:2] for file in step.rglob("*") if file.is_file())
    assert checkpoint.prune(tmp_path / "checkpoints", 1).size == size
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000003"]


def link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def link_above(file: Path) -> None:
    file.parent.rename(file.parent.with_name("elsewhere"))
    file.parent.symlink_to("elsewhere")


DAMAGE = {
    "flipped": (lambda file: flip(file, 0), "is not what was written"),
    "longer": (lambda file: file.write_bytes(b"{} "), "3 bytes, and 2 were written"),
    "missing": (Path.unlink, "no such file"),
    "a link": (link, "link"),
    "in a link": (link_above, "link"),
}


def test_damage_is_found_before_hooks_see_it(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        saved = Path(run.acc.save_state())
        run.step()
        weight, given = run.weight(), len(run.given)
        for name, (damage, words) in DAMAGE.items():
            place = tmp_path / name
            shutil.copytree(saved, place)
            damage(place / "unet/config.json")
            with pytest.raises(CheckpointError, match=f"was not loaded, and nothing has changed: .*{words}"):
                run.acc.load_state(place)
            assert {it.file for it in checkpoint.verify(place)} == (
                set(NAMES) if damage is link_above else {"unet/config.json"}
            )
        assert torch.equal(run.weight(), weight) and len(run.given) == given
        older = run.acc.save_state()
        run.step()
        damage(Path(run.acc.save_state()) / "unet/config.json")
        assert run.acc.resume() == older, "a damaged one is left out"


def write(path: str, text: str = "") -> Any:
    def hook(models: Any, weights: Any, output_dir: str) -> None:
        file = Path(output_dir, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return hook


def fail(*_: object) -> None:
    raise ZeroDivisionError("mine")


REFUSED = {
    "a manifest": (write("manifest.json"), "the checkpoint's own"),
    "in a file of ours": (write("model-00001-of-00001.safetensors/a"), "the checkpoint's own"),
    "a name of other systems": (write("a:b"), "every file system"),
    "beside": (write("../a"), "wrote a beside the folder"),
    "a link": (lambda models, weights, to: Path(to, "a").symlink_to("/etc/hostname"), "made a, a link"),
    "a link to a folder": (lambda models, weights, to: Path(to, "a").symlink_to("/etc"), "made a, a link"),
    "a pipe": (lambda models, weights, to: os.mkfifo(Path(to, "a")), "made a, a link or a device"),
    "one name but for its case": (lambda *given: (write("a")(*given), write("A")(*given)), "have one name"),
    "an error": (fail, "mine"),
}


def test_what_cannot_be_kept_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with Run(tmp_path, hooks=False) as run:
        run.acc.save_state()
        for hook, words in REFUSED.values():
            handle = run.acc.register_save_state_pre_hook(hook)
            with pytest.raises(ZeroDivisionError if hook is fail else CheckpointError, match=words):
                run.acc.save_state()
            handle.remove()
            assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000000"]
            assert run.acc.save_iteration == 1
        place = run.acc.save_state()
        run.acc.register_save_state_pre_hook(lambda *_: (Path(place) / "mine").write_text(""))
        with pytest.raises(CheckpointError, match="a hook wrote to"):
            run.acc.save_state(place)


def _together(folder: str) -> Any:
    with Run(Path(folder), strategy="ddp") as run:
        rank = run.acc.process_index
        run.acc.register_save_state_pre_hook(write(f"ranks/{rank}.json", str(rank)))
        run.acc.register_save_state_pre_hook(write("all.json", "[1]"))
        run.step()
        place = run.acc.save_state(async_=True)
        weight = run.weight()
        run.step()
        run.acc.load_state(place)
        same = torch.equal(run.weight(), weight)
        said = []
        one, other = (fail, write("one")) if rank else (write("a"), write("one/a"))
        for hook in (write("differs", str(rank)), one, other):
            handle = run.acc.register_save_state_pre_hook(hook)
            with pytest.raises((CheckpointError, ZeroDivisionError)) as caught:
                run.acc.save_state()
            said.append(str(caught.value))
            handle.remove()
        run.acc.save_state()
        return same, said, run.given


def test_files_of_several_ranks(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(_together, str(tmp_path), processes=2)
    for rank, (same, said, _) in enumerate(found):
        assert same
        assert "the hooks of ranks 0 and 1 wrote differs with different bytes" in said[0]
        assert said[1] == ("mine" if rank else "a hook failed: rank 1: ZeroDivisionError: mine")
        assert "'one' is a file of a hook, and a folder with 'one/a' in it" in said[2]
    assert found[0][2][0] != found[1][2][0]
    place = tmp_path / "checkpoints" / "step-00000001"
    assert checkpoint.verify(place) == []
    assert sorted(checkpoint.inspect(place).extra) == sorted(
        ["all.json", "ranks/0.json", "ranks/1.json", *NAMES]
    )
    there = [tensor.name for tensor in checkpoint.inspect(place).tensors]
    assert not any(name.startswith("model/") for name in there), "the main process left none to save"
    assert sorted(os.listdir(place.parent)) == ["latest", "step-00000001"]


def _whole_weights(folder: str, labels: list[str]) -> list[Any]:
    return [_whole_weights_of(folder, label) for label in labels]


def _whole_weights_of(folder: str, label: str) -> Any:
    """Hooks that keep whole weights, as Hugging Face's tools read them, of a model under this strategy."""
    way = WAYS[label]
    with Accelerator(strategy=way.strategy, strategy_options=way.options) as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))

        def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            tensors = acc.get_state_dict(models[0])
            if acc.is_main_process:
                Path(output_dir, "whole").mkdir()
                save_file(tensors, Path(output_dir, "whole/model.safetensors"))
                weights.pop()

        def step() -> list[torch.Tensor]:
            acc.backward(torch.nn.functional.cross_entropy(model(torch.ones(8, 12)), torch.arange(8) % 5))
            optimizer.step()
            optimizer.zero_grad()
            return values()

        def values() -> list[torch.Tensor]:
            return [whole(p).clone() for p in model.parameters() if not p.is_meta]

        acc.register_save_state_pre_hook(save)
        acc.register_load_state_pre_hook(
            lambda models, to: easymp.load_weights(models.pop(), Path(to, "whole"))
        )
        before = step()
        place = acc.save_state(f"{folder}/{label}", async_=True)
        after = step()
        acc.load_state(place)
        back = all(map(torch.equal, before, values())) and all(map(torch.equal, after, step()))
        there = checkpoint.inspect(place)
        kept = [tensor.name for tensor in there.tensors if tensor.name.startswith("model/")]
        return back, kept, there.extra, checkpoint.verify(place)


@pytest.mark.slow
def test_whole_weights_of_sharded_models(ranks: Ranks, tmp_path: Path) -> None:
    labels = ["ddp", "zero1", "fsdp", "tensor_parallel", "pipeline"]
    for found in ranks(_whole_weights, str(tmp_path), labels, processes=2):
        assert found == [(True, [], ("whole/model.safetensors",), [])] * len(labels)
