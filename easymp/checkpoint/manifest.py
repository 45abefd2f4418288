"""The manifest: the content of a checkpoint, the place of each of its bytes, and the arithmetic of chunks of tensors.

Every manifest is validated when it is read or written, so other code does not check it again. Its text is untrusted input.
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
from .codec import DTYPES, MOST, NAMES, dumps, loads, names, nbytes

INSIDE = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, torch's checkpoint_wrapper
MANIFEST, COMMIT, INDEX = "manifest.json", "COMMIT", "model.safetensors.index.json"
BLOCK = 2**24  # bytes under one checksum
VERSION = 2  # with files of hooks; a checkpoint without them is written as version 1, which has no such field
LINEAGE = "lineage"  # a key of the plan, where easymp 0.1 takes any; elsewhere it takes no unknown one
OLDEST = "0"  # the line of all checkpoints that name none: those of easymp 0.1
MOST_RANKS = 2**20  # that wrote one checkpoint; what each of them kept is looked up by its number
LONGEST_NAME = 200  # bytes of a file's name; usual file systems take 255, and temporary names are longer
LONGEST_PATH = 700  # bytes of a path below the checkpoint; object stores take 1024 with all that is above it

# -- records -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lineage:
    """The `line` of saves that a checkpoint belongs to, and its `parent`, the checkpoint loaded or saved before; "" for the first.

    `forks` are the lines that led to this one, each with `written` and `step` of its last checkpoint in this history.
    """

    line: str = OLDEST
    parent: str = ""
    forks: tuple[tuple[str, str, int], ...] = ()


class Piece(NamedTuple):
    """A box of a tensor, row-major from byte `begin` of a file of the same folder."""

    box: Box
    file: str
    begin: int


@dataclass(frozen=True)
class Stored:
    """A tensor; `pieces` cover it exactly once."""

    dtype: torch.dtype
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """In the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """A file: its size in bytes, and the CRC-32 of each `BLOCK` of it, the last one shorter."""

    size: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The run at the time of a save.

    `plan` is `Plan.as_dict`; tensors are by full name (``"model/blocks.0.weight"``) or alias (tied weights), Python state as `codec.pack`
    returns it; files by name, and those of hooks (`extra`) by their paths.
    """

    step: int
    world_size: int
    written: str
    made_by: str
    plan: dict[str, Any]
    tensors: dict[str, Stored]
    files: dict[str, FileRecord]
    states: dict[str, Any]
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, FileRecord] = field(default_factory=dict)
    lineage: Lineage = Lineage()

    @property
    def all_files(self) -> dict[str, FileRecord]:
        """The checkpoint's own files, and those of hooks."""
        return {**self.files, **self.extra}

    def encode(self) -> bytes:
        """Encode the manifest as the content of its file."""
        validate(self)
        if loads(dumps(self.plan), "plan") != self.plan:
            raise CheckpointError("the plan of a checkpoint has values that JSON lacks: pass Plan.as_dict()")
        tensors = {
            name: {
                "dtype": NAMES[t.dtype],
                "shape": list(t.shape),
                "pieces": [[list(p.box.offset), list(p.box.shape), p.file, p.begin] for p in t.pieces],
            }
            for name, t in self.tensors.items()
        }
        files, extra = (
            {name: {"size": f.size, "crc32": list(f.checksums)} for name, f in table.items()}
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
    """The content of COMMIT: the SHA-256 of the manifest."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


# -- reading a manifest ------------------------------------------------------------------------------------------------

FIELDS: dict[str, type] = {
    "version": int, "made_by": str, "written": str, "step": int, "world_size": int, "plan": dict, "block": int,
    "files": dict, "tensors": dict, "aliases": dict, "states": dict,
}  # fmt: skip
NAMED = {int: "a whole number", str: "words", list: "a list", dict: "a table"}


def decode(text: bytes, what: str) -> Manifest:
    """The manifest in `text`, validated; `what` names the file in errors."""
    raw = loads(text, what)
    version = raw.get("version") if isinstance(raw, dict) else None
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{what}: not a manifest of a checkpoint: its version is {version!r:.40}")
    if version > VERSION:
        raise CheckpointError(f"{what}: format {version}, and this easymp reads {VERSION}: update easymp")
    try:
        manifest = _typed(raw)
        validate(manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from None
    return manifest


def head(start: bytes) -> tuple[str, int, Lineage] | None:
    """Read `written`, `step` and lineage from the first bytes of a manifest, unverified; None if they are missing."""
    try:
        raw = loads(start.partition(b',"block":')[0] + b"}", "")
        lineage = _lineage(raw["plan"])
        check_number("step", raw["step"], 0)
        _check_lines(lineage, {"written": raw["written"]})
    except (CheckpointError, LookupError, TypeError):
        return None
    return raw["written"], raw["step"], lineage


def _typed(raw: Any) -> Manifest:
    """Convert the JSON to our types. The values are validated later."""
    _check_fields("the manifest", raw, FIELDS if raw["version"] == 1 else {**FIELDS, "extra": dict})
    if raw["block"] != BLOCK:
        raise CheckpointError(f"checksums are of blocks of {raw['block']} bytes, not {BLOCK}: update easymp")
    tensors = {}
    for name, tensor in raw["tensors"].items():
        _check_fields(f"the tensor {name!r:.300}", tensor, {"dtype": str, "shape": list, "pieces": list})
        if tensor["dtype"] not in DTYPES:
            raise CheckpointError(f"{name!r:.300} has unknown dtype {tensor['dtype']!r:.40}: update easymp")
        for piece in tensor["pieces"]:
            if not isinstance(piece, list) or [*map(type, piece)] != [list, list, str, int]:
                raise CheckpointError(f"{name!r:.300} is in {piece!r:.80}: not offset, shape, file, place")
        pieces = (Piece(Box(tuple(o), tuple(n)), file, begin) for o, n, file, begin in tensor["pieces"])
        tensors[name] = Stored(DTYPES[tensor["dtype"]], tuple(tensor["shape"]), tuple(pieces))
    files, extra = _files(raw["files"]), _files(raw.get("extra", {}))
    _check_fields("the table of aliases", raw["aliases"], dict.fromkeys(raw["aliases"], str))
    plan = {name: choice for name, choice in raw["plan"].items() if name != LINEAGE}
    said = (raw[name] for name in ("step", "world_size", "written", "made_by"))
    return Manifest(*said, plan, tensors, files, raw["states"], raw["aliases"], extra, _lineage(raw["plan"]))


def _files(table: Any) -> dict[str, FileRecord]:
    for name, file in table.items():
        _check_fields(f"the file {name!r:.300}", file, {"size": int, "crc32": list})
    return {name: FileRecord(file["size"], tuple(file["crc32"])) for name, file in table.items()}


def _lineage(plan: dict[str, Any]) -> Lineage:
    if LINEAGE not in plan:
        return Lineage()
    said = plan[LINEAGE]
    _check_fields("the lineage", said, {"line": str, "parent": str, "forks": list})
    for fork in said["forks"]:
        if not isinstance(fork, list) or [*map(type, fork)] != [str, str, int]:
            raise CheckpointError(f"the lineage has a fork {fork!r:.80}: not a line, a time and a step")
    return Lineage(said["line"], said["parent"], tuple(map(tuple, said["forks"])))


def _check_fields(what: str, raw: object, fields: Mapping[str, type]) -> None:
    if not isinstance(raw, dict):
        raise CheckpointError(f"{what} is {raw!r:.80}, and should have {', '.join(fields)}")
    for name in raw.keys() ^ fields.keys():
        said = "lacks" if name in fields else "has, which easymp does not write,"
        raise CheckpointError(f"{what} {said} {name!r:.80}: it should have {', '.join(fields)}")
    for name, kind in fields.items():
        if type(raw[name]) is not kind:
            raise CheckpointError(f"{what} has {raw[name]!r:.80} as {name!s:.80}, not {NAMED[kind]}")


# -- validation --------------------------------------------------------------------------------------------------------


def validate(manifest: Manifest) -> None:
    """Raise CheckpointError, in one sentence, if a manifest contradicts itself."""
    check_number("step", manifest.step, 0)
    check_number("world_size", manifest.world_size, 1, MOST_RANKS)
    _check_lines(manifest.lineage, {"written": manifest.written, "made_by": manifest.made_by})
    for name in manifest.files:
        if not _portable(name) or name[0] == "." or name.casefold() in (MANIFEST, COMMIT.casefold()):
            raise CheckpointError(f"the file {name!r:.300} has no plain name of a file right in the folder")
    check_extra(manifest.extra, manifest.files)
    for name, file in manifest.all_files.items():
        check_number(f"the size of {name}", file.size, 0)
        count, given = -(-file.size // BLOCK), len(file.checksums)
        if given != count:
            raise CheckpointError(f"{name} has {file.size} bytes, so {count} checksums, and here are {given}")
        for crc in file.checksums:
            if type(crc) is not int or not 0 <= crc < 2**32:
                raise CheckpointError(f"a checksum of {name} is {crc!r:.80}, which is not a CRC-32")
    _check_tensors(manifest.tensors, manifest.files)
    for name, of in manifest.aliases.items():  # of stored tensors, not of one another: so there is no cycle
        if name in manifest.tensors:
            raise CheckpointError(f"{name!r:.300} is a tensor, and another name of {of!r:.300} too")
        if of not in manifest.tensors:
            raise CheckpointError(f"{name!r:.300} is another name of {of!r:.300}, which is not stored")
    for name, state in manifest.states.items():
        try:
            unknown = [t for t in names(state) if t not in manifest.tensors and t not in manifest.aliases]
        except CheckpointError as error:
            raise CheckpointError(f"{name!r:.300}: {error}") from None
        if unknown:
            raise CheckpointError(f"{name!r:.300} has a tensor {unknown[0]!r:.300}, which is not stored")


def _check_tensors(tensors: Mapping[str, Stored], files: Mapping[str, FileRecord]) -> None:
    """Check that pieces cover each tensor once, and that each byte of a file belongs to one piece at most."""
    places: dict[str, list[tuple[int, int, str]]] = {}
    for name, stored in tensors.items():
        shape, size = stored.shape, stored.dtype.itemsize
        if nbytes(stored.dtype, shape) is None:
            raise CheckpointError(f"{name!r:.300} cannot be of shape {list(shape)!r:.80} and {stored.dtype}")
        for box, file, _ in stored.pieces:
            if any(type(n) is not int for side in box for n in side):
                raise CheckpointError(f"{name!r:.300} has a box {box!r:.80}, which are not all whole numbers")
            if file not in files:
                raise CheckpointError(f"{name!r:.300} lies in {file!r:.300}, which is none of the files")
        boxes = [piece.box for piece in stored.pieces]
        if boxes != [((0,) * len(shape), shape)] and (wrong := fault(shape, boxes)):
            raise CheckpointError(f"{name!r:.300} is not stored exactly once: {wrong}")
        for box, file, begin in stored.pieces:
            end = begin + prod(box.shape) * size
            if not 0 <= begin <= end <= files[file].size:
                raise CheckpointError(f"{name!r:.300} begins at byte {begin!r:.80} of {file}, outside of it")
            if begin < end:
                places.setdefault(file, []).append((begin, end, name))
    for file, taken in places.items():
        for (_, end, one), (begin, _, other) in pairwise(sorted(taken)):
            if begin < end:
                raise CheckpointError(f"{one!r:.300} and {other!r:.300} lie in the same bytes of {file}")


def check_number(name: str, value: object, low: int, high: int = MOST) -> None:
    """Raises CheckpointError where `value` is not a whole number from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(f"{name} is {value!r:.80}, and should be a whole number from {low} to {high}")


def _check_lines(lineage: Lineage, more: Mapping[str, object]) -> None:
    """Check that texts for people are one line each, and that identifiers of lines can stand in folder names."""
    for line in (lineage.line, *(line for line, _, _ in lineage.forks)):
        if not re.fullmatch("[0-9a-f]{1,32}", line):
            raise CheckpointError(f"the line {line!r:.80} is not an identifier of 1 to 32 hexadecimal digits")
    times = {f"the time of fork {i}": written for i, (_, written, _) in enumerate(lineage.forks)}
    for name, text in {"parent": lineage.parent, **times, **more}.items():
        if not isinstance(text, str) or len(text) > 200 or not text.isprintable():
            raise CheckpointError(f"{name} is {text!r:.80}, and should be a line of at most 200 characters")
    for _, _, step in lineage.forks:
        check_number("the step of a fork", step, 0)


def _portable(word: str) -> bool:
    """Whether every file system takes this name, and it stays inside its folder."""
    return (
        bool(word)
        and word.isprintable()
        and len(word.encode()) <= LONGEST_NAME
        and not set('/\\:*?"<>|') & set(word)
        and word[0] != " "
        and word[-1] not in ". "
    )


def check_extra(paths: Collection[str], files: Collection[str]) -> None:
    """Check that paths of hooks' files clash neither with `files` nor with one another, also if the file system ignores case."""
    own = {name.casefold() for name in (*files, MANIFEST, COMMIT)}
    taken: dict[str, str] = {}
    for name in paths:
        if not all(map(_portable, name.split("/"))) or len(name.encode()) > LONGEST_PATH:
            raise CheckpointError(
                f"the file {name!r:.300} of a hook has no name that every file system takes: use words of letters, digits and most signs "
                f'(not \\ : * ? " < > |), with / between them, of at most {LONGEST_PATH} bytes'
            )
        if name.partition("/")[0].casefold() in own:
            raise CheckpointError(
                f"the file {name!r:.300} of a hook has the name of one that is the checkpoint's own: let the hook write to a folder below "
                "the one that it is given"
            )
        if other := taken.get(name.casefold()):
            raise CheckpointError(f"hooks' files {other!r:.300} and {name!r:.300} have one name: change one")
        taken[name.casefold()] = name
    for name in paths:
        words = name.casefold().split("/")
        for count in range(1, len(words)):
            if file := taken.get("/".join(words[:count])):
                raise CheckpointError(
                    f"{file!r:.300} is a file of a hook, and a folder with {name!r:.300} in it: change one"
                )


def canonical(name: str) -> str:
    """Strip the parts that torch's wrappers of submodules add to a name. ``module.`` stays: it may be the user's own."""
    for word in INSIDE:
        name = name.replace(word, "")
    return name


# -- chunks of tensors, as arithmetic ------------------------------------------------------------------------------------


Shape = tuple[int, ...]
SPLIT = 5  # dimensions of a tensor along which it may be cut: a box has two to that power of corners
CORNERS = 2**23  # of all boxes of a tensor; they are held in memory


class Box(NamedTuple):
    """A chunk of a tensor: the place of its first element, and its shape."""

    offset: Shape
    shape: Shape

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        """As in a slice: ``[0:128,0:64]``."""
        return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape)) + "]"


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


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


def span(part: Box, within: Box) -> int:
    """Number of elements from the first to the last one of `part` in the row-major memory of `within`, which contains it."""
    steps = zip(part.shape, strides(within.shape))
    return sum((n - 1) * stride for n, stride in steps) + 1 if part.count else 0


def runs(part: Box, within: Box) -> Iterator[tuple[int, int]]:
    """(first, count) of each contiguous run of `part` in the row-major memory of `within`, which contains it, in order."""
    if not part.count:
        return
    if part == within:  # most are, and arithmetic for thousands of them takes its time
        yield 0, part.count
        return
    steps = strides(within.shape)
    # Trailing dimensions that `part` takes whole are contiguous.
    inner = len(within.shape)
    while inner and part.shape[inner - 1] == within.shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    length = prod(part.shape[inner:])
    outer = part.shape[:inner]
    start = sum((o - w) * s for o, w, s in zip(part.offset, within.offset, steps))
    for at in product(*(range(0, n * s, s) for n, s in zip(outer, steps))):
        yield start + sum(at), length


def fault(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once; None where they do. The time is linear in the number of boxes.

    A box adds 1 to the count of its elements: 1 at its first corner, 1 or -1 at the corners just behind its ends. The boxes cover what one
    box of `shape` covers if their steps add up to that one's; the first place where they do not is where the count is wrong.
    """
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.offset) != len(shape):
            return f"{box} has {len(box.shape)} dimensions, and the tensor {len(shape)}"
        if any(o < 0 or n < 0 or o + n > s for o, n, s in zip(box.offset, box.shape, shape)):
            return f"{box} lies outside of {list(shape)}"
    solid = [box for box in boxes if box.count]
    # A dimension that every box covers whole adds no information.
    cut = [d for d, length in enumerate(shape) if any(box.shape[d] != length for box in solid)]
    if len(cut) > SPLIT:
        return f"the tensor is cut along {len(cut)} dimensions, and at most {SPLIT} are understood"
    if len(solid) << len(cut) > CORNERS:
        most = CORNERS >> len(cut)
        return f"the tensor is cut into {len(solid)} boxes along {len(cut)} dimensions, and at most {most} are understood"
    steps: Counter[Shape] = Counter()
    for box in solid:
        _add_corners(steps, [(box.offset[d], box.offset[d] + box.shape[d]) for d in cut], 1)
    if prod(shape):
        _add_corners(steps, [(0, shape[d]) for d in cut], -1)
    wrong = min((corner for corner, step in steps.items() if step), default=None)
    if wrong is None:
        return None
    place = [0] * len(shape)
    for d, at in zip(cut, wrong):
        place[d] = at
    here = [str(b) for b in solid if all(o <= at < o + n for at, o, n in zip(place, b.offset, b.shape))]
    if here:
        return f"{here[0]} and {here[1]} overlap"
    return f"{len(solid)} boxes leave holes in {list(shape)}: the element {place} is in none"


def _add_corners(steps: Counter[Shape], ends: Sequence[tuple[int, int]], sign: int) -> None:
    corners: list[tuple[Shape, int]] = [((), sign)]
    for low, high in ends:
        corners = [corner for at, by in corners for corner in (((*at, low), by), ((*at, high), -by))]
    for at, by in corners:
        steps[at] += by


def slices(box: Box, most: int) -> Iterator[Box]:
    """`box` in parts of at most `most` elements, in the order of its memory."""
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if box.count <= most or dim is None:
        yield box
        return
    each = max(most // (box.count // box.shape[dim]), 1)
    for first in range(0, box.shape[dim], each):
        offset = (*box.offset[:dim], box.offset[dim] + first, *box.offset[dim + 1 :])
        shape = (*box.shape[:dim], min(each, box.shape[dim] - first), *box.shape[dim + 1 :])
        yield from slices(Box(offset, shape), most)


# -- the chunks of a live tensor --------------------------------------------------------------------------------------


Run = tuple[int, int]
"""First element and count along one dimension."""


class Place(NamedTuple):
    """The chunks of a tensor of `shape` on one rank: boxes, each with its elements as a view of the live memory."""

    shape: Shape
    parts: tuple[tuple[Box, Tensor], ...]


def places_of(tensors: Iterable[Tensor]) -> list[Place | None]:
    """The chunks of each tensor, plain or a DTensor, on this rank; None for a meta tensor. No collective."""
    with torch.no_grad():
        return [_place(tensor) for tensor in tensors]


def _place(tensor: Tensor) -> Place | None:
    spread: Any = tensor if hasattr(tensor, "to_local") else None  # DTensor, which takes long to import
    local = (tensor if spread is None else spread.to_local()).detach()
    if local.is_meta:
        return None
    if local.layout != torch.strided:
        raise CheckpointError(f"a tensor of layout {local.layout} cannot be stored or loaded: use to_dense()")
    shape = tuple(tensor.shape)
    if spread is None:
        return Place(shape, ((Box((0,) * len(shape), shape), local),))
    mesh = spread.device_mesh
    at = mesh.get_coordinate()
    if at is None:  # a mesh of other ranks
        return Place(shape, ())
    held = runs_held(shape, tuple(mesh.shape), at, spread.placements)
    if tuple(sum(count for _, count in runs) for runs in held) != tuple(local.shape):
        raise CheckpointError(
            f"a DTensor of {list(shape)} on a mesh of {list(mesh.shape)} as {list(spread.placements)} holds {list(local.shape)} "
            f"here, which that layout does not say: redistribute it to Shard or Replicate"
        )
    parts = []
    for choice in product(*held):
        view = local
        for d, run in enumerate(choice):
            view = view.narrow(d, sum(n for _, n in held[d][: held[d].index(run)]), run[1])
        parts.append((Box(tuple(first for first, _ in choice), tuple(n for _, n in choice)), view))
    return Place(shape, tuple(parts))


def runs_held(
    shape: Sequence[int], mesh: Sequence[int], at: Sequence[int], placements: Sequence[Any]
) -> list[list[Run]]:
    """The runs of each dimension on the rank with coordinates `at`, in the order of its memory."""
    held: list[list[Run]] = [[(0, length)] for length in shape]
    late = []
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = None if placement.is_partial() else getattr(placement, "dim", None)
        if dim is None:
            raise CheckpointError(f"a DTensor cannot be stored as {placement!r}: use Shard or Replicate")
        factor = getattr(placement, "split_factor", 1)
        rest = prod(mesh[i] for i in range(axis + 1, len(mesh)) if getattr(placements[i], "dim", None) == dim)
        if factor == rest > 1:
            late.append((dim, axis))  # cut when those to the right had been
        elif factor > 1:
            chunks = [_chunk(held[dim], factor, i) for i in range(factor)]
            held[dim] = [run for chunk in chunks for run in _chunk(chunk, mesh[axis], at[axis])]
        else:
            held[dim] = _chunk(held[dim], mesh[axis], at[axis])
    for dim, axis in reversed(late):
        held[dim] = _chunk(held[dim], mesh[axis], at[axis])
    return held


def _chunk(runs: Sequence[Run], count: int, index: int) -> list[Run]:
    """Piece `index` of the `count` into which torch.chunk cuts the elements of `runs`."""
    size = -(-sum(n for _, n in runs) // count)
    skip, left = index * size, size
    piece = []
    for first, n in runs:
        passed = min(skip, n)
        skip -= passed
        taken = min(left, n - passed)
        left -= taken
        if taken:
            piece.append((first + passed, taken))
    return piece


def on_host(tensor: Tensor, name: str) -> Tensor:
    """A whole tensor on the CPU, contiguous; the tensor itself if it is that already."""
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device: prepare the model, or load_weights into it")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
