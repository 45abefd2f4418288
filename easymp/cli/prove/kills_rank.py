"""One rank of `easymp prove --kill`: runs the script, writes down its state at each update, and may kill itself.

``rank-0.jsonl`` … have a line for each event: ``begin``, ``prepared``, ``loaded``, ``saving``, ``step`` (in front of an
optimizer's step), ``failed`` and ``end``. The state at a step has values by name in each group of `kills.REMEDIES`. A
value is a checksum with a description.
"""

from __future__ import annotations

import dis
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from ...base.dtensor import local
from ...checkpoint.buffers import as_bytes
from ...checkpoint.run_state import numbered
from ...data import PreparedLoader
from ...distributed.mailbox import is_script
from ...optim.optimizer import PreparedOptimizer, PreparedScheduler
from ...optim.sharded import holder_of
from ...optim.torch_step import IMPLEMENTATION
from ...parts.ring import checksums
from ...training.state import accelerators
from ..harness.rank import SingleRunner, Stop, read_task, row_checksums
from .kills import KILLED, REMEDIES

PLAIN = (bool, int, float, complex, str, bytes, type(None))
LARGEST = 2**20  # elements of a tensor of the script that its checksum reads
LONGEST = 200  # items of a list that its checksum reads, from either end
DEEPEST = 6  # levels of the script's objects
ACCESS = re.compile("(LOAD|STORE)_(?:NAME|FAST|GLOBAL|DEREF)")  # in the names of Python's instructions
Value = list[Any]  # a checksum and a description
Variable = tuple[str, Any, bool]  # a label, the value, and whether it is assigned in each round


class StateRecorder(SingleRunner):
    """Writes the state of each update, and kills this rank where the task says so.

    The task's ``kill`` is None, or names the ``rank``, and the ``event`` at ``updates`` updates or later. It comes
    ``delay`` seconds after it, at the latest with the next event. Loaders are set to the ``batches`` of all ranks.
    """

    def __init__(self, folder: Path, task: dict[str, Any]) -> None:
        super().__init__(folder, task)
        self._start = time.perf_counter()
        self._is_dying = False
        self._losses: list[list[str]] = []  # of the running update
        self._samples: dict[str, list[int]] = {}

    def run_script(self) -> None:
        os.chdir(self.task["directory"])
        with suppress(Stop):
            try:
                self.play()
            except Exception:
                if self.acc is not None:
                    objects, variables, _ = self._script_state(None)
                    self._write("failed", loaders={**objects, **variables})
                raise
        for accelerator in accelerators():
            accelerator.close()

    def _write(self, event: str, **facts: Any) -> None:
        if self._is_dying:
            self._kill(0.0)
        updates = max((optimizer.updates for optimizer in self.run.prepared.optimizers), default=0)
        line = {"event": event, "at": time.perf_counter() - self._start, "updates": updates, **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")
        kill = self.task["kill"]
        if kill and (event, self.run.world.rank) == (kill["event"], kill["rank"]) and updates >= kill["updates"]:
            self._is_dying = True
            threading.Thread(target=self._kill, args=(kill["delay"],), daemon=True).start()

    def _kill(self, delay: float) -> None:
        time.sleep(delay)
        (self.folder / KILLED).touch()
        for worker in multiprocessing.active_children():
            worker.kill()
        os.kill(os.getpid(), signal.SIGKILL)  # the command kills the other ranks and the launcher

    # -- events of the run

    def begin(self) -> None:
        super().begin()
        path = self.folder / f"rank-{self.run.world.rank}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write("begin")

    def prepared(self, objects: Sequence[Any]) -> None:
        loaders, share = self.run.prepared.loaders, self.run.prepared.strategy.data_size
        for loader, batch in zip(loaders, self.task["batches"]):
            if loader.total_batch_size == batch and (batch is not None or not self.task["several"]):
                continue
            if batch is None or batch % share:
                self.refuse(f"batches of {batch} samples of all processes cannot be divided among {share} of them")
            loader.batch_size = batch // share
            loader._source.cut = loader._source.cut._replace(batch=loader.batch_size)
        self._write("prepared", batches=[loader.total_batch_size for loader in loaders])

    def saving(self, call: str, path: str | None) -> str | None:
        if path is not None and ("://" in path or not Path(os.path.realpath(path)).is_relative_to(self.task["chain"])):
            if call == "save_state":
                self.refuse(
                    f"the script saves its state in {path!r}, where a real run may have its checkpoints: leave the "
                    "path out of save_state(), or pass a relative one that does not exist yet"
                )
            return str(self.folder)  # an export, from which nothing is resumed
        if call == "save_state":
            self._write("saving")
        return None

    def loaded(self, path: str) -> None:
        self._write("loaded")

    def batch_ready(self, loader: Any, batch: Any) -> None:
        name = numbered("loader", self.run.prepared.loaders.index(loader))
        self._samples.setdefault(name, []).extend(row_checksums(batch))

    def loss(self, loss: Tensor, num_items: Any = None) -> None:
        items = 1 if num_items is None else num_items
        self._losses.append([float(local(loss.detach()).sum()).hex(), float(items).hex()])

    @torch.no_grad()
    def step(self, optimizer: PreparedOptimizer) -> None:
        run = self.run
        models = [(numbered("model", i), model.original) for i, model in enumerate(run.prepared.models)]
        objects, variables, assigned = self._script_state(sys._getframe(1))
        weights: Mapping[str, Any] = {
            f"{name}.{n}": digest(p) for name, model in models for n, p in model.named_parameters()
        }
        groups = [weights, dict(self._optimizer_state()), objects, checksums(run.world.device), self._samples]
        groups += [dict(state_of_modules(models)), variables, {"the loss": self._losses}, assigned]
        key = [optimizer.updates + 1, run.prepared.optimizers.index(optimizer)]
        is_filled = any(loader._surplus for loader in run.prepared.loaders)
        self._write("step", key=key, filled=is_filled, state=dict(zip(REMEDIES, groups, strict=True)))

    def stepped(self, optimizer: PreparedOptimizer) -> None:
        self._losses, self._samples = [], {}

    def close(self) -> None:
        self._write("end")

    # -- the state

    def _optimizer_state(self) -> Iterator[tuple[str, Value]]:
        for i, optimizer in enumerate(self.run.prepared.optimizers):
            name = f"{numbered('optimizer', i)} ({type(optimizer.given).__name__})"
            tensors: dict[str, list[Any]] = {}
            for stepped, _ in optimizer.parameters():
                holder, states = holder_of(optimizer.optimizer, stepped)
                for key, value in states[holder].items() if holder in states else ():
                    tensors.setdefault(key, []).append(value)
            yield from ((f"{key} of {name}", digest(values)) for key, values in tensors.items())
            for number, group in enumerate(optimizer.param_groups):
                numbers = {key: value for key, value in group.items() if type(value) in (int, float)}
                for key in numbers.keys() - set(IMPLEMENTATION):
                    yield f"{key} of {name}, group {number},", digest(numbers[key])
        if self.run.scaler.scales:
            yield "the loss scale", digest(float(self.run.scaler.current_scale))

    def _script_state(self, frame: FrameType | None) -> tuple[dict[str, Value], dict[str, Value], dict[str, Value]]:
        """Three tables of the script's variables: objects, plain values, and those that each round of a loop assigns.

        Args:
            frame: the innermost frame of the script; None: attributes of loaders only.
        """
        prepared = self.run.prepared
        prepared_objects = [self.acc, *(scheduler.scheduler for scheduler in prepared.schedulers)]
        prepared_objects += [loader.original for loader in prepared.loaders]
        for optimizer in prepared.optimizers:
            prepared_objects += [optimizer.optimizer, optimizer.given]
        for model in prepared.models:
            prepared_objects += [model.view, *model.original.modules(), *model.original.parameters()]
        variables = list(variables_of(frame))
        for i, loader in enumerate(prepared.loaders):
            for name in ("sampler", "batch_sampler", "dataset"):
                variables += members(f"{numbered('loader', i)}.{name}", getattr(loader.original, name))
        objects, plain, assigned = dict[str, Value](), dict[str, Value](), dict[str, Value]()
        ignored = {id(item) for item in prepared_objects}
        for label, value, is_assigned in variables:
            if (entry := digest(value, ignored))[0]:
                is_plain = isinstance(value, (*PLAIN, list, tuple, dict, Tensor)) or type(value).__module__ == "numpy"
                if is_assigned:
                    assigned[label] = entry
                elif is_plain:
                    plain[label] = entry
                else:
                    objects[f"{label} ({type(value).__name__})"] = entry
        return objects, plain, assigned


def state_of_modules(models: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, Value]]:
    """Buffers, and other attributes of modules, which no state_dict has."""
    for path, module in (pair for name, model in models for pair in model.named_modules(prefix=name)):
        for name, buffer in module.named_buffers(recurse=False):
            is_persistent = name not in module._non_persistent_buffers_set
            label = name if is_persistent else f"{name} (a buffer that is not persistent)"
            yield f"{path}.{label}", digest(buffer)
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training":
                yield f"{path}.{name} (an attribute)", digest(value)


def variables_of(frame: FrameType | None) -> Iterator[Variable]:
    """The variables of the script's functions that are running, and of its modules."""
    while frame is not None:
        code, values = frame.f_code, frame.f_locals
        kind = "global" if code.co_name == "<module>" else "local"
        if is_script(code.co_filename):
            for name, (line, is_assigned) in assignments(code).items():
                if name in values and not name.startswith("_"):
                    for label, value, _ in members(name, values[name]):
                        yield f"{kind} `{label}` at {os.path.basename(code.co_filename)}:{line}", value, is_assigned
        frame = frame.f_back


def members(label: str, value: Any) -> Iterator[Variable]:
    """The attributes of an object of the script without a state_dict, or any other value itself."""
    if is_of_script(value) and hasattr(value, "__dict__") and not hasattr(value, "state_dict"):
        yield from ((f"{label}.{name}", item, False) for name, item in vars(value).items())
    else:
        yield label, value, False


@cache
def assignments(code: CodeType) -> dict[str, tuple[int, bool]]:
    """Names that a function assigns → the first line that does, and whether loops assign before they read."""
    instructions = list(dis.get_instructions(code))
    loops = [(i.argval, i.offset) for i in instructions if "BACKWARD" in i.opname and isinstance(i.argval, int)]
    lines = dict.fromkeys(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], code.co_firstlineno)
    first_accesses: dict[tuple[int, str], str] = {}  # by the begin of the outermost loop
    for instruction in instructions:
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        begin = min((begin for begin, end in loops if begin <= instruction.offset <= end), default=None)
        for access, name in zip(ACCESS.findall(instruction.opname), names):
            if access == "STORE" and instruction.positions is not None:
                lines.setdefault(name, instruction.positions.lineno or code.co_firstlineno)
            if begin is not None:
                first_accesses.setdefault((begin, name), access)
    assigned, read = ({name for (_, name), a in first_accesses.items() if a == kind} for kind in ("STORE", "LOAD"))
    return {name: (line, name in assigned - read) for name, line in lines.items()}


# -- values


def digest(value: Any, ignored: Collection[int] | None = None) -> Value:
    """CRC-32 of a value, 0 where it has no known state, and its description.

    Args:
        ignored: ids of objects to leave out. None reads tensors whole, else LARGEST of their elements.
    """
    crc = 0
    for part in content(value, ignored):
        crc = zlib.crc32(part, crc)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    return [crc, repr(value)[:60] if isinstance(value, PLAIN) else ""]


def content(value: Any, ignored: Collection[int] | None, depth: int = 0) -> Iterator[Any]:
    """The bytes by which a value differs from another one."""
    is_prepared = isinstance(value, (PreparedOptimizer, PreparedScheduler, PreparedLoader))
    if is_prepared or isinstance(value, type) or depth > DEEPEST or (ignored and id(value) in ignored):
        return
    state: Any = None
    if isinstance(value, PLAIN):
        yield repr(value).encode()
    elif isinstance(value, Tensor):
        part = local(value.detach())
        if part.layout == torch.strided and not part.is_meta:
            part = part if ignored is None else part.flatten()[:: part.numel() // LARGEST + 1]
            yield as_bytes(part.cpu().resolve_conj().resolve_neg().contiguous())
    elif isinstance(value, Mapping):
        for i, (key, item) in enumerate(value.items()):
            if parts := list(content(item, ignored, depth + 1)):
                yield from (repr(key if isinstance(key, PLAIN) else i).encode(), *parts)
    elif isinstance(value, (list, tuple, deque)):
        yield str(len(value)).encode()
        is_short = ignored is None or len(value) <= 2 * LONGEST
        for i in range(len(value)) if is_short else (*range(LONGEST), *range(-LONGEST, 0)):
            yield from content(value[i], ignored, depth + 1)
    else:
        with suppress(Exception):  # of an object that is not complete
            state = state_of(value)
    if state is not None:
        yield from content(state, ignored, depth + 1)


def state_of(value: Any) -> Any:
    """The state of an object that PyTorch, NumPy or the script defines; None for others."""
    for method in ("state_dict", "get_state", "getstate"):  # the latter two of generators
        if hasattr(value, method):
            return getattr(value, method)()
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    if type(value).__module__ == "numpy":  # an array or a number
        return torch.as_tensor(value)
    return vars(value) if is_of_script(value) else None


def is_of_script(value: Any) -> bool:
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return file is not None and is_script(file)


if __name__ == "__main__":
    StateRecorder(Path(sys.argv[1]), read_task(Path(sys.argv[1]))).run_script()
