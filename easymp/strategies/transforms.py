"""torch.compile, activation checkpointing and activation offload, in place: names, classes and methods of a model stay.

The whole model is compiled around autocast and DistributedDataParallel, whose buckets split the graph, so that
gradients are reduced while backward still runs. Repeated blocks are compiled one by one: equal blocks share one graph.
"""

from __future__ import annotations

import weakref
from abc import ABCMeta
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase  # it writes to buffers without raising their version
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from ..base.units import is_size, read_bytes
from ..errors import PrepareError, SettingError, nearest
from ..options import Record, option
from ..precision.policies import upcast_again
from ..settings import as_record
from .blocks import repeated_blocks

SIDE_EFFECTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"  # torch's flag, where this torch has it

Compiled = Literal["model", "blocks"]


@dataclass(frozen=True)
class CompileOptions(Record):
    """The target and the options of torch.compile.

    Raises:
        SettingError: a value of another type, or both `mode` and `options`.

    Example:
        >>> acc = Accelerator(cpu=True, compile=CompileOptions("blocks", fullgraph=True))
    """

    what: Compiled = option(
        "model", '"model", the whole one; "blocks", each repeated block found in it', choices=get_args(Compiled)
    )
    backend: str | Callable[..., Any] = option("inductor", "as in torch.compile, like the other options")
    mode: str | None = option(None, "a preset of options")
    fullgraph: bool = option(
        False,
        'make an error of what breaks a graph; DDP and FSDP break it around the model, so there it goes with "blocks"',
    )
    dynamic: bool | None = option(None, "compile for changing shapes")
    options: Mapping[str, Any] | None = option(None, "of the backend")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (callable(self.backend) or (isinstance(self.backend, str) and self.backend)):
            raise SettingError(f"backend={self.backend!r} is neither a backend of torch.compile nor a function")
        if self.mode is not None and self.options is not None:
            raise SettingError("mode and options of torch.compile exclude each other: pass one of them")


def read_compile(setting: Any) -> CompileOptions | None:
    """The setting `compile`: "no" or None (None), "model", "blocks", `CompileOptions`, or a dict of its fields."""
    if setting in (None, "no"):
        return None
    options = as_record(CompileOptions, "compile", {"what": setting} if isinstance(setting, str) else setting)
    if isinstance(options.backend, str):
        import torch._dynamo  # here: it takes 1.6 s

        backends = torch._dynamo.list_backends(exclude_tags=())
        if options.backend not in backends:
            hint = nearest(options.backend, backends) or "."
            raise SettingError(
                f"torch.compile has no backend {options.backend!r} here{hint} Known: {', '.join(backends)}"
            )
    return options


class Compiling:
    """Compiles the models of one run, and undoes this when the run releases them."""

    def __init__(self, options: CompileOptions) -> None:
        self._options = options
        self._compiled: list[nn.Module] = []
        self._flag: bool | None = None  # `SIDE_EFFECTS` as it was

    def compile_model(self, module: nn.Module) -> None:
        """Compile a module that torch.compile should see whole, if it is to."""
        if self._options.what == "model":
            self._compile(module)

    def blocks(self, models: Sequence[nn.Module], sharded: bool) -> None:
        """Compile repeated blocks of `models`, before they are wrapped. `sharded`: hooks gather their parameters."""
        for model in models:
            if _is_compiled(model):
                subject = f"this {type(model).__name__} or a part of it"
                raise PrepareError(
                    f"{subject} is compiled already, and compile= asks for it again: prepare a plain one"
                )
            if self._options.what == "model" and sharded and passed_over(model):
                raise PrepareError(
                    f"the forward of this {type(model).__name__} is torch's own, which torch.compile passes over "
                    "behind the hooks that gather a sharded model's parameters: call it from a module of your own, or "
                    "use compile='blocks'"
                )
        if sharded:
            from torch._dynamo import config  # a second

            # Hooks of precisions change a block's parameters and put them back: a recomputed graph need not do that
            # again.
            if self._flag is None and hasattr(config, SIDE_EFFECTS):
                self._flag = getattr(config, SIDE_EFFECTS)
                setattr(config, SIDE_EFFECTS, True)
        if self._options.what == "blocks":
            for block in all_blocks(models, "compile='blocks'", "use compile=True"):
                self._compile(block)

    def _compile(self, module: nn.Module) -> None:
        names = ("backend", "mode", "fullgraph", "dynamic", "options")
        options: dict[str, Any] = {name: getattr(self._options, name) for name in names}
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
    """Whether torch.compile ignores `module`, whose forward is torch's own (a bare nn.Sequential), unless inlined."""
    forward = getattr(type(module), "forward", None)  # of a scripted module: None
    return getattr(forward, "__module__", "").startswith("torch.nn.")


def all_blocks(models: Sequence[nn.Module], setting: str, remedy: str) -> list[nn.Module]:
    """The repeated blocks of `models`; raises PrepareError if there are none."""
    blocks = [block for model in models for block in repeated_blocks(model)]
    if models and not blocks:
        raise PrepareError(
            f"{setting} means the repeated blocks of a model, and {_describe(models)} has none (two or more of one "
            f"class in a ModuleList, Sequential or ModuleDict): {remedy}"
        )
    return blocks


def _describe(models: Sequence[nn.Module]) -> str:
    return f"this {' or '.join(type(m).__name__ for m in models)}"


# -- activation checkpointing: parts of a model keep little of what they compute, and run again in backward ------------


class Recompute(NamedTuple):
    """The setting `activation_checkpointing`."""

    patterns: tuple[str, ...] = ()  # of names or classes of modules; none: the repeated blocks
    selective: bool = False  # matrix products and attention are kept, the rest is computed again
    below: int | None = None  # bytes that a rank stays below by recomputing as few blocks as possible; None: all blocks


def read_which(text: str | None) -> Recompute | None:
    """The setting `activation_checkpointing`; None: nothing is computed again."""
    if text in (None, "no"):
        return None
    if text in ("blocks", "attention"):
        return Recompute(selective=text == "attention")
    if is_size(str(text)):
        return Recompute(below=read_bytes(text, "activation_checkpointing="))
    patterns = tuple(pattern.strip() for pattern in str(text).split(","))
    if not all(patterns):
        raise SettingError(
            f"activation_checkpointing={text!r} is neither blocks (the repeated ones), attention, no, nor a size such "
            "as 16GiB, nor patterns of module or class names such as Block or encoder.* with commas"
        )
    return Recompute(patterns)


def find_recomputed(models: Sequence[nn.Module], setting: Recompute) -> list[nn.Module]:
    """The modules inside `models` to recompute; of modules inside one another, the outermost."""
    if setting.patterns:
        modules = _by_pattern(models, setting.patterns)
    else:
        remedy = "name its parts by a pattern, such as 'Encoder'"
        modules = all_blocks(models, "activation_checkpointing without a pattern", remedy)
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
            raise PrepareError(
                f"activation checkpointing goes through the class of a module, and a {type(module).__name__} has a "
                "forward of its own (scripted, or set on it): leave it out of the pattern, or remove that forward"
            )
    return modules


def _by_pattern(models: Sequence[nn.Module], patterns: tuple[str, ...]) -> list[nn.Module]:
    modules: dict[int, nn.Module] = {}
    labels: set[str] = set()
    unmatched = set(patterns)
    for model in models:
        nested: set[int] = set()  # one that is matched
        for name, module in model.named_modules():
            if not name or type(module).forward is nn.Module.forward:
                continue
            names = (name, type(module).__name__)
            labels.update(names)
            matching = {p for p in patterns if any(fnmatchcase(label, p) for label in names)}
            unmatched -= matching
            if matching and id(module) not in nested:
                modules[id(module)] = module
                nested.update(id(m) for m in module.modules())
    if models and unmatched:
        pattern = next(p for p in patterns if p in unmatched)
        raise PrepareError(
            f"activation_checkpointing={pattern!r} is the name or class of no module inside "
            f"{_describe(models)}{nearest(pattern, labels)}. Use blocks, attention or a size such as 16GiB, each "
            "alone, or patterns of names or classes of modules"
        )
    return list(modules.values())


def recompute(modules: Sequence[nn.Module], selective: bool = False) -> Callable[[], None]:
    """Recompute `modules` in backward. Returns the function that undoes it, where torch has not replaced the class."""
    for module in modules:
        module.__class__ = _recomputed(type(module), selective)

    def undo() -> None:
        for module in modules:
            if is_recomputed(module):
                module.__class__ = type(module).__bases__[1]

    return undo


class _Quiet:
    """A base before the user's class, whose ``__init_subclass__`` is not called."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


_SUBCLASSES: dict[tuple[type, bool], type] = {}  # one for each class, so that modules of one class stay so


def is_recomputed(module: nn.Module) -> bool:
    """Whether `module` is computed again in backward, as a whole."""
    return type(module) in _SUBCLASSES.values()


def _recomputed(kind: Any, selective: bool) -> Any:
    """A subclass of the class `kind` whose forward is computed again in backward."""
    if (kind, selective) in _SUBCLASSES:
        return _SUBCLASSES[kind, selective]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        options: dict[str, Any] = {"context_fn": partial(_contexts, self, selective)}
        if torch.compiler.is_compiling():  # a graph's changes of buffers come at its end, once
            options = {"context_fn": _selective} if selective else {}
        # Keywords travel by position: some could have the names of checkpoint's own.
        call = partial(_call, kind.forward, self, tuple(kwargs))
        return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, **options)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = super(subclass, self).__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[0].__name__ == "__newobj__" and reduced[1][0] is subclass:
            return (_new, (kind, *reduced[1][1:]), *reduced[2:])  # a copy is the user's own
        return reduced

    body = {name: getattr(kind, name) for name in ("__module__", "__doc__", "__qualname__")}
    body |= {"forward": forward, "__reduce_ex__": __reduce_ex__}
    # Bypass metaclass hooks, which may register classes or want arguments.
    create: Any = ABCMeta.__new__ if issubclass(type(kind), ABCMeta) else type.__new__
    subclass = _SUBCLASSES[kind, selective] = create(type(kind), kind.__name__, (_Quiet, kind), body)
    return subclass


# Operators whose results selective checkpointing keeps, in any overload.
KEPT = {
    *("mm", "addmm", "bmm", "baddbmm", "linear", "convolution"),
    *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn", "fused")),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"),
    *("flex_attention", "_flash_attention_forward", "_efficient_attention_forward"),
}


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = operator.name().split("::")[-1].split(".")[0] in KEPT
    for i, argument in enumerate(operator._schema.arguments) if saves and hasattr(operator, "_schema") else ():
        # Attention with dropout draws random numbers: it runs again, so that what is drawn after it is the same again.
        if argument.name == "dropout_p":
            value = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            saves = not value
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


_selective = partial(create_selective_checkpoint_contexts, _policy)


def _new(kind: type, *args: Any) -> Any:
    """Called by copies and pickles of a recomputed module."""
    return kind.__new__(kind, *args)


def _call(forward: Callable[..., Any], module: nn.Module, keywords: tuple[str, ...], *values: Any) -> Any:
    count = len(values) - len(keywords)
    return forward(module, *values[:count], **dict(zip(keywords, values[count:])))


def _function_modes() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()  # type: ignore[no-any-return]  # untyped in torch


def _contexts(module: nn.Module, selective: bool) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first forward, which notes the buffers it changes, and the second, which changes their copies."""
    changed: list[tuple[nn.Module, str]] = []
    saving, reusing = _selective() if selective else noop_context_fn()
    modes = _function_modes()

    @contextmanager
    def first() -> Iterator[None]:
        buffers = [
            (m, name, b, b._version) for m in module.modules() for name, b in m._buffers.items() if b is not None
        ]
        with saving:
            yield
        for m, name, buffer, version in buffers:
            if m._buffers.get(name) is not buffer or buffer._version != version or isinstance(m, _NormBase):
                changed.append((m, name))

    @contextmanager
    def second() -> Iterator[None]:
        buffers = [(m, name, m._buffers.get(name)) for m, name in changed]
        for m, name, buffer in buffers:
            m._buffers[name] = None if buffer is None else buffer.clone()
        try:
            with ExitStack() as contexts:
                active = {id(mode) for mode in _function_modes()}
                for mode in modes:
                    if id(mode) not in active:
                        contexts.enter_context(mode)  # the casts of O1, which torch's checkpoint does not restore
                contexts.enter_context(upcast_again(module))
                contexts.enter_context(reusing)
                yield
        finally:
            for m, name, buffer in buffers:
                m._buffers[name] = buffer

    return first(), _Again(second)


class _Again(ExitStack):
    """A context that can be entered more than once: for a gradient of a gradient torch recomputes twice."""

    def __init__(self, factory: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._factory = factory

    def __enter__(self) -> None:  # type: ignore[override]  # nothing uses what an ExitStack returns
        self.enter_context(self._factory())


# -- activation offload: what autograd saves on a CUDA device is in pinned host memory from forward to backward --------
# A side stream copies while the compute stream computes. In forward at most `AHEAD` copies are under way: then the
# compute stream waits for the oldest. In backward a tensor that is asked for fetches the `AHEAD` that were saved before
# it, which autograd mostly asks for next. Memory on the device belongs to the compute stream. Left on the device:
# parameters, views of them and autocast's copies, which stay anyway; tensors below `LEAST` bytes; and what is not a
# plain dense tensor. Parts that are recomputed save their inputs only, and what they save again in backward stays.

AHEAD = 2  # copies under way
LEAST = 1 << 16  # bytes


class Saved:
    """A tensor in host memory, its copy on the device if there is one, and the tensor that was saved before it."""

    def __init__(self, tensor: Tensor, previous: Saved | None) -> None:
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.previous: Any = weakref.ref(previous) if previous is not None else lambda: None
        self.fetched: tuple[Tensor, Any] | None = None  # with the event of its arrival, until it is asked for
        self.unpacked: Any = lambda: None  # weak reference to the result of the last `_unpack`


class Offload(saved_tensors_hooks):
    """A context in which tensors that autograd saves on `device` go to the host's memory. Backward may run outside."""

    def __init__(self, device: torch.device, min_bytes: int = LEAST) -> None:
        super().__init__(self._pack, self._unpack)
        self._device, self._min_bytes = device, min_bytes
        self._streams = torch.get_device_module(device)
        self._copy_stream = self._streams.Stream(device)
        self._under_way: deque[tuple[Tensor, Any]] = deque()  # tensors on the device, and events of their copies
        self._last: Any = lambda: None  # weak reference to the tensor that was saved last
        self._saved: weakref.WeakValueDictionary[Any, Saved] = weakref.WeakValueDictionary()

    def _pack(self, tensor: Tensor) -> Any:
        if not self._offloads(tensor):
            return tensor
        view = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (*view, tensor._version)
        saved = self._saved.get(key)
        if saved is None or saved.storage.expired():  # else another operator has saved it
            saved = self._saved[key] = Saved(tensor, self._last())
            self._last = weakref.ref(saved)
            self._copy(saved.host, tensor.detach(), tensor)
        return saved

    def _copy(self, target: Tensor, source: Tensor, on_device: Tensor) -> Any:
        """Copy on the side stream; memory on the device is kept until the compute stream has waited for it."""
        compute = self._streams.current_stream(self._device)
        self._copy_stream.wait_stream(compute)
        with self._streams.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)
            event = self._copy_stream.record_event()
        self._under_way.append((on_device.detach(), event))
        while len(self._under_way) > AHEAD:
            compute.wait_event(self._under_way.popleft()[1])
        return event

    def _offloads(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.device == self._device and tensor.layout is torch.strided
        base = tensor if tensor._base is None else tensor._base
        if not plain or tensor.nbytes < self._min_bytes or 0 in tensor.stride() or isinstance(base, nn.Parameter):
            return False
        # Autocast's copy of a parameter, which stays for the rest of forward.
        node: Any = base.grad_fn
        cast = node is not None and node.name() == "ToCopyBackward0"
        return not (cast and isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter))

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Saved):
            return packed  # type: ignore[no-any-return]  # a tensor
        tensor: Tensor | None = packed.unpacked()
        if tensor is not None:
            return tensor
        self._fetch(packed)
        assert packed.fetched is not None
        (tensor, arrival), packed.fetched = packed.fetched, None
        self._streams.current_stream(self._device).wait_event(arrival)
        packed.unpacked = weakref.ref(tensor)
        previous = packed.previous()
        for _ in range(AHEAD):
            if previous is not None:
                self._fetch(previous)
                previous = previous.previous()
        return tensor

    def _fetch(self, saved: Saved) -> None:
        if saved.fetched is None and saved.unpacked() is None:
            tensor = torch.empty_like(saved.host, device=self._device)
            saved.fetched = tensor, self._copy(tensor, saved.host, tensor)
