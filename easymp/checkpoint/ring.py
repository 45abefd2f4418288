"""The last updates of a run, for `easymp replay`: a file of JSON lines a rank, ``replay/rank-0.jsonl`` … in the project's folder.

The first line says how the run was started. Each other line is an update: `update`, `optimizer` (its index), `losses` of its micro-steps,
`norms` of its clips, the loss `scale`, `loaders` (epoch and position of each), and `random`: checksums of the random streams after it.
Numbers are hexadecimal, so each bit counts. Lines are appended without fsync, and from a GPU when they have arrived; when the file has
twice the lines that count, it is written anew and renamed.
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
from ..errors import SettingError
from ..settings import RECORD
from ..trackers.rows import Pending, Row
from ..training.nonfinite import random_state
from ..version import __version__
from .storage import as_bytes

if TYPE_CHECKING:
    from ..precision import Scaler
    from ..training.nonfinite import Nonfinite
    from ..training.prepare import Preparation
    from ..training.state import Run

FOLDER = "replay"
MOST = 1024  # losses of one update
TOGETHER = 32  # updates whose numbers come from the device in one transfer
Entry = dict[str, Any]  # an update


def file_of(project: str, rank: int) -> str:
    """The path of a rank's ring below a project's folder."""
    return os.path.join(project, FOLDER, f"rank-{rank}.jsonl")


def read(path: str) -> tuple[Entry | None, Entries]:
    """The first line of a ring, and its updates; None and {} where there is none. A line that a killed run cut short is left out."""
    begin, entries = None, Entries()
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.readlines()
    except FileNotFoundError:
        return None, entries
    for text in lines:
        try:
            line = json.loads(text)
            if "script" in line:
                begin = line
            else:
                entries.put(line)
        except (ValueError, KeyError, TypeError):
            continue
    return begin, entries


class Entries(dict[tuple[int, int], Entry]):
    """Updates by number and index of the optimizer."""

    def put(self, entry: Entry, size: float = math.inf) -> None:
        """Add an update; drop those `size` or more before it, and those after it, which a resume or a rollback has undone."""
        update, optimizer = entry["update"], entry["optimizer"]
        for key in [key for key in self if key[1] == optimizer and not update - size < key[0] < update]:
            del self[key]
        self[update, optimizer] = entry


class Ring:
    """Writes the last updates of this rank. `norms` are those of the clips since the last backward."""

    def __init__(
        self,
        run: Run,
        prepared: Preparation,
        scaler: Scaler,
        nonfinite: Nonfinite,
        norms: Sequence[Tensor],
        project: str,
    ) -> None:
        self._size = run.plan.settings.replay
        if "://" in project:
            raise SettingError(
                f"replay={self._size} appends to a file beside the checkpoints, and {project!r} is a URL: leave replay out, or use a folder"
            )
        self._run, self._prepared, self._scaler, self._norms = run, prepared, scaler, norms
        self._losses: deque[Tensor] = deque(maxlen=MOST)  # since the last update
        self._pending = Pending()
        self._path = file_of(project, run.world.rank)
        self.begin, self.entries = started(run), read(self._path)[1]
        self._file: IO[bytes] | None = (
            None  # from the first update on: an evaluation leaves a training's ring
        )
        self._lines = 0
        self._loss = nonfinite.loss
        nonfinite.loss = self._hear  # type: ignore[method-assign]  # so that a run without a ring asks nobody
        run.window.stepped.append(self._stepped)

    def _hear(self, loss: Tensor) -> None:
        self._loss(loss)
        self._losses.append(loss.detach())  # a pipeline's has its value later

    def _stepped(self, optimizer: Any) -> None:
        self._add(self.row(optimizer, optimizer.updates))
        self._losses.clear()

    def row(self, optimizer: Any, update: int) -> Row:
        """An update as it stands now; numbers may be on the device."""
        entry = {
            "update": update,
            "optimizer": self._prepared.optimizers.index(optimizer),
            "losses": len(self._losses),
            "norms": len(self._norms),
            "loaders": [[loader.epoch, loader.position] for loader in self._prepared.loaders],
            "random": checksums(self._run.world.device),
        }
        numbers: list[Any] = [local(t.detach()).sum() for t in (*self._losses, *self._norms)]
        numbers += [self._scaler.as_it_is] * self._scaler.scales
        return Row(update, 0.0, {"entry": entry, **{str(i): n for i, n in enumerate(numbers)}})

    def _add(self, row: Row) -> None:
        self._pending.add(row)
        if self._run.world.device.type == "cpu" or len(self._pending) >= TOGETHER:
            self._pending.send()
        self._write()

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
            first, last = entry["losses"], entry["losses"] + entry["norms"]
            entry |= {"losses": numbers[:first], "norms": numbers[first:last], "scale": numbers[last:]}
            self.entries.put(entry, self._size)
            self._lines += 1
            if self._file is None or self._lines > 2 * len(self.entries) + TOGETHER:
                self._rewrite()
            else:
                self._file.write(_line(entry))

    def _rewrite(self) -> None:
        if self._file is not None:
            self._file.close()
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        fresh = f"{self._path}.tmp"
        with open(fresh, "wb") as file:
            file.writelines([_line(self.begin), *map(_line, self.entries.values())])
        os.replace(fresh, self._path)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  # a killed rank's lines are in the file
        self._lines = len(self.entries)


def _line(value: Entry) -> bytes:
    return json.dumps(value).encode() + b"\n"


def started(run: Run) -> Entry:
    """How this process was started, and what decides its last bits."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    script = None if path is None or not os.path.isfile(path) else os.path.abspath(path)
    names = [name for name in env.names(env.PREFIX) if name != RECORD]
    return {
        "script": script if spec is None else spec.name.removesuffix(".__main__"),
        "module": spec is not None,
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
    found = {"python": zlib.crc32(repr((version, gauss)).encode(), zlib.crc32(array("Q", words)))}
    found["torch"] = zlib.crc32(as_bytes(torch.get_rng_state()))
    if device.type != "cpu":
        state = (
            random_state(device) if device.type == "cuda" else torch.get_device_module(device).get_rng_state()
        )
        found[device.type] = zlib.crc32(
            as_bytes(state) if isinstance(state, Tensor) else repr(state).encode()
        )
    if numpy := sys.modules.get("numpy"):
        kind, key, *rest = numpy.random.get_state()
        found["numpy"] = zlib.crc32(repr((kind, rest)).encode(), zlib.crc32(key.tobytes()))
    return found
