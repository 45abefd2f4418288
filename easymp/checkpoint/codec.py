"""JSON that is what it seems: no key twice, no NaN, no depth without end, no numbers that take forever.

What is read here may have been written by anyone. Everything that would cost more than its length is refused before it is parsed.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError

LONGEST = 2**28  # bytes of a document: it is held and parsed in memory, by every rank
MARKS = 20_000_000  # commas, brackets and quotes in a document; one takes up to 72 bytes once parsed
DEPTH = 200  # lists and objects in one another; Python's own parser recurses, and so do those who walk what it returns
DIGITS = 20  # of an integer: those of 64 bits
NUMBER = 40  # characters of a float; repr needs 24

_NO_BONES = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes, 1 and -1


def dumps(value: Any) -> bytes:
    """`value`, which is made of JSON's own types, as text that `loads` takes.

    Raises:
        CheckpointError: it is made of others.
    """
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
        _measure(text)
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"this cannot be stored as JSON ({error}): pass plain values, and not too many"
        ) from None


def loads(text: bytes, what: str) -> Any:
    """The value that `text` says.

    Raises:
        CheckpointError: it is no JSON, or of a kind that nobody writes; `what` names the file.
    """
    try:
        _measure(text)
        value = json.loads(
            text.decode(),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
        if re.search(
            rb"\\u[dD][89a-fA-F]", text
        ):  # half of a surrogate pair is no text: it cannot be written or printed again
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise CheckpointError(
            f"{what}: its text is not UTF-8 ({error.reason}): damaged, or another kind of file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what}: no JSON that is read here ({error}): damaged, or another kind of file"
        ) from None
    return value


def _measure(text: bytes) -> None:
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} bytes, and {LONGEST} are the most")
    if sum(map(text.count, (b",", b"[", b"{", b'"'))) > MARKS:
        raise ValueError(f"more than {MARKS} commas, brackets and quotes")
    bones = re.sub(rb"\\.", b"", text, flags=re.DOTALL) if b"\\" in text else text
    brackets = b"".join(bones.translate(None, _NO_BONES).split(b'"')[::2])  # those outside of strings
    if max(accumulate(memoryview(brackets.translate(_STEPS)).cast("b")), default=0) > DEPTH:
        raise ValueError(f"nested more than {DEPTH} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} stands twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > NUMBER or math.isinf(float(digits)):
        raise ValueError(f"a number like {digits[:NUMBER]}")
    return float(digits)


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


# -- The kinds of values that a tag stands for in a packed state, by their names.


TAG = "$"
SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
    range: "range",
    slice: "slice",
}
MAPPINGS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "defaultdict",
}
FACTORIES: dict[str, Any] = {f.__name__: f for f in (int, float, bool, str, list, dict, set, tuple)} | {
    "none": None
}
TORCH_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
# What NumPy and torch both have; the names are the same.
NUMPY_DTYPES = {
    name: TORCH_DTYPES[name]
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


# -- Why a value of a user's state can't be stored, and what can in its place.


REMEDIES = {
    "enum.Enum": "its .value",
    "datetime.date": "its isoformat()",
    "datetime.time": "its isoformat()",
    "datetime.timedelta": "its total_seconds()",
    "collections.deque": "list(…) of it",
    "decimal.Decimal": "str(…) of it",
    "fractions.Fraction": "its as_integer_ratio()",
    "random.Random": "its getstate()",
}


def refusal(value: Any, hashed: bool) -> str:
    """Why it can't be stored, and what can."""
    kind = type(value)
    what = f"a {named(kind)} can't be stored"
    if hashed and isinstance(value, Tensor):
        return f"{what} in a set, or as a key of a dict: use a list, or another key"
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
        return f"a function ({value.__name__.strip('<>')}) can't be stored: leave it out, and set it again after loading"
    if isinstance(value, type):
        return f"a class ({named(value)}) can't be stored: store its name, and look it up yourself"
    if isinstance(value, torch.Generator):
        return f"{what}: store its get_state()"
    if kind.__module__.partition(".")[0] == "numpy":
        if kind.__name__ in ("Generator", "RandomState"):
            return f"{what}: store " + (
                "its bit_generator.state" if kind.__name__ == "Generator" else "its get_state()"
            )
        return f"a NumPy {kind.__name__} of {getattr(value, 'dtype', 'unknown type')} can't be stored: store its tolist(), or a number type"
    if isinstance(value, os.PathLike):  # by name it is another class in Python 3.13
        return f"{what}: store str(…) of it"
    for base, remedy in REMEDIES.items():
        if any(f"{c.__module__}.{c.__qualname__}" == base for c in kind.__mro__):
            return f"{what}: store {remedy}"
    if isinstance(value, tuple):
        return f"{what} (its class would be lost): store tuple(…) of it"
    if isinstance(value, Mapping):
        return f"{what} (its class would be lost): store dict(…) of it"
    for base in (str, int, float, bytes, list, set, frozenset):
        if isinstance(value, base):
            return f"{what} (its class would be lost): store {base.__name__}(…) of it"
    if callable(getattr(value, "state_dict", None)):
        return f"{what}: store its state_dict()"
    return f"{what}: store numbers, words, tensors, and lists or dicts of them"


def named(kind: Any) -> str:
    """A class as a reader would write it."""
    name = getattr(kind, "__qualname__", repr(kind)).replace("<locals>.", "")
    return (
        name
        if getattr(kind, "__module__", "builtins") in ("builtins", "__main__")
        else f"{kind.__module__}.{name}"
    )


# -- How each kind of tagged value is read back from a state: by a function of its fields, which have the types that stand beside it.


COLLISIONS = 1000  # equal hashes in a set or dict; time grows with their square, and whoever writes the file can choose them


def _distinct(items: list[Any]) -> list[Any]:
    _expect(max(Counter(map(hash, items)).values(), default=0) <= COLLISIONS)
    return items


def _expect(right: bool) -> None:
    if not right:
        raise ValueError("no such value is written")


def _set(make: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    made = make(_distinct(items))
    _expect(len(made) == len(items))
    return made


def _dict(make: Callable[[Any], Any], items: list[tuple[Any, Any]]) -> Any:
    _distinct([key for key, _ in items])
    made = dict(items)
    _expect(len(made) == len(items))
    return made if make is dict else make(made)


def _from_hex(value: str) -> int:
    number = int(value, 16)
    _expect(hex(number) == value)
    return number


def _complex(items: list[Any]) -> complex:
    real, imaginary = items
    _expect(type(real) is float and type(imaginary) is float)
    return complex(real, imaginary)


def _integers(make: Callable[[list[int]], Any], items: list[Any]) -> Any:
    _expect(all(type(item) is int and abs(item) < 2**63 for item in items))
    return make(items)


def _range(items: list[int]) -> range:
    start, stop, step = items
    return range(start, stop, step)


def _slice(items: list[Any]) -> slice:
    start, stop, step = items
    return slice(start, stop, step)


def _array(name: Any) -> Any:
    return name.numpy() if isinstance(name, Tensor) else name


def _scalar(dtype: str, value: Any) -> Any:
    _expect(type(value) in (bool, int, float, complex))
    found = torch.tensor(value, dtype=NUMPY_DTYPES[dtype], device="cpu").numpy()[()]
    _expect(type(found.item()) is type(value) and (found.item() == value or value != value))
    return found


def _bytes(value: str) -> bytes:
    return base64.b64decode(value, validate=True)


Reader = tuple[dict[str, type], Callable[..., Any]]
READERS: dict[str, Reader] = {
    "tensor": ({"name": str}, lambda name: name),
    "array": ({"name": str}, _array),
    "scalar": ({"dtype": str, "value": object}, _scalar),
    "str": ({"value": str}, lambda value: _bytes(value).decode("utf-8", "surrogatepass")),
    "int": ({"value": str}, _from_hex),
    "float": ({"value": str}, lambda value: {word: float(word) for word in ("nan", "inf", "-inf")}[value]),
    "complex": ({"items": list}, _complex),
    "bytes": ({"value": str}, _bytes),
    "bytearray": ({"value": str}, lambda value: bytearray(_bytes(value))),
    "dtype": ({"value": str}, lambda value: TORCH_DTYPES[value]),
    "device": ({"value": str}, torch.device),
    "tuple": ({"items": list}, tuple),
    "set": ({"items": list}, partial(_set, set)),
    "frozenset": ({"items": list}, partial(_set, frozenset)),
    "size": ({"items": list}, partial(_integers, torch.Size)),
    "range": ({"items": list}, partial(_integers, _range)),
    "slice": ({"items": list}, _slice),
    "dict": ({"items": list}, partial(_dict, dict)),
    "ordered": ({"items": list}, partial(_dict, OrderedDict)),
    "counter": ({"items": list}, partial(_dict, Counter)),
    "defaultdict": (
        {"of": str, "items": list},
        lambda of, items: _dict(partial(defaultdict, FACTORIES[of]), items),
    ),
}


# -- Back from tagged JSON to Python state: the other half of `trees`.


def unpack(value: Any, tensor: Callable[[str], Any]) -> Any:
    """What `pack` was given; `tensor` brings the tensor of a name.

    An array shares the memory of its tensor, so that one that is filled later fills the array. What `tensor` returns that is no tensor
    is put in place as it is.

    Raises:
        CheckpointError: `value` is nothing that `pack` returns.
    """
    try:
        return _unpack(value, tensor, 0)
    except RecursionError:
        raise CheckpointError(
            "a state is unpacked where too many functions had called one another: load from further out"
        ) from None


def names(value: Any) -> list[str]:
    """Of the tensors in what `pack` returned; raises as `unpack`."""
    found: list[str] = []
    unpack(value, found.append)
    return found


def _unpack(value: Any, tensor: Callable[[str], Any], depth: int) -> Any:
    if depth > DEPTH:
        raise CheckpointError(f"a state of more than {DEPTH} levels is none that was stored")
    if isinstance(value, list):
        return [_unpack(item, tensor, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _unpack(item, tensor, depth + 1) for key, item in value.items()}
    kind = value[TAG]
    fields, read = READERS.get(kind, (None, None)) if isinstance(kind, str) else (None, None)
    if fields is None or read is None:
        raise CheckpointError(
            f"a state has a value of kind {kind!r:.80}, which this easymp does not know: update it"
        )
    given = {name: item for name, item in value.items() if name != TAG}
    if given.keys() != fields.keys() or not all(
        isinstance(item, fields[name]) for name, item in given.items()
    ):
        raise CheckpointError(f"a {kind} in a state is not as it was stored: {value!r:.80}")
    if kind in MAPPINGS.values():
        given["items"] = [_pair(item, tensor, depth + 2) for item in given["items"]]
    elif "items" in given:
        inner = _nowhere if kind in ("set", "frozenset") else tensor
        given["items"] = [_unpack(item, inner, depth + 2) for item in given["items"]]
    elif "name" in given:
        given["name"] = tensor(given["name"])
    elif kind == "scalar":
        given["value"] = _unpack(given["value"], _nowhere, depth + 1)
    try:
        return read(*(given[name] for name in fields))
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"a {kind} in a state is not as it was stored: {value!r:.80} ({error!s:.200})"
        ) from None


def _pair(item: Any, tensor: Callable[[str], Any], depth: int) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise CheckpointError(f"a dict in a state has {item!r:.80} where a key and its value should be")
    return _unpack(item[0], _nowhere, depth + 1), _unpack(item[1], tensor, depth + 1)


def _nowhere(name: str) -> Any:
    raise CheckpointError(f"the tensor {name!r:.80} of a state is where none can be: in a set, or a key")


# -- Python state as JSON, which runs no code when it is read: what plain JSON lacks is tagged, tensors go to files and leave their name.


LEVELS = 50  # containers in one another; each takes at most three levels of JSON, and `strict` reads 200
WORD = 2**63  # integers from -WORD to 2 * WORD are numbers of JSON


def pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` in JSON's types; its tensors are put into `tensors` under their paths, which begin with `path`.

    Raises:
        CheckpointError: something that has no such form; the path says where.
    """
    try:
        return _Packing(tensors).pack(value, path)
    except RecursionError:
        raise CheckpointError(
            f"{path}: packed where too many functions had called one another: save from further out"
        ) from None


class _Packing:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._open: list[int] = []  # ids of the containers that hold what is being packed

    def pack(self, value: Any, path: str, hashed: bool = False) -> Any:
        """`hashed`: in a set, or as a key of a dict."""
        kind = type(value)
        if value is None or kind is bool or (kind is int and -WORD <= value < 2 * WORD):
            return value
        if kind is str:
            return (
                value
                if _encodable(value)
                else {TAG: "str", "value": _base64(value.encode("utf-8", "surrogatepass"))}
            )
        if kind is int:
            return {TAG: "int", "value": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
        if kind is complex:
            return {TAG: "complex", "items": [self.pack(part, path) for part in (value.real, value.imag)]}
        if kind in (bytes, bytearray):
            return {TAG: kind.__name__, "value": _base64(value)}
        if kind in (torch.dtype, torch.device):
            return {TAG: kind.__name__, "value": str(value).removeprefix("torch.")}
        if not hashed and isinstance(value, Tensor):
            return {TAG: "tensor", "name": self._keep(_sound(value, path), path)}
        if kind is list or kind in SEQUENCES or kind in MAPPINGS:
            return self._container(value, path, hashed)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.name in NUMPY_DTYPES:
            return {TAG: "scalar", "dtype": value.dtype.name, "value": self.pack(value.item(), path)}
        if numpy is not None and kind is numpy.ndarray and not hashed and value.dtype.name in NUMPY_DTYPES:
            # A copy in native byte order; torch shares the memory of no array that is read-only or runs backwards.
            array = value.astype(value.dtype.newbyteorder("="), order="C")
            return {TAG: "array", "name": self._keep(torch.from_numpy(array), path)}
        raise CheckpointError(f"{path}: {refusal(value, hashed)}")

    def _container(self, value: Any, path: str, hashed: bool) -> Any:
        if id(value) in self._open:
            raise CheckpointError(f"{path}: contains itself: store the parts of it that do not")
        if len(self._open) == LEVELS:
            raise CheckpointError(
                f"{path}: more than {LEVELS} containers in one another: store a flatter one"
            )
        self._open.append(id(value))
        try:
            if type(value) in MAPPINGS:
                return self._mapping(value, path)
            if type(value) in (range, slice):
                items: Any = (value.start, value.stop, value.step)
            else:  # sets have no order of their own, and a checkpoint of the same state should have the same bytes
                items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            hashed = hashed or isinstance(value, (set, frozenset))
            packed = [self.pack(item, f"{path}/{i}", hashed) for i, item in enumerate(items)]
        finally:
            self._open.pop()
        return packed if type(value) is list else {TAG: SEQUENCES[type(value)], "items": packed}

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        kind = MAPPINGS[type(value)]
        if kind == "dict" and TAG not in value and all(type(key) is str and _encodable(key) for key in value):
            return {key: self.pack(item, f"{path}/{key}") for key, item in value.items()}
        packed: dict[str, Any] = {TAG: kind}
        if isinstance(value, defaultdict):
            name = next(
                (name for name, factory in FACTORIES.items() if factory is value.default_factory), None
            )
            if name is None:
                raise CheckpointError(
                    f"{path}: a defaultdict of {named(value.default_factory)} can't be stored: store dict(…) of it"
                )
            packed["of"] = name
        packed["items"] = [
            [self.pack(key, f"{path}/key {i}", hashed=True), self.pack(item, f"{path}/{_step(key, i)}")]
            for i, (key, item) in enumerate(value.items())
        ]
        return packed

    def _keep(self, tensor: Tensor, path: str) -> str:
        while path in self._tensors:  # {"a/b": …, "a": {"b": …}}, or {"0": …, 0: …}
            path += "'"
        self._tensors[path] = tensor
        return path


def _sound(value: Tensor, path: str) -> Tensor:
    spread = sys.modules.get("torch.distributed.tensor")  # long to import, and no DTensor is here before
    plain = (
        (Tensor, nn.Parameter, nn.Buffer)
        if spread is None
        else (Tensor, nn.Parameter, nn.Buffer, spread.DTensor)
    )
    if type(value) not in plain:
        raise CheckpointError(
            f"{path}: a {named(type(value))} would come back as a plain tensor: store .as_subclass(torch.Tensor) of it"
        )
    if value.layout != torch.strided:
        raise CheckpointError(
            f"{path}: a tensor of layout {value.layout} can't be stored: store .to_dense() of it"
        )
    return value


def _base64(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode()


def _encodable(text: str) -> bool:
    try:
        text.encode()
        return True
    except UnicodeEncodeError:  # half of a surrogate pair, as in names of files that are no text
        return False


def _step(key: Any, number: int) -> str:
    """The part of a path that says which item of a dict."""
    if type(key) is str:
        return key.encode(errors="backslashreplace").decode()
    return str(key) if key is None or (isinstance(key, int) and -WORD <= key < WORD) else f"item {number}"
