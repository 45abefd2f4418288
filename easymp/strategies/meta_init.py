"""Initial values for a model that was built on the meta device, module by module: no process holds the whole model.

Each module gets storage for its own tensors and draws their values by its `reset_parameters`, children first, in the
order they were registered: those of a model that was built normally with the same seed, as torch's modules are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..errors import PrepareError

Initialize = Callable[[nn.Module], object] | None

INIT_METHODS = ("_init_weights", "init_weights")  # of models; we cannot call them, for some take a module
LEFT: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that a run divided among ranks: their meta tensors have values elsewhere, and must not get new ones."""


def left_to_others(model: nn.Module) -> bool:
    """Whether `model` is one of `LEFT` or a submodule of one, or a view of these, which shares the ``__dict__``."""
    return any(vars(module) is vars(model) for divided in LEFT for module in divided.modules())


def on_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of `model` is on the meta device."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def materialise(
    model: nn.Module, device: torch.device, initialize: Initialize = None,
    finished: Callable[[nn.Module], None] = lambda module: None,
) -> None:  # fmt: skip
    """Give each meta parameter and buffer of `model` storage on `device`, and values. Tensors stay the same objects.

    A tied parameter takes the values of the module that comes first. A holder, a module with `reset_parameters` and
    without tensors of its own, has it called after its children, unless a tensor inside it had values before.
    `initialize` is called with each module that had meta tensors, `finished` with each, children first, as soon as its
    values are final.
    """
    if model in LEFT:
        raise PrepareError(f"an earlier run left parts of this {type(model).__name__} to other ranks: build it anew")
    holders = set()
    for module in model.modules():
        tensors = [*module.parameters(), *module.buffers()]
        if _reset_method(module) and not _own_tensors(module) and tensors and all(t.is_meta for t in tensors):
            holders.add(id(module))
    for name, module in model.named_modules():
        _check(name, module, initialize, id(module) in holders)
    filled: dict[int, Tensor] = {}  # tensors with values; kept alive, so that an id means one tensor
    visited: set[int] = set()

    def visit(module: nn.Module, in_holder: bool) -> Iterator[nn.Module]:
        """Yield modules once their values are final: those inside a holder after the holder, which may change them."""
        if id(module) in visited:
            return
        visited.add(id(module))
        is_holder = id(module) in holders
        completed_inside: list[nn.Module] = []
        for child in module.children():
            completed = visit(child, in_holder or is_holder)
            if is_holder and not in_holder:
                completed_inside += completed
            else:
                yield from completed
        _fill(module, device, initialize, filled)
        if is_holder:
            with torch.no_grad(), device:
                _reset_method(module)()  # type: ignore[misc]  # a holder has one
        yield from completed_inside
        yield module

    for module in visit(model, False):
        finished(module)


def _reset_method(module: nn.Module) -> Callable[[], object] | None:
    """The method that draws the module's parameters anew: `reset_parameters`, in some of torch's with an underscore."""
    methods = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next(filter(callable, methods), None)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def _check(name: str, module: nn.Module, initialize: Initialize, is_holder: bool) -> None:
    remedy = "pass Settings(initialize=function), which fills each such module, or build it off meta"
    label = f"{type(module).__name__} {name!r}" if name else f"this {type(module).__name__}"
    meta = [n for n, t in _own_tensors(module).items() if t.is_meta]
    real = [n for n, t in _own_tensors(module).items() if not t.is_meta]
    if meta and _reset_method(module) is None and initialize is None:
        raise PrepareError(
            f"{label} has {meta[0]!r} on the meta device, without values, and no reset_parameters(): {remedy}"
        )
    if meta and real:
        raise PrepareError(
            f"{label} has {meta[0]!r} on the meta device and values in {real[0]!r}: build it whole on meta"
        )
    method = next((n for n in INIT_METHODS if callable(getattr(module, n, None))), None)
    if method and initialize is None and not is_holder and any(t.is_meta for t in module.parameters()):
        raise PrepareError(
            f"{label} has {method}(), which did nothing on the meta device and is not called by us: {remedy}. If it "
            f"takes a module, initialize=model.{method} will do"
        )
    attribute = next((n for n, v in vars(module).items() if isinstance(v, Tensor) and v.is_meta), None)
    if attribute:
        raise PrepareError(
            f"{label} has a tensor {attribute!r} on the meta device that is neither parameter nor buffer: register it, "
            "or build off meta"
        )


def _fill(module: nn.Module, device: torch.device, initialize: Initialize, filled: dict[int, Tensor]) -> None:
    meta = {name: t for name, t in _own_tensors(module).items() if t.is_meta}
    tied = {name: t for name, t in _own_tensors(module).items() if id(t) in filled}
    if not meta and not tied:
        return
    swap_in(module, lambda t: _allocate(t, device) if t.is_meta else t)
    # Tied values are drawn and thrown away, so that the random stream continues as if the model had been built
    # normally.
    for name, tensor in tied.items():
        _table(module, name)[name] = _allocate(tensor, device)
    versions = {name: tensor._version for name, tensor in meta.items()}
    with torch.no_grad(), device:
        reset = _reset_method(module)
        if reset is not None:
            reset()
        if initialize is not None:
            initialize(module)
    for name, tensor in tied.items():
        _table(module, name)[name] = tensor
    for name, tensor in meta.items():
        value = _table(module, name)[name]
        if value.is_meta or (value is tensor and _unwritten(tensor, versions[name])):
            raise PrepareError(
                f"nothing gave {name!r} of {type(module).__name__} values after it was built on the meta device: let "
                "its reset_parameters() do it, pass Settings(initialize=function), or build the model off meta"
            )
        filled[id(value)] = value


def _table(module: nn.Module, name: str) -> dict[str, Tensor]:
    return module._parameters if name in module._parameters else module._buffers  # type: ignore[return-value]


def swap_in(module: nn.Module, fresh: Callable[[Tensor], Tensor]) -> None:
    """Give `module`'s own parameters and buffers, which stay the same objects, the storage of ``fresh(tensor)``."""
    for buffer in module._buffers.values():
        if buffer is not None and (new := fresh(buffer)) is not buffer:
            torch.utils.swap_tensors(buffer, new)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module._apply(fresh, recurse=False)  # lets modules with weak references to parameters (LSTM) release them
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def _allocate(tensor: Tensor, device: torch.device) -> Tensor:
    """Storage for `tensor`; floats begin as NaN, by which `_unwritten` knows them."""
    fresh = torch.empty_like(tensor, device=device, requires_grad=False)
    if fresh.is_floating_point() or fresh.is_complex():
        fresh.fill_(torch.nan)
    return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh


def _unwritten(tensor: Tensor, version: int) -> bool:
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.detach().reshape(-1)[0].isnan())
    return tensor._version == version
