"""Where a model is cut into pipeline stages, and which stage holds what: found by one forward without values.

The model's forward runs once on the meta device, shapes only. What it shows: in which order modules are called, between which calls
each parameter is used, and which values cross from one such segment into a later one. A stage may begin at a module if all that
crosses goes through that module's arguments; among those places cuts are chosen that balance the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..base.pytree import leaves, map_leaves
from ..errors import PrepareError, StepError, nearest
from .blocks import ATOMS, CONTAINERS, find_repeated


@dataclass(frozen=True)
class Cuts:
    """A model in stages.

    Attributes:
        begins: names of the modules at whose first call stages 1, 2 … begin.
        users: name of each parameter and buffer → the stages that use it, in order; one that nothing uses lies with its neighbour.
    """

    begins: tuple[str, ...]
    users: Mapping[str, tuple[int, ...]]


# -- calls of modules, intercepted -------------------------------------------------------------------------------------


@contextmanager
def intercepted(doors: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside, calls of these modules go to `doors`.

    Through the place where ``module.compile()`` keeps its function, which is asked before hooks and forward; what was there comes back.
    """
    before = {module: vars(module).pop("_compiled_call_impl", None) for module in doors}
    for module, door in doors.items():
        vars(module)["_compiled_call_impl"] = door
    try:
        yield
    finally:
        for module, call in before.items():
            del vars(module)["_compiled_call_impl"]
            if call is not None:
                vars(module)["_compiled_call_impl"] = call


def call_of(module: nn.Module) -> Callable[..., Any]:
    """What a call of `module` comes to, when nobody intercepts it."""
    compiled: Callable[..., Any] | None = vars(module).get("_compiled_call_impl")
    return compiled or module._call_impl


# -- values that are not here ------------------------------------------------------------------------------------------


def blank(leaf: Any) -> Any:
    """A tensor's shape and dtype on the meta device; a blank tensor, or anything else, itself."""
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


class Blanks(TorchDispatchMode):
    """While entered, an operation on a blank tensor has a blank result, whatever else it is given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(t.is_meta for t in given):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            _refuse_overwriting(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, blank, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        results = func(*args, **kwargs)
        self.seen(given, results)
        return results

    def seen(self, given: Sequence[Tensor], results: Any) -> None:
        """Told of each operation on blank tensors."""


def _refuse_overwriting(func: Any, args: Any, kwargs: Any) -> None:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if (
            argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(value, Tensor)
            and not value.is_meta
        ):
            raise StepError(
                f"the model writes in place ({func}) what one stage computes into a tensor of shape {tuple(value.shape)} that it made "
                "itself: other stages would not see it. Write `x = x + y` in place of `x += y` there, or use another strategy"
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
    opened = {id(model)}
    held = {id(m) for m in find_repeated(model)} | {id(named[name]) for name in splits}
    for module in named.values():
        inside = any(id(m) in held for m in module.modules() if m is not module)
        if (inside or isinstance(module, CONTAINERS)) and not isinstance(module, ATOMS):
            opened.add(id(module))
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if id(child) not in opened:
                found.setdefault(path, child)
            else:
                if path in splits:
                    found.setdefault(path, child)
                walk(child, f"{path}.")

    walk(model, "")
    return found


class Survey(Blanks):
    """Watches one forward: segments between first calls of modules, and who uses what.

    Segment 0 is before the first such call, segment i begins at ``order[i - 1]``.
    """

    def __init__(self, tensors: Mapping[int, str], places: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.order: list[str] = []
        self.users: dict[str, set[int]] = {}
        self.torn: dict[
            int, int
        ] = {}  # segment at which no stage can begin → a segment that uses what is not passed there
        self._tensors, self._places = tensors, places
        self._passed: list[set[int]] = [
            set()
        ]  # a segment: ids of the blank tensors among the arguments it begins with
        self._born: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    @property
    def segment(self) -> int:
        return len(self.order)

    def door(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of `module`, of which `call` is the call."""

        def through(*args: Any, **kwargs: Any) -> Any:
            name = self._places[module]
            if name not in self.order:
                self.order.append(name)
                passed = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                self._passed.append({id(t) for t in passed})
                self._kept.append(passed)
            if holds_tensors(module):
                args, kwargs = map_leaves(blank, args), map_leaves(blank, kwargs)
            return call(*args, **kwargs)

        return through

    def seen(self, given: Sequence[Tensor], results: Any) -> None:
        now = self.segment
        for tensor in given:
            name = self._tensors.get(id(tensor))
            if name is not None:
                self.users.setdefault(name, set()).add(now)
                continue
            for cut in range(self._born.get(id(tensor), now) + 1, now + 1):
                if id(tensor) not in self._passed[cut]:
                    self.torn.setdefault(cut, now)
        for result in pytree.tree_leaves(results):
            if isinstance(result, Tensor) and id(result) not in self._tensors:
                self._born.setdefault(id(result), now)
                self._kept.append(result)


def holds_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def survey(
    model: nn.Module, called: nn.Module, places: Mapping[str, nn.Module], args: Any, kwargs: Any
) -> Survey:
    """One forward of `called`, which is `model` or wraps it, without values. Nothing in the model changes.

    Raises:
        PrepareError: a forward that needs values.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    blanks = {name: blank(t.detach()) for name, t in state.items()}
    watch = Survey(
        {id(t): name for name, t in blanks.items()}, {module: name for name, module in places.items()}
    )
    doors = {module: watch.door(module, call_of(module)) for module in places.values()}
    prefix = next(name for name, module in called.named_modules() if module is model)
    dotted = f"{prefix}." if prefix else ""
    try:
        with intercepted(doors), torch.no_grad(), watch:
            torch.func.functional_call(
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
    best: list[tuple[int, list[int]]] = [
        (before[end] ** 2, []) for end in ends
    ]  # the first part ends at ends[k]
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
    kind = type(model).__name__
    if splits is not None:
        at = []
        for name in splits:
            if name not in watch.order:
                raise PrepareError(
                    f"splits holds {name!r}, but the forward of this {kind} does not call that module"
                )
            at.append(watch.order.index(name) + 1)
            if at[-1] in watch.torn:
                user = watch.order[watch.torn[at[-1]] - 1]
                raise PrepareError(
                    f"no stage can begin at {name!r}: something computed before is used at or after {user!r} without being passed to "
                    f"{name!r}. Possible: {', '.join(n for i, n in enumerate(watch.order, 1) if i not in watch.torn)}"
                )
        if at != sorted(at):
            called = ", ".join(name for name in watch.order if name in splits)
            raise PrepareError(
                f"splits={tuple(splits)} are not in the order in which forward calls them: {called}"
            )
    else:
        allowed = [i for i in range(1, len(watch.order) + 1) if i not in watch.torn]
        if len(allowed) < stages - 1:
            raise PrepareError(
                f"this {kind} would need {stages} stages, one a process, but there are {len(allowed)} modules at which one can begin"
                f"{': ' + ', '.join(watch.order[i - 1] for i in allowed) if allowed else ''}. Start fewer processes, or use another "
                "strategy"
            )
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        weights = [0] * (len(watch.order) + 1)
        for name, segments in watch.users.items():
            weights[min(segments)] += sizes.get(name, 0)
        at = balance(weights, allowed, stages)
    users: dict[str, tuple[int, ...]] = {}
    for tensors in (model.named_parameters(), model.named_buffers()):
        neighbour: tuple[int, ...] = (0,)
        for name, _ in tensors:
            found = {sum(segment >= cut for cut in at) for segment in watch.users.get(name, ())}
            users[name] = tuple(sorted(found)) or neighbour
            neighbour = users[name][-1:]
    return Cuts(tuple(watch.order[i - 1] for i in at), users)
