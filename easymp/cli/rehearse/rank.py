"""One rank of a rehearsal: runs the script in a world that does not exist, and writes down its bytes and collectives.

Parameters become fake tensors (a shape without values) as modules register them; data sets and loaders stay real.
torch's fake process group takes every collective. A dispatch mode sees each operation: it follows the storages, records
collectives, and answers what the host reads of a tensor without values. All ranks are taken to have the values of this
one: a sum is `world` times its own.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ... import conflicts, distributed, hardware
from ...base.pytree import find_batch_size, map_leaves
from ...checkpoint.ranks import SaveCalls
from ...data import PreparedLoader
from ...distributed import World, process_group
from ...hardware import describe
from ...optim import PreparedOptimizer, torch_step
from ...strategies import meta_init, pipeline_cuts
from ...trackers import rows
from ...training import state
from ...training.peak import Places, Storage, largest
from ..harness.rank import Runner, Stop, read_task
from . import ENDED, FAILED, STOPPED, UNKNOWN, device

LARGE = 1 << 14  # elements from which on a tensor that is made without others is fake
STEP = 1.002  # growth of the peak from one look at its kinds to the next
NAMESPACES = ("c10d", "_c10d_functional")
# The collectives of torch.ops by parts of their names without underscores, in this order.
KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
    "reduce": "all_reduce",
    "gather": "all_gather",
    "scatter": "broadcast",
}
UNKNOWN_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class NoWatch:
    """Stands for the listener that hears of the other ranks."""

    training_thread = None

    def __init__(self, *_: Any) -> None: ...

    def _no(self, *_: Any) -> bool:
        return False

    leave = close = arrive = wait_for_all = reachable = has_left = _no
    caused_by_peer = staticmethod(lambda error: False)


class Chunks:
    """The chunks of a parameter over thousands of ranks, of which fsdp takes two."""

    def __init__(self, tensor: Tensor, chunks: int, dim: int) -> None:
        self._tensor, self._dim, self._chunk_size = tensor, dim, -(-tensor.size(dim) // chunks)

    def __getitem__(self, index: int) -> Tensor:
        size = self._tensor.size(self._dim)
        start = min(size, index * self._chunk_size)
        return self._tensor.narrow(self._dim, start, min(self._chunk_size, size - start))


class Watcher(TorchDispatchMode):
    """Follows storages of the fake tensors of a mode, and collectives of all tensors, with the lines of the script."""

    def __init__(self, fakes: FakeTensorMode, target: torch.device, script: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes, self.device, self.script = fakes, target, script
        self.places = Places(script)
        self.values = device.SmallValues()
        self.live: dict[int, Storage] = {}
        self.allocated = self.peak = self.recorded_peak = 0  # bytes
        self.at_peak: list[tuple[Storage, int]] = []
        self.collectives: list[dict[str, Any]] = []
        self.large_are_fake = False
        self.waits: list[dict[str, Any]] = []  # of the host for the device
        self.updates = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # near half of all calls
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if any(kind not in (FakeTensor, Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor runs operations on its parts, which come here
        if device.waits_for(func, args, kwargs):
            self.waits.append({"line": self.places.line(), "phase": self.updates})
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self.values.read(args[0])
        if func in device.STEPS:
            return None  # it writes into tensors without values
        if func.namespace in NAMESPACES:
            name = func.__name__.split(".")[0]
            kind = next((kind for part, kind in KINDS.items() if part in name.replace("_", "")), None)
            if kind is not None:
                return self._collective(func, name, kind, args, kwargs)
        shape = args[0] if args and isinstance(args[0], (list, tuple)) and not types else ()
        kind = torch.device(kwargs.get("device") or "cpu").type
        large = self.large_are_fake and shape and type(shape[0]) is int and math.prod(shape) >= LARGE
        large = large and kind != "meta"
        if (large or kind == device.NAME) and active_fake_mode() is None:  # DTensor has one of its own, for layouts
            args, kwargs = tree_map_only(Tensor, self.without_values, (args, kwargs))
            with self.fakes:
                output = func(*args, **kwargs)
        else:
            output = func(*args, **kwargs)
        self.follow(output, operation=func.__name__)
        self.values.compute(func, args, kwargs, output)
        return output

    def without_values(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self.fakes.from_tensor(tensor)
        self.values.copy_from_host(fake, tensor)
        return fake

    # -- storages

    def follow(self, tree: Any, operation: str = "") -> None:
        """Count the storages of new tensors, which are activations until `label` says otherwise."""
        place = self.places.here()
        for leaf in (tree,) if isinstance(tree, Tensor) else tree_leaves(tree):
            if not isinstance(leaf, FakeTensor) or leaf.fake_mode is not self.fakes:
                continue
            if leaf.layout == torch.strided and leaf.fake_device.type == self.device.type:
                storage = leaf.untyped_storage()
                if storage._cdata not in self.live:
                    dtype = str(leaf.dtype).removeprefix("torch.")
                    facts = storage.nbytes(), "activations", tuple(leaf.shape), dtype, operation
                    self.live[storage._cdata] = Storage(*facts, *place)
                    weakref.finalize(storage, self._freed, storage._cdata)
                    self._allocate(storage.nbytes())

    def _freed(self, pointer: int) -> None:
        self.allocated -= self.live.pop(pointer).size

    def _allocate(self, size: int) -> None:
        self.allocated += size
        if self.allocated > self.peak:
            self.peak = self.allocated
            if self.peak > STEP * self.recorded_peak:
                self.recorded_peak = self.peak
                self.at_peak = [(storage, storage.size) for storage in self.live.values()]

    def resize(self, storage: Any, resize: Callable[..., Any], size: int) -> Any:
        result, record = resize(storage, size), self.live.get(storage._cdata)
        if record is not None:
            growth, record.size = size - record.size, size
            self._allocate(growth)
        return result

    def label(self, tensors: Iterable[tuple[str, Any]], kind: str) -> int:
        """Set the kind and the names of these tensors' storages; returns the bytes of this rank's parts."""
        sizes: dict[int, int] = {}
        for name, tensor in tensors:
            shard = getattr(tensor, "_local_tensor", tensor)
            shard = getattr(shard, "elem", shard)
            if not shard.is_meta and shard.layout == torch.strided:
                storage = shard.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
                if storage._cdata in self.live:
                    record = self.live[storage._cdata]
                    record.kind, record.name, record.line = kind, name, ""
        return sum(sizes.values())

    # -- collectives

    def _collective(self, func: Any, name: str, kind: str, args: Any, kwargs: Any) -> Any:
        group = next(filter(None, map(group_of, tree_leaves((args, kwargs)))))
        ranks = dist.get_process_group_ranks(group)
        # The list with the whole tensor's bytes: c10d's reduce_scatter has its output first.
        source = args[1] if kind == "reduce_scatter" and func.namespace == "c10d" else args[0]
        size = sum(t.nbytes for t in tree_leaves(source) if isinstance(t, Tensor))
        if kind == "all_gather" and func.namespace == "_c10d_functional":
            size *= len(ranks)
        self.record(kind, ranks, size)
        output = func(*args, **kwargs)
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(args)):  # as if all ranks had the same values
            with torch.no_grad():
                for outputs, source in zip(args[0], args[1]) if name == "allgather_" else ():
                    for tensor in outputs:
                        tensor.copy_(source)
                if name == "_allgather_base_":
                    args[0].view(len(ranks), -1).copy_(args[1].reshape(1, -1).clone())
        if name == "allreduce_":  # DDP takes the result from the future, which the fake group leaves empty
            future: Any = torch.futures.Future()
            future.set_result(list(args[0]))
            output = (output[0], c10d._create_work_from_future(future).boxed())  # type: ignore[attr-defined]
        self.follow(output)
        for tensor in (t for t in tree_leaves((args, kwargs, output)) if isinstance(t, FakeTensor)):
            storage = self.live.get(tensor.untyped_storage()._cdata)
            if storage is not None and storage.kind == "activations":
                storage.kind = "communication"
        return output

    def record(self, kind: str, ranks: Sequence[int], size: int) -> None:
        """Record a collective of some ranks, with the script's line that calls it."""
        group = {"first": ranks[0], "last": ranks[-1], "ranks": len(ranks)}
        line = self.places.line()
        self.collectives.append({"kind": kind, "bytes": size, **group, "line": line, "phase": self.updates})


def chain_of(error: BaseException) -> list[BaseException]:
    """An error and those that led to it. A chain may end in a circle."""
    chain: list[BaseException] = []
    next_error: BaseException | None = error
    while next_error is not None and next_error not in chain:
        chain.append(next_error)
        next_error = next_error.__cause__ or next_error.__context__
    return chain


def group_of(leaf: Any) -> Any:
    """The process group that an argument of a collective's operation is or names."""
    if isinstance(leaf, str):
        try:
            return dist.distributed_c10d._resolve_process_group(leaf)  # type: ignore[arg-type]
        except (RuntimeError, ValueError):
            return None
    if isinstance(leaf, dist.ProcessGroup):
        return leaf
    if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
        return dist.ProcessGroup.unbox(leaf)
    return None


class Rehearsal(Runner):
    """Runs the script as rank number `rank`."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, read_task(folder))
        self.rank = rank
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        script = "" if self.task["module"] else str(Path(self.task["script"]).absolute())
        self.device = torch.device("cpu")
        self.hardware = describe(self.task["machine"]).hardware if self.task["machine"] else None
        if self.hardware is not None and self.hardware.devices and device.IS_POSSIBLE:
            device.register(len(self.hardware.devices))
            self.device = torch.device(device.NAME, 0)
        self.watcher = Watcher(self.fakes, self.device, script)
        self.report: dict[str, Any] = {"rank": rank, "samples": 0, "updates": 0, "device": self.device.type}
        self.gradient_bytes = 0  # in front of a step
        self.is_new_update = False  # whether the next batch begins one: a script may end before it

    def run_script(self) -> dict[str, Any]:
        report = self.report
        backend = "fake" if self.device.type == "cpu" else f"cpu:fake,{device.NAME}:fake"
        dist.init_process_group(backend, store=FakeStore(), rank=self.rank, world_size=self.task["processes"])
        torch.set_num_threads(1)
        with self.watcher.places, self.watcher:
            try:
                self.play()
                report["end"] = ENDED
            except Stop:
                report["end"] = STOPPED
            except SystemExit as error:
                report["end"] = FAILED if error.code else ENDED
                report["why"] = f"the script ends itself with {error.code!r}"
            except FakeTensorDeviceMismatchError as error:
                report["end"] = FAILED
                lines = [
                    f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == self.watcher.script
                ]
                report["why"] = device.mismatch(f"{Path(self.watcher.script).name}:{lines[-1]}" if lines else "")
            except Exception as error:
                cause = next((e for e in chain_of(error) if isinstance(e, UNKNOWN_VALUES)), None)
                report["end"] = UNKNOWN if cause else FAILED
                report["why"] = f"{type(cause or error).__name__}: {cause or error}".strip()
            self._update_report()
            for accelerator in list(state.accelerators()):
                accelerator.close()
        return report

    def play(self) -> None:
        with ExitStack() as stack:
            for owner, name, replacement in self.replacements():
                stack.enter_context(patch.object(owner, name, replacement))
            super().play()

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """The objects and attributes that are replaced while the script runs, with their replacements."""
        watcher = self.watcher
        if self.hardware is not None:
            yield hardware, "detect", lambda *args, **keywords: self.hardware
        world_type = type("World", (FakeWorld,), {"watcher": watcher})
        yield distributed, "World", world_type
        yield state, "World", world_type
        yield process_group, "Watch", NoWatch
        yield SaveCalls, "__init__", lambda calls, world: None
        yield SaveCalls, "all_called", lambda calls: True
        yield dist, "broadcast_object_list", lambda objects, *args, **keywords: None
        yield _fsdp_param, "_chunk_with_empty", Chunks
        yield dist, "all_gather_object", self._all_gather_object
        yield dist, "all_reduce", partial(all_reduce, dist.all_reduce)
        yield pipeline_cuts.Survey, "is_blank", is_blank
        yield torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda tensor: [])  # of swap_tensors
        yield torch.nn.parallel.distributed, "_verify_param_shape_across_processes", lambda *args, **keywords: None
        yield from device.replacements()
        yield rows, "EVENTS", (*rows.EVENTS, device.NAME)  # transfers that a GPU's host does not wait for
        yield torch_step, "EVERYWHERE", {*torch_step.EVERYWHERE, device.NAME}
        yield torch.UntypedStorage, "resize_", around(watcher.resize, torch.UntypedStorage.resize_)
        for name in ("register_parameter", "register_buffer"):
            yield nn.Module, name, around(self._register, getattr(nn.Module, name))

    # -- the script's calls

    def _all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """`dist.all_gather_object` without bytes, which differ from rank to rank."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.watcher.record("all_gather", ranks, 0)
        object_list[:] = [copy.deepcopy(obj)] * len(ranks)

    def _fake(self, tensor: Tensor) -> Tensor:
        """A tensor of the same form without values, on the device."""
        with self.fakes:
            fake: Tensor = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        self.watcher.follow(fake)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def _register(self, module: nn.Module, register: Any, name: str, tensor: Any, *args: Any, **keywords: Any) -> None:
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu":
            tensor = self._fake(tensor)
        register(module, name, tensor, *args, **keywords)

    # -- events of the run

    def close(self) -> None:
        self._update_report()

    def saving(self, call: str, path: str | None) -> str:
        return ""

    def loading(self, call: str, path: str | None) -> str | None:
        return "" if call == "resume" else None

    def preparing(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.watcher.large_are_fake = True
        self.watcher.places.name_modules(models)
        fakes: dict[int, Tensor] = {}
        initialize = self.run.plan.settings.initialize
        for model in models if any(map(meta_init.on_meta, models)) else ():
            for name, module in model.named_modules():
                if module._parameters or module._buffers:
                    meta_init._check(name, module, initialize, False)
        for module in (module for model in models for module in model.modules()):
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        tensors[name] = fakes.setdefault(id(tensor), self._fake(tensor))  # type: ignore[assignment]
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["params"] = [fakes.get(id(p), p) for p in group["params"]]

    def pass_begins(self, loader: PreparedLoader) -> None:
        self.watcher.large_are_fake = False  # a loader's tensors have values

    batch = pass_begins

    def pass_ends(self, loader: PreparedLoader) -> None:
        self.watcher.large_are_fake = True

    def batch_ready(self, loader: PreparedLoader, batch: Any) -> Any:
        self.watcher.large_are_fake = True
        if self.is_new_update and torch.is_grad_enabled():
            self.is_new_update = False
            self.watcher.places.clear()
            self.watcher.peak = self.watcher.recorded_peak = 0
            self.watcher._allocate(0)
            self.report["samples"] = 0
        if torch.is_grad_enabled():
            self.report["samples"] += find_batch_size(batch) or 0

        def without_values(leaf: Any) -> Any:
            is_large = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() >= LARGE
            return self._fake(leaf) if is_large and not isinstance(leaf, FakeTensor) else leaf

        return map_leaves(without_values, batch)

    def step(self, optimizer: PreparedOptimizer) -> None:
        names = self._names()
        gradients = [(names.get(id(p), ""), p.grad) for p in self._stepped_parameters() if p.grad is not None]
        self.gradient_bytes = max(self.gradient_bytes, self.watcher.label(gradients, "gradients"))

    def stepped(self, optimizer: PreparedOptimizer) -> None:
        updates = min(optimizer.updates for optimizer in self.run.prepared.optimizers)
        if updates > self.report["updates"]:
            self.report["updates"] = self.watcher.updates = updates
            self._update_report()
            if updates >= self.task["updates"]:
                raise Stop
            self.is_new_update = True

    def _stepped_parameters(self) -> list[Tensor]:
        return [p for o in self.run.prepared.optimizers for group in o.param_groups for p in group["params"]]

    def _names(self) -> dict[int, str]:
        """The name of each parameter, by its id; of several models with the model's number."""
        models = [route.original for route in self.run.prepared.models]
        prefixes = [f"{i}." for i in range(len(models))] if len(models) > 1 else [""]
        pairs = zip(prefixes, models)
        return {id(p): prefix + name for prefix, model in pairs for name, p in model.named_parameters()}

    # -- the report

    def _update_report(self) -> None:
        """Write the bytes of this rank by kind, the collectives and the plan into the report."""
        report, watcher, run = self.report, self.watcher, self.run
        report.update(collectives=watcher.collectives, waits=watcher.waits)
        if run is None:
            return
        prepared = run.prepared
        models = [route.original for route in prepared.models]
        names = self._names()
        parameters = [(names[id(p)], p) for model in models for p in model.parameters()]
        buffers = [pair for model in models for pair in model.named_buffers()]
        states = [
            (f"{key} of {names.get(id(p), 'a parameter')}", t)
            for optimizer in prepared.optimizers
            for p, state in optimizer.state.items()
            for key, t in state.items()
            if isinstance(t, Tensor)
        ]
        stepped = self._stepped_parameters()
        masters = [("fp32 masters", p) for p in stepped if id(p) not in names and not p.is_meta]
        sizes = {
            "weights": watcher.label(parameters, "weights"),
            "buffers": watcher.label(buffers, "buffers"),
            "gradients": self.gradient_bytes,
            "states": watcher.label([*((n, t) for n, t in states if t.numel() > 1), *masters], "states"),
        }
        at_peak = dict.fromkeys((*sizes, "communication", "activations"), 0)
        for storage, size in watcher.at_peak:
            at_peak[storage.kind] += size
        batch_sizes = [loader.total_batch_size for loader in prepared.loaders if loader.total_batch_size]
        report.update(
            plan=run.plan.as_dict(),
            memory=run.plan.memory,
            bytes=sizes,
            at_peak=at_peak,
            peak=watcher.peak,
            largest=largest(
                (replace(storage, size=size) for storage, size in watcher.at_peak),
                watcher.places,
                conflicts.words_of(run.plan.settings),
                run.world.size,
                type(prepared.strategy),
            ),
            batch=batch_sizes[0] * run.window.accumulation if batch_sizes else None,
            checkpoint=checkpoint_bytes([*models, *(t for _, t in states)], run.world.size),
        )


def checkpoint_bytes(items: Sequence[Any], ranks: int) -> int:
    """Bytes that a rank writes of a checkpoint, about. Of equal parts, one rank writes each: the one with the least."""
    values = [v for i in items for v in (i.state_dict().values() if isinstance(i, nn.Module) else [i])]
    sizes = [(int(v.nbytes), hasattr(v, "to_local")) for v in values if isinstance(v, Tensor)]
    return max([sum(size for size, _ in sizes) // ranks, *(size for size, is_sharded in sizes if not is_sharded)])


class FakeWorld(World):
    """A world whose other ranks do not exist; `watcher` records where they would meet."""

    watcher: Watcher

    def __init__(self, ranks: Any, device: Any, timeout: float = 120.0, debug: Any = None, backend: Any = None) -> None:
        super().__init__(ranks, self.watcher.device if device.type != "cpu" else device, timeout, debug)

    def compare(self, call: str, *args: Any, **keywords: Any) -> None:
        self.watcher.record(f"call of {call}", range(self.size), 0)

    def store(self) -> dist.Store:
        return dist.HashStore()

    def broadcast_objects(self, items: list[Any], source: int = 0, group: Any = None) -> list[Any]:
        self.watcher.record("broadcast", range(self.size), 0)
        return items


def all_reduce(
    reduce: Any, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, *args: Any, **keywords: Any
) -> Any:
    """`dist.all_reduce` of a real tensor, as if all ranks had the same values."""
    work = reduce(tensor, op, group, *args, **keywords)
    if op == dist.ReduceOp.SUM and not isinstance(tensor, FakeTensor):
        tensor.mul_(dist.get_world_size(group))
    return work


def is_blank(survey: pipeline_cuts.Survey, tensor: Tensor) -> bool:
    """Whether a tensor is the survey's own: it keeps those, and a real run's take no memory."""
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is survey._fakes


def around(method: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **keywords: method(self, call, *args, **keywords)


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    report = Rehearsal(folder, rank).run_script()
    (folder / f"rank-{rank}.json").write_text(json.dumps(report), encoding="utf-8")
