"""torch.compile, of the whole model or of each repeated block, in place: names, classes and methods stay.

The whole model is compiled around autocast and, in ddp, around DistributedDataParallel, whose buckets then split the graph, so that
gradients are reduced while backward still runs. Blocks are compiled one by one before a strategy wraps the model: equal blocks share one
graph, so that the first step waits less. Precision "auto" is settled by its rule then: a timing would compile both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import PrepareError, SettingError, nearest
from .blocks import repeated_blocks

WHAT = ("model", "blocks")


@dataclass(frozen=True)
class CompileOptions:
    """What torch.compile is applied to, and how.

    Attributes:
        what: "model", the whole one in one call; "blocks", each repeated block found in it.
        backend, mode, fullgraph, dynamic, options: torch.compile's own. `fullgraph` makes an error of what breaks a graph; DDP and FSDP
            break it around the model, so there it goes with "blocks".
    """

    what: str = "model"
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.what not in WHAT:
            raise SettingError(
                f"what={self.what!r} is neither 'model' nor 'blocks'{nearest(str(self.what), WHAT)}"
            )
        if not (callable(self.backend) or (isinstance(self.backend, str) and self.backend)):
            raise SettingError(
                f"backend={self.backend!r} is neither the name of a backend of torch.compile nor a function"
            )
        if self.mode is not None and self.options is not None:
            raise SettingError("mode and options of torch.compile exclude each other: pass one of them")
        if not isinstance(self.fullgraph, bool) or self.dynamic not in (None, True, False):
            raise SettingError(
                f"fullgraph={self.fullgraph!r} and dynamic={self.dynamic!r}: True or False (dynamic: or None)"
            )


def read_compile(given: Any, backend: Any) -> CompileOptions | None:
    """What `compile` and `dynamo_backend` of Accelerator ask for; None for nothing.

    Args:
        given: False, True, "model", "blocks" or `CompileOptions`.
        backend: None, or the name of a backend, in any case of letters; "no" asks for nothing.

    Raises:
        SettingError: anything else, both, or a backend that torch does not know.
    """
    word = getattr(backend, "value", backend)
    asked = None if word is None or str(word).lower() == "no" else CompileOptions(backend=str(word).lower())
    if isinstance(given, CompileOptions):
        options: CompileOptions | None = given
    elif isinstance(given, bool):
        options = CompileOptions() if given else None
    elif isinstance(given, str) and given in WHAT:
        options = CompileOptions(what=given)
    else:
        raise SettingError(
            f"compile={given!r} is neither True nor False, nor 'model', nor 'blocks', nor a CompileOptions(...)"
            f"{nearest(given, WHAT) if isinstance(given, str) else ''}"
        )
    if options and asked:
        raise SettingError(
            "both compile and dynamo_backend ask for torch.compile: pass compile=CompileOptions(backend=...)"
        )
    options = options or asked
    if options and isinstance(options.backend, str):
        import torch._dynamo  # 1.6 s, which only those pay who compile

        known = torch._dynamo.list_backends(exclude_tags=())
        if options.backend not in known:
            raise SettingError(
                f"torch.compile has no backend {options.backend!r} here{nearest(options.backend, known) or '.'} Known: {', '.join(known)}"
            )
    return options


def compile_setting(word: str | None, backend: Any) -> CompileOptions | None:
    """What the setting `compile` asks for beside `dynamo_backend`; see `read_compile`."""
    return read_compile(False if word in (None, "no") else word, backend)


class Compiling:
    """Compiles what one run prepares, and undoes it when the run lets go."""

    def __init__(self, options: CompileOptions) -> None:
        self._options = options
        self._compiled: list[nn.Module] = []

    def whole(self, module: nn.Module) -> None:
        """What a strategy calls on the module that torch.compile should see whole."""
        if self._options.what == "model":
            self._compile(module)

    def blocks(self, models: Sequence[nn.Module], sharded: bool) -> None:
        """The repeated blocks of `models`, before they are wrapped.

        Args:
            sharded: they will gather their parameters by hooks, which no graph holds.

        Raises:
            PrepareError: there are none, a model is compiled already, or compiling it whole would do nothing.
        """
        for model in models:
            if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules()):
                raise PrepareError(
                    f"this {type(model).__name__} or a part of it is compiled already, and compile= asks for it again: prepare the plain "
                    "model, or leave compile out"
                )
        if self._options.what != "blocks":
            for model in models if sharded else ():
                if passed_over(model):
                    raise PrepareError(
                        f"the forward of this {type(model).__name__} is torch's own, which torch.compile passes over behind the hooks that "
                        "gather a sharded model's parameters: call it from a module of your own, or use compile='blocks'"
                    )
            return
        found = [block for model in models for block in repeated_blocks(model)]
        if models and not found:
            raise PrepareError(
                f"compile='blocks' means the repeated blocks of a model, and this {' or '.join(type(m).__name__ for m in models)} has none "
                "(two or more of one class in a ModuleList, Sequential or ModuleDict): use compile=True"
            )
        for block in found:
            self._compile(block)

    def _compile(self, module: nn.Module) -> None:
        o = self._options
        options: dict[str, Any] = {
            "backend": o.backend,
            "mode": o.mode,
            "fullgraph": o.fullgraph,
            "dynamic": o.dynamic,
        }
        options["options"] = None if o.options is None else dict(o.options)
        if passed_over(module):

            def call(*args: Any, **kwargs: Any) -> Any:
                return module._call_impl(*args, **kwargs)

            module._compiled_call_impl = torch.compile(call, **options)
        else:
            module.compile(**options)
        self._compiled.append(module)

    def undo(self) -> None:
        for module in self._compiled:
            module._compiled_call_impl = None
        self._compiled.clear()


def passed_over(module: nn.Module) -> bool:
    """Whether torch.compile does nothing to `module` in place: its forward is torch's own code (a bare nn.Sequential), which is
    compiled only where other code calls it."""
    return type(module).forward.__module__.startswith("torch.nn.")
