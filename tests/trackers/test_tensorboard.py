"""TensorBoard's event files, read back by TensorBoard."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from easymp import Accelerator

from ..conftest import Ranks
from .runs import KILLED, SAVED, UPDATES, log_all, train

pytestmark = pytest.mark.skipif(
    find_spec("tensorboard") is None,
    reason="an optional package is not installed: tensorboard (the extra 'tensorboard')",
)


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0}).Reload()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def test_scalars_texts_and_hyperparameters(tmp_path: Path) -> None:
    config, suffix = {"lr": 0.1, "opt": {"name": "sgd"}}, {"filename_suffix": ".mine"}
    with Accelerator(cpu=True, mixed_precision="no", project_dir=tmp_path, log_with="tensorboard") as acc:
        acc.init_trackers("run", config, init_kwargs={"tensorboard": suffix})
        acc.log({"loss": torch.tensor(0.5), "phase": "train", "parts": {"a": 1}}, step=3)
        acc.log({"loss": math.nan}, step=4, log_kwargs={"tensorboard": {"walltime": 7.0}})
        tracker = acc.get_tracker("tensorboard")
        tracker.log_images({"image": torch.zeros(1, 3, 2, 2)}, step=4)
        assert acc.get_tracker("tensorboard", unwrap=True) is tracker.writer
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert all(path.name.endswith(".mine") for path in (tmp_path / "run").iterdir())
    events = read(tmp_path / "run")
    assert scalars(tmp_path / "run", "parts/a") == [(3, 1.0)]
    first, second = events.Scalars("loss")
    assert (first.step, first.value) == (3, 0.5) and first.wall_time > 1e9
    assert second.step == 4 and math.isnan(second.value) and second.wall_time == 7.0
    tags = events.Tags()
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    assert texts["phase/text_summary"] == "train"
    assert '"lr": 0.1' in texts["config/text_summary"] and '"strategy"' in texts["config/text_summary"]
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"opt/name" in content and b"easymp/plan/precision" in content
    assert tags["images"] == ["image"]


def test_images_and_tables(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="an optional package is not installed: PIL")
    log_all(str(tmp_path), "tensorboard")
    events = read(tmp_path / "log")
    (image,) = events.Images("val/digits")
    assert (image.step, image.width, image.height) == (3, 8, 4)  # side by side
    (name,) = [tag for tag in events.Tags()["tensors"] if "found" in tag]
    text = events.Tensors(name)[0].tensor_proto.string_val[0].decode()
    assert text.splitlines() == ["| digit | as |", "| --- | --- |", "| 1 | one |", "| 2 | None |"]


def test_a_run_that_was_killed_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    ranks.fails(train, str(tmp_path), "tensorboard", True)
    assert [step for step, _ in scalars(tmp_path / "run", "loss")] == list(range(1, KILLED + 1))
    assert ranks(train, str(tmp_path), "tensorboard") == [SAVED] * 2
    assert [path.name for path in tmp_path.iterdir() if path.name != "checkpoints"] == ["run"]
    assert scalars(tmp_path / "run", "loss") == [(n, n) for n in range(1, UPDATES + 1)]
    assert scalars(tmp_path / "run", "half/of it") == [(n, n / 2) for n in range(1, UPDATES + 1)]


def test_a_run_that_goes_on_within_a_second_comes_after_what_there_was(tmp_path: Path) -> None:
    """Its process may have a smaller number than the one before, which would be read after it."""
    for step, number in enumerate(("999999", "1"), 1):
        with Accelerator(cpu=True, project_dir=tmp_path, log_with="tensorboard") as acc:
            assert acc.get_tracker("tensorboard")  # asked for before the run is resumed
            acc.resume()
            acc.log({"x": float(number)}, step=step)
            acc.save_state()
        process_id = f".{os.getpid()}."  # between dots: a time may have these digits, too
        (file,) = [path for path in (tmp_path / "log").iterdir() if process_id in path.name]
        file.rename(file.with_name(file.name.replace(process_id, f".{number}.")))
    names = sorted(path.name for path in (tmp_path / "log").iterdir())
    assert [name.split(".")[-2] for name in names] == ["999999", "1"]
    assert scalars(tmp_path / "log", "x") == [(1, 999999.0), (2, 1.0)] and not (tmp_path / "log-2").exists()
