"""``easymp estimate``: a table that fits 80 columns, JSON, and sentences for what is wrong."""

from __future__ import annotations

import json

import pytest

from easymp.cli import main


def test_a_table_and_what_to_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert (
        main(["estimate", "1.5B", "--memory", "80GB", "--processes", "1,8", "--optimizer", "momentum"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1.5B: 1,500,000,000 parameters, momentum"
    assert lines[2].split() == [
        "on",
        "strategy",
        "precision",
        "weights",
        "gradients",
        "states",
        "copies",
        "total",
        "spare",
    ]
    assert lines[3].split() == ["1", "single", "fp32", "5.59", "5.59", "5.59", "-", "16.76", "+42.84"]
    assert max(map(len, lines)) <= 80
    assert "a stand-in" in "\n".join(lines)
    assert lines[-1].startswith("the") or "fits with" in " ".join(lines[-2:])


def test_activations_have_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["--input", "4x2x512", "--input", "4x2x512"]
    with pytest.warns(UserWarning, match="enable_nested_tensor"):
        assert (
            main(["estimate", "torch.nn:Transformer", *shapes, "--processes", "1", "--precision", "fp32"])
            == 0
        )
    out = capsys.readouterr().out
    assert "activations  total" in out and "44,140,544 parameters" in out and "--input" not in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["estimate", "350M", "--activation-checkpointing"])
    assert "counted with the shape of a batch (--input)" in capsys.readouterr().err
    assert (
        main(
            [
                "estimate",
                "350M",
                "--json",
                "--memory",
                "40GB",
                "--processes",
                "8",
                "--strategy",
                "fsdp,single",
            ]
        )
        == 0
    )
    record = json.loads(capsys.readouterr().out)
    assert record["parameters"] == 350_000_000 and record["suggested"] == {
        "strategy": "fsdp",
        "processes": 8,
        "precision": "bf16",
    }
    assert record["refused"][0].startswith("single on 8: ")
    row = record["rows"][0]
    parts = ("weights", "buffers", "gradients", "states", "masters", "copies", "gathered", "reducing")
    assert row["total"] == sum(row[name] for name in parts) and row["fits"] and row["activations"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["7B", "--processes", "two"], "--processes 'two' is not a whole number"),
        (["7B", "--memory", "lots"], "--memory 'lots' is no size"),
        (["7B", "--options", "{'a': 1}", "--strategy", "fsdp"], "--options, line 1"),
        (["what"], "is no model"),
    ],
)
def test_wrong_words(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["estimate", *words]) == 1
    assert said in capsys.readouterr().err
