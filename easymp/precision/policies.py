"""fp32, TF32, and bf16, fp16 and fp8 by autocast: fp32 parameters, matrix products in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from ..base.pytree import map_leaves
from ..errors import BatchError, PrepareError
from ..logging import get_logger
from ..options import AutocastKwargs
from ..protocols import Facts, Precision, Refusal

logger = get_logger(__name__)

LOW = (torch.float16, torch.bfloat16)


class FP32(Precision):
    """fp32 weights and products, with torch's TF32 flags as the user set them."""

    name: ClassVar[str] = "fp32"
    param: ClassVar[torch.dtype] = torch.float32
    compute: ClassVar[torch.dtype] = torch.float32
    reduce: ClassVar[torch.dtype] = torch.float32

    def __init__(self, options: AutocastKwargs = AutocastKwargs()) -> None:  # noqa: B008
        self.options = options


class TF32(FP32):
    """fp32 weights, matrix products and convolutions on TF32 Tensor Cores: 10 bits of mantissa instead of 23."""

    name: ClassVar[str] = "tf32"
    tf32: ClassVar[bool] = True

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.device == "cpu":
            return Refusal("TF32 is a mode of GPU Tensor Cores and training runs on the CPU", "use fp32 or bf16")
        for device in facts.hardware.devices:
            if not device.tf32:
                reason = f"{device.name} has no TF32 Tensor Cores (NVIDIA Ampere, sm_80, and newer do)"
                return Refusal(reason, "use fp32 or auto")
        return None


class Mixed(FP32):
    """Autocast to `compute`."""

    raises: ClassVar[bool] = True
    tf32: ClassVar[bool] = True  # for functions that autocast leaves in fp32

    @property
    def gather(self) -> torch.dtype | None:
        return self.compute if self.options.enabled else None

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
                return Refusal(f"{card} has no bf16 units; torch would emulate them", "use fp16, fp32 or auto")
        return None  # CPUs run bf16 with or without instructions for it; the plan says which


class FP16(Mixed):
    """fp32 parameters, products in float16 under autocast, and a loss scale: gradients below 6e-8 would vanish."""

    name: ClassVar[str] = "fp16"
    compute: ClassVar[torch.dtype] = torch.float16
    scaled: ClassVar[bool] = True

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        for device in facts.hardware.devices if facts.device == "cuda" else ():
            if "GTX 16" in device.name:
                return Refusal(f"{device.name} has no Tensor Cores and its fp16 gives NaN", "use fp32 or auto")
        return None


def raise_weights(model: nn.Module) -> list[tuple[nn.Parameter, torch.dtype]]:
    """Raise trainable bf16 and fp16 parameters of `model` to fp32 in place; returns them, each with its dtype before.

    Buffers are raised too, because batch-norm needs one dtype, except in modules with frozen parameters only.
    """
    raised = [(p, p.dtype) for p in model.parameters() if p.requires_grad and p.dtype in LOW]
    ids = {id(t) for p, _ in raised for t in (p, p.grad) if t is not None}
    for module in model.modules() if raised else ():
        parameters = [p for p in module._parameters.values() if p is not None]
        if not parameters or any(id(p) in ids for p in parameters):
            ids.update(id(b) for b in module._buffers.values() if b is not None and b.dtype in LOW)
        module._apply(lambda t: t.float() if id(t) in ids else t, recurse=False)
    return raised


EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# Layers with weights and biases that autocast converts.
PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
MATRICES = (nn.LayerNorm, nn.RMSNorm, nn.Bilinear)  # other layers that have weights of several dimensions


class Autocast(nn.Module):
    """Calls `module` under autocast, inside of DDP and torch.compile, and casts outputs except float64 ones."""

    def __init__(self, module: nn.Module, device: torch.device, compute: torch.dtype, options: AutocastKwargs) -> None:
        super().__init__()
        self.module, self.device_type, self.compute, self.options = module, device.type, compute, options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.compute, True, self.options.cache_enabled):
            outputs = self.module(*args, **kwargs)
        return cast_outputs(outputs, self.options.output_dtype)


def cast_outputs(outputs: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors in a model's outputs to `dtype`; None leaves them as computed."""
    if dtype is None:
        return outputs
    if type(outputs) is Tensor:
        return cast_leaf(outputs, dtype)
    try:
        return map_leaves(lambda leaf: cast_leaf(leaf, dtype), outputs)
    except BatchError as error:
        raise BatchError(
            f"the model's output cannot be given back in {dtype}: {error.__cause__}. Return plain tensors, tuples, "
            "lists or dicts from forward(), or leave outputs as computed with AutocastKwargs(output_dtype=None)"
        ) from error


def cast_leaf(leaf: Any, dtype: torch.dtype, double: bool = False) -> Any:
    """`leaf` in `dtype` if it is a floating-point tensor or packed sequence; `double` includes float64."""
    if isinstance(leaf, Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() and (double or leaf.dtype != torch.float64) else leaf
    if isinstance(leaf, PackedSequence):
        return leaf._replace(data=cast_leaf(leaf.data, dtype, double))
    return leaf


class Upcast:
    """Hooks that show a module parameters in fp32 while it computes: autocast casts inputs of matrix products only."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._replaced: list[dict[str, Any]] = []

    def begin(self, module: nn.Module, *_: Any) -> None:
        parameters = {name: module._parameters[name] for name in self._names}
        self._replaced.append(parameters)
        for name, parameter in parameters.items():
            if parameter is not None and parameter.dtype in LOW:
                module._parameters[name] = parameter.float()  # type: ignore[assignment]

    def end(self, module: nn.Module, *_: Any) -> None:
        module._parameters.update(self._replaced.pop())


def as_if_fp32(model: nn.Module) -> list[RemovableHandle]:
    """Hook `model`, which gathers parameters in half precision, to compute as with fp32 ones under autocast.

    Norms and the like see their vectors in fp32, and embeddings return fp32. The hooks run inside torch's own.
    """
    handles: list[RemovableHandle] = []
    for module in model.modules():
        if isinstance(module, EMBEDDINGS):
            widen = lambda _, __, outputs: cast_outputs(outputs, torch.float32)  # noqa: E731
            handles.append(module.register_forward_hook(widen, prepend=True))
        has_matrices = isinstance(module, MATRICES)
        names = [name for name, p in module._parameters.items() if p is not None and (p.ndim < 2 or has_matrices)]
        if names and not isinstance(module, PRODUCTS):
            upcast = Upcast(names)
            handles.append(module.register_forward_pre_hook(upcast.begin))
            handles.append(module.register_forward_hook(upcast.end, prepend=True, always_call=True))
    return handles


@contextmanager
def upcast_again(module: nn.Module) -> Iterator[None]:
    """Upcast the weights of `module` as its hooks do, for a recomputation that runs without hooks."""
    hook_owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    upcasts = [owner for owner in hook_owners if isinstance(owner, Upcast)]
    for upcast in upcasts:
        upcast.begin(module)
    try:
        yield
    finally:
        for upcast in upcasts:
            upcast.end(module)


# -- fp8 ---------------------------------------------------------------------------------------------------------------
# Inputs and weights are rounded to e4m3 (3 bits of mantissa, up to 448), gradients to e5m2 (2 bits, up to 57344), as in
# arXiv:2209.05433. Each tensor is divided by one scale, which maps its largest element to the format's largest number;
# ``torch._scaled_mm`` multiplies the product by both scales. Parameters and their gradients stay fp32. Each weight is
# rounded once an update, outside of what torch.compile sees: one byte an element, from the first forward that trains to
# the step. Under fsdp and hsdp weights are gathered in bf16, and rounded after each gather.

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


class FP8(BF16):
    """bf16 autocast; each plain `nn.Linear` with sizes that are multiples of 16 becomes a `Float8Linear`, in place."""

    name: ClassVar[str] = "fp8"
    swaps: ClassVar[bool] = True
    rounds: ClassVar[bool] = True
    multiple: ClassVar[int] = 16  # of inner and last dimensions, which torch._scaled_mm takes

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        reason = "fp8 needs the fp8 Tensor Cores of an NVIDIA GPU of sm_89 (Ada, Hopper) or newer"
        if facts.device == "cpu":
            return Refusal(f"{reason}, and training runs on the CPU", "use bf16, fp32 or auto")
        for device in facts.hardware.devices:
            if not device.fp8 or device.capability is None:
                card = f"{device.name} ({device.architecture or device.kind})"
                return Refusal(f"{reason}, and this device is {card}", "use bf16, fp32 or auto")
        return None

    def convert(self, model: nn.Module) -> nn.Module:
        """Swap layers, see the class; PrepareError if the model has none to swap."""
        layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
        swapped = {name: layer for name, layer in layers.items() if swappable(layer)}
        if not swapped and not any(type(layer) is Float8Linear for layer in model.modules()):  # of an earlier run
            raise PrepareError(
                "mixed_precision='fp8' needs a plain nn.Linear whose in_features and out_features are multiples of "
                f"{self.multiple}, and none of the {len(layers)} in this {type(model).__name__} has such sizes. Use "
                "mixed_precision='bf16', or other sizes"
            )
        for layer in swapped.values():
            layer.__class__ = Float8Linear
        left_out = ", ".join(sorted(layers.keys() - swapped.keys()))
        message = "fp8 by torch._scaled_mm in %d of %d linear layers%s"
        logger.info(message, len(swapped), len(layers), f"; in bf16: {left_out}" if left_out else "")
        return model


def swappable(module: nn.Module) -> bool:
    """Whether `module` is a plain nn.Linear with two sizes that are multiples of 16."""
    return type(module) is nn.Linear and not any(n % FP8.multiple for n in module.weight.shape)


def rounded_weights(model: nn.Module) -> set[int]:
    """ids of the weights that fp8 rounds, before or after their layers were swapped."""
    return {id(m.weight) for m in model.modules() if isinstance(m, Float8Linear) or swappable(m)}


class Float8Linear(nn.Linear):
    """`nn.Linear` with its product in forward and two products in backward in fp8; inputs are (..., in_features).

    `cached` is the rounded weight, its scale and the weight, from `round_once` to a step, and `cached_version` the
    weight's version then; None: each product rounds the weight.
    """

    cached: tuple[Tensor, Tensor, Tensor] | None = None
    cached_version: int = -1

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        weight, scale = None, None
        # A forward without gradients rounds by itself: evaluation may see weights that were swapped by `.data`.
        if torch.is_grad_enabled() and self.current():
            weight, scale, _ = self.cached  # type: ignore[misc]
        multiply: Callable[..., Tensor] = _Product.apply
        product = multiply(input.reshape(-1, self.in_features), self.weight, dtype, weight, scale)
        product = product.view(*input.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias.to(dtype)

    def current(self) -> bool:
        """Whether `cached` is of the present weight; `torch.func.functional_call` puts others there."""
        if self.cached is None or self.cached[2] is not self.weight:
            return False
        # torch.compile cannot read versions; `round_once` was called outside of it.
        return torch.compiler.is_compiling() or self.cached_version == self.weight._version

    def __getstate__(self) -> dict[str, Any]:
        """Leave `cached` out of copies and files: it is of this layer's weight."""
        return {name: value for name, value in vars(self).items() if name not in ("cached", "cached_version")}


def round_once(layers: Sequence[Float8Linear]) -> None:
    """Round the weights of `layers` that were written to since, for all products until `forget_rounded`."""
    for layer in layers:
        if not layer.current() and not layer.weight.is_meta:
            layer.cached_version = layer.weight._version
            weight, scale = rounded(layer.weight, FORWARD)
            # As a parameter: activation offload leaves it on the device.
            layer.cached = nn.Parameter(weight, requires_grad=False), scale, layer.weight


def forget_rounded(layers: Sequence[Float8Linear], *_: Any) -> None:
    """Called after an optimizer's step: torch's fused ones and our kernels do not count versions."""
    for layer in layers:
        layer.cached = None


class _Product(torch.autograd.Function):
    """``input @ weight.T``, of shape (rows, out). `weight8` and `scale` are the rounded weight, or None."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, dtype: torch.dtype, weight8: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        x, x_scale = rounded(input, FORWARD)
        ctx.dtypes = input.dtype, weight.dtype
        if weight8 is None or scale is None:
            # Save the weight and not its rounded copy: the weight exists anyway, or is gathered again.
            ctx.save_for_backward(x, x_scale, weight)
            weight8, scale = rounded(weight, FORWARD)
        else:
            ctx.save_for_backward(x, x_scale, weight8, scale)
        return _multiply(x, weight8.t(), x_scale, scale, dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, *scale = ctx.saved_tensors
        g, g_scale = rounded(grad, BACKWARD)
        input_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            w, w_scale = (weight, *scale) if scale else rounded(weight, FORWARD)
            input_grad = _multiply(g, _columns(w), g_scale, w_scale, grad.dtype).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            g, x = _padded(g), _padded(x)
            product = _multiply(g.t().contiguous(), _columns(x), g_scale, x_scale, grad.dtype)
            weight_grad = product.to(ctx.dtypes[1])
        return input_grad, weight_grad, None, None, None


def _padded(matrix: Tensor) -> Tensor:
    """`matrix` with rows of zeros up to a multiple of 16; sums over rows stay the same."""
    rows = -matrix.shape[0] % FP8.multiple
    if not rows:
        return matrix
    padded = nn.functional.pad(matrix.view(torch.uint8), (0, 0, 0, rows))  # zero has no bits set
    return padded.view(matrix.dtype)


def rounded(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`tensor` in fp8, contiguous, and the fp32 scale (0-dim) that multiplies it back to its range."""
    largest = torch.finfo(dtype).max
    wide = tensor.detach().float()
    peak = wide.abs().amax() if wide.numel() else wide.new_zeros(())
    scale = peak.clamp(min=1e-12) / largest
    return (wide / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


def _columns(tensor: Tensor) -> Tensor:
    """The matrix in column-major memory, as torch._scaled_mm needs its second operand."""
    return tensor.t().contiguous().t()


def _multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    if not a.shape[0]:
        return torch.zeros(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)
