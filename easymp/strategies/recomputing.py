"""Activation checkpointing: parts of a model keep their inputs only, and compute the rest again when backward comes to them.

Of torch's ways, its composable `checkpoint` is private and its hooks break graphs under torch.compile, and `checkpoint_wrapper` puts a
module around the user's, with a prefix before the names. So the class of such a module becomes a subclass of its own, whose forward
goes through ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``: names stay, torch.compile sees one function, and what
`fully_shard` registers lies outside of it, so that a block is gathered once for its backward, not twice.

torch replays random numbers and autocast. Buffers that forward changes (batch-norm's) are changed once: the second time, copies are.
"""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import (
    _NormBase,  # of BatchNorm and InstanceNorm, which write to buffers without raising their version
)
from torch.utils.checkpoint import checkpoint

from ..errors import PrepareError, SettingError, nearest
from ..precision.autocast import upcast_again
from .blocks import repeated_blocks

Which = bool | tuple[str, ...]


def read_which(given: Any) -> Which:
    """`activation_checkpointing` as it is kept: False, True or patterns.

    Raises:
        SettingError: anything else.
    """
    if isinstance(given, bool):
        return given
    patterns = (given,) if isinstance(given, str) else given
    if isinstance(patterns, (list, tuple)) and patterns and all(isinstance(p, str) and p for p in patterns):
        return tuple(patterns)
    raise SettingError(
        f"activation_checkpointing={given!r} is neither True (the repeated blocks) nor False, nor a pattern of module or class names such "
        "as 'Block' or 'encoder.*', nor a tuple of them"
    )


def worded(which: Which) -> str:
    """`which` as the setting is written."""
    return ("blocks" if which else "no") if isinstance(which, bool) else ",".join(which)


def read_words(text: str) -> Which:
    """What `worded` or a person has written.

    Raises:
        SettingError: an empty pattern.
    """
    return read_which(
        {"blocks": True, "no": False}.get(text.lower(), tuple(word.strip() for word in text.split(",")))
    )


def find_recomputed(models: Sequence[nn.Module], which: Which) -> list[nn.Module]:
    """The modules inside `models` that `which` means; of those inside one another, the outermost.

    Args:
        which: True for the repeated blocks; patterns (fnmatch) of module names or class names.

    Raises:
        PrepareError: nothing is meant, or a module that cannot be recomputed.
    """
    if which is True:
        found = [block for model in models for block in repeated_blocks(model)]
        if models and not found:
            raise PrepareError(
                f"activation_checkpointing=True means the repeated blocks of a model, and {_said(models)} has none (two or more of one "
                "class in a ModuleList, Sequential or ModuleDict): name its parts by a pattern, such as 'Encoder'"
            )
    else:
        found = _by_pattern(models, which or ())
    for module in found:
        if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
            raise PrepareError(
                f"activation checkpointing goes through the class of a module, and a {type(module).__name__} has a forward of its own "
                "(scripted, or set on it): leave it out of the pattern, or remove that forward"
            )
    return found


def _by_pattern(models: Sequence[nn.Module], patterns: tuple[str, ...]) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    known: set[str] = set()
    unmet = list(patterns)
    for model in models:
        taken: set[int] = set()  # inside one that was found
        for name, module in model.named_modules():
            if (
                not name
                or type(module).forward is nn.Module.forward
                or isinstance(module, (nn.ModuleList, nn.ModuleDict))
            ):
                continue
            names = (name, type(module).__name__)
            known.update(names)
            met = [p for p in patterns if any(fnmatchcase(n, p) for n in names)]
            unmet = [p for p in unmet if p not in met]
            if met and id(module) not in taken:
                found[id(module)] = module
                taken.update(id(m) for m in module.modules())
    if models and unmet:
        raise PrepareError(
            f"activation_checkpointing={unmet[0]!r} is the name or class of no module inside {_said(models)}{nearest(unmet[0], known)}"
        )
    return list(found.values())


def _said(models: Sequence[nn.Module]) -> str:
    return f"this {' or '.join(type(m).__name__ for m in models)}"


def recompute(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Let `modules` be recomputed in backward; returns what undoes it, but for modules whose class torch has replaced since."""
    for module in modules:
        module.__class__ = _recomputed(type(module))

    def undo() -> None:
        for module in modules:
            if type(module) in _KINDS.values():
                module.__class__ = type(module).__bases__[1]

    return undo


class _Quiet:
    """Before a user's class in the order of bases: its subclasses announce themselves to nobody.

    Without ``__slots__``: with them, Python says that the layout of its subclasses differs from that of the user's class.
    """

    def __init_subclass__(cls, **_: Any) -> None:
        pass


_KINDS: dict[type, type] = {}  # one for each class, so that modules of one class stay so


def _recomputed(kind: type) -> type:
    if kind not in _KINDS:

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
            # Keywords travel by position: some could have the names of checkpoint's own.
            call = partial(_call, kind.forward, self, tuple(kwargs))  # type: ignore[attr-defined]
            values = (*args, *kwargs.values())
            if torch.compiler.is_compiling():  # a graph's changes of buffers come at its end, once
                return checkpoint(call, *values, use_reentrant=False)
            return checkpoint(call, *values, use_reentrant=False, context_fn=partial(_contexts, self))

        def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
            made = super(new, self).__reduce_ex__(protocol)
            if isinstance(made, tuple) and made[0] is copyreg.__newobj__ and made[1][0] is new:
                return (_new, (kind, *made[1][1:]), *made[2:])  # a copy is the user's own
            return made

        body = {
            "forward": forward,
            "__reduce_ex__": __reduce_ex__,
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
        }
        # The class is nobody's business: a metaclass or __init_subclass__ that keeps a register, or wants arguments, is passed by.
        meta = type(kind)
        make: Any = ABCMeta.__new__ if issubclass(meta, ABCMeta) else type.__new__
        new = make(meta, kind.__name__, (_Quiet, kind), {**body, "__qualname__": kind.__qualname__})
        _KINDS[kind] = new
    return _KINDS[kind]


def _new(kind: type, *args: Any) -> Any:
    """What copying calls."""
    return kind.__new__(kind, *args)


def _call(forward: Callable[..., Any], module: nn.Module, names: tuple[str, ...], *values: Any) -> Any:
    cut = len(values) - len(names)
    return forward(module, *values[:cut], **dict(zip(names, values[cut:])))


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first forward, which notes the buffers it changes, and around the second, which changes copies of them."""
    changed: list[tuple[nn.Module, str]] = []

    @contextmanager
    def first() -> Iterator[None]:
        before = [
            (m, name, b, b._version)
            for m in module.modules()
            for name, b in m._buffers.items()
            if b is not None
        ]
        yield
        changed.extend(
            (m, name)
            for m, name, b, version in before
            if m._buffers.get(name) is not b or b._version != version or isinstance(m, _NormBase)
        )

    @contextmanager
    def second() -> Iterator[None]:
        kept: list[tuple[nn.Module, str, Tensor | None]] = [
            (m, name, m._buffers.get(name)) for m, name in changed
        ]
        for m, name, buffer in kept:
            m._buffers[name] = None if buffer is None else buffer.clone()
        try:
            with upcast_again(module):
                yield
        finally:
            for m, name, buffer in kept:
                m._buffers[name] = buffer

    return first(), _Again(second)


class _Again(AbstractContextManager[None]):
    """A context that can be entered more than once: for a gradient of a gradient torch recomputes twice."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)
