"""Where a model is cut into pipeline stages, and which stage holds what: found by one forward without values.

The model's forward runs once on the meta device, shapes only. What it shows: in which order modules are called, between which calls
each parameter is used, and which values cross from one such segment into a later one. A stage may begin at a module if all that
crosses goes through that module's arguments; among those places cuts are chosen that balance the parameters.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ..base.pytree import leaves, map_leaves
from ..base.rng import mix, seed_all
from ..errors import EasympError, PrepareError, StepError, nearest
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


# -- One stage of a model: the user's own forward, with values only where this rank's stage is.


class Departure(BaseException):
    """Leaves the model's forward where the next stage begins. No Exception: a model's own ``except`` must let it through."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values


class Stage:
    """Calls a model for the part that is here.

    Args:
        module: what is called: the user's model, or what wraps it.
        names: of the modules at which stages 1, 2 … begin.
        places: all modules whose calls are intercepted, by name.
        index: which stage is here.
    """

    def __init__(
        self, module: nn.Module, names: Sequence[str], places: Mapping[str, nn.Module], index: int
    ) -> None:
        self.module = module
        self.names = tuple(names)
        self.index = index
        self.last = len(names)  # index of the last stage
        self._begins = [places[name] for name in names]
        self._doors = {place: self._door(place, call_of(place)) for place in places.values()}
        self._remembered: dict[Any, Any] = {}
        self._blanks = Blanks()
        self._waits = False  # whether blank tensors are about
        self._at = 0  # the stage that the running forward has reached
        self._arrive: Callable[[list[Tensor]], list[Tensor]] = lambda values: values

    @property
    def where(self) -> str:
        """In words."""
        begins = f"begins at {self.names[self.index - 1]!r}" if self.index else "is the first"
        return f"stage {self.index} of {self.last + 1} ({begins})"

    def __call__(
        self, args: Any, kwargs: Any, arrive: Callable[[list[Tensor]], list[Tensor]]
    ) -> tuple[bool, Any]:
        """One micro-batch: whether the forward ended here, and its output or else what the next stage needs.

        Args:
            arrive: called where the stage begins with the tensors among its first module's arguments, some of them blank; returns as
                many with values.

        Raises:
            StepError: the forward did not come by as it did the first time.
        """
        self._at, self._arrive = 0, arrive
        self._waits = bool(self.index)
        if self._waits:
            self._blanks.__enter__()
        try:
            with intercepted(self._doors):
                outputs = self.module(*args, **kwargs)
        except Departure as departure:
            return False, departure.values
        except (RuntimeError, TypeError, ValueError) as error:
            if not isinstance(error, EasympError):
                error.add_note(
                    f"in {self.where}: only what is passed to the module at which a stage begins, and what follows from the model's inputs "
                    "alone, has values there"
                )
            raise
        finally:
            if self._waits:
                self._blanks.__exit__(None, None, None)
        if self._at != self.last:
            raise StepError(
                f"the forward ended in {self.where} before it called {self.names[self._at]!r}, where the next stage begins"
            )
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves(outputs)):
            raise StepError(
                f"an output of the model is computed before {self.names[-1]!r}, where the last stage begins, and not passed to it: split "
                "elsewhere, or return less"
            )
        return True, outputs

    def _door(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        def door(*args: Any, **kwargs: Any) -> Any:
            if self._at < self.last and module is self._begins[self._at]:
                self._at += 1
                if self._at == self.index:
                    args, kwargs = self._begin((args, kwargs))
                elif self._at > self.index:
                    raise Departure((args, kwargs))
            if self._at < self.index:
                return self._stand_in(module, call, args, kwargs)
            return call(*args, **kwargs)

        return door

    def _begin(self, values: Any) -> Any:
        """`values`, which the stage begins with, all with values."""
        if (
            _get_current_dispatch_mode() is self._blanks
        ):  # else a mode that the model entered lies above, and ours stays until the end
            self._waits = False
            self._blanks.__exit__(None, None, None)
        tensors = [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]
        arrived = iter(
            [_become(old, new, self.where) for old, new in zip(tensors, self._arrive(tensors), strict=True)]
        )
        return map_leaves(lambda leaf: next(arrived) if isinstance(leaf, Tensor) else leaf, values)

    def _stand_in(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output of a module of an earlier stage, blank; worked out once for each form of the arguments."""
        if not holds_tensors(module):
            return call(*args, **kwargs)
        args, kwargs = map_leaves(blank, args), map_leaves(blank, kwargs)
        key = (id(module), module.training, form_of((args, kwargs)))
        output = self._remembered.get(key)
        if output is None:
            with torch.no_grad():
                output = call(*args, **kwargs)
            if any(not isinstance(leaf, Tensor) or not leaf.is_meta for leaf in leaves(output)):
                return output  # holds what may be another the next time
            self._remembered[key] = output
        return map_leaves(torch.empty_like, output)


def _become(old: Tensor, new: Tensor, where: str) -> Tensor:
    """`old`, with all that `new` is, so that whatever holds `old` holds it too.

    Raises:
        StepError: torch cannot do that, for something beside Python variables holds `old`.
    """
    if old is not new:
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError as error:
            raise StepError(
                f"{where} cannot have the values that it begins with, for something else keeps what is passed there: a view of it, or a "
                "checkpoint around that module. Put checkpoints inside of modules, or split elsewhere"
            ) from error
    return old


def form_of(tree: Any) -> Any:
    """What two calls have in common that compute the same shapes: structure, shapes and dtypes, and values of what is no tensor."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype, tree.is_meta)
    if isinstance(tree, Mapping):
        return (type(tree), *((key, form_of(value)) for key, value in tree.items()))
    if type(tree) in (list, tuple):
        return (type(tree), *map(form_of, tree))
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return (type(tree), tree)
    inner = list(leaves(tree))
    return (type(tree), *(() if len(inner) == 1 and inner[0] is tree else map(form_of, inner)))


@contextmanager
def own_stream(key: int, index: int, device: torch.device) -> Iterator[None]:
    """Inside, random numbers are those of stage `index`, f(key, index); the streams outside, alike on all ranks, stay where they are."""
    numpy = sys.modules.get("numpy")
    drawn = random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state()
    there = torch.get_device_module(device) if device.type != "cpu" else None
    on_device = there.get_rng_state() if there else None
    seed_all(mix(key, "stage", index))
    try:
        yield
    finally:
        random.setstate(drawn[0])
        if numpy:
            numpy.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        if there:
            there.set_rng_state(on_device)
