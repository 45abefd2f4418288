"""What hooks write into a checkpoint is part of it, and comes back to hooks, wherever it lies.

On all ranks or on none.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from easymp import CheckpointError, RefusedError, checkpoint, load_weights
from easymp.checkpoint.folders import open_checkpoint
from easymp.cli import main
from easymp.compat.accelerate import Accelerator

from ..strategies.models import make, mean_square, sgd, train_step, under, whole
from .samples import Small, flip

NAMES = ("unet/.notes", "unet/config.json", "unet/weights.safetensors")


class Run(Small):
    """Its hooks keep its weights, as scripts of diffusers do: on the main process when saving, on each when loading."""

    kind = Accelerator

    def __init__(self, folder: Path | None = None, hooks: bool = True, **options: Any) -> None:
        super().__init__(folder, **options)
        self.folders: list[str] = []
        if hooks:
            self.acc.register_save_state_pre_hook(self.save)
            self.acc.register_load_state_pre_hook(self.load)

    def save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        self.folders.append(output_dir)
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
        self.folders.append(input_dir)
        assert json.loads(Path(input_dir, "unet/config.json").read_text()) == {}
        models.pop().load_state_dict(load_file(Path(input_dir, "unet/weights.safetensors")))

    def saves(self, *args: Any, **options: Any) -> Path:
        """A checkpoint, one step later."""
        self.step()
        return Path(self.acc.save_state(*args, **options))


@pytest.mark.parametrize("async_", [False, True])
def test_their_files_are_part_of_it(async_, tmp_path):
    path = tmp_path / "root" / "checkpoint-7"
    with Run() as run:
        run.saves(path, async_=async_)
        weight = run.weight()
        run.step()
        run.acc.load_state(path)
        assert torch.equal(run.weight(), weight)
        assert [Path(folder).name for folder in run.folders] == ["checkpoint-7"] * 2
        assert [os.path.exists(folder) for folder in run.folders] == [False, True]
        with pytest.raises(RefusedError, match="hooks read and write local files, and the checkpoint is at memory://"):
            run.saves(f"memory://{tmp_path.name}/checkpoint-8")
    assert [entry.name for entry in checkpoint.list_checkpoints(path.parent)] == ["checkpoint-7"]
    contents = checkpoint.inspect(path)
    assert sorted(contents.extra) == list(NAMES) and set(NAMES) <= set(contents.files)
    assert not any(tensor.name.startswith("model/") for tensor in contents.tensors)
    assert checkpoint.verify(path) == []
    assert not [name for name in os.listdir(path.parent) if name.startswith(".")]
    assert (path / "unet/config.json").read_text() == "{}"


def test_they_are_shown_and_pruned_with_it(tmp_path, capsys):
    with Run(tmp_path) as run:
        steps = [run.saves() for _ in range(3)]
    first, second = (open_checkpoint(step).manifest.extra for step in steps[:2])
    assert [name for name in first if first[name] != second[name]] == ["unet/weights.safetensors"]
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
        weight, calls = run.weight(), len(run.folders)
        for number, (message, damage) in enumerate(DAMAGE.items()):
            copy = tmp_path / str(number)
            shutil.copytree(saved, copy)
            damage(copy / "unet/config.json")
            with pytest.raises(CheckpointError, match=f"was not loaded, and nothing has changed: .*{message}"):
                run.acc.load_state(copy)
            wrong = set(NAMES) if (copy / "unet").is_symlink() else {"unet/config.json"}
            assert {found_damage.file for found_damage in checkpoint.verify(copy)} == wrong
        assert torch.equal(run.weight(), weight) and len(run.folders) == calls
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
    (lambda *arguments: (write("a")(*arguments), write("A")(*arguments)), "have one name"),
    (fail, "mine"),
]


def test_what_cannot_be_kept_is_refused_and_leaves_nothing(tmp_path):
    with Run(tmp_path, hooks=False) as run:
        run.acc.save_state()
        for hook, message in REFUSED:
            handle = run.acc.register_save_state_pre_hook(hook)
            with pytest.raises(ZeroDivisionError if hook is fail else CheckpointError, match=message):
                run.acc.save_state()
            handle.remove()
            assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000000"]
            assert run.acc.save_iteration == 1
        path = run.acc.save_state()
        run.acc.register_save_state_pre_hook(lambda *_: (Path(path) / "mine").write_text(""))
        with pytest.raises(CheckpointError, match="a hook wrote to"):
            run.acc.save_state(path)


def save_with_hooks(folder: str) -> Any:
    with Run(Path(folder), strategy="ddp") as run:
        rank = run.acc.process_index
        run.acc.register_save_state_pre_hook(write(f"ranks/{rank}.json", str(rank)))
        run.acc.register_save_state_pre_hook(write("all.json", "[1]"))
        path = run.saves(async_=True)
        weight = run.weight()
        run.step()
        run.acc.load_state(path)
        same = torch.equal(run.weight(), weight)
        messages = []
        first_hook, second_hook = (fail, write("one")) if rank else (write("a"), write("one/a"))
        for hook in (write("differs", str(rank)), first_hook, second_hook):
            handle = run.acc.register_save_state_pre_hook(hook)
            with pytest.raises((CheckpointError, ZeroDivisionError)) as caught:
                run.acc.save_state()
            messages.append(str(caught.value))
            handle.remove()
        run.acc.save_state()
        return same, messages, run.folders


def test_files_of_several_ranks(ranks, tmp_path):
    results = ranks(save_with_hooks, str(tmp_path))
    for rank, (same, messages, _) in enumerate(results):
        assert same
        assert "the hooks of ranks 0 and 1 wrote differs with different bytes" in messages[0]
        assert messages[1] == ("mine" if rank else "a hook failed: rank 1: ZeroDivisionError: mine")
        assert "'one' is a file of a hook, and a folder with 'one/a' in it" in messages[2]
    assert results[0][2][0] != results[1][2][0]
    folder = tmp_path / "checkpoints" / "step-00000001"
    assert checkpoint.verify(folder) == []
    contents = checkpoint.inspect(folder)
    assert sorted(contents.extra) == sorted(["all.json", "ranks/0.json", "ranks/1.json", *NAMES])
    assert not any(tensor.name.startswith("model/") for tensor in contents.tensors)
    assert sorted(os.listdir(folder.parent)) == ["latest", "step-00000001"]


@pytest.mark.slow
@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("label", ["zero1", "fsdp", "tensor_parallel", "pipeline"])
def test_whole_weights_of_sharded_models(label, tmp_path):
    """Hooks that write whole weights, as Hugging Face's tools read them, and load them into this rank's part."""
    with under(label, kind=Accelerator) as acc:
        model, optimizer = acc.prepare(plain := make("mlp"), sgd(list(plain.parameters())))

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
        acc.register_load_state_pre_hook(lambda models, to: load_weights(models.pop(), f"{to}/whole.safetensors"))
        step()
        path = acc.save_state(tmp_path / "saved", async_=True)
        after = step()
        acc.load_state(path)
        assert all(map(torch.equal, after, step()))
        contents = checkpoint.inspect(path)
        assert contents.extra == ("whole.safetensors",) and checkpoint.verify(path) == []
        assert not any(tensor.name.startswith("model/") for tensor in contents.tensors)
