"""JSON with comments and trailing commas: what is text stays text, and errors know their line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easymp.base.relaxed_json import loads, located
from easymp.errors import SettingError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1, // one\n "b": [1, 2.5, -3e2,], # two\n}', {"a": 1, "b": [1, 2.5, -300.0]}),
        ('# head\n{"url": "http://x/#y", "c": "/* no */"} // tail', {"url": "http://x/#y", "c": "/* no */"}),
        ('{/* block\n over lines */"a": true,"b":null}', {"a": True, "b": None}),
        (r'{"quote\"d": "back\\", "e": "\u00e9"}', {'quote"d': "back\\", "e": "é"}),
        ('{"n": 5//comment\n}', {"n": 5}),
        ("\ufeff[]", []),
        ("7", 7),
    ],
)
def test_comments_go_and_strings_stay(text: str, value: Any) -> None:
    assert loads(text, "f") == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1,\n "b": 2,\n "a": 3}', "f, line 3: the key 'a' stands there before, on line 1"),
        ('{\n"a" 1}', "f, line 2: no ':' after the key 'a'"),
        ("[1\n\n2]", "f, line 3: '2' where ',' or ']' should stand"),
        ("[1, /* no end", "f, line 1: '/* no end' begins a comment that does not end"),
        ('["no\nend"]', "f, line 1: '\"no' begins a string that does not end on its line"),
        ('{"a": NaN}', "'NaN' is neither a finite number"),
        ('{"a": -Infinity}', "'-Infinity' is neither a finite number"),
        ('{"a": 1e999}', "'1e999' is neither a finite number"),
        ('{"a": 0123}', "'0123' is neither a finite number"),
        ("{a: 1}", "where a key in quotes"),
        ("{'a': 1}", "where a key in quotes"),
        ("[,]", "',' where a value should stand"),
        ('{"a": 1,,}', "',' where a key in quotes"),
        (r'["\q"]', "is no string of JSON"),
        ("{} {}", "after the end of the JSON value"),
        ("", "the text ends where a value should stand"),
        ("[" * 5000, "nested deeper than 100 levels"),
        ("9" * 5000, "'9999999999999999999999999999999999999...' is neither a finite number"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        loads(text, "f")
    assert said in str(caught.value)


def test_each_value_has_its_line() -> None:
    _, lines = located('{"a":\n {"b": 1,\n "c": [1,\n 2]}}', "f")
    assert (lines["a",], lines["a", "b"], lines["a", "c"], lines["a", "c", 1]) == (1, 2, 3, 4)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(PLAIN, st.sampled_from(["", "# x\n", "// x\n", "/* x */", "\n"]))
def test_all_of_json_is_read(value: Any, between: str) -> None:
    text = json.dumps(value, indent=1).replace("\n", f" {between}\n")
    assert loads(f"{between}{text}", "f") == value
