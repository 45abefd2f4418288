"""Python state as JSON, and headers of safetensors files; reading them runs no code.

The text may come from anyone: what costs more than its length is refused before it is parsed. `pack` tags values that
JSON lacks as ``{"$": kind, …}``, replaces tensors by their names in files, and refuses what state dicts do not hold.
Identity of objects and `requires_grad` are not kept.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections import Counter, OrderedDict
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
INT64 = 2**63  # integers from -INT64 to 2 * INT64 are JSON numbers
COLLISIONS = 1000  # equal hashes in a set or dict: time grows with their square, and an attacker may choose them

_NOT_BRACKETS = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes, 1 and -1


def dumps(value: Any) -> bytes:
    """Encode `value`, which has JSON's own types only; others are a CheckpointError."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
        _check_cost(text)
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"this cannot be stored as JSON ({error}): pass fewer, plain values") from None


def loads(text: bytes, file: str) -> Any:
    """Decode a JSON text of the kind that easymp writes, else raise CheckpointError."""
    try:
        _check_cost(text)
        value = json.loads(
            text.decode(), object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
        )
        if re.search(rb"\\u[dD][89a-fA-F]", text):  # half of a surrogate pair can't be written again
            json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise CheckpointError(f"{file}: not UTF-8 ({error.reason}): damaged, or no file of ours") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON of ours ({error}): damaged, or another file") from None
    return value


def _check_cost(text: bytes) -> None:
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} bytes, and {LONGEST} are the most")
    if sum(map(text.count, (b",", b"[", b"{", b'"'))) > MARKS:
        raise ValueError(f"more than {MARKS} commas, brackets and quotes")
    unescaped = re.sub(rb"\\.", b"", text, flags=re.DOTALL) if b"\\" in text else text
    brackets = b"".join(unescaped.translate(None, _NOT_BRACKETS).split(b'"')[::2])  # those outside of strings
    if max(accumulate(memoryview(brackets.translate(_STEPS)).cast("b")), default=0) > DEPTH:
        raise ValueError(f"nested more than {DEPTH} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((duplicate, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {duplicate[:80]!r} stands twice")
    return value


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


TAG = "$"
SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size"}
MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
TORCH_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
NUMPY_SCALARS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
NUMPY_DTYPES = {name: TORCH_DTYPES[name] for name in (*NUMPY_SCALARS, "complex64", "complex128")}
TEXTS: dict[type, Callable[[Any], str]] = {  # values that are stored as one string
    int: hex,
    float: repr,
    bytes: lambda content: base64.b64encode(content).decode(),
    torch.dtype: lambda dtype: str(dtype).removeprefix("torch."),
}


def pack(
    value: Any, path: str, tensors: dict[str, Tensor], is_key: bool = False, containers: tuple[int, ...] = ()
) -> Any:
    """Convert `value` to JSON's types; its tensors go into `tensors` under paths that begin with `path`.

    `is_key`: the value is a key of a dict. `containers`: ids of those that hold the value.
    """
    type_ = type(value)
    if (
        value is None
        or type_ is bool
        or (type_ is int and -INT64 <= value < 2 * INT64)
        or (type_ is float and math.isfinite(value))
        or (type_ is str and _is_encodable(value))
    ):
        return value
    if type_ in TEXTS:
        return {TAG: type_.__name__, "value": TEXTS[type_](value)}
    if isinstance(value, Tensor) and not is_key:
        _check_tensor(value, path)
        return {TAG: "tensor", "name": _add_tensor(value, path, tensors)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.name in NUMPY_SCALARS:
        return {TAG: "scalar", "dtype": value.dtype.name, "value": pack(value.item(), path, tensors)}
    if numpy is not None and type_ is numpy.ndarray and not is_key and value.dtype.name in NUMPY_DTYPES:
        # A copy in native byte order; torch takes no array that is read-only or runs backwards.
        array = value.astype(value.dtype.newbyteorder("="), order="C")
        return {TAG: "array", "name": _add_tensor(torch.from_numpy(array), path, tensors)}
    if type_ is not list and type_ not in SEQUENCES and type_ not in MAPPINGS:
        raise CheckpointError(f"{path}: {_refusal(value, is_key)}")
    if id(value) in containers:
        raise CheckpointError(f"{path}: contains itself: store the parts of it that do not")
    if len(containers) == LEVELS:
        raise CheckpointError(f"{path}: more than {LEVELS} containers in one another: flatten it")
    containers = (*containers, id(value))
    if type_ is dict and TAG not in value and all(type(key) is str and _is_encodable(key) for key in value):
        return {key: pack(item, f"{path}/{key}", tensors, containers=containers) for key, item in value.items()}
    if type_ in MAPPINGS:
        keys = [pack(key, f"{path}/key {i}", tensors, True, containers) for i, key in enumerate(value)]
        steps = [_path_step(key, i) for i, key in enumerate(value)]
        items = [
            [key, pack(item, f"{path}/{step}", tensors, containers=containers)]
            for key, step, item in zip(keys, steps, value.values())
        ]
        return {TAG: MAPPINGS[type_], "items": items}
    items = [pack(item, f"{path}/{i}", tensors, is_key, containers) for i, item in enumerate(value)]
    return items if type_ is list else {TAG: SEQUENCES[type_], "items": items}


def _add_tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    while path in tensors:  # {"a/b": …, "a": {"b": …}}, or {"0": …, 0: …}
        path += "'"
    tensors[path] = tensor
    return path


def _check_tensor(value: Tensor, path: str) -> None:
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        distributed = sys.modules.get("torch.distributed.tensor")  # long to import, and it makes all DTensors
        if distributed is None or type(value) is not distributed.DTensor:
            raise CheckpointError(
                f"{path}: a {_type_name(type(value))} would come back as a plain tensor: store "
                ".as_subclass(torch.Tensor) of it"
            )
    if value.layout != torch.strided:
        raise CheckpointError(f"{path}: a tensor of layout {value.layout} can't be stored: store .to_dense()")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
        return True
    except UnicodeEncodeError:  # half of a surrogate pair, as in names of files that are not text
        return False


def _path_step(key: Any, number: int) -> str:
    if type(key) is str:
        return key.encode(errors="backslashreplace").decode()
    return str(key) if key is None or (isinstance(key, int) and -INT64 <= key < INT64) else f"item {number}"


REMEDIES = {  # by class, in this order: a value that can be stored in its place
    "enum.Enum": "its .value", "datetime.date": "its isoformat()", "datetime.time": "its isoformat()",
    "datetime.timedelta": "its total_seconds()", "collections.deque": "list(…) of it",
    "collections.defaultdict": "dict(…) of it", "decimal.Decimal": "str(…) of it", "pathlib.PurePath": "str(…) of it",
    "torch.device": "str(…) of it", "torch._C.Generator": "its get_state()",
    "numpy.random._generator.Generator": "its bit_generator.state",
    "numpy.random.mtrand.RandomState": "its get_state()",
    "numpy.ndarray": "its tolist(), or an array of numbers", "numpy.complexfloating": "its .real and .imag",
    "numpy.generic": "its tolist(), or an array of numbers",
    "builtins.set": "sorted(…) of it", "builtins.frozenset": "sorted(…) of it", "builtins.range": "list(…) of it",
    "builtins.slice": "its start, stop and step", "builtins.bytearray": "bytes(…) of it",
    "builtins.complex": "its .real and .imag",
    **{f"builtins.{n}": f"{n}(…) of it" for n in "tuple dict int float bytes list".split()},
    "builtins.object": "numbers, words, tensors, and lists or dicts of them",
}  # fmt: skip


def _refusal(value: Any, is_key: bool) -> str:
    if type(value) is str:
        return "text with half of a surrogate pair can't be stored: store os.fsencode(…) of it"
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
        name = value.__name__.strip("<>")
        return f"a function ({name}) can't be stored: leave it out, and set it again after loading"
    if isinstance(value, type):
        return f"a class ({_type_name(value)}) can't be stored: store its name, and look it up yourself"
    if is_key and isinstance(value, Tensor):
        return "a tensor as a key of a dict can't be stored: use another key"
    remedy = "its state_dict()"
    if not callable(getattr(value, "state_dict", None)):
        # `pathlib._local` in Python 3.13.
        bases = {f"{base.__module__.removesuffix('._local')}.{base.__qualname__}" for base in type(value).__mro__}
        remedy = next(remedy for base, remedy in REMEDIES.items() if base in bases)
    return f"a {_type_name(type(value))} can't be stored: store {remedy}"


def _type_name(type_: Any) -> str:
    name = getattr(type_, "__qualname__", repr(type_)).replace("<locals>.", "")
    module = getattr(type_, "__module__", "builtins")
    return name if module in ("builtins", "__main__") else f"{module}.{name}"


class TensorName(str):
    """Full name of a stored tensor, in a tree where its values would be."""


class ArrayName(TensorName):
    """The same where a NumPy array would be."""


def unpack(value: Any, tensor: Callable[[str], Any], depth: int = 0) -> Any:
    """Rebuild the value that `pack` was given. `tensor` returns the tensor of a name; arrays share its memory."""
    if depth > DEPTH:
        raise CheckpointError(f"a state has more than {DEPTH} levels, which easymp never stores")
    if isinstance(value, list):
        return [unpack(item, tensor, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: unpack(item, tensor, depth + 1) for key, item in value.items()}
    kind = value[TAG]
    if not isinstance(kind, str) or kind not in READERS:
        remedy = "this easymp does not know: update it"
        if kind in FORMER:
            remedy = "easymp 0.1 stored: replace it there by numbers, words or lists, and save again"
        raise CheckpointError(f"a state has the kind {kind!r:.80}, which {remedy}")
    fields, read = READERS[kind]
    arguments = {name: item for name, item in value.items() if name != TAG}
    refusal = f"a {kind} in a state is not as it was stored: {value!r:.80}"
    if arguments.keys() != fields.keys() or not all(isinstance(arguments[name], t) for name, t in fields.items()):
        raise CheckpointError(refusal)
    if kind in MAPPINGS.values():
        arguments["items"] = [_pair(item, tensor, depth + 2) for item in arguments["items"]]
    elif "items" in arguments:
        arguments["items"] = [unpack(item, tensor, depth + 2) for item in arguments["items"]]
    elif "name" in arguments:
        arguments["name"] = tensor(arguments["name"])
        if kind == "tensor":
            return arguments["name"]
    elif kind == "scalar":
        arguments["value"] = unpack(arguments["value"], _no_tensor, depth + 1)
    try:
        return read(*(arguments[name] for name in fields))
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"{refusal} ({error!s:.200})") from None


def _pair(item: Any, tensor: Callable[[str], Any], depth: int) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise CheckpointError(f"a dict in a state has {item!r:.80} where a key and its value should be")
    return unpack(item[0], _no_tensor, depth + 1), unpack(item[1], tensor, depth + 1)


def _no_tensor(name: str) -> Any:
    raise CheckpointError(f"the tensor {name!r:.80} of a state is in a set, or a key, where it cannot be")


def _expect(condition: bool) -> None:
    if not condition:
        raise ValueError("easymp does not write such a value")


def _mapping(make_dict: Callable[[Any], Any], items: list[Any]) -> Any:
    _expect(max(Counter(hash(key) for key, _ in items).values(), default=0) <= COLLISIONS)
    mapping = make_dict(dict(items))
    _expect(len(mapping) == len(items))
    return mapping


def _hex(value: str) -> int:
    number = int(value, 16)
    _expect(hex(number) == value)
    return number


def _size(items: list[Any]) -> torch.Size:
    _expect(all(type(item) is int and abs(item) < INT64 for item in items))
    return torch.Size(items)


def _scalar(dtype: str, value: Any) -> Any:
    _expect(type(value) in (bool, int, float, complex))
    scalar = torch.tensor(value, dtype=NUMPY_DTYPES[dtype], device="cpu").numpy()[()]
    _expect(type(scalar.item()) is type(value) and (scalar.item() == value or value != value))
    return scalar


Fields = dict[str, type]
NAME: Fields = {"name": str}
VALUE: Fields = {"value": str}
ITEMS: Fields = {"items": list}
FORMER = "str bytearray complex device set frozenset range slice defaultdict".split()  # kinds that easymp 0.1 wrote
READERS: dict[str, tuple[Fields, Callable[..., Any]]] = {  # kind → its fields, and what is made of them
    "tensor": (NAME, str),  # `unpack` returns the tensor of that name
    "array": (NAME, lambda name: name.numpy() if isinstance(name, Tensor) else ArrayName(name)),
    "scalar": ({"dtype": str, "value": object}, _scalar),
    "int": (VALUE, _hex),
    "float": (VALUE, lambda value: {text: float(text) for text in ("nan", "inf", "-inf")}[value]),
    "bytes": (VALUE, partial(base64.b64decode, validate=True)),
    "dtype": (VALUE, lambda value: TORCH_DTYPES[value]),
    "tuple": (ITEMS, tuple),
    "size": (ITEMS, _size),
    "dict": (ITEMS, partial(_mapping, dict)),
    "ordered": (ITEMS, partial(_mapping, OrderedDict)),
    "counter": (ITEMS, partial(_mapping, Counter)),
}


# 8 bytes of length, JSON, spaces up to a page, then tensors one after the other:
# https://huggingface.co/docs/safetensors. The types are those of version 0.8 of the library. It lacks complex128 and
# complex32: they are written as pairs of F64 and F16 in a last dimension of 2, as `torch.view_as_real` shows them. The
# bytes are the same.

PAGE = 4096
LONGEST_HEADER = 100_000_000  # bytes of a header that the safetensors library still reads
MOST = 2**63 - 1  # bytes in a file or a tensor
DIMENSIONS = 64  # torch's limit

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64", torch.complex128: "C128", torch.complex32: "C32",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
REAL_DTYPES = {torch.complex128: torch.float64, torch.complex32: torch.float16}  # that safetensors has no name for


class Slot(NamedTuple):
    """A tensor in a file: bytes ``[begin, end)`` of the file, row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def in_file(dtype: torch.dtype, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a tensor in a file; complex types without a safetensors name get one more dimension of 2."""
    return (REAL_DTYPES[dtype], (*shape, 2)) if dtype in REAL_DTYPES else (dtype, tuple(shape))


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
    ranges, begin = [], 0
    for name, dtype, shape in tensors:
        if dtype not in NAMES:
            raise CheckpointError(f"{name}: safetensors has no type for {dtype}: convert it before saving")
        size = nbytes(dtype, tuple(shape))
        if size is None or begin + size > MOST:
            raise CheckpointError(f"{name}: a file cannot hold a tensor of shape {list(shape)}")
        if name in table or name == "__metadata__":
            raise CheckpointError(f"{name}: two tensors of a file have this name: rename one of them")
        file_dtype, file_shape = in_file(dtype, shape)
        table[name] = {"dtype": NAMES[file_dtype], "shape": file_shape, "data_offsets": [begin, begin + size]}
        ranges.append((begin, begin + size))
        begin += size
    text = dumps(table)
    text += b" " * (-(len(text) + 8) % PAGE)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(f"a header of {len(text)} bytes is over {LONGEST_HEADER}: use several files")
    base = len(text) + 8
    slots = [Slot(t[1], tuple(t[2]), base + begin, base + end) for t, (begin, end) in zip(tensors, ranges)]
    return len(text).to_bytes(8, "little") + text, slots


class TensorSpec(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return nbytes(self.dtype, self.shape) or 0


def split_into_shards(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Shards of at most `max_bytes`, or of one larger tensor, as huggingface_hub cuts them."""
    shards: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if spec.bytes > max_bytes:
            shards.append([spec])
            continue
        if size + spec.bytes > max_bytes:
            shards.append(current)
            current, size = [], 0
        current.append(spec)
        size += spec.bytes
    if current or not shards:
        shards.append(current)
    # Larger elements first, so that each tensor begins at a multiple of its element.
    return [sorted(shard, key=lambda spec: -spec.dtype.itemsize) for shard in shards]


def encode_index(files: Mapping[str, str], total: int) -> bytes:
    """Hugging Face's index of shards: name of a tensor → its file; `total` is in bytes."""
    index = {"metadata": {"total_size": total}, "weight_map": files}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def decode_index(text: bytes, file: str) -> dict[str, str]:
    """The file of each tensor in an index of shards, of safetensors or of torch.save."""
    index = loads(text, file)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"{file}: not an index of weights: it has no weight_map from names to files")
    for name in files.values():
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{file}: weights in {name!r}, which is not a file beside the index")
    return files


def header_length(text: bytes, size: int, file: str) -> int:
    count = int.from_bytes(text[:8], "little")
    if len(text) < 8 or count > LONGEST_HEADER or 8 + count > size:
        raise CheckpointError(f"{file}: not a safetensors file: it does not begin with a header's length")
    return 8 + count


def decode_header(text: bytes, size: int, file: str) -> tuple[dict[str, Slot], dict[str, str]]:
    """The tensors and metadata of a `file` of `size` bytes that begins with `text`."""
    base = header_length(text, size, file)
    if len(text) < base:
        raise CheckpointError(f"{file}: a header of {base} bytes, of which {len(text)} are there: cut short")
    table = loads(text[8:base], file)
    if text[8:9] != b"{" or not isinstance(table, dict):
        raise CheckpointError(f"{file}: not a safetensors file: its header is not a table")
    metadata = table.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: not a safetensors file: __metadata__ does not map words to words")
    slots = {name: _slot(entry, base, size, f"{file}: {name!r}") for name, entry in table.items()}
    position = base
    for name, slot in sorted(slots.items(), key=lambda item: (item[1].begin, item[1].end, item[0])):
        if slot.begin != position:
            gap = slot.begin - position
            fault = "overlaps with the tensor before it" if gap < 0 else f"leaves {gap} bytes before it unused"
            raise CheckpointError(f"{file}: {name!r} {fault}: damaged, or not a safetensors file")
        position = slot.end
    if position != size:
        raise CheckpointError(f"{file}: {size - position} bytes after the last tensor: damaged, or not safetensors")
    return slots, metadata


def _slot(entry: Any, base: int, size: int, tensor: str) -> Slot:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{tensor} is not described by dtype, shape and data_offsets alone: damaged")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None or dtype in REAL_DTYPES:
        raise CheckpointError(f"{tensor} has the unknown dtype {name!r:.40}: update easymp, or convert it")
    count = nbytes(dtype, shape)
    if count is None:
        raise CheckpointError(f"{tensor} has the shape {shape!r:.80}, which a {dtype} cannot have")
    if not isinstance(offsets, list) or [*map(type, offsets)] != [int, int]:
        raise CheckpointError(f"{tensor} lies at {offsets!r:.80}, which are not two places")
    begin, end = offsets
    if not 0 <= begin <= end <= size - base or end - begin != count:
        raise CheckpointError(f"{tensor} lies at {offsets} of {size - base} bytes, and has {count}: damaged")
    return Slot(dtype, tuple(shape), base + begin, base + end)
