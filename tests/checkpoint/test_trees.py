"""Python state as tagged JSON: what goes in comes out, of the same type; what cannot, is refused by path, with the way out."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import math
import pathlib
import random
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

from easymp.checkpoint.codec import LEVELS, dumps, loads, names, pack, unpack
from easymp.errors import CheckpointError
from easymp.optim.optimizer import PreparedScheduler


def through(value: Any) -> Any:
    """As it comes back from a file."""
    tensors: dict[str, Tensor] = {}
    packed = loads(dumps(pack(value, "state", tensors)), "x")
    assert sorted(names(packed)) == sorted(tensors)
    return unpack(packed, lambda name: tensors[name].detach().clone())


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return a.dtype.newbyteorder("=") == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(same(x, y) for x, y in zip(a, b))
            and all(same(x, y) for x, y in zip(a.values(), b.values()))
            and getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (float, complex, numpy.floating)):
        return repr(a) == repr(b)
    return bool(a == b)


KEPT = {
    "nothing": None,
    "truth": [True, False],
    "words": ["", "é", "\x00", "a/b", "$", "\udcff of os.fsdecode"],
    "numbers": [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**1000, -(10**5000)],
    "floats": [0.0, -0.0, 1e-320, math.pi, math.inf, -math.inf, math.nan],
    "complex": [1j, complex(-0.0, math.inf), complex(math.nan, 1)],
    "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
    "tuples": ((), (1, (2, [3, (4,)]))),
    "sets": [set(), {1, "a", (2, b"b")}, frozenset({frozenset({1}), None})],
    "ranges": [range(3, 10, 2), range(0), slice(1, None, -1)],
    "dict of words": {"a": {"b/c": 1, "": 2}},
    "dict of tags": {"$": "tuple", "items": [1]},
    "dict of numbers": {0: "a", 1.5: "b", None: "c", (1, 2): "d", True: 3, b"e": 4, 2**70: 5, "0": 6},
    "dict of odd words": {"\ud800": 1},
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter({0.5: 2, "a": -1}),
    "defaultdict": [defaultdict(int, a=1), defaultdict(list, {1: [2]}), defaultdict(None), defaultdict(dict, x={})],
    "torch": [torch.Size([2, 0]), torch.float8_e4m3fn, torch.bfloat16, torch.device("cuda:1"), torch.device("cpu")],
    "tensors": [torch.arange(6).reshape(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3), torch.tensor(1 + 2j)],
    "tensors by odd names": {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, 0: torch.ones(2), "0": torch.zeros(2)},
    "more odd names": {"a'": torch.ones(1), "a/b": torch.ones(3), "a": {"b": torch.zeros(3), "b'": torch.ones(4)}, "\ud800": torch.ones(5)},
    "arrays": [
        numpy.arange(6, dtype=numpy.uint32).reshape(2, 3),
        numpy.array(2.5),
        numpy.empty((0, 2), dtype=numpy.float16),
        numpy.arange(4)[::-1],
        numpy.array([1, 2], dtype=">i4"),
        numpy.array([True, False]),
        numpy.array([1j]),
        numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
    ],
    "scalars": [
        numpy.float64(0.1), numpy.float32(0.1), numpy.float16("nan"), numpy.int8(-3), numpy.uint64(2**64 - 1), numpy.bool_(True),
        numpy.complex64(1 + 2j), numpy.float32("-inf"),
    ],
    "random": random.getstate(),
    "NumPy's random": numpy.random.get_state(),
    "NumPy's generators": [numpy.random.PCG64(0).state, numpy.random.MT19937(0).state],
    "torch's random": torch.get_rng_state(),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_comes_back_is_what_was_stored(name: str) -> None:
    back = through(KEPT[name])
    assert same(KEPT[name], back), back


def test_random_states_go_on_where_they_were() -> None:
    ours, theirs = random.Random(5), random.Random(6)
    theirs.setstate(through(ours.getstate()))
    assert theirs.random() == ours.random()
    legacy, other = numpy.random.RandomState(5), numpy.random.RandomState(6)
    other.set_state(through(legacy.get_state()))
    assert other.rand() == legacy.rand()
    bits, more = numpy.random.MT19937(5), numpy.random.MT19937(6)
    more.state = through(bits.state)
    assert more.random_raw() == bits.random_raw()


text = st.text(st.characters(exclude_categories=()), max_size=5)
hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | text
    | st.binary(max_size=5)
    | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
trees = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(hashable, max_size=3)
        | st.dictionaries(text, inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(trees)
def test_any_tree_comes_back(value: object) -> None:
    packed = pack(value, "state", {})
    back = unpack(loads(dumps(packed), "x"), lambda name: name)
    assert type(back) is type(value) and ordered(pack(back, "state", {})) == ordered(packed)


def ordered(packed: Any) -> Any:
    """Two equal sets may go through their items in two orders, in which they are packed."""
    if isinstance(packed, list):
        return [ordered(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    packed = {name: ordered(item) for name, item in packed.items()}
    if packed.get("$") in ("set", "frozenset"):
        packed["items"].sort(key=json.dumps)
    return packed


def optimizers() -> list[torch.optim.Optimizer]:
    made = []
    for name in sorted(torch.optim.__all__ if hasattr(torch.optim, "__all__") else dir(torch.optim)):
        kind = getattr(torch.optim, name)
        if (
            isinstance(kind, type)
            and issubclass(kind, torch.optim.Optimizer)
            and name not in ("Optimizer", "SparseAdam")
        ):
            made.append(kind([nn.Parameter(torch.ones(2, 2))], lr=0.1))
    return made


@pytest.mark.parametrize("optimizer", optimizers(), ids=lambda o: type(o).__name__)
def test_states_of_torchs_optimizers(optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = sum(p.square().sum() for p in optimizer.param_groups[0]["params"])
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state_dict()
    back = through(state)
    assert same(state, back)
    optimizer.load_state_dict(back)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.LinearLR(o)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: PreparedScheduler(torch.optim.swa_utils.SWALR(o, 0.05), (), with_optimizer=False),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_states_of_torchs_schedulers(name: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.step()
    scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    state = scheduler.state_dict()
    back = through(state)
    assert same(state, back)
    scheduler.load_state_dict(back)


def test_a_parameter_is_a_tensor() -> None:
    back = through({"w": nn.Parameter(torch.ones(2)), "b": nn.Buffer(torch.ones(1))})
    assert type(back["w"]) is Tensor and not back["w"].requires_grad


def test_paths_are_those_of_the_tree() -> None:
    tensors: dict[str, Tensor] = {}
    pack(
        {"state": {0: {"exp_avg": torch.ones(1)}}, "list": [torch.ones(1)], "a.b": torch.ones(1)},
        "optimizer",
        tensors,
    )
    assert list(tensors) == ["optimizer/state/0/exp_avg", "optimizer/list/0", "optimizer/a.b"]


Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


class Words(str):
    pass


class Mine:
    def state_dict(self) -> dict[str, int]:
        return {}


cycle: list[Any] = [1]
cycle.append({"again": cycle})
deep: Any = 1
for _ in range(LEVELS + 1):
    deep = [deep]
REFUSED = {
    "lambda": (lambda: 1, r"a function \(lambda\) can't be stored: leave it out"),
    "function": (through, r"a function \(through\)"),
    "builtin": (len, r"a function \(len\)"),
    "class": (Mine, r"a class \(.*Mine\)"),
    "object": (object(), "a object can't be stored: store numbers"),
    "object with state": (Mine(), r"store its state_dict\(\)"),
    "module": (nn.Linear(1, 1), r"Linear can't be stored: store its state_dict\(\)"),
    "namedtuple": (Point(1, 2), r"Point can't be stored: store tuple"),
    "max": (torch.ones(2, 2).max(0), r"store tuple"),
    "enum": (Colour.RED, r"store its \.value"),
    "subclass of str": (Words("a"), r"store str\(…\) of it"),
    "date": (datetime.datetime(2026, 1, 1), r"datetime\.datetime can't be stored: store its isoformat"),
    "path": (pathlib.Path("a"), r"store str\(…\) of it"),
    "deque": (collections.deque([1]), r"store list\(…\) of it"),
    "user dict": (collections.UserDict(), r"store dict\(…\) of it"),
    "generator": (torch.Generator(), r"store its get_state\(\)"),
    "random": (random.Random(1), r"store its getstate\(\)"),
    "NumPy generator": (numpy.random.default_rng(1), r"store its bit_generator\.state"),
    "NumPy random": (numpy.random.RandomState(1), r"store its get_state\(\)"),
    "array of objects": (numpy.array([None]), "NumPy ndarray of object .* tolist"),
    "array of words": (numpy.array(["a"]), "NumPy ndarray of <U1"),
    "long double": (numpy.longdouble(1), "NumPy longdouble of float128"),
    "masked": (numpy.ma.array([1], mask=[True]), "NumPy MaskedArray"),
    "sparse": (torch.eye(2).to_sparse(), r"store \.to_dense\(\)"),
    "subclass of Tensor": (
        torch.ones(1).as_subclass(type("Special", (Tensor,), {})),
        r"as_subclass\(torch\.Tensor\)",
    ),
    "tensor in a set": ({torch.ones(1)}, "in a set, or as a key"),
    "defaultdict of a lambda": (
        defaultdict(lambda: 1),
        r"a defaultdict of .*<lambda> can't be stored: store dict",
    ),
    "itself": (cycle, "contains itself"),
    "deep": (deep, f"more than {LEVELS} containers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stored_says_where_and_what_can(name: str) -> None:
    value, words = REFUSED[name]
    with pytest.raises(CheckpointError, match=rf"^optimizer/param_groups/0/foo.*: .*{words}"):
        pack({"param_groups": [{"foo": value}]}, "optimizer", {})


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = [1]
    assert through([shared, {"a": shared}, (shared,)]) == [[1], {"a": [1]}, ([1],)]


def test_the_deepest_that_is_stored_can_be_read() -> None:
    value: Any = complex(math.nan, 1)
    for level in range(LEVELS):
        value = {level: value}
    assert repr(through(value)) == repr(value)


HOSTILE: dict[str, Any] = {
    "kind unknown": {"$": "pickle", "value": "gA=="},
    "kind a number": {"$": 1},
    "kind a list": {"$": []},
    "kind of Python": {"$": "__import__", "items": ["os"]},
    "no fields": {"$": "tuple"},
    "more fields": {"$": "tuple", "items": [], "more": 1},
    "items a word": {"$": "tuple", "items": "ab"},
    "items a dict": {"$": "set", "items": {}},
    "unhashable": {"$": "set", "items": [[1]]},
    "unhashable key": {"$": "dict", "items": [[[1], 2]]},
    "twice in a set": {"$": "set", "items": [1, 1.0]},
    "a key twice": {"$": "dict", "items": [[1, 2], [1, 3]]},
    "pair of three": {"$": "dict", "items": [[1, 2, 3]]},
    "pair a word": {"$": "dict", "items": ["ab"]},
    "float of a word": {"$": "float", "value": "1e400"},
    "float of a number": {"$": "float", "value": 1.0},
    "int of a word": {"$": "int", "value": "0x"},
    "int with lines": {"$": "int", "value": "0x1_0"},
    "complex of three": {"$": "complex", "items": [1.0, 2.0, 3.0]},
    "complex of words": {"$": "complex", "items": ["1", "2"]},
    "bytes of no base64": {"$": "bytes", "value": "a"},
    "bytes of spaces": {"$": "bytes", "value": "gA =="},
    "bytes of é": {"$": "bytes", "value": "é"},
    "str of no text": {"$": "str", "value": "/w=="},
    "dtype unknown": {"$": "dtype", "value": "nn"},
    "device unknown": {"$": "device", "value": "toaster:0"},
    "size of words": {"$": "size", "items": ["a"]},
    "size of truth": {"$": "size", "items": [True]},
    "size too large": {"$": "size", "items": [2**64]},
    "range of two": {"$": "range", "items": [1, 2]},
    "range without step": {"$": "range", "items": [1, 2, 0]},
    "slice of one": {"$": "slice", "items": [1]},
    "defaultdict of a module": {"$": "defaultdict", "of": "os", "items": []},
    "tensor of a number": {"$": "tensor", "name": 1},
    "tensor in a set": {"$": "set", "items": [{"$": "tensor", "name": "a"}]},
    "tensor as a key": {"$": "dict", "items": [[{"$": "tuple", "items": [{"$": "tensor", "name": "a"}]}, 1]]},
    "scalar too large": {"$": "scalar", "dtype": "int8", "value": 300},
    "scalar rounded": {"$": "scalar", "dtype": "float32", "value": 0.1},
    "scalar of another kind": {"$": "scalar", "dtype": "int8", "value": 1.0},
    "scalar of a list": {"$": "scalar", "dtype": "int8", "value": [1]},
    "scalar unknown": {"$": "scalar", "dtype": "object", "value": 1},
    "same hashes": {
        "$": "set",
        "items": [{"$": "int", "value": hex((2**61 - 1) * n)} for n in range(8, 2000)],
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_was_never_stored_is_refused(name: str) -> None:
    value = loads(json.dumps([{"a": HOSTILE[name]}]).encode(), "x")
    with pytest.raises(CheckpointError, match="state") as caught:
        unpack(value, lambda name: torch.ones(1))
    assert len(str(caught.value)) < 400
    with pytest.raises(CheckpointError):
        names(value)


def test_an_array_of_what_numpy_lacks() -> None:
    with pytest.raises(CheckpointError, match="not as it was stored"):
        unpack({"$": "array", "name": "a"}, lambda name: torch.ones(1, dtype=torch.bfloat16))


def test_an_array_is_filled_with_its_tensor() -> None:
    tensor = torch.zeros(2)
    array = unpack({"$": "array", "name": "a"}, lambda name: tensor)
    tensor += 3
    assert array.tolist() == [3, 3]


def test_deep_values_end_in_a_sentence() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(CheckpointError, match="levels"):
        unpack(value, lambda name: name)

    value = loads(b"[" * 150 + b"]" * 150, "x")

    def further(calls: int) -> Any:
        return further(calls - 1) if calls else unpack(value, lambda name: name)

    with pytest.raises(CheckpointError, match="too many functions"):
        further(sys.getrecursionlimit() - 170)


def test_numpy_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    through({"a": (1, torch.ones(1), b"b")})
    with pytest.raises(CheckpointError):
        through(object())
    assert "numpy" not in sys.modules
