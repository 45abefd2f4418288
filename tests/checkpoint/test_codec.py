"""Python state as JSON comes back as it was; other JSON is refused in one sentence, at once."""

from __future__ import annotations

import collections
import enum
import json
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from easymp import CheckpointError
from easymp.checkpoint.codec import LEVELS, TensorName, dumps, loads, pack, unpack
from easymp.checkpoint.load import tensor_names

NO_JSON = [
    (b"", "not JSON"),
    (b'{"a":1,"b":2,"a":3}', "'a' stands twice"),
    (b"[NaN]", "no number NaN"),
    (b"[-0]", "the number -0"),
    (b"1" * 1_000_000, "an integer of 1000000 digits"),
    (b"[" * 1000 + b"]" * 1000, "nested more than 200 deep"),
    (b'["\\"[", ' + b"[" * 100_000 + b"]" * 100_001, "nested more than 200 deep"),
    (rb'["\ud800"]', "not UTF-8"),
    (b"\xef\xbb\xbf[1]", "BOM"),
    (b"[[]" + b",[]" * 10_000_000 + b"]", "more than 20000000 commas"),
]


def test_other_json_is_refused():
    for content, message in NO_JSON:
        with pytest.raises(CheckpointError, match=f"^some/file: .*({message})") as caught:
            loads(content, "some/file")
        assert len(str(caught.value)) < 250


def through(value: Any) -> Any:
    """As it comes back from a file."""
    tensors: dict[str, Tensor] = {}
    packed = loads(dumps(pack(value, "state", tensors)), "x")
    assert sorted(tensor_names(unpack(packed, TensorName))) == sorted(tensors)
    return unpack(packed, lambda name: tensors[name].detach().clone())


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return a.dtype.newbyteorder("=") == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (float, complex, numpy.floating)):
        return repr(a) == repr(b)
    return bool(a == b)


KEPT = [
    None,
    [True, False],
    ["", "é", "\x00", "a/b", "$"],
    [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**1000, -(10**5000)],
    [0.0, -0.0, 1e-320, math.pi, math.inf, -math.inf, math.nan],
    [b"", b"\x00\xff"],
    ((), (1, (2, [3, (4,)]))),
    {"a": {"b/c": 1, "": 2}},
    {"$": "tuple", "items": [1]},
    {0: "a", 1.5: "b", None: "c", (1, 2): "d", True: 3, b"e": 4, 2**70: 5, "0": 6},
    OrderedDict(b=1, a=2),
    Counter({0.5: 2, "a": -1}),
    [torch.Size([2, 0]), torch.float8_e4m3fn, torch.bfloat16],
    [torch.arange(6).reshape(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3), torch.tensor(1 + 2j)],
    {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, 0: torch.ones(2), "0": torch.zeros(2)},
    {"a'": torch.ones(1), "a/b": torch.ones(3), "a": {"b": torch.zeros(3), "b'": torch.ones(4)}},
    [
        numpy.arange(6, dtype=numpy.uint32).reshape(2, 3),
        numpy.array(2.5),
        numpy.empty((0, 2), dtype=numpy.float16),
        numpy.arange(4)[::-1],
        numpy.array([1, 2], dtype=">i4"),
        numpy.array([True, False]),
        numpy.array([1j]),
        numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
    ],
    [
        numpy.float64(0.1), numpy.float32(0.1), numpy.float16("nan"), numpy.float32("-inf"),
        numpy.int8(-3), numpy.uint64(2**64 - 1), numpy.bool_(True),
    ],
    random.getstate(),
    numpy.random.get_state(),
    [numpy.random.PCG64(0).state, numpy.random.MT19937(0).state],
    torch.get_rng_state(),
]  # fmt: skip


def test_what_comes_back_is_what_was_stored():
    for value in KEPT:
        assert same(value, through(value)), value


Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


class Mine:
    def state_dict(self) -> dict[str, int]:
        return {}


cycle: list[Any] = [1]
cycle.append({"again": cycle})
deep: Any = 1
for _ in range(LEVELS + 1):
    deep = [deep]
REFUSED = [
    (lambda: 1, r"a function \(lambda\) can't be stored: leave it out"),
    (Mine, r"a class \(.*Mine\)"),
    (Mine(), r"Mine can't be stored: store its state_dict\(\)"),
    (Point(1, 2), r"Point can't be stored: store tuple"),
    (Colour.RED, r"Colour can't be stored: store its \.value"),
    (collections.deque([1]), r"deque can't be stored: store list"),
    (numpy.array([None]), r"numpy.ndarray can't be stored: store .*an array of numbers"),
    (Path("runs"), r"store str"),
    (object(), "object can't be stored: store numbers, words, tensors, and lists or dicts of them"),
    (torch.eye(2).to_sparse(), r"store \.to_dense\(\)"),
    (torch.ones(1).as_subclass(type("Special", (Tensor,), {})), r"as_subclass\(torch\.Tensor\)"),
    ({torch.ones(1): 1}, "a tensor as a key of a dict can't be stored: use another key"),
    (defaultdict(list), r"defaultdict can't be stored: store dict\(…\)"),
    ({1, 2}, r"a set can't be stored: store sorted\(…\)"),
    (frozenset(), r"a frozenset can't be stored: store sorted\(…\)"),
    (range(3), r"a range can't be stored: store list\(…\)"),
    (slice(3), "a slice can't be stored: store its start, stop and step"),
    (bytearray(b"a"), r"a bytearray can't be stored: store bytes\(…\)"),
    (1j, r"a complex can't be stored: store its \.real and \.imag"),
    (numpy.complex64(1j), r"numpy.complex64 can't be stored: store its \.real and \.imag"),
    (torch.device("cpu"), r"torch.device can't be stored: store str\(…\)"),
    ("\udcff", r"half of a surrogate pair can't be stored: store os\.fsencode\(…\)"),
    (cycle, "contains itself"),
    (deep, f"more than {LEVELS} containers"),
]


def test_what_cannot_be_stored_says_where_and_what_can():
    for value, message in REFUSED:
        with pytest.raises(CheckpointError, match=rf"^optimizer/param_groups/0/foo.*: .*{message}"):
            pack({"param_groups": [{"foo": value}]}, "optimizer", {})


def test_the_deepest_that_is_stored_can_be_read():
    value: Any = math.nan
    for level in range(LEVELS):
        value = {level: value}
    assert repr(through(value)) == repr(value)


HOSTILE = [
    {"$": "pickle", "value": "gA=="},
    {"$": "tuple", "items": "ab"},
    {"$": "set", "items": [1]},
    {"$": "dict", "items": [[1, 2], [1, 3]]},
    {"$": "float", "value": "1e400"},
    {"$": "dtype", "value": "nn"},
    {"$": "size", "items": [1.5]},
    {"$": "dict", "items": [[{"$": "tensor", "name": "a"}, 1]]},
    {"$": "scalar", "dtype": "int8", "value": 1.0},
    {"$": "dict", "items": [[{"$": "int", "value": hex((2**61 - 1) * n)}, 0] for n in range(8, 2000)]},
]


def test_what_was_never_stored_is_refused():
    for hostile in HOSTILE:
        value = loads(json.dumps([{"a": hostile}]).encode(), "x")
        with pytest.raises(CheckpointError, match="state") as caught:
            unpack(value, lambda name: torch.ones(1))
        assert len(str(caught.value)) < 400
        with pytest.raises(CheckpointError):
            unpack(value, TensorName)


def test_numpy_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    through({"a": (1, torch.ones(1), b"b")})
    with pytest.raises(CheckpointError):
        through(object())
    assert "numpy" not in sys.modules
