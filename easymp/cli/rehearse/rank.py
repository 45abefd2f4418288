"""One rank of a rehearsal: runs the script in a world that does not exist, and writes down what it holds and sends.

Parameters become fake tensors (a shape without values) as modules register them; data sets and loaders stay real. torch's fake process
group takes every collective. A dispatch mode sees each operation: it follows the storages, notes collectives, and answers what the host
reads of a tensor without values. All ranks are taken to have the values of this one: a sum is `world` times its own.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ... import distributed, hardware
from ...accelerator import Accelerator
from ...base.pytree import find_batch_size, map_leaves
from ...data import PreparedLoader
from ...distributed import World, process_group
from ...errors import EasympError
from ...hardware import gpus
from ...launcher.worker import run_module, run_script
from ...optim import PreparedOptimizer
from ...strategies import meta_init, pipeline_cuts
from ...training import state
from . import ENDED, FAILED, STOPPED, TASK, UNKNOWN

LARGE = 1 << 14  # elements from which on a tensor that is made without others is fake
STEP = 1.002  # growth of the peak from one look at what it consists of to the next
NAMESPACES = ("c10d", "_c10d_functional")
# The collectives of torch.ops by the words that their names hold, in this order, and the list whose bytes are the whole tensor's.
KINDS = {
    "allgather": "all_gather", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "allreduce": "all_reduce",
    "all_reduce": "all_reduce", "alltoall": "all_to_all", "all_to_all": "all_to_all", "broadcast": "broadcast", "send": "send",
    "recv": "receive", "barrier": "barrier", "reduce_": "all_reduce", "gather_": "all_gather", "scatter_": "broadcast",
}  # fmt: skip
CANNOT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Stop(SystemExit):
    """Ends the script after the last update."""


class Peers:
    """Stands for the listener that hears of the other ranks."""

    trains = None

    def __init__(self, *_: Any) -> None: ...

    def _nothing(self, *_: Any) -> bool:
        return False

    def compare(self, *_: Any) -> bool:
        return True

    leave = close = come = wait_for_all = reachable = has_left = _nothing
    caused_by_peer = staticmethod(lambda error: False)


class Chunks:
    """The chunks of a parameter over the ranks, of which fsdp takes two."""

    def __init__(self, tensor: Tensor, chunks: int, dim: int) -> None:
        self._tensor, self._dim, self._each = tensor, dim, -(-tensor.size(dim) // chunks)

    def __getitem__(self, number: int) -> Tensor:
        length = self._tensor.size(self._dim)
        begin = min(length, number * self._each)
        return self._tensor.narrow(self._dim, begin, min(self._each, length - begin))


class Storage:
    """Bytes of a live storage, and what they are for."""

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind


class Watcher(TorchDispatchMode):
    """Follows storages of fake tensors and collectives of all.

    Args:
        fakes: the mode of the tensors that are followed.
        script: the file whose lines are named.
    """

    def __init__(self, fakes: FakeTensorMode, script: str = "") -> None:
        super().__init__()
        self.fakes, self.script = fakes, script
        self.live: dict[int, Storage] = {}
        self.now = self.peak = self.looked = 0
        self.at_peak: list[tuple[Storage, int]] = []
        self.collectives: list[dict[str, Any]] = []
        self.large = False  # whether large tensors are made fake
        self.reads = 0  # of values that are not there
        self.phase = 0  # updates that are made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # near half of all calls
        kwargs = kwargs or {}
        if any(kind not in (FakeTensor, Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor runs operations on its parts, which come here
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            self.reads += 1
            return torch.ones((), dtype=args[0].dtype).item() if args[0].dtype != torch.bool else False
        if func.namespace in NAMESPACES:
            name = func.__name__.split(".")[0]
            if kind := next((kind for word, kind in KINDS.items() if word in name), None):
                return self._collective(func, name, kind, args, kwargs)
        sizes = args[0] if args and isinstance(args[0], (list, tuple)) and not types else ()
        large = self.large and sizes and type(sizes[0]) is int and math.prod(sizes) >= LARGE
        large = large and torch.device(kwargs.get("device") or "cpu").type != "meta"
        if large and active_fake_mode() is None:  # DTensor has one of its own, for layouts
            with self.fakes:
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        self.follow(out)
        return out

    # -- storages

    def follow(self, tree: Any, kind: str = "activations") -> None:
        """Count the storages of new tensors."""
        for leaf in (tree,) if isinstance(tree, Tensor) else tree_leaves(tree):
            mine = isinstance(leaf, FakeTensor) and leaf.fake_mode is self.fakes
            if mine and leaf.layout == torch.strided and not leaf.is_meta:
                storage = leaf.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = Storage(storage.nbytes(), kind)
                    weakref.finalize(storage, self._gone, storage._cdata)
                    self._grown(storage.nbytes())

    def _gone(self, place: int) -> None:
        self.now -= self.live.pop(place).size

    def _grown(self, size: int) -> None:
        self.now += size
        if self.now > self.peak:
            self.peak = self.now
            if self.peak > STEP * self.looked:
                self.looked, self.at_peak = self.peak, [(one, one.size) for one in self.live.values()]

    def resized(self, call: Callable[..., Any], storage: Any, size: int) -> Any:
        """Stands around `torch.UntypedStorage.resize_`."""
        done, mine = call(storage, size), self.live.get(storage._cdata)
        if mine is not None:
            grown, mine.size = size - mine.size, size
            self._grown(grown)
        return done

    def label(self, tensors: Iterator[Any], kind: str) -> int:
        """Say what these tensors are for; returns the bytes of this rank's parts."""
        total, seen = 0, set()
        for tensor in tensors:
            part = getattr(tensor, "_local_tensor", tensor)
            part = getattr(part, "elem", part)
            storage = part.untyped_storage()
            if part.is_meta or storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            total += storage.nbytes()
            if storage._cdata in self.live:
                self.live[storage._cdata].kind = kind
        return total

    def begin_peak(self) -> None:
        self.peak = self.looked = 0
        self._grown(0)

    # -- collectives

    def _collective(self, func: Any, name: str, kind: str, args: Any, kwargs: Any) -> Any:
        group = next(filter(None, map(group_of, tree_leaves((args, kwargs)))))
        ranks = dist.get_process_group_ranks(group)
        whole = sum(t.numel() * t.element_size() for t in tree_leaves(args[0]) if isinstance(t, Tensor))
        if kind == "all_gather" and func.namespace == "_c10d_functional":
            whole *= len(ranks)
        if kind == "reduce_scatter" and func.namespace == "c10d":  # the output comes first
            whole = sum(t.numel() * t.element_size() for t in tree_leaves(args[1]) if isinstance(t, Tensor))
        self.meet(kind, ranks, whole)
        out = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._as_if_alike(name, args, len(ranks))
        if name == "allreduce_":  # DDP takes the result from the future, which the fake group leaves empty
            done: Any = torch.futures.Future()
            done.set_result(list(args[0]))
            out = (out[0], _create_work_from_future(done).boxed())
        self.follow(out)
        for tensor in (t for t in tree_leaves((args, kwargs, out)) if isinstance(t, FakeTensor)):
            mine = self.live.get(tensor.untyped_storage()._cdata)
            if mine is not None and mine.kind == "activations":
                mine.kind = "communication"
        return out

    @staticmethod
    def _as_if_alike(name: str, args: Any, size: int) -> None:
        """Give real tensors the result of a collective of ranks with the same values."""
        given = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if any(isinstance(t, FakeTensor) for t in given):
            return
        with torch.no_grad():
            if name == "allgather_":
                for outputs, source in zip(args[0], args[1]):
                    for output in outputs:
                        output.copy_(source)
            elif name == "_allgather_base_":
                args[0].view(size, -1).copy_(args[1].reshape(1, -1).clone())

    def meet(self, kind: str, ranks: list[int], size: int) -> None:
        """Note a meeting of some ranks."""
        frame, line = sys._getframe(1), ""
        while frame is not None and not line:
            if frame.f_code.co_filename == self.script:
                line = f"{Path(self.script).name}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        place = {"first": ranks[0], "last": ranks[-1], "ranks": len(ranks), "line": line, "phase": self.phase}
        self.collectives.append({"kind": kind, "bytes": size, **place})


def group_of(leaf: Any) -> Any:
    """The process group that an argument of a collective's operation is or names."""
    if isinstance(leaf, str):
        try:
            return dist.distributed_c10d._resolve_process_group(leaf)
        except (RuntimeError, ValueError):
            return None
    if isinstance(leaf, dist.ProcessGroup):
        return leaf
    if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
        return dist.ProcessGroup.unbox(leaf)
    return None


class Rehearsal:
    """What stands in the script's way on one rank.

    Args:
        task: what the command was asked, as it wrote it.
        rank: whose place this process takes.
    """

    def __init__(self, task: dict[str, Any], rank: int) -> None:
        self.task, self.rank = task, rank
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        script = "" if task["module"] else str(Path(task["script"]).absolute())
        self.watcher = Watcher(self.fakes, script)
        self.found: dict[str, Any] = {"rank": rank, "samples": 0, "updates": 0}
        self.gradients = 0  # bytes in front of a step
        self.acc: Any = None

    def run(self) -> dict[str, Any]:
        """Run the script to its last update; returns what was found."""
        task, found = self.task, self.found
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=task["processes"])
        call = partial(run_module if task["module"] else run_script, task["script"], task["arguments"])
        torch.set_num_threads(1)
        with ExitStack() as stack:
            for home, name, stands in self._places():
                stack.enter_context(patch.object(home, name, stands))
            stack.enter_context(self.watcher)
            try:
                call()
                found["end"] = ENDED
            except Stop:
                found["end"] = STOPPED
            except CANNOT as error:
                found["end"], found["why"] = UNKNOWN, said(error)
            except SystemExit as error:
                found["end"] = FAILED if error.code else ENDED
                found["why"] = f"the script ends itself with {error.code!r}"
            except Exception as error:
                inner: BaseException | None = error
                while inner is not None and not isinstance(inner, CANNOT):
                    inner = inner.__cause__ or inner.__context__
                found["end"], found["why"] = (UNKNOWN, said(inner)) if inner else (FAILED, said(error))
                found["refused"] = isinstance(error, EasympError)
            self._account()
        return found

    def _places(self) -> Iterator[tuple[Any, str, Any]]:
        """What is replaced while the script runs: where, its name, and the replacement."""
        watcher = self.watcher
        if self.task["machine"]:
            there = gpus.describe(self.task["machine"]).hardware
            yield hardware, "detect", lambda *args, **named: there
        kind = type("World", (Alone,), {"watcher": watcher})
        yield distributed, "World", kind
        yield state, "World", kind
        yield process_group, "Watch", Peers
        yield dist, "broadcast_object_list", lambda objects, *args, **named: None
        yield _fsdp_param, "_chunk_with_empty", Chunks
        yield dist, "all_gather_object", self._objects
        yield dist, "all_reduce", partial(all_reduce, dist.all_reduce)
        yield pipeline_cuts.Survey, "is_blank", is_blank
        yield pipeline_cuts.Survey, "blank", blank
        yield torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda tensor: [])  # of swap_tensors
        yield torch.UntypedStorage, "resize_", bound(watcher.resized, torch.UntypedStorage.resize_)
        for name in ("register_parameter", "register_buffer"):
            yield nn.Module, name, bound(self._register, getattr(nn.Module, name))
        for home, name in ((Accelerator, "prepare"), (PreparedOptimizer, "step"), (PreparedLoader, "read")):
            yield home, name, bound(getattr(self, f"_{name}"), getattr(home, name))
        for name in ("save_state", "save_model", "save"):
            yield Accelerator, name, lambda acc, *args, **named: ""
        yield Accelerator, "resume", lambda acc, *args, **named: None

    # -- the script's calls

    def _objects(self, objects: list[Any], mine: Any, group: Any = None) -> None:
        """`dist.all_gather_object` without the bytes, which differ from rank to rank."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.watcher.meet("all_gather", ranks, 0)
        objects[:] = [copy.deepcopy(mine)] * len(ranks)

    def _fake(self, tensor: Tensor) -> Tensor:
        """A tensor of the same form without values, on the device."""
        with self.fakes:
            fresh: Tensor = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        self.watcher.follow(fresh)
        return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh

    def _register(
        self, call: Any, module: nn.Module, name: str, tensor: Any, *args: Any, **named: Any
    ) -> None:
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu":
            tensor = self._fake(tensor)
        call(module, name, tensor, *args, **named)

    def _prepare(self, call: Any, acc: Accelerator, *objects: Any, **named: Any) -> Any:
        self.acc, self.watcher.large = acc, True
        fresh: dict[int, Tensor] = {}
        models = [item for item in objects if isinstance(item, nn.Module)]
        initialize = acc._prepared._options.initialize
        for name, part in (
            (n, p) for model in models if meta_init.on_meta(model) for n, p in model.named_modules()
        ):
            if part._parameters or part._buffers:
                meta_init._check(name, part, initialize, False)
        for part in (part for model in models for part in model.modules()):
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        table[name] = fresh.setdefault(id(tensor), self._fake(tensor))  # type: ignore[assignment]
        for item in objects:
            for group in getattr(item, "param_groups", ()):
                group["params"] = [fresh.get(id(p), p) for p in group["params"]]
        return call(acc, *objects, **named)

    def _read(self, call: Any, loader: PreparedLoader, skip: int = 0) -> Iterator[Any]:
        batches = call(loader, skip)
        while True:
            self.watcher.large = False  # what a loader makes has values
            try:
                batch = next(batches, None)
            finally:
                self.watcher.large = True
            if batch is None:
                return
            if self.found["updates"] == self.task["updates"] - 1 and torch.is_grad_enabled():
                self.found["samples"] += find_batch_size(batch) or 0
            yield map_leaves(self._without_values, batch)

    def _without_values(self, leaf: Any) -> Any:
        floats = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() >= LARGE
        return self._fake(leaf) if floats and not isinstance(leaf, FakeTensor) else leaf

    def _step(self, call: Any, optimizer: PreparedOptimizer, closure: Any = None) -> Any:
        window, optimizers = self.acc._window, self.acc._prepared.optimizers
        if optimizer not in optimizers or (window.accumulation != 1 and window.inside and not window.sync):
            return call(optimizer, closure)
        held = (p for one in optimizers for g in one.param_groups for p in g["params"])
        self.gradients = max(
            self.gradients, self.watcher.label((p.grad for p in held if p.grad is not None), "gradients")
        )
        result = call(optimizer, closure)
        done = min(one.updates for one in optimizers)
        if done > self.found["updates"]:
            self.found["updates"] = self.watcher.phase = done
            self._account()
            if done >= self.task["updates"]:
                raise Stop
            self.watcher.begin_peak()
            self.found["samples"] = 0
        return result

    # -- what is written down

    def _account(self) -> None:
        """The bytes of this rank by kind, the collectives, and what the plan says."""
        found, watcher, acc = self.found, self.watcher, self.acc
        found.update(collectives=watcher.collectives, reads=watcher.reads)
        if acc is None:
            return
        plan, prepared = acc.plan, acc._prepared
        roots = [route.original for route in prepared.models]
        own = [p for root in roots for p in root.parameters()]
        states = [
            t
            for o in prepared.optimizers
            for t in tree_leaves(list(o.state.values()))
            if isinstance(t, Tensor)
        ]
        masters = [p for o in prepared.optimizers for g in o.param_groups for p in g["params"]]
        kinds = {
            "weights": watcher.label(iter(own), "weights"),
            "buffers": watcher.label((b for root in roots for b in root.buffers()), "buffers"),
            "gradients": self.gradients,
            "states": watcher.label((t for t in states if t.numel() > 1), "states"),
        }
        mine = {id(p) for p in own}
        if more := watcher.label((p for p in masters if id(p) not in mine and not p.is_meta), "states"):
            kinds["states"] += more
        peak: dict[str, int] = dict.fromkeys((*kinds, "communication", "activations"), 0)
        for storage, size in watcher.at_peak:
            peak[storage.kind] += size
        loaders = [one for one in prepared.loaders if one.total_batch_size]
        found.update(
            plan=plan.as_dict(), memory=plan.memory, bytes=kinds, at_peak=peak, peak=watcher.peak,
            batch=loaders[0].total_batch_size * acc._window.accumulation if loaders else None,
            checkpoint=written([*roots, *states], acc.num_processes),
        )  # fmt: skip


def written(items: list[Any], ranks: int) -> int:
    """Bytes that each rank writes of a checkpoint, about: a part that several ranks hold is written by the one with the least."""
    tensors = [t for i in items for t in (i.state_dict().values() if isinstance(i, nn.Module) else [i])]
    sizes = [t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)]
    whole = [
        t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor) and not hasattr(t, "to_local")
    ]
    return max([sum(sizes) // ranks, *whole])


class Alone(World):
    """A world whose other ranks do not exist; `watcher` notes where they would meet."""

    watcher: Watcher

    def __init__(
        self, ranks: Any, device: Any, timeout: float = 120.0, debug: Any = None, backend: Any = None
    ) -> None:
        super().__init__(ranks, torch.device("cpu"), timeout, debug)

    def compare(self, call: str, *args: Any, **named: Any) -> None:
        self.watcher.meet(f"call of {call}", list(range(self.size)), 0)

    def store(self) -> dist.Store:
        return dist.HashStore()

    def broadcast_objects(self, items: list[Any], source: int = 0, group: Any = None) -> list[Any]:
        self.watcher.meet("broadcast", list(range(self.size)), 0)
        return items


def bound(around: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls ``around(call, self, ...)``."""
    return lambda self, *args, **named: around(call, self, *args, **named)


def all_reduce(
    call: Any, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, *args: Any, **named: Any
) -> Any:
    """`dist.all_reduce` of a real tensor, as if all ranks had the same values."""
    work = call(tensor, op, group, *args, **named)
    if op == dist.ReduceOp.SUM and not isinstance(tensor, FakeTensor):
        tensor.mul_(dist.get_world_size(group))
    return work


def is_blank(survey: pipeline_cuts.Survey, tensor: Tensor) -> bool:
    """Whether a tensor is the survey's own: it keeps those, and a real run's take no memory."""
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is survey._fakes


def blank(survey: pipeline_cuts.Survey, leaf: Any) -> Any:
    """A tensor of the survey's mode for one of the rehearsal's, or a real one."""
    if not isinstance(leaf, Tensor) or is_blank(survey, leaf):
        return leaf
    with survey._fakes:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()


def main(folder: Path, rank: int) -> None:
    """Rehearse one rank, and write what was found into the folder."""
    task = json.loads((folder / TASK).read_text(encoding="utf-8"))
    found = Rehearsal(task, rank).run()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
