"""Images and tables: what a script may pass, and where JSON lines and trackers of the script keep them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from easymp import Accelerator, SettingError, StepError

from .runs import log_all, rows


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


def test_each_layout_becomes_nhwc(album: Any) -> None:
    for shape, nhwc_shape in (
        ((5, 6), (1, 5, 6, 1)),
        ((7, 5, 6), (7, 5, 6, 1)),
        ((5, 6, 3), (1, 5, 6, 3)),
        ((3, 5, 6), (1, 5, 6, 3)),
        ((2, 5, 6, 4), (2, 5, 6, 4)),
        ((2, 4, 5, 6), (2, 5, 6, 4)),
    ):
        image = torch.randint(256, shape, dtype=torch.uint8)
        for images in (image, image.numpy()):
            array = album(images)
            assert (array.shape, array.dtype) == (nhwc_shape, np.uint8)
            assert sorted(array.ravel()) == sorted(image.flatten().tolist())
    image = torch.randint(256, (2, 3, 8, 3), dtype=torch.uint8)  # both are possible: tensors have channels first
    assert np.array_equal(album(image), image.permute(0, 2, 3, 1).numpy())
    assert np.array_equal(album(image.numpy()), image.numpy())
    ones = [np.zeros((4, 5, 3), np.uint8), np.full((4, 5, 3), 9, np.uint8)]
    assert album(ones).shape == (2, 4, 5, 3)
    pillow = pytest.importorskip("PIL.Image", reason="an optional package is not installed: Pillow")
    assert np.array_equal(album([pillow.fromarray(array) for array in ones]), np.stack(ones))


def test_floats_are_shares_of_the_brightest_and_cut_with_one_warning(album: Any, caplog: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        image = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=dtype)
        assert album(image)[0, :, :, 0].tolist() == [[0, 255], [255, 0]]
    for _ in range(2):
        array = album(torch.tensor([[-2.0, 0.5], [3.0, float("nan")]]))
    assert array[0, :, :, 0].tolist() == [[0, 128], [255, 0]]
    (warning,) = [record.message for record in caplog.records if "are cut to 0 … 1" in record.message]
    assert warning.startswith("log_images('x'): values from -2 to 3 are cut to 0 … 1 and NaN becomes 0.")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "images that are empty"),
        ([np.zeros((4, 4)), np.zeros((4, 5))], "of one size"),
        (torch.zeros(4, 4, dtype=torch.int64), "as uint8 or floats"),
        (torch.zeros(2, 5, 6, 7), r"array of shape \(2, 5, 6, 7\)"),
        (torch.zeros(3), r"array of shape \(3,\)"),
    ],
)
def test_other_images_are_refused(images: Any, message: str, album: Any) -> None:
    with pytest.raises(SettingError, match=message):
        album(images)


def test_other_tables_are_refused(tmp_path: Path) -> None:
    with Accelerator(cpu=True, project_dir=tmp_path) as acc:
        for name, columns, data, message in (
            ("t", "ab", [], "pass a list of words"),
            ("t", ["a", "a"], [], "pass a list of words, each once"),
            ("t", ["_a"], [], "do not begin with an underscore"),
            ("t", ["a", "b"], [[1]], "a row of 1 values for 2 columns"),
            ("t", ["a"], [[[1]]], "neither a number nor a word"),
            ("", ["a"], [], "pass a name"),
        ):
            with pytest.raises(SettingError, match=message):
                acc.log_table(name, columns, data)
    with pytest.raises(StepError, match=r"log_table\(\) after end_training"):
        acc.log_table("t", ["a"], [])


# -- where they are kept -----------------------------------------------------------------------------------------------


def test_a_tracker_of_the_script_gets_all_in_order(tmp_path: Path) -> None:
    tracker = Album()
    log_all(str(tmp_path), tracker)
    row, images, table = tracker.calls
    assert row == (3, {"loss": 0.5})
    assert images[0] == 3
    assert images[1]["val/digits"].shape == (2, 4, 4, 3)
    assert table == (3, "found", ["digit", "as"], [[1, "one"], [2, None]])


def pixels(path: Path) -> tuple[tuple[int, int], bytes]:
    """Size and raw lines of a PNG file, by the standard alone."""
    data, offset, body, size = path.read_bytes(), 8, b"", (0, 0)
    while offset < len(data):
        (length,), kind = struct.unpack_from(">I", data, offset), data[offset + 4 : offset + 8]
        chunk = data[offset + 8 : offset + 8 + length]
        assert struct.unpack_from(">I", data, offset + 8 + length)[0] == zlib.crc32(kind + chunk)
        if kind == b"IHDR":
            size = struct.unpack_from(">II", chunk)  # type: ignore[assignment]
        body += chunk if kind == b"IDAT" else b""
        offset += 12 + length
    return size, zlib.decompress(body)


def test_json_lines_have_rows_of_tables_and_files_of_images(tmp_path: Path, ranks: Any) -> None:
    ranks(log_all, str(tmp_path))  # the main process keeps them
    _, images, *table = rows(tmp_path)
    assert images["_images"] == "val/digits"
    assert images["files"] == [f"log-images/val_digits-00000003-{number}.png" for number in range(2)]
    assert len([*(tmp_path / "log-images").iterdir()]) == 2
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

    with Accelerator(cpu=True, project_dir=tmp_path, log_with=Plain()) as acc:
        for _ in range(2):
            acc.log_images("x", np.zeros((4, 4)))
            acc.log_table("t", ["a"], [[1]])
    warnings = [record.message for record in caplog.records if "does not keep" in record.message]
    text = "tracker plain has no {}(): it does not keep the {} of this run"
    assert sorted(warnings) == [text.format("log_images", "images"), text.format("log_table", "tables")]
