"""DistributedOptimizer, whose step uses the gradients of all ranks; and parameters, states and objects from rank to rank."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from ...base.pytree import leaves, map_leaves
from ...errors import RefusedError, SettingError
from .basics import HorovodInternalError, ProcessSet, global_process_set, layer, rank, running
from .mpi_ops import (
    Adasum,
    Average,
    Compression,
    Op,
    Sum,
    allreduce,
    allreduce_async_,
    broadcast_async_,
    sparse_allreduce_async,
    synchronize,
)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None, compression: Any = Compression.none,
    backward_passes_per_step: int = 1, op: Op = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None,
    sparse_as_dense: bool = False, process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:  # fmt: skip
    """`optimizer`, with its state and param groups, as an instance of its own class that reduces gradients over the ranks.

    Each gradient travels while backward goes on with the next; `step` waits for all of them. The ranks may have them in different
    orders. A parameter without a gradient on this rank takes part with zeros. To clip: ``optimizer.synchronize()``, clip, and then
    ``with optimizer.skip_synchronize(): optimizer.step()``. In ``step(closure)`` gradients and the loss are reduced after each call of
    the closure, so that the ranks of an LBFGS decide alike.

    Sparse gradients travel as they are; with `sparse_as_dense` as dense ones, which come back sparse. Adasum combines the changes that each
    rank's own step makes. `groups` and `num_groups` are checked, and without effect. Ranks outside `process_set` step alone.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"DistributedOptimizer takes an optimizer, not a {type(optimizer).__name__}")
    if not hasattr(compression, "compress"):
        raise ValueError(f"compression={compression!r}: pass hvd.Compression.fp16 or hvd.Compression.none")
    if op not in (Average, Sum, Adasum):
        raise ValueError("op supports only hvd.Average, hvd.Sum and hvd.Adasum")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, got {backward_passes_per_step}")
    if isinstance(optimizer, _Distributed):
        raise SettingError("DistributedOptimizer of another one: pass the optimizer that it was made of")
    if num_groups:
        warnings.warn("`num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
    if groups := groups or num_groups:
        if not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        members = [p for group in groups for p in group] if isinstance(groups, list) else []
        if any(not isinstance(p, Tensor) for p in members):
            raise ValueError("groups must consist of torch.Tensor.")
        if len(set(members)) < len(members):
            raise ValueError("A parameter can only appear once in groups.")
        layer.ignore({"DistributedOptimizer(groups)": "gradients that come together travel together anyway"})
    adasum = op == Adasum and running().world.size > 1
    if adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    kind = type(optimizer)
    made_of = (_Adasum if adasum else _Distributed, kind)
    made: Any = object.__new__(type(kind.__name__, made_of, {"__module__": kind.__module__}))
    # Not by its constructor, which may not take the values of `defaults`; groups and state are the same objects, as schedulers expect.
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler's counter, around the plain step
    made.backward_passes_per_step, made.op, made.process_set = backward_passes_per_step, op, process_set
    made.gradient_predivide_factor, made.sparse_as_dense = gradient_predivide_factor, sparse_as_dense
    made._compression, made._names = compression, _named(optimizer, named_parameters)
    made._seen, made._flying, made._hooked = Counter(), {}, set()
    made._synchronized = made._skip = False
    made._active = running().world.size > 1 and process_set.included()
    made._hook()
    return made


def _named(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """A name for every parameter."""
    entries = list(named) if named is not None else []
    if any(not isinstance(entry, tuple) for entry in entries):
        raise ValueError("named_parameters should be a sequence of tuples: pass model.named_parameters()")
    if double := sorted(name for name, times in Counter(name for name, _ in entries).items() if times > 1):
        raise ValueError(f"Names in named_parameters must be unique. Found duplicates: {', '.join(double)}")
    places = enumerate(optimizer.param_groups)
    unnamed = {p: f"allreduce.noname.{i}.{j}" for i, group in places for j, p in enumerate(group["params"])}
    found = {parameter: name for name, parameter in entries} if entries else unnamed
    if missing := sum(p not in found for p in unnamed):
        raise ValueError(f"named_parameters: one or more model parameters were not named ({missing} of them)")
    return {p: found[p] for p in unnamed}


class _Distributed:
    """Comes before the optimizer's own class."""

    _seen: Counter[Tensor]  # backward passes since the last step
    _flying: dict[Tensor, Callable[[], Tensor]]
    _hooked: set[Tensor]

    def _hook(self: Any) -> None:
        """Register hooks on all parameters, for as long as the optimizer lives."""
        arrived = weakref.WeakMethod(self._arrived)
        for parameter in self._names if self._active else ():
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                hook = parameter.register_post_accumulate_grad_hook(lambda p: arrived()(p))
                weakref.finalize(self, hook.remove)

    def _arrived(self: Any, parameter: Tensor) -> None:
        """Count a backward pass of the parameter; send its gradient after the last one."""
        passes = self.backward_passes_per_step
        if parameter in self._flying:
            raise AssertionError(
                f"Gradients of {self._names[parameter]} were computed more than backward_passes_per_step={passes} times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._seen[parameter] += 1
        if self._seen[parameter] == passes:
            self._send(parameter)

    def _send(self: Any, parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self._flying[parameter] = self._reduce(self._names[parameter], parameter.grad)

    def _reduce(self: Any, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """A function that waits for the reduced tensor."""
        if tensor.is_sparse and not self.sparse_as_dense:
            return sparse_allreduce_async(tensor, name, self.op, self.process_set)
        small, ctx = self._compression.compress(tensor.to_dense() if tensor.is_sparse else tensor)
        before, after = 1 / self.gradient_predivide_factor, self.gradient_predivide_factor
        handle = allreduce_async_(small, None, name, self.op, before, after, self.process_set)

        def reduced() -> Tensor:
            dense = self._compression.decompress(synchronize(handle), ctx)
            return dense.to_sparse(tensor.sparse_dim()) if tensor.is_sparse else dense

        return reduced

    def _results(self: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Wait for the reductions in flight. Afterwards, also after an error, a new step begins."""
        try:
            for parameter, reduced in self._flying.items():
                yield parameter, reduced()
        finally:
            self._flying.clear()
            self._seen.clear()
            self._synchronized = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum the gradients of so many backward passes before they travel."""
        self.backward_passes_per_step = passes

    def synchronize(self: Any) -> None:
        """Wait for the ranks' gradients: afterwards `.grad` is the same on all of them."""
        for parameter in self._names if self._active else ():
            if parameter.requires_grad and parameter not in self._flying:
                self._send(parameter)
        for parameter, reduced in self._results():
            if parameter.grad.is_sparse:
                parameter.grad = reduced
            elif reduced is not parameter.grad:
                parameter.grad.copy_(reduced)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not wait."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        def reduced() -> Any:
            loss = closure()  # type: ignore[misc]
            self.synchronize()
            self._synchronized = False
            if not isinstance(loss, Tensor):
                return loss
            return allreduce(loss.detach(), name="closure.loss", process_set=self.process_set)

        if not self._skip:
            if self._synchronized and self._active:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if "
                    "you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            if closure is not None and self._active:
                return super().step(reduced)
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps a step without this mark; the own class's step calls the hooks

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Add a group; its gradients are reduced, too."""
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        for i, parameter in enumerate(self.param_groups[group]["params"]):
            self._names[parameter] = f"allreduce.noname.{group}.{i}"
        self._hook()

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Load the state; schedules made before stay valid. Gradients in flight, of a step that was broken off, are dropped."""
        for parameter in list(self._names) if self._flying else []:
            parameter.grad = None
        with suppress(HorovodInternalError):  # the state that is loaded now repairs the run
            list(self._results())
        load_in_place(self, state_dict, super().load_state_dict)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._flying:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
                "This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)


class _Adasum(_Distributed):
    """Steps alone, and combines the changes of the ranks' steps."""

    def _hook(self) -> None:
        """Register none: no gradient travels before the step."""

    def synchronize(self) -> None:
        """Do nothing, as `_hook`."""

    def skip_synchronize(self) -> Any:
        """Raise AssertionError, as Horovod does."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        before = {p: p.detach().clone() for p in self._names if p.requires_grad}
        loss = super(_Distributed, self).step(closure)
        with torch.no_grad():
            for p, start in before.items():
                self._flying[p] = self._reduce(self._names[p], p - start)
            for p, change in self._results():
                p.copy_(before[p] + change)
        return loss

    step.hooked = True  # type: ignore[attr-defined]


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Root's values in the tensors of `model.state_dict()`, `model.named_parameters()` or an iterable, on every rank, in place."""
    if isinstance(params, torch.nn.Module) or not isinstance(params, Iterable):
        raise ValueError(f"params is a {type(params).__name__}: pass model.state_dict()")
    entries: Iterable[Any] = sorted(params.items()) if isinstance(params, Mapping) else params
    named = [e if isinstance(e, tuple) else (f"parameter.{i}", e) for i, e in enumerate(entries)]
    tensors = [(name, tensor) for name, tensor in named if isinstance(tensor, Tensor) and tensor.numel()]
    for handle in [broadcast_async_(tensor, root_rank, name) for name, tensor in tensors]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Root's state and param groups (learning rates, …), on every rank. No step is made, so no weight moves, and `model` has no effect.

    Raises RefusedError for LBFGS, whose state is not a list of tensors by parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RefusedError("cannot broadcast torch.optim.LBFGS state: start it anew on every rank")
    own = optimizer.state_dict()
    kinds = [leaf.device.type for leaf in leaves(own) if isinstance(leaf, Tensor)]
    said = map_leaves(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, own)
    said, kinds = broadcast_object((said, kinds), root_rank)
    if rank() != root_rank:
        places = iter(kinds)
        own = map_leaves(
            lambda it: torch.empty_like(it, device=next(places)) if isinstance(it, Tensor) else it, said
        )
    broadcast_parameters([(f"state.{i}", leaf) for i, leaf in enumerate(leaves(own))], root_rank)
    if rank() != root_rank:
        load_in_place(optimizer, own, optimizer.load_state_dict)


def load_in_place(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """`load` the state, and keep the objects of param groups and state, which schedules and wrappers made before hold."""
    groups, values = optimizer.param_groups, optimizer.state
    load(state)
    for held, new in zip([*groups, values], [*optimizer.param_groups, optimizer.state]):
        if held is not new:
            held.clear()
            held.update(new)
    optimizer.param_groups, optimizer.state = groups, values


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Root's object, on every rank; the others' objects are ignored."""
    run = running()
    run.members(process_set)
    if root_rank not in process_set.ranks:
        raise ValueError(f"broadcast_object received invalid root rank {root_rank} for {process_set}")
    return run.world.broadcast_objects([obj], root_rank, run.objects.get(process_set))[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The ranks' objects, in rank order, on every rank."""
    return running().world.gather_objects(obj)
