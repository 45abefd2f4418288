"""Where a model is cut into pipeline stages, and the forward of one stage.

One forward with fake tensors (`survey`) records the order in which modules are called, the parameters that each of them uses, and the
tensors that are passed from one to the next. `choose` places the cuts: at `splits`, or so that stages hold equally many parameters.

A stage is a part of the user's own forward (`StageForward`). No model is traced, so train and eval, changing shapes, keyword arguments and
any Python in a forward stay as they are. Before the stage, modules return blank tensors of the right shape instead of running. At the
module where the stage begins, blank arguments become the tensors that the stage before has sent. Where the next one begins, the forward is
left, and the arguments of that module are sent on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


class Cuts(NamedTuple):
    """Names of the modules at whose first call stages 1, 2 … begin, and by name of each parameter and buffer the stages that use it.

    An unused one is in the stage of its neighbour.
    """

    begins: tuple[str, ...]
    users: Mapping[str, tuple[int, ...]]


@contextmanager
def intercepted(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """A context in which calls of these modules go to `calls`, by the attribute in which ``module.compile()`` keeps its function."""
    before = {module: vars(module).pop("_compiled_call_impl", None) for module in calls}
    for module, call in calls.items():
        vars(module)["_compiled_call_impl"] = call
    try:
        yield
    finally:
        for module, own in before.items():
            del vars(module)["_compiled_call_impl"]
            if own is not None:
                vars(module)["_compiled_call_impl"] = own


def call_of(module: nn.Module) -> Callable[..., Any]:
    """The function that a call of `module` runs, compiled or not."""
    compiled: Callable[..., Any] | None = vars(module).get("_compiled_call_impl")
    return compiled or module._call_impl


def candidates(model: nn.Module, splits: Sequence[str]) -> dict[str, nn.Module]:
    """The modules to intercept, by name: `splits`, repeated blocks, and the other children of their parents; no module twice."""
    named = dict(model.named_modules())
    for name in splits:
        if not name or name not in named:
            raise PrepareError(
                f"splits holds {name!r}, and no module of this {type(model).__name__} has that name{nearest(name, named)}"
            )
    blocks = {id(m) for m in find_repeated(model)} | {id(named[name]) for name in splits}
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            inside = any(id(m) in blocks for m in child.modules() if m is not child)
            opened = (inside or isinstance(child, CONTAINERS)) and not isinstance(child, ATOMS)
            if (not opened or prefix + name in splits) and all(child is not m for m in found.values()):
                found[prefix + name] = child
            if opened:
                walk(child, f"{prefix}{name}.")

    walk(model, "")
    return found


def replayed(places: Mapping[str, nn.Module]) -> set[str]:
    """The names of `places` that hold tensors and no other place: a stage skips these, if they are before it."""
    inside = {id(m) for m in places.values()}
    return {
        name
        for name, module in places.items()
        if any(True for _ in (*module.parameters(), *module.buffers()))
        and not any(id(m) in inside for m in module.modules() if m is not module)
    }


def form(leaf: Any) -> Any:
    """A tensor's shape, dtype and requires_grad as a blank tensor without a graph; any other value itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


class Blanks(TorchDispatchMode):
    """While entered, an operation with a blank tensor (or one with an id in `owned`) among its arguments has a blank result."""

    def __init__(self, owned: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._owned = owned

    def blank(self, leaf: Any) -> Any:
        """A tensor's shape, strides and dtype on the meta device. Blank tensors and other values are returned as they are."""
        if not isinstance(leaf, Tensor) or leaf.is_meta:
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    def is_blank(self, tensor: Tensor) -> bool:
        return tensor.is_meta or id(tensor) in self._owned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(map(self.is_blank, given)):
            return func(*args, **kwargs)
        for position, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and not self.is_blank(value):
                raise StepError(
                    f"the model writes in place ({func}) what one stage computes into a tensor of shape {tuple(value.shape)} that it "
                    "made itself: other stages would not see it. Write `x = x + y` in place of `x += y` there, or use another strategy"
                )
        args, kwargs = pytree.tree_map_only(Tensor, self.blank, (args, kwargs))
        return self.run(func, given, args, kwargs)

    def run(self, func: Any, given: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """An operation whose tensors are blank now; `given` are its tensors before."""
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


class Survey(Blanks):
    """Watches one forward. Segment 0 is before the first call of an intercepted module, segment i begins at ``order[i - 1]``.

    Attributes:
        order: names of the modules, as they are first called.
        users: name of a parameter or buffer → the segments that use it.
        torn: segment where no stage can begin → a segment that uses a tensor that is not passed on there.
        crossing: module's name → position and form of each blank tensor among the arguments of its first call.
        results: name and output of each call of a `replayed` module, with forms in place of blank tensors.
        outputs: of the model, likewise.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._fakes, self._device = FakeTensorMode(allow_non_fake_inputs=True), device
        self.names: dict[int, str] = {}  # of blank parameters and buffers, by id
        self.order: list[str] = []
        self.users: dict[str, set[int]] = {}
        self.torn: dict[int, int] = {}
        self.crossing: dict[str, list[tuple[int, Tensor]]] = {}
        self.results: list[tuple[str, Any]] = []
        self.outputs: Any = None
        self._passed: list[set[int]] = [set()]  # a segment: ids of the tensors that are passed to it
        self._born: dict[int, int] = {}  # id of a result → the segment that computed it
        self._kept: list[Any] = []  # so that no id is used twice

    def is_blank(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor)

    def blank(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        with self._fakes:
            device = self._device if leaf.is_meta else leaf.device
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)

    def watched(self, name: str, module: nn.Module, replay: bool) -> Callable[..., Any]:
        """The function that is called in place of `module`."""
        call = call_of(module)

        def through(*args: Any, **kwargs: Any) -> Any:
            if name not in self.crossing:
                self.order.append(name)
                passed = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                self.crossing[name] = [(i, form(t)) for i, t in enumerate(passed) if self.is_blank(t)]
                self._passed.append({id(t) for t in passed})
                self._kept.append(passed)
            if not replay:
                return call(*args, **kwargs)
            outputs = call(*map_leaves(self.blank, args), **map_leaves(self.blank, kwargs))
            forms = map_leaves(lambda leaf: form(leaf) if isinstance(leaf, FakeTensor) else leaf, outputs)
            self.results.append((name, forms))
            return outputs

        return through

    def run(self, func: Any, given: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        results = func(*args, **kwargs)
        now = len(self.order)
        for tensor in given:
            name = self.names.get(id(tensor))
            if name is not None:
                self.users.setdefault(name, set()).add(now)
                continue
            for cut in range(self._born.get(id(tensor), now) + 1, now + 1):
                if id(tensor) not in self._passed[cut]:
                    self.torn.setdefault(cut, now)
        for result in pytree.tree_leaves(results):
            if isinstance(result, Tensor) and id(result) not in self.names:
                self._born.setdefault(id(result), now)
                self._kept.append(result)
        return results


def survey(
    model: nn.Module, called: nn.Module, places: Mapping[str, nn.Module], args: Any, kwargs: Any, device: Any
) -> Survey:
    """Run one forward of `called`, which is `model` or wraps it, with fake tensors. The model does not change."""
    watch, skip = Survey(device), replayed(places)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    blanks = {name: watch.blank(t.detach()).requires_grad_(t.requires_grad) for name, t in state.items()}
    watch.names.update((id(t), name) for name, t in blanks.items())
    calls = {module: watch.watched(name, module, name in skip) for name, module in places.items()}
    prefix = next(name for name, module in called.named_modules() if module is model)
    given = {f"{prefix}.{name}" if prefix else name: t for name, t in blanks.items()}
    try:
        with intercepted(calls), watch:
            outputs = torch.func.functional_call(called, given, args, kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, StepError):
            raise
        said = (str(error).splitlines() or [""])[0]
        raise PrepareError(
            f"the forward of this {type(model).__name__} could not be followed without values ({type(error).__name__}: {said}): strategy "
            "'pipeline' needs a forward that depends on shapes and on its inputs only, not on what it computes. Use another strategy"
        ) from error
    watch.outputs = map_leaves(form, outputs)
    return watch


def balance(weights: Sequence[int], allowed: Sequence[int], stages: int) -> list[int]:
    """`stages` - 1 of the positions `allowed`, in order, nearest to equal shares of `weights`; position i is before ``weights[i]``."""
    before = list(accumulate(weights, initial=0))
    at: list[int] = []
    first = 0
    for stage in range(1, stages):
        share = before[-1] * stage / stages
        free = range(first, len(allowed) - (stages - 1 - stage))
        nearest_one = min(free, key=lambda i: abs(before[allowed[i]] - share))
        at.append(allowed[nearest_one])
        first = nearest_one + 1
    return at


def choose(model: nn.Module, watch: Survey, splits: Sequence[str] | None, stages: int) -> Cuts:
    """Cuts at `splits`, or where they balance the parameters."""
    kind, order = type(model).__name__, watch.order
    possible = [i for i in range(1, len(order) + 1) if i not in watch.torn]
    said = ", ".join(order[i - 1] for i in possible)
    if splits is not None:
        at = []
        for name in splits:
            if name not in order:
                raise PrepareError(
                    f"splits holds {name!r}, but the forward of this {kind} does not call that module"
                )
            at.append(order.index(name) + 1)
            if at[-1] in watch.torn:
                raise PrepareError(
                    f"no stage can begin at {name!r}: something computed before is used at or after "
                    f"{order[watch.torn[at[-1]] - 1]!r} without being passed to {name!r}. Possible: {said}"
                )
        if at != sorted(at):
            called = ", ".join(name for name in order if name in splits)
            raise PrepareError(
                f"splits={tuple(splits)} are not in the order in which forward calls them: {called}"
            )
    elif len(possible) < stages - 1:
        raise PrepareError(
            f"this {kind} would need {stages} stages, but there are {len(possible)} modules at which one can begin"
            f"{': ' + said if possible else ''}. Start fewer processes, use fewer stages_per_rank, or use another strategy"
        )
    else:
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        weights = [0] * (len(order) + 1)
        for name, segments in watch.users.items():
            weights[min(segments)] += sizes.get(name, 0)
        at = balance(weights, possible, stages)
    users: dict[str, tuple[int, ...]] = {}
    for tensors in (model.named_parameters(), model.named_buffers()):
        neighbour: tuple[int, ...] = (0,)
        for name, _ in tensors:
            found = {sum(segment >= cut for cut in at) for segment in watch.users.get(name, ())}
            users[name] = tuple(sorted(found)) or neighbour
            neighbour = users[name][-1:]
    return Cuts(tuple(order[i - 1] for i in at), users)


# -- one stage ---------------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """One batch in micro-batches.

    Attributes:
        parts, rows, surveys: of each micro-batch: args, kwargs and target; its samples; its survey.
        begins: names of the modules at whose first call stages begin.
        trains: whether gradients are wanted.
        returns_all: gradients come back for all floating-point tensors: zero bubble needs them to find the parameters of a stage.
        seed: of the stages' random numbers.
        loss_fn: called by the last stage; None: the outputs are kept.
        summed: losses of micro-batches are sums, and so is the batch's; else means.
        factor: multiplies the loss before backward.
        total, outputs: the batch's loss, and the model's output of each micro-batch, on the last stage's rank.
        error: what a stage of this rank raised. It is kept until all ranks have finished the batch, so that none waits in vain.
    """

    parts: list[Any]
    rows: list[int]
    surveys: list[Survey]
    begins: tuple[str, ...]
    trains: bool
    returns_all: bool
    seed: int
    loss_fn: Callable[..., Any] | None = None
    summed: bool = False
    factor: Any = None
    total: Any = None
    outputs: dict[int, Any] = field(default_factory=dict)
    error: Exception | None = None

    def crossing(self, chunk: int, stage: int) -> list[tuple[int, Tensor]]:
        """Position and form of each tensor that `stage` receives from the one before."""
        if not 0 < stage <= len(self.begins):
            return []
        return self.surveys[chunk].crossing[self.begins[stage - 1]]

    def returns(self, form: Tensor) -> bool:
        """Whether a gradient comes back for a tensor of that form."""
        floating = form.is_floating_point() or form.is_complex()
        return self.trains and floating and (form.requires_grad or self.returns_all)

    def ended(self, chunk: int, outputs: Any) -> Any:
        """The output of the last stage's submodule: a loss to run backward on, or the tensors of the model's output."""
        if self.loss_fn is None:
            self.outputs[chunk] = outputs
            return tuple(leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor))
        target = self.parts[chunk][2]
        loss = self.loss_fn(outputs) if target is None else self.loss_fn(outputs, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise StepError(f"loss_fn returned a value of {what}: return one number, the mean over the batch")
        if not self.summed:
            loss = loss * (self.rows[chunk] / sum(self.rows))
        self.total += loss.detach().reshape(())
        return loss.reshape(()) * self.factor


class Departure(BaseException):
    """Leaves the model's forward where the next stage begins. A BaseException passes through the model's own ``except Exception``."""


class StageForward(nn.Module):
    """Calls the part of a model that is stage `index`; the submodule of torch's stage. `module` calls the user's `root`."""

    def __init__(
        self, module: nn.Module, root: nn.Module, cuts: Cuts, places: Mapping[str, nn.Module], index: int
    ) -> None:
        super().__init__()
        self.index, self.last, self.names = index, len(cuts.begins), cuts.begins
        self._module = (module,)  # a tuple, so that it is not registered
        self._own = tuple(p for name, p in root.named_parameters() if index in cuts.users[name])
        self._everything = frozenset(id(t) for t in (*root.parameters(), *root.buffers()))
        skip = replayed(places)
        self._calls = {m: self._intercept(name, call_of(m), name in skip) for name, m in places.items()}
        self.now: tuple[Batch, int] | None = None  # the batch and the number of its micro-batch
        self._blanks: Blanks | None = None
        self._at = 0  # the stage that the running forward has reached
        self._received: Sequence[Tensor] = ()
        self._positions: Sequence[int] = ()
        self._results: Iterator[tuple[str, Any]] = iter(())

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._own)

    @property
    def where(self) -> str:
        begins = f"begins at {self.names[self.index - 1]!r}" if self.index else "is the first"
        return f"stage {self.index} of {self.last + 1} ({begins})"

    def forward(self, *received: Tensor) -> Any:
        """The micro-batch `now`: the tensors for the next stage, or what the batch makes of the model's output."""
        assert self.now is not None
        batch, chunk = self.now
        if batch.error is None:
            try:
                return self._stage(received, batch, chunk)
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

    def _stage(self, received: Sequence[Tensor], batch: Batch, chunk: int) -> Any:
        self._received = [t.clone() if t.requires_grad else t for t in received]  # a model may write to them
        self._positions = [i for i, _ in batch.crossing(chunk, self.index)]
        self._results = iter(batch.surveys[chunk].results)
        try:
            ended, result = self._run(*batch.parts[chunk][:2])
        finally:
            self._received, self._results = (), iter(())
        if ended:
            return batch.ended(chunk, result)
        tensors = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        sent = []
        for i, expected in batch.crossing(chunk, self.index + 1):
            tensor = tensors[i] if i < len(tensors) else None
            if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                got = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise StepError(
                    f"{self.where} passes on {got}, and a forward without values passed on {tuple(expected.shape)} {expected.dtype}: "
                    "strategy 'pipeline' needs shapes that follow from the inputs' shapes"
                )
            # torch cuts the graph at these tensors in place, which views and leaves do not allow.
            sent.append(tensor.clone() if tensor._is_view() or tensor.is_leaf else tensor)
        return tuple(sent)

    def _run(self, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Whether the forward ended in this stage, and the model's output; else the arguments for the next stage."""
        self._at = 0
        if self.index:
            self._blanks = Blanks(self._everything)
            self._blanks.__enter__()
        try:
            with intercepted(self._calls):
                outputs = self._module[0](*args, **kwargs)
        except Departure as departure:
            return False, departure.args
        except (RuntimeError, TypeError, ValueError) as error:
            if not isinstance(error, EasympError):
                error.add_note(
                    f"in {self.where}: only what is passed to the module at which a stage begins, and what follows from the model's inputs "
                    "alone, has values there"
                )
            raise
        finally:
            self._leave_blanks()
        if self._at != self.last:
            raise StepError(
                f"the forward ended in {self.where} before it called {self.names[self._at]!r}, where the next stage begins"
            )
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves(outputs)):
            raise StepError(
                f"an output is computed before {self.names[-1]!r} and not passed to the last stage: split elsewhere, or return less"
            )
        return True, outputs

    def _leave_blanks(self) -> None:
        if self._blanks is not None:
            blanks, self._blanks = self._blanks, None
            blanks.__exit__(None, None, None)

    def _intercept(self, name: str, call: Callable[..., Any], replay: bool) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            if self._at < self.last and name == self.names[self._at]:
                self._at += 1
                if self._at == self.index:
                    args, kwargs = self._begin((args, kwargs))
                elif self._at > self.index:
                    raise Departure(args, kwargs)
            return self._replay(name) if replay and self._at < self.index else call(*args, **kwargs)

        return through

    def _replay(self, name: str) -> Any:
        """The output of a module of an earlier stage, blank."""
        called, output = next(self._results, ("nothing", None))
        if called != name:
            raise StepError(
                f"the forward calls {name!r} in {self.where}, where a forward without values called {called!r}: strategy 'pipeline' "
                "needs a course that follows from the inputs' shapes"
            )
        return map_leaves(lambda t: torch.empty_like(t) if isinstance(t, Tensor) and t.is_meta else t, output)

    def _begin(self, values: Any) -> Any:
        """`values`, the arguments with which the stage begins, with the received tensors in place."""
        if _get_current_dispatch_mode() is self._blanks:  # else a mode of the model's lies above: ours stays
            self._leave_blanks()
        torch.clear_autocast_cache()  # it may hold blank copies of parameters that this stage shares with an earlier one
        tensors = [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]
        if any(t.is_meta for i, t in enumerate(tensors) if i not in self._positions):
            raise StepError(
                f"{self.where} begins with a tensor that a forward without values did not pass there: strategy 'pipeline' needs a course "
                "that follows from the inputs' shapes"
            )
        if any(t.requires_grad for t in self._received) and not torch.is_grad_enabled():
            raise StepError(
                "a stage begins inside no_grad, and what comes before needs gradients: split elsewhere (checkpoint: use_reentrant=False)"
            )
        for i, new in zip(self._positions, self._received, strict=True):
            try:
                torch.utils.swap_tensors(tensors[i], new)  # so that the model's other references have it, too
            except RuntimeError as error:
                raise StepError(
                    f"{self.where} cannot have the values that it begins with, for something else keeps what is passed there: a view of "
                    "it, or a checkpoint around that module. Put checkpoints inside of modules, or split elsewhere"
                ) from error
        return values
