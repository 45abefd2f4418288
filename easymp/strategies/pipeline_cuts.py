"""Where a model is cut into pipeline stages, and the forward of one stage.

One forward with fake tensors (`survey`) records the order in which modules are called, the parameters that each of them
uses, and the tensors that are passed from one to the next. `choose` places the cuts.

A stage is a part of the user's own forward (`StageForward`), which is not traced: any Python in it stays as it is.
Before the stage, modules return blank tensors of the right shape instead of running. Where it begins, blank arguments
become the tensors that the stage before has sent. Where the next one begins, the forward is left, and the arguments of
that module are sent on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ..base.pytree import leaves, map_leaves
from ..errors import EasympError, PrepareError, StepError, nearest
from .blocks import ATOMS, CONTAINERS, find_repeated
from .transforms import is_recomputed

SAME_COURSE = "strategy 'pipeline' needs a forward whose course and shapes follow from the shapes of its inputs"


class Cuts(NamedTuple):
    """The modules at which stages begin, and the stages that use each parameter or buffer."""

    begins: tuple[str, ...]  # names of the modules at whose first call stages 1, 2 … begin
    users: Mapping[str, tuple[int, ...]]  # parameter or buffer → stages that use it; an unused one: its neighbour's


@contextmanager
def intercepted(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """A context in which calls of these modules go to `calls`, by the attribute that ``module.compile()`` sets."""
    compiled = {module: vars(module).get("_compiled_call_impl") for module in calls}
    for module, call in calls.items():
        vars(module)["_compiled_call_impl"] = call
    try:
        yield
    finally:
        for module, call_before in compiled.items():
            del vars(module)["_compiled_call_impl"]
            if call_before is not None:
                vars(module)["_compiled_call_impl"] = call_before


def call_of(module: nn.Module) -> Callable[..., Any]:
    """The function that a call of `module` runs, compiled or not."""
    compiled: Callable[..., Any] | None = vars(module).get("_compiled_call_impl")
    return compiled or module._call_impl


def candidates(model: nn.Module, splits: Sequence[str]) -> dict[str, nn.Module]:
    """Modules at which stages can begin, by name: `splits`, repeated blocks, and other children of their parents."""
    modules = dict(model.named_modules())
    for split in splits:
        if not split or split not in modules:
            kind = type(model).__name__
            raise PrepareError(
                f"splits holds {split!r}, and no module of this {kind} has that name{nearest(split, modules)}"
            )
        for name, module in modules.items():
            if is_recomputed(module) and split.startswith(f"{name}."):
                raise PrepareError(
                    f"splits holds {split!r} inside of {name!r}, which activation_checkpointing computes again as a "
                    f"whole: split at {name!r}, or name other modules in activation_checkpointing"
                )
    blocks = {id(m) for m in find_repeated(model)} | {id(modules[name]) for name in splits}
    modules_by_name: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            opened = isinstance(child, CONTAINERS) or any(id(m) in blocks for m in child.modules() if m is not child)
            opened = opened and not isinstance(child, ATOMS) and not is_recomputed(child)
            if (not opened or prefix + name in splits) and all(child is not m for m in modules_by_name.values()):
                modules_by_name[prefix + name] = child
            if opened:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return modules_by_name


def replayed(candidates: Mapping[str, nn.Module]) -> set[str]:
    """Names of candidates with tensors and without other candidates inside: stages after them return blank results."""
    ids = {id(m) for m in candidates.values()}
    return {
        name
        for name, module in candidates.items()
        if any(True for _ in (*module.parameters(), *module.buffers()))
        and not any(id(m) in ids for m in module.modules() if m is not module)
    }


def form(leaf: Any) -> Any:
    """A tensor's shape, dtype and requires_grad as a blank tensor without a graph; any other value itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


class Blanks(TorchDispatchMode):
    """While entered, operations with a blank tensor, or one with an id in `blank_ids`, have a blank result."""

    def __init__(self, blank_ids: frozenset[int] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._blank_ids = blank_ids

    def blank(self, leaf: Any) -> Any:
        """A tensor's shape, strides and dtype without values. Blank tensors and other leaves stay as they are."""
        if not isinstance(leaf, Tensor) or leaf.is_meta:
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    def is_blank(self, tensor: Tensor) -> bool:
        return tensor.is_meta or id(tensor) in self._blank_ids

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(map(self.is_blank, tensors)):
            return func(*args, **kwargs)
        for position, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Tensor) and not self.is_blank(value):
                raise StepError(
                    f"the model writes in place ({func}) what one stage computes into a tensor of shape "
                    f"{tuple(value.shape)} of another stage. Write `x = x + y` there in place of `x += y`"
                )
        args, kwargs = pytree.tree_map_only(Tensor, self.blank, (args, kwargs))
        return self.run(func, tensors, args, kwargs)

    def run(self, func: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """Run an operation whose arguments are blank now; `tensors` are those before."""
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


class Survey(Blanks):
    """Watches one forward. Segment 0 is before the first call of a candidate, segment i begins at ``order[i - 1]``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._fakes, self._device = FakeTensorMode(allow_non_fake_inputs=True), device
        self.names: dict[int, str] = {}  # of blank parameters and buffers, by id
        self.order: list[str] = []  # candidates, as they are first called
        self.users: dict[str, set[int]] = {}  # parameter or buffer → the segments that use it
        self.torn: dict[int, int] = {}  # where no stage can begin → a segment that uses what is not passed on there
        # Candidate → position and form of each blank tensor among the arguments of its first call.
        self.crossing: dict[str, list[tuple[int, Tensor]]] = {}
        self.results: list[tuple[str, Any]] = []  # of calls of `replayed` candidates, with forms for blank tensors
        self.outputs: Any = None  # of the model, likewise
        self._passed_ids: list[set[int]] = [set()]  # by segment: ids of the tensors that are passed to it
        self._computed_in: dict[int, int] = {}  # id of a result → its segment
        self._alive: list[Any] = []  # so that no id is used twice

    def is_blank(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor)

    def blank(self, leaf: Any) -> Any:
        return self.blank_on(leaf.device, leaf) if isinstance(leaf, Tensor) else leaf

    def blank_on(self, device: torch.device, leaf: Tensor) -> Tensor:
        """A tensor of the same form without values, on `device`, or on the run's where that has no values either."""
        if self.is_blank(leaf):
            return leaf
        device = self._device if device.type == "meta" else device
        with self._fakes:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)

    def watch(self, name: str, module: nn.Module, replay: bool) -> Callable[..., Any]:
        """The function that is called in place of a candidate."""
        call = call_of(module)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if name not in self.crossing:
                self.order.append(name)
                tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                self.crossing[name] = [(i, form(t)) for i, t in enumerate(tensors) if self.is_blank(t)]
                self._passed_ids.append(set(map(id, tensors)))
                self._alive.append(tensors)
            if not replay:
                return call(*args, **kwargs)
            outputs = call(*map_leaves(self.blank, args), **map_leaves(self.blank, kwargs))
            forms = map_leaves(lambda leaf: form(leaf) if isinstance(leaf, FakeTensor) else leaf, outputs)
            self.results.append((name, forms))
            return outputs

        return watched

    def run(self, func: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        results = func(*args, **kwargs)
        segment = len(self.order)
        for tensor in tensors:
            if id(tensor) in self.names:
                self.users.setdefault(self.names[id(tensor)], set()).add(segment)
                continue
            for cut in range(self._computed_in.get(id(tensor), segment) + 1, segment + 1):
                if id(tensor) not in self._passed_ids[cut]:
                    self.torn.setdefault(cut, segment)
        for result in pytree.tree_leaves(results):
            if isinstance(result, Tensor) and id(result) not in self.names:
                self._computed_in.setdefault(id(result), segment)
                self._alive.append(result)
        return results


def survey(
    model: nn.Module, wrapper: nn.Module, candidates: Mapping[str, nn.Module], args: Any, kwargs: Any, device: Any
) -> Survey:
    """Run one forward of `called`, which is `model` or wraps it, with fake tensors. The model does not change."""
    watcher, skipped = Survey(device), replayed(candidates)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # The stages' tensors move to the device when the model is cut.
    blanks = {name: watcher.blank_on(device, t.detach()).requires_grad_(t.requires_grad) for name, t in tensors.items()}
    watcher.names.update((id(t), name) for name, t in blanks.items())
    calls = {module: watcher.watch(name, module, name in skipped) for name, module in candidates.items()}
    prefix = next(name for name, module in wrapper.named_modules() if module is model)
    state = {f"{prefix}.{name}" if prefix else name: t for name, t in blanks.items()}
    try:
        with intercepted(calls), watcher:
            outputs = torch.func.functional_call(wrapper, state, args, kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, StepError):
            raise
        raise PrepareError(
            f"the forward of this {type(model).__name__} could not be followed without values ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}): {SAME_COURSE}. Use another strategy"
        ) from error
    watcher.outputs = map_leaves(form, outputs)
    return watcher


def balance(weights: Sequence[int], allowed: Sequence[int], stages: int) -> list[int]:
    """Choose `stages` - 1 of the positions `allowed`, nearest to equal shares of `weights`; 1 is after the first."""
    sums = list(accumulate(weights, initial=0))
    cuts: list[int] = []
    first = 0
    for stage in range(1, stages):
        share = sums[-1] * stage / stages
        free = range(first, len(allowed) - (stages - 1 - stage))
        index = min(free, key=lambda i: abs(sums[allowed[i]] - share))
        cuts.append(allowed[index])
        first = index + 1
    return cuts


def choose(model: nn.Module, watcher: Survey, splits: Sequence[str] | None, stages: int) -> Cuts:
    """Cuts at `splits`, or where they balance the parameters."""
    kind, order = type(model).__name__, watcher.order
    possible = [i for i in range(1, len(order) + 1) if i not in watcher.torn]
    names = ", ".join(order[i - 1] for i in possible)
    if splits is None:
        if len(possible) < stages - 1:
            raise PrepareError(
                f"this {kind} would need {stages} stages, but there are {len(possible)} modules at which one can "
                f"begin{': ' + names if possible else ''}. Start fewer processes, use fewer stages_per_rank, or use "
                "another strategy"
            )
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        weights = [0] * (len(order) + 1)
        for name, segments in watcher.users.items():
            weights[min(segments)] += sizes.get(name, 0)
        cuts = balance(weights, possible, stages)
    else:
        for name in splits:
            if name not in order:
                raise PrepareError(f"splits holds {name!r}, but the forward of this {kind} does not call that module")
            segment = watcher.torn.get(order.index(name) + 1)
            if segment is not None:
                raise PrepareError(
                    f"no stage can begin at {name!r}: something computed before is used at or after "
                    f"{order[segment - 1]!r} without being passed to {name!r}. Possible: {names}"
                )
        cuts = [order.index(name) + 1 for name in splits]
        if cuts != sorted(cuts):
            call_order = ", ".join(name for name in order if name in splits)
            raise PrepareError(f"splits={tuple(splits)} are not in the order in which forward calls them: {call_order}")
    users: dict[str, tuple[int, ...]] = {}
    for tensors in (model.named_parameters(), model.named_buffers()):
        neighbour: tuple[int, ...] = (0,)
        for name, _ in tensors:
            using = {sum(segment >= cut for cut in cuts) for segment in watcher.users.get(name, ())}
            users[name] = tuple(sorted(using)) or neighbour
            neighbour = users[name][-1:]
    return Cuts(tuple(order[i - 1] for i in cuts), users)


# -- one stage ---------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """One batch in micro-batches."""

    parts: list[Any]  # args, kwargs and target of each micro-batch
    rows: list[int]  # samples of each
    surveys: list[Survey]
    begins: tuple[str, ...]  # as in `Cuts`
    trains: bool
    returns_all: bool  # gradients come back for all floating-point tensors, by which zero bubble finds parameters
    seed: int  # of the stages' random numbers
    loss_fn: Callable[..., Any] | None = None  # called by the last stage; None: the outputs are kept
    summed: bool = False  # losses of micro-batches are sums, not means
    factor: Any = None  # of the loss, before backward
    total: Any = None  # the batch's loss, on the last stage's rank
    outputs: dict[int, Any] = field(default_factory=dict)  # by micro-batch, on the last stage's rank
    error: Exception | None = None  # kept until all ranks have finished the batch, so that none waits in vain

    def crossing(self, chunk: int, stage: int) -> list[tuple[int, Tensor]]:
        """Position and form of each tensor that `stage` receives from the one before."""
        if not 0 < stage <= len(self.begins):
            return []
        return self.surveys[chunk].crossing[self.begins[stage - 1]]

    def returns(self, form: Tensor) -> bool:
        """Whether a gradient comes back for a tensor of that form."""
        floating = form.is_floating_point() or form.is_complex()
        return self.trains and floating and (form.requires_grad or self.returns_all)

    def finish(self, chunk: int, outputs: Any) -> Any:
        """The result of the last stage: a loss to run backward on, or the tensors of the model's output."""
        if self.loss_fn is None:
            self.outputs[chunk] = outputs
            return tuple(leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor))
        target = self.parts[chunk][2]
        loss = self.loss_fn(outputs) if target is None else self.loss_fn(outputs, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise StepError(f"loss_fn returned a value of {kind}: return one number, the mean over the batch")
        if not self.summed:
            loss = loss * (self.rows[chunk] / sum(self.rows))
        self.total += loss.detach().reshape(())
        return loss.reshape(()) * self.factor


class Departure(BaseException):
    """Leaves the model's forward where the next stage begins, past an ``except Exception`` of the model."""


class StageForward(nn.Module):
    """Module of torch's stage number `index`. It runs that part of the user's model `root`, by way of `module`."""

    def __init__(
        self, module: nn.Module, root: nn.Module, cuts: Cuts, candidates: Mapping[str, nn.Module], index: int
    ) -> None:
        super().__init__()
        self.index, self.last, self.begins = index, len(cuts.begins), cuts.begins
        begins = f"begins at {self.begins[index - 1]!r}" if index else "is the first"
        self.label = f"stage {index} of {self.last + 1} ({begins})"
        self.current: Any = None  # the batch and the number of its micro-batch
        self._module = (module,)  # a tuple, so that it is not registered
        self._parameters_used = tuple(p for name, p in root.named_parameters() if index in cuts.users[name])
        skipped = replayed(candidates)
        self._calls = {m: self._intercept(name, call_of(m), name in skipped) for name, m in candidates.items()}
        self._blanks = Blanks(frozenset(id(t) for t in (*root.parameters(), *root.buffers())))
        self._blanking = ExitStack()  # of the running forward, until the stage begins
        self._stage = 0  # that the running forward has reached
        self._received: Sequence[Tensor] = ()
        self._positions: Sequence[int] = ()
        self._results: Iterator[tuple[str, Any]] = iter(())

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._parameters_used)

    def forward(self, *received: Tensor) -> Any:
        """Compute micro-batch `current`: tensors for the next stage, or on the last stage the batch's result."""
        batch, chunk = self.current
        if batch.error is None:
            try:
                return self._compute(received, batch, chunk)
            except Exception as error:
                # One rank alone is out of memory: its retry (`find_executable_batch_size`) ends the others' wait.
                if batch.loss_fn is None or isinstance(error, MemoryError) or "memory" in str(error).lower():
                    raise
                batch.error = error
        # Zeros that depend on what was received, because a split backward of torch 2.8 looks for a way there.
        zero = torch.zeros((), device=batch.factor.device, requires_grad=True)
        zero = sum((t.abs().sum() * 0 for t in received if t.requires_grad), zero)
        if self.index == self.last:
            return zero
        forms = [f for _, f in batch.crossing(chunk, self.index + 1)]
        zeros = [zero.to(f.dtype).expand(f.shape).clone() for f in forms]
        return tuple(z if batch.returns(f) else z.detach() for z, f in zip(zeros, forms))

    def _compute(self, received: Sequence[Tensor], batch: Batch, chunk: int) -> Any:
        self._received = [t.clone() if t.requires_grad else t for t in received]  # a model may write to them
        self._positions = [i for i, _ in batch.crossing(chunk, self.index)]
        self._results = iter(batch.surveys[chunk].results)
        try:
            outputs = self._run(*batch.parts[chunk][:2])
        except Departure as departure:
            tensors = [leaf for leaf in leaves(departure.args) if isinstance(leaf, Tensor)]
        else:
            return batch.finish(chunk, outputs)
        finally:
            self._received, self._results = (), iter(())
        sent = []
        for i, expected in batch.crossing(chunk, self.index + 1):
            if i >= len(tensors) or tensors[i].shape != expected.shape or tensors[i].dtype != expected.dtype:
                actual = f"{tuple(tensors[i].shape)} {tensors[i].dtype}" if i < len(tensors) else "nothing"
                surveyed = f"without values {tuple(expected.shape)} {expected.dtype}"
                raise StepError(f"{self.label} passes on {actual}, and {surveyed}: {SAME_COURSE}")
            # torch cuts the graph at these tensors in place, which views and leaves do not allow.
            tensor = tensors[i]
            sent.append(tensor.clone() if tensor._is_view() or tensor.is_leaf else tensor)
        return tuple(sent)

    def _run(self, args: Any, kwargs: Any) -> Any:
        """The model's output, where its forward ends in this stage."""
        self._stage = 0
        try:
            with intercepted(self._calls), self._blanking:
                if self.index:
                    self._blanking.enter_context(self._blanks)
                outputs = self._module[0](*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            if not isinstance(error, EasympError):
                error.add_note(
                    f"in {self.label}: only what is passed to the module at which a stage begins, and what follows "
                    "from the model's inputs alone, has values there"
                )
            raise
        if self._stage != self.last:
            raise StepError(f"the forward ended in {self.label} before {self.begins[self._stage]!r}: {SAME_COURSE}")
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves(outputs)):
            subject = f"an output is computed before {self.begins[-1]!r}"
            raise StepError(f"{subject} and not passed to the last stage: split elsewhere, or return less")
        return outputs

    def _intercept(self, name: str, call: Callable[..., Any], replay: bool) -> Callable[..., Any]:
        def intercept(*args: Any, **kwargs: Any) -> Any:
            if self._stage < self.last and name == self.begins[self._stage]:
                self._stage += 1
                if self._stage == self.index:
                    self._begin([leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)])
                elif self._stage > self.index:
                    raise Departure(args, kwargs)
            return self._replay(name) if replay and self._stage < self.index else call(*args, **kwargs)

        return intercept

    def _replay(self, name: str) -> Any:
        """The output of a module of an earlier stage, blank."""
        expected, output = next(self._results, ("nothing", None))
        if expected != name:
            raise StepError(f"{self.label} calls {name!r}, and without values {expected!r}: {SAME_COURSE}")
        return map_leaves(lambda t: torch.empty_like(t) if isinstance(t, Tensor) and t.is_meta else t, output)

    def _begin(self, arguments: Sequence[Tensor]) -> None:
        """Begin the stage: put the received tensors into the tensor arguments of the module where it begins."""
        if _get_current_dispatch_mode() is self._blanks:  # else a mode of the model's lies above: ours stays
            self._blanking.close()
        # It may hold blank copies of parameters that this stage shares with an earlier one.
        torch.clear_autocast_cache()
        if any(t.is_meta for i, t in enumerate(arguments) if i not in self._positions):
            raise StepError(f"{self.label} begins with a tensor that was not passed there: {SAME_COURSE}")
        if any(t.requires_grad for t in self._received) and not torch.is_grad_enabled():
            raise StepError(
                "a stage begins inside no_grad, and what comes before needs gradients: split elsewhere (checkpoint: "
                "use_reentrant=False)"
            )
        for i, tensor in zip(self._positions, self._received, strict=True):
            try:
                torch.utils.swap_tensors(arguments[i], tensor)  # so that the model's other references have it, too
            except RuntimeError as error:
                raise StepError(
                    f"{self.label} cannot have the values that it begins with, for something else keeps what is passed "
                    "there: a view, or a checkpoint around that module. Put checkpoints inside of modules, or split "
                    "elsewhere"
                ) from error
