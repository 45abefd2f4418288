"""Images and tables: what a script may pass, and where each tracker keeps them."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from easymp import Accelerator, SettingError, StepError

from .runs import rows


class Album:
    """A tracker of a script, with images and tables."""

    name = "album"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, run: str, config: Any) -> None: ...

    def log(self, values: Any, step: int | None) -> None:
        self.calls.append((step, dict(values)))

    def log_images(self, values: Any, step: int | None) -> None:
        self.calls.append((step, {name: images.copy() for name, images in values.items()}))

    def log_table(self, table_name: str, columns: Any, data: Any, step: int | None) -> None:
        self.calls.append((step, table_name, columns, data))

    def finish(self) -> None: ...


@pytest.fixture
def album(tmp_path: Path) -> Any:
    """Logs images, and returns the array that a tracker gets."""
    tracker = Album()
    with Accelerator(cpu=True, project_dir=tmp_path, log_with=tracker) as acc:

        def log(images: Any) -> Any:
            acc.log_images("x", images)
            return tracker.calls[-1][1]["x"]

        yield log


# -- what may be passed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((5, 6), (1, 5, 6, 1)),
        ((7, 5, 6), (7, 5, 6, 1)),
        ((5, 6, 3), (1, 5, 6, 3)),
        ((3, 5, 6), (1, 5, 6, 3)),
        ((2, 5, 6, 4), (2, 5, 6, 4)),
        ((2, 4, 5, 6), (2, 5, 6, 4)),
    ],
)
def test_each_layout_becomes_nhwc(shape: tuple[int, ...], wanted: tuple[int, ...], album: Any) -> None:
    given = torch.randint(256, shape, dtype=torch.uint8)
    for images in (given, given.numpy()):
        found = album(images)
        assert (found.shape, found.dtype) == (wanted, np.uint8)
        assert sorted(found.ravel()) == sorted(given.flatten().tolist())


def test_where_both_layouts_are_possible_tensors_have_channels_first(album: Any) -> None:
    given = torch.randint(256, (2, 3, 8, 3), dtype=torch.uint8)
    assert np.array_equal(album(given), given.permute(0, 2, 3, 1).numpy())
    assert np.array_equal(album(given.numpy()), given.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_floats_are_shares_of_the_brightest(dtype: torch.dtype, album: Any) -> None:
    given = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=dtype)
    assert album(given)[0, :, :, 0].tolist() == [[0, 255], [255, 0]]


def test_a_list_of_images_and_of_pictures(album: Any) -> None:
    ones = [np.zeros((4, 5, 3), np.uint8), np.full((4, 5, 3), 9, np.uint8)]
    assert album(ones).shape == (2, 4, 5, 3)
    image = pytest.importorskip("PIL.Image", reason="an optional package is not installed: Pillow")
    assert np.array_equal(album([image.fromarray(one) for one in ones]), np.stack(ones))


def test_values_beyond_are_cut_with_one_warning(album: Any, caplog: Any) -> None:
    for _ in range(2):
        found = album(torch.tensor([[-2.0, 0.5], [3.0, float("nan")]]))
    assert found[0, :, :, 0].tolist() == [[0, 128], [255, 0]]
    said = [record.message for record in caplog.records if "are cut to 0 … 1" in record.message]
    assert said == [
        "log_images('x'): values from -2 to 3 are cut to 0 … 1 and NaN becomes 0. Undo a normalisation before, or pass uint8"
    ]


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([], "images that are empty"),
        ([np.zeros((4, 4)), np.zeros((4, 5))], "of one size"),
        (torch.zeros(4, 4, dtype=torch.int64), "as uint8 or floats"),
        (torch.zeros(2, 5, 6, 7), r"array of shape \(2, 5, 6, 7\)"),
        (torch.zeros(3), r"array of shape \(3,\)"),
    ],
)
def test_other_images_are_refused(images: Any, said: str, album: Any) -> None:
    with pytest.raises(SettingError, match=said):
        album(images)


@pytest.mark.parametrize(
    ("columns", "data", "said"),
    [
        ("ab", [], "pass a list of words"),
        (["a", "a"], [], "pass a list of words, each once"),
        (["_a"], [], "do not begin with an underscore"),
        (["a", "b"], [[1]], "a row of 1 values for 2 columns"),
        (["a"], [[[1]]], "neither a number nor a word"),
    ],
)
def test_other_tables_are_refused(columns: Any, data: Any, said: str, tmp_path: Path) -> None:
    with Accelerator(cpu=True, project_dir=tmp_path) as acc:
        with pytest.raises(SettingError, match=said):
            acc.log_table("t", columns, data)
        with pytest.raises(SettingError, match="pass a name"):
            acc.log_table("", ["a"], [])
    with pytest.raises(StepError, match=r"log_table\(\) after end_training"):
        acc.log_table("t", ["a"], [])


# -- where they are kept -----------------------------------------------------------------------------------------------


def log_all(folder: Any, log_with: Any = "jsonl") -> str:
    """A row, an image and a table, of one step."""
    with Accelerator(cpu=True, project_dir=folder, log_with=log_with, timeout=30) as acc:
        acc.log({"loss": 0.5}, step=3)
        acc.log_images("val/digits", torch.eye(4).repeat(2, 3, 1, 1), step=3)
        acc.log_table("found", ["digit", "as"], [[torch.tensor(1), "one"], [2, None]], step=3)
    return str(folder)


def test_a_tracker_of_the_script_gets_all_in_order(tmp_path: Path) -> None:
    tracker = Album()
    log_all(tmp_path, tracker)
    row, images, table = tracker.calls
    assert row == (3, {"loss": 0.5})
    assert images[0] == 3
    assert images[1]["val/digits"].shape == (2, 4, 4, 3)
    assert table == (3, "found", ["digit", "as"], [[1, "one"], [2, None]])


def pixels(path: Path) -> tuple[tuple[int, int], bytes]:
    """Size and raw lines of a PNG file, by the standard alone."""
    data, place, body, size = path.read_bytes(), 8, b"", (0, 0)
    while place < len(data):
        (length,), kind = struct.unpack_from(">I", data, place), data[place + 4 : place + 8]
        chunk = data[place + 8 : place + 8 + length]
        assert struct.unpack_from(">I", data, place + 8 + length)[0] == zlib.crc32(kind + chunk)
        if kind == b"IHDR":
            size = struct.unpack_from(">II", chunk)  # type: ignore[assignment]
        body += chunk if kind == b"IDAT" else b""
        place += 12 + length
    return size, zlib.decompress(body)


def test_json_lines_have_rows_of_tables_and_files_of_images(tmp_path: Path) -> None:
    log_all(tmp_path)
    _, images, *table = rows(tmp_path)
    assert images["_images"] == "val/digits"
    assert images["files"] == [f"log-images/val_digits-00000003-{number}.png" for number in range(2)]
    size, lines = pixels(tmp_path / images["files"][1])
    eye = [b"\0" + bytes(255 if i == j else 0 for j in range(4) for _ in range(3)) for i in range(4)]
    assert (size, lines) == ((4, 4), b"".join(eye))
    assert [{k: v for k, v in row.items() if k != "_time"} for row in table] == [
        {"_step": 3, "_table": "found", "digit": 1, "as": "one"},
        {"_step": 3, "_table": "found", "digit": 2, "as": None},
    ]


def test_json_lines_keep_all_images_of_one_step(tmp_path: Path) -> None:
    with Accelerator(cpu=True, project_dir=tmp_path) as acc:
        for name, value in (("a/b", 1), ("a/b", 2), ("a_b", 3)):
            acc.log_images(name, np.full((1, 1), value, np.uint8))
    files = [file for row in rows(tmp_path) for file in row["files"]]
    assert [pixels(tmp_path / file)[1] for file in files] == [b"\0\1", b"\0\2", b"\0\3"]


def test_trackers_without_them_say_so_once(tmp_path: Path, caplog: Any) -> None:
    class Plain(Album):
        name = "plain"
        log_images = log_table = property()  # type: ignore[assignment]

    pytest.importorskip("tqdm", reason="an optional package is not installed: tqdm (of the extra 'console')")
    with Accelerator(cpu=True, project_dir=tmp_path, log_with=["console", Plain()]) as acc:
        for _ in range(2):
            acc.log_images("x", np.zeros((4, 4)))
            acc.log_table("t", ["a"], [[1]])
    said = [record.message for record in caplog.records if "does not keep" in record.message]
    assert sorted(said) == [
        f"tracker {name} has no {method}(): it does not keep the {kind} of this run"
        for name in ("console", "plain")
        for method, kind in (("log_images", "images"), ("log_table", "tables"))
    ]


def test_the_main_process_keeps_them(tmp_path: Path, ranks: Any) -> None:
    ranks(log_all, str(tmp_path))
    assert len(rows(tmp_path)) == 4
    assert len([*(tmp_path / "log-images").iterdir()]) == 2


def test_tensorboard_shows_both(tmp_path: Path) -> None:
    for package in ("tensorboard", "PIL"):
        pytest.importorskip(package, reason=f"an optional package is not installed: {package}")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_all(tmp_path, "tensorboard")
    found = EventAccumulator(str(tmp_path / "log"), size_guidance={"tensors": 0, "images": 0}).Reload()
    tags = found.Tags()
    (image,) = found.Images("val/digits")
    assert (image.step, image.width, image.height) == (3, 8, 4)  # side by side
    (name,) = [tag for tag in tags["tensors"] if "found" in tag]
    text = found.Tensors(name)[0].tensor_proto.string_val[0].decode()
    assert text.splitlines() == ["| digit | as |", "| --- | --- |", "| 1 | one |", "| 2 | None |"]


@pytest.mark.slow
def test_mlflow_keeps_both_as_artifacts(tmp_path: Path, ranks: Any) -> None:
    for package in ("mlflow", "PIL"):
        pytest.importorskip(package, reason=f"an optional package is not installed: {package}")
    env = {"MLFLOW_TRACKING_URI": None}
    (found,) = ranks(in_mlflow, str(tmp_path), processes=1, env=env)
    images, table, tag = found
    assert len(images) == 2
    assert all(name.startswith("images/val~digits~") for name in images)
    assert table == {"columns": ["digit", "as"], "data": [[1, "one"], [2, None]]}
    assert json.loads(tag) == [{"path": "tables/found-3.json", "type": "table"}]


def in_mlflow(folder: str) -> Any:
    log_all(folder, "mlflow")
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("log")
    (run,) = client.search_runs([experiment.experiment_id])
    number = run.info.run_id
    images = [a.path for a in client.list_artifacts(number, "images") if a.path.endswith(".png")]
    return (
        images,
        mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/tables/found-3.json"),
        run.data.tags["mlflow.loggedArtifacts"],
    )


@pytest.mark.slow
def test_wandb_keeps_both(tmp_path: Path, ranks: Any) -> None:
    for package in ("wandb", "PIL"):
        pytest.importorskip(package, reason=f"an optional package is not installed: {package}")
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    ranks(in_wandb, str(tmp_path), processes=1, env=env)
    media = sorted(path.suffix for path in tmp_path.rglob("media/*/**/*") if path.is_file())
    assert media == [".json", ".png"]  # named by their content, which is the same


def in_wandb(folder: str) -> None:
    import wandb

    log_all(folder, "wandb")
    wandb.teardown()  # ends its threads
