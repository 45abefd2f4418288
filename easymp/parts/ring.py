"""The last updates of a run, for `easymp replay`: a file of JSON lines a rank, ``replay/rank-0.jsonl`` ….

The first line says how the run was started, each other one is an update: numbers in hexadecimal, so that each bit
counts, and checksums of the random streams after it. Lines are appended without fsync, and from a GPU when they have
arrived; when the file has twice the lines that count, it is written anew and renamed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base import env
from ..base.dtensor import local
from ..base.parts import Part
from ..base.rng import random_state
from ..checkpoint.buffers import as_bytes
from ..errors import SettingError
from ..settings import RECORD
from ..trackers.rows import Pending, Row
from ..version import __version__

if TYPE_CHECKING:
    from ..settings import Settings
    from ..training.state import Run

FOLDER = "replay"
MAX_LOSSES = 1024  # of one update
TRANSFER = 32  # updates whose numbers come from the device in one transfer
Entry = dict[str, Any]  # an update


def path_of(project: str, rank: int) -> str:
    return os.path.join(project, FOLDER, f"rank-{rank}.jsonl")


def read(path: str) -> tuple[Entry | None, Entries]:
    """The first line of a ring (None where there is none), and its updates; a line that was cut short is left out."""
    header, entries = None, Entries()
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.readlines()
    except FileNotFoundError:
        return None, entries
    for text in lines:
        try:
            line = json.loads(text)
            if "script" in line:
                header = line
            else:
                entries.put(line)
        except (ValueError, KeyError, TypeError):
            continue
    return header, entries


class Entries(dict[tuple[int, int], Entry]):
    """Updates by number and index of the optimizer."""

    def put(self, entry: Entry, size: float = math.inf) -> None:
        """Add an update; drop those `size` or more before it, and those after it, which a rollback has undone."""
        update, optimizer = entry["update"], entry["optimizer"]
        for key in [key for key in self if key[1] == optimizer and not update - size < key[0] < update]:
            del self[key]
        self[update, optimizer] = entry


class UpdateRing(Part):
    """Writes the last updates of this rank, `size` of them."""

    name = "replay"

    def __init__(self, size: int) -> None:
        self._size = size
        self._losses: deque[Tensor] = deque(maxlen=MAX_LOSSES)  # since the last update
        self._norms: list[Tensor] = []  # of the clips since the last backward
        self._pending = Pending()
        self._file: IO[bytes] | None = None  # from the first update on: an evaluation leaves a training's ring
        self._lines = 0

    @classmethod
    def wanted(cls, settings: Settings) -> UpdateRing | None:
        return cls(settings.replay) if settings.replay else None

    def begin(self) -> None:
        project = self.run.project.project_dir or os.curdir
        if "://" in project:
            raise SettingError(
                f"replay={self._size} appends to a file beside the checkpoints, and {project!r} is a URL: leave replay "
                "out, or use a folder"
            )
        self._path = path_of(project, self.run.world.rank)
        self.header, self.entries = start_facts(self.run), read(self._path)[1]

    def loss(self, loss: Tensor, num_items: Any = None) -> None:
        self._losses.append(loss.detach())
        self._norms.clear()

    def norm(self, norm: Tensor, parameters: Sequence[Tensor]) -> None:
        self._norms.append(norm)

    def stepped(self, optimizer: Any) -> None:
        self._pending.add(self.row(optimizer, optimizer.updates))
        if self.run.world.device.type == "cpu" or len(self._pending) >= TRANSFER:
            self._pending.send()
        self._write()
        self._losses.clear()
        self._norms.clear()

    def row(self, optimizer: Any, update: int) -> Row:
        """An update as it stands now; numbers may be on the device."""
        prepared, scaler = self.run.prepared, self.run.scaler
        entry = {
            "update": update,
            "optimizer": prepared.optimizers.index(optimizer),
            "losses": len(self._losses),
            "norms": len(self._norms),
            "loaders": [[loader.epoch, loader.position] for loader in prepared.loaders],
            "random": checksums(self.run.world.device),
        }
        numbers: list[Any] = [local(t.detach()).sum() for t in (*self._losses, *self._norms)]
        numbers += [scaler.current_scale] * scaler.scales
        return Row(update, 0.0, {"entry": entry, **{str(i): number for i, number in enumerate(numbers)}})

    def finish(self, row: Row | None = None) -> None:
        """Write the updates that are on their way from the device, and `row`."""
        if row is not None:
            self._pending.add(row)
        self._pending.send()
        self._write(wait=True)

    def close(self) -> None:
        self.finish()
        if self._file is not None:
            self._file.close()

    def _write(self, wait: bool = False) -> None:
        for row in self._pending.arrived(wait):
            entry = row.values.pop("entry")
            numbers = [float(value).hex() for value in row.values.values()]
            norms_begin, norms_end = entry["losses"], entry["losses"] + entry["norms"]
            entry["losses"], entry["norms"] = numbers[:norms_begin], numbers[norms_begin:norms_end]
            entry["scale"] = numbers[norms_end:]
            self.entries.put(entry, self._size)
            self._lines += 1
            if self._file is None or self._lines > 2 * len(self.entries) + TRANSFER:
                self._rewrite()
            else:
                self._file.write(_line(entry))

    def _rewrite(self) -> None:
        if self._file is not None:
            self._file.close()
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        temporary = f"{self._path}.tmp"
        with open(temporary, "wb") as file:
            file.writelines([_line(self.header), *map(_line, self.entries.values())])
        os.replace(temporary, self._path)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  # a killed rank's lines are in the file
        self._lines = len(self.entries)


def _line(value: Entry) -> bytes:
    return json.dumps(value).encode() + b"\n"


def start_facts(run: Run) -> Entry:
    """How this process was started, and what decides its last bits."""
    names = [name for name in env.names(env.PREFIX) if name != RECORD]
    return {
        "script": env.script(),
        "module": getattr(sys.modules["__main__"], "__spec__", None) is not None,
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "variables": {name: env.read(name) for name in names},
        "ranks": run.world.size,
        "device": run.world.device.type,
        "threads": torch.get_num_threads(),
        "versions": {"easymp": __version__, "torch": torch.__version__, "Python": platform.python_version()},
    }


def checksums(device: torch.device) -> dict[str, int]:
    """CRC-32 of the random streams of this process."""
    version, words, gauss = random.getstate()
    sums = {"python": zlib.crc32(repr((version, gauss)).encode(), zlib.crc32(array("Q", words)))}
    sums["torch"] = zlib.crc32(as_bytes(torch.get_rng_state()))
    if device.type != "cpu":
        state = random_state(device) if device.type == "cuda" else torch.get_device_module(device).get_rng_state()
        sums[device.type] = zlib.crc32(as_bytes(state) if isinstance(state, Tensor) else repr(state).encode())
    if numpy := sys.modules.get("numpy"):
        kind, key, *rest = numpy.random.get_state()
        sums["numpy"] = zlib.crc32(repr((kind, rest)).encode(), zlib.crc32(key.tobytes()))
    return sums
