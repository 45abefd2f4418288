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

from easymp import CheckpointError, checkpoint, load_weights
from easymp.cli import main

from ..strategies.models import make, mean_square, sgd, train_step, under, whole
from .samples import Small, flip

NAMES = ("unet/.notes", "unet/config.json", "unet/weights.safetensors")


class Run(Small):
    """Its hooks keep its weights, as scripts of diffusers do: on the main process when saving, on each when loading."""

    def __init__(self, folder: Path | None = None, hooks: bool = True, **options: Any) -> None:
        super().__init__(folder, **options)
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

    def saves(self, *args: Any, **how: Any) -> Path:
        """A checkpoint, one step later."""
        self.step()
        return Path(self.acc.save_state(*args, **how))


@pytest.mark.parametrize(
    ("kind", "async_"), [("folder", False), ("folder", True), ("memory", False), ("s3", True)]
)
def test_their_files_are_part_of_it(kind, async_, tmp_path, monkeypatch, request):
    root = {"folder": str(tmp_path / "root"), "memory": f"memory://{tmp_path.name}"}.get(kind)
    root = root or f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    place = f"{root}/checkpoint-7"
    with Run() as run:
        run.saves(place, async_=async_)
        weight = run.weight()
        run.step()
        run.acc.load_state(place)
        assert torch.equal(run.weight(), weight)
        assert [Path(given).name for given in run.given] == ["checkpoint-7"] * 2
        assert [os.path.exists(given) for given in run.given] == [False, kind == "folder"]
    assert not [name for name in os.listdir(tmp_path / "tmp") if name.startswith("easymp-")]
    assert [entry.name for entry in checkpoint.list_checkpoints(root)] == ["checkpoint-7"]
    found = checkpoint.inspect(place)
    assert sorted(found.extra) == list(NAMES) and set(NAMES) <= set(found.files)
    assert not any(tensor.name.startswith("model/") for tensor in found.tensors)
    assert checkpoint.verify(place) == []
    if kind == "folder":
        assert not [name for name in os.listdir(root) if name.startswith(".")]
        assert (Path(place) / "unet/config.json").read_text() == "{}"


def test_they_are_compared_merged_shown_and_pruned_with_it(tmp_path, capsys):
    with Run(tmp_path) as run:
        steps = [run.saves() for _ in range(3)]
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


DAMAGE = {
    "is not what was written": lambda file: flip(file, 0),
    "3 bytes, and 2 were written": lambda file: file.write_bytes(b"{} "),
    "no such file": Path.unlink,
    "a link": link,
    "a link, ": lambda file: link(file.parent),
}


def test_damage_is_found_before_hooks_see_it(tmp_path):
    with Run(tmp_path) as run:
        saved = Path(run.acc.save_state())
        run.step()
        weight, given = run.weight(), len(run.given)
        for number, (words, damage) in enumerate(DAMAGE.items()):
            place = tmp_path / str(number)
            shutil.copytree(saved, place)
            damage(place / "unet/config.json")
            with pytest.raises(CheckpointError, match=f"was not loaded, and nothing has changed: .*{words}"):
                run.acc.load_state(place)
            wrong = set(NAMES) if (place / "unet").is_symlink() else {"unet/config.json"}
            assert {it.file for it in checkpoint.verify(place)} == wrong
        assert torch.equal(run.weight(), weight) and len(run.given) == given
        older = run.acc.save_state()
        flip(run.saves() / "unet/config.json", 0)
        assert run.acc.resume() == older, "a damaged one is left out"


def write(path: str, text: str = "") -> Any:
    def hook(models: Any, weights: Any, output_dir: str) -> None:
        file = Path(output_dir, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return hook


def fail(*_: object) -> None:
    raise ZeroDivisionError("mine")


REFUSED = [
    (write("manifest.json"), "the checkpoint's own"),
    (write("model-00001-of-00001.safetensors/a"), "the checkpoint's own"),
    (write("a:b"), "every file system"),
    (write("../a"), "wrote a beside the folder"),
    (lambda models, weights, to: Path(to, "a").symlink_to("/etc/hostname"), "made a, a link"),
    (lambda models, weights, to: Path(to, "a").symlink_to("/etc"), "made a, a link"),
    (lambda models, weights, to: os.mkfifo(Path(to, "a")), "made a, a link or a device"),
    (lambda *given: (write("a")(*given), write("A")(*given)), "have one name"),
    (fail, "mine"),
]


def test_what_cannot_be_kept_is_refused_and_leaves_nothing(tmp_path):
    with Run(tmp_path, hooks=False) as run:
        run.acc.save_state()
        for hook, words in REFUSED:
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


def together(folder: str) -> Any:
    with Run(Path(folder), strategy="ddp") as run:
        rank = run.acc.process_index
        run.acc.register_save_state_pre_hook(write(f"ranks/{rank}.json", str(rank)))
        run.acc.register_save_state_pre_hook(write("all.json", "[1]"))
        place = run.saves(async_=True)
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


def test_files_of_several_ranks(ranks, tmp_path):
    found = ranks(together, str(tmp_path))
    for rank, (same, said, _) in enumerate(found):
        assert same
        assert "the hooks of ranks 0 and 1 wrote differs with different bytes" in said[0]
        assert said[1] == ("mine" if rank else "a hook failed: rank 1: ZeroDivisionError: mine")
        assert "'one' is a file of a hook, and a folder with 'one/a' in it" in said[2]
    assert found[0][2][0] != found[1][2][0]
    place = tmp_path / "checkpoints" / "step-00000001"
    assert checkpoint.verify(place) == []
    there = checkpoint.inspect(place)
    assert sorted(there.extra) == sorted(["all.json", "ranks/0.json", "ranks/1.json", *NAMES])
    assert not any(tensor.name.startswith("model/") for tensor in there.tensors)
    assert sorted(os.listdir(place.parent)) == ["latest", "step-00000001"]


@pytest.mark.slow
@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("label", ["zero1", "fsdp", "tensor_parallel", "pipeline"])
def test_whole_weights_of_sharded_models(label, tmp_path):
    """Hooks that write whole weights, as Hugging Face's tools read them, and load them into this rank's part."""
    with under(label) as acc:
        model, optimizer = acc.prepare(given := make("mlp"), sgd(list(given.parameters())))

        def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            tensors = acc.get_state_dict(models[0])
            if acc.is_main_process:
                save_file(tensors, Path(output_dir, "whole.safetensors"))
                weights.pop()

        def step() -> list[torch.Tensor]:
            train_step(acc, model, mean_square, torch.ones(8, 12))
            optimizer.step()
            optimizer.zero_grad()
            return [whole(p).clone() for p in model.parameters() if not p.is_meta]

        acc.register_save_state_pre_hook(save)
        acc.register_load_state_pre_hook(
            lambda models, to: load_weights(models.pop(), f"{to}/whole.safetensors")
        )
        step()
        place = acc.save_state(tmp_path / "saved", async_=True)
        after = step()
        acc.load_state(place)
        assert all(map(torch.equal, after, step()))
        there = checkpoint.inspect(place)
        assert there.extra == ("whole.safetensors",) and checkpoint.verify(place) == []
        assert not any(tensor.name.startswith("model/") for tensor in there.tensors)
