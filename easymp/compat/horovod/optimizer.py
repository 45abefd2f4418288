"""DistributedOptimizer, whose step uses the gradients of all ranks; and parameters, states and objects of one rank."""

from __future__ import annotations

import io
import pickle  # noqa: TID251
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from ...base.pytree import map_leaves
from ...errors import RefusedError, SettingError
from .engine import HorovodInternalError, Op
from .mpi_ops import (
    Adasum,
    Average,
    Compression,
    ProcessSet,
    Sum,
    allgather,
    allreduce,
    allreduce_async_,
    broadcast_,
    broadcast_async_,
    global_process_set,
    layer,
    rank,
    running,
    size,
    sparse_allreduce_async,
    synchronize,
)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: Op = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None, sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """An optimizer of the same class, state and param groups as `optimizer` that reduces gradients over the ranks."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"DistributedOptimizer takes an optimizer, not a {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise SettingError("DistributedOptimizer of another one: pass the optimizer that it was made of")
    if not hasattr(compression, "compress"):
        raise ValueError(f"compression={compression!r}: pass hvd.Compression.fp16 or hvd.Compression.none")
    if op not in (Average, Sum, Adasum):
        raise ValueError("op supports only hvd.Average, hvd.Sum and hvd.Adasum")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, got {backward_passes_per_step}")
    if groups or num_groups:
        grouped = [parameter for group in groups for parameter in group] if isinstance(groups, list) else []
        if len(set(grouped)) < len(grouped):
            raise ValueError("A parameter can only appear once in groups.")
        layer.ignore({"DistributedOptimizer(groups)": "gradients that come together travel together anyway"})
    kind, world_size = type(optimizer), running().world.size
    combines_steps = op == Adasum and world_size > 1
    bases = (_Adasum if combines_steps else _Distributed, kind)
    # Not by its constructor, which may not take the values of `defaults`. Groups and state are the same objects, as
    # schedulers that were made before expect.
    distributed: Any = object.__new__(type(kind.__name__, bases, {"__module__": kind.__module__}))
    vars(distributed).update(vars(optimizer))
    vars(distributed).pop("step", None)  # a scheduler's counter, around the plain step
    distributed.backward_passes_per_step, distributed.op = backward_passes_per_step, op
    distributed.process_set, distributed.sparse_as_dense = process_set, sparse_as_dense
    distributed.gradient_predivide_factor, distributed._compression = gradient_predivide_factor, compression
    distributed._names = _parameter_names(optimizer, named_parameters)
    distributed._backward_counts, distributed._reductions = Counter(), {}
    distributed._synchronized = distributed._skips = False
    distributed._active = world_size > 1 and process_set.included() and not combines_steps
    distributed._register_hooks(distributed._names)
    return distributed


def _parameter_names(optimizer: Any, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """A name for every parameter: the script's, or its place in the param groups."""
    entries, names = list(named_parameters or ()), _default_names(optimizer)
    if not entries:
        return names
    if any(not isinstance(entry, tuple) for entry in entries):
        raise ValueError("named_parameters should be a sequence of tuples: pass model.named_parameters()")
    counts = Counter(name for name, _ in entries)
    if duplicates := sorted(name for name, times in counts.items() if times > 1):
        raise ValueError(f"Names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}")
    script_names = {parameter: name for name, parameter in entries}
    if missing := len(names.keys() - script_names.keys()):
        raise ValueError(f"named_parameters: one or more model parameters were not named ({missing} of them)")
    return {parameter: script_names[parameter] for parameter in names}


def _default_names(optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    groups = enumerate(optimizer.param_groups)
    return {p: f"allreduce.noname.{i}.{j}" for i, group in groups for j, p in enumerate(group["params"])}


class _Distributed:
    """Base that comes before the optimizer's own class."""

    _names: dict[Tensor, str]
    _backward_counts: Counter[Tensor]  # since the last step
    _reductions: dict[Tensor, Callable[[], Tensor]]  # in flight
    _active: bool  # whether gradients travel

    def _register_hooks(self: Any, parameters: Iterable[Tensor]) -> None:
        """Register gradient hooks. They are removed when the optimizer is garbage."""
        arrived: Any = weakref.WeakMethod(self._gradient_arrived)
        for parameter in parameters if self._active else ():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: arrived()(p))
                weakref.finalize(self, hook.remove)

    def _gradient_arrived(self: Any, parameter: Tensor) -> None:
        """Count a backward pass of the parameter; send its gradient after the last one."""
        passes = self.backward_passes_per_step
        if parameter in self._reductions:
            raise AssertionError(
                f"Gradients of {self._names[parameter]} were computed more than backward_passes_per_step={passes} "
                "times before call to step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._backward_counts[parameter] += 1
        if self._backward_counts[parameter] == passes:
            self._send(parameter)

    def _send(self: Any, parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self._reductions[parameter] = self._reduce(self._names[parameter], parameter.grad)

    def _reduce(self: Any, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """Request a reduction; returns a function that waits for the reduced tensor."""
        if tensor.is_sparse and not self.sparse_as_dense:
            return sparse_allreduce_async(tensor, name, self.op, self.process_set)
        compressed, ctx = self._compression.compress(tensor.to_dense() if tensor.is_sparse else tensor)
        factor = self.gradient_predivide_factor
        handle = allreduce_async_(compressed, None, name, self.op, 1 / factor, factor, self.process_set)

        def reduced() -> Tensor:
            dense: Tensor = self._compression.decompress(synchronize(handle), ctx)
            return dense.to_sparse(tensor.sparse_dim()) if tensor.is_sparse else dense

        return reduced

    def _results(self: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Wait for the reductions in flight. Afterwards, also after an error, the next step begins."""
        try:
            for parameter, reduced in self._reductions.items():
                yield parameter, reduced()
        finally:
            self._reductions.clear()
            self._backward_counts.clear()
            self._synchronized = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum the gradients of `passes` backward passes before they travel."""
        self.backward_passes_per_step = passes

    def synchronize(self: Any) -> None:
        """Wait for the ranks' gradients: afterwards `.grad` is the same on all of them."""
        for parameter in self._names if self._active else ():
            if parameter.requires_grad and parameter not in self._reductions:
                self._send(parameter)
        for parameter, reduced in self._results():
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = reduced
            elif reduced is not parameter.grad:
                parameter.grad.copy_(reduced)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not wait."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        def reduced_closure() -> Any:
            loss = closure() if closure is not None else None
            self.synchronize()
            self._synchronized = False
            if not isinstance(loss, Tensor):
                return loss
            return allreduce(loss.detach(), name="closure.loss", process_set=self.process_set)

        step = super().step  # type: ignore[misc]  # of the optimizer's class, which follows this one
        if not self._skips:
            if self._synchronized and self._active:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced once more, which costs time",
                    stacklevel=2,
                )
            if closure is not None and self._active:
                return step(reduced_closure)
            self.synchronize()
        self._synchronized = False
        return step(closure)

    # torch wraps a step without this mark; the step of the optimizer's own class calls the hooks.
    step.hooked = True  # type: ignore[attr-defined]

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Add a group; its gradients are reduced, too."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._names = _default_names(self) | self._names
        self._register_hooks(self.param_groups[-1]["params"])

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Load the state. Gradients in flight, of a step that was broken off, are dropped."""
        for parameter in list(self._names) if self._reductions else []:
            parameter.grad = None
        with suppress(HorovodInternalError):  # the state that is loaded now repairs the run
            list(self._results())
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        """Take the loaded groups and state into the objects that schedules and wrappers made before hold."""
        for group, loaded_group in zip(self.param_groups, state["param_groups"]):
            group.clear()
            group.update(loaded_group)
        self.state.clear()
        self.state.update(state["state"])
        super().__setstate__({"state": self.state, "param_groups": self.param_groups})  # type: ignore[misc]

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._reductions:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]


class _Adasum(_Distributed):
    """Steps alone, and combines the changes of the ranks' steps; no gradient travels."""

    def skip_synchronize(self) -> Any:
        """Raise AssertionError, as Horovod does."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        before = {p: p.detach().clone() for p in self._names if p.requires_grad}
        loss = super(_Distributed, self).step(closure)  # type: ignore[misc]
        with torch.no_grad():
            for p, start in before.items():
                self._reductions[p] = self._reduce(self._names[p], p - start)
            for p, change in self._results():
                p.copy_(before[p] + change)
        return loss

    step.hooked = True  # type: ignore[attr-defined]


# -- from rank to rank


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Write root's values into the tensors of a state dict, of named parameters or of an iterable, on every rank."""
    if isinstance(params, torch.nn.Module) or not isinstance(params, Iterable):
        raise ValueError(f"params is a {type(params).__name__}: pass model.state_dict()")
    entries: Iterable[Any] = sorted(params.items()) if isinstance(params, Mapping) else params
    named = [entry if isinstance(entry, tuple) else (f"parameter.{i}", entry) for i, entry in enumerate(entries)]
    tensors = [(name, tensor) for name, tensor in named if isinstance(tensor, Tensor) and tensor.numel()]
    for handle in [broadcast_async_(tensor, root_rank, name) for name, tensor in tensors]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Load root's state and param groups (learning rates, …) on every rank, without a step. `model` has no effect."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RefusedError("cannot broadcast torch.optim.LBFGS state: start it anew on every rank")
    state = None
    if rank() == root_rank:  # on the host: the other ranks do not have root's GPU
        state = map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, optimizer.state_dict())
    state = broadcast_object(state, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Root's object, on every rank; the other ranks' objects are ignored."""
    data = _pickled(obj if rank() == root_rank else None)
    length = torch.tensor([data.numel()])
    broadcast_(length, root_rank, name and f"{name}.size", process_set)
    if rank() != root_rank:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, name and f"{name}.data", process_set)
    return pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The ranks' objects, in rank order, on every rank."""
    stream = io.BytesIO(allgather(_pickled(obj), name).numpy().tobytes())
    return [pickle.load(stream) for _ in range(size())]


def _pickled(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
