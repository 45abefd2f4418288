"""fp32, TF32, and bf16 and fp16 by autocast: fp32 parameters, matrix products in half precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from ..base.pytree import map_leaves
from ..errors import BatchError
from ..options import AutocastKwargs
from ..protocols import Facts, Refusal

LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class FP32:
    """fp32 weights and products, with torch's TF32 flags as the user set them. The other precisions override what differs."""

    name: ClassVar[str] = "fp32"
    param: ClassVar[torch.dtype] = torch.float32
    compute: ClassVar[torch.dtype] = torch.float32
    reduce: ClassVar[torch.dtype] = torch.float32
    scaled: ClassVar[bool] = False
    masters: ClassVar[bool] = False
    raises: ClassVar[bool] = False
    keeps_updates: ClassVar[bool] = True
    swaps: ClassVar[bool] = False
    tf32: ClassVar[bool] = False

    options: AutocastKwargs = AutocastKwargs()

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return None

    @property
    def gather(self) -> torch.dtype | None:
        return None

    @property
    def output(self) -> torch.dtype | None:
        return None

    def decide(self, model: nn.Module) -> None:
        pass

    def convert(self, model: nn.Module) -> nn.Module:
        return model

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return model

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        return nullcontext()


class TF32(FP32):
    """fp32 weights, matrix products and convolutions on TF32 Tensor Cores: 10 bits of mantissa instead of 23."""

    name: ClassVar[str] = "tf32"
    tf32: ClassVar[bool] = True

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.device == "cpu":
            return Refusal(
                "TF32 is a mode of GPU Tensor Cores and training runs on the CPU", "use fp32 or bf16"
            )
        for device in facts.hardware.devices:
            if not device.tf32:
                why = f"{device.name} has no TF32 Tensor Cores (NVIDIA Ampere, sm_80, and newer do)"
                return Refusal(why, "use fp32 or auto")
        return None


class Mixed(FP32):
    """Autocast to `compute`."""

    raises: ClassVar[bool] = True
    tf32: ClassVar[bool] = True  # for functions that autocast leaves in fp32

    @property
    def gather(self) -> torch.dtype | None:
        return self.compute if self.options.enabled else None

    @property
    def output(self) -> torch.dtype | None:
        return self.options.output_dtype

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return Autocast(model, device, self.compute, self.options) if self.options.enabled else model

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        if not options.enabled:
            return nullcontext()
        return torch.autocast(device.type, self.compute, True, options.cache_enabled)


class BF16(Mixed):
    """fp32 parameters, products in bfloat16 under autocast. bf16 has the range of fp32 and needs no loss scale."""

    name: ClassVar[str] = "bf16"
    compute: ClassVar[torch.dtype] = torch.bfloat16

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        for device in facts.hardware.devices if facts.device != "cpu" else ():
            if not device.bf16:
                card = f"{device.name} ({device.architecture or 'this device'})"
                return Refusal(
                    f"{card} has no bf16 units; torch would emulate them", "use fp16, fp32 or auto"
                )
        return None  # CPUs run bf16 with or without instructions for it; the plan says which


class FP16(Mixed):
    """fp32 parameters, products in float16 under autocast, and a loss scale, since gradients below 6e-8 would vanish."""

    name: ClassVar[str] = "fp16"
    compute: ClassVar[torch.dtype] = torch.float16
    scaled: ClassVar[bool] = True

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        for device in facts.hardware.devices if facts.device == "cuda" else ():
            if "GTX 16" in device.name:
                return Refusal(
                    f"{device.name} has no Tensor Cores and its fp16 gives NaN", "use fp32 or auto"
                )
        return None


def raise_weights(model: nn.Module) -> list[tuple[nn.Parameter, torch.dtype]]:
    """Raise trainable bf16 and fp16 parameters of `model` to fp32 in place. Frozen ones keep their dtype.

    Optimizers and tied modules keep the same parameter objects. Buffers are raised too, because batch-norm needs one dtype, except in
    modules with frozen parameters only.

    Returns:
        The raised parameters, each with its dtype before.
    """
    raised = [(p, p.dtype) for p in model.parameters() if p.requires_grad and p.dtype in LOW]
    chosen = {id(t) for p, _ in raised for t in (p, p.grad) if t is not None}
    for module in model.modules() if raised else ():
        own = [p for p in module._parameters.values() if p is not None]
        if not own or any(id(p) in chosen for p in own):
            chosen.update(id(b) for b in module._buffers.values() if b is not None and b.dtype in LOW)
        module._apply(lambda t: t.float() if id(t) in chosen else t, recurse=False)
    return raised


# -- autocast


EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# Layers with weights and biases that autocast converts.
PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
MATRICES = (nn.LayerNorm, nn.RMSNorm, nn.Bilinear)  # other layers that have weights of several dimensions


class Autocast(nn.Module):
    """Calls `module` under ``torch.autocast`` and casts floating-point outputs to ``options.output_dtype``; float64 stays.

    Autocast is inside this forward, so that DDP and torch.compile see one function.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, compute: torch.dtype, options: AutocastKwargs
    ) -> None:
        super().__init__()
        self.module = module
        self.device_type = device.type
        self.compute = compute
        self.options = options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.compute, True, self.options.cache_enabled):
            outputs = self.module(*args, **kwargs)
        return cast_outputs(outputs, self.options.output_dtype)


def cast_outputs(outputs: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors in a model's outputs to `dtype`; None leaves them as computed.

    Raises:
        BatchError: the outputs have a container that cannot be rebuilt.
    """
    if dtype is None:
        return outputs
    if type(outputs) is Tensor:
        return cast_leaf(outputs, dtype)
    try:
        return map_leaves(lambda leaf: cast_leaf(leaf, dtype), outputs)
    except BatchError as error:
        raise BatchError(
            f"the model's output cannot be given back in {dtype}: {error.__cause__}. Return plain tensors, tuples, lists or dicts from "
            "forward(), or leave outputs as computed with AutocastKwargs(output_dtype=None)"
        ) from error


def cast_leaf(leaf: Any, dtype: torch.dtype, double: bool = False) -> Any:
    """`leaf` in `dtype` if it is a floating-point tensor or packed sequence; `double` includes float64."""
    if isinstance(leaf, Tensor):
        return (
            leaf.to(dtype) if leaf.is_floating_point() and (double or leaf.dtype != torch.float64) else leaf
        )
    if isinstance(leaf, PackedSequence):
        return leaf._replace(data=cast_leaf(leaf.data, dtype, double))
    return leaf


class Upcast:
    """Hooks that show a module some of its parameters in fp32 while it computes.

    Autocast converts the inputs of matrix products only. Other functions, such as norms, need fp32 weights for fp32 inputs.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._kept: list[dict[str, Any]] = []

    def begin(self, module: nn.Module, *_: Any) -> None:
        held = {name: module._parameters[name] for name in self._names}
        self._kept.append(held)
        for name, parameter in held.items():
            if parameter is not None and parameter.dtype in LOW:
                module._parameters[name] = parameter.float()  # type: ignore[assignment]

    def end(self, module: nn.Module, *_: Any) -> None:
        module._parameters.update(self._kept.pop())


def as_if_fp32(model: nn.Module) -> list[RemovableHandle]:
    """Hook `model`, which gathers its parameters in half precision, so that it computes as with fp32 parameters under autocast.

    Norms and other modules outside of matrix products see their vectors in fp32, and embeddings return fp32. The hooks run inside torch's
    hooks that gather parameters.
    """
    handles: list[RemovableHandle] = []
    for module in model.modules():
        if isinstance(module, EMBEDDINGS):
            handles.append(
                module.register_forward_hook(
                    lambda _, __, out: cast_outputs(out, torch.float32), prepend=True
                )
            )
        every = isinstance(module, MATRICES)
        vectors = [name for name, p in module._parameters.items() if p is not None and (p.ndim < 2 or every)]
        if vectors and not isinstance(module, PRODUCTS):
            upcast = Upcast(vectors)
            handles.append(module.register_forward_pre_hook(upcast.begin))
            handles.append(module.register_forward_hook(upcast.end, prepend=True, always_call=True))
    return handles


@contextmanager
def upcast_again(module: nn.Module) -> Iterator[None]:
    """Inside, `module` sees the same parameters when it is recomputed without its hooks."""
    owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    found = [owner for owner in owners if isinstance(owner, Upcast)]
    for upcast in found:
        upcast.begin(module)
    try:
        yield
    finally:
        for upcast in found:
            upcast.end(module)
