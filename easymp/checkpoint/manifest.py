"""The manifest: the content of a checkpoint, the place of each of its bytes, and the arithmetic of chunks of tensors.

Every manifest is validated when it is read, so other code does not check it again. Its text is untrusted input.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from .codec import DTYPES, MOST, NAMES, TensorName, dumps, loads, nbytes, unpack

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, torch's checkpoint_wrapper
MANIFEST, COMMIT, INDEX = "manifest.json", "COMMIT", "model.safetensors.index.json"
BLOCK = 2**24  # bytes under one checksum
VERSION = 2  # with files of hooks; a checkpoint without them is written as version 1, which has no such field
LINEAGE = "lineage"  # a key of the plan, where easymp 0.1 takes any; elsewhere it takes no unknown one
OLDEST = "0"  # the line of all checkpoints that name none: those of easymp 0.1
MOST_RANKS = 2**20  # that wrote one checkpoint; what each of them kept is looked up by its number
LONGEST_NAME = 200  # bytes of a file's name; usual file systems take 255, and temporary names are longer
LONGEST_PATH = 700  # bytes of a path below the checkpoint; object stores take 1024 with all that is above it
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Lineage:
    """The `line` of saves, the checkpoint before ("" for the first), and the lines before with where they forked."""

    line: str = OLDEST
    parent: str = ""
    forks: tuple[tuple[str, str, int], ...] = ()


class Chunk(NamedTuple):
    """A box of a tensor, row-major from byte `begin` of a file of the same folder."""

    box: Box
    file: str
    begin: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files; its `chunks` cover it exactly once."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """A file: its size in bytes, and the CRC-32 of each `BLOCK` of it, the last one shorter."""

    size: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The run at the time of a save; tensors are by full name, such as ``"model/blocks.0.weight"``."""

    step: int
    world_size: int
    tensors: dict[str, StoredTensor]
    states: dict[str, Any]
    written: str = ""
    made_by: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, FileRecord] = field(default_factory=dict)
    lineage: Lineage = Lineage()
    trees: Mapping[str, Any] = field(default_factory=dict, compare=False)  # `states` as read, with `TensorName`s

    @property
    def all_files(self) -> dict[str, FileRecord]:
        return {**self.files, **self.extra}

    def encode(self) -> bytes:
        tensors = {
            name: {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "pieces": [[list(c.box.offset), list(c.box.shape), c.file, c.begin] for c in tensor.chunks],
            }
            for name, tensor in self.tensors.items()
        }
        files, extra = (
            {name: {"size": file.size, "crc32": list(file.checksums)} for name, file in table.items()}
            for table in (self.files, self.extra)
        )
        raw = {
            "version": VERSION if extra else 1,
            "made_by": self.made_by,
            "written": self.written,
            "step": self.step,
            "world_size": self.world_size,
            "plan": {**self.plan, LINEAGE: asdict(self.lineage)},
            "block": BLOCK,
            "files": files,
            **({"extra": extra} if extra else {}),
            "tensors": tensors,
            "aliases": self.aliases,
            "states": self.states,
        }
        return dumps(raw)


def seal(manifest: bytes) -> bytes:
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


FIELDS: dict[str, type] = {
    "version": int, "made_by": str, "written": str, "step": int, "world_size": int, "plan": dict, "block": int,
    "files": dict, "tensors": dict, "aliases": dict, "states": dict,
}  # fmt: skip
TYPE_NAMES = {int: "a whole number", str: "words", list: "a list", dict: "a table"}


def decode(text: bytes, file: str) -> Manifest:
    raw = loads(text, file)
    version = raw.get("version") if isinstance(raw, dict) else None
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{file}: not a manifest of a checkpoint: its version is {version!r:.40}")
    if version > VERSION:
        raise CheckpointError(f"{file}: format {version}, and this easymp reads {VERSION}: update easymp")
    try:
        return _read(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None


def decode_head(start: bytes) -> tuple[str, int, Lineage] | None:
    """Read `written`, `step` and lineage from the first bytes of a manifest, unverified; None if they are missing."""
    try:
        raw = loads(start.partition(b',"block":')[0] + b"}", "")
        lineage = _lineage(raw["plan"], {"written": raw["written"]})
        check_number("step", raw["step"], 0)
    except (CheckpointError, LookupError, TypeError):
        return None
    return raw["written"], raw["step"], lineage


def _read(raw: Any) -> Manifest:
    """Convert the JSON to our types; CheckpointError, in one sentence, if it contradicts itself."""
    _check_fields("the manifest", raw, FIELDS if raw["version"] == 1 else {**FIELDS, "extra": dict})
    if raw["block"] != BLOCK:
        raise CheckpointError(f"checksums are of blocks of {raw['block']} bytes, not {BLOCK}: update easymp")
    check_number("step", raw["step"], 0)
    check_number("world_size", raw["world_size"], 1, MOST_RANKS)
    lineage = _lineage(raw["plan"], {"written": raw["written"], "made_by": raw["made_by"]})
    files, extra = _file_records(raw["files"]), _file_records(raw.get("extra", {}))
    for name in files:
        if not _is_portable(name) or name[0] == "." or name.casefold() in (MANIFEST, COMMIT.casefold()):
            raise CheckpointError(f"the file {name!r:.300} has no plain name of a file right in the folder")
    if extra:
        check_extra(extra, files)
    tensors = _stored_tensors(raw["tensors"], files)
    aliases = raw["aliases"]
    _check_fields("the table of aliases", aliases, dict.fromkeys(aliases, str))
    for name, target in aliases.items():  # of stored tensors, not of one another: so there is no cycle
        if name in tensors:
            raise CheckpointError(f"{name!r:.300} is a tensor, and another name of {target!r:.300} too")
        if target not in tensors:
            raise CheckpointError(f"{name!r:.300} is another name of {target!r:.300}, which is not stored")
    names = {name: TensorName(name) for name in (*tensors, *aliases)}
    trees: dict[str, Any] = {}
    for name, state in raw["states"].items():
        try:
            trees[name] = unpack(state, names.__getitem__)
        except KeyError as error:
            raise CheckpointError(f"{name!r:.300} has a tensor {error.args[0]!r:.300}, which is not stored") from None
        except CheckpointError as error:
            raise CheckpointError(f"{name!r:.300}: {error}") from None
    return Manifest(
        step=raw["step"],
        world_size=raw["world_size"],
        written=raw["written"],
        made_by=raw["made_by"],
        plan={name: choice for name, choice in raw["plan"].items() if name != LINEAGE},
        tensors=tensors,
        files=files,
        states=raw["states"],
        aliases=aliases,
        extra=extra,
        lineage=lineage,
        trees=trees,
    )


def _file_records(table: Any) -> dict[str, FileRecord]:
    for name, file in table.items():
        _check_fields(f"the file {name!r:.300}", file, {"size": int, "crc32": list})
        check_number(f"the size of {name}", file["size"], 0)
        count, block_count = len(file["crc32"]), -(-file["size"] // BLOCK)
        if count != block_count:
            raise CheckpointError(f"{name} has {file['size']} bytes, so {block_count} checksums, and here are {count}")
        for crc in file["crc32"]:
            if type(crc) is not int or not 0 <= crc < 2**32:
                raise CheckpointError(f"a checksum of {name} is {crc!r:.80}, which is not a CRC-32")
    return {name: FileRecord(file["size"], tuple(file["crc32"])) for name, file in table.items()}


def _lineage(plan: dict[str, Any], texts: Mapping[str, object]) -> Lineage:
    """The lineage in a manifest's plan, with identifiers for folder names. Its texts and `texts` are one line each."""
    lineage = Lineage()
    if LINEAGE in plan:
        raw = plan[LINEAGE]
        _check_fields("the lineage", raw, {"line": str, "parent": str, "forks": list})
        for fork in raw["forks"]:
            if not isinstance(fork, list) or [*map(type, fork)] != [str, str, int]:
                raise CheckpointError(f"the lineage has a fork {fork!r:.80}: not a line, a time and a step")
        lineage = Lineage(raw["line"], raw["parent"], tuple(map(tuple, raw["forks"])))
    for line in (lineage.line, *(line for line, _, _ in lineage.forks)):
        if not re.fullmatch("[0-9a-f]{1,32}", line):
            raise CheckpointError(f"the line {line!r:.80} is not an identifier of 1 to 32 hexadecimal digits")
    times = {f"the time of fork {i}": time for i, (_, time, _) in enumerate(lineage.forks)}
    for name, text in {"parent": lineage.parent, **times, **texts}.items():
        if not isinstance(text, str) or len(text) > 200 or not text.isprintable():
            raise CheckpointError(f"{name} is {text!r:.80}, and should be a line of at most 200 characters")
    for _, _, step in lineage.forks:
        check_number("the step of a fork", step, 0)
    return lineage


def _check_fields(subject: str, raw: object, fields: Mapping[str, type]) -> None:
    if not isinstance(raw, dict):
        raise CheckpointError(f"{subject} is {raw!r:.80}, and should have {', '.join(fields)}")
    for name in raw.keys() ^ fields.keys():
        verb = "lacks" if name in fields else "has, which easymp does not write,"
        raise CheckpointError(f"{subject} {verb} {name!r:.80}: it should have {', '.join(fields)}")
    for name, expected_type in fields.items():
        if type(raw[name]) is not expected_type:
            raise CheckpointError(f"{subject} has {raw[name]!r:.80} as {name!s:.80}, not {TYPE_NAMES[expected_type]}")


def _stored_tensors(table: Any, files: Mapping[str, FileRecord]) -> dict[str, StoredTensor]:
    for name, tensor in table.items():
        _check_fields(f"the tensor {name!r:.300}", tensor, {"dtype": str, "shape": list, "pieces": list})
        if tensor["dtype"] not in DTYPES:
            raise CheckpointError(f"{name!r:.300} has unknown dtype {tensor['dtype']!r:.40}: update easymp")
    specs = {name: (DTYPES[tensor["dtype"]], tuple(tensor["shape"])) for name, tensor in table.items()}
    for name, (dtype, shape) in specs.items():
        if nbytes(dtype, shape) is None:
            raise CheckpointError(f"{name!r:.300} cannot be of shape {list(shape)!r:.80} and {dtype}")
    tensors: dict[str, StoredTensor] = {}
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for name, (dtype, shape) in specs.items():
        chunks: list[Chunk] = []
        for entry in table[name]["pieces"]:
            if not isinstance(entry, list) or [*map(type, entry)] != [list, list, str, int]:
                raise CheckpointError(f"{name!r:.300} is in {entry!r:.80}: not offset, shape, file, place")
            box, file = Box(tuple(entry[0]), tuple(entry[1])), entry[2]
            if any(type(n) is not int for numbers in box for n in numbers):
                raise CheckpointError(f"{name!r:.300} has a box {box!r:.80}, which are not all whole numbers")
            if file not in files:
                raise CheckpointError(f"{name!r:.300} lies in {file!r:.300}, which is none of the files")
            chunks.append(Chunk(box, file, entry[3]))
        if fault := coverage_fault(shape, [chunk.box for chunk in chunks]):
            raise CheckpointError(f"{name!r:.300} is not stored exactly once: {fault}")
        for box, file, begin in chunks:
            end = begin + box.numel * dtype.itemsize
            if not 0 <= begin <= end <= files[file].size:
                raise CheckpointError(f"{name!r:.300} begins at byte {begin!r:.80} of {file}, outside of it")
            if begin < end:
                ranges.setdefault(file, []).append((begin, end, name))
        tensors[name] = StoredTensor(dtype, shape, tuple(chunks))
    for file, in_file in ranges.items():
        for (_, end, name), (begin, _, next_name) in pairwise(sorted(in_file)):
            if begin < end:
                raise CheckpointError(f"{name!r:.300} and {next_name!r:.300} lie in the same bytes of {file}")
    return tensors


def check_number(name: str, value: object, low: int, high: int = MOST) -> None:
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(f"{name} is {value!r:.80}, and should be a whole number from {low} to {high}")


def _is_portable(name: str) -> bool:
    """Whether every file system takes this name, and it stays inside its folder."""
    return (
        bool(name)
        and name.isprintable()
        and len(name.encode()) <= LONGEST_NAME
        and not set('/\\:*?"<>|') & set(name)
        and name[0] != " "
        and name[-1] not in ". "
    )


def check_extra(paths: Collection[str], files: Collection[str]) -> None:
    """Check that paths of hooks' files clash neither with `files` nor with one another, also if case is ignored."""
    reserved = {name.casefold() for name in (*files, MANIFEST, COMMIT)}
    by_folded = {name.casefold(): name for name in paths}
    for name in paths:
        folders = ["/".join(name.split("/")[:count]) for count in range(1, name.count("/") + 1)]
        if not all(map(_is_portable, name.split("/"))) or len(name.encode()) > LONGEST_PATH:
            raise CheckpointError(
                f"the file {name!r:.300} of a hook has no name that every file system takes: use letters, digits and "
                f'most signs (not \\ : * ? " < > |), with / between words, of at most {LONGEST_PATH} bytes'
            )
        if name.partition("/")[0].casefold() in reserved:
            raise CheckpointError(
                f"the file {name!r:.300} of a hook has the name of one that is the checkpoint's own: let the hook "
                "write to a folder below the one that it is given"
            )
        if (twin := by_folded[name.casefold()]) != name:
            raise CheckpointError(f"hooks' files {twin!r:.300} and {name!r:.300} have one name: change one")
        if file := next((by_folded[f.casefold()] for f in folders if f.casefold() in by_folded), ""):
            raise CheckpointError(
                f"{file!r:.300} is a file of a hook, and a folder with {name!r:.300} in it: change one"
            )


def per_rank(rank: int, name: str) -> str:
    """The name of a state that each rank keeps for itself."""
    return f"ranks/{rank:05d}/{name}"


def canonical(name: str) -> str:
    """Strip what torch's wrappers of submodules add to a name; ``module.`` stays, which may be the user's own."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


MOST_CUTS = 5  # dimensions of a tensor along which it may be cut: a box has two to that power of corners
MOST_CORNERS = 2**23  # of all boxes of a tensor; they are held in memory


class Box(NamedTuple):
    """A chunk of a tensor: the index of its first element, and its shape."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        """As in a slice: ``[0:128,0:64]``."""
        return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape)) + "]"


def full_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def view_of(tensor: Tensor, box: Box, part: Box) -> Tensor:
    """A view of the elements of `part` in a tensor that holds the elements of `box`."""
    for dim, (base, start, count) in enumerate(zip(box.offset, part.offset, part.shape)):
        tensor = tensor.narrow(dim, start - base, count)
    return tensor


def overlap(a: Box, b: Box) -> Box | None:
    """The common elements of two boxes; None if there are none."""
    offset = tuple(map(max, a.offset, b.offset))
    end = tuple(min(o + n, p + m) for o, n, p, m in zip(a.offset, a.shape, b.offset, b.shape))
    if any(e <= o for o, e in zip(offset, end)):
        return None
    return Box(offset, tuple(e - o for o, e in zip(offset, end)))


def strides(shape: Shape) -> Shape:
    """Elements from one index of each dimension to the next, in row-major memory."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def span(part: Box, container: Box) -> int:
    """Number of elements from the first to the last one of `part` in the row-major memory of `container`."""
    steps = zip(part.shape, strides(container.shape))
    return sum((n - 1) * stride for n, stride in steps) + 1 if part.numel else 0


def contiguous_runs(part: Box, container: Box) -> Iterator[tuple[int, int]]:
    """(first, count) of each contiguous run of `part` in the row-major memory of `container`, in order."""
    if not part.numel:
        return
    if part == container:  # most are, and arithmetic for thousands of them takes its time
        yield 0, part.numel
        return
    steps = strides(container.shape)
    # Trailing dimensions that `part` covers are contiguous.
    inner = len(container.shape)
    while inner and part.shape[inner - 1] == container.shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    length = prod(part.shape[inner:])
    outer = part.shape[:inner]
    start = sum((o - c) * s for o, c, s in zip(part.offset, container.offset, steps))
    for offsets in product(*(range(0, n * s, s) for n, s in zip(outer, steps))):
        yield start + sum(offsets), length


def coverage_fault(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once; None where they do. Linear in the number of boxes."""
    if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape):
        return None  # most are whole
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.offset) != len(shape):
            return f"{box} has {len(box.shape)} dimensions, and the tensor {len(shape)}"
        if any(o < 0 or n < 0 or o + n > s for o, n, s in zip(box.offset, box.shape, shape)):
            return f"{box} lies outside of {list(shape)}"
    solid = [box for box in boxes if box.numel]
    # A dimension that every box covers whole adds no information.
    cut = [d for d, length in enumerate(shape) if any(box.shape[d] != length for box in solid)]
    if len(cut) > MOST_CUTS:
        return f"the tensor is cut along {len(cut)} dimensions, and at most {MOST_CUTS} are understood"
    if len(solid) << len(cut) > MOST_CORNERS:
        limit = f"at most {MOST_CORNERS >> len(cut)} are understood"
        return f"the tensor is cut into {len(solid)} boxes along {len(cut)} dimensions, and {limit}"
    # A box adds 1 to the count of its elements: 1 at its first corner, 1 or -1 at the corners just behind its ends.
    # The boxes cover what one box of `shape` covers if their steps add up to that one's.
    steps: Counter[Shape] = Counter()
    for box in solid:
        _add_corners(steps, [(box.offset[d], box.offset[d] + box.shape[d]) for d in cut], 1)
    if prod(shape):
        _add_corners(steps, [(0, shape[d]) for d in cut], -1)
    wrong_corner = min((corner for corner, step in steps.items() if step), default=None)
    if wrong_corner is None:
        return None
    element = [0] * len(shape)
    for d, index in zip(cut, wrong_corner):
        element[d] = index
    holders = [str(b) for b in solid if all(o <= i < o + n for i, o, n in zip(element, b.offset, b.shape))]
    if holders:
        return f"{holders[0]} and {holders[1]} overlap"
    return f"{len(solid)} boxes leave holes in {list(shape)}: the element {element} is in none"


def _add_corners(steps: Counter[Shape], ends: Sequence[tuple[int, int]], sign: int) -> None:
    corners: list[tuple[Shape, int]] = [((), sign)]
    for low, high in ends:
        corners = [corner for index, step in corners for corner in (((*index, low), step), ((*index, high), -step))]
    for index, step in corners:
        steps[index] += step


def split_box(box: Box, max_elements: int) -> Iterator[Box]:
    """`box` in parts of at most `max_elements`, in the order of its memory."""
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if box.numel <= max_elements or dim is None:
        yield box
        return
    step = max(max_elements // (box.numel // box.shape[dim]), 1)
    for start in range(0, box.shape[dim], step):
        offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
        shape = (*box.shape[:dim], min(step, box.shape[dim] - start), *box.shape[dim + 1 :])
        yield from split_box(Box(offset, shape), max_elements)


Run = tuple[int, int]
"""First element and count along one dimension."""


LocalChunks = Sequence[tuple[Box, Tensor]]
"""Boxes of a tensor that are on one rank, each with its elements as a view of the live memory."""


def local_chunks(tensors: Iterable[Tensor]) -> list[LocalChunks | None]:
    """The chunks of each tensor, plain or a DTensor, on this rank; None for a meta tensor. No collective."""
    with torch.no_grad():
        return [_local_chunks(tensor) for tensor in tensors]


def _local_chunks(tensor: Tensor) -> LocalChunks | None:
    dtensor: Any = tensor if hasattr(tensor, "to_local") else None  # DTensor, which takes long to import
    local = (tensor if dtensor is None else dtensor.to_local()).detach()
    if local.is_meta:
        return None
    if local.layout != torch.strided:
        raise CheckpointError(f"a tensor of layout {local.layout} cannot be stored or loaded: use to_dense()")
    shape = tuple(tensor.shape)
    if dtensor is None:
        return [(full_box(shape), local)]
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # a mesh of other ranks
        return []
    runs_by_dim = local_runs(shape, tuple(mesh.shape), coordinate, dtensor.placements)
    if tuple(sum(count for _, count in runs) for runs in runs_by_dim) != tuple(local.shape):
        raise CheckpointError(
            f"a DTensor of {list(shape)} on a mesh of {list(mesh.shape)} as {list(dtensor.placements)} holds "
            f"{list(local.shape)} here, which that layout does not say: redistribute it to Shard or Replicate"
        )
    chunks = []
    for combination in product(*runs_by_dim):
        view = local
        for d, run in enumerate(combination):
            runs = runs_by_dim[d]
            view = view.narrow(d, sum(n for _, n in runs[: runs.index(run)]), run[1])
        chunks.append((Box(tuple(start for start, _ in combination), tuple(n for _, n in combination)), view))
    return chunks


def local_runs(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[list[Run]]:
    """The runs of each dimension on the rank at `coordinate` of the mesh, in the order of its memory."""
    by_dim: list[list[Run]] = [[(0, length)] for length in shape]
    deferred = []
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = None if placement.is_partial() else getattr(placement, "dim", None)
        if dim is None:
            raise CheckpointError(f"a DTensor cannot be stored as {placement!r}: use Shard or Replicate")
        factor = getattr(placement, "split_factor", 1)
        later = prod(mesh[i] for i in range(axis + 1, len(mesh)) if getattr(placements[i], "dim", None) == dim)
        if factor == later > 1:
            deferred.append((dim, axis))  # cut when those to the right had been
        elif factor > 1:
            chunks = [_chunk(by_dim[dim], factor, i) for i in range(factor)]
            by_dim[dim] = [run for chunk in chunks for run in _chunk(chunk, mesh[axis], coordinate[axis])]
        else:
            by_dim[dim] = _chunk(by_dim[dim], mesh[axis], coordinate[axis])
    for dim, axis in reversed(deferred):
        by_dim[dim] = _chunk(by_dim[dim], mesh[axis], coordinate[axis])
    return by_dim


def _chunk(runs: Sequence[Run], count: int, index: int) -> list[Run]:
    """Chunk `index` of the `count` into which torch.chunk cuts the elements of `runs`."""
    size = -(-sum(n for _, n in runs) // count)
    skip, remaining = index * size, size
    chunk = []
    for start, n in runs:
        skipped = min(skip, n)
        skip -= skipped
        length = min(remaining, n - skipped)
        remaining -= length
        if length:
            chunk.append((start + skipped, length))
    return chunk
