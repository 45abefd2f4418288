"""The parts of a model that are wrapped on their own: repeated blocks, classes by name, or parts by size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import PrepareError, nearest

LARGE = 4  # a layer with 1/LARGE of the largest block's parameters is gathered on its own
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Its forward reads the weights of its parts without calling the parts, so hooks on them would not run.
ATOMS = (nn.MultiheadAttention,)


def find_blocks(model: nn.Module, wrap: str | tuple[str, ...] | int) -> list[nn.Module]:
    """Find the modules inside `model` to wrap on their own, inner ones before those that hold them.

    `wrap` is that of `FSDPOptions`. Modules with tied weights outside of them are left out, and those with parameters
    of another dtype than most are in: parameters that are gathered together have one dtype.
    """
    modules = [m for m in bottom_up(model) if m is not model]
    if isinstance(wrap, int):
        selected = _by_size(modules, model, wrap)
    elif isinstance(wrap, str):
        selected = {id(m) for m in find_repeated(model)}
    else:
        classes = {type(m).__name__ for m in modules}
        for name in wrap:
            if name not in classes:
                raise PrepareError(
                    f"no module in this {type(model).__name__} is a {name!r}{nearest(name, classes)}: correct `wrap`"
                )
        selected = {id(m) for m in modules if type(m).__name__ in wrap}
    selected |= _of_another_dtype(model)
    return [m for m in modules if id(m) in selected and _wrappable(m, model)]


def find_layers(model: nn.Module, blocks: Sequence[nn.Module], ignored: Collection[int] = ()) -> list[nn.Module]:
    """The large layers outside of `blocks` that share no parameter, such as embeddings and heads.

    A layer whose weights a parent reads without calling it stays with the parent.
    """

    def size(parameters: Iterator[nn.Parameter]) -> int:
        return sum(p.numel() for p in parameters if id(p) not in ignored)

    in_blocks = {id(m) for block in blocks for m in block.modules()}
    layers = [m for m in bottom_up(model) if id(m) not in in_blocks and m is not model]
    sizes = [size(m.parameters(recurse=isinstance(m, ATOMS))) for m in layers]
    largest = max((size(b.parameters()) for b in blocks), default=0) or max(sizes, default=0)
    large = [m for m, elements in zip(layers, sizes) if elements and elements * LARGE >= largest]
    return [m for m in large if _wrappable(m, model) and not _is_read(m, model)]


def find_repeated(model: nn.Module) -> Iterator[nn.Module]:
    """Find children of one class, with children of their own, if a container holds two or more of them."""
    for container in model.modules():
        if isinstance(container, CONTAINERS):
            children = list(container.children())
            # By name: some may have a subclass of ours (recomputed) that has its base's name.
            classes = [(type(c).__module__, type(c).__qualname__) for c in children]
            for child, name in zip(children, classes):
                if classes.count(name) > 1 and next(child.children(), None) is not None:
                    yield child


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Repeated blocks that can be called, tied or not; of blocks inside one another, the outermost."""
    blocks: dict[int, nn.Module] = {}
    nested: set[int] = set()
    for block in sorted(find_repeated(model), key=lambda b: -sum(1 for _ in b.modules())):
        if id(block) not in nested and _callable(block):
            blocks[id(block)] = block
            nested.update(id(m) for m in block.modules())
    return [m for m in model.modules() if id(m) in blocks]


def bottom_up(module: nn.Module, visited: set[int] | None = None) -> Iterator[nn.Module]:
    """Yield every module once, children before their parents, without the parts of `ATOMS`."""
    visited = set() if visited is None else visited
    if id(module) in visited:
        return
    visited.add(id(module))
    if not isinstance(module, ATOMS):
        for child in module.children():
            yield from bottom_up(child, visited)
    yield module


def _is_read(layer: nn.Module, model: nn.Module) -> bool:
    """Whether a parent's forward reads a parameter of `layer`, as ``F.linear(x, self.embed.weight)`` does."""
    for module in model.modules():
        code = getattr(getattr(type(module), "forward", None), "__code__", None)
        reads = code is not None and not layer._parameters.keys().isdisjoint(code.co_names)
        if reads and module is not layer and any(m is layer for m in module.modules()):
            return True
    return False


def _of_another_dtype(model: nn.Module) -> set[int]:
    count: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        count[parameter.dtype] += parameter.numel()
    usual = count.most_common(1)[0][0] if count else None
    return {id(m) for m in model.modules() if any(p.dtype != usual for p in m.parameters(recurse=False))}


def _by_size(modules: Sequence[nn.Module], model: nn.Module, minimum: int) -> set[int]:
    selected: set[int] = set()
    in_blocks: set[int] = set()  # parameters
    for module in modules:
        elements = {id(p): p.numel() for p in module.parameters() if id(p) not in in_blocks}
        if sum(elements.values()) >= minimum and _wrappable(module, model):
            selected.add(id(module))
            in_blocks.update(elements)
    return selected


def _wrappable(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module has parameters and a forward, and shares no parameter with the rest of `model`."""
    parameters, submodules = set(map(id, module.parameters())), set(map(id, module.modules()))
    outer_parameters = {id(p) for m in model.modules() if id(m) not in submodules for p in m._parameters.values()}
    return bool(parameters) and _callable(module) and parameters.isdisjoint(outer_parameters)


def _callable(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward  # a scripted module has none


def refuse_uncallable(model: nn.Module) -> None:
    """Raises PrepareError for a bare container, which has no forward, and for scripted modules, which take no hooks."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        remedy = "leave torch.jit.script out, or use strategy='ddp'"
        raise PrepareError(f"a scripted module takes no hooks, by which this strategy works: {remedy}")
    if not _callable(model):
        raise PrepareError(f"a {type(model).__name__} cannot be called: put it into a module with a forward")


def refuse_sharded(model: nn.Module) -> None:
    """Raises PrepareError for a parameter that is a DTensor already."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise PrepareError(f"parameter {name!r} is sharded already, by an earlier run or by hand: build it anew")


def refuse_hooked(parameters: Iterable[tuple[str, Any]]) -> None:
    """Raise PrepareError for a parameter with a hook, if a shard is to replace it or has done so."""
    for name, parameter in parameters:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise PrepareError(
                f"parameter {name!r} has a hook, which would not run, since a shard replaces the parameter: register "
                "it after prepare(), by register_post_accumulate_grad_hook, which gets the shard with its averaged "
                "gradient, or use strategy='ddp'"
            )


def refuse_sparse(model: nn.Module, reason: str, remedy: str = "use strategy='ddp'", narrow: bool = False) -> None:
    """Refuse trainable embeddings with sparse gradients; with `narrow`, only those with low-precision weights."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        trained = module.sparse and module.weight.requires_grad
        if trained and (not narrow or module.weight.dtype.itemsize < 4):
            subject = f"{name or type(module).__name__!r} has sparse gradients"
            raise PrepareError(f"{subject}, and {reason}: make it with sparse=False, or {remedy}")
