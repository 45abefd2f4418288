"""torch.compile, activation checkpointing and activation offload, in place: names, classes and methods of a model stay.

torch.compile takes the whole model or each repeated block. The whole model is compiled around autocast and, in ddp, around
DistributedDataParallel: its buckets split the graph, so that gradients are reduced while backward still runs. Blocks are compiled
one by one before a strategy wraps the model: equal blocks share one graph, which shortens the first step.
"""

from __future__ import annotations

import copyreg
import re
import weakref
from abc import ABCMeta
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase  # it writes to buffers without raising their version
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..base.units import read_bytes
from ..errors import PrepareError, SettingError, nearest
from ..options import check_fields, check_word
from ..precision.policies import upcast_again
from ..settings import as_record
from .blocks import repeated_blocks

SIDE_EFFECTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"  # torch's flag, where this torch has it

Compiled = Literal["model", "blocks"]
WHAT = get_args(Compiled)


@dataclass(frozen=True)
class CompileOptions:
    """The target and the options of torch.compile.

    Attributes:
        what: "model", the whole one in one call; "blocks", each repeated block found in it.
        backend: as in torch.compile, like the other options.
        mode: a preset of options.
        fullgraph: make an error of what breaks a graph; DDP and FSDP break it around the model, so there it goes with "blocks".
        dynamic: compile for changing shapes.
        options: of the backend.

    Raises:
        SettingError: a value of another type, or both `mode` and `options`.

    Example:
        >>> acc = Accelerator(cpu=True, compile=CompileOptions("blocks", fullgraph=True))
    """

    what: Compiled = "model"
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_word("what", self.what, WHAT)
        if not (callable(self.backend) or (isinstance(self.backend, str) and self.backend)):
            raise SettingError(
                f"backend={self.backend!r} is neither a backend of torch.compile nor a function"
            )
        if self.mode is not None and self.options is not None:
            raise SettingError("mode and options of torch.compile exclude each other: pass one of them")


def read_compile(given: Any) -> CompileOptions | None:
    """The options of torch.compile, from "no" or None (None), "model", "blocks", `CompileOptions`, or a dict of its fields."""
    if given in (None, "no"):
        return None
    options = as_record(CompileOptions, "compile", {"what": given} if isinstance(given, str) else given)
    if isinstance(options.backend, str):
        import torch._dynamo  # here: it takes 1.6 s

        known = torch._dynamo.list_backends(exclude_tags=())
        if options.backend not in known:
            raise SettingError(
                f"torch.compile has no backend {options.backend!r} here{nearest(options.backend, known) or '.'} Known: {', '.join(known)}"
            )
    return options


class Compiling:
    """Compiles the models of one run, and undoes this when the run releases them."""

    def __init__(self, options: CompileOptions) -> None:
        self._options = options
        self._compiled: list[nn.Module] = []
        self._flag: bool | None = None  # `SIDE_EFFECTS` as it was

    def whole(self, module: nn.Module) -> None:
        """Called by a strategy with the module that torch.compile should see whole."""
        if self._options.what == "model":
            self._compile(module)

    def blocks(self, models: Sequence[nn.Module], sharded: bool) -> None:
        """Compile the repeated blocks of `models`, before they are wrapped; `sharded`: they will gather their parameters by hooks."""
        for model in models:
            if _is_compiled(model):
                raise PrepareError(
                    f"this {type(model).__name__} or a part of it is compiled already, and compile= asks for it again: prepare a plain one"
                )
            if self._options.what == "model" and sharded and passed_over(model):
                raise PrepareError(
                    f"the forward of this {type(model).__name__} is torch's own, which torch.compile passes over behind the hooks that "
                    "gather a sharded model's parameters: call it from a module of your own, or use compile='blocks'"
                )
        if sharded:
            from torch._dynamo import config  # a second

            # Hooks of precisions change a block's parameters and put them back: a recomputed graph need not do that again.
            if self._flag is None and hasattr(config, SIDE_EFFECTS):
                self._flag = getattr(config, SIDE_EFFECTS)
                setattr(config, SIDE_EFFECTS, True)
        if self._options.what == "blocks":
            for block in all_blocks(models, "compile='blocks'", "use compile=True"):
                self._compile(block)

    def _compile(self, module: nn.Module) -> None:
        o = self._options
        options: dict[str, Any] = {n: getattr(o, n) for n in ("backend", "mode", "fullgraph", "dynamic")}
        options["options"] = None if o.options is None else dict(o.options)
        if passed_over(module):
            call = lambda *args, **kwargs: module._call_impl(*args, **kwargs)  # noqa: E731
            module._compiled_call_impl = torch.compile(call, **options)
        else:
            module.compile(**options)
        self._compiled.append(module)

    def undo(self) -> None:
        for module in self._compiled:
            module._compiled_call_impl = None
        self._compiled.clear()
        if self._flag is not None:
            setattr(torch._dynamo.config, SIDE_EFFECTS, self._flag)
            self._flag = None


def _is_compiled(model: nn.Module) -> bool:
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


def can_compile(model: nn.Module) -> bool:
    """Whether ``compile="blocks"`` takes `model`."""
    return bool(repeated_blocks(model)) and not _is_compiled(model)


def passed_over(module: nn.Module) -> bool:
    """Whether torch.compile ignores `module`: forward is torch's own code (a bare nn.Sequential), compiled only when inlined."""
    return type(module).forward.__module__.startswith("torch.nn.")


def all_blocks(models: Sequence[nn.Module], asked: str, instead: str) -> list[nn.Module]:
    """The repeated blocks of `models`; raises PrepareError if there are none."""
    found = [block for model in models for block in repeated_blocks(model)]
    if models and not found:
        raise PrepareError(
            f"{asked} means the repeated blocks of a model, and {_said(models)} has none (two or more of one class in a ModuleList, "
            f"Sequential or ModuleDict): {instead}"
        )
    return found


def _said(models: Sequence[nn.Module]) -> str:
    return f"this {' or '.join(type(m).__name__ for m in models)}"


# -- activation checkpointing: parts of a model keep little of what they compute, and run again in backward --------------


class Recompute(NamedTuple):
    """What the setting `activation_checkpointing` asks for.

    Attributes:
        patterns: of names or classes of modules; none: the repeated blocks.
        selective: matrix products and attention are kept, the rest is computed again.
        below: as many blocks as the memory of a rank needs to stay below these bytes; None: all.
    """

    patterns: tuple[str, ...] = ()
    selective: bool = False
    below: int | None = None


def read_which(text: str | None) -> Recompute | None:
    """The setting `activation_checkpointing`; None: nothing is computed again."""
    if text in (None, "no"):
        return None
    if text in ("blocks", "attention"):
        return Recompute(selective=text == "attention")
    if re.fullmatch(r"\s*[0-9][0-9_.]*\s*[KMGT]i?B\s*", str(text), re.IGNORECASE):
        return Recompute(below=read_bytes(text, "activation_checkpointing="))
    patterns = tuple(word.strip() for word in str(text).split(","))
    if not all(patterns):
        raise SettingError(
            f"activation_checkpointing={text!r} is neither blocks (the repeated ones), attention, no, nor a size such as 16GiB, nor "
            "patterns of module or class names such as Block or encoder.* with commas"
        )
    return Recompute(patterns)


def find_recomputed(models: Sequence[nn.Module], which: Recompute) -> list[nn.Module]:
    """The modules inside `models` to recompute; of modules inside one another, the outermost."""
    if which.patterns:
        found = _by_pattern(models, which.patterns)
    else:
        instead = "name its parts by a pattern, such as 'Encoder'"
        found = all_blocks(models, "activation_checkpointing without a pattern", instead)
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
            container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
            if not name or container or type(module).forward is nn.Module.forward:
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
            f"activation_checkpointing={unmet[0]!r} is the name or class of no module inside {_said(models)}{nearest(unmet[0], known)}. "
            "Use blocks, attention or a size such as 16GiB, each alone, or patterns of names or classes of modules"
        )
    return list(found.values())


def recompute(modules: Sequence[nn.Module], selective: bool = False) -> Callable[[], None]:
    """Recompute `modules` in backward; returns the function that undoes it, except where torch has replaced the class since."""
    for module in modules:
        module.__class__ = _recomputed(type(module), selective)

    def undo() -> None:
        for module in modules:
            if type(module) in _SUBCLASSES.values():
                module.__class__ = type(module).__bases__[1]

    return undo


class _Quiet:
    """A base before the user's class, so that its ``__init_subclass__`` is not called. ``__slots__`` here would differ from its layout."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


_SUBCLASSES: dict[tuple[type, bool], type] = {}  # one for each class, so that modules of one class stay so


def _recomputed(kind: type, selective: bool) -> type:
    if (kind, selective) not in _SUBCLASSES:

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
            # Keywords travel by position: some could have the names of checkpoint's own.
            call = partial(_call, kind.forward, self, tuple(kwargs))  # type: ignore[attr-defined]
            how: dict[str, Any] = {"context_fn": partial(_contexts, self, selective)}
            if torch.compiler.is_compiling():  # a graph's changes of buffers come at its end, once
                how = {"context_fn": _selective} if selective else {}
            return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, **how)

        def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
            made = super(new, self).__reduce_ex__(protocol)
            if isinstance(made, tuple) and made[0] is copyreg.__newobj__ and made[1][0] is new:
                return (_new, (kind, *made[1][1:]), *made[2:])  # a copy is the user's own
            return made

        words = {name: getattr(kind, name) for name in ("__module__", "__doc__", "__qualname__")}
        body = {"forward": forward, "__reduce_ex__": __reduce_ex__, **words}
        # Bypass the metaclass, which may register classes or want arguments.
        meta = type(kind)
        make: Any = ABCMeta.__new__ if issubclass(meta, ABCMeta) else type.__new__
        new = make(meta, kind.__name__, (_Quiet, kind), body)
        _SUBCLASSES[kind, selective] = new
    return _SUBCLASSES[kind, selective]


# Operators whose results selective checkpointing keeps, in any overload.
KEPT = {
    *("mm", "addmm", "bmm", "baddbmm", "linear", "convolution"),
    *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn", "fused")),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"),
    *("flex_attention", "_flash_attention_forward", "_efficient_attention_forward"),
}


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operator.name().split("::")[-1].split(".")[0] in KEPT
    for i, argument in enumerate(operator._schema.arguments) if keep and hasattr(operator, "_schema") else ():
        # Attention with dropout draws random numbers: it runs again, so that what is drawn after it is the same again.
        if argument.name == "dropout_p":
            value = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            keep = not value
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


_selective = partial(create_selective_checkpoint_contexts, _policy)


def _new(kind: type, *args: Any) -> Any:
    """Called by copies and pickles of a recomputed module."""
    return kind.__new__(kind, *args)


def _call(forward: Callable[..., Any], module: nn.Module, names: tuple[str, ...], *values: Any) -> Any:
    cut = len(values) - len(names)
    return forward(module, *values[:cut], **dict(zip(names, values[cut:])))


def _contexts(
    module: nn.Module, selective: bool
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first forward, which notes the buffers it changes, and around the second, which changes copies of them."""
    changed: list[tuple[nn.Module, str]] = []
    keeping, taking = _selective() if selective else (nullcontext(), nullcontext())

    @contextmanager
    def first() -> Iterator[None]:
        tables = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
        before = [(m, name, b, b._version) for m, name, b in tables]
        with keeping:
            yield
        for m, name, buffer, version in before:
            if m._buffers.get(name) is not buffer or buffer._version != version or isinstance(m, _NormBase):
                changed.append((m, name))

    @contextmanager
    def second() -> Iterator[None]:
        kept: list[tuple[nn.Module, str, Tensor | None]] = [(m, n, m._buffers.get(n)) for m, n in changed]
        for m, name, buffer in kept:
            m._buffers[name] = None if buffer is None else buffer.clone()
        try:
            with upcast_again(module), taking:
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


# -- activation offload: what autograd saves on a CUDA device is in pinned host memory from forward to backward -------------
# A side stream copies while the compute stream computes. In forward a saved tensor stays on the device until its copy has left, at
# most `AHEAD` of them at a time: then the compute stream waits for the oldest. In backward a tensor that is asked for brings the
# `AHEAD` that were saved before it, which autograd mostly asks for next. Memory on the device belongs to the compute stream.
# Left on the device: parameters, views of them and autocast's copies, which stay anyway; tensors below `LEAST` bytes; and what is not a
# plain dense tensor. Parts that are recomputed save their inputs only, and what they save again in backward is not offloaded.

AHEAD = 2  # copies under way in each direction
LEAST = 1 << 16  # bytes


class Saved:
    """A tensor in host memory, and its copies under way; `before` was saved before it."""

    def __init__(self, tensor: Tensor, before: Saved | None) -> None:
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        self.leaving: Tensor | None = tensor
        self.left: Any = None  # event: the copy to the host is done
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.coming: tuple[Tensor, Any] | None = None  # back on the device, and the event that it has arrived
        self.given: Any = lambda: None  # weak reference to what was handed out last


class Offload(saved_tensors_hooks):
    """Inside, tensors of at least `least` bytes that autograd saves on `device` go to the host's memory; backward may run outside."""

    def __init__(self, device: torch.device, least: int = LEAST) -> None:
        super().__init__(self._pack, self._unpack)
        self._device, self._least = device, least
        self._streams = torch.get_device_module(device)
        self._side: Any = None  # made in the first forward
        self._leaving: deque[weakref.ref[Saved]] = deque()
        self._last: Any = lambda: None  # weak reference to what was saved last
        self._known: weakref.WeakValueDictionary[Any, Saved] = weakref.WeakValueDictionary()

    def _pack(self, tensor: Tensor) -> Any:
        if not self._goes(tensor):
            return tensor
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (*place, tensor.dtype, tensor._version)
        known = self._known.get(key)
        if known is not None and not known.storage.expired():
            return known  # saved before, by another operator
        if self._side is None:
            self._side = self._streams.Stream(self._device)
        saved = self._known[key] = Saved(tensor.detach(), self._last())
        self._last = weakref.ref(saved)
        self._side.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._side):
            saved.host.copy_(tensor.detach(), non_blocking=True)
            saved.left = self._side.record_event()
        if tensor.is_cuda:
            tensor.record_stream(self._side)  # the graph may be dropped meanwhile
        self._leaving.append(weakref.ref(saved))
        while len(self._leaving) > AHEAD:
            oldest = self._leaving.popleft()()
            if oldest is not None and oldest.leaving is not None:
                # The compute stream uses its memory again only after it was copied.
                self._streams.current_stream(self._device).wait_event(oldest.left)
                oldest.leaving = None
        return saved

    def _goes(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.device == self._device and tensor.layout is torch.strided
        if not plain or tensor.nbytes < self._least or any(s == 0 for s in tensor.stride()):
            return False
        base = tensor if tensor._base is None else tensor._base
        node: Any = base.grad_fn
        if isinstance(base, nn.Parameter):
            return False
        # Autocast's copy of a parameter, which stays for the rest of forward.
        cast = node is not None and node.name() == "ToCopyBackward0"
        return not (cast and isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter))

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Saved):
            return packed
        there: Tensor | None = packed.given()
        if there is not None:
            return there
        if packed.leaving is not None:  # of the end of forward: it is still there
            tensor, packed.leaving = packed.leaving, None
        else:
            self._bring(packed)
            assert packed.coming is not None
            (tensor, arrived), packed.coming = packed.coming, None
            self._streams.current_stream(self._device).wait_event(arrived)
        packed.given = weakref.ref(tensor)
        before = packed.before()
        for _ in range(AHEAD):
            if before is not None:
                self._bring(before)
                before = before.before()
        return tensor

    def _bring(self, saved: Saved) -> None:
        if saved.coming is not None or saved.leaving is not None or saved.given() is not None:
            return
        tensor = torch.empty_like(saved.host, device=self._device)
        self._side.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._side):
            tensor.copy_(saved.host, non_blocking=True)
            saved.coming = tensor, self._side.record_event()
        if tensor.is_cuda:
            tensor.record_stream(self._side)  # it may be dropped without having been asked for
