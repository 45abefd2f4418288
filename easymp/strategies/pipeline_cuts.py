"""Where a model is cut into pipeline stages, and which tensors cross each cut.

One forward with fake tensors (`survey`) records the order in which modules are called, the parameters that each of them uses, and the
tensors that are passed from one to the next. `choose` places the cuts: at `splits`, or so that stages hold equally many parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
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
        users: name of each parameter and buffer → the stages that use it, in order. An unused one is in the stage of its neighbour.
    """

    begins: tuple[str, ...]
    users: Mapping[str, tuple[int, ...]]


# -- calls of modules, intercepted -------------------------------------------------------------------------------------


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
    """The modules to intercept, by name: `splits`, repeated blocks, and the other children of their parents; no module twice.

    Raises:
        PrepareError: a name in `splits` that no module has.
    """
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


# -- tensors without values --------------------------------------------------------------------------------------------


def blank(leaf: Any) -> Any:
    """A tensor's shape, strides and dtype on the meta device. Blank tensors and other values are returned as they are."""
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def form(leaf: Any) -> Any:
    """A tensor's shape, dtype and requires_grad as a blank tensor without a graph; any other value itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


class Blanks(TorchDispatchMode):
    """While entered, an operation with a blank tensor among its arguments has a blank result.

    Args:
        owned: ids of further tensors that count as blank.
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


# -- the survey --------------------------------------------------------------------------------------------------------


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
        self.names: dict[int, str] = {}  # of blank parameters and buffers, by id
        self._fakes, self._device = FakeTensorMode(allow_non_fake_inputs=True), device
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

    def form(self, leaf: Any) -> Any:
        return form(leaf) if isinstance(leaf, FakeTensor) else leaf

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
            self.results.append((name, map_leaves(self.form, outputs)))
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
    model: nn.Module,
    called: nn.Module,
    places: Mapping[str, nn.Module],
    args: Any,
    kwargs: Any,
    device: torch.device,
) -> Survey:
    """Run one forward of `called`, which is `model` or wraps it, with fake tensors. The model does not change.

    Raises:
        PrepareError: the forward needs values.
    """
    watch, skip = Survey(device), replayed(places)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    blanks = {name: watch.blank(t.detach()).requires_grad_(t.requires_grad) for name, t in state.items()}
    watch.names.update((id(t), name) for name, t in blanks.items())
    calls = {module: watch.watched(name, module, name in skip) for name, module in places.items()}
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
            f"the forward of this {type(model).__name__} could not be followed without values ({type(error).__name__}: {said}): strategy "
            "'pipeline' needs a forward that depends on shapes and on its inputs only, not on what it computes. Use another strategy"
        ) from error
    watch.outputs = map_leaves(form, outputs)
    return watch


# -- the choice --------------------------------------------------------------------------------------------------------


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
    """Cuts at `splits`, or where they balance the parameters.

    Raises:
        PrepareError: no stage can begin there.
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
