"""A prepared model: the user's module with another `__call__`, and the micro-step around its calls.

A view shares the module's ``__dict__``, so parameters, buffers, hooks, methods, attributes, ``state_dict`` names and
``isinstance`` are the module's own. Only its class differs: a subclass made for it, with a ``__call__`` that goes
through autocast and the strategy's wrapper. Nothing is set on the user's module. Copies of a view are of the module. As
DistributedDataParallel's wrapper, a view has ``module`` and ``no_sync()``, unless the module has its own.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import FunctionType, MemberDescriptorType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..base.dtensor import lacks_operation
from ..base.parts import Parts
from ..base.pytree import leaves
from ..errors import PrepareError, StepError, nearest

Method = TypeVar("Method", bound=Callable[..., Any])
_MARK = "_easymp_forward"  # in the __dict__ of a decorated method


def forward_method(method: Method) -> Method:
    """Mark a method that computes as forward does.

    The prepared model calls it under autocast and the strategy, as it calls forward. To name the method in
    ``prepare(model, forward_methods=...)`` does the same.

    Args:
        method: a method of an nn.Module.

    Returns:
        `method`, marked.

    Example:
        >>> class Encoder(nn.Linear):
        ...     @easymp.forward_method
        ...     def embed(self, x):
        ...         return self(x).tanh()
        >>> acc = Accelerator(cpu=True, mixed_precision="bf16")
        >>> acc.prepare(Encoder(2, 1)).embed(torch.ones(4, 2)).shape  # under autocast, and trained
        torch.Size([4, 1])
    """
    vars(method)[_MARK] = True
    return method


def forward_methods(models: Sequence[nn.Module], names: str | Sequence[str]) -> list[tuple[str, ...]]:
    """The forward methods of each of `models`: decorated ones, and those of `names` that its class has."""
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if any(isinstance(getattr(model, name, None), nn.Module) for model in models):
            raise PrepareError(
                f"forward_methods={names!r}: {name!r} is a submodule: name a method of the model that calls it, as "
                f"`def embed(self, x): return self.{name}(x)`"
            )
        if not any(_is_method(model, name) for model in models):
            models_text = " and ".join(f"this {type(model).__name__}" for model in models) or "no new model"
            hint = nearest(name, [n for model in models for n in _methods(model)])
            raise PrepareError(f"forward_methods={names!r}: {models_text} has no method {name!r}{hint}")
    methods_by_model = []
    for model in models:
        members = [member for kind in type(model).__mro__ for member in vars(kind).items()]
        marked = [name for name, value in members if _MARK in getattr(value, "__dict__", ())]
        methods_by_model.append(tuple(dict.fromkeys([*marked, *(name for name in names if _is_method(model, name))])))
    return methods_by_model


def _methods(model: nn.Module) -> list[str]:
    return [name for name in dir(type(model)) if name[0] != "_" and _is_method(model, name)]


def _is_method(model: nn.Module, name: str) -> bool:
    attribute = inspect.getattr_static(type(model), name, None)
    return isinstance(attribute, FunctionType) and attribute is not inspect.getattr_static(nn.Module, name, None)


@dataclass(slots=True)
class Route:
    """A prepared model, and how it is called."""

    original: nn.Module  # the user's module
    module: nn.Module  # the result of the strategy's `wrap`
    no_sync: Callable[[], AbstractContextManager[Any]]  # makes a context that keeps gradients to this rank
    explain: Callable[[RuntimeError, str], None]  # called with an error of a call
    parts: Parts  # the run's, which hear of calls that train
    no_double_backward: str  # why a gradient of a gradient is refused; "" where it works
    view: nn.Module  # the module that the user calls in place of `original`
    method: str = ""  # which is called in place of forward

    def call(self, *args: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled()
        try:
            call = self._call_in_parts if self.parts.forward and trains else self.module
            outputs = call(*args, **kwargs)
        except RuntimeError as error:
            self.explain(error, "forward")
            raise
        if self.no_double_backward and trains:
            for leaf in leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._refuse_graph)
        return outputs

    def _call_in_parts(self, *args: Any, **kwargs: Any) -> Any:
        contexts = [c for begin in self.parts.forward if (c := begin(self, args, kwargs)) is not None]
        if not contexts:
            return self.module(*args, **kwargs)
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return self.module(*args, **kwargs)

    def _refuse_graph(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled():  # which autograd sees to for create_graph
            raise StepError(f"a gradient that can be differentiated again was asked for: {self.no_double_backward}")

    @contextmanager
    def instead(self, name: str) -> Iterator[None]:
        """Inside, the next call of the wrapped model's forward runs the original's method `name` in its place.

        torch.compile of the whole model holds for forward only: the method runs uncompiled, compiled blocks stay.
        """
        original, attributes = self.original, vars(self.original)
        before = {"forward": attributes["forward"]} if "forward" in attributes else {}
        compiled = []

        def restore() -> None:
            attributes.pop("forward", None)
            attributes.update(before)

        def call_method(*args: Any, **kwargs: Any) -> Any:
            restore()  # the method calls the model's own forward
            return getattr(original, name)(*args, **kwargs)

        module: Any = self.module
        while True:
            compiled.append((module, module._compiled_call_impl))
            module._compiled_call_impl = None
            if module is original:
                break
            module = module.module
        attributes["forward"] = call_method
        self.method = name
        try:
            yield
        finally:
            self.method = ""
            restore()
            for module, call in compiled:
                module._compiled_call_impl = call


def routed(route: Route, name: str) -> Any:
    """The method `name` of a view, which computes as forward does."""

    @wraps(getattr(type(route.original), name))
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with route.instead(name):
            return route.call(*args, **kwargs)

    return method


def make_view(route: Route, methods: Sequence[str], sharded: bool, always: bool) -> None:
    """Give `route` a view of its module; the module itself where the strategy calls that, and not `always` a view.

    `methods` are called as forward is. Where parameters are `sharded` outside of forward, an error of another method
    that computes with them is explained.
    """
    original = route.original
    if route.module is original and not always:
        return
    # The class of the module, also where `original` is a view.
    kind = next(c for c in type(original).__mro__ if c is not _View and "_easymp_route" not in vars(c))

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return route.call(*args, **kwargs)

    def guarded(name: str) -> Any:
        original_method = getattr(kind, name)

        @wraps(original_method)
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            try:
                return original_method(self, *args, **kwargs)
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" not in str(error):
                    raise
                raise StepError(
                    f"{name}() of this {kind.__name__} computes with parameters that are shards outside of forward: "
                    "pass "
                    f"prepare(model, forward_methods=({name!r},)), or decorate the method with @easymp.forward_method"
                ) from error

        return method

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "forward" in vars(original):  # set by the script since, and it calls this one
            return kind.forward(original, *args, **kwargs)  # type: ignore[attr-defined]  # it has one
        return route.call(*args, **kwargs)

    body = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__, "_easymp_route": route}
    if sharded:
        body.update((name, guarded(name)) for name in _methods(original))
    if _is_method(original, "forward"):  # a scripted module has none
        body["forward"] = wraps(kind.forward)(forward)  # type: ignore[attr-defined]  # it has one
    body.update((name, routed(route, name)) for name in methods if name != "forward")
    slots = [n for base in kind.__mro__ for n, m in vars(base).items() if type(m) is MemberDescriptorType]
    body.update((slot, _forwarded(original, slot)) for slot in slots)
    # Bypass metaclass hooks and __init_subclass__, so that the class is not registered and needs no arguments.
    meta = type(kind)
    new_class: Any = ABCMeta.__new__ if issubclass(meta, ABCMeta) else type.__new__
    route.view = object.__new__(new_class(meta, f"Prepared{kind.__name__}", (_View, kind), body))
    object.__setattr__(route.view, "__dict__", original.__dict__)


class _View:
    """First base of the class of every view: its methods come before those of the model's class."""

    __slots__ = ()
    _easymp_route: Route

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name == "module":  # as the wrapper of DistributedDataParallel has it
                return self._easymp_route.original
            if name == "no_sync":
                return self._easymp_route.no_sync
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _View:
        """As `to`, `float` and others call it. torch's FSDP has a state for the module itself only."""
        self._easymp_route.original._apply(fn, recurse)
        return self

    def __copy__(self) -> nn.Module:
        return copy.copy(self._easymp_route.original)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self._easymp_route.original, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._easymp_route.original,)


def _itself(module: nn.Module) -> nn.Module:
    """Called when a view is unpickled."""
    return module


def _forwarded(original: nn.Module, name: str) -> property:
    """A slot, which lives outside ``__dict__``."""
    return property(
        lambda _: getattr(original, name),
        lambda _, value: setattr(original, name, value),
        lambda _: delattr(original, name),
    )


def unwrap(model: nn.Module, keep_torch_compile: bool = True) -> Any:
    """The user's module inside a view, DataParallel or DistributedDataParallel; on request also in torch.compile."""
    while True:
        route = getattr(type(model), "_easymp_route", None)
        if route is not None:
            model = route.original
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif not keep_torch_compile and "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def check_loss(loss: Any, gradient: Tensor | None) -> None:
    """Raise a StepError where backward cannot start from `loss`."""
    if not isinstance(loss, Tensor):
        raise StepError(
            f"backward() needs the loss as a tensor, not {type(loss).__name__}: pass it before .item() or float()"
        )
    if not loss.requires_grad:
        raise StepError(
            "backward() got a loss without a graph (requires_grad is False): it was computed under no_grad(), "
            "detached, or from frozen parameters only"
        )
    if loss.ndim and loss.numel() != 1 and gradient is None:
        raise StepError(
            f"backward() got a loss of shape {tuple(loss.shape)}: reduce it to one number first, e.g. loss.mean()"
        )


def explain_backward(error: RuntimeError) -> None:
    """Raise a StepError if `error` is torch's on a gradient of a gradient, kept values of a checkpoint, or DTensors."""
    torch_message = str(error).splitlines()[0] if str(error) else ""
    if any(phrase in torch_message for phrase in ("double backward", "differentiate twice", "backward an extra time")):
        raise StepError(
            "the loss holds the gradient of a gradient, which a part of the model does not have: torch.compile's "
            "default backend, Linears in fp8, synchronised batch-norm and activation_checkpointing='attention' have "
            f"none. Leave these out. torch said: {torch_message}"
        ) from error
    if "Tensor cached during selective activation checkpoint has been mutated" in torch_message:
        raise StepError(
            "activation_checkpointing='attention' keeps the results of matrix products, convolutions and attention, "
            "and a block has changed one in place: write it without (nn.ReLU(inplace=False), x = x + y), or use "
            "activation_checkpointing='blocks'"
        ) from error
    if lacks_operation(error):
        raise StepError(
            "the loss probably reads parameters outside of the model's forward, such as a penalty on weights, and "
            "there they are shards: use the optimizer's weight_decay, or strategy='ddp'. torch said: "
            f"{torch_message}"
        ) from error
