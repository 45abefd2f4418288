"""The manifest: what a checkpoint holds, and where each byte of it lies."""

from __future__ import annotations

import hashlib
from collections import ChainMap
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import CheckpointError
from .boxes import Box
from .header import DTYPES, NAMES
from .stored import BLOCK as BLOCK
from .stored import COMMIT as COMMIT
from .stored import MANIFEST as MANIFEST
from .stored import FileRecord as FileRecord
from .stored import Lineage as Lineage
from .stored import Piece as Piece
from .stored import Stored as Stored
from .strict import dumps, loads
from .wellformed import (
    MOST_RANKS,
    check_aliases,
    check_extra,
    check_files,
    check_lineage,
    check_number,
    check_records,
    check_states,
    check_tensors,
    check_text,
)

LINEAGE = (
    "lineage"  # in the plan, where easymp 0.1 takes any key; elsewhere it takes none that it does not know
)
VERSION = (
    2  # with files of hooks; what has none is version 1, which says nothing of them, and is written as such
)


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

    Attributes:
        step: optimizer updates until then.
        world_size: ranks that wrote it.
        written: when, in ISO 8601, UTC.
        made_by: "easymp" and its version.
        plan: what was decided for the run, as `Plan.as_dict`.
        tensors: by full name (``"model/blocks.0.weight"``).
        files: by name.
        states: Python state by name, as `trees.pack` leaves it.
        aliases: names of tensors that are other names of stored ones (tied weights).
        extra: files that hooks wrote, by their paths below the folder; nothing is known of what is in them.
        lineage: what it was continued from.
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
        """The checkpoint's own, and those of hooks."""
        return {**self.files, **self.extra}

    def check(self) -> None:
        """Raises CheckpointError where something in it cannot be."""
        check_number("step", self.step, 0)
        check_number("world_size", self.world_size, 1, MOST_RANKS)
        check_text("written", self.written)
        check_text("made_by", self.made_by)
        check_files(self.files)
        check_extra(self.extra, self.files)
        check_records(self.extra)
        check_tensors(self.tensors, self.files)
        check_aliases(self.aliases, self.tensors)
        check_states(self.states, ChainMap(self.tensors, self.aliases))
        check_lineage(self.lineage)

    def encode(self) -> bytes:
        """As the content of a file.

        Raises:
            CheckpointError: `decode` would refuse it, or return something else.
        """
        self.check()
        if loads(dumps(self.plan), "plan") != self.plan:
            raise CheckpointError(
                "the plan of a checkpoint is stored as JSON, and has values that are none: pass Plan.as_dict()"
            )
        return dumps(
            {
                "version": VERSION if self.extra else 1,
                "made_by": self.made_by,
                "written": self.written,
                "step": self.step,
                "world_size": self.world_size,
                "plan": {**self.plan, LINEAGE: asdict(self.lineage)},
                "block": BLOCK,
                "files": _table(self.files),
                **({"extra": _table(self.extra)} if self.extra else {}),
                "tensors": {
                    name: {
                        "dtype": NAMES[t.dtype],
                        "shape": list(t.shape),
                        "pieces": [
                            [list(p.box.offset), list(p.box.shape), p.file, p.begin] for p in t.pieces
                        ],
                    }
                    for name, t in self.tensors.items()
                },
                "aliases": self.aliases,
                "states": self.states,
            }
        )


def _table(files: dict[str, FileRecord]) -> dict[str, Any]:
    return {name: {"size": f.size, "crc32": list(f.checksums)} for name, f in files.items()}


def seal(manifest: bytes) -> bytes:
    """The content of COMMIT: the SHA-256 of the manifest."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def decode(text: bytes, what: str) -> Manifest:
    """The manifest in `text`, once all that it says is found to be possible.

    Raises:
        CheckpointError: it is none, or a newer one; `what` names the file.
    """
    raw = loads(text, what)
    version = raw.get("version") if isinstance(raw, dict) else None
    if type(version) is not int or version < 1:
        raise CheckpointError(
            f"{what}: no manifest of a checkpoint: its version is {version!r:.40}, and should be {VERSION}"
        )
    if version > VERSION:
        raise CheckpointError(
            f"{what}: format version {version}, and this easymp reads {VERSION}: update easymp"
        )
    try:
        manifest = _manifest(raw)
        manifest.check()
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from None
    return manifest


def _manifest(raw: Any) -> Manifest:
    """What the JSON says, in our types; the values are still to be checked."""
    _fields("the manifest", raw, FIELDS if raw["version"] == 1 else {**FIELDS, "extra": dict})
    if raw["block"] != BLOCK:
        raise CheckpointError(
            f"checksums are of blocks of {raw['block']} bytes, and this easymp reads those of {BLOCK}: update easymp"
        )
    files, extra, tensors = _records(raw["files"]), _records(raw.get("extra", {})), {}
    for name, tensor in raw["tensors"].items():
        _fields(f"the tensor {name!r:.300}", tensor, {"dtype": str, "shape": list, "pieces": list})
        if tensor["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{name!r:.300} has the dtype {tensor['dtype']!r:.40}, which this easymp does not know: update it"
            )
        pieces = []
        for piece in tensor["pieces"]:
            if not isinstance(piece, list) or [type(part) for part in piece] != [list, list, str, int]:
                raise CheckpointError(
                    f"{name!r:.300} has a piece {piece!r:.80}: not an offset, a shape, a file and a place in it"
                )
            offset, shape, file, begin = piece
            pieces.append(Piece(Box(tuple(offset), tuple(shape)), file, begin))
        tensors[name] = Stored(DTYPES[tensor["dtype"]], tuple(tensor["shape"]), tuple(pieces))
    for name, of in raw["aliases"].items():
        _fields(f"the alias {name!r:.300}", {"of": of}, {"of": str})
    said = (raw[name] for name in ("step", "world_size", "written", "made_by"))
    plan = {name: choice for name, choice in raw["plan"].items() if name != LINEAGE}
    return Manifest(*said, plan, tensors, files, raw["states"], raw["aliases"], extra, _lineage(raw["plan"]))


def _lineage(plan: dict[str, Any]) -> Lineage:
    if LINEAGE not in plan:
        return Lineage()
    _fields("the lineage", plan[LINEAGE], {"line": str, "parent": str, "forks": list})
    forks = plan[LINEAGE]["forks"]
    for fork in forks:
        if not isinstance(fork, list) or [type(part) for part in fork] != [str, str, int]:
            raise CheckpointError(f"the lineage has a fork {fork!r:.80}: not a line, a time and a step")
    return Lineage(
        plan[LINEAGE]["line"],
        plan[LINEAGE]["parent"],
        tuple((line, written, step) for line, written, step in forks),
    )


def head(start: bytes) -> tuple[str, int, Lineage] | None:
    """`written`, `step` and lineage, read from the first bytes of a manifest; None where they are not there. They are not verified."""
    try:
        raw = loads(start.partition(b',"block":')[0] + b"}", "")
        check_text("written", raw["written"])
        check_number("step", raw["step"], 0)
        lineage = _lineage(raw["plan"])
        check_lineage(lineage)
    except (CheckpointError, LookupError, TypeError):
        return None
    return raw["written"], raw["step"], lineage


def _records(table: dict[str, Any]) -> dict[str, FileRecord]:
    files = {}
    for name, file in table.items():
        _fields(f"the file {name!r:.300}", file, {"size": int, "crc32": list})
        files[name] = FileRecord(file["size"], tuple(file["crc32"]))
    return files


FIELDS: dict[str, type] = {
    "version": int,
    "made_by": str,
    "written": str,
    "step": int,
    "world_size": int,
    "plan": dict,
    "block": int,
    "files": dict,
    "tensors": dict,
    "aliases": dict,
    "states": dict,
}


def _fields(what: str, raw: object, fields: dict[str, type]) -> None:
    if not isinstance(raw, dict):
        raise CheckpointError(f"{what} is {raw!r:.80}, and should have {', '.join(fields)}")
    for name in raw.keys() ^ fields.keys():
        said = "lacks" if name in fields else "has, which nobody writes,"
        raise CheckpointError(f"{what} {said} {name!r:.80}: it should have {', '.join(fields)}")
    for name, kind in fields.items():
        if type(raw[name]) is not kind:
            raise CheckpointError(f"{what} has {raw[name]!r:.80} as {name}, and should have {NAMED[kind]}")


NAMED = {int: "a whole number", str: "words", list: "a list", dict: "a table"}
