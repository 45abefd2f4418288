"""What Accelerate's save_state wrote is read, and no code of it runs unless that was allowed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from easymp import CheckpointError, load_weights
from easymp.checkpoint import read_accelerate

from ..strategies.models import make

pytest.importorskip("accelerate")


class Counter:
    """A user's own object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def written(folder: str, safe: bool) -> dict[str, Any]:
    """Train two models a little, and save; what was live."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import set_seed

    set_seed(3)
    acc = Accelerator(cpu=True)
    models = [make("mlp"), make("conv")]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizers[0], 1.0, 0.2, 20)
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, shuffle=True)  # type: ignore[arg-type, var-annotated]
    *models, optimizers[0], optimizers[1], scheduler, loader = acc.prepare(
        *models, *optimizers, scheduler, loader
    )
    counter = Counter()
    counter.count = 7
    acc.register_for_checkpointing(counter)
    for model, optimizer in zip(models, optimizers):
        acc.backward(model(torch.randn(4, 12)).square().mean())
        optimizer.step()
        scheduler.step()
    acc.save_state(folder, safe_serialization=safe)
    torch.save(
        {"scale": 8.0, "growth_factor": 2.0}, Path(folder, "scaler.pt")
    )  # written by runs in fp16, which need a GPU
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
def test_all_of_it_comes_back(
    ranks: Any, tmp_path: Path, safe: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (live,) = ranks(written, str(tmp_path), safe, processes=1)
    found = read_accelerate(tmp_path, allow_pickle=True)
    for got, expected in zip(found.models, live["models"], strict=True):
        assert set(got) == set(expected)
        assert all(torch.equal(got[name], t) for name, t in expected.items())
    for got, expected in zip(found.optimizers, live["optimizers"], strict=True):
        assert got["param_groups"] == expected["param_groups"]
        for number, state in expected["state"].items():
            assert all(torch.equal(got["state"][number][word], t) for word, t in state.items())
    assert found.schedulers == (live["scheduler"],)
    assert found.custom == ({"count": 7},)
    assert found.scaler == {"scale": 8.0, "growth_factor": 2.0}
    assert list(found.rng) == [0] and found.step == 0
    assert found.rng[0]["random_state"] == live["python"]
    assert torch.equal(found.rng[0]["torch_manual_seed"], live["torch"])
    assert "its pickle is run" not in caplog.text  # all of it is plain data


def test_pickles_are_named_and_not_read_unless_allowed(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(written, str(tmp_path), True, processes=1)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle is read")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "load", never)
        with pytest.raises(CheckpointError) as caught:
            read_accelerate(tmp_path)
    for words in (
        "optimizer.bin, optimizer_1.bin, scheduler.bin",
        "random_states_0.pkl",
        "scaler.pt",
        "custom_checkpoint_0.pkl",
    ):
        assert words in str(caught.value)
    for words in ("can run code", "allow_pickle=True", "load_weights"):
        assert words in str(caught.value)
    assert not load_weights(make("mlp"), tmp_path)
    for path in tmp_path.iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    assert len(read_accelerate(tmp_path).models) == 2


class Crafted:
    """A pickle that does something when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_pickle_runs_only_where_that_was_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, mark = tmp_path / "folder", tmp_path / "mark"
    folder.mkdir()
    torch.save(Crafted(mark), folder / "custom_checkpoint_0.pkl")
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0.pkl are pickles"):
        read_accelerate(folder)
    assert not mark.exists()
    read_accelerate(folder, allow_pickle=True)
    assert mark.exists()
    assert "custom_checkpoint_0.pkl holds more than plain data: its pickle is run" in caplog.text


def test_a_damaged_file_is_not_handed_to_the_reader_that_runs_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "optimizer.bin")
    content = (tmp_path / "optimizer.bin").read_bytes()
    (tmp_path / "optimizer.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"optimizer.bin: cannot be read"):
        read_accelerate(tmp_path, allow_pickle=True)


WRONG = {
    "nothing": ([], r"not a folder of Accelerate's save_state"),
    "a gap": (["optimizer.bin", "optimizer_2.bin"], r"optimizer 1 is missing, and optimizer 2 is there"),
    "shards": (
        ["pytorch_model_fsdp_0/", "random_states_0.pkl"],
        r"pytorch_model_fsdp_0 was written by sharded ranks .*merge-weights",
    ),
    "both": (["model.safetensors", "pytorch_model.bin"], r"model 0 is there twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_folders_that_cannot_be_read(tmp_path: Path, case: str) -> None:
    names, pattern = WRONG[case]
    for name in names:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            torch.save({}, tmp_path / name)
    with pytest.raises(CheckpointError, match=pattern):
        read_accelerate(tmp_path, allow_pickle=True)
