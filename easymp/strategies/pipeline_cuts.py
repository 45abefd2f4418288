"""Where a model is cut into pipeline stages, and what crosses each cut: found by one forward without values.

The model's forward runs on torch's fake tensors, which have shapes and dtypes only, those of autocast included. It shows in which order
modules are called, between which calls each parameter is used, and which values cross from one such segment into a later one. A stage
may begin at a module if all that crosses goes through that module's arguments; among those places, cuts balance the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..base.pytree import leaves, map_leaves
from ..errors import PrepareError, StepError, nearest
from .blocks import ATOMS, CONTAINERS, find_repeated


class Cuts(NamedTuple):
    """A model in stages.

    Attributes:
        begins: names of the modules at whose first call stages 1, 2 … begin.
        users: name of each parameter and buffer → the stages that use it, in order; one that nothing uses lies with its neighbour.
    """

    begins: tuple[str, ...]
    users: Mapping[str, tuple[int, ...]]


# -- calls of modules, intercepted -------------------------------------------------------------------------------------


@contextmanager
def intercepted(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside, calls of these modules go to `calls`.

    Through the place where ``module.compile()`` keeps its function, which torch asks before hooks and forward.
    """
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
    """What a call of `module` runs, compiled or not."""
    compiled: Callable[..., Any] | None = vars(module).get("_compiled_call_impl")
    return compiled or module._call_impl


# -- values that are not here ------------------------------------------------------------------------------------------


def blank(leaf: Any) -> Any:
    """A tensor's shape and dtype on the meta device; a blank tensor, or anything else, itself."""
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def form(leaf: Any) -> Any:
    """A tensor's shape, dtype and whether it requires a gradient, as a blank tensor without a graph; anything else itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


class Blanks(TorchDispatchMode):
    """While entered, an operation on a blank tensor has a blank result, whatever else it is given.

    Args:
        owned: ids of tensors that count as blank.
    """

    def __init__(self, owned: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._owned = owned

    def blank(self, leaf: Any) -> Any:
        return blank(leaf)

    def is_blank(self, tensor: Tensor) -> bool:
        return tensor.is_meta or id(tensor) in self._owned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(map(self.is_blank, given)):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._refuse_overwriting(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, self.blank, (args, kwargs))
        return self.run(func, given, args, kwargs)

    def run(self, func: Any, given: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        """An operation on blank tensors, of which `given` had values or not."""
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)

    def _refuse_overwriting(self, func: Any, args: Any, kwargs: Any) -> None:
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and not self.is_blank(value):
                raise StepError(
                    f"the model writes in place ({func}) what one stage computes into a tensor of shape {tuple(value.shape)} that it "
                    "made itself: other stages would not see it. Write `x = x + y` in place of `x += y` there, or use another strategy"
                )


# -- the survey --------------------------------------------------------------------------------------------------------


def candidates(model: nn.Module, splits: Sequence[str]) -> dict[str, nn.Module]:
    """Modules whose calls are watched, by name: `splits`, children, repeated blocks instead of what holds them, no module twice.

    Raises:
        PrepareError: a name in `splits` that no module has, or of one that cannot be called.
    """
    named = dict(model.named_modules())
    named.pop("", None)
    for name in splits:
        if name not in named:
            raise PrepareError(
                f"splits holds {name!r}, and no module of this {type(model).__name__} has that name{nearest(name, named)}"
            )
        if type(named[name]) in (nn.ModuleList, nn.ModuleDict):
            raise PrepareError(
                f"splits holds {name!r}, a {type(named[name]).__name__}, which is never called: name a module inside of it"
            )
    held = {id(m) for m in find_repeated(model)} | {id(named[name]) for name in splits}
    opened = {id(model)}
    for module in named.values():
        inside = any(id(m) in held for m in module.modules() if m is not module)
        if (inside or isinstance(module, CONTAINERS)) and not isinstance(module, ATOMS):
            opened.add(id(module))
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if id(child) not in opened or path in splits:
                found.setdefault(path, child)
            if id(child) in opened:
                walk(child, f"{path}.")

    walk(model, "")
    return found


class Survey(Blanks):
    """Watches one forward: segments between first calls of modules, and who uses what.

    Segment 0 is before the first such call, segment i begins at ``order[i - 1]``.

    Attributes:
        order: names of the modules, as they are first called.
        users: name of a parameter or buffer → the segments that use it.
        torn: segment at which no stage can begin → a segment that uses what is not passed there.
        crossing: module's name → position and form of each blank tensor among the arguments of its first call.
        outputs: the model's, with forms in place of blank tensors.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.names: dict[int, str] = {}  # of blank parameters and buffers, by id
        self._fakes, self._device = FakeTensorMode(allow_non_fake_inputs=True), device
        self.order: list[str] = []
        self.users: dict[str, set[int]] = {}
        self.torn: dict[int, int] = {}
        self.crossing: dict[str, list[tuple[int, Tensor]]] = {}
        self.outputs: Any = None
        self._passed: list[set[int]] = [set()]  # a segment: ids of the tensors that it begins with
        self._born: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    def is_blank(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor)

    def blank(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        device = self._device if leaf.is_meta else leaf.device
        with self._fakes:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)

    def watched(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """What is called in place of `module`."""
        call, holds = call_of(module), holds_tensors(module)

        def through(*args: Any, **kwargs: Any) -> Any:
            if name not in self.crossing:
                self.order.append(name)
                passed = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                self.crossing[name] = [(i, form(t)) for i, t in enumerate(passed) if self.is_blank(t)]
                self._passed.append({id(t) for t in passed})
                self._kept.append(passed)
            if holds:
                args, kwargs = map_leaves(self.blank, args), map_leaves(self.blank, kwargs)
            return call(*args, **kwargs)

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


def holds_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def survey(
    model: nn.Module,
    called: nn.Module,
    places: Mapping[str, nn.Module],
    args: Any,
    kwargs: Any,
    device: torch.device,
) -> Survey:
    """One forward of `called`, which is `model` or wraps it, without values. Nothing in the model changes.

    Raises:
        PrepareError: a forward that needs values.
    """
    watch = Survey(device)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    blanks = {name: watch.blank(t.detach()).requires_grad_(t.requires_grad) for name, t in state.items()}
    watch.names.update((id(t), name) for name, t in blanks.items())
    calls = {module: watch.watched(name, module) for name, module in places.items()}
    prefix = next(name for name, module in called.named_modules() if module is model)
    dotted = f"{prefix}." if prefix else ""
    try:
        with intercepted(calls), watch:
            outputs = torch.func.functional_call(
                called, {f"{dotted}{name}": t for name, t in blanks.items()}, args, kwargs
            )
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, StepError):
            raise
        said = (str(error).splitlines() or [""])[0]
        raise PrepareError(
            f"the forward of this {type(model).__name__} could not be followed without values ({type(error).__name__}: {said}): "
            "strategy 'pipeline' needs one whose course depends on shapes and on its inputs only, not on what it computes. Use another "
            "strategy"
        ) from error
    watch.outputs = map_leaves(form, outputs)
    return watch


# -- the choice --------------------------------------------------------------------------------------------------------


def balance(weights: Sequence[int], allowed: Sequence[int], stages: int) -> list[int]:
    """`stages` - 1 of the positions `allowed`, in order, that cut `weights` into the most even parts (least sum of squares).

    A cut at i lies before ``weights[i]``.
    """
    before = [0]
    for weight in weights:
        before.append(before[-1] + weight)
    ends = [*allowed, len(weights)]
    # Of the first k parts, where the last one ends at ends[j]: the cost, and the cuts.
    best: list[tuple[int, list[int]]] = [(before[end] ** 2, []) for end in ends]
    for part in range(1, stages):
        best = [
            min(
                (
                    (best[j][0] + (before[end] - before[ends[j]]) ** 2, [*best[j][1], ends[j]])
                    for j in range(part - 1, k)
                ),
                key=lambda cost_and_cuts: cost_and_cuts[0],
                default=(1 << 200, []),
            )
            for k, end in enumerate(ends)
        ]
    return best[-1][1]


def choose(model: nn.Module, watch: Survey, splits: Sequence[str] | None, stages: int) -> Cuts:
    """Cuts at `splits`, or where they balance the parameters.

    Raises:
        PrepareError: stages cannot begin there, or nowhere.
    """
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
                user = order[watch.torn[at[-1]] - 1]
                raise PrepareError(
                    f"no stage can begin at {name!r}: something computed before is used at or after {user!r} without being passed to "
                    f"{name!r}. Possible: {said}"
                )
        if at != sorted(at):
            called = ", ".join(name for name in order if name in splits)
            raise PrepareError(
                f"splits={tuple(splits)} are not in the order in which forward calls them: {called}"
            )
    else:
        if len(possible) < stages - 1:
            raise PrepareError(
                f"this {kind} would need {stages} stages, but there are {len(possible)} modules at which one can begin"
                f"{': ' + said if possible else ''}. Start fewer processes, use fewer stages_per_rank, or use another strategy"
            )
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
