"""What is no plain JSON is refused in one sentence that names the file, at once, whatever it would cost to parse."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easymp.checkpoint import codec
from easymp.checkpoint.codec import dumps, loads
from easymp.errors import CheckpointError

text = st.text(st.characters(codec="utf-8"))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)
@given(plain)
def test_what_is_written_comes_back(value: object) -> None:
    back = loads(dumps(value), "x")
    assert back == value and repr(back) == repr(value)


REFUSED = {
    "nothing": (b"", "no JSON"),
    "half": (b'{"a":1', "delimiter"),
    "two": (b"1 2", "Extra data"),
    "twice": (b'{"a":1,"b":2,"a":3}', "'a' stands twice"),
    "twice inside": (b'[{"k":{"a":1,"a":1}}]', "'a' stands twice"),
    "twice, spelled otherwise": (rb'{"a":1,"\u0061":1}', "'a' stands twice"),
    "NaN": (b"[NaN]", "NaN is no number"),
    "Infinity": (b"[-Infinity]", "-Infinity is no number"),
    "infinite by size": (b"1e999", "a number like 1e999"),
    "long float": (b"0." + b"1" * 1000, "a number like 0.1"),
    "giant integer": (b"1" * 1_000_000, "an integer of 1000000 digits"),
    "65 bits and more": (b"-100000000000000000000", "21 digits|22 digits"),
    "deep": (b"[" * 1000 + b"]" * 1000, "nested more than 200 deep"),
    "deep objects": (b'{"a":' * 201 + b"1" + b"}" * 201, "nested more than 200 deep"),
    "very deep": (b"[" * 1_000_000, "nested more than 200 deep"),
    "deep behind a string": (b'["\\"[", ' + b"[" * 100_000 + b"]" * 100_001, "nested more than 200 deep"),
    "half a surrogate pair": (rb'["\ud800"]', "not UTF-8"),
    "half a surrogate pair as a key": (rb'{"\uDFFF":1}', "not UTF-8"),
    "UTF-16": ("[1]".encode("utf-16"), "not UTF-8"),
    "Latin-1": ('"é"'.encode("latin-1"), "not UTF-8"),
    "byte order mark": (b"\xef\xbb\xbf[1]", "BOM"),
    "control character": (b'"\x00"', "control character"),
    "backslash outside": (b"\\[", "no JSON"),
    "too many values": (b"[[]" + b",[]" * 10_000_000 + b"]", "more than 20000000 commas"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    content, words = REFUSED[name]
    with pytest.raises(CheckpointError, match=f"^some/file: .*({words})") as caught:
        loads(content, "some/file")
    assert len(str(caught.value)) < 250


def test_too_long_is_refused_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "LONGEST", 10)
    assert loads(b"[1,2,3,45]", "x") == [1, 2, 3, 45]
    with pytest.raises(CheckpointError, match="11 bytes, and 10 are the most"):
        loads(b"[1,2,3,456]", "x")


def test_brackets_and_quotes_in_strings_are_no_depth() -> None:
    value = ["[" * 1000, '"' * 1000, '\\"[' * 1000, "]" * 1000, {"{" * 500: "\\"}]
    assert loads(dumps(value), "x") == value


def test_the_deepest_that_is_read() -> None:
    text = b"[" * codec.DEPTH + b"]" * codec.DEPTH
    assert dumps(loads(text, "x")) == text


def test_surrogate_pairs_of_others_are_read() -> None:
    assert loads(rb'["\ud83d\ude00", "\\ud800"]', "x") == ["\N{GRINNING FACE}", "\\ud800"]


def test_a_limit_that_was_lifted_does_not_matter() -> None:
    depth, digits = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    sys.setrecursionlimit(1_000_000)
    sys.set_int_max_str_digits(0)
    try:
        for content in (b"[" * 100_000 + b"]" * 100_000, b"9" * 1_000_000):
            with pytest.raises(CheckpointError):
                loads(content, "x")
    finally:
        sys.setrecursionlimit(depth)
        sys.set_int_max_str_digits(digits)


@pytest.mark.parametrize("value", [float("nan"), {"a": object()}, "\ud800", {(1, 2): 3}])
def test_what_is_no_json_is_not_written(value: object) -> None:
    with pytest.raises(CheckpointError, match="plain values"):
        dumps(value)
