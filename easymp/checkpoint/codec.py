"""Python state as JSON, and headers of safetensors files; reading them runs no code.

`dumps` and `loads` are strict JSON: no key twice, no NaN, bounded depth and length. The text may come from anyone, so what costs more than
its length is refused before it is parsed.

`pack` and `unpack` tag the values that plain JSON lacks as ``{"$": kind, …}``, and replace tensors by their names in files. Kept: the
builtin containers, OrderedDict, Counter, defaultdict of a builtin; numbers of any size, bytes, torch's Size, dtype and device, NumPy's
scalars and arrays (as tensors). Not kept: whether two places hold the same object, attributes of a container, `requires_grad`. NumPy is
not imported for any of it.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import CheckpointError

LONGEST = 2**28  # bytes of a document; every rank holds and parses it in memory
MARKS = 20_000_000  # commas, brackets and quotes in a document; one takes up to 72 bytes once parsed
DEPTH = 200  # nested lists and objects; Python's parser recurses, and so do our functions
DIGITS = 20  # of an integer: those of 64 bits
NUMBER = 40  # characters of a float; repr needs 24
LEVELS = 50  # nested containers of a state; each takes at most three levels of JSON
WORD = 2**63  # integers from -WORD to 2 * WORD are JSON numbers
COLLISIONS = (
    1000  # equal hashes in a set or dict: time grows with their square, and an attacker may choose them
)

_NOT_BRACKETS = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes, 1 and -1

# -- strict JSON ------------------------------------------------------------------------------------------------------


def dumps(value: Any) -> bytes:
    """Encode `value`, which has JSON's own types only; others are a CheckpointError."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
        _check_cost(text)
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"this cannot be stored as JSON ({error}): pass fewer, plain values") from None


def loads(text: bytes, what: str) -> Any:
    """Decode a JSON text of the kind that easymp writes, else raise CheckpointError; `what` names the file in messages."""
    try:
        _check_cost(text)
        value = json.loads(
            text.decode(),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
        if re.search(rb"\\u[dD][89a-fA-F]", text):  # half of a surrogate pair can't be written again
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise CheckpointError(f"{what}: not UTF-8 ({error.reason}): damaged, or no file of ours") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: not JSON of ours ({error}): damaged, or another file") from None
    return value


def _check_cost(text: bytes) -> None:
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} bytes, and {LONGEST} are the most")
    if sum(map(text.count, (b",", b"[", b"{", b'"'))) > MARKS:
        raise ValueError(f"more than {MARKS} commas, brackets and quotes")
    bare = re.sub(rb"\\.", b"", text, flags=re.DOTALL) if b"\\" in text else text
    brackets = b"".join(bare.translate(None, _NOT_BRACKETS).split(b'"')[::2])  # those outside of strings
    if max(accumulate(memoryview(brackets.translate(_STEPS)).cast("b")), default=0) > DEPTH:
        raise ValueError(f"nested more than {DEPTH} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:80]!r} stands twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    if digits == "-0":
        raise ValueError("the number -0, which safetensors reads as -0.0 and Python as 0")
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > NUMBER or math.isinf(float(digits)):
        raise ValueError(f"a number like {digits[:NUMBER]}")
    return float(digits)


def _constant(name: str) -> None:
    raise ValueError(f"JSON has no number {name}")


# -- kinds ------------------------------------------------------------------------------------------------------------

TAG = "$"
SEQUENCES: dict[type, str] = {
    tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size", range: "range", slice: "slice",
}  # fmt: skip
MAPPINGS: dict[type, str] = {
    dict: "dict", OrderedDict: "ordered", Counter: "counter", defaultdict: "defaultdict",
}  # fmt: skip
FACTORIES: dict[str, Any] = {f.__name__: f for f in (int, float, bool, str, list, dict, set, tuple)}
FACTORIES["none"] = None
TORCH_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
SHARED = (  # dtypes that NumPy and torch both have, under the same names
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
)
NUMPY_DTYPES = {name: TORCH_DTYPES[name] for name in SHARED.split()}


def _base64(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode()


WORDS: dict[type, Callable[[Any], str]] = {  # values that are stored as one string
    int: hex,
    float: repr,
    str: lambda text: _base64(text.encode("utf-8", "surrogatepass")),
    bytes: _base64,
    bytearray: _base64,
    torch.dtype: lambda dtype: str(dtype).removeprefix("torch."),
    torch.device: str,
}

# -- pack -------------------------------------------------------------------------------------------------------------


def pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Convert `value` to JSON's types; put its tensors into `tensors` under paths that begin with `path`, which errors name, too."""
    try:
        return _Packer(tensors).pack(value, path)
    except RecursionError:
        raise CheckpointError(f"{path}: packed too deep in the call stack: save from further out") from None


class _Packer:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._open: list[int] = []  # ids of the containers that hold what is being packed

    def pack(self, value: Any, path: str, hashed: bool = False) -> Any:
        """`hashed`: in a set, or as a key of a dict."""
        kind = type(value)
        if (
            value is None
            or kind is bool
            or (kind is int and -WORD <= value < 2 * WORD)
            or (kind is float and math.isfinite(value))
            or (kind is str and _encodable(value))
        ):
            return value
        if kind in WORDS:
            return {TAG: kind.__name__, "value": WORDS[kind](value)}
        if kind is complex:
            return {TAG: "complex", "items": [self.pack(part, path) for part in (value.real, value.imag)]}
        if not hashed and isinstance(value, Tensor):
            _check_tensor(value, path)
            return {TAG: "tensor", "name": self._keep(value, path)}
        if kind is list or kind in SEQUENCES or kind in MAPPINGS:
            return self._container(value, path, hashed)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.name in NUMPY_DTYPES:
            return {TAG: "scalar", "dtype": value.dtype.name, "value": self.pack(value.item(), path)}
        if numpy is not None and kind is numpy.ndarray and not hashed and value.dtype.name in NUMPY_DTYPES:
            # A copy in native byte order; torch takes no array that is read-only or runs backwards.
            array = value.astype(value.dtype.newbyteorder("="), order="C")
            return {TAG: "array", "name": self._keep(torch.from_numpy(array), path)}
        raise CheckpointError(f"{path}: {_refusal(value, hashed)}")

    def _container(self, value: Any, path: str, hashed: bool) -> Any:
        if id(value) in self._open:
            raise CheckpointError(f"{path}: contains itself: store the parts of it that do not")
        if len(self._open) == LEVELS:
            raise CheckpointError(f"{path}: more than {LEVELS} containers in one another: flatten it")
        self._open.append(id(value))
        try:
            kind, items = type(value), value
            if kind in MAPPINGS:
                return self._mapping(value, path)
            if kind in (range, slice):
                items = value.start, value.stop, value.step
            elif kind in (set, frozenset):  # a fixed order: equal states have equal bytes
                items, hashed = sorted(value, key=repr), True
            packed = [self.pack(item, f"{path}/{i}", hashed) for i, item in enumerate(items)]
        finally:
            self._open.pop()
        return packed if kind is list else {TAG: SEQUENCES[kind], "items": packed}

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        kind = MAPPINGS[type(value)]
        if kind == "dict" and TAG not in value and all(type(key) is str and _encodable(key) for key in value):
            return {key: self.pack(item, f"{path}/{key}") for key, item in value.items()}
        packed: dict[str, Any] = {TAG: kind}
        if isinstance(value, defaultdict):
            factory = value.default_factory
            names = [name for name, known in FACTORIES.items() if known is factory]
            if not names:
                raise CheckpointError(
                    f"{path}: a defaultdict of {_named(factory)} can't be stored: use dict(…)"
                )
            packed["of"] = names[0]
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


def _check_tensor(value: Tensor, path: str) -> None:
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        distributed = sys.modules.get("torch.distributed.tensor")  # long to import, and it makes all DTensors
        if distributed is None or type(value) is not distributed.DTensor:
            said = f"a {_named(type(value))} would come back as a plain tensor"
            raise CheckpointError(f"{path}: {said}: store .as_subclass(torch.Tensor) of it")
    if value.layout != torch.strided:
        raise CheckpointError(f"{path}: a tensor of layout {value.layout} can't be stored: store .to_dense()")


def _encodable(text: str) -> bool:
    try:
        text.encode()
        return True
    except UnicodeEncodeError:  # half of a surrogate pair, as in names of files that are not text
        return False


def _step(key: Any, number: int) -> str:
    """The part of a path that says which item of a dict."""
    if type(key) is str:
        return key.encode(errors="backslashreplace").decode()
    return str(key) if key is None or (isinstance(key, int) and -WORD <= key < WORD) else f"item {number}"


REMEDIES = {  # by class, in this order: a value that can be stored in its place
    "enum.Enum": "its .value", "datetime.date": "its isoformat()", "datetime.time": "its isoformat()",
    "datetime.timedelta": "its total_seconds()", "collections.deque": "list(…) of it",
    "decimal.Decimal": "str(…) of it", "pathlib.PurePath": "str(…) of it", "torch._C.Generator": "its get_state()",
    "numpy.random._generator.Generator": "its bit_generator.state", "numpy.random.mtrand.RandomState": "its get_state()",
    "numpy.ndarray": "its tolist(), or an array of numbers", "numpy.generic": "its tolist(), or an array of numbers",
    **{f"builtins.{n}": f"{n}(…) of it" for n in "tuple dict str int float bytes list set frozenset".split()},
}  # fmt: skip


def _refusal(value: Any, hashed: bool) -> str:
    """Why a value can't be stored, and what can."""
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
        what, remedy = (
            f"a function ({value.__name__.strip('<>')})",
            "leave it out, and set it again after loading",
        )
    elif isinstance(value, type):
        what, remedy = f"a class ({_named(value)})", "store its name, and look it up yourself"
    elif hashed and isinstance(value, Tensor):
        what, remedy = "a tensor in a set, or as a key of a dict,", "use a list, or another key"
    elif callable(getattr(value, "state_dict", None)):
        what, remedy = f"a {_named(type(value))}", "store its state_dict()"
    else:
        # `pathlib._local` in Python 3.13.
        homes = (base.__module__.removesuffix("._local") for base in type(value).__mro__)
        bases = {f"{home}.{base.__qualname__}" for home, base in zip(homes, type(value).__mro__)}
        known = next((known for base, known in REMEDIES.items() if base in bases), None)
        what, remedy = (
            f"a {_named(type(value))}",
            f"store {known or 'numbers, words, tensors, and lists or dicts of them'}",
        )
    return f"{what} can't be stored: {remedy}"


def _named(kind: Any) -> str:
    """The name of a class in messages."""
    name = getattr(kind, "__qualname__", repr(kind)).replace("<locals>.", "")
    module = getattr(kind, "__module__", "builtins")
    return name if module in ("builtins", "__main__") else f"{module}.{name}"


# -- unpack -----------------------------------------------------------------------------------------------------------


def unpack(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Rebuild the value that `pack` was given, else raise CheckpointError; `tensor` returns the tensor of a name.

    An array shares the memory of its tensor, so that one that is filled later fills the array.
    """
    try:
        return _unpack(value, tensor, 0)
    except RecursionError:
        raise CheckpointError("unpacked too deep in the call stack: load from further out") from None


def names(value: Any) -> list[str]:
    """The names of the tensors in a result of `pack`; raises as `unpack`."""
    found: list[str] = []
    unpack(value, found.append)
    return found


def _unpack(value: Any, tensor: Callable[[str], Any], depth: int) -> Any:
    if depth > DEPTH:
        raise CheckpointError(f"a state has more than {DEPTH} levels, which easymp never stores")
    if isinstance(value, list):
        return [_unpack(item, tensor, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _unpack(item, tensor, depth + 1) for key, item in value.items()}
    kind = value[TAG]
    if not isinstance(kind, str) or kind not in READERS:
        raise CheckpointError(
            f"a state has the kind {kind!r:.80}, which this easymp does not know: update it"
        )
    fields, read = READERS[kind]
    given = {name: item for name, item in value.items() if name != TAG}
    wrong = f"a {kind} in a state is not as it was stored: {value!r:.80}"
    if given.keys() != fields.keys() or not all(isinstance(given[name], of) for name, of in fields.items()):
        raise CheckpointError(wrong)
    if kind in MAPPINGS.values():
        given["items"] = [_pair(item, tensor, depth + 2) for item in given["items"]]
    elif "items" in given:
        inner = _no_tensor if kind in ("set", "frozenset") else tensor
        given["items"] = [_unpack(item, inner, depth + 2) for item in given["items"]]
    elif "name" in given:
        given["name"] = tensor(given["name"])
    elif kind == "scalar":
        given["value"] = _unpack(given["value"], _no_tensor, depth + 1)
    try:
        return read(*(given[name] for name in fields))
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"{wrong} ({error!s:.200})") from None


def _pair(item: Any, tensor: Callable[[str], Any], depth: int) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise CheckpointError(f"a dict in a state has {item!r:.80} where a key and its value should be")
    return _unpack(item[0], _no_tensor, depth + 1), _unpack(item[1], tensor, depth + 1)


def _no_tensor(name: str) -> Any:
    raise CheckpointError(f"the tensor {name!r:.80} of a state is in a set, or a key, where it cannot be")


def _expect(right: bool) -> None:
    if not right:
        raise ValueError("easymp does not write such a value")


def _collection(make: Callable[[Any], Any], items: list[Any]) -> Any:
    """A set or dict of distinct items."""
    keys = items if make in (set, frozenset) else [key for key, _ in items]
    _expect(max(Counter(map(hash, keys)).values(), default=0) <= COLLISIONS)
    made = make(items if make is not Counter else dict(items))
    _expect(len(made) == len(items))
    return made


def _hex(value: str) -> int:
    number = int(value, 16)
    _expect(hex(number) == value)
    return number


def _complex(items: list[Any]) -> complex:
    real, imaginary = items
    _expect(type(real) is type(imaginary) is float)
    return complex(real, imaginary)


def _integers(make: Callable[[list[int]], Any], items: list[Any]) -> Any:
    _expect(all(type(item) is int and abs(item) < 2**63 for item in items))
    return make(items)


def _three(make: Callable[..., Any], items: list[Any]) -> Any:
    start, stop, step = items
    return make(start, stop, step)


def _scalar(dtype: str, value: Any) -> Any:
    _expect(type(value) in (bool, int, float, complex))
    found = torch.tensor(value, dtype=NUMPY_DTYPES[dtype], device="cpu").numpy()[()]
    _expect(type(found.item()) is type(value) and (found.item() == value or value != value))
    return found


def _bytes(value: str) -> bytes:
    return base64.b64decode(value, validate=True)


NAME, ONE, ITEMS = {"name": str}, {"value": str}, {"items": list}
READERS: dict[
    str, tuple[dict[str, type], Callable[..., Any]]
] = {  # kind → its fields, and what is made of them
    "tensor": (NAME, lambda name: name),
    "array": (NAME, lambda name: name.numpy() if isinstance(name, Tensor) else name),
    "scalar": ({"dtype": str, "value": object}, _scalar),
    "str": (ONE, lambda value: _bytes(value).decode("utf-8", "surrogatepass")),
    "int": (ONE, _hex),
    "float": (ONE, lambda value: {word: float(word) for word in ("nan", "inf", "-inf")}[value]),
    "complex": (ITEMS, _complex),
    "bytes": (ONE, _bytes),
    "bytearray": (ONE, lambda value: bytearray(_bytes(value))),
    "dtype": (ONE, lambda value: TORCH_DTYPES[value]),
    "device": (ONE, torch.device),
    "tuple": (ITEMS, tuple),
    "set": (ITEMS, partial(_collection, set)),
    "frozenset": (ITEMS, partial(_collection, frozenset)),
    "size": (ITEMS, partial(_integers, torch.Size)),
    "range": (ITEMS, partial(_integers, partial(_three, range))),
    "slice": (ITEMS, partial(_three, slice)),
    "dict": (ITEMS, partial(_collection, dict)),
    "ordered": (ITEMS, partial(_collection, OrderedDict)),
    "counter": (ITEMS, partial(_collection, Counter)),
    "defaultdict": (
        {"of": str, "items": list},
        lambda of, items: _collection(partial(defaultdict, FACTORIES[of]), items),
    ),
}


# -- headers of safetensors files ----------------------------------------------------------------------------------------
#
# 8 bytes of length, JSON, spaces up to a page, then tensors one after the other: https://huggingface.co/docs/safetensors. The types are
# those of version 0.8 of the library. It lacks complex128 and complex32: they are written as pairs of F64 and F16 in a last dimension
# of 2, as `torch.view_as_real` shows them. The bytes are the same.


PAGE = 4096
LONGEST_HEADER = 100_000_000  # bytes of a header that the safetensors library still reads
MOST = 2**63 - 1  # bytes in a file or a tensor
DIMENSIONS = 64  # torch's limit
FLOAT4 = torch.float4_e2m1fn_x2  # two values a byte: the format counts values, torch counts bytes
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0", FLOAT4: "F4",
    torch.complex64: "C64", torch.complex128: "C128", torch.complex32: "C32",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
PARTS = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
}  # types that safetensors has no name for


class Slot(NamedTuple):
    """A tensor in a file: bytes ``[begin, end)`` of the file, row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def filed(dtype: torch.dtype, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a tensor in a file; complex types without a safetensors name get one more dimension of 2."""
    return (PARTS[dtype], (*shape, 2)) if dtype in PARTS else (dtype, tuple(shape))


def nbytes(dtype: torch.dtype, shape: object) -> int | None:
    """Bytes of a tensor; None where a torch tensor cannot have this `shape`."""
    if not isinstance(shape, (list, tuple)) or len(shape) > DIMENSIONS:
        return None
    # Checked even if another dimension is 0: torch multiplies all of them for the strides.
    if any(type(n) is not int or n < 0 for n in shape) or prod(n or 1 for n in shape) * dtype.itemsize > MOST:
        return None
    return prod(shape) * dtype.itemsize


def encode_header(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str] | None = None
) -> tuple[bytes, list[Slot]]:
    """The bytes before the first tensor, and the slot of each of `tensors`, in their order."""
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    places, at = [], 0
    for name, dtype, shape in tensors:
        if dtype not in NAMES:
            raise CheckpointError(f"{name}: safetensors has no type for {dtype}: convert it before saving")
        size = nbytes(dtype, tuple(shape))
        if size is None or at + size > MOST:
            raise CheckpointError(f"{name}: a file cannot hold a tensor of shape {list(shape)}")
        if name in table or name == "__metadata__":
            raise CheckpointError(f"{name}: two tensors of a file have this name: rename one of them")
        kept, dims = filed(dtype, shape)
        if kept is FLOAT4:
            if not dims:
                raise CheckpointError(f"{name}: {dtype} needs a dimension in safetensors: use .reshape(1)")
            dims = (*dims[:-1], 2 * dims[-1])
        table[name] = {"dtype": NAMES[kept], "shape": dims, "data_offsets": [at, at + size]}
        places.append((dtype, tuple(shape), at, at + size))
        at += size
    text = dumps(table)
    text += b" " * (-(len(text) + 8) % PAGE)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(f"a header of {len(text)} bytes is over {LONGEST_HEADER}: use several files")
    base = len(text) + 8
    return len(text).to_bytes(8, "little") + text, [Slot(d, s, base + b, base + e) for d, s, b, e in places]


def header_length(text: bytes, size: int, what: str) -> int:
    """Bytes before the data of a file of `size` bytes, from its first 8."""
    count = int.from_bytes(text[:8], "little")
    if len(text) < 8 or count > LONGEST_HEADER or 8 + count > size:
        raise CheckpointError(f"{what}: not a safetensors file: it does not begin with a header's length")
    return 8 + count


def decode_header(text: bytes, size: int, what: str) -> tuple[dict[str, Slot], dict[str, str]]:
    """The tensors of a file of `size` bytes that begins with `text` (at least its header), and its metadata; `what` names it in errors."""
    base = header_length(text, size, what)
    if len(text) < base:
        raise CheckpointError(f"{what}: a header of {base} bytes, of which {len(text)} are there: cut short")
    table = loads(text[8:base], what)
    if text[8:9] != b"{" or not isinstance(table, dict):
        raise CheckpointError(f"{what}: not a safetensors file: its header is not a table")
    metadata = table.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(word, str) for word in metadata.values()):
        raise CheckpointError(f"{what}: not a safetensors file: __metadata__ does not map words to words")
    slots = {name: _slot(entry, base, size, f"{what}: {name!r}") for name, entry in table.items()}
    at = base
    for slot, name in sorted(((slot[2:], name) for name, slot in slots.items())):
        if slot[0] != at:
            said = (
                "overlaps with the tensor before it"
                if slot[0] < at
                else f"leaves {slot[0] - at} bytes before it unused"
            )
            raise CheckpointError(f"{what}: {name!r} {said}: damaged, or not a safetensors file")
        at = slot[1]
    if at != size:
        raise CheckpointError(f"{what}: {size - at} bytes after the last tensor: damaged, or not safetensors")
    return slots, metadata


def _slot(entry: Any, base: int, size: int, what: str) -> Slot:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{what} is not described by dtype, shape and data_offsets alone: damaged")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None or dtype in PARTS:
        raise CheckpointError(f"{what} has the unknown dtype {name!r:.40}: update easymp, or convert it")
    if dtype is FLOAT4 and isinstance(shape, list) and shape:
        shape = [*shape[:-1], shape[-1] // 2 if type(shape[-1]) is int and shape[-1] % 2 == 0 else None]
    count = nbytes(dtype, shape)
    if count is None or (dtype is FLOAT4 and not shape):
        raise CheckpointError(f"{what} has the shape {entry['shape']!r:.80}, which a {dtype} cannot have")
    if not isinstance(offsets, list) or [*map(type, offsets)] != [int, int]:
        raise CheckpointError(f"{what} lies at {offsets!r:.80}, which are not two places")
    begin, end = offsets
    if not 0 <= begin <= end <= size - base or end - begin != count:
        raise CheckpointError(f"{what} lies at {offsets} of {size - base} bytes, and has {count}: damaged")
    return Slot(dtype, tuple(shape), base + begin, base + end)
