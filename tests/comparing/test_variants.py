"""Plans to compare: their names, and what wins over the script's own settings."""

from __future__ import annotations

import pytest

from easymp.comparing.variants import variants
from easymp.errors import SettingError
from easymp.settings import OVERRIDE, resolve


@pytest.mark.parametrize(
    ("precisions", "strategies", "processes", "names"),
    [
        (["fp32", "bf16"], [], [], ["fp32", "bf16"]),
        (["fp32"], ["ddp", "fsdp"], [2], ["ddp", "fsdp"]),
        (["fp32", "bf16"], ["ddp", "fsdp"], [2], ["fp32 ddp", "fp32 fsdp", "bf16 ddp", "bf16 fsdp"]),
        ([], ["ddp"], [1, 2], ["1 process", "2 processes"]),
        ([], ["ddp"], [], ["ddp"]),
        ([], [], [], ["as it is"]),
    ],
)
def test_names(precisions: list[str], strategies: list[str], processes: list[int], names: list[str]) -> None:
    assert [variant.name for variant in variants(precisions, strategies, processes)] == names


def test_the_override_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    (variant,) = variants(["bf16"], ["ddp"])
    monkeypatch.setenv(OVERRIDE, variant.override(project_dir="/a folder/it's", seed="3"))
    settings = resolve(mixed_precision="fp32", project_dir="elsewhere")
    assert (settings.mixed_precision, settings.strategy, settings.seed) == ("bf16", "ddp", 3)
    assert settings.project_dir == "/a folder/it's"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precisions": ["bf61"]}, "did you mean 'bf16'"),
        ({"strategies": ["dpp"]}, "did you mean 'ddp'"),
        ({"processes": [0]}, "no number of processes"),
        ({"precisions": ["fp32", "fp32"]}, "--repeats"),
    ],
)
def test_wrong_ones_are_said(arguments: dict[str, list[object]], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        variants(**arguments)  # type: ignore[arg-type]
