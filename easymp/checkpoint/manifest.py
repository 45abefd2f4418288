"""The manifest: what a checkpoint holds, and where each byte of it lies."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from .boxes import Box, Shape
from .header import DTYPES, NAMES
from .strict import dumps, loads

VERSION = 1
MANIFEST, COMMIT = "manifest.json", "COMMIT"
BLOCK = 2**24  # bytes under one checksum


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


@dataclass(frozen=True)
class FileRecord:
    """A file: its size in bytes, and the CRC-32 of each `BLOCK` of it, the last one shorter."""

    size: int
    checksums: tuple[int, ...]


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

    def encode(self) -> bytes:
        return dumps(
            {
                "version": VERSION,
                "made_by": self.made_by,
                "written": self.written,
                "step": self.step,
                "world_size": self.world_size,
                "plan": self.plan,
                "block": BLOCK,
                "files": {name: {"size": f.size, "crc32": list(f.checksums)} for name, f in self.files.items()},
                "tensors": {
                    name: {
                        "dtype": NAMES[t.dtype],
                        "shape": list(t.shape),
                        "pieces": [[list(p.box.offset), list(p.box.shape), p.file, p.begin] for p in t.pieces],
                    }
                    for name, t in self.tensors.items()
                },
                "aliases": self.aliases,
                "states": self.states,
            }
        )


def seal(manifest: bytes) -> bytes:
    """The content of COMMIT: the SHA-256 of the manifest."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def decode(text: bytes, what: str) -> Manifest:
    """The manifest in `text`.

    Raises:
        CheckpointError: it is none, or a newer one; `what` names the file.
    """
    raw = loads(text, what)
    if raw.get("version") != VERSION:
        raise CheckpointError(f"{what}: format version {raw.get('version')!r}, and this easymp reads {VERSION}: update easymp")
    tensors = {
        name: Stored(
            DTYPES[t["dtype"]],
            tuple(t["shape"]),
            tuple(Piece(Box(tuple(offset), tuple(shape)), file, begin) for offset, shape, file, begin in t["pieces"]),
        )
        for name, t in raw["tensors"].items()
    }
    files = {name: FileRecord(f["size"], tuple(f["crc32"])) for name, f in raw["files"].items()}
    return Manifest(
        raw["step"], raw["world_size"], raw["written"], raw["made_by"], raw["plan"], tensors, files, raw["states"], raw["aliases"]
    )
