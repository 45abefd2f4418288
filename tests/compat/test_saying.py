"""A layer warns once, explains on request, and says where absent names are found."""

from __future__ import annotations

import warnings

import pytest

from easymp.compat import explain
from easymp.compat import layer as saying
from easymp.errors import EasympWarning


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> saying.Layer:
    monkeypatch.setattr(saying, "LAYERS", [])
    return saying.Layer("Apex")


def test_the_first_ignored_option_warns_and_no_later_one(layer: saying.Layer) -> None:
    with pytest.warns(EasympWarning, match=r"Apex: without effect here: verbosity \(nothing is printed\)"):
        layer.ignore({"verbosity": "nothing is printed"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.ignore({"verbosity": "nothing is printed"})
        layer.ignore({"message_size": "buckets are torch's"})
    assert list(layer.ignored) == ["verbosity", "message_size"]


def test_explain_prints_native_lines_and_what_had_no_effect(
    layer: saying.Layer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain() == "no layer of easymp.compat is in use"
    layer.use("amp.initialize(opt_level='O2')", "acc = Accelerator(mixed_precision='O2')\n")
    with pytest.warns(EasympWarning):
        layer.ignore({"verbosity": "nothing is printed"})
    text = explain()
    assert text.splitlines() == [
        *("# Apex → easymp", "from easymp import Accelerator", "", "# amp.initialize(opt_level='O2')"),
        *("acc = Accelerator(mixed_precision='O2')", "", "# without effect: verbosity (nothing is printed)"),
    ]
    assert capsys.readouterr().out.endswith(text + "\n")


def test_an_absent_name_says_what_to_take(layer: saying.Layer) -> None:
    missing = layer.absent(
        "apex.amp", {"rnn": "torch's RNN layers need nothing"}, lambda: ["initialize", "scale_loss"]
    )
    for name, words in (
        ("rnn", r"apex\.amp\.rnn is not part of easymp\.compat: torch's RNN layers need nothing"),
        ("initialise", r"did you mean 'initialize'\?"),
        ("xyz", r"Here are initialize, scale_loss"),
    ):
        with pytest.raises(ImportError, match=words):
            missing(name)
